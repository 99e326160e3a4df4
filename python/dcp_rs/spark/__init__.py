"""Read Couchbase changes in Spark, with Rust inside the executors.

Spark runs one task per *partition*: some vBuckets of one node, each with a range of seqnos. The
driver creates the partitions once; each task reads its own and passes Arrow batches to the JVM.

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

Delivery is at least once and, within a vBucket, in seqno order. A read ends at the bound of the
partitions, or at the end of the snapshot that contains it. DCP keeps only the latest version of a
key. If Spark runs a task again, a key that was rewritten in the meantime comes in its new version,
so take the latest change per key by `(epoch, seqno)`.

Install the extra `spark`: `pip install "dcp-rs[spark]"`. Importing this module does not import
PySpark or PyArrow; its functions do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dcp_rs import _checks
from dcp_rs._libraries import require_pyarrow, require_spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark.errors import SparkReadError
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.partition import Partition, Partitions
from dcp_rs.spark.planning import partitions
from dcp_rs.spark.progress import Lag, lag
from dcp_rs.spark.running import run_available_now
from dcp_rs.spark.schema import schema
from dcp_rs.spark.worker import MapInArrowTask, map_in_arrow, read_partition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from dcp_rs.spark.merge import MergeInto
    from dcp_rs.spark.merge_routes import RoutedMerge
    from dcp_rs.spark.merge_table import TableMerge

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
    "run_available_now",
    "schema",
]


def register(spark: SparkSession) -> None:
    """Registers `spark.read.format("couchbase.dcp")` with a session.

    This is not needed if the wheel is installed for the driver's Python: Spark looks for modules
    named `pyspark_*`, and the wheel has one.

    Args:
        spark: The session.

    Raises:
        ConfigError: `spark` is not a session, or PySpark, pandas or PyArrow is too old.
        ImportError: PySpark or PyArrow is not installed.
    """
    require_spark("dcp_rs.spark")
    from pyspark.errors import PySparkException

    from dcp_rs.spark.source import CouchbaseDcpDataSource

    if not hasattr(spark, "dataSource"):
        raise _checks.wrong_type("spark", spark, "a SparkSession")
    try:
        spark.dataSource.register(CouchbaseDcpDataSource)
    except PySparkException as error:
        # PySpark 4.0 refuses a source that it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def merge_into(
    path: str | os.PathLike[str] | None = None,
    *,
    table: str | None = None,
    tables: Mapping[str, object] | None = None,
    storage_options: Mapping[str, str] | None = None,
    name: str | None = None,
) -> MergeInto | TableMerge | RoutedMerge:
    """Creates a sink that keeps a table in step with the documents of a bucket.

        changes = spark.readStream.format("couchbase.dcp").options(**options).load()
        sink = dcp_rs.spark.merge_into(table="lake.travel.airlines")
        query = changes.writeStream.foreachBatch(sink).option("checkpointLocation", "...").start()

    With `table`, Spark's executors merge each batch into a table of Delta or Iceberg, with the
    format's runtime for Spark. With `path`, the driver collects the batch and merges it with
    deltalake, without a jar: for tables whose batches fit into its memory.

    The stream needs the option `onRollback=resync`. The table has a row for each document, with the
    columns of the stream except `op`, and is created if it does not exist. It belongs to the query:
    a new checkpoint is a new query, and needs a new table.

    Each batch is one commit, which notes the query and the batch. If Spark runs a batch again that
    the table already has, it is skipped before any of it is read. The second run could have fewer
    rows, if keys were rewritten or a failover lost some, but nothing is missed: the next batch
    starts from the same offsets, and has the newer versions or begins with the rollback row.

    Args:
        path: Folder of a Delta table, or its URI.
        table: Name of a table, such as `catalog.schema.table`, instead; or a template such as
            `lake.travel.{scope}_{collection}`, by which each collection has its own table.
        tables: Templates by pattern of collections, instead, as `dcp_rs.replicate` has them: a
            template, or a mapping with `table` and `document_schema`. The stream then has
            documents in `value`.
        storage_options: Options of the object store, passed to deltalake; only with `path`.
        name: The query's `queryName`. Only Spark Connect needs it, and only if several queries run
            in one session. It finds the query among these, so it may change; the table still
            belongs to the query's checkpoint.

    Returns:
        A function for `DataStreamWriter.foreachBatch`. Bound a batch with the option
            `maxOffsetsPerTrigger`. It raises `dcp_rs.exceptions.ConfigError`, before it writes any
            of the batch, if the table belongs to another query or has rows from elsewhere, lacks
            earlier batches of this query, or contradicts the schema, if the query does not resync,
            if the format's runtime is missing, or if Connect does not say which query it is.

    Raises:
        ConfigError: deltalake is too old, or not one of `path`, `table` and `tables` is given.
        ImportError: deltalake is not installed, for `path`.
    """
    if sum(each is not None for each in (path, table, tables)) != 1:
        raise ConfigError("give one of them", option=("path", "table", "tables"))
    _checks.text("name", name, optional=True)
    if path is None:
        if storage_options is not None:
            raise ConfigError("is for a path: Spark has its own", option="storage_options")
        if table is None or "{" in table:
            from dcp_rs.spark.merge_routes import RoutedMerge

            return RoutedMerge(table or tables or {}, name)
        _checks.text("table", table)
        from dcp_rs.spark.merge_table import TableMerge

        return TableMerge(table, name)
    require_pyarrow("merge_into", "delta")
    from dcp_rs.spark.merge import MergeInto

    return MergeInto(os.fspath(path), storage_options, name)
