"""Micro-batches, splits, retries and failovers at random: the final state is that of the bucket."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

import dcp_rs.spark
from query import Query

sys.path.append(str(Path(__file__).parents[1] / "python"))

from plan_worlds import Table, check_the_final_state

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


class Batches:
    """Reads by a query, which plans its micro-batches itself."""

    def __init__(self, query, rng):
        self.query, self.rng, self.found = query, rng, []

    def some(self, _number):
        self.query.run(
            through=self.rng.choice([None, failing_first()]),
            maxOffsetsPerTrigger=self.rng.choice([15, 60]),
            numPartitions=self.rng.randint(1, 6),
        )

    def rest(self):
        self.query.run()
        self.found = [row.asDict() for row in self.query.rows()]
        for row in self.found:
            row["value"] = None if row["value"] is None else bytes(row["value"])
        table = Table()
        table.commit(sorted(self.found, key=lambda row: (row["epoch"], row["seqno"])), None)
        return table

    def check(self):
        assert any(row["op"] == "rollback" for row in self.found), "it tries no rollback"


@pytest.mark.parametrize("on_rollback", ["emit"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("DCP_SPARK_PLANS", "1"))))
def test_the_final_state_is_that_of_the_bucket(spark, tmp_path, seed, on_rollback):
    dcp_rs.spark.register(spark)

    @contextlib.contextmanager
    def make_reader(bucket):
        options = {
            "connectionString": bucket.cluster.connection_string,
            "bucket": bucket.cluster.bucket_name,
            "username": "reader",
            "password": PASSWORD,
            "onRollback": on_rollback,
        }
        yield Batches(Query(spark, options, tmp_path, bucket.cluster), bucket.rng)

    check_the_final_state(seed, make_reader, rounds=4, username="reader", password=PASSWORD)
