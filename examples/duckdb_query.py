"""A query of DuckDB over a bucket as it is now, without a table in between."""

from __future__ import annotations

import os
import sys

import duckdb
import pyarrow as pa

import dcp_rs


def main(connection_string: str) -> None:
    """Counts the airlines of each country."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        stream = client.stream(
            until="now",
            columns=["op", "key", "vbucket", "epoch", "seqno"],
            document_schema="name STRING, country STRING",
        )
        # DuckDB takes batches while they come: the whole bucket is never in memory.
        changes = pa.RecordBatchReader.from_stream(stream)
        database = duckdb.connect()
        database.register("changes", changes)
        found = database.execute("""
            WITH newest AS (
                SELECT * FROM changes
                QUALIFY row_number() OVER (PARTITION BY key ORDER BY epoch DESC, seqno DESC) = 1
            )
            SELECT country, count(*) FROM newest WHERE op = 'mutation'
            GROUP BY country ORDER BY count(*) DESC, country
        """)
        countries = found.fetchall()
    for country, airlines in countries:
        print(f"{country}: {airlines}")
    if not countries:
        print("no documents")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR")
    main(*sys.argv[1:])
