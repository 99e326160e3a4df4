"""A folder of Parquet files with a bucket's changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow.dataset as ds

import dcp_rs


def main(connection_string: str, folder: str) -> None:
    """Writes the changes, and counts them."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        done = dcp_rs.replicate(
            client, f"parquet://{Path(folder).resolve()}", mode="log", once=True
        )
    print(f"{done.changes} changes in {done.commits} commits")
    files = ds.dataset(folder, format="parquet")
    print(f"{files.count_rows()} changes in {len(files.files)} files")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FOLDER")
    main(*sys.argv[1:])
