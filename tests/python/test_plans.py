"""Plans that any process can run: their partitions, and what is refused."""

import json
import os
import pickle
import subprocess
import sys
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest

import dcp_rs
from dcp_rs import Partition, planner
from dcp_rs._clients import CLIENTS
from dcp_rs.exceptions import (
    AuthenticationError,
    CheckpointError,
    ClosedError,
    ConfigError,
    DcpError,
    RollbackError,
)

NOT_PERSISTED = {"persisted_only": False}


@pytest.fixture
def nodes():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16) as cluster:
        for n in range(60):
            cluster.upsert(f"key_{n}", {"n": n})
        cluster.persist()
        yield cluster


def rows_of(partitions, client=None, **delivery):
    found = []
    for partition in partitions:
        with partition.open(client, **delivery) as stream:
            found += [row for batch in stream for row in batch.rows()]
    return found


def keys_of(partitions, client=None):
    return sorted(row["key"] for row in rows_of(partitions, client, columns=["key"]))


def written_again(text, change):
    """Somebody else's JSON, with a checksum that is right."""
    document = json.loads(text)
    change(document["content"])
    content = json.dumps(document["content"], separators=(",", ":"))
    crc = f"{zlib.crc32(content.encode()):08x}"
    fields = {**document, "crc32": crc, "content": None}
    return json.dumps(fields, separators=(",", ":")).replace("null}", f"{content}}}")


def without_retries(partition):
    text = written_again(partition.to_json(), lambda plan: plan.update(retry_timeout_ms=0))
    return Partition.from_json(text, partition._connection)


def test_a_plan_covers_each_change_once_in_parts_of_one_node(nodes):
    with nodes.connect() as client:
        plan = client.plan(partitions=4)
        assert len(plan.partitions) == 4
        assert {partition.node for partition in plan.partitions} == set(client.vbuckets_by_node())
        assert plan.size == 60 == sum(partition.size for partition in plan.partitions)
        vbuckets = [vbucket for partition in plan.partitions for vbucket in partition.vbuckets]
        high = nodes.high_seqnos()
        assert sorted(vbuckets) == sorted(vbucket for vbucket, seqno in high.items() if seqno)
        assert keys_of(plan.partitions, client) == sorted(f"key_{n}" for n in range(60))
        assert client.plan(start=plan.end).partitions == ()
        assert client.plan(start="latest").partitions == ()
        assert len(repr(plan)) < 100


def test_a_retry_has_the_bounds_of_the_plan_and_the_next_plan_goes_on_there(nodes):
    with nodes.connect() as client:
        plan = client.plan(partitions=2)
        for n in range(30, 90):
            nodes.upsert(f"key_{n}", {"n": -n})
        nodes.persist()
        # The others were written again, above the bounds.
        assert keys_of(plan.partitions, client) == sorted(f"key_{n}" for n in range(30))
        following = client.plan(start=json.loads(json.dumps(plan.end)), until="now")
        assert keys_of(following.partitions, client) == sorted(f"key_{n}" for n in range(30, 90))
        same = client.plan(start=plan.end, until=following.end)
        assert (same.end, same.size) == (following.end, following.size)
        few = client.plan(max_seqnos=10)
        assert few.size == 10


def test_a_partition_is_an_ordinary_stream(nodes):
    with nodes.connect() as client:
        (partition,) = client.plan(vbuckets=[nodes.vbucket_of("key_1")]).partitions
        with partition.open(client, columns=["key", "seqno"], ack="manual") as stream:
            batch = next(stream)
            assert set(stream.checkpoint().seqnos.values()) == {0}
            stream.ack(batch)
            assert stream.checkpoint() == batch.checkpoint
            assert stream.stats().rows == batch.num_rows > 0
            assert stream.bucket_name == client.bucket_name
        read = batch.checkpoint
        with partition.open(client, columns=["key"]) as stream:
            table = pa.table(stream)
        assert table.column_names == ["key"]
        assert table.num_rows == partition.size
        assert client.plan(start=read, vbuckets=partition.vbuckets).size == 0
        assert next(iter(client.stream(start=read, until="now")), None) is not None


READER = """
import pickle, sys
for partition in pickle.load(sys.stdin.buffer):
    with partition.open(columns=["key"]) as stream:
        print(*(row["key"] for batch in stream for row in batch.rows()), sep="\\n")
"""

FUNCTION = """
from pathlib import Path

def credentials():
    return {user!r}, Path({path!r}).read_text()
"""


@pytest.mark.shows_password("in a file, which partitions name")
@pytest.mark.parametrize("by", ["password_file", "credentials"])
def test_another_process_reads_with_credentials_by_reference(nodes, tmp_path, monkeypatch, by):
    options = nodes.connection_options
    (tmp_path / "password").write_text(options.password)
    if by == "password_file":
        options = replace(options, password=None, password_file=tmp_path / "password")
    else:
        code = FUNCTION.format(user=options.username, path=str(tmp_path / "password"))
        (tmp_path / "credentials_of_readers.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        from credentials_of_readers import credentials

        options = replace(options, username=None, password=None, credentials=credentials)
    with dcp_rs.connect(options) as client:
        plan = client.plan(partitions=3)
    sent = pickle.dumps(plan.partitions)
    assert nodes.connection_options.password.encode() not in sent
    assert pickle.loads(sent) == plan.partitions
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER],
        input=sent, capture_output=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert sorted(done.stdout.decode().split()) == sorted(f"key_{n}" for n in range(60))


def test_a_secret_in_the_options_is_left_out_and_open_says_so(nodes):
    with nodes.connect() as client:
        partition = client.plan().partitions[0]
        for sent in (
            pickle.dumps(partition),
            partition.to_json().encode(),
            repr(partition).encode(),
        ):
            assert client.options.password.encode() not in sent
            assert client.options.connection_string.encode() not in sent
        with pytest.raises(ConfigError, match=r"client: is needed.*password_file") as raised:
            partition.open()
        assert raised.value.option == "client"
        client.close()
        with pytest.raises(ClosedError):
            partition.open(client)
    with pytest.raises(ConfigError, match="client: is needed"):
        Partition.from_json(partition.to_json()).open()
    given = Partition.from_json(partition.to_json(), nodes.connection_options)
    with pytest.raises(ConfigError, match="client: is needed"):
        given.open()


@pytest.mark.shows_password("in a file, which partitions name")
def test_a_client_is_kept_for_the_next_partition(nodes, tmp_path):
    (tmp_path / "password").write_text(nodes.connection_options.password)
    options = replace(nodes.connection_options, password=None, password_file=tmp_path / "password")
    with dcp_rs.connect(options) as client:
        partitions = client.plan(partitions=6).partitions
    assert len(keys_of(partitions)) == 60
    kept = CLIENTS.get(options)
    # Connections that are open stay so.
    (tmp_path / "password").write_text("not this one")
    assert len(keys_of(partitions)) == 60
    kept.close()
    CLIENTS.forget(options)
    with pytest.raises(AuthenticationError):
        keys_of([without_retries(partitions[0])])


class TestWhatIsNotThePlanOfThisBucket:
    """It is refused before the first row."""

    @pytest.fixture
    def client(self, nodes):
        with nodes.connect() as client:
            yield client

    @pytest.fixture
    def partition(self, client):
        return client.plan(partitions=1).partitions[0]

    def test_of_another_bucket(self, partition):
        with (
            dcp_rs.testing.EmbeddedCluster(vbuckets=16) as other,
            other.connect() as client,
            pytest.raises(CheckpointError) as raised,
        ):
            partition.open(client)
        assert raised.value.code == "bucket_changed"

    @pytest.mark.shows_password("in a file, which partitions name")
    def test_of_a_bucket_that_was_created_again(self, nodes, partition, tmp_path):
        (tmp_path / "password").write_text(nodes.connection_options.password)
        options = replace(
            nodes.connection_options, password=None, password_file=tmp_path / "password"
        )
        given = Partition.from_json(partition.to_json(), options)
        assert rows_of([given])
        nodes.drop_bucket()
        nodes.create_bucket()
        with pytest.raises(CheckpointError) as raised:
            given.open()
        assert raised.value.code == "bucket_changed"

    def test_of_a_later_release(self, partition):
        later = partition.to_json().replace('"version":1', '"version":2', 1)
        with pytest.raises(ConfigError, match="version 2") as raised:
            Partition.from_json(later)
        assert raised.value.code == "plan"

    def test_that_is_damaged(self, partition):
        text = partition.to_json()
        for damaged in (
            text[:-1],
            text[1:],
            "",
            "null",
            "[]",
            "{}",
            text.replace("[0,", "[1,", 1),
            "[" * 9999,
        ):
            with pytest.raises(ConfigError, match="the plan of a read is damaged") as raised:
                Partition.from_json(damaged)
            assert raised.value.code == "plan"

    @pytest.mark.parametrize(
        "change",
        [
            lambda plan: plan.update(more=1),
            lambda plan: plan.pop("clamp"),
            lambda plan: plan.update(to="all"),
            lambda plan: plan.update(to=[[0, -1]]),
            lambda plan: plan.update(to=[[65536, 1]]),
            lambda plan: plan.update(to=plan["to"] + plan["to"][:1]),
            lambda plan: plan.update(rolled_back=[plan["to"][0][0]] * 2),
            lambda plan: plan.update(rolled_back=[999]),
            lambda plan: plan.update(start=None),
            lambda plan: plan.update(retry_timeout_ms=1 << 64),
        ],
    )
    def test_that_somebody_has_written_anew(self, partition, change):
        text = partition.to_json()
        assert Partition.from_json(written_again(text, lambda _: None)) == partition
        with pytest.raises(ConfigError, match="the plan of a read is damaged"):
            Partition.from_json(written_again(text, change))

    def test_with_bounds_that_are_reversed(self, nodes, client):
        nodes.upsert("key_1", b"{}")
        nodes.persist()
        start = client.plan().end
        nodes.upsert("key_1", b"{}")
        nodes.persist()
        (later,) = client.plan(start=start).partitions
        assert later.ranges[0].from_seqno > 0
        reversed_ = written_again(
            later.to_json(), lambda plan: plan.update(to=[[plan["to"][0][0], 0]])
        )
        with pytest.raises(ConfigError, match="ends before it begins"):
            Partition.from_json(reversed_)

    def test_with_a_vbucket_that_does_not_exist(self, client, partition):
        text = written_again(partition.to_json(), lambda plan: plan.update(to=[[900, 1]]))
        with pytest.raises(ConfigError, match="vb:900 does not exist"):
            Partition.from_json(text).open(client)

    def test_of_a_history_that_was_rolled_back_since(self, nodes, client):
        vbucket = nodes.vbucket_of("key_1")
        before = client.plan(vbuckets=[vbucket])
        read = before.end
        nodes.upsert("key_1", {"n": 2})
        nodes.persist()
        (planned,) = client.plan(start=read, vbuckets=[vbucket]).partitions
        # The new branch has as many seqnos: only its vbuuid tells.
        nodes.roll_back(vbucket, 0)
        for n in range(200):
            nodes.upsert("key_1", {"n": n})
        nodes.persist()
        with pytest.raises(RollbackError):
            rows_of([planned], client)
        again = client.plan(start=read, vbuckets=[vbucket])
        rows = rows_of(again.partitions, client)
        assert [(row["op"], row["seqno"], row["epoch"]) for row in rows] == [
            ("rollback", 0, 1),
            ("mutation", 200, 1),
        ]
        # A retry begins with the row, too.
        assert rows_of(again.partitions, client) == rows
        with pytest.raises(RollbackError):
            client.plan(start=read, vbuckets=[vbucket], on_rollback="fail")

    def test_of_a_last_plan_that_was_rolled_back_since(self, nodes, client):
        vbucket = nodes.vbucket_of("key_1")
        with client.stream(until="now", vbuckets=[vbucket]) as stream:
            list(stream)
            read = stream.checkpoint()
        nodes.upsert("key_1", {"n": 2})
        plan = client.plan(start=read, vbuckets=[vbucket], is_last=True)
        assert plan.end is None
        nodes.roll_back(vbucket, 0)
        for n in range(200):
            nodes.upsert("key_1", {"n": n})
        rows = rows_of(plan.partitions, client)
        assert [(row["op"], row["seqno"]) for row in rows][:1] == [("rollback", 0)]

    def test_with_an_end_that_is_not_there(self, nodes, client):
        vbucket = nodes.vbucket_of("key_1")
        (planned,) = client.plan(vbuckets=[vbucket]).partitions
        end = client.plan().end
        nodes.roll_back(vbucket, 0)
        with pytest.raises(DcpError):
            rows_of([planned], client)
        with pytest.raises(CheckpointError, match=f"until has seqno .* of vBucket {vbucket},"):
            client.plan(until=end)


def test_old_names_work_with_a_warning(nodes):
    with nodes.connect() as client:
        planned = planner.Planner(client)
        options = planner.PlanOptions()
        end = planned.end(planned.earliest(), options)
        with pytest.deprecated_call(match="use Planner.partitions"):
            tasks = planned.tasks(planned.earliest(), end, 4, options)
        partitions = planned.partitions(planned.earliest(), end, options, count=4)
        assert [Partition.from_json(task.plan).to_json() for task in tasks] == [
            partition.to_json() for partition in partitions
        ]
        assert [(task.node, task.ranges) for task in tasks] == [
            (partition.node, partition.ranges) for partition in partitions
        ]
