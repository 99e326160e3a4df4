"""An Iceberg log of a bucket's changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog

import dcp_rs


def main(connection_string: str, folder: str) -> None:
    """Writes the changes, and counts them by kind."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        url = f"iceberg://{Path(folder).resolve()}?table=travel.changes"
        done = dcp_rs.replicate(client, url, mode="log", once=True)
    print(f"{done.changes} changes in {done.commits} commits")
    catalog = SqlCatalog("dcp_rs", uri=f"sqlite:///{Path(folder).resolve()}/catalog.db")
    changes = catalog.load_table("travel.changes").scan(selected_fields=("op",)).to_arrow()
    for each in changes["op"].value_counts().to_pylist():
        print(f"{each['values']}: {each['counts']}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FOLDER")
    main(*sys.argv[1:])
