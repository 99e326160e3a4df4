"""Couchbase changes in Spark, read by Rust inside the executors.

Spark gets one task per *partition*: some vBuckets of one node, each from one seqno to another. The
driver makes the partitions, once; every task then reads its own and hands Arrow batches to the JVM.

    import dcp_rs.spark

    options = {
        "connectionString": "couchbase://cb.example.org",
        "username": "reader",
        "passwordFile": "/run/secrets/couchbase",
        "bucket": "travel",
    }
    task = dcp_rs.spark.map_in_arrow(options)
    n = len(task)
    changes = spark.range(0, n, 1, n).mapInArrow(task, dcp_rs.spark.schema(options))

Delivery is at least once and, within a vBucket, in seqno order. A read ends at the bound that the
partitions were made with, or at the end of the snapshot which holds that bound. DCP keeps only the
latest version of a key: if Spark runs a task again, a key that was rewritten meanwhile comes in its
new version, so take the latest change per key by `(epoch, seqno)`.

Needs the extra `spark`: `pip install "dcp-rs[spark]"`. Importing this module does not import
PySpark or PyArrow; calling it does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dcp_rs import _checks
from dcp_rs.spark.errors import SparkReadError, missing_library
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.partition import Partition, Partitions
from dcp_rs.spark.planning import partitions
from dcp_rs.spark.progress import Lag, lag
from dcp_rs.spark.schema import schema
from dcp_rs.spark.worker import MapInArrowTask, map_in_arrow, read_partition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from dcp_rs.spark.merge import MergeInto

__all__ = [
    "Lag",
    "MapInArrowTask",
    "Partition",
    "Partitions",
    "ReadOptions",
    "SparkReadError",
    "lag",
    "map_in_arrow",
    "merge_into",
    "partitions",
    "read_partition",
    "register",
    "schema",
]


def register(spark: SparkSession) -> None:
    """Makes `spark.read.format("couchbase.dcp")` known to a session.

    Not needed where the wheel is installed for the Python that Spark's driver runs: Spark looks
    for modules called `pyspark_*`, and the wheel has one.

    Args:
        spark: The session.

    Raises:
        ConfigError: It is not a session.
        ImportError: PySpark is not installed.
    """
    try:
        from pyspark.errors import PySparkException

        from dcp_rs.spark.source import CouchbaseDcpDataSource
    except ImportError as error:
        raise missing_library(error) from error
    if not hasattr(spark, "dataSource"):
        raise _checks.wrong_type("spark", spark, "a SparkSession")
    try:
        spark.dataSource.register(CouchbaseDcpDataSource)
    except PySparkException as error:
        # PySpark 4.0 refuses what it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def merge_into(
    table: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None
) -> MergeInto:
    """Makes a sink that keeps a Delta table equal to the documents of a bucket.

        changes = spark.readStream.format("couchbase.dcp").options(**options).load()
        sink = dcp_rs.spark.merge_into("/lake/airlines")
        query = changes.writeStream.foreachBatch(sink).option("checkpointLocation", "...").start()

    The stream needs the option `onRollback=resync`. The table has a row for each document, with the
    columns of the stream but `op`, and is made if it is not there. It belongs to the query: a new
    checkpoint is a new query, and needs a new table.

    A batch is one commit, with a transaction that names the query and the batch. If Spark runs a
    batch again that the table has, it is skipped, before anything of it is read. It would have
    fewer rows now if keys were rewritten, or if a failover lost some. Nothing is missed by that:
    what a batch covers is in its offsets, and the next one goes on from these. It has the newer
    versions, or begins with the row of the rollback.

    Args:
        table: Folder of the table, or its URI.
        storage_options: Options of the object store, as deltalake has them.

    Returns:
        A function for `DataStreamWriter.foreachBatch`. It collects each batch to the driver, as
        Arrow data; the option `maxRowsPerTrigger` bounds a batch. It raises
        `dcp_rs.exceptions.ConfigError`, with nothing of the batch written, if the
        table is another query's or of another origin, lacks earlier batches of this one, or
        contradicts the schema, and if the query does not resync.

    Raises:
        ImportError: deltalake is not installed.
    """
    try:
        from dcp_rs.spark.merge import MergeInto
    except ImportError as error:
        raise missing_library(error) from error
    return MergeInto(os.fspath(table), storage_options)
