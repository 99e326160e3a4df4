"""What a stream delivers: up to an end, what is persisted, no system documents."""

import time

import pytest

import dcp_rs
from dcp_rs.planner import Planner, PlanOptions


@pytest.fixture
def single():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        yield cluster, client


def seqnos(stream):
    return [row["seqno"] for batch in stream for row in batch.rows()]


@pytest.mark.parametrize("persisted_only", [False, True])
def test_a_planned_read_delivers_exactly_up_to_its_end(single, persisted_only):
    cluster, client = single
    for n in range(20):
        cluster.upsert(f"key_{n}", b"1")
    planner = Planner(client)
    start, read, lengths = planner.earliest(), [], []
    for most in (7, 1, 7, 5):
        options = PlanOptions(max_seqnos=most, persisted_only=persisted_only)
        deadline = time.monotonic() + 20
        while (end := planner.end(start, options)) == start:
            assert time.monotonic() < deadline, "nothing is persisted"
            time.sleep(0.01)
        (partition,) = planner.partitions(start, end, options, count=1)
        found = seqnos(partition.open(client))
        read += found
        lengths.append(len(found))
        start = end
    assert lengths == [7, 1, 7, 5]
    assert read == list(range(1, 21))
    assert seqnos(client.stream(until={0: 7})) == list(range(1, 21)), "the whole snapshot"


def test_changes_are_delivered_once_they_are_persisted(single):
    cluster, client = single
    for n in range(20):
        cluster.upsert(f"key_{n}", b"1")
    stream = client.stream(until="now", persisted_only=True)
    assert seqnos(stream) == list(range(1, 21))
    stats = stream.stats()
    assert (stats.unpersisted_rows, stats.unpersisted_bytes, stats.complete) == (0, 0, 1)
    assert (stats.unpersisted_seconds, stats.diverged) == (0, 0)
    stream = client.stream(until="now")
    assert seqnos(stream) == list(range(1, 21))
    (unasked,) = stream.vbucket_stats()
    assert unasked.persisted_seqno is None


def test_records_of_transactions_are_hidden_unless_asked_for(single):
    cluster, client = single
    for key in ("a", "_txn:atr-1", "b", "_txn:client-record"):
        cluster.upsert(key, b"{}")
    stream = client.stream(until="now")
    assert seqnos(stream) == [1, 3]
    assert stream.checkpoint().seqnos == {0: 4}
    assert seqnos(client.stream(until="now", include="system_documents")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"persisted_only": 1}, "persisted_only"),
        ({"include": None}, "include"),
    ],
)
def test_wrong_options_are_refused_by_name(client, options, named):
    with pytest.raises(dcp_rs.exceptions.ConfigError, match=named):
        client.stream(**options)
