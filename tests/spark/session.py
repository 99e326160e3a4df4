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


class CrashError(Exception):
    """Ends a batch in the middle."""


def run_available_now(options, folder):
    """Lets trigger(availableNow=True) end a query, with a limit and after a crash; prints rows."""
    from pyspark.errors import StreamingQueryException

    import dcp_rs.spark

    spark = new_session()
    dcp_rs.spark.register(spark)
    counts = []

    def count(batch, _):
        counts.append(batch.count())

    def crash(_, number):
        raise CrashError(number)

    def writer(sink, **more):
        read = options | more
        changes = spark.readStream.format("couchbase.dcp").options(**read).load()
        return changes.writeStream.foreachBatch(sink).option("checkpointLocation", folder)

    def run(what, sink, **more):
        print(f"-- {what}", file=sys.stderr, flush=True)  # noqa: T201 - the test reads it
        counts.clear()
        query = writer(sink, **more).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if "CrashError" not in str(error):
                raise
        print(f"-- rows: {sum(counts)}", file=sys.stderr, flush=True)  # noqa: T201

    limit = {"maxOffsetsPerTrigger": "100"}
    run("limited", count, **limit)
    run("crashed", crash, **limit)
    run("restarted", count)
    print("-- helped", file=sys.stderr, flush=True)  # noqa: T201
    counts.clear()
    dcp_rs.spark.run_available_now(writer(count, **limit), options)
    print(f"-- rows: {sum(counts)}", file=sys.stderr, flush=True)  # noqa: T201
    spark.stop()


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
    writer = (
        rows.writeStream.format("parquet")
        .option("path", f"{folder}/rows")
        .option("checkpointLocation", f"{folder}/checkpoint")
    )
    dcp_rs.spark.run_available_now(writer, options)
    spark.stop()


if __name__ == "__main__":
    what, *arguments = json.loads(sys.stdin.readline())
    jobs = {
        "for ever": run_for_ever,
        "available now": run_available_now,
        "in a cluster": run_in_cluster,
    }
    jobs[what](*arguments)
