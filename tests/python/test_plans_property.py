"""Plans, splits, retries and failovers at random: the final state is that of the bucket."""

import contextlib
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

import dcp_rs
import dcp_rs.polars
from dcp_rs import Partition
from plan_worlds import COLUMNS, Plans, check_the_final_state

SEEDS = int(os.environ.get("DCP_PLAN_SEEDS", "3"))


def read(text, connection, leave_after):
    """Reads a partition in a process that does not know its planner; leaves it early if asked."""
    rows = []
    with Partition.from_json(text, connection).open(columns=COLUMNS) as stream:
        for batch in stream:
            rows += batch.rows()
            if leave_after is not None and len(rows) >= leave_after:
                return None
    return rows


def in_polars(rng):
    """Reads a plan as a lazy frame, after others have taken a part of it."""

    def read_plan(client, plan):
        lazy = dcp_rs.polars.scan(client, plan, columns=COLUMNS)
        lazy.head(rng.choice([0, 3])).collect()
        return lazy.collect().rows(named=True)

    return read_plan


def in_processes(processes, connection, rng):
    """Reads each partition until one attempt has come to its end."""

    def read_plan(_, plan):
        rows = []
        for partition in plan.partitions:
            found = None
            while found is None:
                leave = rng.choice([None, None, 0, 3])
                found = processes.submit(read, partition.to_json(), connection, leave).result(60)
            rows += found
        return rows

    return read_plan


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.shows_password("in a file, which partitions name")
@pytest.mark.parametrize("on_rollback", ["resync", "emit"])
@pytest.mark.parametrize("way", ["processes", "polars"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_final_state_is_that_of_the_bucket(processes, tmp_path, seed, way, on_rollback):
    @contextlib.contextmanager
    def make_reader(bucket):
        given = bucket.cluster.connection_options
        (tmp_path / "password").write_text(given.password)
        connection = replace(given, password=None, password_file=tmp_path / "password")
        rng = random.Random(seed)
        by_way = {
            "processes": in_processes(processes, connection, rng),
            "polars": in_polars(rng),
        }
        with dcp_rs.connect(connection) as client:
            yield Plans(client, bucket, on_rollback, by_way[way])

    check_the_final_state(seed, make_reader)
