"""A DuckDB table of a bucket's documents."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import duckdb

import dcp_rs


def main(connection_string: str, path: str) -> None:
    """Writes the documents, and counts them by collection."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        done = dcp_rs.replicate(
            client, f"duckdb://{Path(path).resolve()}?table=documents", once=True
        )
    print(f"{done.changes} changes in {done.commits} commits")
    with duckdb.connect(path, read_only=True) as database:
        rows = database.execute(
            "SELECT scope, collection, count(*) FROM documents GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    for scope, collection, count in rows:
        print(f"{scope}.{collection}: {count} documents")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FILE")
    main(*sys.argv[1:])
