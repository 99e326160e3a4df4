"""The alarms of docs/guides/monitor.md, tried by Prometheus's own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dcp_rs import _figures
from dcp_rs.metrics import PrometheusCollector
from dcp_rs.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/monitor.md"
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
}


def rules():
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block


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
        lines.append(f"        exp_alerts: {[{'exp_labels': labels}] if fires else []}")
    return "\n".join(lines) + "\n"


def test_the_alarms_are_valid_rules(tmp_path):
    done = promtool(tmp_path, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} rules found" in done.stdout
    assert set(re.findall(r"alert: (\w+)", rules())) == set(CASES)


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


def test_alarms_name_metrics_that_there_are():
    registry = CollectorRegistry()
    with EmbeddedCluster() as cluster, cluster.connect() as client:
        cluster.upsert("key", {})
        cluster.persist()
        with client.stream(persisted_only=True) as stream:
            registry.register(PrometheusCollector(stream, name="search"))
            next(stream)
            page = generate_latest(registry).decode()
    exported = set(re.findall(r"^(dcp_rs_\w+)", page, re.MULTILINE))
    # Absent while unknown: the nodes may not have answered yet.
    exported |= {"dcp_rs_lag"}
    exported |= {each.prometheus for each in _figures.FIGURES if each.stream is None}
    named = set(re.findall(r"\bdcp_rs_\w+", rules().split("rules:", 1)[1]))
    assert named
    assert named <= exported
