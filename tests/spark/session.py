"""The Spark session of the tests, and queries in a process of their own."""

import json
import os
import sys
from pathlib import Path


def new_session(master="local[2,3]", **more):
    """Starts Spark; on this machine a task is tried three times."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = (
        SparkSession.builder.master(master)
        .appName("dcp_rs tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for name, value in more.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run_for_ever(options, folder):
    """Runs a query that is to be killed."""
    import dcp_rs.spark

    spark = new_session()
    dcp_rs.spark.register(spark)
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    changes.writeStream.format("parquet").option("path", f"{folder}/rows").option(
        "checkpointLocation", f"{folder}/checkpoint"
    ).trigger(processingTime="0 seconds").start().awaitTermination()


def own_home(folder):
    """Makes an installation of Spark whose executors have their folders and logs in `folder`."""
    import pyspark

    home = Path(folder, "home")
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        (home / each.name).symlink_to(each)
    return str(home)


def kill_executor_once(folder):
    """Gives what `mapInArrow` does: the first task that sees rows kills its executor."""

    def pass_on(batches):
        import re
        import signal

        for batch in batches:
            yield batch
            try:
                Path(folder, "killing").touch(exist_ok=False)
            except FileExistsError:
                continue
            # This process is the child of a daemon, which is a child of the executor.
            status = Path(f"/proc/{os.getppid()}/status").read_text()
            executor = int(re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)[1])
            Path(folder, "killed").write_text(str(executor))
            os.kill(executor, signal.SIGKILL)

    return pass_on


def run_in_cluster(options, folder):
    """Runs a query to the end of what there is on two executors, of which one is killed."""
    import dcp_rs.spark

    os.environ["SPARK_HOME"] = own_home(folder)
    Path(folder, "events").mkdir()
    spark = new_session(
        "local-cluster[2,1,600]",
        **{
            "spark.executor.memory": "600m",
            "spark.log.level": "INFO",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{folder}/events",
        },
    )
    dcp_rs.spark.register(spark)
    changes = spark.readStream.format("couchbase.dcp").options(**options).load()
    rows = changes.mapInArrow(kill_executor_once(folder), changes.schema)
    query = (
        rows.writeStream.format("parquet")
        .option("path", f"{folder}/rows")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    what, *arguments = json.loads(sys.stdin.readline())
    {"for ever": run_for_ever, "in a cluster": run_in_cluster}[what](*arguments)
