"""What a client of Spark Connect does, in a process of its own: a server is not of its process.

Takes the server's address and the name of what to do.
"""

import sys
import tempfile
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.plan import LogicalPlan

import dcp_rs.spark
import keeping_tables
import merged
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark.merge_target import Target


def keep(spark):
    """A table is the documents, whatever happens."""
    merged.keep(spark)


def tell_apart(spark):
    """Of two queries of a session, each keeps a table of its own by its name, or none."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {}
        for name in ("one", "other"):
            Path(folder, name).mkdir()
            kept[name] = merged.Kept(spark, Path(folder, name))
            kept[name].write(0, 20, 1)
        one, other = kept.values()
        follow(one, "one", None)
        wait_for(one)
        told = [wait(follow(other, "other", None)), wait(follow(other, "wrong", "another"))]
        assert "Spark Connect does not say which of 2 queries" in told[0], told[0]
        assert "there is no query 'another' in the session" in told[1], told[1]
        follow(other, "other", "other")
        one.write(10, 30, 2)
        for each in kept.values():
            each.cluster.persist()
            wait_for(each)
            each.close()


def wait_for(kept):
    """Until the table has what the cluster has."""
    deadline = time.monotonic() + merged.PATIENCE
    while not DeltaTable.is_deltatable(str(kept.location)) or kept.table() != kept.truth():
        assert time.monotonic() < deadline, "the table is not kept"
        time.sleep(0.2)


def follow(kept, query, name, attempts=9):
    """Starts a query that does not end."""
    kept.cluster.persist()
    writer = kept.changes().writeStream.queryName(query).trigger(processingTime="1 second")
    sink = dcp_rs.spark.merge_into(kept.location, name=name)
    try:
        return writer.foreachBatch(sink).option("checkpointLocation", str(kept.checkpoint)).start()
    except PySparkException as error:
        # Spark gives its Python processes ten seconds, whatever else the machine does.
        if attempts == 1 or "failed to connect back" not in str(error):
            raise
        return follow(kept, query, name, attempts - 1)


def wait(query):
    try:
        query.awaitTermination(merged.PATIENCE)
    except PySparkException as error:
        return str(error)
    return f"{query.exception()}"


def refuse(spark):
    """A sink that is made or called where no query can be told is refused."""
    with tempfile.TemporaryDirectory() as folder:
        kept = merged.Kept(spark, folder)
        columns = "op STRING, key STRING, scope STRING, collection STRING, vbucket INT, epoch INT"
        batch = spark.createDataFrame([], f"{columns}, seqno BIGINT")
        with pytest.raises(ConfigError, match="works only in foreachBatch"):
            kept.sink(batch, 0)
        kept.close()


def ask_again(spark):
    """A table is found that was not there when a process before asked in the same session."""
    name = ("spark_catalog", "default", "asked")
    count = LogicalPlan._nextPlanId
    assert not Target(spark, name, "a query").exists
    spark.sql("CREATE TABLE asked (n INT) USING parquet").collect()
    # Each process counts its requests from 0.
    LogicalPlan._nextPlanId = count
    with pytest.raises(ConfigError, match="is of the format parquet"):
        Target(spark, name, "a query")


def delta_tables(spark):
    """Delta tables that the executors keep are the documents, whatever happens."""
    keeping_tables.over_connect(spark, "delta")


TRIED = {each.__name__: each for each in (keep, tell_apart, refuse, ask_again, delta_tables)}

if __name__ == "__main__":
    address, name = sys.argv[1:]
    session = SparkSession.builder.remote(address).getOrCreate()
    dcp_rs.spark.register(session)
    TRIED[name](session)
    session.stop()
