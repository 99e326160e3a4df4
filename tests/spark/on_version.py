"""Reads an embedded cluster with whatever PySpark is installed: a program for `versions.py`.

Takes the names of what to try; prints one line for each.
"""

import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import dcp_rs
import dcp_rs.spark

KEYS = {f"key_{n}" for n in range(2000)}
PIPELINE = """name: changes
catalog: spark_catalog
database: default
storage: file://{folder}/storage
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.shuffle.partitions: "2"
"""
TABLE = """from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.table
def changes():
    return spark.readStream.format("couchbase.dcp").options(**{options!r}).load()


@dp.materialized_view
def by_op():
    return spark.read.table("changes").groupBy("op").count()
"""


def session(**more):
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
    )
    spark = builder.config(map=more).getOrCreate()
    dcp_rs.spark.register(spark)
    return spark


def keys(frame):
    return {row.key for row in frame.select("key").collect()}


def batch(spark, options):
    """spark.read."""
    assert keys(spark.read.format("couchbase.dcp").options(**options).load()) == KEYS


def mapped(spark, options):
    """mapInArrow."""
    task = dcp_rs.spark.map_in_arrow(options)
    n = len(task)
    frame = spark.range(0, n, 1, n).mapInArrow(task, dcp_rs.spark.schema(options))
    assert keys(frame) == KEYS


def view(spark, options):
    """A temporary view in SQL."""
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW v USING `couchbase.dcp` OPTIONS ({given})")
    assert keys(spark.sql("SELECT key FROM v WHERE op = 'mutation'")) == KEYS


def stream(spark, options):
    """spark.readStream, twice from one checkpoint, with a limit."""
    changes = (
        spark.readStream.format("couchbase.dcp")
        .options(**options)
        .option("maxOffsetsPerTrigger", 700)
        .load()
    )
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            writer = (
                changes.writeStream.format("parquet")
                .option("path", f"{folder}/rows")
                .option("checkpointLocation", f"{folder}/checkpoint")
            )
            dcp_rs.spark.run_available_now(writer, options, timeout=300)
        rows = spark.read.parquet(f"{folder}/rows")
        assert rows.count() == len(KEYS)
        assert keys(rows) == KEYS


def connect(_, options):
    """All of it with Spark Connect."""
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    dcp_rs.spark.register(spark)
    for what in (batch, mapped, view, stream):
        what(spark, options)
    spark.stop()


def pipeline(_, options):
    """A declarative pipeline: a streaming table and a view of it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "transformations").mkdir()
        Path(folder, "spark-pipeline.yml").write_text(PIPELINE.format(folder=folder))
        Path(folder, "transformations", "changes.py").write_text(TABLE.format(options=options))
        program = Path(sys.executable).with_name("spark-pipelines")
        command = [program, "run", "--spec", f"{folder}/spark-pipeline.yml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        spark = session()
        tables = Path(folder, "spark-warehouse")
        assert keys(spark.read.parquet(str(tables / "changes"))) == KEYS
        assert spark.read.parquet(str(tables / "by_op")).first()["count"] == len(KEYS)
        spark.stop()


def delta(*_):
    """A table of documents, read by Spark's Delta."""
    import merged  # deltalake is not in every environment

    names = [f"delta-spark_{pyspark.__version__.rpartition('.')[0]}_2.13", "delta-storage"]
    names += [f"delta-kernel-{part}" for part in ("api", "defaults", "unitycatalog")]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            jar = f"-Dartifact=io.delta:{name}:{version('delta-spark')}"
            copy = ["mvn", "-B", "-q", "dependency:copy", jar, f"-DoutputDirectory={folder}"]
            subprocess.run(copy, check=True)
        more = {
            "spark.jars": ",".join(map(str, Path(folder).glob("*.jar"))),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.sql.warehouse.dir": f"{folder}/tables",
            # A table this small needs fewer than fifty tasks to be looked at.
            "spark.databricks.delta.snapshotPartitions": "2",
        }
        spark = session(**more)

        def read(kept):
            rows = spark.read.format("delta").load(str(kept.location)).collect()
            assert len({row.key for row in rows}) == len(rows)
            return {row.key: row.n for row in rows}

        merged.keep(spark, read)
        read_back(spark, f"{folder}/values")
        spark.stop()


def read_back(spark, folder):
    """What `replicate` writes to a Delta table is what Spark reads, for every type of field."""
    sys.path.append(str(Path(__file__).parents[1] / "python"))
    import field_values

    kinds = field_values.SCALARS + field_values.LISTS + field_values.NESTED
    kinds = {f"c{n}": kind for n, kind in enumerate(kinds + field_values.DECIMALS[::4])}
    schema = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    written = {}
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as cluster, cluster.connect() as client:
        for step in range(2):
            documents = field_values.documents(kinds, random.Random(step), step)
            for key, text in documents.items():
                cluster.upsert(key, text.encode())
            written |= documents
            dcp_rs.replicate(client, f"delta://{folder}", document_schema=schema, once=True)
            rows = spark.read.format("delta").load(folder).toArrow().to_pylist()
            told = field_values.differences(kinds, written, {row["key"]: row for row in rows})
            assert not told, "\n".join(told)


def merge(spark, _):
    """A table of documents, kept by merge_into."""
    import merged

    merged.keep(spark)


def delta_tables(*_):
    """Delta tables that the executors keep."""
    import keeping_tables

    keeping_tables.everything("delta")


def delta_part(*_):
    """Delta tables that the executors keep, as far as CI has time."""
    import keeping_tables

    keeping_tables.part("delta")


def delta_kills(*_):
    """Delta tables, kills and failovers."""
    import killing_tables

    killing_tables.everything("delta")


def iceberg_tables(*_):
    """Iceberg tables that the executors keep."""
    import keeping_tables

    keeping_tables.everything("iceberg")


def iceberg_part(*_):
    """Iceberg tables that the executors keep, as far as CI has time."""
    import keeping_tables

    keeping_tables.part("iceberg")


def iceberg_kills(*_):
    """Iceberg tables, kills and failovers."""
    import killing_tables

    killing_tables.everything("iceberg")


def stored_tables(*_):
    """Tables in S3, read while they are written."""
    import reading_tables

    reading_tables.everything()


def path_kills(*_):
    """A Delta table that the driver keeps, kills and failovers."""
    import killing_tables

    killing_tables.everything("path")


def connect_tables(*_):
    """Delta tables that the executors keep, with a Spark Connect server."""
    import connect_server
    import kept_tables

    with tempfile.TemporaryDirectory() as folder:
        settings = kept_tables.with_format("delta", folder)
        with connect_server.started(folder, **settings) as address:
            client = [sys.executable, "-W", "ignore", Path(__file__).with_name("connecting.py")]
            done = subprocess.run([*client, address, "delta_tables"], check=False)
            assert done.returncode == 0, connect_server.log_of(folder)


def cluster(*_):
    """A standalone cluster that takes executors away and runs tasks twice."""
    import on_cluster

    on_cluster.everything()


def two_queries(*_):
    """Two queries at once of another source, DCP_SPARK_PAIRS times."""
    program = Path(__file__).with_name("two_queries.py")
    count = os.environ.get("DCP_SPARK_PAIRS", "200")
    subprocess.run([sys.executable, "-W", "ignore", program, count], check=True)


# Those that start Spark for themselves.
OWN = (
    connect, connect_tables, pipeline, delta, delta_tables, delta_part, delta_kills,
    iceberg_tables, iceberg_part, iceberg_kills, stored_tables, path_kills, cluster, two_queries,
)  # fmt: skip
TRIED = {each.__name__: each for each in (batch, mapped, view, stream, merge, *OWN)}


def main():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=64, bucket="changes") as cluster:
        for key in KEYS:
            cluster.upsert(key, b"{}")
        cluster.persist()
        options = {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "changes",
        }
        spark = None
        for name in sys.argv[1:]:
            if TRIED[name] not in OWN and spark is None:
                spark = session()
            TRIED[name](spark, options)
            sys.stdout.write(f"pyspark {pyspark.__version__}: {TRIED[name].__doc__}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
