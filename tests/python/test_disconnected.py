"""What figures say while the nodes cannot be reached."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

import dcp_rs
from dcp_rs.cli._top import Monitor, picture
from dcp_rs.metrics import PrometheusCollector
from lag import until

# Seconds in which a closed connection has to be seen, by a stream and by a replication's report.
SOON = 5.0
NODES = 2


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=NODES, vbuckets=8) as running:
        for n in range(20):
            running.upsert(f"key_{n}", {"n": n})
        yield running


@pytest.fixture
def reading(cluster):
    """Gives a function that opens a client and a stream of it, which is read all the time."""
    with contextlib.ExitStack() as stack:
        over = threading.Event()

        def opened(**options):
            client = stack.enter_context(cluster.connect(**options))
            stream = client.stream()
            thread = threading.Thread(
                target=lambda: [stream.poll(0.1) for _ in iter(over.is_set, True)]
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
            until(lambda: stream.stats().lag == 0)
            return client, stream

        yield opened


def seconds_until(done, within):
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < within
        time.sleep(0.05)
    return time.monotonic() - begun


def kill_all(cluster):
    for node in range(NODES):
        cluster.kill(node)


def restart_all(cluster):
    for node in range(NODES):
        cluster.restart(node)


def test_lag_is_unknown_while_no_node_can_be_reached(cluster, reading):
    client, stream = reading()
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(stream, name="s", vbuckets=True, collections=True))
    labels = {"bucket": "default", "stream": "s"}

    def metric(name, **more):
        return registry.get_sample_value(name, labels | more)

    assert (metric("dcp_rs_lag"), metric("dcp_rs_disconnected_vbuckets")) == (0, 0)
    until(lambda: metric("dcp_rs_collection_lag", collection="_default._default") == 0)
    monitor = Monitor(client, stream)
    kill_all(cluster)
    seconds_until(lambda: stream.stats().disconnected == 8, SOON)
    sample = monitor.sample()
    assert (sample.lag, {node.lag for node in sample.nodes}) == (None, {None})
    with (console := Console(width=120)).capture() as shown:
        console.print(picture(sample))
    assert "lag unknown" in shown.get()
    stats = stream.stats()
    assert (stats.lag, stats.max_lag, stats.connections) == (None, None, 0)
    assert {each.lag for each in stream.vbucket_stats()} == {None}
    assert metric("dcp_rs_disconnected_vbuckets") == 8
    for name in ("dcp_rs_lag", "dcp_rs_lag_max"):
        assert metric(name) is None
    assert metric("dcp_rs_vbucket_lag", vbucket="0") is None
    assert metric("dcp_rs_collection_lag", collection="_default._default") is None
    restart_all(cluster)
    until(lambda: stream.stats().lag is not None)
    assert (stream.stats().disconnected, metric("dcp_rs_disconnected_vbuckets")) == (0, 0)


def test_lag_is_unknown_on_a_silent_link(cluster, reading):
    _, stream = reading(noop_interval=1)
    # Nothing more is read or written, and every connection stays open.
    cluster.set_faults([{"condition": {}, "reaction": "half_open"}])
    seconds_until(lambda: stream.stats().disconnected == 8, 2 * 1 + SOON)
    assert stream.stats().lag is None
    cluster.set_faults([])
    until(lambda: stream.stats().lag == 0)


def test_a_vbucket_that_moves_is_not_disconnected(cluster, reading):
    _, stream = reading()
    seen = set()
    for node in range(NODES):
        for vbucket in range(8):
            cluster.move_vbucket(vbucket, node)
            seen.add(stream.stats().disconnected)
    until(lambda: stream.stats().streaming == 8)
    assert seen == {0}


def test_a_replication_says_that_it_is_cut_off(cluster, tmp_path):
    found, stop = [], threading.Event()
    with cluster.connect() as client:
        target = f"duckdb://{tmp_path}/d.duckdb?table=t"
        run = threading.Thread(
            target=dcp_rs.replicate,
            args=(client, target),
            kwargs={"stop": stop, "on_progress": found.append},
        )
        run.start()

        def now():
            return (found[-1].phase, found[-1].lag) if found else None

        try:
            until(lambda: now() == ("following", 0))
            # Nothing is known of some vBuckets; the others are followed.
            cluster.kill(0)
            seconds_until(lambda: now() == ("following", None), SOON)
            cluster.kill(1)
            seconds_until(lambda: now() == ("disconnected", None), SOON)
            reports = len(found)
            until(lambda: len(found) > reports + 1)
            restart_all(cluster)
            until(lambda: now() == ("following", 0))
        finally:
            stop.set()
            run.join()


def test_all_lines_are_json(cluster, tmp_path):
    process = subprocess.Popen(
        [
            sys.executable, "-W", "ignore", "-m", "dcp_rs", "replicate",
            f"{cluster.connection_string}/default", f"duckdb://{tmp_path}/d.duckdb?table=t",
            "--username", "Administrator", "--json", "--retry-timeout", "5",
        ],
        env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        lines = []
        for text in process.stderr:
            lines.append(json.loads(text))
            if lines[-1].get("phase") == "following" and lines[-1]["lag"] == 0:
                break
        kill_all(cluster)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    lines += [json.loads(text) for text in rest.splitlines()]
    assert process.returncode == 1
    (phases,) = [{each["lag"] for each in lines if each.get("phase") == "disconnected"}]
    assert phases == {None}
    logged = [each for each in lines if "level" in each]
    assert {each["level"] for each in logged[:-1]} == {"WARNING"}
    assert any("connection lost" in each["message"] for each in logged)
    assert lines[-1]["level"] == "ERROR"
