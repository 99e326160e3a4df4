"""Tables of Delta and Iceberg that `merge_into(table=...)` keeps, beside `merged.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import dcp_rs
import dcp_rs.spark
from merged import PASSWORD, Kept

PATIENCE = 600

VERSION = pyspark.__version__.rpartition(".")[0]
# The newest runtimes.
DELTA = {"4.0": "4.4.0", "4.1": "4.4.0", "4.2": "4.4.0"}
ICEBERG = {"4.0": "1.11.0", "4.1": "1.12.0"}
TABLES = {"delta": "spark_catalog.default.kept", "iceberg": "lake.travel.kept"}


def jars(kind, folder):
    """Gives the jars of a format, from Maven Central unless DCP_SPARK_JARS has them."""
    folder = Path(os.environ.get("DCP_SPARK_JARS", folder)) / f"{kind}-{VERSION}"
    if kind == "delta":
        names = [f"delta-spark_{VERSION}_2.13", "delta-storage"]
        names += [f"delta-kernel-{part}" for part in ("api", "defaults", "unitycatalog")]
        wanted = [f"io.delta:{name}:{DELTA[VERSION]}" for name in names]
    else:
        name = f"iceberg-spark-runtime-{VERSION}_2.13"
        wanted = [f"org.apache.iceberg:{name}:{ICEBERG[VERSION]}"]
    for each in wanted:
        _, name, version = each.split(":")
        if not (folder / f"{name}-{version}.jar").exists():
            copy = ["mvn", "-B", "-q", "dependency:copy", f"-Dartifact={each}"]
            subprocess.run([*copy, f"-DoutputDirectory={folder}"], check=True)
    return ",".join(map(str, sorted(folder.glob("*.jar"))))


def with_format(kind, folder):
    """Gives the settings of a session with a format, whose tables are in a folder."""
    settings = {"spark.sql.warehouse.dir": f"{folder}/warehouse"}
    if kind is not None:
        settings["spark.jars"] = jars(kind, f"{folder}/jars")
    if kind == "delta":
        settings |= {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            # A table this small needs fewer than fifty tasks to be looked at.
            "spark.databricks.delta.snapshotPartitions": "2",
        }
    elif kind == "iceberg":
        settings |= {
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.warehouse": f"{folder}/iceberg",
        }
    return settings


def session(kind, folder, master="local[2]", **more):
    """Starts Spark with a format, whose tables are in a folder."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    } | with_format(kind, folder)
    spark = SparkSession.builder.master(master).config(map=settings | more).getOrCreate()
    dcp_rs.spark.register(spark)
    if kind == "iceberg":
        spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.travel")
    elif kind == "delta":
        # The catalog ends with its driver. One in production does not.
        for log in Path(folder, "warehouse").glob("*/_delta_log"):
            made = f"CREATE TABLE IF NOT EXISTS default.`{log.parent.name}` USING delta"
            spark.sql(f"{made} LOCATION '{log.parent}'")
    return spark


def run(spark, options, checkpoint, sink, attempts=20):
    """Lets a query read what there is."""
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    writer = changes.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    try:
        return dcp_rs.spark.run_available_now(writer, options, timeout=PATIENCE)
    except PySparkException as error:
        # Spark gives its Python processes ten seconds, whatever else the machine does.
        if attempts > 1 and "failed to connect back" in str(error):
            return run(spark, options, checkpoint, sink, attempts - 1)
        raise


class KeptTable(Kept):
    """A table that the executors keep."""

    def __init__(self, spark, folder, kind, name=None):
        super().__init__(spark, folder)
        self.kind = kind
        self.name = name or TABLES[kind]
        spark.sql(f"DROP TABLE IF EXISTS {self.name}")
        self.sink = dcp_rs.spark.merge_into(table=self.name)

    def options(self, **more):
        return {
            "connectionString": self.cluster.connection_string,
            "username": "Administrator",
            "password": PASSWORD,
            "bucket": "merged",
            "documentSchema": "n INT, at TIMESTAMP",
            "onRollback": "resync",
        } | more

    def run(self, sink=None, **more):
        self.cluster.persist()
        return run(self.spark, self.options(**more), self.checkpoint, sink or self.sink)

    def rows(self):
        # Batches run in another session.
        self.spark.catalog.refreshTable(self.name)
        return [row.asDict() for row in self.spark.table(self.name).collect()]

    def has_table(self):
        return self.spark.catalog.tableExists(self.name)

    def batches(self):
        self.spark.catalog.refreshTable(self.name)
        return batches(self.spark, self.kind, self.name)


def batches(spark, kind, table):
    """Gives the numbers of the batches by the commits that the format lists, oldest first."""
    if kind == "delta":
        rows = spark.sql(f"DESCRIBE HISTORY {table}").collect()
        rows = sorted(rows, key=lambda row: row["version"])
        notes = [row["userMetadata"] for row in rows if row["operation"] == "MERGE"]
    else:
        rows = spark.table(f"{table}.snapshots").orderBy("committed_at")
        rows = rows.selectExpr("summary['dcp-rs-batch'] AS note").collect()
        notes = [row["note"] for row in rows if row["note"]]
    return [json.loads(note)["dcp_rs"][1] for note in notes]
