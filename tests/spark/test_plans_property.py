"""Micro-batches, splits, retries and failovers at random: the final state is that of the bucket."""

import os
import random
import sys
from pathlib import Path

import pytest

import dcp_rs
import dcp_rs.spark
from query import Query

sys.path.append(str(Path(__file__).parents[1] / "python"))

from plan_worlds import VBUCKETS, Bucket, Table

PASSWORD = "canary-8f1c2e pass phrase"


def failing_first():
    """Gives a function that ends the first attempt of a task before or after some of its rows."""

    # Within, since workers cannot import this module.
    def fail_first(batches):
        from pyspark import TaskContext

        task = TaskContext.get()
        ends_after = task.partitionId() if task.attemptNumber() == 0 else None
        for number, batch in enumerate(batches):
            if number == ends_after:
                raise RuntimeError("tried again")
            yield batch

    return fail_first


@pytest.mark.parametrize("on_rollback", ["emit"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("DCP_SPARK_PLANS", "1"))))
def test_the_final_state_is_that_of_the_bucket(spark, tmp_path, seed, on_rollback):
    rng = random.Random(seed)
    dcp_rs.spark.register(spark)
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, replicas=1, vbuckets=VBUCKETS, username="reader", password=PASSWORD
    ) as cluster:
        options = {
            "connectionString": cluster.connection_string,
            "bucket": cluster.bucket_name,
            "username": "reader",
            "password": PASSWORD,
            "onRollback": on_rollback,
        }
        bucket, query = Bucket(cluster, rng), Query(spark, options, tmp_path, cluster)
        for number in range(4):
            bucket.write()
            if number == 2:  # in every world
                high = cluster.high_seqnos()
                cluster.roll_back(max(high, key=high.get), 0)
            elif rng.random() < 0.5:
                bucket.trouble()
            query.run(
                through=rng.choice([None, failing_first()]),
                maxOffsetsPerTrigger=rng.choice([15, 60]),
                numPartitions=rng.randint(1, 6),
            )
        query.run()
        rows = [row.asDict() for row in query.rows()]
        for row in rows:
            row["value"] = None if row["value"] is None else bytes(row["value"])
        table = Table()
        table.commit(sorted(rows, key=lambda row: (row["epoch"], row["seqno"])), None)
        assert any(row["op"] == "rollback" for row in rows), f"seed {seed} tries no rollback"
        assert table.documents() == bucket.documents(), f"seed {seed}"
