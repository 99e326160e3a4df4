"""Reading streams with asyncio."""

import asyncio
import gc
import inspect
import random
import threading
import time

import pytest

import dcp_rs
from dcp_rs.exceptions import AuthenticationError, ClosedError, ConfigError
from reading import rows_of


def connect(cluster, **options):
    return dcp_rs.connect_async(
        cluster.connection_string,
        bucket="default",
        username="Administrator",
        **{"password": "canary-8f1c2e"} | options,
    )


async def test_an_async_client_reads_what_a_client_reads(cluster, client, fill):
    documents = fill(100)
    async with (
        connect(cluster) as async_client,
        async_client.stream(until="now", columns=["key"]) as stream,
    ):
        found = [row["key"] async for batch in stream for row in batch.rows()]
        assert sorted(found) == sorted(documents)
        assert await async_client.high_seqnos() == client.high_seqnos()
        assert async_client.vbuckets_by_node() == client.vbuckets_by_node()
        assert (async_client.bucket_name, async_client.num_vbuckets) == ("default", 16)
        assert "canary-8f1c2e" not in repr(async_client)
        store = dcp_rs.MemoryStore()
        store.save(stream.checkpoint())
        # Awaited, it is closed by who awaits it.
        again = await async_client.stream(start=store, until="now")
        assert [batch async for batch in again] == []
    assert stream.is_closed
    with pytest.raises(ClosedError):
        await async_client.high_seqnos()
    with pytest.raises(ClosedError):
        await async_client.stream()


async def test_an_async_client_takes_the_options_of_the_other(cluster):
    for one, other in [
        (dcp_rs.connect, dcp_rs.connect_async),
        (dcp_rs.Client.stream, dcp_rs.AsyncClient.stream),
    ]:
        parameters = inspect.signature(one).parameters
        assert len(parameters) > 10
        assert inspect.signature(other).parameters == parameters
    with pytest.raises(ConfigError, match="connect_timeout"):
        await connect(cluster, connect_timeout=-1)
    with pytest.raises(TypeError, match="nonsense"):
        connect(cluster, nonsense=1)
    with pytest.raises(AuthenticationError):
        await connect(cluster, password="wrong")
    async with connect(cluster) as client:
        with pytest.raises(ConfigError, match=r"no collection 'no\.such'"):
            await client.stream(collections=["no.such"])


async def test_a_call_that_is_not_awaited_says_what_to_do(cluster):
    call = dcp_rs.connect_async(cluster.connection_options)
    assert "await it" in repr(call)
    with pytest.raises(TypeError, match="use `async with`"), call:
        pass
    async with call as client:
        stream = client.stream(until="now")
        with pytest.raises(TypeError, match="`async with` or await it first"):
            next(iter(stream))
        with pytest.raises(TypeError):
            list(stream)


async def test_the_loop_runs_while_a_client_connects_asks_and_opens(cluster):
    # Every answer to a login takes its time.
    slow = {"condition": {"opcode": "HELLO"}, "reaction": {"delay": {"seconds": 0.2}}}
    cluster.set_faults([slow])
    longest, last = 0.0, time.monotonic()

    async def watch():
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    watching = asyncio.create_task(watch())
    began = time.monotonic()
    async with connect(cluster) as client:
        await client.high_seqnos()
        async with client.stream():
            pass
    assert time.monotonic() - began > 0.3
    watching.cancel()
    assert longest < 0.15, "the loop stood still"


async def test_an_async_loop_reads_everything(client, fill):
    documents = fill(200)
    found = []
    async with client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=7)) as stream:
        async for batch in stream:
            found += [row["key"] for row in batch.rows()]
    assert sorted(found) == sorted(documents)


async def test_the_loop_runs_while_a_stream_waits(cluster, client):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    task = asyncio.create_task(tick())
    async with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        asyncio.get_running_loop().call_later(0.3, cluster.upsert, "a", b"1")
        batch = await anext(stream)
    task.cancel()
    assert batch.num_rows == 1
    assert ticks > 20


async def test_cancelling_a_wait_loses_no_batch(cluster, client):
    found = []
    async with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        for n in range(40):
            cluster.upsert(f"key_{n}", b"1")
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


async def test_a_batch_that_was_not_taken_is_not_in_the_checkpoint(cluster, client):
    stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.0))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    token = cluster.upsert("a", b"1")
    await asyncio.sleep(0.3)
    checkpoint = stream.checkpoint()
    assert checkpoint.seqnos.get(token.vbucket, 0) == 0
    stream.close()
    again = client.stream(start=checkpoint, until="now")
    assert [row["key"] for row in rows_of(again)] == ["a"]


async def test_two_streams_are_read_at_once(client, fill):
    documents = fill(300)

    async def read(vbuckets):
        stream = client.stream(until="now", vbuckets=vbuckets, batch=dcp_rs.BatchPolicy(max_rows=5))
        return [row["key"] async for batch in stream for row in batch.rows()]

    parts = await asyncio.gather(read(range(8)), read(range(8, 16)))
    assert sorted(key for part in parts for key in part) == sorted(documents)


async def test_errors_arrive_in_the_loop(cluster, client):
    cluster.upsert(b"\xff", b"1")
    with pytest.raises(ValueError, match="not UTF-8"):
        async for _ in client.stream(until="now"):
            pass


async def test_a_closed_stream_says_so(client):
    stream = client.stream()
    async with stream:
        pass
    with pytest.raises(ClosedError):
        await anext(stream)


def test_a_loop_that_is_gone_is_not_missed(cluster, client):
    stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.0))

    async def begin():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)

    asyncio.run(begin())
    cluster.upsert("a", b"1")
    (row,) = next(stream).rows()
    assert row["key"] == "a"
    stream.close()


async def test_waits_that_are_cancelled_leave_nothing_behind(cluster, client):
    tasks = 0
    async with client.stream(start="latest", batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        loop = asyncio.get_running_loop()
        before = threading.active_count()
        began = loop.time()
        for n in range(10_000):
            waiting = loop.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            if n == 1000:
                tasks = len(gc.get_objects())
        # It was 50 ms for each before, for whoever came next.
        assert loop.time() - began < 20
        assert threading.active_count() == before
        gc.collect()
        assert len(gc.get_objects()) < tasks + 1000
        began = loop.time()
        stream.stats(), stream.events(), stream.vbucket_stats(), stream.checkpoint()
        assert loop.time() - began < 0.1
        cluster.upsert("a", b"1")
        batch = await asyncio.wait_for(anext(stream), 5)
        assert [row["key"] for row in batch.rows()] == ["a"]
        assert loop.time() - began < 1


async def test_cancelling_at_any_moment_loses_and_doubles_nothing(cluster, client):
    found = []
    written = threading.Thread(
        target=lambda: [cluster.upsert(f"key_{n}", b"1") for n in range(3000)]
    )
    async with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0, max_rows=3)) as stream:
        written.start()
        moments = random.Random(7)
        idle = 0
        while idle < 100:
            waiting = asyncio.ensure_future(anext(stream))
            for _ in range(moments.randrange(4)):
                await asyncio.sleep(moments.choice([0, 0, 0.0005]))
            # The batch may be there by now and not taken, or the loop about to be told of it.
            waiting.cancel()
            try:
                batch = await waiting
            except asyncio.CancelledError:
                idle += not written.is_alive()
                continue
            idle = 0
            found += [row["key"] for row in batch.rows()]
    written.join()
    assert sorted(found) == sorted(f"key_{n}" for n in range(3000))


async def test_readers_that_wait_at_once_are_served_in_the_order_they_asked(cluster, client):
    served = []

    async def read(name):
        batch = await anext(stream)
        served.append((name, [row["key"] for row in batch.rows()]))

    async with client.stream(
        batch=dcp_rs.BatchPolicy(linger=0.0), vbuckets=[cluster.vbucket_of("a")]
    ) as stream:
        readers = []
        for n in range(5):
            readers.append(asyncio.create_task(read(n)))
            await asyncio.sleep(0)
        # One that gives up hands its turn on, first or not.
        for n in (0, 3):
            readers[n].cancel()
        for value in (b"1", b"2", b"3"):
            cluster.upsert("a", value)
            await asyncio.sleep(0.3)
        await asyncio.gather(*readers, return_exceptions=True)
    assert served == [(1, ["a"]), (2, ["a"]), (4, ["a"])]


async def test_every_reader_that_waits_sees_the_end(client):
    stream = client.stream()
    readers = [asyncio.ensure_future(anext(stream)) for _ in range(3)]
    thread = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
    await asyncio.sleep(0.2)
    began = asyncio.get_running_loop().time()
    stream.close()
    for reader in readers:
        with pytest.raises((StopAsyncIteration, ClosedError)):
            await reader
    assert await thread is None
    assert asyncio.get_running_loop().time() - began < 1


async def test_a_loop_that_closes_under_a_reader_does_not_keep_the_others_waiting(cluster, client):
    stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.0))
    kept = []

    def run_and_close():
        other = asyncio.new_event_loop()
        reading = anext(stream)
        kept.append(reading)

        async def begin():
            kept.append(asyncio.ensure_future(reading))
            await asyncio.sleep(0.05)

        other.run_until_complete(begin())
        other.close()

    await asyncio.to_thread(run_and_close)
    cluster.upsert("a", b"1")
    batch = await asyncio.wait_for(anext(stream), 5)
    assert [row["key"] for row in batch.rows()] == ["a"]
    stream.close()


def test_numbers_are_there_while_another_thread_waits(client):
    stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.0))
    waiting = threading.Thread(target=next, args=(stream, None))
    waiting.start()
    time.sleep(0.2)
    slowest = 0.0
    for _ in range(200):
        began = time.monotonic()
        stream.stats(), stream.events(), stream.vbucket_stats(), stream.checkpoint()
        slowest = max(slowest, time.monotonic() - began)
    began = time.monotonic()
    stream.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert time.monotonic() - began < 0.045
    # A wait of its own would take up to 50 ms.
    assert slowest < 0.045


async def test_an_async_client_plans_what_a_client_plans(cluster, client, fill):
    fill(50)
    cluster.persist()
    async with connect(cluster) as async_client:
        plan = await async_client.plan(partitions=3)
        assert plan.end == client.plan(partitions=3).end
        assert await async_client.collections() == client.collections()
        found = set()
        for partition in plan.partitions:
            stream = await asyncio.to_thread(partition.open, async_client, columns=["key"])
            async with stream:
                found |= {row["key"] async for batch in stream for row in batch.rows()}
        with pytest.raises(TypeError, match="partition"):
            await async_client.plan(partition=3)
    assert len(found) == 50
