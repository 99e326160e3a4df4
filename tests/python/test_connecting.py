"""Connecting: what is wrong is said, by class and within the time allowed."""

import functools
import os
import pickle
import re
import socket
import threading
import time

import pytest

import dcp_rs
from dcp_rs import exceptions
from tap import Tap

USER = {"username": "Administrator", "password": "canary-8f1c2e"}


def connect(address, **options):
    begun = time.monotonic()
    try:
        return dcp_rs.connect(
            address, **({"bucket": "default", "connect_timeout": 2} | USER | options)
        )
    finally:
        assert time.monotonic() - begun < 4


def test_the_bucket_may_be_in_the_connection_string(cluster):
    address = f"{cluster.connection_string.split(',')[0]}/default"
    with dcp_rs.connect(address, **USER) as client:
        assert client.bucket_name == "default"
        assert client.bucket_uuid == cluster.bucket_uuid
        assert client.num_vbuckets == cluster.num_vbuckets == 16


def test_a_wrong_password_is_refused(cluster):
    for wrong in ({"password": "wrong"}, {"username": "nobody"}, {"password": ""}):
        with pytest.raises(exceptions.AuthenticationError) as raised:
            connect(cluster.connection_string, **wrong)
        assert isinstance(raised.value, PermissionError)
        assert raised.value.code == "authentication"
        assert not raised.value.is_retryable
        assert "wrong" not in str(raised.value).split()


def test_an_unknown_bucket_is_named(cluster):
    with pytest.raises(exceptions.BucketNotFoundError, match="no_such_bucket") as raised:
        connect(cluster.connection_string, bucket="no_such_bucket")
    assert isinstance(raised.value, LookupError)


def test_nobody_listening_is_a_connect_error():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(exceptions.ConnectError) as raised:
        connect(f"couchbase://127.0.0.1:{port}")
    assert isinstance(raised.value, ConnectionError)
    assert raised.value.is_retryable


def test_an_unknown_host_is_a_connect_error():
    with pytest.raises((exceptions.ConnectError, exceptions.TimeoutError)) as raised:
        connect("couchbase://no-such-host.invalid")
    assert "no-such-host.invalid" in str(raised.value)


def test_a_silent_peer_is_a_timeout():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(exceptions.TimeoutError) as raised,
    ):
        connect(f"couchbase://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.5)
    assert isinstance(raised.value, TimeoutError)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("pasword=s3cret", "has no option pasword: set password, which is an option of its own"),
        ("network=default&password=s3cret", "has no option password: set password"),
        ("connect_timeuot=5", "has no option connect_timeuot: set connect_timeout"),
        ("netwrok=external", "has no option netwrok: did you mean network?"),
        ("x=s3cret", "has no option x: only network has a meaning there"),
        ("trust_certificate=/s3cret.pem", "has no option trust_certificate: "),
    ],
)
def test_an_unknown_option_of_the_string_is_refused_by_name(query, told):
    with pytest.raises(
        exceptions.ConfigError, match=f"^connection_string: {re.escape(told)}"
    ) as error:
        dcp_rs.ConnectionOptions(connection_string=f"couchbase://h/b?{query}")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "query", ["network=external", "kv_timeout=5s&enable_tracing=false", "io.numKvConnections=4", ""]
)
def test_options_that_tune_an_sdk_are_passed_over(query):
    dcp_rs.ConnectionOptions(connection_string=f"couchbase://h/b?{query}")


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100, b""])
def test_a_peer_that_speaks_something_else_is_told_from_a_node(greeting):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)
                    connection.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises((exceptions.ConnectError, exceptions.ProtocolError)):
            connect(f"couchbase://127.0.0.1:{other.getsockname()[1]}")


def test_tls_to_a_plain_port_fails_in_time(cluster):
    address = cluster.connection_string.split(",")[0].replace("couchbase://", "couchbases://")
    with pytest.raises((exceptions.ConnectError, exceptions.TimeoutError)):
        connect(address)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connection_string": "http://host:8091"}, "couchbase://"),
        ({"connection_string": "couchbase://user:secret@host"}, "user name or password"),
        ({"connection_string": 5}, "connection_string: must be text, not int"),
        ({"connect_timeout": 0}, "connect_timeout: 0 is not from"),
        ({"connect_timeout": "10"}, "connect_timeout: must be a number of seconds"),
        ({"network": "externl"}, "network: must be .*, not 'externl'; did you mean 'external'"),
        ({"password": None}, "username, password: give both or neither"),
        ({"username": 7}, "username: must be text, not int"),
        ({"tls_key": "key.pem"}, "tls_certificate, tls_key: give both or neither"),
        ({"bucket": None}, "bucket"),
        ({"buffer_size": 10}, "buffer_size: 10 is not from 65536 to 4294967295"),
        ({"noop_interval": 0.5}, "noop_interval: 0.5 is not from 1 to 3600 seconds"),
        (
            {"connection_string": "couchbase://\udcff"},
            "connection_string: cannot be encoded as UTF-8",
        ),
        ({"username": "\udcff"}, "username: cannot be encoded as UTF-8"),
        ({"noop_interval": 1.5}, "^noop_interval: 1.5 is not a whole number of seconds"),
        ({"compressed": "snappy"}, "compressed: must be True or False, not str"),
        (
            {"sasl_mechanisms": iter(["PLAIN"])},
            "sasl_mechanisms: must be a list of names, not list_iterator",
        ),
        ({"sasl_mechanisms": "PLAIN"}, "sasl_mechanisms: must be a list of names, not str"),
        (
            {"sasl_mechanisms": ["SCRAM-SHA-1"]},
            "sasl_mechanisms: must be .*, not 'SCRAM-SHA-1'; did you mean 'SCRAM-SHA1'",
        ),
    ],
)
def test_a_wrong_option_is_named(options, message):
    given = {"connection_string": "couchbase://127.0.0.1", "bucket": "b", **USER, **options}
    address = given.pop("connection_string")
    with pytest.raises(exceptions.ConfigError, match=message) as raised:
        dcp_rs.connect(address, **given)
    assert isinstance(raised.value, ValueError)
    assert raised.value.code == "config"
    assert "secret" not in str(raised.value)


def test_options_beside_connection_options_are_refused(cluster):
    options = cluster.connection_options
    with dcp_rs.connect(options, buffer_size=dcp_rs.ConnectionOptions.buffer_size) as client:
        assert client.options == options
    with pytest.raises(exceptions.ConfigError, match=r"^buffer_size: .*replace\(options") as raised:
        dcp_rs.connect(options, buffer_size=1 << 20)
    assert "set it there" in str(raised.value)


def test_passwords_are_not_shown():
    secret = "hunter2 hunter2"
    options = dcp_rs.ConnectionOptions(
        connection_string="couchbase://h", username="u", password=secret
    )
    with dcp_rs.testing.EmbeddedCluster(password=secret) as other, other.connect() as connected:
        for each in (options, other, connected, connected.options, other.connection_options):
            assert secret not in repr(each)
            assert secret not in str(each)
    assert options.password == secret


@pytest.mark.parametrize(
    ("connection_string", "shown"),
    [
        ("couchbase://u:s3cret@h/b", "***"),
        ("couchbase://h:s3cret/b", "***"),
        ("s3cret@h", "***"),
        ("couchbase://h/b?network=s3cret", "couchbase://h/b?network=***"),
        (
            "couchbase://h?kv_timeout=s3cret&network=s3cret",
            "couchbase://h?kv_timeout=***&network=***",
        ),
        ("couchbases://a.b-c:1,[::1]:2=kv;10.0.0.1/b", None),
        ("h", None),
    ],
)
def test_a_secret_in_a_connection_string_is_not_shown(connection_string, shown):
    options = dcp_rs.ConnectionOptions(connection_string=connection_string)
    assert repr(options) == f"ConnectionOptions(connection_string={shown or connection_string!r})"
    assert "s3cret" not in repr(options)


def test_a_port_in_use_is_an_error(cluster):
    port = int(cluster.connection_string.rpartition(":")[2])
    with pytest.raises(exceptions.ConnectError, match=str(port)):
        dcp_rs.testing.EmbeddedCluster(port=port)


@pytest.mark.default_password
def test_the_producer_listens_on_loopback_only():
    with pytest.raises(exceptions.ConfigError, match="loopback"):
        dcp_rs.testing.EmbeddedCluster(host="0.0.0.0")
    with pytest.raises(exceptions.ConfigError, match="vbuckets: 2000 is not from 1 to 1024"):
        dcp_rs.testing.EmbeddedCluster(vbuckets=2000)


def test_documents_are_checked(cluster):
    with pytest.raises(exceptions.DocumentNotFoundError):
        cluster.remove("missing")
    assert cluster.get("missing") is None
    token = cluster.insert("a", [1])
    with pytest.raises(exceptions.DocumentExistsError):
        cluster.insert("a", [2])
    with pytest.raises(exceptions.DocumentExistsError) as raised:
        cluster.upsert("a", [2], cas=token.cas + 1)
    assert raised.value.code == "cas_mismatch"
    assert cluster.upsert("a", [3], cas=token.cas).seqno == token.seqno + 1
    assert cluster.get("a").value == b"[3]"
    with pytest.raises(exceptions.ConfigError):
        cluster.upsert("k" * 251, b"1")
    with pytest.raises(exceptions.ConfigError, match="value: must be bytes"):
        cluster.upsert("a", 5)
    cluster.close()
    cluster.close()
    with pytest.raises(exceptions.ClosedError):
        cluster.get("a")


def vault():
    """Gives credentials as a function of a module does."""
    return "Administrator", "canary-8f1c2e"


@pytest.mark.shows_password("the file has it, which a user writes")
def test_a_password_file_is_read_for_every_connection(cluster, tmp_path):
    secret = tmp_path / "password"
    secret.write_text("canary-8f1c2e\n")
    given = {"username": "Administrator", "password": None, "password_file": secret}
    given["retry_timeout"] = 1.0
    with connect(cluster.connection_string, **given) as client:
        secret.write_text("wrong")
        with pytest.raises(exceptions.AuthenticationError, match="check user name"):
            connect(cluster.connection_string, **given)
        # The client goes on trying, as the file may be about to be replaced.
        with pytest.raises(exceptions.AuthenticationError, match="vb:0 could not be reached for"):
            client.stream()
        secret.write_text("canary-8f1c2e")
        with client.stream(until="now") as stream:
            assert list(stream) == []
    secret.unlink()
    with pytest.raises(exceptions.AuthenticationError, match=str(secret)):
        connect(cluster.connection_string, **given)


def test_credentials_may_come_from_a_function(cluster):
    nobody = {"username": None, "password": None}
    threads = []

    def current():
        threads.append(threading.current_thread())
        return "Administrator", "canary-8f1c2e"

    with (
        connect(cluster.connection_string, **nobody, credentials=current) as client,
        client.stream(until="now") as stream,
    ):
        assert list(stream) == []
    assert len(threads) == 3  # one for the map, one for each node
    assert threading.main_thread() not in threads
    with cluster.connect(credentials=vault) as client:
        assert client.options.credentials is vault


def test_a_stream_outlives_a_password_that_is_changed():
    known = ["canary-8f1c2e"]
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster,
        cluster.connect(credentials=lambda: ("Administrator", known[0])) as client,
        client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream,
    ):
        cluster.upsert("before", b"1")
        assert [row["key"] for row in next(stream).rows()] == ["before"]
        cluster.set_password("another")
        cluster.restart(0)
        with pytest.raises(exceptions.AuthenticationError):
            client.high_seqnos()
        cluster.upsert("after", b"1")
        known[0] = "another"
        assert [row["key"] for row in next(stream).rows()] == ["after"]
        with pytest.raises(exceptions.ConfigError, match="password"):
            cluster.set_password("")
        cluster.connect().close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: ("Administrator", "wrong"), "check user name and password"),
        (lambda: "hunter2", r"must return \(username, password\) as text, not str"),
        (lambda: ("Administrator", None), "must return .* not tuple"),
        (lambda: {}["token"], "KeyError: 'token'"),
        (lambda: time.sleep(3), "the credentials were not available within 1 s"),
    ],
)
def test_credentials_that_are_of_no_use_are_an_authentication_error(cluster, function, message):
    nobody = {"username": None, "password": None, "connect_timeout": 1}
    with pytest.raises(exceptions.AuthenticationError, match=message) as raised:
        connect(cluster.connection_string, **nobody, credentials=function)
    assert "hunter2" not in str(raised.value)


def test_a_function_that_needs_python_is_called_while_python_is_busy(cluster):
    def current():
        time.sleep(0.01)
        return "Administrator", "canary-8f1c2e"

    with cluster.connect(credentials=current) as client:
        deadline = time.monotonic() + 1
        streams = 0
        while time.monotonic() < deadline:
            with client.stream(until="now") as stream:
                assert list(stream) == []
            streams += 1
            sum(range(100_000))
    assert streams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"password_file": "f"}, "password, password_file: give one of them"),
        ({"credentials": vault}, "credentials, username: give one of them"),
        ({"credentials": 5, "username": None, "password": None}, "credentials: must be a function"),
        ({"password_file": 5, "password": None}, "password_file: must be a path, not int"),
        ({"password_file": "f", "password": None, "username": None}, "give both or neither"),
    ],
)
def test_the_password_is_given_in_one_way(options, message):
    with pytest.raises(exceptions.ConfigError, match=message):
        dcp_rs.connect("couchbase://127.0.0.1", **({"bucket": "b"} | USER | options))


def test_options_with_a_function_pickle_if_the_function_does():
    options = dcp_rs.ConnectionOptions(connection_string="couchbase://h", credentials=vault)
    assert pickle.loads(pickle.dumps(options)) == options
    secret = functools.partial(max, "hunter2")
    options = dcp_rs.ConnectionOptions(connection_string="couchbase://h", credentials=secret)
    assert "hunter2" not in repr(options)
    options = dcp_rs.ConnectionOptions(connection_string="couchbase://h", credentials=lambda: None)
    with pytest.raises(exceptions.ConfigError, match="this function cannot be pickled"):
        pickle.dumps(options)


def test_connections_say_who_they_are(cluster):
    who = f"dcp_rs:{dcp_rs.__version__}/{plain_host()}/{os.getpid()}/orders"
    tap = Tap(cluster)
    address = f"couchbase://127.0.0.1:{tap.port}"
    connect(address, name="orders").close()
    tap.close()
    assert f'{{"a":"{who}","i":"'.encode() in tap.sent
    # What a DCP connection is called has a different end each time.
    busy_once = {
        "condition": {"opcode": "DCP_STREAM_REQ", "connection": f"{who}/*", "nth": 1},
        "reaction": {"answer": {"status": "ETMPFAIL"}},
    }
    cluster.upsert("key", {})
    cluster.set_faults([busy_once])
    for name, count in (("other", 0), ("orders", 1)):
        with cluster.connect(name=name) as client, client.stream(until="now") as stream:
            stream.read_all()
        assert cluster.fault_counts() == [count]


def plain_host():
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64]
