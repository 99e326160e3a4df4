"""Errors about options carry the option, by the name that its user wrote."""

import copy
import pickle

import pytest

import dcp_rs
from dcp_rs.cli import _program
from dcp_rs.cli._options import call_options
from dcp_rs.exceptions import ConfigError

HOST = "couchbase://h/b"


def connection(**options):
    return dcp_rs.ConnectionOptions(**{"connection_string": HOST} | options)


PYTHON = [
    (lambda _: connection(retry_timeout=-1), "retry_timeout", -1),
    (lambda _: connection(network="moon"), "network", "moon"),
    (lambda _: connection(buffer_size=1), "buffer_size", 1),
    (lambda _: connection(noop_interval=1.5), "noop_interval", 1.5),
    (lambda _: connection(password=5), "password", None),
    (lambda _: connection(tls_key_password=5), "tls_key_password", None),
    (lambda _: connection(username="u"), "username", None),
    (lambda _: connection(tls_key="k"), "tls_certificate", None),
    (lambda _: dcp_rs.connect("nowhere", username="u", password="p"), "connection_string", None),
    (lambda _: dcp_rs.BatchPolicy(max_rows=0), "max_rows", 0),
    (lambda c: c.stream(columns=["nope"]), "columns", "nope"),
    (lambda c: c.stream(document_schema="a NOPE"), "document_schema", None),
    (
        lambda c: c.stream(document_schema=dcp_rs.DocumentSchema(prefix="a")),
        "document_schema",
        None,
    ),
    (lambda c: c.stream(keys=[]), "keys", None),
    (lambda c: c.stream(ops="delete"), "ops", "delete"),
    (lambda c: c.stream(since="now"), "since", "now"),
    (lambda c: c.stream(start="here"), "start", "here"),
    (lambda c: c.stream(until={0: -1}), "until", -1),
    (lambda c: c.stream(vbuckets=[60_000]), "vbuckets", 60_000),
    (lambda c: c.stream(collections="no.no"), "collections", "no.no"),
    (lambda c: c.stream(out_of_order=True, on_rollback="fail"), "out_of_order", None),
    (lambda c: c.stream(initial_deletions="none"), "initial_deletions", "none"),
    (lambda c: c.stream(priority="urgent"), "priority", "urgent"),
    (lambda c: c.stream(priority=5), "priority", 5),
    (lambda c: c.stream(backfill_order="Sequential"), "backfill_order", "Sequential"),
    (lambda c: dcp_rs.replicate(c, "parquet:///x", priority="HIGH"), "priority", "HIGH"),
    (
        lambda c: dcp_rs.replicate(c, "parquet:///x", backfill_order="random"),
        "backfill_order",
        "random",
    ),
    (
        lambda c: c.stream(initial_deletions="skip", include="history"),
        "initial_deletions",
        None,
    ),
]


@pytest.mark.parametrize("case", range(len(PYTHON)))
def test_error_in_python_has_its_option(cluster, case):
    call, option, value = PYTHON[case]
    with cluster.connect() as client, pytest.raises(ConfigError) as caught:
        call(client)
    error = caught.value
    assert (error.option, error.value) == (option, value), error
    assert str(error).startswith(option)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (again.option, again.value, str(again)) == (option, value, str(error))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--connect-timeout", "0"], "--connect-timeout"),
        (["--columns", "nope"], "--columns"),
        (["--format", "%{nope}"], "--format"),
        (["--document-schema", "a NOPE"], "--document-schema"),
        (["--tls-key", "k"], "--tls-certificate"),
        (["--collections", "no.no"], "--collections"),
        (["--vbuckets", "60000"], "--vbuckets"),
    ],
)
def test_error_on_the_command_line_has_its_option(cluster, monkeypatch, capsys, arguments, option):
    seen = []

    def note(error, commands):
        seen.append(call_options(error, commands))
        return seen[-1]

    monkeypatch.setattr(_program, "call_options", note)
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    address = f"{cluster.connection_string}/default"
    assert _program.run(["cat", address, "--username", "Administrator", *arguments]) == 1
    assert seen[0].option == option
    assert capsys.readouterr().err.startswith(f"dcp-rs: {option}")


def test_an_error_about_an_argument_calls_it_as_the_usage_does(monkeypatch, capsys):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    arguments = ["--username", "Administrator"]
    assert _program.run(["cat", "http://127.0.0.1:8091/travel", *arguments]) == 1
    assert capsys.readouterr().err.startswith("dcp-rs: CONNSTR: must start with couchbase://")
