"""A Delta table of a bucket's documents, kept by a Spark query."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deltalake
from pyspark.sql import SparkSession

import dcp_rs.spark


def main(connection_string: str, folder: str) -> None:
    """Writes the changes since the last run, and counts the documents."""
    spark = SparkSession.builder.appName("spark_table").getOrCreate()
    dcp_rs.spark.register(spark)
    options = {
        "connectionString": connection_string,
        "username": "Administrator",
        "password": os.environ.get("COUCHBASE_PASSWORD", "password"),
        "documentSchema": "name STRING, n INT",
        "onRollback": "resync",
        "maxOffsetsPerTrigger": "500000",
    }
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    query = (
        changes.writeStream.foreachBatch(dcp_rs.spark.merge_into(Path(folder, "table")))
        .option("checkpointLocation", str(Path(folder, "checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    table = deltalake.DeltaTable(Path(folder, "table"))
    names = deltalake.QueryBuilder().register("t", table).execute("SELECT name FROM t").read_all()
    print(f"{len(query.recentProgress)} batches, {names.num_rows} documents")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR FOLDER")
    main(*sys.argv[1:])
