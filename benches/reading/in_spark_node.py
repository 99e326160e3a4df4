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
    told: dict[int, list[dict[str, Any]]] = {1: [], 4: [], 8: []}
    for round_number in range(1 + max(1, rounds // 2)):
        for tasks, batches in told.items():
            wanted = {
                **options,
                "numPartitions": str(tasks),
                "maxRowsPerTrigger": str(rows // BATCHES),
            }
            folder = str(Path(job["folder"], f"{tasks}-{round_number}"))
            of_round = query(spark, wanted, folder)
            if (count := sum(batch["numInputRows"] for batch in of_round)) != rows:
                sys.exit(f"{tasks} tasks: {count} rows came instead of {rows}")
            if round_number:
                batches.extend(of_round)
            took = sum(batch["durationMs"]["triggerExecution"] for batch in of_round)
            print(f"  {round_number} {tasks} tasks: {took / 1e3:.2f} s", file=sys.stderr)
    for tasks, batches in told.items():
        took, in_tasks = (
            statistics.median(batch["durationMs"][part] for batch in batches)
            for part in ("triggerExecution", "addBatch")
        )
        size = statistics.median(batch["numInputRows"] for batch in batches)
        name = f"{tasks} task{'s' * (tasks > 1)}"
        print(f"| {name} | {took:.0f} ms | {in_tasks:.0f} ms | {size / took / 1e3:.2f} M |")


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
