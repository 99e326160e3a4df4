"""Reading streams with asyncio."""

import asyncio

import pytest

from dcp_rs.exceptions import ClosedError
from reading import rows_of


async def test_an_async_loop_reads_everything(client, fill):
    documents = fill(200)
    found = []
    async with client.stream(until="now", batch_rows=7) as stream:
        async for batch in stream:
            found += [row["key"] for row in batch.rows()]
    assert sorted(found) == sorted(documents)


async def test_the_loop_runs_while_a_stream_waits(producer, client):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    task = asyncio.create_task(tick())
    async with client.stream(linger=0.0) as stream:
        asyncio.get_running_loop().call_later(0.3, producer.upsert, "a", b"1")
        batch = await anext(stream)
    task.cancel()
    assert batch.num_rows == 1
    assert ticks > 20


async def test_cancelling_a_wait_loses_no_batch(producer, client):
    found = []
    async with client.stream(linger=0.0) as stream:
        for n in range(40):
            producer.upsert(f"key_{n}", b"1")
            # Cancelled before, while and after the batch arrives.
            try:
                batch = await asyncio.wait_for(anext(stream), n * 0.0005)
            except TimeoutError:
                continue
            found += [row["key"] for row in batch.rows()]
        while len(found) < 40:
            batch = await asyncio.wait_for(anext(stream), 5)
            found += [row["key"] for row in batch.rows()]
    assert sorted(found) == sorted(f"key_{n}" for n in range(40))


async def test_a_batch_that_was_not_taken_is_not_in_the_checkpoint(producer, client):
    stream = client.stream(linger=0.0)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    token = producer.upsert("a", b"1")
    await asyncio.sleep(0.3)
    checkpoint = stream.checkpoint()
    assert checkpoint.seqnos.get(token.vbucket, 0) == 0
    stream.close()
    again = client.stream(start=checkpoint, until="now")
    assert [row["key"] for row in rows_of(again)] == ["a"]


async def test_two_streams_are_read_at_once(client, fill):
    documents = fill(300)

    async def read(vbuckets):
        stream = client.stream(until="now", vbuckets=vbuckets, batch_rows=5)
        return [row["key"] async for batch in stream for row in batch.rows()]

    parts = await asyncio.gather(read(range(8)), read(range(8, 16)))
    assert sorted(key for part in parts for key in part) == sorted(documents)


async def test_errors_arrive_in_the_loop(producer, client):
    producer.upsert(b"\xff", b"1")
    with pytest.raises(ValueError, match="not UTF-8"):
        async for _ in client.stream(until="now"):
            pass


async def test_a_closed_stream_says_so(client):
    stream = client.stream()
    async with stream:
        pass
    with pytest.raises(ClosedError):
        await anext(stream)


def test_a_loop_that_is_gone_is_not_missed(producer, client):
    stream = client.stream(linger=0.0)

    async def begin():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)

    asyncio.run(begin())
    producer.upsert("a", b"1")
    (row,) = next(stream).rows()
    assert row["key"] == "a"
    stream.close()
