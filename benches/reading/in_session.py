"""A Spark driver that reads everything several times; `sessions.py` measures it from outside.

Reads a job as a JSON line. Waits for a line before each read, and prints one after it, with the
seconds that it took and the rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import dcp_rs.spark

HERE = Path(__file__).resolve().parent
# Spark's own default for the memory of an executor is 1 GiB, and three of them share the machine.
EXECUTOR_MIB = 1024


def session(job: dict[str, Any]) -> SparkSession:
    """Starts Spark."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # Where executors find the cached source.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path[1:]])
    more = {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": f"{EXECUTOR_MIB}m",
        "spark.jars": job["jars"],
        # Of the connector, which takes them for the whole session.
        "spark.couchbase.connectionString": job["connection_string"],
        "spark.couchbase.username": job["username"],
        "spark.couchbase.password": job["password"],
        "spark.couchbase.implicitBucket": job["bucket"],
    }
    if not job["jars"]:
        more = {name: value for name, value in more.items() if "couchbase" not in name}
        del more["spark.jars"]
    return SparkSession.builder.master(job["master"]).config(map=more).getOrCreate()


def options(job: dict[str, Any]) -> dict[str, str]:
    """Returns the options of our own source."""
    return {
        "connectionString": job["connection_string"],
        "username": job["username"],
        "password": job["password"],
        "bucket": job["bucket"],
        "numPartitions": str(job["tasks"]),
    }


def source(spark: SparkSession, job: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the format and the options of the source that is measured."""
    tasks = str(job["tasks"])
    if job["source"] == "dcp_rs":
        dcp_rs.spark.register(spark)
        return "couchbase.dcp", options(job)
    if job["source"] == "connector":
        kept = {"numPartitions": tasks, "streamFrom": "fromBeginning", "streamMetaData": "full"}
        return "couchbase.kv", kept
    if job["source"] == "Parquet":
        return "parquet", {"path": f"{job['folder']}/rows"}
    import cached_source

    spark.dataSource.register(cached_source.CachedDataSource)
    rows = str(job["documents"])
    return "cached", {"batch": f"{job['folder']}/batch.arrow", "rows": rows, "tasks": tasks}


def prepare(spark: SparkSession, job: dict[str, Any]) -> None:
    """Writes the rows as Parquet, and a batch of them, for the sources that have them already."""
    import pyarrow as pa

    dcp_rs.spark.register(spark)
    rows = spark.read.format("couchbase.dcp").options(**options(job)).load()
    rows.write.parquet(f"{job['folder']}/rows")
    given = {name: job[name] for name in ("username", "password", "bucket")}
    with dcp_rs.connect(job["connection_string"], **given) as client:
        batch = next(iter(client.stream(until="now"))).to_pyarrow()
    held = pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema)
    with (
        pa.OSFile(f"{job['folder']}/batch.arrow", "wb") as file,
        pa.ipc.new_file(file, held.schema) as writer,
    ):
        writer.write_batch(held)


def read(spark: SparkSession, job: dict[str, Any], number: int) -> tuple[float, int]:
    """Reads everything once; returns the seconds and the rows."""
    kind, given = source(spark, job)
    schema = dcp_rs.spark.schema(options(job)) if kind in {"cached", "parquet"} else None
    began = time.perf_counter()
    if job["mode"] == "batch":
        reader = spark.read.format(kind).options(**given)
        frame = (reader if schema is None else reader.schema(schema)).load()
        frame.write.format("noop").mode("overwrite").save()
        return time.perf_counter() - began, job["documents"]
    streams = spark.readStream.format(kind).options(**given)
    changes = (streams if schema is None else streams.schema(schema)).load()
    query = (
        changes.writeStream.format("noop")
        .option("checkpointLocation", f"{job['folder']}/checkpoint-{os.getpid()}-{number}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    took = time.perf_counter() - began
    return took, sum(progress["numInputRows"] for progress in query.recentProgress)


def main() -> None:
    """Reads as often as there are lines."""
    job = json.loads(sys.stdin.readline())
    spark = session(job)
    if job["mode"] == "prepare":
        prepare(spark, job)
    print(json.dumps("ready"), flush=True)
    for number, _ in enumerate(sys.stdin):
        seconds, rows = read(spark, job, number)
        print(json.dumps({"seconds": seconds, "rows": rows}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
