"""Logs for machines: events, fields, levels by module, and no floods."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

import dcp_rs
from dcp_rs._logging import about
from dcp_rs.cli import _logs
from dcp_rs.cli._logs import Logs, level_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logger():
    return logging.getLogger("dcp_rs.test")


@pytest.fixture
def logs():
    found = Logs()
    yield found
    found.end()


def lines(capsys):
    """Gives what was logged here: clusters of other tests may still say something."""
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [each for each in found if each["logger"] in {"dcp_rs", "dcp_rs.test"}]


def test_a_record_of_the_engine_has_an_event_and_fields(cluster, caplog):
    host, port = "127.0.0.1", 1
    address = cluster.connection_string.replace("couchbase://", f"couchbase://{host}:{port},")
    options = cluster.connection_options
    with dcp_rs.connect(
        address, bucket="default", username=options.username, password=options.password
    ):
        pass
    (record, *_) = [each for each in caplog.records if each.event == "node_unreachable"]
    assert record.fields["node"] == f"{host}:{port}"
    assert "refused" in record.fields["error"]
    assert record.getMessage().startswith(f"a node cannot be reached node={host}:{port} error=")


def test_every_warning_has_an_event():
    found = 0
    for path in ROOT.glob("crates/*/src/**/*.rs"):
        for macro in re.finditer(r"tracing::(?:warn|error|info)!\(\s*(.{5})", path.read_text()):
            assert macro[1] == "name:", path
            found += 1
    assert found > 30
    others = (ROOT / "python/dcp_rs/replication/core.py").read_text().split("_log.")[1:]
    assert others
    assert all("extra=about(" in each.partition("\n\n")[0] for each in others)


def test_json_lines_have_events_fields_and_a_context(logs, logger, capsys):
    logs.begin(as_json=True)
    logs.context["bucket"] = "travel"
    logger.warning("%s lost", "it", extra=about("lost", node="n1", vbucket=3, level="none of ours"))
    with contextlib.suppress(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018 - for its error
        except ZeroDivisionError:
            logger.exception("failed")
            raise
    logs.complain("it ends")
    first, second, third = lines(capsys)
    assert {**first, "time": 0} == {
        "time": 0, "level": "WARNING", "logger": "dcp_rs.test", "event": "lost",
        "message": "it lost", "bucket": "travel", "node": "n1", "vbucket": 3,
    }  # fmt: skip
    assert "ZeroDivisionError" in second["exception"]
    assert (third["event"], third["message"], third["bucket"]) == ("failed", "it ends", "travel")


def test_each_reason_is_shown_seldom_and_the_others_are_counted(logs, logger, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_logs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    logs.begin(as_json=True, levels=[("dcp_rs.test", logging.DEBUG)])
    for second in range(25):
        now[0] = float(second)
        for node in ("n1", "n2"):
            logger.warning("lost %d", second, extra=about("lost", node=node))
        logger.error("an error")
        logger.debug("a detail")
    found = lines(capsys)
    lost = [
        (each["node"], each["message"], each.get("repeated")) for each in found if each["event"]
    ]
    assert lost == [
        (node, f"lost {second}", repeated)
        for second, repeated in ((0, None), (10, 9), (20, 9))
        for node in ("n1", "n2")
    ]
    assert sum(each["message"] == "an error" for each in found) == 25
    assert sum(each["message"] == "a detail" for each in found) == 25
    monkeypatch.setattr(_logs, "_REASONS", 10)
    for number in range(100):
        logger.warning("other", extra=about("other", node=str(number)))
    assert len(logs._handler.filters[0]._seen) <= 10


def test_another_kind_of_error_is_another_reason(logs, logger, capsys):
    logs.begin(as_json=True)
    errors = [
        "refused after 1 s",
        "refused after 2 s",
        "authentication failed",
        "refused after 3 s",
    ]
    for error in errors:
        logger.warning("away", extra=about("away", node="n1", error=error))
    assert [each["error"] for each in lines(capsys)] == ["refused after 1 s", errors[2]]


def test_levels_are_those_of_modules(logs, logger):
    before = logger.level
    logs.begin(as_json=False, levels=[level_of("info"), level_of("replication=debug")])
    assert logging.getLogger("dcp_rs.consumer.cluster").getEffectiveLevel() == logging.INFO
    assert logging.getLogger("dcp_rs.replication").getEffectiveLevel() == logging.DEBUG
    logs.end()
    assert logger.level == before
    assert level_of("dcp_rs.consumer.cluster=error") == ("dcp_rs.consumer.cluster", logging.ERROR)
    for wrong, why in (
        ("loud", "debug, info, warning or error"),
        ("consummer=info", "did you mean consumer"),
        ("x=info", "there are consumer"),
    ):
        with pytest.raises(click.BadParameter, match=why):
            level_of(wrong)


def test_the_command_logs_as_json_and_shows_progress_alike(cluster, tmp_path):
    cluster.upsert("key", {})
    options = cluster.connection_options
    done = subprocess.run(
        [
            sys.executable, "-W", "ignore", "-m", "dcp_rs", "replicate",
            cluster.connection_string.replace("couchbase://", "couchbase://127.0.0.1:1,"),
            f"duckdb://{tmp_path}/d.duckdb", "--bucket", "default", "--username", options.username,
            "--once", "--log-format", "json", "--log-level", "consumer.connect=warning",
        ],
        env=os.environ | {"DCP_RS_PASSWORD": options.password},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines()]
    (line,) = [each for each in found if each.get("event") == "node_unreachable"]
    assert (line["logger"], line["node"]) == ("dcp_rs.consumer.connect", "127.0.0.1:1")
    assert (found[-1]["phase"], found[-1]["changes"]) == ("done", 1)
