"""Which changes a stream delivers: by key, operation and time."""

import time
from datetime import UTC, datetime, timedelta

import pytest

import dcp_rs
from dcp_rs import _dcp_rs
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.planner import Planner, PlanOptions

SHOWN = {"columns": ["op", "key", "cas"], "until": "now"}


def changes(client, **options):
    stream = client.stream(**(SHOWN | options))
    rows = [row for batch in stream for row in batch.rows()]
    return stream, {(row["op"], row["key"]): row["cas"] for row in rows}


def test_keys_are_matched_whole(cluster, client):
    for key in ("order::1", "order::21", "user::1", "an order::1", "user::ü"):
        cluster.upsert(key, b"{}")
    for keys, wanted in [
        ("order::*", {"order::1", "order::21"}),
        (["order::?1", "user::?"], {"order::21", "user::1", "user::ü"}),
        ("order::1", {"order::1"}),
        ("nothing*", set()),
    ]:
        stream, found = changes(client, keys=keys)
        assert {key for _, key in found} == wanted
        seqnos = {vb: seqno for vb, seqno in stream.checkpoint().seqnos.items() if seqno}
        assert seqnos == {vb: seqno for vb, seqno in client.high_seqnos().items() if seqno}


def test_operations_are_chosen(cluster, client):
    for key in "abc":
        cluster.upsert(key, b"{}")
    cluster.remove("b")
    cluster.expire("c")
    assert set(changes(client, ops=["mutation"])[1]) == {("mutation", "a")}
    gone = changes(client, ops=["deletion", "expiration"])[1]
    assert set(gone) == {("deletion", "b"), ("expiration", "c")}


def test_changes_before_a_time_are_left_out(cluster, client):
    cluster.upsert("old", b"{}")
    time.sleep(0.01)
    cluster.upsert("new", b"{}")
    times = {key: cas / 1e9 for (_, key), cas in changes(client)[1].items()}
    assert times["new"] - times["old"] > 0.005
    between = (times["new"] + times["old"]) / 2
    for since in (between, datetime.fromtimestamp(between, UTC)):
        stream, found = changes(client, since=since)
        assert set(found) == {("mutation", "new")}
        assert sum(stream.checkpoint().seqnos.values()) == 2
    assert len(changes(client, since=0)[1]) == 2
    assert not changes(client, since=datetime.now(UTC) + timedelta(days=1))[1]


def test_a_checkpoint_goes_on_with_no_more_than_it_was_made_with(cluster, client, tmp_path):
    for key in ("a1", "b1", "c1"):
        cluster.upsert(key, b"{}")
    options = {"keys": ["a*", "b*"], "ops": ["mutation", "deletion"], "since": 1000}
    stream, found = changes(client, **options)
    assert {key for _, key in found} == {"a1", "b1"}
    checkpoint = stream.checkpoint()
    kept = checkpoint.filter
    assert (kept.keys, kept.ops, kept.since) == (
        ("a*", "b*"), ("deletion", "mutation"), pytest.approx(1000, abs=1e-4),
    )  # fmt: skip
    assert "keys ['a*', 'b*'], operations deletion, mutation, since" in str(kept)
    checkpoint.save(tmp_path / "kept")
    checkpoint = dcp_rs.Checkpoint.load(tmp_path / "kept")
    assert checkpoint.filter == kept
    for key in ("a2", "b2", "c2"):
        cluster.upsert(key, b"{}")
    for narrower in ({}, {"keys": "b*"}, {"ops": ["mutation"]}, {"since": 2000}):
        _, found = changes(client, start=checkpoint, **(options | narrower))
        assert {key for _, key in found} == ({"b2"} if "keys" in narrower else {"a2", "b2"})
    for wider, named in [
        ({"keys": None}, "all keys"),
        ({"keys": ["a*", "c*"]}, "keys .*c[*]"),
        ({"ops": None}, "operations expiration"),
        ({"ops": ["expiration"]}, "operations expiration"),
        ({"since": None}, "of any time"),
        ({"since": 999}, "since"),
    ]:
        with pytest.raises(CheckpointError, match=f"also asks for .*{named}"):
            client.stream(start=checkpoint, **(options | wider))


def test_system_events_are_rows_all_the_same(cluster, client):
    cluster.create_collection("events")
    cluster.upsert("a", b"{}")
    found = changes(client, keys="nothing", ops=["deletion"], system_events=True)[1]
    assert {op for op, _ in found} == {"system_event"}


def test_a_planned_read_leaves_the_same_rows_out(cluster, client):
    for key in ("a1", "b1", "a2"):
        cluster.upsert(key, b"{}")
    options = PlanOptions(persisted_only=False)
    planner = Planner(client, keys=["a*"], ops=["mutation"], since=1000)
    start, end = planner.earliest(), planner.end(planner.earliest(), options)
    read = set()
    for task in planner.tasks(start, end, 2, options):
        reader, stream = _dcp_rs.open_task(vars(cluster.connection_options), None, task.plan, {})
        read |= {row["key"] for batch in dcp_rs.ChangeStream(stream) for row in batch.rows()}
        reader.close()
    assert read == {"a1", "a2"}
    with pytest.raises(CheckpointError, match="also asks for all keys"):
        Planner(client, ops=["mutation"], since=1000).end(end, options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keys": []}, "keys: names no pattern"),
        ({"keys": [""]}, "keys: a pattern has 0 bytes"),
        ({"keys": ["x" * 513]}, "1 to 512"),
        ({"keys": 1}, "keys: "),
        ({"ops": []}, "ops: names no operation"),
        ({"ops": ["mutations"]}, "ops: .*'mutation', 'deletion'"),
        ({"ops": "mutation"}, "ops: "),
        ({"since": datetime(2026, 1, 1)}, "since: .*time zone"),  # noqa: DTZ001 - what is refused
        ({"since": -1}, "since: -1 is not a time from 1970"),
        ({"since": "yesterday"}, "since: .*datetime or seconds"),
        ({"since": True}, "since: "),
    ],
)
def test_what_is_wrong_is_named(client, options, says):
    with pytest.raises(ConfigError, match=says):
        client.stream(**options)
