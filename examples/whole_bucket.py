"""A whole bucket in DuckDB: a table for each collection, with columns that are found out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import duckdb

import dcp_rs


def main(connection_string: str, path: str) -> None:
    """Writes the documents of each collection to a table of its own, and shows its columns."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        done = dcp_rs.replicate(
            client,
            f"duckdb://{Path(path).resolve()}",
            tables="collection",
            document_schema="infer",  # new fields become columns later, too
            once=True,
        )
    print(f"{done.changes} changes in {done.commits} commits")
    with duckdb.connect(path, read_only=True) as database:
        for name in done.tables:
            table = database.table(name)
            columns = dict(zip(table.columns, table.types, strict=True))
            # Behind the columns that every table has.
            own = list(columns)[list(columns).index("timestamp") + 1 :]
            shown = ", ".join(f"{each} {columns[each]}" for each in own if each[0] != "_")
            print(f"{name}: {len(table)} documents, {shown or 'no columns yet'}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FILE")
    main(*sys.argv[1:])
