"""Reads a bucket in Spark from a source that writes like a node, compared with Parquet files.

`make bench-reading` runs it. `local[2]`, warm; the sink discards the rows. The files hold the same
rows, as Spark wrote them. The micro-batches read the whole bucket, a tenth at a time.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from in_spark import TASKS, WARM, seconds_of, session

import dcp_rs.spark

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

BATCHES = 10


def ways_to_read(
    spark: SparkSession, options: dict[str, str], files: str
) -> dict[str, Callable[[], DataFrame]]:
    """Returns the ways to get the rows, the reference first; writes its files."""
    schema = dcp_rs.spark.schema(options)

    def by_map() -> DataFrame:
        task = dcp_rs.spark.map_in_arrow(options)
        return spark.range(0, len(task), 1, len(task)).mapInArrow(task, schema)

    def by_source() -> DataFrame:
        return spark.read.format("couchbase.dcp").options(**options).load()

    by_source().write.parquet(files)
    return {
        "Parquet": lambda: spark.read.parquet(files),
        "`spark.read`": by_source,
        "`mapInArrow`": by_map,
    }


def read(spark: SparkSession, job: dict[str, Any], options: dict[str, str]) -> None:
    """Reads everything in each way; prints a line for each."""
    rows, rounds = job["documents"], job["rounds"]
    ways = ways_to_read(spark, options, str(Path(job["folder"], "rows.parquet")))
    for name, way in ways.items():
        if (count := way().count()) != rows:
            sys.exit(f"{name}: {count} rows came instead of {rows}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(WARM + rounds):
        for name, way in ways.items():
            took = seconds_of(way, nullcontext())
            print(f"  {round_number} {name}: {took:.2f} s", file=sys.stderr)
            if round_number >= WARM:
                seconds[name].append(took)
    reference = seconds["Parquet"]
    for name, samples in seconds.items():
        took = statistics.median(samples)
        pairs = zip(samples, reference, strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        print(f"| {name} | {took:.2f} | {rows / took / 1e6:.2f} M | {ratio:.1f} |")


def query(spark: SparkSession, options: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """Reads everything in micro-batches; returns the progress of those with rows."""
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    running = (
        changes.writeStream.format("noop")
        .option("checkpointLocation", folder)
        .trigger(availableNow=True)
        .start()
    )
    running.awaitTermination()
    return [dict(progress) for progress in running.recentProgress if progress["numInputRows"]]


def micro_batches(spark: SparkSession, job: dict[str, Any], options: dict[str, str]) -> None:
    """Reads everything in micro-batches of 1, 4 and 8 tasks; prints a line for each."""
    rows, rounds = job["documents"], job["rounds"]
    # Milliseconds of each batch, by round.
    told: dict[int, list[list[int]]] = {1: [], 4: [], 8: []}
    for round_number in range(1 + max(1, rounds // 2)):
        for tasks, samples in told.items():
            wanted = {
                **options,
                "numPartitions": str(tasks),
                "maxOffsetsPerTrigger": str(rows // BATCHES),
            }
            folder = str(Path(job["folder"], f"{tasks}-{round_number}"))
            batches = query(spark, wanted, folder)
            if (count := sum(batch["numInputRows"] for batch in batches)) != rows:
                sys.exit(f"{tasks} tasks: {count} rows came instead of {rows}")
            took = [batch["durationMs"]["triggerExecution"] for batch in batches]
            print(f"  {round_number} {tasks} tasks: {took} ms", file=sys.stderr)
            if round_number:
                samples.append(took)
    for tasks, samples in told.items():
        first, last = (statistics.median(took[at] for took in samples) for at in (0, -1))
        speed = rows / statistics.median(sum(took) for took in samples) / 1e3
        name = f"{tasks} task{'s' * (tasks > 1)}"
        print(f"| {name} | {first:.0f} ms | {last:.0f} ms | {speed:.2f} M |")


def main() -> None:
    """Measures; prints the lines of one table."""
    job = json.loads(sys.stdin.readline())
    options = {
        "connectionString": job["connection_string"],
        "username": job["username"],
        "password": job["password"],
        "bucket": job["bucket"],
        "numPartitions": str(TASKS),
    }
    spark = session()
    (micro_batches if job["batches"] else read)(spark, job, options)
    spark.stop()


if __name__ == "__main__":
    main()
