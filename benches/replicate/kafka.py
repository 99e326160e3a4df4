"""Measures the first load of a bucket into a Kafka topic, in processor seconds of the replication.

The embedded cluster is in a process of its own, and the broker too: neither counts.

Usage: benches/replicate/kafka.py BROKERS [--documents N] [--size BYTES] [--options TEXT] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import uuid
from typing import TYPE_CHECKING

import dcp_rs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PASSWORD = "measured"  # noqa: S105 - of a cluster that is there for a minute


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("brokers")
    parser.add_argument("--documents", type=int, default=1_001_006)
    parser.add_argument("--size", type=int, default=256, help="bytes of a document")
    parser.add_argument("--options", default="headers=one", help="options of the URL")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, options.documents, options.size))
    process.start()
    try:
        connection = ours.recv()
        # The first run loads modules, and does not count.
        for number in range(options.runs + 1):
            measured = _measure(connection, options)
            if number:
                print(measured, flush=True)
    finally:
        ours.send(None)
        process.join()


def _serve(pipe: Connection, documents: int, size: int) -> None:
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1024, password=_PASSWORD) as cluster:
        text = "x" * max(size - 30, 0)
        for number in range(documents):
            cluster.upsert(f"key_{number}", json.dumps({"n": number, "text": text}).encode())
        pipe.send(cluster.connection_string)
        pipe.recv()


def _measure(connection: str, options: argparse.Namespace) -> str:
    topic = f"measured-{uuid.uuid4().hex[:8]}"
    url = f"kafka://{options.brokers}?topic={topic}&name={topic}&{options.options}"
    with dcp_rs.connect(
        connection, bucket="default", username="Administrator", password=_PASSWORD
    ) as client:
        wall, processor = time.perf_counter(), time.process_time()
        done = dcp_rs.replicate(client, url, once=True)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return (
        f"{done.changes} documents of {options.size} B: {wall:.1f} s,"
        f" {processor:.2f} processor seconds, {done.changes / processor / 1000:.0f} k/s per core"
    )


if __name__ == "__main__":
    main()
