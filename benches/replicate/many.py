"""Measures a table for each collection against one table of the same documents."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import dcp_rs
from dcp_rs.replication import open_target

_SCOPE = "bench"
PASSWORD = "password"  # noqa: S105 - of a cluster of this process


class Cost(NamedTuple):
    """What a replication took."""

    changes: int
    processor: float
    seconds: float
    commits: int
    peak: float
    """MiB of the process."""


def measure(
    cluster: dcp_rs.testing.EmbeddedCluster,
    tables: int,
    documents: int,
    urls: dict[str, str],
    runs: int,
) -> None:
    """Prints, for each target, the rates with many tables and with one, and their ratio."""
    cluster.create_scope(_SCOPE)
    for number in range(tables):
        cluster.create_collection(f"{_SCOPE}.c{number:03}")
    write(cluster, tables, range(documents))
    job = {
        "connection_string": cluster.connection_string, "bucket": cluster.bucket_name,
        "username": "Administrator", "password": PASSWORD,
    }  # fmt: skip
    print(f"{documents} documents of 256 B in {tables} collections, medians of {runs} runs")
    print("changes per second of the replicating process's processors (and per second)")
    print(f"{'target':16} {'':8} {f'{tables} tables':>24} {'one table':>24} {'ratio':>6}")
    for name, url in urls.items():
        sides: list[list[tuple[Cost, Cost]]] = [[], []]
        for run in range(runs):
            order = [0, 1] if run % 2 else [1, 0]
            folders = [Path(tempfile.mkdtemp(prefix="dcp_rs-bench-")) for _ in sides]
            try:
                # Those of a database of PostgreSQL stay there, so each run has names of its own.
                prefix = folders[0].name.replace("-", "_")
                all_of = {"collections": f"{_SCOPE}.*"}
                options = [all_of | {"tables": f"{prefix}_{{collection}}"}, all_of]
                ready = [url.format(folder=folder) for folder in folders]
                if name.startswith("postgres"):
                    ready[1] += f"{'&' if '?' in url else '?'}table={prefix}"
                mode = name.split("-")[1]
                loads = {at: replicated(job, ready[at], mode, options[at]) for at in order}
                write(cluster, tables, range(documents))
                updates = {at: replicated(job, ready[at], mode, options[at]) for at in order}
            finally:
                for folder in folders:
                    shutil.rmtree(folder)
            for at, side in enumerate(sides):
                side.append((loads[at], updates[at]))
        for step, label in enumerate(("load", "updates")):
            many, one = ([each[step] for each in side] for side in sides)
            rates = [_rates(each) for each in (many, one)]
            shown = "".join(f" {a:13.0f} ({b:8.0f})" for a, b in rates)
            commits = statistics.median(each.commits for each in many)
            print(
                f"{name:16} {label:8}{shown} {rates[0][0] / rates[1][0]:6.2f}"
                f"  {commits:.0f} commits",
                flush=True,
            )


def write(cluster: dcp_rs.testing.EmbeddedCluster, tables: int, numbers: range) -> None:
    """Writes documents of 256 B in turn to the collections."""
    text = "0123456789abcdef" * 16
    now = time.time_ns()
    for number in numbers:
        document = json.dumps({"n": number, "at": now + number, "text": text})
        collection = f"{_SCOPE}.c{number % tables:03}"
        cluster.upsert(f"key_{number:09}", document[:254] + '"}', collection=collection)
    cluster.persist()


def _rates(costs: list[Cost]) -> tuple[float, float]:
    return (
        statistics.median(each.changes / each.processor for each in costs),
        statistics.median(each.changes / each.seconds for each in costs),
    )


def connected(job: dict[str, Any]) -> dcp_rs.Client:
    """Connects to a source."""
    return dcp_rs.connect(
        job["connection_string"],
        bucket=job["bucket"],
        username=job["username"],
        password=job["password"],
    )


def replicated(job: dict[str, Any], url: str, mode: str, options: dict[str, Any]) -> Cost:
    """Replicates in a process of its own, so that the cluster's work is not counted.

    Args:
        job: How to connect.
        url: The target.
        mode: As in `dcp_rs.replicate`.
        options: More of its options.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (job, url, mode, options))


def _run(job: dict[str, Any], url: str, mode: Any, options: dict[str, Any]) -> Cost:
    # What targets import takes a second, which is not to be measured.
    open_target(url)
    with contextlib.suppress(ImportError):
        import pandas as pd  # noqa: F401
    with connected(job) as client:
        begun, processor = time.perf_counter(), time.process_time()
        done = dcp_rs.replicate(client, url, mode=mode, once=True, **options)
        spent = time.process_time() - processor
        seconds = time.perf_counter() - begun
    commits = sum(table.commits for table in done.tables.values()) or done.commits
    # What getrusage has is also that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return Cost(done.changes, spent, seconds, commits, peak)
