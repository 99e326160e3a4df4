"""Faults ordered from the embedded cluster, and the ways to order them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError, DcpError, ProtocolError, UnusablePacketError

BUSY_ONCE = {
    "name": "busy once",
    "condition": {"opcode": "DCP_STREAM_REQ", "nth": 1},
    "reaction": {"answer": {"status": "ETMPFAIL"}},
}


def keys(stream):
    return sorted(row["key"] for batch in stream for row in batch.rows())


def test_a_busy_server_is_asked_again(cluster, client, fill):
    documents = fill(50)
    cluster.set_faults([BUSY_ONCE])
    assert keys(client.stream(until="now")) == sorted(documents)
    assert cluster.fault_counts() == [1]


def test_a_cut_connection_loses_no_change(cluster, client, fill):
    documents = fill(500)
    cluster.set_faults(
        [
            {
                "condition": {"opcode": "DCP_MUTATION", "nth": 200},
                "reaction": {"disconnect_after": {"bytes": 30}},
            }
        ]
    )
    assert set(keys(client.stream(until="now"))) == set(documents)
    assert cluster.fault_counts() == [1]


def test_rules_begin_and_end_while_a_stream_runs(cluster, client):
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0)) as stream:
        cluster.upsert("before", "1")
        assert keys([next(stream)]) == ["before"]
        cluster.set_faults([{"condition": {"opcode": "DCP_MUTATION"}, "reaction": "drop"}])
        cluster.upsert("lost", "1")
        wait_for(lambda: cluster.fault_counts() == [1])
        cluster.set_faults([])
        cluster.upsert("after", "1")
        assert keys([next(stream)]) == ["after"]


def test_rules_are_read_back_and_ended(cluster):
    assert cluster.faults() == []
    cluster.set_faults([BUSY_ONCE, {"reaction": "no_noop"}])
    first, second = cluster.faults()
    assert (first["name"], first["condition"]["nth"]) == ("busy once", 1)
    assert first["condition"]["opcode"] == ["DCP_STREAM_REQ"]
    assert second == {"condition": {}, "reaction": "no_noop"}
    cluster.set_faults(cluster.faults())
    assert cluster.faults() == [first, second]
    cluster.set_faults([])
    assert (cluster.faults(), cluster.fault_counts()) == ([], [])


def test_a_mistyped_name_is_answered_with_the_nearest_and_changes_nothing(cluster):
    cluster.set_faults([BUSY_ONCE])
    wrong = {"condition": {"opcode": "DCP_MUTATON"}, "reaction": "drop"}
    with pytest.raises(
        ConfigError, match=r'\[1\].*"DCP_MUTATON"; did you mean "DCP_MUTATION"'
    ) as raised:
        cluster.set_faults([{"reaction": "drop"}, wrong])
    assert raised.value.code == "fault_rule"
    assert cluster.faults()[0]["name"] == "busy once"


def test_a_client_that_cannot_go_on_says_so(cluster, fill):
    fill(10)
    cluster.set_faults(
        [{"condition": {"opcode": "DCP_STREAM_REQ"}, "reaction": {"answer": {"status": "EACCESS"}}}]
    )
    with cluster.connect(retry_timeout=1.0) as client, pytest.raises(DcpError):
        keys(client.stream(until="now"))


def test_a_packet_that_cannot_be_used_is_named(cluster, client):
    cluster.upsert("key", "1")
    vbucket = next(each for each, seqno in cluster.high_seqnos().items() if seqno)
    inverted = {"corrupt": {"offset": 31}}  # the last byte of the snapshot's first seqno
    cluster.set_faults([{"condition": {"opcode": "DCP_SNAPSHOT_MARKER"}, "reaction": inverted}])
    with pytest.raises(UnusablePacketError, match="DCP_SNAPSHOT_MARKER with seqno 255") as raised:
        keys(client.stream())
    assert isinstance(raised.value, ProtocolError)
    assert raised.value.code == "unusable_packet"
    assert (raised.value.vbucket, raised.value.seqno) == (vbucket, 255)
    assert not raised.value.is_retryable


def test_without_retries_nothing_is_tried_again(cluster, fill):
    documents = fill(50)
    with cluster.connect(retry_timeout=0.0) as client:
        assert keys(client.stream(until="now")) == sorted(documents)
        cluster.set_faults([BUSY_ONCE])
        with pytest.raises(TimeoutError, match=r"vb:\d+ could not be reached: .*ETMPFAIL"):
            keys(client.stream(until="now"))
    assert cluster.fault_counts() == [1]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def serve(tmp_path):
    processes = []

    def start(rules, *arguments):
        path = tmp_path / "faults.json"
        path.write_text(json.dumps(rules))
        process = subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "dcp_rs", "serve", "--json",
                "--faults", path, *map(str, arguments),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process, path

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_served_cluster_follows_a_file_and_reads_it_again(serve, tmp_path):
    (tmp_path / "password").write_text("secret word\n")
    process, path = serve([BUSY_ONCE], "--password-file", tmp_path / "password")
    facts = json.loads(process.stdout.readline())
    with dcp_rs.connect(
        facts["connection_string"], bucket="default", username="Administrator",
        password="secret word",
    ) as client:  # fmt: skip
        assert keys(client.stream(until="now")) == []
        path.write_text("[{]")
        os.kill(process.pid, signal.SIGHUP)
        assert "kept the former faults" in process.stderr.readline()
        path.write_text('[{"reaction": "no_noop"}, {"reaction": "half_open"}]')
        os.kill(process.pid, signal.SIGHUP)
        assert process.stderr.readline().startswith(
            "dcp-rs: 2 fault rules; faults fired: busy once: "
        )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("dcp-rs: stopped after 0 changes; faults fired: 0: 0, 1: ")


def test_a_served_cluster_goes_wrong_from_one_signal_to_the_next(serve):
    process, path = serve([])
    facts = json.loads(process.stdout.readline())

    def follow(rules):
        path.write_text(json.dumps(rules))
        os.kill(process.pid, signal.SIGHUP)
        assert process.stderr.readline().startswith(f"dcp-rs: {len(rules)} fault rule")

    def connect():
        dcp_rs.connect(
            facts["connection_string"],
            bucket="default",
            username="Administrator",
            password="password",
        ).close()

    connect()
    refusal = {"answer": {"status": "EACCESS"}}
    follow([{"condition": {"opcode": "SELECT_BUCKET"}, "reaction": refusal}])
    with pytest.raises(DcpError):
        connect()
    follow([])
    connect()


def test_faults_that_are_none_stop_the_command_before_it_serves(serve):
    process, _ = serve([{"reaction": "dorp"}])
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert 'did you mean "drop"?' in err
