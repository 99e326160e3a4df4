"""Measures a micro-batch of a few changes, compared with a source that already has its row.

`make bench-reading` runs it. Both have as many tasks per batch as the job says; the sink discards
the rows. Documents are written once, or the same ones again and again, so often that each batch
ends at a version that has been replaced: its tasks wait until the newer one is on disk.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import cached_source
import pyarrow as pa
from in_spark import session

import dcp_rs
import dcp_rs.spark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

WARM = 20
BATCHES = 40
PHASES = ("triggerExecution", "latestOffset", "queryPlanning", "addBatch")


def durations(frame: DataFrame, folder: str) -> dict[str, float]:
    """Median duration of batches, in milliseconds by phase."""
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", folder)
        .trigger(processingTime="0 seconds")
        .start()
    )
    told: dict[int, dict[str, int]] = {}
    while len(told) < WARM + BATCHES:
        time.sleep(0.2)
        if (error := query.exception()) is not None:
            raise error
        for progress in query.recentProgress:
            if "addBatch" in progress["durationMs"]:
                told[progress["batchId"]] = dict(progress["durationMs"])
    query.stop()
    samples = [told[batch] for batch in sorted(told)[WARM:]]
    return {part: statistics.median(each.get(part, 0) for each in samples) for part in PHASES}


@contextmanager
def writing(
    producer: dcp_rs.testing.EmbeddedCluster, keys: Iterator[str], count: int, every: float
) -> Iterator[None]:
    """Writes so many documents every so many seconds in the meantime."""
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(every):
            for key in itertools.islice(keys, count):
                producer.upsert(key, "{}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def main() -> None:
    """Measures; prints the median of each phase in each round, in milliseconds."""
    job = json.loads(sys.stdin.readline())
    spark = session()
    spark.dataSource.register(cached_source.CachedDataSource)
    figures: dict[str, list[dict[str, float]]] = {"cached": [], "dcp_rs": []}
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=job["vbuckets"]) as producer,
        tempfile.TemporaryDirectory() as folder,
    ):
        options = {
            "connectionString": producer.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "default",
        }
        # Enough that each task has some.
        tasks, count = job["tasks"], 8 * job["tasks"]
        numbers = itertools.cycle(range(count)) if job["again"] else itertools.count()
        every = 0.002 if job["again"] else 0.05
        keys = (f"key-{number}" for number in numbers)
        producer.upsert("key", "{}")
        schema = dcp_rs.spark.schema(options)
        path = str(Path(folder, "batch.arrow"))
        producer.persist()
        (partition,) = dcp_rs.spark.partitions(options)
        batch = pa.Table.from_batches(list(dcp_rs.spark.read_partition(partition))).to_batches()[0]
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        for round_number in range(job["rounds"]):
            at = f"{folder}/{round_number}"
            held = {"batch": path, "tasks": str(tasks)}
            cached = spark.readStream.format("cached").options(**held).schema(schema).load()
            with writing(producer, keys, count, every):
                figures["cached"].append(durations(cached, f"{at}-cached"))
                options["numPartitions"] = str(tasks)
                read = spark.readStream.format("couchbase.dcp").options(**options).load()
                figures["dcp_rs"].append(durations(read, f"{at}-read"))
    spark.stop()
    print(json.dumps(figures))


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    main()
