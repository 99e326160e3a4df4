"""`poll`: a wait that ends."""

import signal
import threading
import time

import pytest

import dcp_rs
from dcp_rs.exceptions import ClosedError, ConfigError


def test_a_poll_gives_what_comes_in_time_and_none_after_it(cluster, client):
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0)) as stream:
        for timeout in (0, 0.01, 0.3):
            begun = time.monotonic()
            assert stream.poll(timeout) is None
            assert timeout <= time.monotonic() - begun < timeout + 0.2
        begun = time.monotonic()
        threading.Timer(0.2, lambda: cluster.upsert("a", b"1")).start()
        assert [row["key"] for row in stream.poll(30).rows()] == ["a"]
        assert 0.1 < time.monotonic() - begun < 5
        assert not stream.is_over
        # Nothing was lost by the polls that gave nothing, and both ways read the same stream.
        cluster.upsert("b", b"1")
        assert [row["key"] for row in next(stream).rows()] == ["b"]
    assert stream.is_over
    with pytest.raises(ClosedError):
        stream.poll(0)


def test_a_poll_of_nothing_takes_what_is_there(cluster, client):
    cluster.upsert("a", b"1")
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0)) as stream:
        end = time.monotonic() + 30
        while (batch := stream.poll(0)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert batch.num_rows == 1


def test_polls_read_to_the_end_and_know_it(cluster, fill):
    documents = fill(400, size=4000)
    # Many windows of flow control: each poll acknowledges the batch before it.
    with cluster.connect(buffer_size=64 * 1024) as client:
        stream, keys = client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=10)), []
        while not stream.is_over:
            batch = stream.poll(30)
            keys += [] if batch is None else [row["key"] for row in batch.rows()]
        assert sorted(keys) == sorted(documents)
        begun = time.monotonic()
        assert stream.poll(30) is None
        assert time.monotonic() - begun < 1, "it waited for what cannot come"


def test_a_poll_does_not_keep_a_processor_busy(client):
    with client.stream() as stream:
        stream.poll(0.5)
        begun = time.thread_time()
        assert stream.poll(1.5) is None
        assert time.thread_time() - begun < 0.1


_WAIT = """
import sys, time
import dcp_rs
with dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e"
) as client, client.stream() as stream:
    stream.poll(0.1)
    print("waits", flush=True)
    try:
        stream.poll(60)
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
"""


def test_ctrl_c_ends_a_poll(cluster, start_python):
    process = start_python(_WAIT, cluster.connection_string)
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    assert float(line) - begun < 0.1


def test_a_signals_handler_may_read_the_stream_that_is_polled(cluster, client):
    seen = []
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0)) as stream:

        def read(*_):
            cluster.upsert("a", b"1")
            seen.append(stream.poll(30).num_rows)

        before = signal.signal(signal.SIGALRM, read)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert stream.poll(0.5) is None
        finally:
            signal.signal(signal.SIGALRM, before)
    assert seen == [1]


@pytest.mark.parametrize("timeout", [None, "1", True, -1, float("nan"), 90_000])
def test_a_timeout_that_is_none_is_refused(client, timeout):
    with client.stream() as stream, pytest.raises(ConfigError, match=r"^timeout: "):
        stream.poll(timeout)
