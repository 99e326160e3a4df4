"""The Spark session of the tests, and a query in a process of its own, to be killed."""

import json
import os
import sys


def new_session():
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    return (
        SparkSession.builder.master("local[2]")
        .appName("dcp_rs tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def run_for_ever(options, folder):
    import dcp_rs.spark

    spark = new_session()
    dcp_rs.spark.register(spark)
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    changes.writeStream.format("parquet").option("path", f"{folder}/rows").option(
        "checkpointLocation", f"{folder}/checkpoint"
    ).trigger(processingTime="0 seconds").start().awaitTermination()


if __name__ == "__main__":
    run_for_ever(*json.loads(sys.stdin.readline()))
