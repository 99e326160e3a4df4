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

from typing import TYPE_CHECKING

from dcp_rs.spark.errors import SparkReadError, missing_library
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.partition import Partition, Partitions
from dcp_rs.spark.planning import partitions
from dcp_rs.spark.progress import Lag, lag
from dcp_rs.spark.schema import schema
from dcp_rs.spark.worker import MapInArrowTask, map_in_arrow, read_partition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Lag",
    "MapInArrowTask",
    "Partition",
    "Partitions",
    "ReadOptions",
    "SparkReadError",
    "lag",
    "map_in_arrow",
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
        ImportError: PySpark is not installed.
    """
    try:
        from pyspark.errors import PySparkException

        from dcp_rs.spark.source import CouchbaseDcpDataSource
    except ImportError as error:
        raise missing_library(error) from error
    try:
        spark.dataSource.register(CouchbaseDcpDataSource)
    except PySparkException as error:
        # PySpark 4.0 refuses what it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
