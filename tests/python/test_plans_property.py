"""Plans, splits, retries and failovers at random: the final state is that of the bucket."""

import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

import dcp_rs
import dcp_rs.polars
from dcp_rs import Partition
from dcp_rs.exceptions import CheckpointError, RollbackError
from plan_worlds import VBUCKETS, Bucket, Table

COLUMNS = ["op", "vbucket", "seqno", "epoch", "key", "value"]


def read(text, connection, leave_after):
    """Reads a partition in a process that does not know its planner; leaves it early if asked."""
    rows = []
    with Partition.from_json(text, connection).open(columns=COLUMNS) as stream:
        for batch in stream:
            rows += batch.rows()
            if leave_after is not None and len(rows) >= leave_after:
                return None
    return rows


def read_in_polars(client, plan, rng):
    """Reads a plan as a lazy frame, after others have taken a part of it."""
    lazy = dcp_rs.polars.scan(client, plan, columns=COLUMNS)
    lazy.head(rng.choice([0, 3])).collect()
    return lazy.collect().rows(named=True)


def read_in_processes(processes, partitions, connection, rng):
    """Reads each partition until one attempt has come to its end."""
    rows = []
    for partition in partitions:
        found = None
        while found is None:
            leave = rng.choice([None, None, 0, 3])
            found = processes.submit(read, partition.to_json(), connection, leave).result(60)
        rows += found
    return rows


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


SEEDS = int(os.environ.get("DCP_PLAN_SEEDS", "3"))


@pytest.mark.shows_password("in a file, which partitions name")
@pytest.mark.parametrize(
    ("reader", "on_rollback"),
    [("processes", "resync"), ("polars", "resync"), ("polars", "emit")],
)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_final_state_is_that_of_the_bucket(processes, tmp_path, seed, reader, on_rollback):
    rng = random.Random(seed)
    with dcp_rs.testing.EmbeddedCluster(nodes=3, replicas=1, vbuckets=VBUCKETS) as cluster:
        (tmp_path / "password").write_text(cluster.connection_options.password)
        connection = replace(
            cluster.connection_options, password=None, password_file=tmp_path / "password"
        )
        bucket, table, seen = Bucket(cluster, rng), Table(), {"again": 0, "rollback": 0}
        with dcp_rs.connect(connection) as client:

            def step(**options):
                plan = client.plan(
                    start=table.end,
                    partitions=rng.randint(1, 6),
                    on_rollback=on_rollback,
                    **options,
                )
                if options and rng.random() < 0.5:
                    rng.choice([bucket.write, bucket.trouble])()
                try:
                    if reader == "polars":
                        rows = read_in_polars(client, plan, rng)
                    else:
                        rows = read_in_processes(processes, plan.partitions, connection, rng)
                except (RollbackError, CheckpointError):
                    seen["again"] += 1
                    return 1
                seen["rollback"] += sum(row["op"] == "rollback" for row in rows)
                table.commit(rows, plan.end)
                return plan.size

            for number in range(10):
                bucket.write()
                if number == 5:  # in every world
                    read = table.end["s"]
                    cluster.roll_back(read.index(max(read)), 0)
                elif rng.random() < 0.5:
                    bucket.trouble()
                step(max_seqnos=rng.choice([None, 5, 40]), persisted_only=rng.random() < 0.7)
            cluster.persist()
            while step():
                pass
        assert table.documents() == bucket.documents(), f"seed {seed}: {seen}"
        assert seen["rollback"], f"seed {seed} tries no rollback"
