"""What a stream delivers: up to an end, what is persisted, no system documents."""

import pytest

import dcp_rs


@pytest.fixture
def single():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        yield cluster, client


def seqnos(stream):
    return [row["seqno"] for batch in stream for row in batch.rows()]


def test_a_clamped_stream_delivers_exactly_up_to_its_end(single):
    cluster, client = single
    for n in range(20):
        cluster.upsert(f"key_{n}", b"1")
    start, ends = "earliest", [7, 8, 15, 20]
    for before, end in zip([0, *ends], ends, strict=False):
        stream = client.stream(start=start, until={0: end}, clamp=True)
        assert seqnos(stream) == list(range(before + 1, end + 1))
        start = stream.checkpoint()
        at = start.positions[0]
        assert (at.seqno, at.snapshot_end) == (end, 20)
    assert seqnos(client.stream(until={0: 7})) == list(range(1, 21)), "the whole snapshot"


def test_changes_are_delivered_once_they_are_persisted(single):
    cluster, client = single
    for n in range(20):
        cluster.upsert(f"key_{n}", b"1")
    stream = client.stream(until="now", persisted_only=True, end_persisted=True)
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
    assert seqnos(client.stream(until="now", system_documents=True)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clamp": True}, "clamp"),
        ({"end_persisted": True, "until": "now"}, "end_persisted"),
        ({"persisted_only": 1}, "persisted_only"),
        ({"system_documents": None}, "system_documents"),
        ({"compressed": "snappy"}, "compressed"),
    ],
)
def test_wrong_options_are_refused_by_name(client, options, named):
    with pytest.raises(dcp_rs.exceptions.ConfigError, match=named):
        client.stream(**options)
