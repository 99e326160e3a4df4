"""What `replicate` answers on its listener."""

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from exposition import values
from lag import until

ANYWHERE = "127.0.0.1:0"


@pytest.fixture
def get(caplog):
    """Gives a function that gets a path; its answer is a status and a text, or nothing."""
    caplog.set_level(logging.INFO, "dcp_rs.listener")

    def ask(path, **headers):
        urls = [each.args[0] for each in caplog.records if each.name == "dcp_rs.listener"]
        if not urls:
            return None, ""
        request = urllib.request.Request(f"{urls[0]}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return None, ""

    ask.url = lambda: next(e.args[0] for e in caplog.records if e.name == "dcp_rs.listener")
    return ask


def lag_of(cluster, url, *options):
    """Gives what `dcp-rs lag` prints."""
    done = subprocess.run(
        [
            sys.executable, "-W", "ignore", "-m", "dcp_rs", "lag", cluster.connection_string,
            "--bucket", "default", "--username", cluster.connection_options.username, "--metrics",
            url, *options,
        ],
        env=os.environ | {"DCP_RS_PASSWORD": cluster.connection_options.password},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def status(get):
    return lambda: json.loads(get("/status")[1] or "{}")


def test_a_commit_that_hangs_is_seen(cluster, tmp_path, following, get, status):
    cluster.upsert("first", {})
    target = replicas.Stuck(replicas.InDuckDB(tmp_path).url)
    following(target, listen=ANYWHERE, hung_after=2, connection={"name": "travel"})
    until(lambda: get("/readyz")[0] == 200)
    assert get("/livez") == (200, "ok\n")
    found = status()
    assert (found["bucket"], found["stream"]) == ("default", "travel")
    assert (found["live"], found["ready"], found["reason"]) == (True, True, None)
    assert (found["phase"], found["lag"], found["changes"]) == ("following", 0, 1)
    assert found["vbuckets"]["streaming"] == 16
    assert abs(found["last_commit"]["time"] - time.time()) < 10
    before = values(get("/metrics")[1])["dcp_rs_records_total",]
    late = cluster.upsert("second", {})
    assert target.hangs.wait(20)
    # Not at once, and then with the reason.
    assert get("/livez")[0] == 200
    until(lambda: get("/livez")[0] == 503)
    assert get("/livez")[1].startswith("a commit has been running for 2 s: look for locks")
    # What comes meanwhile is seen too: nothing of this waits for the commit. No more than the
    # batches that are read ahead, as each may be one.
    for n in range(3):
        cluster.upsert(f"key_{n}", {})
    until(lambda: values(get("/metrics")[1])["dcp_rs_records_total",] > before + 3)
    # What waits is as old as the commit that does not get done.
    until(lambda: status()["lag_seconds_by_vbucket"].get(str(late.vbucket), 0) > 2)
    found, series = status(), values(get("/metrics")[1])
    assert found["last_commit"]["running_seconds"] > 2
    assert found["live"] is False
    assert series["dcp_rs_commit_running_seconds",] > 2
    # It was logged, as the listener says too.
    assert [each["event"] for each in found["errors"]] == ["commit_slow"]
    assert series["dcp_rs_warnings_total", "commit_slow"] == 1
    assert found["lag_seconds"] > 2
    assert found["cas_lag_seconds"] > 2
    assert found["cas_ahead_seconds"] == 0
    assert series["dcp_rs_lag_seconds",] > 2
    listed = values(get("/metrics?vbuckets=1")[1])
    assert listed["dcp_rs_vbucket_lag_seconds", str(late.vbucket)] > 2
    assert series["dcp_rs_report_age_seconds",] > 2
    assert series["dcp_rs_commit_age_seconds",] > 2
    target.go_on.set()
    until(lambda: get("/livez")[0] == 200)
    until(lambda: (status()["changes"], status()["lag_seconds"]) == (5, 0))


class _Full(replicas.Stuck):
    """A target whose disk is full at first; closing it and the next attempt take long."""

    def __init__(self, url):
        super().__init__(url)
        self.has_failed, self.close = False, self._close

    def _close(self):
        time.sleep(2 if self.has_failed else 0)
        self.inner.close()

    def commit(self, commit):
        if commit.state.commits == self.which and not self.has_failed:
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().commit(commit)


def test_a_target_is_unavailable_until_an_attempt_succeeds(
    cluster, tmp_path, following, get, status
):
    target = _Full(replicas.InDuckDB(tmp_path).url)
    following(target, listen=ANYWHERE, target_retry_timeout=60)
    until(lambda: get("/readyz")[0] == 200)
    cluster.upsert("second", {})
    assert target.hangs.wait(20)
    for _ in range(2):
        found, series = status(), values(get("/metrics")[1])
        assert found["phase"] == "target unavailable"
        assert "No space left" in found["reason"]
        assert series["dcp_rs_phase", "target unavailable"] == 1
        time.sleep(1.5)
    target.go_on.set()
    until(lambda: status()["phase"] == "following")


def test_metrics_go_on_as_streams_are_opened_again(cluster, tmp_path, following, get):
    for n in range(50):
        cluster.upsert(f"key_{n}", {"n": n})
    following(replicas.InDuckDB(tmp_path).url, listen=ANYWHERE)

    def now():
        return values(get("/metrics")[1])

    until(lambda: now().get(("dcp_rs_phase", "following")) == 1)
    before = now()
    # A catch-up has read these, and its stream is closed.
    assert before["dcp_rs_records_total",] >= 50
    assert before["dcp_rs_committed_records_total",] == 50
    # Every stream is opened again: a rollback is read again by another one.
    cluster.roll_back(0, 0)
    until(lambda: now()["dcp_rs_rollbacks_total",] > 0)
    until(lambda: now()["dcp_rs_phase", "following"] == 1)
    until(lambda: now()["dcp_rs_vbuckets", "streaming"] == 16)
    after = now()
    assert after["dcp_rs_records_total",] >= before["dcp_rs_records_total",]
    assert after["dcp_rs_batches_total",] >= before["dcp_rs_batches_total",]
    assert after["dcp_rs_stream_events_total", "rolled_back"] == 1
    assert after["dcp_rs_warnings_total", "rolled_back"] == 1
    assert set(before) <= set(after)


def test_metrics_are_prometheus_text_or_openmetrics(cluster, tmp_path, following, get):
    cluster.create_collection("_default.orders")
    cluster.upsert("one", {}, collection="_default.orders")
    url = f"duckdb://{tmp_path}/d.duckdb"
    following(url, listen=ANYWHERE, tables="collection")
    until(lambda: get("/readyz")[0] == 200)
    text = values(get("/metrics")[1])
    open_text = values(
        get("/metrics", Accept="application/openmetrics-text; version=1.0.0")[1], openmetrics
    )
    assert set(text) == set(open_text)
    assert text["dcp_rs_table_committed_records_total", "_default__orders"] == 1
    assert text["process_resident_memory_bytes",] > 0
    assert not any(name == "dcp_rs_vbucket_seqno" for name, *_ in text)
    longer = values(get("/metrics?vbuckets=1")[1])
    assert sum(name == "dcp_rs_vbucket_seqno" for name, *_ in longer) == 16
    (line,) = lag_of(cluster, f"{get.url()}/metrics?vbuckets=1", "--vbuckets", "3")[-1:]
    assert line["lag_seconds"] == text["dcp_rs_lag_seconds",] == 0


def test_every_metric_is_on_the_page_about_them(cluster, tmp_path, following, get):
    page = (replicas.ROOT / "docs/reference/metrics.md").read_text()
    cluster.upsert("key", {})
    following(f"duckdb://{tmp_path}/d.duckdb", listen=ANYWHERE, tables="collection")
    until(lambda: get("/readyz")[0] == 200)
    exported = {name for name, *_ in values(get("/metrics?vbuckets=1")[1])}
    named = set(re.findall(r"\bdcp_rs_\w+", page))
    assert {name for name in exported if name.startswith("dcp_rs_")} <= named


def test_it_is_ready_once_it_has_caught_up_and_while_connected(
    cluster, tmp_path, following, get, status
):
    for n in range(20):
        cluster.upsert(f"key_{n}", {})
    target = replicas.Stuck(replicas.InDuckDB(tmp_path).url, commit=1)
    following(target, listen=ANYWHERE)
    assert target.hangs.wait(20)
    until(lambda: get("/readyz") == (503, "it has not caught up yet: loading\n"))
    target.go_on.set()
    until(lambda: get("/readyz")[0] == 200)
    cluster.kill(0)
    until(
        lambda: (
            get("/readyz") == (503, "8 vBuckets are not streamed: see the warnings of /status\n")
        )
    )
    assert status()["phase"] == "following"
    cluster.kill(1)
    until(lambda: get("/readyz") == (503, "disconnected: no node can be reached\n"))
    assert get("/livez")[0] == 200
    found = status()
    assert (found["phase"], found["lag"]) == ("disconnected", None)
    assert found["vbuckets"]["disconnected"] == 16
    logged = [each for each in found["errors"] if each["logger"] == "dcp_rs.consumer.cluster"]
    assert logged
    assert {each["level"] for each in logged} == {"WARNING"}
    assert get("/elsewhere")[0] == 404
    cluster.restart(1)
    until(lambda: status()["vbuckets"]["streaming"] == 8)
    # Some are streamed, and nothing is known of the others.
    assert get("/readyz")[0] == 503
    cluster.restart(0)
    until(lambda: get("/readyz")[0] == 200)
    assert status()["vbuckets"]["streaming"] == 16


def test_a_port_in_use_is_an_error_that_names_the_option(client, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        port = f"port {other.getsockname()[1]} of 127.0.0.1 is in use"
        with pytest.raises(ConfigError, match=f"^listen: {port}"):
            dcp_rs.replicate(client, f"duckdb://{tmp_path}/d.duckdb", once=True, listen=address)
        done = subprocess.run(
            [
                sys.executable, "-W", "ignore", "-m", "dcp_rs", "replicate",
                client.options.connection_string, f"duckdb://{tmp_path}/d.duckdb", "--bucket",
                "default", "--username", client.options.username, "--listen", address,
            ],
            env=os.environ | {"DCP_RS_PASSWORD": client.options.password},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr[:9]) == (1, "dcp-rs: -"), done.stderr
        assert f"--listen: {port}" in done.stderr
    assert not (tmp_path / "d.duckdb").exists(), "nothing was written"


def test_the_listener_goes_with_the_replication(cluster, client, tmp_path, get):
    cluster.upsert("key", {})
    dcp_rs.replicate(client, f"duckdb://{tmp_path}/d.duckdb", once=True, listen=ANYWHERE)
    assert get("/livez") == (None, "")
    assert "dcp_rs-listener" not in {each.name for each in threading.enumerate()}
    assert "Warnings" not in str(logging.getLogger("dcp_rs").handlers)
