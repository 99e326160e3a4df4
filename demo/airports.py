"""Reads a Couchbase bucket's changes into a Spark table, on one machine, without a server.

1. An embedded cluster of two nodes starts in this process.
2. The official Couchbase SDK loads some 28,000 airports into it, then replaces some, removes some
   and sets an expiry on others.
3. Spark reads every change, in tasks that run the Rust engine, and writes Parquet.
4. The latest change of every key is compared with what the SDK reads back: every document.
5. A streaming query reads the changes again, in micro-batches into Parquet. The SDK changes some
   documents, and the restarted query continues from its checkpoint. Its table is compared too.
6. The same stream is read once more in plain Python, through the Arrow C stream.

Usage: demo/airports.py [--documents N] [--parquet FOLDER] [--alter-one]

Exits with 1 if any document differs. `--alter-one` silently changes one document to show that the
comparison detects it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import airportsdata
import pyarrow as pa
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import DocumentNotFoundException
from couchbase.options import ClusterOptions, GetMultiOptions, UpsertMultiOptions
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark programs give it
from tqdm import tqdm

import dcp_rs
import dcp_rs.spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from couchbase.collection import Collection
    from pyspark.sql import DataFrame

BUCKET = "airports"
USERNAME = "demo"
# Documents per request to the SDK, which pipelines them.
CHUNK = 1000
FAR_AWAY = timedelta(days=365)
# Maximum changes per micro-batch.
LIMIT = 10_000


@dataclass
class Loaded:
    """Changes made to the bucket."""

    keys: list[str]
    """Every key ever written."""
    replaced: int = 0
    removed: int = 0
    expiring: int = 0


@dataclass
class Comparison:
    """Result of the comparison."""

    documents: int
    """Keys whose document both sides have, and which are equal."""
    absent: int
    """Keys that both sides say are removed."""
    differences: list[str]
    """What differs, a line per key."""


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """Prints a step and how long it took."""
    print(f"\n{number}. {title}", flush=True)
    started = time.monotonic()
    yield
    print(f"   {time.monotonic() - started:.1f} s", flush=True)


def chunked(things: Iterable[Any]) -> Iterator[list[Any]]:
    """Splits into lists of at most CHUNK."""
    rest = iter(things)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def progress(things: Iterable[Any] | None = None, **options: Any) -> Any:
    """Shows a progress bar on a terminal."""
    return tqdm(things, disable=None, leave=False, ncols=80, **options)


# ----- 2: the official SDK -----


@contextmanager
def sdk_collection(hosts: str, password: str) -> Iterator[Collection]:
    """Opens the bucket's default collection with the official SDK."""
    authenticator = PasswordAuthenticator(USERNAME, password)
    sdk = Cluster(hosts, ClusterOptions(authenticator))
    try:
        yield sdk.bucket(BUCKET).default_collection()
    finally:
        sdk.close()


def load(collection: Collection, airports: Mapping[str, Mapping[str, Any]]) -> Loaded:
    """Writes all airports, then replaces some, removes some and lets some expire in a year."""
    documents = {f"airport_{code}": dict(airport) for code, airport in airports.items()}
    loaded = Loaded(keys=list(documents))
    chunks = list(chunked(documents.items()))
    for chunk in progress(chunks, desc="   upsert", unit_scale=CHUNK, unit="doc"):
        _must(collection.upsert_multi(dict(chunk)))

    replacements = {
        key: {**documents[key], "elevation_m": round(documents[key]["elevation"] * 0.3048, 1)}
        for key in loaded.keys[::10]
    }
    for chunk in chunked(replacements.items()):
        _must(collection.replace_multi(dict(chunk)))
    expiring = {key: documents[key] for key in loaded.keys[3::20]}
    for chunk in chunked(expiring.items()):
        _must(collection.upsert_multi(dict(chunk), UpsertMultiOptions(expiry=FAR_AWAY)))
    removed = loaded.keys[7::50]
    for keys in chunked(removed):
        _must(collection.remove_multi(keys))

    # The three do not overlap: their indexes differ in the last digit.
    loaded.replaced, loaded.removed = len(replacements), len(removed)
    loaded.expiring = len(expiring)
    return loaded


def _must(result: Any) -> None:
    if not result.all_ok:
        raise RuntimeError(f"the SDK could not write: {next(iter(result.exceptions.values()))}")


def change(collection: Collection, keys: list[str]) -> int:
    """Replaces some documents and removes others; returns their numbers."""
    replaced = {key: {"closed": True} for key in keys[::40]}
    for chunk in chunked(replaced.items()):
        _must(collection.upsert_multi(dict(chunk)))
    # Disjoint from those removed and replaced before.
    removed = [key for key in keys[17::100] if key not in replaced]
    for chunk in chunked(removed):
        _must(collection.remove_multi(chunk))
    return len(replaced) + len(removed)


# ----- 3: Spark -----


def spark_session() -> SparkSession:
    """Starts Spark on two cores, with minimal logging."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dcp_rs demo")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def write_parquet(spark: SparkSession, options: dict[str, object], folder: str) -> int:
    """Reads the bucket from the beginning to now and writes its changes; returns the task count."""
    task = dcp_rs.spark.map_in_arrow(options)
    n = len(task)
    changes = spark.range(0, n, 1, n).mapInArrow(task, dcp_rs.spark.schema(options))
    with _task_progress(spark, n):
        changes.write.mode("overwrite").parquet(folder)
    return n


@contextmanager
def _task_progress(spark: SparkSession, total: int) -> Iterator[None]:
    """Shows the number of finished tasks of the running job."""
    tracker = spark.sparkContext.statusTracker()
    done = threading.Event()
    with progress(total=total, desc="   Spark", unit="task") as bar:

        def watch() -> None:
            while not done.wait(0.2):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                bar.update(sum(stage.numCompletedTasks for stage in stages if stage) - bar.n)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def run_query(
    spark: SparkSession, options: dict[str, object], folder: str, attempts: int = 5
) -> list[int]:
    """Runs a streaming query from its checkpoint to now; returns its batch sizes."""
    changes = (
        spark.readStream.format("couchbase.dcp")
        .options(**{name: str(value) for name, value in options.items()})
        .option("maxOffsetsPerTrigger", LIMIT)
        .load()
    )
    query = (
        changes.writeStream.format("parquet")
        .option("path", f"{folder}/rows")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        # Spark allows its Python processes only ten seconds to start, even on a busy machine.
        if attempts == 1 or "failed to connect back" not in str(error):
            raise
        return run_query(spark, options, folder, attempts - 1)
    return [progress["numInputRows"] for progress in query.recentProgress]


def latest_per_key(changes: DataFrame) -> DataFrame:
    """Keeps the last change of each key. Seqnos are reused after a rollback, epochs are not."""
    newest_first = Window.partitionBy("vbucket", "key").orderBy(F.desc("epoch"), F.desc("seqno"))
    return (
        changes.where("op <> 'rollback'")
        .withColumn("newest", F.row_number().over(newest_first))
        .where("newest = 1")
        .drop("newest")
    )


# ----- 4: the check -----


def compare(changes: DataFrame, collection: Collection, keys: Iterable[str]) -> Comparison:
    """Compares the latest change of every key with what the SDK reads back.

    Args:
        changes: The table of changes.
        collection: The collection to read with the SDK.
        keys: Every key ever written. Keys found only in the table are compared too.
    """
    table = {
        row.key: bytes(row.value) if row.op == "mutation" else None
        for row in latest_per_key(changes).select("key", "op", "value").collect()
    }
    comparison = Comparison(documents=0, absent=0, differences=[])
    everything = sorted(set(keys) | set(table))
    chunks = list(chunked(everything))
    for chunk in progress(chunks, desc="   compare", unit_scale=CHUNK, unit="doc"):
        answers = collection.get_multi(chunk, GetMultiOptions(return_exceptions=True))
        for key in chunk:
            _compare_one(
                key, answers.results.get(key), answers.exceptions.get(key), table, comparison
            )
    return comparison


def _compare_one(
    key: str,
    result: Any,
    error: Exception | None,
    table: dict[str, bytes | None],
    comparison: Comparison,
) -> None:
    if result is None and not isinstance(error, DocumentNotFoundException):
        raise RuntimeError(f"the SDK could not read {key}") from error
    if key not in table:
        comparison.differences.append(f"{key}: written, but no change of it is in the table")
    elif result is None and table[key] is None:
        comparison.absent += 1
    elif result is None:
        comparison.differences.append(f"{key}: in the table, but the SDK finds it removed")
    elif (value := table[key]) is None:
        comparison.differences.append(f"{key}: removed in the table, but the SDK reads it")
    elif json.loads(value) != result.content_as[dict]:
        comparison.differences.append(f"{key}: the table's document is not what the SDK reads")
    else:
        comparison.documents += 1


def print_table(changes: DataFrame, tasks: int, seconds: float) -> None:
    """Prints the contents of the table."""
    by_op = sorted((row["op"], row["count"]) for row in changes.groupBy("op").count().collect())
    documents = latest_per_key(changes).where("op = 'mutation'")
    country = F.get_json_object(F.col("value").cast("string"), "$.country").alias("country")
    by_country = documents.groupBy(country).count().orderBy(F.desc("count"), "country")
    rows = sum(count for _, count in by_op)
    print("\n   changes by op")
    for op, count in by_op:
        print(f"     {op:<12}{count:>8,}")
    print("   documents by country")
    for row in by_country.limit(8).collect():
        print(f"     {row['country']:<12}{row['count']:>8,}")
    print(f"     (of {by_country.count()} countries)")
    print(f"   rows/s: {rows / seconds:,.0f}  ({rows:,} rows, {tasks} tasks, Parquet included)")


def told(comparison: Comparison) -> str:
    """Prints the result of a comparison."""
    differences = [f"   DIFFERENT  {difference}\n" for difference in comparison.differences[:20]]
    return "".join(differences) + (
        f"   {comparison.documents:,} documents equal, {comparison.absent:,} removed on "
        f"both sides, {len(comparison.differences):,} different"
    )


# ----- main program -----


def run(arguments: argparse.Namespace, folder: str) -> int:
    """Runs the six steps; returns the exit code."""
    password = secrets.token_urlsafe(12)
    with step(1, "an embedded cluster: 2 nodes, 64 vBuckets, SCRAM"):
        cluster = dcp_rs.testing.EmbeddedCluster(
            nodes=2, vbuckets=64, bucket=BUCKET, username=USERNAME, password=password
        )
    with cluster, sdk_collection(cluster.connection_string, password) as collection:
        with step(2, f"loading airports through the Couchbase SDK ({cluster.connection_string})"):
            airports = dict(islice(airportsdata.load("ICAO").items(), arguments.documents))
            loaded = load(collection, airports)
            print(
                f"   {len(loaded.keys):,} documents written, {loaded.replaced:,} replaced, "
                f"{loaded.expiring:,} given an expiry, {loaded.removed:,} removed"
            )

        options: dict[str, object] = {
            "connectionString": cluster.connection_string,
            "username": USERNAME,
            "password": password,
            "bucket": BUCKET,
        }
        with step(3, "Spark: mapInArrow tasks read the changes into Parquet"):
            spark = spark_session()
            started = time.monotonic()
            tasks = write_parquet(spark, options, folder)
            seconds = time.monotonic() - started
            changes = spark.read.parquet(folder)

        if arguments.alter_one:
            cluster.upsert(loaded.keys[0].encode(), b'{"altered": true}')
        with step(4, "the latest change per key against what the SDK reads"):
            comparison = compare(changes, collection, loaded.keys)
            print(told(comparison))
            print_table(changes, tasks, seconds)

        with step(5, f"a streaming query: micro-batches of at most {LIMIT:,} changes"):
            streams = f"{folder}-stream"
            everything = collection, loaded.keys
            streamed = stream(spark, options, streams, cluster.persist, everything)
            print(told(streamed))

        with step(6, "the same stream in plain Python, through the Arrow C stream"):
            plain_python(cluster.connection_string, password)
        spark.stop()
    return 0 if all(is_equal(each, loaded.keys) for each in (comparison, streamed)) else 1


def is_equal(comparison: Comparison, keys: list[str]) -> bool:
    """Whether every key was compared and none differs."""
    complete = comparison.documents + comparison.absent == len(keys)
    return complete and not comparison.differences


def stream(
    spark: SparkSession,
    options: dict[str, object],
    folder: str,
    persist: Callable[[], None],
    loaded: tuple[Collection, list[str]],
) -> Comparison:
    """Runs a query after documents have changed, while it was stopped, and compares."""
    try:
        for is_restart in (False, True):
            if is_restart:
                written = change(*loaded)
                print(f"   {written:,} documents replaced or removed while no query runs")
            # A query takes only what is persisted on all copies.
            persist()
            sizes = run_query(spark, options, folder)
            print(f"   {len(sizes)} micro-batches of {', '.join(f'{rows:,}' for rows in sizes)}")
        return compare(spark.read.parquet(f"{folder}/rows"), *loaded)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_python(connection_string: str, password: str) -> None:
    """Reads the bucket into one Arrow table."""
    started = time.monotonic()
    with dcp_rs.connect(
        connection_string, username=USERNAME, password=password, bucket=BUCKET
    ) as client:
        table = pa.RecordBatchReader.from_stream(client.stream(until="now")).read_all()
    seconds = time.monotonic() - started
    print(
        f"   {table.num_rows:,} rows, {table.num_rows / seconds:,.0f} rows/s, connecting included"
    )
    print(f"   {', '.join(table.column_names)}")


def main() -> int:
    """Parses the arguments and runs the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--documents", type=int, default=None, help="number of airports (default: all)"
    )
    parser.add_argument("--parquet", type=Path, help="folder to keep the Parquet files in")
    parser.add_argument("--alter-one", action="store_true", help="make the check fail")
    arguments = parser.parse_args()
    started = time.monotonic()
    folder = arguments.parquet or tempfile.mkdtemp(prefix="dcp-rs-demo-")
    try:
        code = run(arguments, str(folder))
    finally:
        if arguments.parquet is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{'equal' if code == 0 else 'NOT EQUAL'} - {time.monotonic() - started:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
