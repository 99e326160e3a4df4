"""The alerts and the dashboard of deploy/, on Prometheus's own tool and a run's metrics."""

import json
import logging
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

import dcp_rs
from dcp_rs import _figures
from dcp_rs.metrics import PrometheusCollector
from dcp_rs.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/dcp_rs.rules.yml"
DASHBOARD = ROOT / "deploy/grafana/dcp_rs.json"
RUNBOOK = ROOT / "docs/guides/alerts.md"
LOCAL = ROOT / ".state/tools/bin/promtool"
PROMTOOL = str(LOCAL) if LOCAL.exists() else shutil.which("promtool")
LABELS = 'bucket="default",stream="search"'
# For each alarm: series, one value a minute, and the minute at which it first fires; before, and
# with healthy series, it must be silent. Each series is a rate and a length in promtool's notation.
CASES = {
    "NotReading": ({"dcp_rs_lag": "10x30", "dcp_rs_records_total": "500x30"}, 3),
    "FallingBehind": ({"dcp_rs_lag": "0+10x60", "dcp_rs_records_total": "0+60x60"}, 16),
    "VbucketsDown": ({'dcp_rs_vbuckets{state="backing_off"}': "0 3x30"}, 3),
    "Disconnected": ({"dcp_rs_disconnected_vbuckets": "0 3x30"}, 2),
    "StreamAboutToFail": ({'dcp_rs_vbuckets{state="backing_off"}': "0 3x30"}, 5),
    "StreamFailed": ({'dcp_rs_vbuckets{state="failed"}': "0 0 1x30"}, 2),
    "UnstableNetwork": ({"dcp_rs_reconnects_total": "0 0 0 6 12 18x30"}, 4),
    "NotPersisting": ({"dcp_rs_unpersisted_seconds": "0 30 90x30"}, 2),
    "ReplicateStuck": ({"dcp_rs_report_age_seconds": "0 60 120 180 240x30"}, 3),
    "TargetUnavailable": ({"dcp_rs_target_unavailable_seconds": "0 60 120 180x30"}, 3),
    "ReplicateLate": ({"dcp_rs_lag_seconds": "0 301x30"}, 6),
    "ReplicateRejects": ({"dcp_rs_rejected_records_total": "0 0 0 1x30"}, 3),
    "ClocksDiffer": ({"dcp_rs_cas_ahead_seconds": "0 6x30"}, 6),
    "ReplicateNotCommitting": (
        {
            "dcp_rs_lag": "0x30",
            "dcp_rs_uncommitted_records": "0 5x30",
            "dcp_rs_commit_age_seconds": "0+60x30",
        },
        3,
    ),
}
HEALTHY = {
    "dcp_rs_lag": "0x60",
    "dcp_rs_records_total": "0+60x60",
    'dcp_rs_vbuckets{state="backing_off"}': "0x60",
    'dcp_rs_vbuckets{state="failed"}': "0x60",
    "dcp_rs_disconnected_vbuckets": "0x60",
    "dcp_rs_reconnects_total": "1x60",
    "dcp_rs_unpersisted_seconds": "2x60",
    "dcp_rs_report_age_seconds": "0.5x60",
    'dcp_rs_phase{phase="disconnected"}': "0x60",
    # Nothing is written to the bucket.
    "dcp_rs_uncommitted_records": "0x60",
    "dcp_rs_commit_age_seconds": "0+60x60",
    "dcp_rs_lag_seconds": "1x60",
    "dcp_rs_rejected_records_total": "7x60",
    "dcp_rs_cas_ahead_seconds": "0.2x60",
}


# Absent while unknown, or while there is none.
ABSENT = (
    "dcp_rs_lag", "dcp_rs_lag_max", "dcp_rs_lag_seconds", "dcp_rs_cas_lag_seconds",
    "dcp_rs_table_lag_seconds",
)  # fmt: skip


def rules():
    return RULES.read_text()


def alerts():
    (group,) = yaml.safe_load(rules())["groups"]
    return group["rules"]


def labelled(name):
    metric, _, rest = name.partition("{")
    return f"{metric}{{{LABELS}{',' + rest if rest else '}'}"


def promtool(tmp_path, *command):
    if PROMTOOL is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yml").write_text(rules())
    return subprocess.run(
        [PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def firing(series, alarm, minutes, labels=None):
    """A test of promtool: whether an alarm fires at each of some minutes, and with which labels."""
    lines = ["rule_files: [rules.yml]", "evaluation_interval: 1m", "tests:", "  - interval: 1m"]
    lines.append("    input_series:")
    for name, values in series.items():
        lines += [f"      - series: '{labelled(name)}'", f"        values: '{values}'"]
    lines.append("    alert_rule_test:")
    for minute, fires in minutes.items():
        lines += [f"      - eval_time: {minute}m", f"        alertname: {alarm}"]
        (rule,) = [each for each in alerts() if each["alert"] == alarm]
        expected = {
            "exp_labels": rule["labels"] | (labels or {}),
            "exp_annotations": rule["annotations"],
        }
        lines.append(f"        exp_alerts: {json.dumps([expected] if fires else [])}")
    return "\n".join(lines) + "\n"


def test_the_alarms_are_valid_rules(tmp_path):
    done = promtool(tmp_path, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} rules found" in done.stdout
    assert {each["alert"] for each in alerts()} == set(CASES)


@pytest.mark.parametrize("alarm", CASES)
def test_an_alarm_fires_when_it_should_and_not_before(tmp_path, alarm):
    series, minute = CASES[alarm]
    state = re.findall(r'state="(\w+)"', " ".join(series))
    labels = {"bucket": "default", "stream": "search"} | ({"state": state[0]} if state else {})
    minutes = {minute - 1: False, minute: True}
    (tmp_path / "test.yml").write_text(firing(HEALTHY | series, alarm, minutes, labels))
    done = promtool(tmp_path, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alarm_fires_for_a_healthy_stream(tmp_path):
    for alarm in CASES:
        (tmp_path / "test.yml").write_text(firing(HEALTHY, alarm, {20: False, 50: False}))
        done = promtool(tmp_path, "test", "rules", "test.yml")
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_stream_that_is_gone_is_an_alarm(tmp_path):
    (tmp_path / "test.yml").write_text(firing({"up": "1x10"}, "StreamFailed", {5: True}, {}))
    done = promtool(tmp_path, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def exported():
    """The labels of each metric that runs export, by its name."""
    page = ""
    registry = CollectorRegistry()
    with EmbeddedCluster() as cluster, cluster.connect() as client:
        cluster.upsert("key", {})
        cluster.persist()
        with client.stream(persisted_only=True) as stream:
            registry.register(PrometheusCollector(stream, name="search"))
            next(stream)
            page += generate_latest(registry).decode()
        with tempfile.TemporaryDirectory() as folder:
            page += scraped(client, f"duckdb://{folder}/d.duckdb")
    found = {}
    for name, labels in re.findall(r"^(\w+)(?:{(.*)})? ", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    labels = {each.prometheus: set(each.labels) for each in _figures.FIGURES}
    return {name: labels[name] for name in ABSENT} | found


def scraped(client, target):
    """What the listener of a replication exports."""
    pages, logged, stop = [], [], threading.Event()
    handler = logging.Handler()
    handler.emit = logged.append
    logger = logging.getLogger("dcp_rs.listener")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def take(progress):
        if progress.phase == "following":
            (url,) = [each.fields["url"] for each in logged if each.event == "listening"]
            with urllib.request.urlopen(f"{url}/metrics", timeout=20) as found:
                pages.append(found.read().decode())
            stop.set()

    try:
        dcp_rs.replicate(
            client, target, tables="collection", listen="0", stop=stop, on_progress=take
        )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return pages[0]


def check_query(query, exported):
    names = re.findall(r"\b(?:dcp_rs|process)_\w+", query)
    assert names, query
    for name in names:
        assert name in exported, query
        for labels in re.findall(rf"{name}{{([^}}]*)}}", query):
            named = set(re.findall(r"(\w+)(?:=|!)", labels))
            assert named <= exported[name] | {"job"}, query


def test_alerts_name_metrics_that_there_are(exported):
    for each in alerts():
        check_query(each["expr"], exported)


def test_the_dashboards_queries_are_valid_and_name_metrics_that_there_are(exported, tmp_path):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [each for panel in panels for each in panel.get("targets", [])]
    assert len(targets) > 25
    checked = []
    for each in targets:
        query = each["expr"].replace("$__rate_interval", "5m")
        check_query(query, exported)
        legend = set(re.findall(r"{{(\w+)}}", each["legendFormat"]))
        (name, *_) = re.findall(r"\b(?:dcp_rs|process)_\w+", query)
        assert legend <= exported[name] | {"instance"}, query
        checked.append({"record": f"panel:query_{len(checked)}", "expr": query})
    queries = {"groups": [{"name": "dashboard", "rules": checked}]}
    (tmp_path / "queries.yml").write_text(json.dumps(queries))
    done = promtool(tmp_path, "check", "rules", "queries.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))


def test_the_runbook_has_each_alert_and_names_events_and_metrics_that_there_are(exported):
    page = RUNBOOK.read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in rows))
    assert {name for name, _ in rows} == set(CASES)
    for name in re.findall(r"\bdcp_rs_\w+", page):
        assert name in exported, name
    logged = set(re.findall(r'name: "(\w+)"', sources("crates/*/src/**/*.rs")))
    logged |= set(re.findall(r'about\(\s*"(\w+)"', sources("python/dcp_rs/**/*.py")))
    logged |= {"failed"}
    events = set()
    for _, row in rows:
        for words in re.findall(r"events? ((?:`\w+`(?:, | and )?)+)", row):
            events |= set(re.findall(r"`(\w+)`", words))
    assert len(events) > 8
    assert events <= logged


def sources(pattern):
    return "".join(path.read_text() for path in ROOT.glob(pattern))
