"""Fills a bucket with a hundred airlines, through the Couchbase SDK."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

COUNTRIES = ["Chile", "France", "Norway"]


def main(connection_string: str) -> None:
    """Writes the documents."""
    server, _, bucket = connection_string.rpartition("/")
    password = os.environ.get("COUCHBASE_PASSWORD", "password")
    login = PasswordAuthenticator("Administrator", password)
    cluster = Cluster(server, ClusterOptions(login))
    cluster.wait_until_ready(timedelta(seconds=10))
    airlines = cluster.bucket(bucket).default_collection()
    for n in range(100):
        document = {"name": f"Airline {n}", "country": COUNTRIES[n % 3], "n": n}
        airlines.upsert(f"airline_{n}", document)
    cluster.close()
    print("100 documents written")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR")
    main(*sys.argv[1:])
