"""Bars as SVG, without a library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH, ROW, LEFT, TOP = 760, 16, 170, 34
COLOURS = ["#0b6e4f", "#3aa17e", "#b4532a", "#3b6ea5", "#7b5ea7", "#8a8a8a", "#b0b0b0", "#c8c8c8"]


@dataclass(frozen=True)
class Plot:
    """What is drawn of a group of tables."""

    file: str
    column: str
    title: str


PLOTS = {
    "peers of a node": Plot(
        "node.svg", "CPU s", "Processor seconds per million changes, as a node writes them"
    ),
    "peers": Plot("peers.svg", "CPU s", "Processor seconds per million changes"),
    "peers from memory": Plot("memory.svg", "s", "Seconds per million changes, from memory"),
}


def draw(group: str, tables: list[dict[str, list[Any]]], docs: Path = DOCS) -> None:
    """Draws the plot of a group."""
    chosen = PLOTS[group]
    figures = {}
    for table in tables:
        size, *columns = table["columns"]
        at = columns.index(chosen.column)
        figures[size] = {name: float(row[at]) for name, *row in table["rows"]}
    text = plot(figures, f"{chosen.title} (logarithmic, shorter is better)")
    (docs / chosen.file).write_text(text)


def plot(figures: dict[str, dict[str, float]], title: str) -> str:
    """Bars grouped by value length, on a log scale."""
    every = [value for by_client in figures.values() for value in by_client.values()]
    low = math.floor(math.log10(min(every)))
    high = math.ceil(math.log10(max(every)))
    scale = (WIDTH - LEFT - 70) / max(high - low, 1)

    def place(value: float) -> float:
        return LEFT + (math.log10(value) - low) * scale

    parts: list[str] = []
    bar = ROW - 3
    y = TOP
    for size, by_client in figures.items():
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">{size}</text>')
        for (name, value), colour in zip(by_client.items(), COLOURS, strict=False):
            width = place(value) - LEFT
            parts += [
                f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{name}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{bar}" fill="{colour}"/>',
                f'<text x="{LEFT + width + 4:.1f}" y="{y + 11}">{value:.2f}</text>',
            ]
            y += ROW
        y += ROW // 2
    for power in range(low, high + 1):
        x = f"{place(10.0**power):.1f}"
        parts += [
            f'<line x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{x}" y="{y + 12}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    area = f'width="{WIDTH}" height="{y + 22}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {area} font-family="sans-serif" font-size="11">',
        f'<rect {area} fill="white"/>',
        f'<text x="8" y="16" font-size="13">{title}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])
