"""Bars as SVG, without a library."""

from __future__ import annotations

import math
from typing import Any

WIDTH, ROW, LEFT, TOP = 760, 16, 150, 34
COLOURS = ["#0b6e4f", "#3aa17e", "#b4532a", "#3b6ea5", "#7b5ea7", "#8a8a8a"]


def plot(figures: dict[int, dict[str, Any]]) -> str:
    """Processor seconds per million changes: bars grouped by value length, on a log scale."""
    every = [sample.cpu for medians in figures.values() for sample in medians.values()]
    low = math.floor(math.log10(min(every)))
    high = math.ceil(math.log10(max(every)))
    scale = (WIDTH - LEFT - 70) / max(high - low, 1)

    def place(cpu: float) -> float:
        return LEFT + (math.log10(cpu) - low) * scale

    parts: list[str] = []
    bar = ROW - 3
    y = TOP
    for value_len, medians in figures.items():
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">{value_len} B</text>')
        for (name, sample), colour in zip(medians.items(), COLOURS, strict=False):
            width = place(sample.cpu) - LEFT
            parts += [
                f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{name}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{bar}" fill="{colour}"/>',
                f'<text x="{LEFT + width + 4:.1f}" y="{y + 11}">{sample.cpu:.2f}</text>',
            ]
            y += ROW
        y += ROW // 2
    for power in range(low, high + 1):
        x = f"{place(10.0**power):.1f}"
        parts += [
            f'<line x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{x}" y="{y + 12}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    title = "Processor seconds per million changes (logarithmic, shorter is better)"
    size = f'width="{WIDTH}" height="{y + 22}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect {size} fill="white"/>',
        f'<text x="8" y="16" font-size="13">{title}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])
