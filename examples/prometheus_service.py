"""A service that reads changes and exports its metrics to Prometheus."""

from __future__ import annotations

import os
import sys

from prometheus_client import REGISTRY, start_http_server

import dcp_rs
from dcp_rs.metrics import PrometheusCollector


def main(connection_string: str, port: str) -> None:
    """Reads until Ctrl-C."""
    with (
        dcp_rs.connect(
            connection_string,
            username="Administrator",
            password=os.environ.get("COUCHBASE_PASSWORD", "password"),
        ) as client,
        client.stream(columns=["op", "key"]) as stream,
    ):
        REGISTRY.register(PrometheusCollector(stream, name="search"))
        server, _ = start_http_server(int(port), "127.0.0.1")
        print(f"http://localhost:{server.server_port}/metrics", flush=True)
        for batch in stream:
            for row in batch.rows():
                print(row["op"], row["key"], flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR PORT")
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped")
