"""The pages of metrics and of exit codes list those that there are, and no others."""

import re
from pathlib import Path

from dcp_rs._figures import FIGURES
from dcp_rs.cli import show, verify
from dcp_rs.cli._program import _program

ROOT = Path(__file__).parents[2]
METRICS = ROOT / "docs/reference/metrics.md"
COMMANDS = ROOT / "docs/guides/command-line.md"
# Which the listener makes by itself.
OF_THE_LISTENER = {"dcp_rs_warnings_total", "dcp_rs_stream_events_total"}


def test_the_page_lists_each_metric_under_both_names_and_no_other():
    page = METRICS.read_text()
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `dcp_rs_")]
    listed = {}
    for prometheus, opentelemetry, *_ in rows:
        ends = re.findall(r"`([\w.]+)`", opentelemetry)
        names = re.findall(r"`(\w+)`", prometheus)
        assert len(names) == len(ends), prometheus
        listed |= dict(zip(names, ends, strict=True))
    metrics = {
        each.prometheus + ("_total" if each.kind == "counter" else ""): each.opentelemetry
        for each in FIGURES
    }
    assert len(metrics) > 40
    assert sorted(listed) == sorted(metrics)
    assert {name: end for name, end in listed.items() if not metrics[name].endswith(end)} == {}
    assert set(re.findall(r"\bdcp_rs_\w+", page)) == set(metrics) | OF_THE_LISTENER


def test_the_guide_lists_each_exit_status_and_no_other():
    section = COMMANDS.read_text().partition("**Exit status**")[2].partition("\n\n`")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    told = set(map(int, re.findall(r"\b\d+\b", _program.epilog)))
    assert listed == told | {show._GONE, verify._DIFFERS}
    assert re.search(rf"^\| {show._GONE} \| `show`: .*`verify`: ", section, re.MULTILINE)
