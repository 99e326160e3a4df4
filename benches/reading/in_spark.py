"""Reads a bucket in Spark, compared with sources that only repeat a batch of the same shape.

`make bench-reading` runs it. `local[2]`, warm; the sink discards the rows. The cached sources are
the upper limit of Spark itself: Python workers that pass a cached batch to the JVM, once through
mapInArrow and once through a data source. Ours shares the two cores with the producer, so each
cached source runs twice: while the same producer sends the same documents to a plain drain, and
while a plain sender sends as many bytes to a plain receiver, which costs less. `in_batches`
measures the minimum cost of a micro-batch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cached_source
import pyarrow as pa
from pyspark.sql import SparkSession

import dcp_rs.spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pyspark.sql import DataFrame

TASKS = 4
# Warm-up rounds until the JVM has compiled the code.
WARM = 2
HERE = Path(__file__).resolve().parent


def first_batch(job: dict[str, Any]) -> pa.RecordBatch:
    """Returns a batch as the source makes them."""
    options = {name: job[name] for name in ("username", "password", "bucket")}
    with dcp_rs.connect(job["connection_string"], **options) as client:
        return next(iter(client.stream(until="now"))).to_pyarrow()


def cached(batch: pa.RecordBatch, rows: int) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
    """Returns a task that repeats a batch until it has produced its share of the rows."""

    def task(partitions: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        for partition in partitions:
            for _ in range(partition.num_rows):
                left = rows // TASKS
                while left > 0:
                    yield batch.slice(0, min(left, batch.num_rows))
                    left -= batch.num_rows

    return task


@contextmanager
def drained_load(job: dict[str, Any]) -> Iterator[None]:
    """Drains everything from the producer meanwhile, and waits for the end."""
    pipe = subprocess.PIPE
    drain = subprocess.Popen([job["program"], "drain", "0"], stdin=pipe, stdout=pipe, text=True)
    drain.stdin.write(json.dumps(job) + "\n")
    drain.stdin.write("go\n")
    drain.stdin.flush()
    yield
    told, _ = drain.communicate()
    if drain.returncode or json.loads(told)["changes"] != job["documents"]:
        sys.exit(f"the plain drain failed: {told}")


@contextmanager
def plain_load(size: int) -> Iterator[None]:
    """Sends this many bytes between two processes meanwhile, and waits for the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        drain = subprocess.Popen([sys.executable, str(HERE / "plain.py"), "drain", str(port)])
        connection, _ = server.accept()
        with connection:
            command = [sys.executable, str(HERE / "plain.py"), "send", str(connection.fileno())]
            sender = subprocess.Popen(
                [*command, str(size)], pass_fds=[connection.fileno()], stdin=subprocess.PIPE
            )
    # Both wait until they have started.
    sender.stdin.write(b"go\n")
    sender.stdin.flush()
    yield
    if sender.wait() or drain.wait():
        sys.exit("the plain sender failed")


def frames(spark: SparkSession, job: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns the ways to get the rows, the reference first."""
    options = {
        "connectionString": job["connection_string"],
        "username": job["username"],
        "password": job["password"],
        "bucket": job["bucket"],
        "numPartitions": str(TASKS),
    }
    batch = first_batch(job)
    schema = dcp_rs.spark.schema(options)

    def by_map() -> DataFrame:
        task = dcp_rs.spark.map_in_arrow(options)
        return spark.range(0, len(task), 1, len(task)).mapInArrow(task, schema)

    def by_source() -> DataFrame:
        kept = {"batch": str(path), "rows": str(rows), "tasks": str(TASKS)}
        return spark.read.format("cached").options(**kept).schema(schema).load()

    # The column names are equal, so the batch fits the schema.
    held = pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema)
    path = Path(job["folder"], "batch.arrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, held.schema) as writer:
        writer.write_batch(held)
    size = int(held.nbytes / held.num_rows * rows)
    spark.dataSource.register(cached_source.CachedDataSource)
    return {
        "mapInArrow": (
            lambda: spark.range(0, TASKS, 1, TASKS).mapInArrow(cached(held, rows), schema),
            by_map,
            size,
        ),
        "spark.read": (
            by_source,
            lambda: spark.read.format("couchbase.dcp").options(**options).load(),
            size,
        ),
    }


def seconds_of(way: Callable[[], DataFrame], beside: AbstractContextManager[None]) -> float:
    """Returns the seconds to read everything without a sink, beside other work."""
    with beside:
        started = time.perf_counter()
        way().write.format("noop").mode("overwrite").save()
        return time.perf_counter() - started


def session() -> SparkSession:
    """Starts Spark."""
    # Its workers would use the system's Python otherwise, without our packages.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    dcp_rs.spark.register(spark)
    return spark


def main() -> None:
    """Measures; prints the seconds of each way in each round."""
    job = json.loads(sys.stdin.readline())
    rows, rounds = job["documents"], job["rounds"]
    spark = session()
    ways = frames(spark, job, rows)
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for name, (cached_way, way, _) in ways.items():
        if (count := way().count()) != rows or cached_way().count() != rows:
            sys.exit(f"{name}: {count} rows came instead of {rows}")
    for round_number in range(rounds + WARM):
        for name, (cached_way, way, size) in ways.items():
            round_seconds = (
                seconds_of(cached_way, drained_load(job)),
                seconds_of(cached_way, plain_load(size)),
                seconds_of(way, nullcontext()),
            )
            print(f"  {round_number} {name}: {round_seconds}", file=sys.stderr)
            if round_number >= WARM:
                seconds[name].append(round_seconds)
    spark.stop()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
