"""Time and memory by size as SVG, without a library."""

from __future__ import annotations

import math
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, GAP = 240, 170, 56, 44, 70
TIME, MEMORY = "#0b6e4f", "#b4532a"


class Point(NamedTuple):
    """Measurements of one size."""

    size: float
    nanoseconds: float
    mebibytes: float


class Panel(NamedTuple):
    """The growing quantity, and its points by size."""

    what: str
    points: list[Point]


def _curve(
    places: list[tuple[float, float]], colour: str, labels: list[str], *, away: int
) -> list[str]:
    """Returns a curve, with labels `away` below its points."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), label in zip(places, labels, strict=True):
        beside = f'x="{x:.1f}" y="{y + away:.1f}" text-anchor="middle"'
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>',
            f'<text {beside} fill="{colour}">{label}</text>',
        ]
    return parts


def _short(size: float) -> str:
    """Returns a size as people write it."""
    for unit, name in ((1 << 20, " Mi"), (1 << 10, " Ki")):
        if size >= 10 * unit and size % unit == 0:
            return f"{size / unit:.0f}{name}"
    return f"{size:,}"


def _panel(panel: Panel, left: float) -> list[str]:
    """Returns one panel, up to its largest time and memory."""
    most = Point(
        0,
        max(point.nanoseconds for point in panel.points),
        max(point.mebibytes for point in panel.points),
    )
    sizes = [point.size for point in panel.points]
    low, high = math.log10(min(sizes)), math.log10(max(sizes))

    def across(size: float) -> float:
        return left + (math.log10(size) - low) / (high - low) * WIDTH

    def up(part: float) -> float:
        return TOP + HEIGHT * (1 - part)

    bottom = TOP + HEIGHT
    parts = [
        f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{panel.what}</text>',
        f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" stroke="#888"/>',
    ]
    for size in sizes:
        at = f'x="{across(size):.1f}" y="{bottom + 14}"'
        parts.append(f'<text {at} text-anchor="middle">{_short(size)}</text>')
    # Zero is at the bottom, so that constant values are a level line.
    time = [(across(p.size), up(p.nanoseconds / most.nanoseconds)) for p in panel.points]
    # At most half as high as time, to keep the two apart.
    memory = [(across(p.size), up(p.mebibytes / most.mebibytes / 2)) for p in panel.points]
    parts += _curve(time, TIME, [f"{p.nanoseconds:.0f}" for p in panel.points], away=-7)
    labels = [f"{p.mebibytes:.0f}" for p in panel.points]
    return parts + _curve(memory, MEMORY, labels, away=16)


def plot(panels: list[Panel]) -> str:
    """Plots nanoseconds per change and the reader's peak memory, one panel per quantity."""
    width = LEFT + len(panels) * (WIDTH + GAP)
    size = f'width="{width}" height="{TOP + HEIGHT + 30}"'
    title = (
        f'<tspan fill="{TIME}">Nanoseconds a change</tspan> and '
        f'<tspan fill="{MEMORY}">peak memory of the reader in MiB</tspan>, each from zero'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect {size} fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{title}</text>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, LEFT + index * (WIDTH + GAP))
    return "\n".join([*parts, "</svg>", ""])
