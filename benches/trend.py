"""Runs the benchmarks, and keeps their ratios in docs/trend.json, drawn in docs/trend.svg.

Times belong to a machine; ratios within one run can be compared with those of another. Each case is
kept beside the last of the references that are measured with it, such as a hand-written loop.

Usage: benches/trend.py [--draw]    (as `make bench` does; --draw only draws)
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT, DRAWN = ROOT / "docs" / "trend.json", ROOT / "docs" / "trend.svg"
WIDTH, HEIGHT, COLUMNS, TOP = 290, 84, 3, 30
LINE = "#0b6e4f"


def measure() -> list[dict[str, Any]]:
    """Runs the benchmarks and returns their cases."""
    command = ["cargo", "bench", "-p", "dcp-benches", "--locked", "--quiet", "--", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return [case for case in found if "speed_ratio_to" in case]


def ratios(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the speed of each case as a share of its reference's."""
    found = {}
    for case in cases:
        if case["speed_ratio_to"]:
            reference, ratio = list(case["speed_ratio_to"].items())[-1]
            found[f"{case['group']}: {case['case']} / {reference}"] = round(ratio, 3)
    return found


def show(cases: list[dict[str, Any]]) -> None:
    """Prints a line for each case."""
    for case in cases:
        beside = "  ".join(
            f"{ratio:.0%} of {name}" for name, ratio in case["speed_ratio_to"].items()
        )
        rate = case["rows_per_second"] / 1e6
        print(f"{case['group']:48} {case['case']:36} {rate:8.2f} M rows/s  {beside}".rstrip())


def draw(kept: list[dict[str, Any]]) -> str:
    """Draws each ratio over the runs, oldest first, in a cell of its own."""
    names = list(kept[-1]["ratios"])
    rows = -(-len(names) // COLUMNS)
    size = f'width="{WIDTH * COLUMNS}" height="{TOP + rows * HEIGHT}"'
    first, last = (kept[at]["commit"] for at in (0, -1))
    title = f"Speed as a share of the reference, from {first} to {last}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        f'<rect {size} fill="white"/>',
        f'<text x="8" y="18" font-size="13">{title}</text>',
    ]
    for place, name in enumerate(names):
        x, y = place % COLUMNS * WIDTH + 8, TOP + place // COLUMNS * HEIGHT
        group, _, of = name.partition(": ")
        values = [run["ratios"][name] for run in kept if name in run["ratios"]]
        low, high = min(values) * 0.9, max(values) * 1.1
        step = (WIDTH - 60) / max(len(values) - 1, 1)
        points = [
            f"{x + index * step:.1f},{y + 66 - 34 * (value - low) / (high - low):.1f}"
            for index, value in enumerate(values)
        ]
        end_x, end_y = points[-1].split(",")
        parts += [
            f'<text x="{x}" y="{y + 12}" font-weight="bold">{escape(group)}</text>',
            f'<text x="{x}" y="{y + 24}">{escape(of)}</text>',
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{LINE}"/>',
            f'<circle cx="{end_x}" cy="{end_y}" r="2.5" fill="{LINE}"/>',
            f'<text x="{float(end_x) + 5:.1f}" y="{float(end_y) + 3:.1f}">{values[-1]:.0%}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str]) -> None:
    """Measures, unless only a drawing is asked for; keeps the ratios and draws them."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    if arguments != ["--draw"]:
        cases = measure()
        show(cases)
        machine = cases[0]["machine"]
        kept.append(
            {
                "date": datetime.now(UTC).date().isoformat(),
                "commit": machine["commit"],
                "machine": f"{machine['cores']} cores ({machine['cpu']})",
                "ratios": ratios(cases),
            }
        )
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    DRAWN.write_text(draw(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
