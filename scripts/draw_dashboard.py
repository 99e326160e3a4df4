"""Draws docs/dashboard.svg: the panels of deploy/grafana/dcp_rs.json, as a Prometheus answers them.

The queries are the dashboard's own; what draws them is this script, not Grafana. The picture of the
page was made while `scripts/long.py pipeline-soak` ran, scraped every five seconds.

Usage: scripts/draw_dashboard.py [--end UNIX_TIME] [--minutes N] URL
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from typing import Any, NamedTuple

from draw import BLUE, DOCS, GREEN, GREY, RED, Picture

DASHBOARD = DOCS.parent / "deploy" / "grafana" / "dcp_rs.json"
COLOURS = (BLUE, GREEN, "#b7791f", RED, "#6b46c1", "#0987a0", GREY)
# Of a cell of the dashboard's grid, and of a panel's edges.
WIDE, HIGH = 46, 24
TOP, BOTTOM, LEFT, RIGHT = 36, 34, 48, 14
STEPS = 90


class Line(NamedTuple):
    """A series: its name, and its values by time."""

    name: str
    points: list[tuple[float, float]]


class Span(NamedTuple):
    """The time that is drawn."""

    start: float
    end: float

    @property
    def step(self) -> float:
        """Seconds between values."""
        return (self.end - self.start) / STEPS


def ask(url: str, expression: str, legend: str, span: Span) -> list[Line]:
    """Asks a Prometheus for a query of the dashboard."""
    for name in ("bucket", "stream", "job"):
        expression = expression.replace(f'"${name}"', '".*"')
    expression = expression.replace("$__rate_interval", "1m")
    given = {"query": expression, "start": span.start, "end": span.end, "step": span.step}
    query = f"{url}/api/v1/query_range?{urllib.parse.urlencode(given)}"
    with urllib.request.urlopen(query) as answer:  # noqa: S310 - as it was given
        found = json.load(answer)["data"]["result"]
    return [
        Line(
            named(legend, each["metric"]),
            [(float(at), float(value)) for at, value in each["values"]],
        )
        for each in found
    ]


def named(legend: str, labels: dict[str, str]) -> str:
    """Returns the name of a series."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def shown(value: float, unit: str) -> str:
    """Returns a value with its unit."""
    if unit in {"bytes", "Bps"}:
        return f"{value / (1 << 20):.0f} MiB" if value >= 1 << 20 else f"{value / 1024:.0f} KiB"
    suffix = {"s": " s", "ops": "/s"}.get(unit, "")
    for size, name in ((1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e6 if name == 'M' else 1e3):.3g}{name}{suffix}"
    return f"{value:.3g}{suffix}" if value < 100 else f"{value:.0f}{suffix}"


class Panel:
    """A panel of the dashboard at its place."""

    def __init__(self, picture: Picture, panel: dict[str, Any], span: Span) -> None:
        place: dict[str, int] = panel["gridPos"]
        self.x, self.y = place["x"] * WIDE + 8, place["y"] * HIGH + 8
        self.width, self.height = place["w"] * WIDE - 8, place["h"] * HIGH - 8
        self.unit, self.picture, self.span = panel["fieldConfig"]["defaults"]["unit"], picture, span
        picture.frame(self.x, self.y, self.width, self.height)
        picture.text(self.x + 8, self.y + 18, panel["title"], size=12 if place["w"] > 4 else 10)

    def stat(self, lines: list[Line]) -> None:
        """Draws the last values."""
        told = [line for line in lines if line.points[-1][0] > self.span.end - 2 * self.span.step]
        words = ", ".join(
            line.name.partition(": ")[2] or shown(line.points[-1][1], self.unit) for line in told
        )
        self.picture.text(
            self.x + self.width / 2, self.y + self.height / 2 + 18, words or "unknown",
            anchor="middle", colour=GREEN, size=20,
        )  # fmt: skip

    def chart(self, lines: list[Line]) -> None:
        """Draws values over time."""
        self._over_time(lines)
        highest = max((value for line in lines for _, value in line.points), default=0) or 1
        left, base = self.x + LEFT, self.y + self.height - BOTTOM
        high = self.height - TOP - BOTTOM
        for part in (0, 0.5, 1):
            height = base - part * high
            self.picture.line(left, height, self.x + self.width - RIGHT, height, "#e2e8f0")
            words = shown(highest * part, self.unit)
            self.picture.text(left - 4, height + 4, words, anchor="end", colour=GREY, size=9)
        for line, colour in zip(lines, COLOURS, strict=False):
            run: list[str] = []
            before = 0.0
            for at, value in line.points:
                if run and at - before > 1.5 * self.span.step:
                    self.picture.path(run, colour)
                    run = []
                before = at
                run.append(f"{self._across(at):.1f},{base - value / highest * high:.1f}")
            self.picture.path(run, colour)
        self._legend([line.name for line in lines])

    def _across(self, at: float) -> float:
        part = (at - self.span.start) / (self.span.end - self.span.start)
        return self.x + LEFT + part * (self.width - LEFT - RIGHT)

    def _over_time(self, lines: list[Line]) -> None:
        if not lines:
            self.picture.text(
                self.x + self.width / 2, self.y + 80, "none", anchor="middle", size=11
            )
        for at, anchor in ((self.span.start, "start"), (self.span.end, "end")):
            words = f"{datetime.fromtimestamp(at, UTC):%H:%M}"
            height = self.y + self.height - BOTTOM + 13
            self.picture.text(self._across(at), height, words, anchor=anchor, colour=GREY, size=9)

    def _legend(self, names: list[str]) -> None:
        x, limit = self.x + 8.0, self.x + self.width
        for name, colour in zip(names, COLOURS, strict=False):
            width = 5.2 * len(name) + 12
            if x + width > limit:
                return
            self.picture.text(x, self.y + self.height - 8, name, colour=colour, size=9)
            x += width


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--end", type=float, default=time.time())
    parser.add_argument("--minutes", type=float, default=15)
    given = parser.parse_args()
    span = Span(given.end - 60 * given.minutes, given.end)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    bottom = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    picture = Picture(24 * WIDE + 8, bottom * HIGH + 8)
    for each in panels:
        if each["type"] == "row":
            picture.text(8, each["gridPos"]["y"] * HIGH + 26, each["title"], size=14)
            continue
        panel = Panel(picture, each, span)
        lines = [
            line
            for target in each["targets"]
            for line in ask(given.url, target["expr"], target["legendFormat"], span)
        ]
        (panel.stat if each["type"] == "stat" else panel.chart)(lines)
    picture.save("dashboard.svg")


if __name__ == "__main__":
    main()
