"""A Delta table of a bucket's documents."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deltalake

import dcp_rs


def main(connection_string: str, folder: str) -> None:
    """Writes the documents, and counts them."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        done = dcp_rs.replicate(client, f"delta://{Path(folder).resolve()}", once=True)
    print(f"{done.changes} changes in {done.commits} commits")
    table = deltalake.DeltaTable(folder)
    # Not to_pyarrow_table(): pyarrow may still be freeing its files at exit, and abort Python.
    query = deltalake.QueryBuilder().register("replica", table)
    keys = query.execute("SELECT key FROM replica").read_all()
    print(f"{keys.num_rows} documents in version {table.version()}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FOLDER")
    main(*sys.argv[1:])
