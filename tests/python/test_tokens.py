"""Tokens instead of passwords: given, renewed while a stream runs, refused, and never shown."""

import asyncio
import base64
import hashlib
import hmac
import json
import pickle
import time
from contextlib import contextmanager

import pytest

import dcp_rs
from dcp_rs import exceptions
from dcp_rs.cli import main

# Each token says it too, so that one which is shown is found.
CANARY = "canary-8f1c2e"
KEY = f"the key of an issuer, {CANARY}"


def encoded(part):
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def issue(seconds, user="Administrator", key=KEY):
    """A token that is valid for so long, or has expired that long ago."""
    claims = {"jti": CANARY, "sub": user, "exp": int(time.time()) + seconds}
    text = ".".join(encoded(json.dumps(part).encode()) for part in ({"alg": "HS256"}, claims))
    return f"{text}.{encoded(hmac.digest(key.encode(), text.encode(), hashlib.sha256))}"


def short_lived():
    """The function of a module, which can be pickled."""
    return issue(5)


@pytest.fixture(scope="module")
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=8, tls=True, token_key=KEY) as running:
        yield running


@contextmanager
def file_of(token, tmp_path):
    """A file with a token, which is not left behind: what is left is searched for one."""
    path = tmp_path / "token"
    path.write_text(token + "\n")
    try:
        yield path
    finally:
        path.unlink()


def count(client, until="now"):
    with client.stream(until=until) as stream:
        return stream.read_all().num_rows


def test_a_token_may_be_given_as_text_as_a_function_and_in_a_file(cluster, tmp_path):
    with file_of(issue(60), tmp_path) as file:
        for given in ({"token": issue(60)}, {"token": lambda: issue(60)}, {"token_file": file}):
            with cluster.connect(tls=True, **given) as client:
                assert client.bucket_name == "default"
                count(client)

    async def read():
        options = dcp_rs.ConnectionOptions(
            connection_string=cluster.tls_connection_string,
            bucket="default",
            tls_ca=cluster.ca_file,
            token=lambda: issue(60),
        )
        async with dcp_rs.connect_async(options) as client:
            return client.num_vbuckets

    assert asyncio.run(read()) == 8


@pytest.mark.parametrize("kind", ["token", "token_file"])
def test_a_token_is_renewed_while_a_stream_runs(cluster, tmp_path, kind):
    rows, written, begun = 0, 0, time.monotonic()
    with (
        file_of(issue(5), tmp_path) as file,
        cluster.connect(
            tls=True, noop_interval=1, **{kind: short_lived if kind == "token" else file}
        ) as client,
        client.stream(start="latest") as stream,
    ):
        while time.monotonic() - begun < 6 or rows < written:
            if time.monotonic() - begun < 6:
                cluster.upsert(f"{kind}-{written}", {})
                written += 1
                file.write_text(issue(5))
            batch = stream.poll(1)
            rows += batch.num_rows if batch is not None else 0
        assert rows == written
        assert stream.stats().reconnects == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token": "x", "token_file": "f"}, "token, token_file: give one of them"),
        ({"token": "x", "username": "u"}, "token, username: a token names its user"),
        ({"token": None, "token_file": "f", "password": "p"}, "token_file, password: give one"),
        ({"token": "x", "password_file": "f"}, "token, password_file: give one of them"),
        ({"token": "x", "credentials": short_lived}, "token, credentials: give one of them"),
        (
            {"token": "x", "tls_certificate": "c", "tls_key": "k"},
            "token, tls_certificate: give one of them",
        ),
        ({"token": ""}, "token: it is empty"),
        ({"token": f"{CANARY} x"}, "token: it holds a character that no token has"),
        ({"token_file": 5}, "token_file: must be a path, not int"),
        ({"name": "a b"}, "name: must be 1 to 32 letters"),
    ],
)
def test_options_that_contradict_a_token_are_refused(wrong, message):
    with pytest.raises(exceptions.ConfigError, match=message) as caught:
        dcp_rs.connect("couchbases://127.0.0.1:1", bucket="b", **({"token": "x"} | wrong))
    assert caught.value.option == message.partition(":")[0].partition(",")[0]
    assert caught.value.value == (wrong[caught.value.option] if "must be" in message else None)


def test_a_token_of_another_type_is_refused_and_not_shown():
    with pytest.raises(exceptions.ConfigError, match="token: must be text or a func") as caught:
        dcp_rs.connect("couchbases://127.0.0.1:1", bucket="b", token=[CANARY])
    assert (caught.value.option, caught.value.value) == ("token", None)


@pytest.mark.parametrize("option", ["token", "token_file"])
def test_a_token_is_not_sent_without_tls(option):
    with pytest.raises(exceptions.ConfigError, match="would be sent unencrypted") as caught:
        dcp_rs.connect("couchbase://127.0.0.1:1", bucket="b", **{option: "x"})
    assert caught.value.option == option
    mechanisms = {"token": "x", "sasl_mechanisms": ["PLAIN"]}
    with pytest.raises(exceptions.ConfigError, match="sasl_mechanisms, token: a token has"):
        dcp_rs.connect("couchbases://127.0.0.1:1", bucket="b", **mechanisms)


def test_a_token_that_is_refused_is_named_and_not_shown(cluster):
    for token, says in (
        (issue(-35), "which expired 3"),
        (issue(60, key="another key of thirty-two bytes."), "trusts its issuer"),
        (issue(60, user="nobody"), "trusts its issuer"),
        (f"{CANARY}.opaque", "trusts its issuer"),
    ):
        with pytest.raises(exceptions.AuthenticationError, match=says) as caught:
            cluster.connect(tls=True, token=token)
        assert token not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_function_that_gives_no_token_is_an_authentication_error(cluster):
    def fails():
        raise OSError("the issuer is down")

    for function, says in (
        (fails, "OSError: the issuer is down"),
        (lambda: None, "it must return a token as text, not NoneType"),
        (lambda: f"{CANARY} x", "what the token function returned cannot be used"),
    ):
        with pytest.raises(exceptions.AuthenticationError, match=says):
            cluster.connect(tls=True, token=function)


def test_a_server_without_tokens_says_so():
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=2, tls=True) as older,
        pytest.raises(exceptions.DcpError, match=r"Couchbase Server 8\.1") as caught,
    ):
        older.connect(tls=True, token=issue(60))
    assert caught.value.code == "unsupported"


def test_options_with_a_token_show_it_nowhere_and_can_be_pickled():
    given = {"connection_string": "couchbases://h"}
    options = dcp_rs.ConnectionOptions(**given, token=issue(60))
    assert "token" not in repr(options)
    options = dcp_rs.ConnectionOptions(**given, token=short_lived)
    assert pickle.loads(pickle.dumps(options)).token is short_lived
    options = dcp_rs.ConnectionOptions(**given, token_file="f")
    assert pickle.loads(pickle.dumps(options)).token_file == "f"
    with pytest.raises(exceptions.ConfigError, match="or a file with the token") as caught:
        pickle.dumps(dcp_rs.ConnectionOptions(**given, token=lambda: "x"))
    assert caught.value.option == "token"


def test_a_key_that_is_short_or_without_tls_is_refused():
    for wrong in ({"token_key": KEY}, {"token_key": "x" * 31, "tls": True}):
        with pytest.raises(exceptions.ConfigError, match="token_key: ") as caught:
            dcp_rs.testing.EmbeddedCluster(vbuckets=2, **wrong)
        assert (caught.value.option, caught.value.value) == ("token_key", None)


def doctor(cluster, token, capfd, *arguments):
    address = f"{cluster.tls_connection_string}/default"
    options = ("--token-file", str(token), "--tls-ca", str(cluster.ca_file), "--json", *arguments)
    status = main(["doctor", address, *options])
    return status, [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_doctor_tells_a_good_token_from_one_that_has_expired(cluster, tmp_path, capfd):
    with file_of(issue(60), tmp_path) as file:
        status, findings = doctor(cluster, file, capfd)
        login = next(each for each in findings if each["step"] == "login")
        assert (status, login["target"], login["status"]) == (0, "token", "ok")
    with file_of(issue(-35), tmp_path) as file:
        status, findings = doctor(cluster, file, capfd)
    login = next(each for each in findings if each["step"] == "login")
    assert (status, login["target"], login["status"]) == (1, "token", "failed")
    assert "which expired 3" in login["detail"]
    assert "has not expired" in login["advice"]
    address = f"{cluster.connection_string}/default"
    assert main(["doctor", address, "--token-file", "f", "--username", "u"]) != 0
    assert "--token-file, --username" in capfd.readouterr().err


def test_a_token_file_is_for_all_commands(cluster, tmp_path, capfd):
    cluster.upsert("read-with-a-token", {})
    address = f"{cluster.tls_connection_string}/default"
    with file_of(issue(60), tmp_path) as file:
        options = ("--token-file", str(file), "--tls-ca", str(cluster.ca_file))
        assert main(["cat", address, *options, "--json"]) == 0
    assert "read-with-a-token" in capfd.readouterr().out
