"""A whole bucket in DuckDB: a table for each collection."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dcp_rs


def main(connection_string: str, path: str) -> None:
    """Writes the documents of each collection to a table of its own, and names them."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        done = dcp_rs.replicate(
            client, f"duckdb://{Path(path).resolve()}", tables="collection", once=True
        )
    print(f"{done.changes} changes in {done.commits} commits")
    for name, table in done.tables.items():
        print(f"{name}: generation {table.generation}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FILE")
    main(*sys.argv[1:])
