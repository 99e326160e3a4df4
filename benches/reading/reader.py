"""One reader in its own process.

Runs the job given as a JSON line on standard input, prints its measurements as a JSON line, and
waits for the end of its input.

`batches` reads a stream to now; `long` also samples time and memory; `rows` converts batches read
before to tuples and dicts; `wire` measures the age of each change from a paced sender; `latency`
writes documents one by one and waits for each to be received.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import dcp_rs


def connect(job: dict[str, Any]) -> dcp_rs.Client:
    """Connects according to the job."""
    return dcp_rs.connect(
        job["connection_string"],
        bucket=job["bucket"],
        username=job["username"],
        password=job["password"],
        tls_ca=job.get("ca"),
        **job.get("connection", {}),
    )


def batches(job: dict[str, Any]) -> dict[str, Any]:
    """Reads to now; measures from the first stream request to the end of the last stream."""
    with connect(job) as client:
        options = job.get("options", {})
        started = time.perf_counter()
        rows = count = 0
        with client.stream(until="now", **options) as stream:
            for batch in stream:
                rows += batch.num_rows
                count += 1
        seconds = time.perf_counter() - started
    return {"changes": rows, "batches": count, "seconds": seconds}


def long(job: dict[str, Any]) -> dict[str, Any]:
    """Reads to now, and records the time and memory of the process at each tenth."""
    tenth = job["documents"] // 10
    parts: list[dict[str, float]] = []
    with connect(job) as client, client.stream(until="now") as stream:
        changes, started = 0, time.perf_counter()
        for batch in stream:
            changes += batch.num_rows
            if changes >= tenth * (len(parts) + 1):
                parts.append(
                    {
                        "changes": changes,
                        "seconds": time.perf_counter() - started,
                        "cpu": time.process_time(),
                        "resident": resident(),
                    }
                )
        seconds = time.perf_counter() - started
    return {"changes": changes, "seconds": seconds, "parts": parts}


def resident() -> float:
    """Returns the current resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def rows(job: dict[str, Any]) -> dict[str, Any]:
    """Measures converting in-memory batches to rows, by method; the rows are discarded."""
    with connect(job) as client, client.stream(until="now") as stream:
        held = list(stream)
    ways = {
        "tuples": lambda batch: batch.tuples(),
        "dicts": lambda batch: batch.rows(),
        "pyarrow": lambda batch: iter(batch.to_pyarrow().to_pylist()),
    }
    seconds = {}
    for name, way in ways.items():
        started = time.perf_counter()
        made = sum(1 for batch in held for _ in way(batch))
        seconds[name] = (time.perf_counter() - started) / made
    return {"changes": made, "seconds_per_row": seconds, "seconds": sum(seconds.values())}


def wire(job: dict[str, Any]) -> dict[str, Any]:
    """Measures the time from the socket to Python; the end of each value is its send time."""
    spans, changes = [], 0
    with (
        connect(job) as client,
        # Without an end, as where latency matters.
        client.stream(batch=dcp_rs.BatchPolicy(linger=job["linger"])) as stream,
    ):
        for batch in stream:
            arrived = time.time_ns()
            sent = (row["value"][-22:-2] for row in batch.rows())
            spans += [(arrived - int(moment)) / 1e9 for moment in sent]
            changes += batch.num_rows
            if changes >= job["documents"]:
                break
    return {"changes": changes, "seconds": sum(spans), "latency": percentiles(spans)}


def latency(job: dict[str, Any]) -> dict[str, Any]:
    """Measures the time from a write to its batch, including the embedded producer."""
    spans = []
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=16) as producer,
        producer.connect() as client,
        client.stream(start="latest", batch=dcp_rs.BatchPolicy(linger=0)) as stream,
    ):
        changes = iter(stream)
        for number in range(job["writes"] + WARM_UP):
            time.sleep(0.0005)
            started = time.perf_counter()
            producer.upsert(f"key-{number}", b"x" * 256)
            next(changes)
            spans.append(time.perf_counter() - started)
    return {"changes": len(spans), "seconds": sum(spans), "latency": percentiles(spans)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Returns the percentiles of all samples but the first, which warm up."""
    spans = sorted(seconds[min(WARM_UP, len(seconds) // 10) :])
    return {name: spans[int(len(spans) * part)] for name, part in PARTS.items()}


WARM_UP = 200
PARTS = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
WORK = {"batches": batches, "long": long, "rows": rows, "wire": wire, "latency": latency}


def main() -> None:
    """Runs one job."""
    job = json.loads(sys.stdin.readline())
    measured = WORK[job["work"]](job)
    print(json.dumps({"line": "counted", **measured}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
