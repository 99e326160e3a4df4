"""Signals, forks, pickles and processes that die."""

import copy
import os
import pickle
import re
import signal
import socket
import subprocess
import sys

import pytest

import dcp_rs
import stores
from dcp_rs import exceptions
from dcp_rs.exceptions import ForkedProcessError, TakenOverError
from reading import rows_of
from tap import Tap

# Looks at when signal handlers run: each look for signals runs them once, however many came.
_LOOKS = """
import signal, statistics, time
looks = []
def looked(*_):
    looks.append(time.monotonic())
    if looks[-1] - looks[0] > 1.5:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt
def look():
    signal.signal(signal.SIGALRM, looked)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
def gap():
    return statistics.median(b - a for a, b in zip(looks, looks[1:]))
"""

# Waits for changes that never come, by the way its first argument names.
_WAIT = (
    _LOOKS
    + """
import asyncio, sys
import dcp_rs
way, connection_string = sys.argv[1:]
try:
    if way == "connect":
        look()
        dcp_rs.connect(connection_string, bucket="b", username="u", password="p",
            connect_timeout=60)
    client = dcp_rs.connect(
        connection_string, bucket="default", username="Administrator", password="canary-8f1c2e")
    stream = client.stream()
    async def wait():
        async for batch in stream:
            pass
    if way == "arrow":
        import pyarrow
    look()
    if way == "iterate":
        next(stream)
    elif way == "async":
        asyncio.run(wait())
    elif way == "arrow":
        pyarrow.RecordBatchReader.from_stream(stream).read_all()
    elif way == "read_all":
        stream.read_all()
except KeyboardInterrupt:
    print(gap(), flush=True)
except Exception as error:
    # The C interface of Arrow carries no exceptions, but their text.
    assert way == "arrow" and "KeyboardInterrupt" in str(error), repr(error)
    print(gap(), flush=True)
"""
)


@pytest.mark.parametrize("way", ["iterate", "async", "read_all", "arrow"])
def test_ctrl_c_ends_a_wait_within_a_tenth_of_a_second(cluster, start_python, way):
    out, err = start_python(_WAIT, way, cluster.connection_string).communicate(timeout=20)
    assert out, err
    # Half of the looks come sooner than this after the one before, whatever else the machine does.
    assert float(out) < 0.1


def test_ctrl_c_ends_connecting_to_a_host_that_is_silent(start_python):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"couchbase://127.0.0.1:{silent.getsockname()[1]}"
        out, err = start_python(_WAIT, "connect", address).communicate(timeout=20)
        assert out, err
        assert float(out) < 0.1


def in_child(function):
    """Runs `function` in a forked child; gives what it returns, or its exception."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - handed to the parent
            result = error
        os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return pickle.loads(result)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_handles_made_before_a_fork_say_so_in_the_child(cluster, client, fill):
    fill(10)
    stream = client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=3))
    batch = next(stream)
    for use in (
        client.high_seqnos,
        client.stream,
        client.close,
        lambda: next(stream),
        stream.close,
        stream.stats,
        lambda: cluster.upsert("a", b"1"),
        cluster.close,
    ):
        error = in_child(use)
        assert isinstance(error, ForkedProcessError), error
        assert "before a fork" in str(error)
    # What is plain data works on both sides, and the parent's handles still do.
    assert in_child(lambda: list(batch.rows())) == list(batch.rows())
    assert in_child(lambda: batch.checkpoint) == batch.checkpoint
    assert batch.num_rows + sum(each.num_rows for each in stream) == 10


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own(client, fill):
    documents = fill(50)
    options = client.options

    def read():
        with dcp_rs.connect(options) as own:
            return sorted(row["key"] for row in rows_of(own.stream(until="now")))

    assert in_child(read) == sorted(documents)

    def run_cluster():
        with dcp_rs.testing.EmbeddedCluster() as own, own.connect() as connected:
            own.upsert("mine", b"1")
            return [row["key"] for row in rows_of(connected.stream(until="now"))]

    assert in_child(run_cluster) == ["mine"]
    assert sorted(row["key"] for row in rows_of(client.stream(until="now"))) == sorted(documents)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_children_draw_random_numbers_of_their_own():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as cluster:
        # A generator of this thread is seeded now, and would be copied into every child.
        cluster.connect().close()
        tap = Tap(cluster)
        options = {"bucket": "default", "username": "Administrator", "password": "canary-8f1c2e"}

        def log_in():
            dcp_rs.connect(f"couchbase://127.0.0.1:{tap.port}", **options).close()

        for _ in range(3):
            assert in_child(log_in) is None
        tap.close()
    for random in (rb"n,,n=Administrator,r=([A-Za-z0-9]{16,})", rb'"i":"([0-9a-f]{16})/'):
        drawn = re.findall(random, tap.sent)
        assert len(drawn) >= 3, random
        assert len(set(drawn)) == len(drawn), f"{random} was drawn twice: {drawn}"


def test_fork_before_the_first_use_is_safe(cluster, start_python):
    program = """
import os, sys
import dcp_rs
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        client = dcp_rs.connect(
            sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e")
        print(client.num_vbuckets, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
    out, err = start_python(program, cluster.connection_string).communicate(timeout=30)
    assert out == "16\n16\n", err


@pytest.mark.shows_password("whoever pickles options wants to connect with them")
def test_options_pickle_and_connections_do_not(cluster, client):
    options = pickle.loads(pickle.dumps(client.options))
    assert options == client.options
    with dcp_rs.connect(options) as again:
        assert again.bucket_uuid == client.bucket_uuid
    for handle in (client, client.stream(until="now"), cluster):
        with pytest.raises(TypeError, match="cannot be pickled: pickle"):
            pickle.dumps(handle)


def claimed_in_child(store):
    assert in_child(lambda: store.claim(range(16))) is None


def claimed_by_pickle(store):
    pickle.loads(pickle.dumps(store)).claim(range(16))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("claim", [claimed_in_child, claimed_by_pickle])
def test_a_copy_of_a_store_in_another_process_is_another_reader(client, fill, tmp_path, claim):
    """As when a parent starts a child in place of one that hangs, each with its copy."""
    fill(10)
    store = dcp_rs.FileStore(tmp_path / "positions.json")
    with client.stream(start=store) as stream:
        batch = next(stream)
    claim(store)
    with pytest.raises(TakenOverError, match="another reader has taken over vBuckets 0-15"):
        store.save(batch.checkpoint)
    assert store.load() is None


@pytest.mark.shows_password("obstore keeps the credentials that its user gave")
def test_a_store_in_object_storage_pickles(client, fill, tmp_path, request):
    fill(10)
    store = stores.opened(stores.where("objects", request, tmp_path))
    with client.stream(start=store) as stream:
        batch = next(stream)
    claimed_by_pickle(store)
    with pytest.raises(TakenOverError, match="another reader has taken over vBuckets"):
        store.save(batch.checkpoint)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_store_in_object_storage_does_not_hang_after_a_fork(tmp_path, request):
    store = stores.opened(stores.where("objects", request, tmp_path))
    assert store.load() is None

    def claim():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        store.claim(range(16))

    error = in_child(claim)
    assert isinstance(error, ForkedProcessError)
    assert f"process {os.getpid()} used obstore before the fork" in str(error)
    assert store.load() is None


_EXIT_OF_CHILD = """
import os, sys
from dcp_rs.testing import EmbeddedCluster

cluster = EmbeddedCluster(vbuckets=1, tls=True)
file = cluster.ca_file
if os.fork() == 0:
    sys.exit()
os.wait()
print(file.exists())
cluster.close()
print(file.exists())
"""


def test_a_forked_child_that_ends_leaves_the_ca_file_of_its_parent(start_python):
    out, err = start_python(_EXIT_OF_CHILD).communicate(timeout=60)
    assert out.split() == ["True", "False"], err


def test_checkpoints_pickle(client, fill):
    fill(10)
    stream = client.stream(until="now")
    rows_of(stream)
    checkpoint = stream.checkpoint()
    assert len(checkpoint) > 0
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_batches_are_copied_but_not_pickled(client, fill):
    fill(10)
    batch = next(client.stream(until="now"))
    for each in (batch, batch[:1]):
        assert copy.copy(each) is copy.deepcopy(each) is each
        with pytest.raises(TypeError, match=r"pickle its columns \(batch\.to_pyarrow\(\)\)"):
            pickle.dumps(each)


@pytest.mark.parametrize("name", exceptions.__all__)
def test_exceptions_pickle_with_what_they_know(name):
    error = getattr(exceptions, name)("vBucket 7 is gone")
    error.vbucket, error.seqno, error.status, error.code = 7, 41, 1, "gone"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "vBucket 7 is gone"
    assert (again.vbucket, again.seqno, again.status, again.code) == (7, 41, 1, "gone")


# Reads batches, keeps each with its checkpoint, and is killed from outside half way.
_READ = """
import json, os, sys
import dcp_rs
connection_string, folder = sys.argv[1:]
client = dcp_rs.connect(
    connection_string, bucket="default", username="Administrator", password="canary-8f1c2e")
checkpoint = os.path.join(folder, "checkpoint.json")
start = dcp_rs.Checkpoint.load(checkpoint) if os.path.exists(checkpoint) else "earliest"
with open(os.path.join(folder, "rows.jsonl"), "a") as rows:
    policy = dcp_rs.BatchPolicy(max_rows=20, linger=0.0)
    for batch in client.stream(start=start, until="now", batch=policy):
        for row in batch.rows():
            rows.write(json.dumps([row["vbucket"], row["seqno"], row["key"]]) + "\\n")
        rows.flush()
        batch.checkpoint.save(checkpoint)
        print(batch.num_rows, flush=True)
        sys.stdin.readline()
print("done", flush=True)
"""


def test_a_killed_reader_goes_on_where_its_checkpoint_is(cluster, start_python, fill, tmp_path):
    import json

    documents = fill(1000)
    first = start_python(_READ, cluster.connection_string, tmp_path)
    read = 0
    while read < 500:
        read += int(first.stdout.readline())
        if read < 500:
            first.stdin.write("\n")
            first.stdin.flush()
    first.send_signal(signal.SIGKILL)
    assert first.wait(timeout=10) == -signal.SIGKILL

    second = start_python(_READ, cluster.connection_string, tmp_path)
    out, err = second.communicate("\n" * 2000, timeout=60)
    assert out.endswith("done\n"), err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sorted(key for _, _, key in rows) == sorted(documents)
    assert len({(vbucket, seqno) for vbucket, seqno, _ in rows}) == 1000
    assert sum(map(int, out.split()[:-1])) == 1000 - read


def test_an_open_stream_does_not_keep_the_process(cluster, start_python):
    program = """
import sys
import dcp_rs
client = dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e")
stream = client.stream()
cluster = dcp_rs.testing.EmbeddedCluster()
cluster.upsert("a", b"1")
print("end", flush=True)
"""
    process = start_python(program, cluster.connection_string)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "end\n"), err


def test_log_records_reach_python(cluster):
    program = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
import dcp_rs
client = dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e")
print(client.num_vbuckets)
"""
    # Nobody listens at the first address.
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"couchbase://127.0.0.1:{closed.getsockname()[1]},"
    address = cluster.connection_string.replace("couchbase://", nobody)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, address],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "16\n"
    records = [line for line in done.stderr.splitlines() if "cannot be reached" in line]
    assert records
    assert records[0].startswith("dcp_rs.consumer.connect WARNING ")
    assert "canary-8f1c2e" not in done.stderr


# Sleeps once the interpreter is gone, as handlers of C libraries at exit may do: for as many
# seconds as the exit status says.
_LEAVE = """
import ctypes, socket, sys, threading, time
import dcp_rs
listening = socket.create_server(("127.0.0.1", 0))
address = f"couchbase://127.0.0.1:{listening.getsockname()[1]}"
options = {"bucket": "b", "username": "u", "password": "p", "connect_timeout": 60}
for _ in range(10):
    threading.Thread(
        target=dcp_rs.connect, args=(address,), kwargs=options, daemon=True
    ).start()
time.sleep(0.5)
listening.detach()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
sys.exit(1)
"""


def test_daemon_threads_that_wait_do_not_disturb_the_end_of_the_process(start_python):
    for _ in range(3):
        process = start_python(_LEAVE)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, "")
