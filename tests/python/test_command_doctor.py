"""`dcp-rs doctor`, `seqnos`, `lag` and `top --once`: what is wrong, and how far behind."""

import json
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, start_http_server

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.metrics import PrometheusCollector

USER = ("--username", "Administrator", "--connect-timeout", "3")


@pytest.fixture
def run_at(monkeypatch, capfd):
    """Runs a command on an address; gives its exit status and the records that it printed."""
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")

    def command(name, address, *arguments):
        done = main([name, address, *USER, *map(str, arguments), "--json"])
        shown = capfd.readouterr()
        said = shown.out.replace("user name and password", "").replace("--tls-key-password-env", "")
        assert "canary-8f1c2e" not in said
        return done, [json.loads(line) for line in shown.out.splitlines()], shown.err

    return command


@pytest.fixture
def run(cluster, run_at):
    """Runs a command on the cluster."""
    return lambda name, *arguments: run_at(name, f"{cluster.connection_string}/default", *arguments)


def steps(findings):
    return [(finding["step"], finding["status"]) for finding in findings]


def failed(findings):
    """The one step that failed."""
    (finding,) = [finding for finding in findings if finding["status"] == "failed"]
    return finding


def test_every_step_of_a_healthy_cluster_is_ok(cluster, run):
    status, findings, _ = run("doctor")
    assert status == 0
    assert steps(findings) == [
        ("dns", "ok"), ("tcp", "ok"), ("dns", "ok"), ("tcp", "ok"), ("login", "ok"),
        ("bucket", "ok"), ("node", "ok"), ("node", "ok"), ("seqnos", "ok"), ("dcp", "ok"),
        ("dcp", "ok"),
    ]  # fmt: skip
    assert cluster.bucket_uuid in findings[5]["detail"]
    assert sum(int(each["detail"].split()[0]) for each in findings if each["step"] == "dcp") == 16


def test_a_port_where_nothing_listens_is_named(run_at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status, findings, _ = run_at("doctor", f"couchbase://127.0.0.1:{port}/default")
    assert status == 1
    assert steps(findings) == [("dns", "ok"), ("tcp", "failed"), ("login", "skipped")]
    assert failed(findings)["target"] == f"127.0.0.1:{port}"
    assert "11210" in failed(findings)["advice"]


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("couchbase://user:word@127.0.0.1/default", "must not hold a user name or password"),
        ("couchbase://[::1", "brackets"),
        ("http://127.0.0.1:1/default", "must start with couchbase://"),
    ],
)
def test_a_connection_string_that_is_wrong_is_named(run_at, address, what):
    status, findings, _ = run_at("doctor", address)
    assert status == 1
    assert findings[-1]["step"] == "options"
    assert what in findings[-1]["detail"]
    assert "word" not in findings[-1]["target"]


def test_a_connection_string_without_a_host_fails(run_at):
    status, findings, _ = run_at("doctor", "couchbase://host=http:1/default")
    assert (status, steps(findings)) == (1, [("login", "failed")])


def test_a_name_without_an_address_is_named(run_at):
    status, findings, _ = run_at("doctor", "couchbase://a.invalid:1,b.invalid:1/default")
    assert status == 1
    assert steps(findings) == [("dns", "failed"), ("dns", "failed"), ("login", "skipped")]
    # A single name may stand for a service, which the client asks for.
    status, findings, _ = run_at("doctor", "couchbase://a.invalid/default")
    assert status == 1
    assert steps(findings)[0] == ("dns", "skipped")
    assert "_couchbase._tcp.a.invalid" in findings[0]["detail"]
    assert failed(findings)["target"] in {"a.invalid", "Administrator"}


def test_a_wrong_password_and_a_wrong_bucket_are_told_apart(cluster, run, run_at, monkeypatch):
    status, findings, _ = run_at("doctor", f"{cluster.connection_string}/none")
    assert status == 1
    assert steps(findings)[-2:] == [("login", "ok"), ("bucket", "failed")]
    assert failed(findings)["target"] == "none"
    assert "Data DCP Reader" in failed(findings)["advice"]
    assert "connection string" in failed(findings)["advice"]
    monkeypatch.setenv("DCP_RS_PASSWORD", "wrong")
    status, findings, _ = run("doctor")
    assert status == 1
    assert steps(findings)[-1] == ("login", "failed")


def test_a_node_that_is_down_is_named_though_others_answer(cluster, run_at):
    first, second = cluster.connection_string.removeprefix("couchbase://").split(",")
    cluster.kill(1)
    status, findings, _ = run_at("doctor", f"couchbase://{first}/default")
    assert status == 1
    nodes = {each["target"]: each["status"] for each in findings if each["step"] == "node"}
    assert nodes == {first: "ok", second: "failed"}
    (node,) = [each for each in findings if (each["step"], each["target"]) == ("node", second)]
    assert "--network external" in node["advice"]
    # The other node's streams are tried all the same.
    ends = [(each["step"], each["target"], each["status"]) for each in findings[-3:]]
    assert ends == [
        ("seqnos", "default", "skipped"), ("dcp", first, "ok"), ("dcp", second, "skipped"),
    ]  # fmt: skip
    assert findings[-3]["detail"] == "1 of 2 nodes cannot be reached"


def test_a_user_without_a_name_or_rights_is_told_what_to_give(run_at, monkeypatch, capfd):
    nobody = dcp_rs.testing.User(username="nobody", password="canary-8f1c2e", reads=[])
    partly = dcp_rs.testing.User(username="partly", password="canary-8f1c2e", reads=["inventory"])
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, users=[nobody, partly]) as cluster:
        address = f"{cluster.connection_string}/default"
        status, findings, _ = run_at("doctor", address, "--username", "nobody")
        assert (status, steps(findings)[-1]) == (1, ("bucket", "failed"))
        assert "user 'nobody' lacks rights in bucket 'default'" in failed(findings)["detail"]
        status, findings, _ = run_at("doctor", address, "--username", "partly")
        assert (status, failed(findings)["step"]) == (1, "dcp")
        assert "user 'partly'" in failed(findings)["detail"]
        assert "data_dcp_reader" in failed(findings)["detail"]
        monkeypatch.delenv("DCP_RS_PASSWORD")
        assert main(["doctor", address, "--json"]) == 1
        shown = capfd.readouterr()
        assert "username" in shown.out + shown.err


@pytest.mark.parametrize("opcode", ["DCP_STREAM_REQ", "DCP_OPEN"])
def test_a_user_who_may_not_stream_is_told_which_role_is_missing(cluster, run, opcode):
    cluster.set_faults(
        [{"condition": {"opcode": opcode}, "reaction": {"answer": {"status": "EACCESS"}}}]
    )
    status, findings, _ = run("doctor")
    assert status == 1
    assert failed(findings)["step"] == "dcp"
    assert "Data DCP Reader" in failed(findings)["advice"]


def test_a_vbucket_that_does_not_open_is_told_with_its_node(cluster, run):
    cluster.set_faults([
        {
            "condition": {"opcode": "DCP_STREAM_REQ", "vbucket": 3},
            "reaction": {"answer": {"status": "ETMPFAIL"}},
        }
    ])  # fmt: skip
    status, findings, _ = run("doctor")
    assert status == 1
    assert failed(findings)["step"] == "dcp"
    assert [each["status"] for each in findings[:-2]] == ["ok"] * 9


def test_tls_is_tried_with_the_authorities_that_are_given(run_at, tmp_path):
    with dcp_rs.testing.EmbeddedCluster(nodes=1, vbuckets=4, tls=True) as cluster:
        address = f"{cluster.tls_connection_string}/default"
        status, findings, _ = run_at("doctor", address)
        assert status == 1
        assert steps(findings) == [
            ("dns", "ok"), ("tcp", "ok"), ("tls", "failed"), ("login", "skipped")
        ]  # fmt: skip
        assert "--tls-ca" in failed(findings)["advice"]
        ca = tmp_path / "ca.pem"
        ca.write_text(cluster.ca_pem)
        status, findings, _ = run_at("doctor", address, "--tls-ca", ca)
        assert status == 0
        assert ("tls", "ok") in steps(findings)
        plain = f"{cluster.connection_string}/default".replace("couchbase://", "couchbases://")
        status, findings, _ = run_at("doctor", plain, "--tls-ca", ca)
        assert status == 1
        assert "11207" in failed(findings)["advice"]
        missing = tmp_path / "none"
        status, findings, err = run_at("doctor", address, "--tls-ca", missing)
        assert status == 1
        assert "tls" in err or failed(findings)["step"] == "tls"


def test_seqnos_are_those_of_the_server(cluster, fill, run):
    fill(50)
    status, records, _ = run("seqnos")
    assert status == 0
    assert {each["vbucket"]: each["high_seqno"] for each in records} == cluster.high_seqnos()
    nodes = set(cluster.connection_string.removeprefix("couchbase://").split(","))
    assert {each["node"] for each in records} == nodes
    _, some, _ = run("seqnos", "--vbuckets", "3,5-6")
    assert some == [each for each in records if each["vbucket"] in {3, 5, 6}]


@pytest.mark.parametrize("command", ["seqnos", "lag"])
def test_vbuckets_that_do_not_exist_are_refused(client, run, tmp_path, command):
    kept = tmp_path / "kept"
    client.stream(until="now").checkpoint().save(kept)
    of = ["--checkpoint", kept] if command == "lag" else []
    status, records, err = run(command, *of, "--vbuckets", "3,16-20")
    assert (status, records) == (1, [])
    assert "--vbuckets: 16-20 do not exist: the bucket has the vBuckets 0-15" in err


def test_lag_is_counted_against_a_checkpoint(cluster, client, fill, run, tmp_path):
    fill(30)
    kept = tmp_path / "kept"
    stream = client.stream(until="now")
    for _ in stream:
        pass
    stream.checkpoint().save(kept)
    read = cluster.high_seqnos()
    _, (*records, total), _ = run("lag", "--checkpoint", kept)
    assert [each["lag"] for each in records] == [0] * 16
    assert total == {
        "vbucket": None, "seqno": sum(read.values()), "high_seqno": sum(read.values()), "lag": 0
    }  # fmt: skip
    fill(20, prefix="later")
    status, (*records, total), err = run("lag", "--checkpoint", kept)
    now = cluster.high_seqnos()
    assert (status, err) == (0, "")
    assert {each["vbucket"]: each["lag"] for each in records} == {
        vbucket: now[vbucket] - read[vbucket] for vbucket in now
    }
    assert total["lag"] == 20
    _, (*_, total), _ = run("lag", "--checkpoint", kept, "--vbuckets", "0-3")
    assert total["lag"] == sum(now[vbucket] - read[vbucket] for vbucket in range(4))


def test_a_checkpoint_that_is_ahead_or_of_another_bucket_is_told(cluster, client, run, tmp_path):
    kept = tmp_path / "kept"
    vbucket = cluster.upsert("a", b"1").vbucket
    cluster.upsert("a", b"2")
    stream = client.stream(until="now")
    for _ in stream:
        pass
    stream.checkpoint().save(kept)
    cluster.roll_back(vbucket, 1)
    status, (*_, total), err = run("lag", "--checkpoint", kept)
    assert (status, total["lag"]) == (0, 0)
    assert f"[{vbucket}]" in err
    assert "rolled back" in err
    cluster.drop_bucket()
    cluster.create_bucket()
    status, records, err = run("lag", "--checkpoint", kept)
    assert (status, records) == (1, [])
    assert "another bucket" in err


@pytest.fixture
def served():
    """Serves the metrics of streams by name; gives the URL."""
    stop = []

    def serve(*, vbuckets=True, **streams):
        registry, collector = CollectorRegistry(), PrometheusCollector()
        for name, stream in streams.items():
            collector.add(stream, name=name, vbuckets=vbuckets)
        registry.register(collector)
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        stop.extend([server.shutdown, server.server_close, thread.join])
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield serve
    for each in stop:
        each()


def test_lag_of_a_running_reader_comes_from_its_metrics(client, fill, run, served):
    fill(30)
    with (
        client.stream(batch=dcp_rs.BatchPolicy(max_rows=7)) as stream,
        client.stream(start="latest") as other,
    ):
        taken = next(stream).num_rows
        url = served(search=stream)
        status, (*records, total), err = run("lag", "--metrics", url)
        assert (status, err) == (0, "")
        assert total["lag"] == 30 - taken
        assert {each["vbucket"]: each["seqno"] for each in records} == {
            stats.vbucket: stats.seqno for stats in stream.vbucket_stats()
        }
        fill(20, prefix="later")
        _, (*_, total), _ = run("lag", "--metrics", url)
        assert total["lag"] == 50 - taken
        _, (record,), _ = run("top", "--once", "--interval", "0.4", "--metrics", url)
        assert record["lag"] == 50 - taken
        both = served(search=stream, other=other)
        status, records, err = run("lag", "--metrics", both)
        assert (status, records) == (1, [])
        assert "other, search" in err
        assert "--stream" in err
        _, (*_, total), _ = run("lag", "--metrics", both, "--stream", "search")
        assert total["lag"] == 50 - taken
        assert run("lag", "--metrics", both, "--stream", "none")[0] == 1


def test_metrics_that_tell_no_position_are_an_error(client, fill, run, served, tmp_path):
    fill(3)
    with client.stream() as stream:
        next(stream)
        url = served(search=stream, vbuckets=False)
        assert "vbuckets=True" in run("lag", "--metrics", url)[2]
        page = f"{url.removesuffix('metrics')}nowhere/../"
        assert run("lag", "--metrics", page)[0] == 1
    assert "cannot be read" in run("lag", "--metrics", "http://127.0.0.1:1/metrics")[2]
    assert "not an http" in run("lag", "--metrics", f"file://{tmp_path}")[2]
    status, _, err = run("lag", "--metrics", "http://reader:secret@127.0.0.1:1/metrics")
    assert (status, "secret" in err) == (1, False)
    assert run("lag")[0] == 2
    assert run("lag", "--metrics", url, "--checkpoint", tmp_path / "kept")[0] == 2
    assert run("lag", "--stream", "search", "--checkpoint", tmp_path / "kept")[0] == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nothing of HTTP\r\n\r\n",
        b"HTTP/1.0 500 No\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n\xff",
        b"HTTP/1.0 200 OK\r\n\r\na{",
        *(
            b'HTTP/1.0 200 OK\r\n\r\ndcp_rs_vbucket_seqno{bucket="default"%s\n' % rest
            for rest in (b"} 1", b',vbucket="x"} 1', b',vbucket="1"} NaN', b',vbucket="1"} +Inf')
        ),
    ],
)
def test_metrics_that_are_none_are_an_error(run, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        status, records, err = run("lag", "--metrics", url)
        thread.join()
    assert (status, records) == (1, [])
    assert url in err
    assert "Traceback" not in err


def test_top_shows_the_lag_of_the_reader_of_a_checkpoint(cluster, client, fill, run, tmp_path):
    fill(30)
    kept = tmp_path / "kept"
    stream = client.stream(until="now", vbuckets=range(8))
    for _ in stream:
        pass
    stream.checkpoint().save(kept)
    unread = sum(seqno for vbucket, seqno in cluster.high_seqnos().items() if vbucket >= 8)
    once = ("--once", "--interval", "0.4")
    status, (record,), _ = run("top", *once, "--checkpoint", kept)
    assert status == 0
    assert record["lag"] == unread > 0
    assert sum(node["lag"] for node in record["nodes"]) == unread
    assert record["states"]["streaming"] == 16
    _, (record,), _ = run("top", *once)
    assert (record["lag"], record["rows"]) == (0, 0)
    _, (record,), _ = run("top", *once, "--start", "earliest")
    assert (record["lag"], record["rows"]) == (0, 30)
    assert run("top", *once, "--checkpoint", tmp_path / "none")[0] == 1
