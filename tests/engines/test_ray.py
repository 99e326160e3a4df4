"""Ray Data on its real local cluster: what a dataset has, also if a worker is killed meanwhile."""

import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import ray

import dcp_rs
import dcp_rs.ray
from dcp_rs.exceptions import CheckpointError, ConfigError, RollbackError

sys.path.append(str(Path(__file__).parents[1] / "python"))

from plan_worlds import COLUMNS, Plans, check_the_final_state

PASSWORD = "password"


@pytest.fixture(scope="module", autouse=True)
def local_cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    return str(path)


def connect(cluster, password_file):
    return dcp_rs.connect(
        cluster.connection_string,
        bucket=cluster.bucket_name,
        username="Administrator",
        password_file=password_file,
    )


def write(cluster, rng, count):
    for _ in range(count):
        key = f"key_{rng.randrange(80)}"
        if rng.random() < 0.2 and cluster.get(key) is not None:
            cluster.remove(key)
        else:
            cluster.upsert(key, b'{"n":%d}' % rng.randrange(1000))


def in_ray(rng):
    """Reads a plan as a dataset, of which others may have taken a part."""

    def read_plan(client, plan):
        found = dcp_rs.ray.read(
            client, plan, columns=COLUMNS, batch=dcp_rs.BatchPolicy(max_rows=17)
        )
        try:
            # A task that is run again has the same bounds.
            if rng.random() < 0.5:
                found.take(3)
            return found.take_all()
        except Exception as error:
            # Ray's own, which has the text of ours.
            for kind in (RollbackError, CheckpointError):
                if kind.__name__ in str(error):
                    raise kind(str(error)) from error
            raise

    return read_plan


@pytest.mark.parametrize("on_rollback", ["resync", "emit"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("DCP_RAY_PLANS", "2"))))
def test_the_final_state_is_that_of_the_bucket(seed, password_file, on_rollback):
    @contextlib.contextmanager
    def make_reader(bucket):
        with connect(bucket.cluster, password_file) as client:
            yield Plans(client, bucket, on_rollback, in_ray(random.Random(seed)))

    check_the_final_state(seed, make_reader)


def test_a_worker_that_is_killed_while_it_reads_is_replaced(tmp_path, password_file):
    killed = tmp_path / "killed"

    def kill_once(rows):
        if not killed.exists():
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    with dcp_rs.testing.EmbeddedCluster(vbuckets=16) as cluster:
        for n in range(3000):
            cluster.upsert(f"key_{n}", b"{}")
        with connect(cluster, password_file) as client:
            changes = dcp_rs.ray.read(client, partitions=3, columns=["key"])
            # In the process that reads.
            rows = changes.map_batches(kill_once, batch_format="pyarrow", batch_size=100)
            assert {row["key"] for row in rows.take_all()} == {f"key_{n}" for n in range(3000)}
            assert rows.count() == 3000
    assert int(killed.read_text()) != os.getpid()


def test_a_rollback_after_the_plan_is_an_error(password_file):
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster,
        connect(cluster, password_file) as client,
    ):
        write(cluster, random.Random(1), 60)
        cluster.persist()
        plan = client.plan()
        for vbucket, seqno in cluster.high_seqnos().items():
            cluster.roll_back(vbucket, seqno // 2)
        with pytest.raises(Exception, match=r"rolled back|rollback") as raised:
            dcp_rs.ray.read(client, plan).take_all()
        assert RollbackError.__name__ in str(raised.value)


def test_types_and_limits_are_those_of_the_stream(password_file):
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster,
        connect(cluster, password_file) as client,
    ):
        empty = dcp_rs.ray.read(client, columns=["key", "seqno"])
        assert empty.schema().names == ["key", "seqno"]
        assert empty.take_all() == []
        for n in range(50):
            cluster.upsert(f"key_{n}", {"n": n})
        schema = "n BIGINT"
        changes = dcp_rs.ray.read(client, columns=["key"], document_schema=schema)
        assert changes.schema().names[:2] == ["key", "n"]
        assert len(changes.take(7)) == 7
        assert sum(row["n"] for row in changes.take_all()) == sum(range(50))
        hidden = dcp_rs.ray.read(client, columns=["key"], document_schema=schema, drop_fields="n")
        assert {row["n"] for row in hidden.take_all()} == {None}


def test_a_client_with_a_password_is_refused_before_a_task_runs():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.upsert("key", b"{}")
        with pytest.raises(ConfigError, match="client: has a password") as raised:
            dcp_rs.ray.read(client)
        assert raised.value.option == "client"
        with pytest.raises(ConfigError, match="the plan's"):
            dcp_rs.ray.read(client, client.plan(), collections="a.b")
