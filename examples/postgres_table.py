"""A PostgreSQL table with the fields of documents as columns."""

from __future__ import annotations

import os
import sys

import adbc_driver_postgresql.dbapi as adbc

import dcp_rs


def main(connection_string: str, uri: str) -> None:
    """Writes the documents, and shows some."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        mark = "&" if "?" in uri else "?"
        done = dcp_rs.replicate(
            client, f"{uri}{mark}table=airlines", document_schema="name STRING, n BIGINT", once=True
        )
    print(f"{done.changes} changes in {done.commits} commits")
    with adbc.connect(uri) as database, database.cursor() as cursor:
        cursor.execute("SELECT key, name, n FROM airlines ORDER BY n LIMIT 3")
        for key, name, n in cursor.fetchall():
            print(f"{key}: {name}, {n}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR URI")
    main(*sys.argv[1:])
