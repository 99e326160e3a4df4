"""Reads a bucket in Spark, beside a source that only repeats one batch of the same shape.

`make bench-reading` runs it. `local[2]`, warm, the sink keeps nothing. The cached source is what
Spark itself allows: Python workers that hand the JVM a batch they have. Source and producer are on
the same cores, since Spark wants both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import SparkSession

import dcp_rs.spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

TASKS = 4


def first_batch(job: dict[str, Any]) -> pa.RecordBatch:
    """A batch as the source makes them."""
    options = {name: job[name] for name in ("username", "password", "bucket")}
    with dcp_rs.connect(job["connection_string"], **options) as client:
        return next(iter(client.stream(until="now"))).to_pyarrow()


def cached(batch: pa.RecordBatch, rows: int) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
    """A task that repeats a batch until it has given its share of the rows."""

    def task(partitions: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        for partition in partitions:
            for _ in range(partition.num_rows):
                left = rows // TASKS
                while left > 0:
                    yield batch.slice(0, min(left, batch.num_rows))
                    left -= batch.num_rows

    return task


def frames(spark: SparkSession, job: dict[str, Any], rows: int) -> dict[str, Any]:
    """The ways to get the rows, the reference first."""
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

    # The names of the columns are the same, so the batch fits the schema.
    held = pa.RecordBatch.from_arrays(batch.columns, names=[field.name for field in schema])
    return {
        "cached batches": lambda: spark.range(0, TASKS, 1, TASKS).mapInArrow(
            cached(held, rows), schema
        ),
        "mapInArrow": by_map,
        "spark.read": lambda: spark.read.format("couchbase.dcp").options(**options).load(),
    }


def main() -> None:
    """Measures; prints JSON."""
    job = json.loads(sys.stdin.readline())
    rows, rounds = job["documents"], job["rounds"]
    # Its workers would be the system's Python otherwise, without the packages of this one.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    dcp_rs.spark.register(spark)
    ways = frames(spark, job, rows)
    for name, way in ways.items():
        if (count := way().count()) != rows:
            sys.exit(f"{name}: {count} rows came instead of {rows}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way().write.format("noop").mode("overwrite").save()
            if round_number:
                seconds[name].append(time.perf_counter() - started)
    spark.stop()
    reference = seconds["cached batches"]
    for name, samples in seconds.items():
        pairs = zip(reference, samples, strict=True)
        ratio = statistics.median(other / own for other, own in pairs)
        speed = rows / statistics.median(samples) / 1e6
        print(f"| {name} | {speed:.2f} M | {ratio:.0%} |")


if __name__ == "__main__":
    main()
