"""A bucket as a Polars data frame, with the fields of documents as columns."""

from __future__ import annotations

import os
import sys

import polars as pl

import dcp_rs


def main(connection_string: str) -> None:
    """Shows the countries with the most airlines."""
    with dcp_rs.connect(
        connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    ) as client:
        stream = client.stream(
            until="now",
            columns=["op", "key", "epoch", "seqno"],
            document_schema="name STRING, country STRING",
        )
        changes = pl.DataFrame(stream)
    documents = (
        changes.sort("epoch", "seqno")
        .unique("key", keep="last")
        .filter(pl.col("op") == "mutation")
        .select("key", "name", "country")
    )
    if documents.is_empty():
        print("no documents")
    countries = documents.group_by("country").len("airlines")
    for country, airlines in countries.sort("airlines", "country", descending=[True, False]).rows():
        print(f"{country}: {airlines}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR")
    main(*sys.argv[1:])
