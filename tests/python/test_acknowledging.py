"""Batches that the application acknowledges itself, in any order."""

import asyncio
import threading

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError
from reading import rows_of


def manual(client, *, linger=0.1, **options):
    policy = dcp_rs.BatchPolicy(max_rows=10, linger=linger)
    return client.stream(ack="manual", batch=policy, vbuckets=[0], **options)


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=1, vbuckets=1) as running:
        yield running


def test_the_checkpoint_never_passes_a_batch_that_is_not_acknowledged(client, fill):
    fill(40)
    with manual(client) as stream:
        batches = [next(stream) for _ in range(4)]
        stream.ack(batches[1])
        stream.ack(batches[3])
        assert len(stream.checkpoint()) == 0
        stream.ack(batches[0])
        assert stream.checkpoint().positions[0].seqno == 20
        checkpoint = stream.checkpoint()
    seqnos = [row["seqno"] for row in rows_of(client.stream(start=checkpoint, until="now"))]
    assert seqnos == list(range(21, 41))
    stream.ack(batches[2])
    assert stream.checkpoint() == batches[3].checkpoint


def test_batches_are_acknowledged_while_the_next_one_is_waited_for(cluster, client, fill):
    fill(10)
    with manual(client, linger=0.0) as stream:
        first = next(stream)
        later = threading.Timer(0.2, lambda: (stream.ack(first), cluster.upsert("later", b"1")))
        later.start()
        assert next(stream).num_rows == 1
        later.join()
        assert stream.checkpoint().positions[0].seqno == 10


def test_asynchronous_readers_acknowledge_too(client, fill):
    fill(40)

    async def read():
        async with manual(client, until="now") as stream:
            batches = [batch async for batch in stream]
            for batch in reversed(batches):
                assert len(stream.checkpoint()) == 0
                stream.ack(batch)
            return stream.checkpoint().positions[0].seqno

    assert asyncio.run(read()) == 40


def test_a_server_waits_for_what_is_not_acknowledged(cluster, fill):
    fill(400, size=1024)
    with (
        cluster.connect(buffer_size=64 * 1024) as client,
        manual(client, until="now") as stream,
    ):
        rows = 0
        for batch in stream:
            assert stream.stats().buffered_bytes <= 64 * 1024 + 2048
            rows += batch.num_rows
            stream.ack(batch)
        assert rows == 400


def test_what_cannot_be_acknowledged_is_refused(client, fill):
    fill(10)
    with client.stream(until="now") as stream, manual(client, until="now") as other:
        batch = next(stream)
        for wrong in (stream, other):
            with pytest.raises(ConfigError):
                wrong.ack(batch)
        with pytest.raises(ConfigError, match="batch by batch"):
            other.read_all()
        with pytest.raises(ConfigError, match="batch by batch"):
            other.__arrow_c_stream__()
    with pytest.raises(ConfigError, match="ack"):
        client.stream(ack="never")
