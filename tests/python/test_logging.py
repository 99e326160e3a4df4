"""Log records of the engine in Python's `logging`."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

import dcp_rs
from dcp_rs.exceptions import ConnectError, DcpError
from dcp_rs.planner import Planner, PlanOptions

_CONNECT = """
import logging, sys, threading, time
import dcp_rs
def connect():
    return dcp_rs.connect(
        sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e")
"""


def run(program, *arguments, timeout=30):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CONNECT + program, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def nobody():
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


@pytest.fixture
def unreachable(cluster):
    """A connection string whose first address leads nowhere, which is logged."""
    return cluster.connection_string.replace("couchbase://", f"couchbase://{nobody()},")


class Records(logging.Handler):
    """Keeps records; calls `then` for each."""

    def __init__(self, then=lambda _record: None):
        super().__init__()
        self.records = []
        self.then = then

    def emit(self, record):
        self.records.append(record)
        self.then(record)

    def named(self, text):
        return [record for record in self.records if text in record.getMessage()]


@pytest.fixture
def records():
    """Takes everything that the engine logs."""
    logger, handler = logging.getLogger("dcp_rs"), Records()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def eventually(condition, patience=10):
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def connect(address):
    return dcp_rs.connect(
        address, bucket="default", username="Administrator", password="canary-8f1c2e"
    )


def test_records_are_there_once_a_call_returns_or_raises(unreachable, records):
    before = time.time()
    for _ in range(20):
        records.records.clear()
        connect(unreachable).close()
        (record, *_) = records.named("cannot be reached")
        assert record.name == "dcp_rs.consumer.connect"
        assert (record.levelno, record.threadName) == (logging.WARNING, "dcp_rs")
        assert record.filename == "failure_log.rs"
        assert record.lineno > 0
        assert before - 0.001 <= record.created <= time.time()
        assert abs(record.created % 1 * 1000 - record.msecs) < 1.001

        records.records.clear()
        with pytest.raises(ConnectError):
            dcp_rs.connect(f"couchbase://{nobody()}", bucket="b", username="u", password="p")
        assert records.named("cannot be reached")


def test_a_record_has_the_time_when_it_was_made(unreachable, records):
    slow = threading.Event()
    records.then = lambda _record: slow.wait(0.5)
    before = time.time()
    with connect(unreachable):
        connected = time.time()
    eventually(lambda: records.named("cannot be reached"))
    slow.set()
    assert all(before - 0.001 <= r.created <= connected for r in records.named("cannot be"))


def test_a_level_takes_effect_at_once_for_calls_and_soon_for_all_else(unreachable, records):
    consumer = logging.getLogger("dcp_rs.consumer")

    def reached():
        records.records.clear()
        connect(unreachable).close()
        return bool(records.named("cannot be reached"))

    try:
        assert reached()
        consumer.setLevel(logging.ERROR)
        assert not reached()
        logging.getLogger("dcp_rs.consumer.connect").setLevel(logging.DEBUG)
        assert reached()
        logging.getLogger("dcp_rs.consumer.connect").setLevel(logging.NOTSET)
        assert not reached()
        consumer.setLevel(logging.NOTSET)
        assert reached()
        logging.disable(logging.WARNING)
        assert not reached()
    finally:
        logging.disable(logging.NOTSET)
        consumer.setLevel(logging.NOTSET)


def test_a_level_that_changes_while_nothing_is_called_is_noticed(cluster, records):
    logger = logging.getLogger("dcp_rs")
    logger.setLevel(logging.WARNING)
    host, _, port = cluster.connection_string.removeprefix("couchbase://").partition(":")
    port = int(port.split(",")[0])

    def knock():
        # A packet that is none: the node says so, and closes the connection.
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n                ")
            while connection.recv(1000):
                pass

    cluster.high_seqnos()
    time.sleep(0.5)
    knock()
    time.sleep(0.1)
    assert not records.named("connection closed")
    logger.setLevel(logging.DEBUG)
    time.sleep(0.5)
    knock()
    eventually(lambda: records.named("connection closed"))
    assert {r.name for r in records.named("connection closed")} == {
        "dcp_rs.producer.server.connection"
    }


def test_no_call_waits_for_one_that_logs_under_a_lock():
    # The map changes under the lock that planning takes, and each change is logged.
    program = """
from dcp_rs.planner import Planner, PlanOptions
import faulthandler
faulthandler.dump_traceback_later(20, exit=True)
logging.getLogger("dcp_rs").addHandler(logging.NullHandler())
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
cluster = dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16)
client = cluster.connect()
stream = client.stream()
planner, options = Planner(client), PlanOptions(persisted_only=False)
planner.observe()
start = planner.earliest()
end = planner.end(start, options)
stop = time.monotonic() + 3
def move():
    node = 0
    while time.monotonic() < stop:
        cluster.move_vbucket(0, node)
        node = 1 - node
        time.sleep(0.002)
moving = threading.Thread(target=move)
moving.start()
calls = 0
while time.monotonic() < stop:
    planner.partitions(start, end, options, count=4)
    client.vbuckets_by_node()
    calls += 1
moving.join()
print(calls > 100)
"""
    assert run(program).stdout == "True\n"


def test_the_engine_goes_on_while_python_does_not(cluster):
    # `PyDLL` calls C without letting other Python threads run.
    program = """
import ctypes
logging.getLogger("dcp_rs").addHandler(logging.NullHandler())
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
client = connect()
stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.0))
next(stream)
print("ready", flush=True)
sys.stdin.readline()
ctypes.PyDLL(None).usleep(1_500_000)
print(stream.stats().buffered_bytes, flush=True)
"""
    cluster.upsert("first", b"1")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CONNECT + program, cluster.connection_string],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # One that waits would be one too many.
        env=os.environ | {"TOKIO_WORKER_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.2)
        # Each move is logged by the client; its vBucket gets no document, so that none is held up.
        for n in range(60):
            cluster.move_vbucket(0, n % 2)
            time.sleep(0.002)
        written = 0
        for n in range(500):
            key = f"key_{n}"
            if cluster.vbucket_of(key) != 0:
                cluster.upsert(key, b"x" * 1000)
                written += 1000
        assert int(process.stdout.readline()) > written
    finally:
        process.kill()
        process.communicate()


def test_records_that_find_no_room_are_counted_and_told_once(cluster, records):
    address = cluster.connection_string.removeprefix("couchbase://").split(",")[0]
    host, _, port = address.rpartition(":")
    hold, held = threading.Event(), threading.Event()

    def wait(_record):
        held.set()
        assert hold.wait(60)

    def knock():
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n                ")
            while connection.recv(1000):
                pass

    records.then = wait
    time.sleep(0.5)
    knock()
    assert held.wait(10)
    for _ in range(5000):
        knock()
    records.then = lambda _record: None
    hold.set()
    eventually(lambda: records.named("were lost"))
    (told,) = records.named("were lost")
    assert (told.name, told.levelno) == ("dcp_rs", logging.WARNING)
    closed = len(records.named("connection closed"))
    lost = int(told.getMessage().split()[0])
    assert lost > 0
    assert closed + lost == 5001
    records.records.clear()
    knock()
    eventually(lambda: records.named("connection closed"))
    assert not records.named("were lost")


def test_a_handler_may_use_dcp_rs(cluster, unreachable, records):
    seqnos = []

    def read(record):
        if "cannot be reached" in record.getMessage():
            with cluster.connect() as client:
                seqnos.append(client.high_seqnos())

    records.then = read
    with connect(unreachable):
        pass
    eventually(lambda: seqnos)


def test_a_caller_may_hold_what_a_handler_waits_for(records):
    lock = threading.Lock()
    records.then = lambda _record: lock.acquire(timeout=20) and lock.release()
    began = time.monotonic()
    with lock, pytest.raises(ConnectError):
        dcp_rs.connect(f"couchbase://{nobody()}", bucket="b", username="u", password="p")
    assert time.monotonic() - began < 10
    eventually(lambda: records.named("cannot be reached"))


def test_a_handler_that_raises_stops_nothing(unreachable, records, monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raising: raised.append(raising.exc_value))

    def fail(_record):
        raise ValueError("this handler is broken")

    logging.getLogger("dcp_rs").addFilter(fail)
    logging.getLogger("dcp_rs.consumer.connect").addFilter(fail)
    try:
        connect(unreachable).close()
    finally:
        logging.getLogger("dcp_rs").removeFilter(fail)
        logging.getLogger("dcp_rs.consumer.connect").removeFilter(fail)
    assert "this handler is broken" in map(str, raised)
    connect(unreachable).close()
    assert records.named("cannot be reached")


def test_records_are_flushed_when_the_interpreter_ends(unreachable):
    # Each handler takes its time, so that some are left at the end.
    program = """
class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.3)
        print(record.getMessage(), flush=True)
logging.getLogger("dcp_rs").addHandler(Slow())
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
client = connect()
stream = client.stream()
"""
    assert "cannot be reached" in run(program, unreachable).stdout


def test_a_handler_that_hangs_does_not_keep_the_process(unreachable):
    # It does not hold the handler's lock, for which `logging` itself waits at the end.
    program = """
class Hangs(logging.Handler):
    def handle(self, record):
        threading.Event().wait()
logging.getLogger("dcp_rs").addHandler(Hangs())
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
client = connect()
print("end", flush=True)
"""
    began = time.monotonic()
    assert run(program, unreachable).stdout == "end\n"
    assert time.monotonic() - began < 15


def test_a_forked_child_logs_too(unreachable):
    # The parent's threads log while it forks.
    program = """
import os
class Print(logging.Handler):
    def emit(self, record):
        os.write(1, f"{os.getpid()} {record.getMessage()}\\n".encode())
logging.getLogger("dcp_rs").addHandler(Print())
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
client = connect()
cluster = dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16)
stream = cluster.connect().stream()
stop = False
def move():
    n = 0
    while not stop:
        cluster.move_vbucket(0, n % 2)
        n += 1
moving = threading.Thread(target=move)
moving.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        connect().close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop = True
moving.join()
"""
    lines = run(program, unreachable, timeout=60).stdout.splitlines()
    children = [line.split()[1] for line in lines if line.startswith("child ")]
    assert len(children) == 20
    for child in children:
        assert any(line.startswith(f"{child} a node cannot be reached") for line in lines)


# A reader is warned that it may not read statistics.
@pytest.mark.administrator
def test_nothing_is_asked_of_python_for_records_that_nobody_wants(cluster, monkeypatch):
    from dcp_rs import _logging

    called = []
    logging.getLogger("dcp_rs").setLevel(logging.NOTSET)
    monkeypatch.setattr(_logging, "hand_on", lambda *call: called.append(call))
    with cluster.connect() as client:
        planner = Planner(client)
        planner.observe()
        planner.end(planner.earliest(), PlanOptions(persisted_only=False))
        for n in range(20):
            cluster.move_vbucket(0, n % 2)
        client.high_seqnos()
    assert called == []


class TestTroubleWhileOpening:
    """Whatever waits for a node says so at once, and then less and less often."""

    @pytest.fixture
    def cluster(self):
        with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=4, password="canary-8f1c2e") as own:
            yield own

    @staticmethod
    def told(records, *parts):
        """When something with these parts was logged as a warning, in seconds from the first."""
        made = [
            record.created for record in records.records
            if record.levelno == logging.WARNING
            and all(part in record.getMessage() for part in parts)
        ]  # fmt: skip
        return [at - made[0] for at in made]

    def fails_late(self, records, call, *parts):
        """Asserts that a call fails after seconds in which it said several times why."""
        records.records.clear()
        began = time.time()
        with pytest.raises(DcpError):
            call()
        waited = time.time() - began
        told = self.told(records, *parts)
        assert told, [record.getMessage() for record in records.records]
        first = min(
            record.created for record in records.records if parts[-1] in record.getMessage()
        )
        assert first - began < 3
        assert waited > 3
        # Rounds of requests are far more frequent at first.
        assert 2 <= len(told) <= 4, told

    def test_of_a_stream(self, cluster, records):
        address = cluster.connection_string.removeprefix("couchbase://").split(",")[1]
        with cluster.connect(retry_timeout=4) as client:
            cluster.kill(1)
            unreachable = ("cannot be reached", address, "refused")
            self.fails_late(records, client.stream, *unreachable)
            cluster.restart(1)
            cluster.set_password("canary-8f1c2e-2")
            refused = ("cannot be reached", address, "check user name and password")
            self.fails_late(records, client.stream, *refused)

    def test_of_a_stream_whose_certificate_is_refused(self, records, tmp_path):
        ca = tmp_path / "ca.pem"
        with dcp_rs.testing.EmbeddedCluster(tls=True, password="canary-8f1c2e") as cluster:
            ca.write_text(cluster.ca_pem)
            options = cluster.connection_options
            options = replace(
                options, connection_string=cluster.tls_connection_string, tls_ca=ca, retry_timeout=4
            )
            with dcp_rs.connect(options) as client:
                with dcp_rs.testing.EmbeddedCluster(tls=True) as other:
                    ca.write_text(other.ca_pem)
                parts = ("cannot be reached", "127.0.0.1", "give the cluster's CA")
                self.fails_late(records, client.stream, *parts)

    def test_of_a_node_that_refuses_a_request(self, cluster, records):
        with cluster.connect(retry_timeout=4) as client:
            cluster.set_faults([
                {"condition": {"opcode": "GET_ALL_VB_SEQNOS"},
                 "reaction": {"answer": {"status": "EBUSY"}}},
            ])  # fmt: skip
            address = cluster.connection_string.removeprefix("couchbase://").split(",")[1]
            self.fails_late(records, client.stream, address, "GET_ALL_VB_SEQNOS", "EBUSY")

    def test_of_a_connect(self, cluster, records):
        cluster.set_faults([
            {"condition": {"opcode": "HELLO"}, "reaction": {"answer": {"status": "ETMPFAIL"}}},
        ])  # fmt: skip
        address = cluster.connection_string.removeprefix("couchbase://").split(",")[1]
        connect = lambda: cluster.connect(connect_timeout=4)  # noqa: E731 - a call to make
        self.fails_late(records, connect, "cannot be reached", address, "ETMPFAIL")

    def test_of_a_planner(self, cluster, records):
        with cluster.connect(connect_timeout=4, retry_timeout=1) as client:
            planner = Planner(client)
            cluster.kill(1)
            address = cluster.connection_string.removeprefix("couchbase://").split(",")[1]
            self.fails_late(records, planner.observe, "cannot be reached", address, "refused")

    def test_of_a_replication(self, cluster, records, tmp_path):
        pytest.importorskip("duckdb")
        with cluster.connect(retry_timeout=4) as client:
            cluster.kill(1)
            address = cluster.connection_string.removeprefix("couchbase://").split(",")[1]
            target = f"duckdb:///{tmp_path / 'x.duckdb'}?table=t"
            replicate = lambda: dcp_rs.replicate(client, target, once=True)  # noqa: E731 - likewise
            self.fails_late(records, replicate, "cannot be reached", address, "refused")
