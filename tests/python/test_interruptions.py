"""Cancellations and Ctrl-C at random moments, forks with streams open, threads on one stream."""

import json
import os
import random
import signal
import threading

import pytest

import dcp_rs

# How often the tests interrupt and fork; `make long` sets more.
CANCELLATIONS = int(os.environ.get("DCP_CANCELLATIONS", "450"))
BY_SIGNAL = CANCELLATIONS // 3
BY_TASK = CANCELLATIONS - BY_SIGNAL
FORKS = int(os.environ.get("DCP_FORKS", "20"))
SEED = int(os.environ.get("DCP_INTERRUPTIONS_SEED", "1"))

# Longest time for one step: a program that hangs shows where, and fails.
_PATIENCE = 60

_BEGIN = """
import asyncio, faulthandler, gc, json, multiprocessing, os, random, signal, sys, threading, time
import dcp_rs
from dcp_rs.exceptions import ForkedProcessError

address, count, seed, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
chance = random.Random(seed)
store = dcp_rs.FileStore(path)
rows, checkpoint = [], None
kept = set()

options = dcp_rs.ConnectionOptions(
    connection_string=address, bucket="default", username="Administrator", password="canary-8f1c2e"
)

def connect():
    return dcp_rs.connect(options)

def stream_of(client, **options):
    start = "earliest" if checkpoint is None else checkpoint
    return client.stream(start=start, batch=dcp_rs.BatchPolicy(max_rows=3, linger=0.0), **options)

def changes(batch):
    return [(row["vbucket"], row["seqno"], row["key"]) for row in batch.rows()]

def is_alive():
    faulthandler.dump_traceback_later(PATIENCE, exit=True)

def opened():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

def settled(before):
    # Its watchdog is a thread too.
    faulthandler.cancel_dump_traceback_later()
    # Tasks and threads see a moment later that they are over.
    until = time.monotonic() + 30
    while True:
        gc.collect()
        now = opened()
        if all(n <= b for n, b in zip(now, before)) or time.monotonic() > until:
            return now
        time.sleep(0.1)

""".replace("PATIENCE", str(_PATIENCE))

# The rest of the changes, after the last interruption.
_REST = """
print("enough", flush=True)
sys.stdin.readline()
is_alive()
with connect() as client:
    for batch in stream_of(client, until="now"):
        rows += changes(batch)
print(json.dumps({"rows": rows, "before": before, "after": after, "interrupts": interrupts}))
faulthandler.cancel_dump_traceback_later()
"""

# Ctrl-C while a client connects, a stream opens, a batch is waited for, its checkpoint is stored,
# or either is closed. Rows count once they and their checkpoint are noted together.
_SYNC = (
    _BEGIN
    + """
armed = False
def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)

def read(client, batches, noted):
    with stream_of(client) as stream:
        for _, batch in zip(range(batches), stream):
            noted.append((changes(batch), batch.checkpoint))
            store.save(batch.checkpoint)

with connect() as client:
    with stream_of(client) as stream:
        next(stream)
    stream = batch = None
    before = opened()
    print("ready", flush=True)
    interrupts = 0
    while interrupts < count:
        is_alive()
        noted, own = [], chance.random() < 0.3
        batches = chance.randrange(1, 20)
        try:
            armed = True
            if own:
                with connect() as other:
                    read(other, batches, noted)
            else:
                read(client, batches, noted)
            armed = False
        except KeyboardInterrupt:
            interrupts += 1
        armed = False
        other = None
        for some, at in noted:
            rows += some
            checkpoint = at
            kept.add(at.to_json())
    found = store.load()
    assert found is None or found.to_json() in kept, "the store has what was never saved"
    after = settled(before)
"""
    + _REST
)

# Tasks that are cancelled or run into a timeout: while they connect, open, wait, store and close,
# or in the next batch of a stream that is read on afterwards.
_ASYNC = (
    _BEGIN
    + """
def note(batch):
    global checkpoint
    rows.extend(changes(batch))
    checkpoint = batch.checkpoint
    kept.add(checkpoint.to_json())
    return checkpoint

async def read(client):
    if chance.random() < 0.3:
        async with dcp_rs.connect_async(options) as own:
            if chance.random() < 0.3:
                await own.high_seqnos()
            await read_with(own)
    else:
        await read_with(client)

async def read_with(client):
    async with stream_of(client) as stream:
        async for batch in stream:
            at = note(batch)
            if chance.random() < 0.2:
                await asyncio.shield(asyncio.to_thread(store.save, at))

async def next_of(stream):
    note(await anext(stream))

async def interrupted(reading):
    "Whether it was, by a timeout or a cancellation."
    wait = chance.choice([0.0, 0.0002, 0.001, 0.004]) * chance.random() * 2
    if chance.random() < 0.3:
        try:
            await asyncio.wait_for(reading, wait)
        except TimeoutError:
            return True
        return False
    task = asyncio.ensure_future(reading)
    for _ in range(chance.randrange(3)):
        await asyncio.sleep(0)
    await asyncio.sleep(wait)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False

async def main():
    # Nothing here is interrupted but what is read.
    async with dcp_rs.connect_async(options) as client:
        return await interrupt(client)

async def interrupt(client):
    interrupts, stream = 0, None
    while interrupts < count:
        is_alive()
        if stream is None and chance.random() < 0.05:
            stream = await stream_of(client)
        elif stream is not None and chance.random() < 0.02:
            stream.close()
            stream = None
        reading = read(client) if stream is None else next_of(stream)
        interrupts += await interrupted(reading)
    if stream is not None:
        stream.close()
    found = await asyncio.to_thread(store.load)
    assert found is None or found.to_json() in kept, "the store has what was never saved"
    return interrupts

with connect() as client:
    with stream_of(client) as stream:
        next(stream)
    stream = None
    before = opened()
    print("ready", flush=True)
    interrupts = asyncio.run(main())
    after = settled(before)
"""
    + _REST
)

# Children are forked while two threads read: each is refused its parent's handles, some connect for
# themselves and read as many rows as there are, and each ends like a process or like a worker.
_FORKS = (
    _BEGIN
    + """
held = []
def in_child(streams, client, reads):
    # The watchdog's thread was not forked, and setting it again would wait for it.
    signal.alarm(30)
    refused = 0
    for use in (client.stream, streams[0].stats, lambda: next(streams[1]), streams[0].close,
                client.close, streams[1].checkpoint):
        try:
            use()
        except ForkedProcessError:
            refused += 1
    if refused != 6:
        os._exit(2)
    if reads:
        with connect() as own, stream_of(own, until="now") as stream:
            if len({row[:2] for batch in stream for row in changes(batch)}) < 100:
                os._exit(3)
    signal.alarm(0)

def read(stream):
    for batch in stream:
        held.append(changes(batch))

context = multiprocessing.get_context("fork")
with connect() as client:
    warm = context.Process(target=int)
    warm.start(); warm.join(); warm.close()
    before = opened()
    print("ready", flush=True)
    policy = dcp_rs.BatchPolicy(max_rows=3, linger=0.0)
    with client.stream(vbuckets=range(8), batch=policy) as one, \\
            client.stream(vbuckets=range(8, 16), batch=policy) as two:
        readers = [threading.Thread(target=read, args=[each]) for each in (one, two)]
        for reader in readers:
            reader.start()
        while sum(map(len, list(held))) < 100:
            is_alive()
            time.sleep(0.01)
        for n in range(count):
            is_alive()
            arguments = ((one, two), client, n % 5 == 0)
            if n % 2:
                child = context.Process(target=in_child, args=arguments)
                child.start()
                child.join()
                code = child.exitcode
                child.close()
            else:
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        in_child(*arguments)
                        code = 0
                    finally:
                        os._exit(code)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code == 0, f"fork {n}: the child ended with {code}"
            time.sleep(chance.random() * 0.002)
        print("enough", flush=True)
        total = int(sys.stdin.readline())
        until = time.monotonic() + PATIENCE
        while sum(map(len, list(held))) < total and time.monotonic() < until:
            time.sleep(0.01)
    for reader in readers:
        reader.join()
    reader = readers = one = two = child = None
    rows = [row for some in held for row in some]
    after = settled(before)
    print(json.dumps({"rows": rows, "before": before, "after": after, "interrupts": count}))
""".replace("PATIENCE", str(_PATIENCE))
)


class Writer:
    """Writes documents, each under a key of its own, until it is stopped."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.written = []
        self.write(200)
        self._thread.start()

    def write(self, count):
        for _ in range(count):
            key = f"key_{len(self.written)}"
            token = self._cluster.upsert(key, b"1")
            self.written.append([token.vbucket, token.seqno, key])

    def _write(self):
        while not self._stop.wait(0.005):
            self.write(2)

    def stop(self):
        self._stop.set()
        self._thread.join()


@pytest.fixture
def writer(cluster):
    running = Writer(cluster)
    yield running
    running.stop()


def run(process, writer, meanwhile=None):
    """Runs a program to its end; gives what it reports. `meanwhile` is called while it works."""
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    is_enough = threading.Event()
    if meanwhile is not None:
        calling = threading.Thread(target=meanwhile, args=[is_enough], daemon=True)
        calling.start()
    line = process.stdout.readline()
    is_enough.set()
    assert line == "enough\n", process.communicate()[1]
    if meanwhile is not None:
        calling.join()
    writer.stop()
    out, error = process.communicate(f"{len(writer.written)}\n", timeout=2 * _PATIENCE)
    assert process.returncode == 0, error
    return json.loads(out)


def assert_whole(got, writer, count):
    assert got["interrupts"] >= count
    assert sorted(got["rows"]) == sorted(writer.written), f"seed {SEED}: lost or doubled"
    assert all(
        after <= before for before, after in zip(got["before"], got["after"], strict=True)
    ), f"files and threads: {got['before']} before, {got['after']} after"


@pytest.mark.timeout(3600)
def test_ctrl_c_at_random_moments_loses_doubles_and_leaves_nothing(
    cluster, writer, start_python, tmp_path
):
    process = start_python(
        _SYNC, cluster.connection_string, BY_SIGNAL, SEED, tmp_path / "checkpoint.json"
    )
    chance = random.Random(SEED)

    def interrupt(is_enough):
        while not is_enough.wait(chance.choice([0.002, 0.01, 0.04]) * chance.random()):
            process.send_signal(signal.SIGINT)

    assert_whole(run(process, writer, interrupt), writer, BY_SIGNAL)


@pytest.mark.timeout(3600)
def test_cancellations_at_random_awaits_lose_double_and_leave_nothing(
    cluster, writer, start_python, tmp_path
):
    process = start_python(
        _ASYNC, cluster.connection_string, BY_TASK, SEED, tmp_path / "checkpoint.json"
    )
    assert_whole(run(process, writer), writer, BY_TASK)


@pytest.mark.timeout(3600)
def test_forks_with_open_streams_do_not_disturb_their_parent(
    cluster, writer, start_python, tmp_path
):
    process = start_python(
        _FORKS, cluster.connection_string, FORKS, SEED, tmp_path / "checkpoint.json"
    )
    assert_whole(run(process, writer), writer, FORKS)


def test_eight_threads_on_one_stream_have_each_row_once(client, fill):
    documents = fill(5000)
    found = [[] for _ in range(8)]
    ready = threading.Barrier(8)

    def read(rows):
        ready.wait()
        for batch in stream:
            rows += [(row["vbucket"], row["seqno"], row["key"]) for row in batch.rows()]

    with client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=3)) as stream:
        readers = [threading.Thread(target=read, args=[rows], daemon=True) for rows in found]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(_PATIENCE)
            assert not reader.is_alive(), "a thread waits for ever"
        assert stream.stats().rows == len(documents)
    every = [row for rows in found for row in rows]
    assert sorted(key for _, _, key in every) == sorted(documents)
    assert sum(map(bool, found)) > 1, "one thread had all"
    # What one thread is given it is given in order.
    for rows in found:
        last = {}
        for vbucket, seqno, _ in rows:
            assert last.get(vbucket, 0) < seqno
            last[vbucket] = seqno
