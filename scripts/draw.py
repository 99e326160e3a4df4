"""Draws the diagrams of How DCP works, the concepts and Architecture: `python scripts/draw.py`."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLUE, GREEN, GREY, RED = "#2b6cb0", "#0b6e4f", "#999999", "#c53030"
STEP, SIDE = 72, 44


class Picture:
    """Boxes, lines and text on a white background."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="14"',
            f'     viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        colour: str = "#222222",
        size: int | None = None,
    ) -> None:
        """Draws text."""
        font = "" if size is None else f' font-size="{size}"'
        self._parts.append(
            f'<text x="{x}" y="{y}"{font} text-anchor="{anchor}" fill="{colour}">{words}</text>'
        )

    def box(self, x: float, y: float, words: str, colour: str, *, gone: bool = False) -> None:
        """Draws a change: its text, dashed if the change is gone."""
        dash = ' stroke-dasharray="4 3"' if gone else ""
        ground = "white" if gone else colour
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{SIDE}" height="30" rx="4" fill="{ground}" '
            f'stroke="{colour}"{dash}/>'
        )
        self.text(x + SIDE / 2, y + 20, words, anchor="middle", colour=colour if gone else "white")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draws the outline of a part."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="none" '
            f'stroke="{GREY}"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        colour: str = "#222222",
        *,
        arrow: bool = False,
    ) -> None:
        """Draws a line, with an arrowhead if it is an arrow."""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.5"/>'
        )
        if arrow:
            side = -6 if x2 > x1 else 6
            points = f"{x2},{y2} {x2 + side},{y2 - 4} {x2 + side},{y2 + 4}"
            self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def path(self, points: list[str], colour: str) -> None:
        """Draws a line through points, each of which is `x,y`."""
        self._parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            'stroke-width="1.5"/>'
        )

    def save(self, name: str) -> None:
        """Writes the file."""
        (DOCS / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def place(seqno: int) -> int:
    """Returns the left edge of a seqno's box."""
    return 110 + (seqno - 1) * STEP


def snapshots() -> None:
    """Draws a history in which a key was written twice, and the two snapshots sent of it."""
    picture = Picture(620, 220)
    picture.text(10, 31, "written")
    picture.text(10, 111, "sent")
    for seqno, key in enumerate("ABCADB", 1):
        picture.box(place(seqno), 11, f"{seqno} {key}", BLUE)
        is_old = seqno == 1
        picture.box(place(seqno), 91, f"{seqno} {key}", GREY if is_old else GREEN, gone=is_old)
    for first, last, words in ((1, 4, "snapshot 0 to 4"), (5, 6, "snapshot 5 to 6")):
        left, right = place(first) - 6, place(last) + SIDE + 6
        for x1, y1, x2, y2 in (
            (left, 135, right, 135),
            (left, 128, left, 135),
            (right, 128, right, 135),
        ):
            picture.line(x1, y1, x2, y2)
        picture.text((left + right) / 2, 154, words, anchor="middle")
    picture.line(place(3) + SIDE + 14, 80, place(3) + SIDE + 14, 178, RED)
    picture.text(place(3) + SIDE + 14, 195, "here the reader has no A", anchor="middle", colour=RED)
    picture.save("snapshots.svg")


def branches() -> None:
    """Draws a failover that loses two changes."""
    picture = Picture(620, 190)
    picture.text(10, 51, "branch a1", colour=BLUE)
    picture.text(10, 131, "branch b2", colour=GREEN)
    for seqno in range(1, 7):
        picture.box(place(seqno), 31, str(seqno), BLUE if seqno <= 4 else GREY, gone=seqno > 4)
    picture.text(place(5), 20, "lost with the node", colour=GREY)
    picture.line(place(4) + SIDE + 14, 46, place(4) + SIDE + 14, 126, GREEN)
    picture.line(place(4) + SIDE + 14, 126, place(5) - 2, 126, GREEN, arrow=True)
    for seqno in (5, 6):
        picture.box(place(seqno), 111, str(seqno), GREEN)
    picture.text(10, 175, "failover log: (b2, 4), (a1, 0)")
    picture.save("branches.svg")


def rollback() -> None:
    """Draws the messages between reader and server at a rollback."""
    picture = Picture(620, 300)
    left, right = 150, 470
    picture.text(left, 24, "reader", anchor="middle")
    picture.text(right, 24, "server", anchor="middle")
    picture.line(left, 34, left, 285, GREY)
    picture.line(right, 34, right, 285, GREY)
    said = [
        (60, True, "stream request: a1, seqno 6", BLUE),
        (100, False, "rollback to 4", RED),
        (180, True, "stream request: a1, seqno 4", BLUE),
        (220, False, "failover log: (b2, 4), (a1, 0)", GREEN),
        (255, False, "seqnos 5 and 6 of branch b2", GREEN),
    ]
    for y, asks, words, colour in said:
        picture.line(left if asks else right, y, right if asks else left, y, colour, arrow=True)
        picture.text((left + right) / 2, y - 6, words, anchor="middle", colour=colour)
    picture.text(left - 12, 145, "row: rollback,", anchor="end", colour=RED)
    picture.text(left - 12, 163, "seqno 4, epoch 1", anchor="end", colour=RED)
    picture.text(left - 12, 259, "rows of epoch 1", anchor="end", colour=GREEN)
    picture.save("rollback.svg")


def bounded() -> None:
    """Draws a key that is in none of two ranges that are read."""
    picture = Picture(720, 190)
    picture.text(10, 60, "active copy", colour=BLUE)
    picture.text(10, 130, "its replica", colour=GREEN)
    for seqno in range(1, 9):
        words = f"{seqno} K" if seqno in (4, 8) else str(seqno)
        gone = seqno == 4
        picture.box(place(seqno), 40, words, GREY if gone else BLUE, gone=gone)
        if seqno < 8:
            picture.box(place(seqno), 110, words, GREEN)
    edge = place(4) + SIDE + 14
    picture.line(edge, 8, edge, 150, RED)
    picture.text(edge - 10, 20, "this range", anchor="end")
    picture.text(edge + 10, 20, "next range")
    picture.text(place(8), 130, "lacks 8", colour=GREY)
    picture.text(edge, 178, "reads 1 to 3, then 5 to 7: never K", anchor="middle", colour=RED)
    picture.save("bounded.svg")


def architecture() -> None:
    """Draws the crates that a mutation (blue) and a rollback (red) pass through."""
    width, gap, first = 134, 26, 10
    picture = Picture(980, 330)
    rooms = [
        ("a node", "", "", ""),
        ("dcp-consumer", "connection", "driver", "ROLLBACK, seqno"),
        ("dcp-proto", "walk", "stream", "answers, history"),
        ("dcp-arrow", "sink", "columns", "row: rollback"),
        ("dcp-consumer", "batch, checkpoint", "queue", "in order"),
        ("python/dcp_rs", "Arrow C stream", "Spark, targets", "on_rollback"),
    ]
    for number, (name, upper, lower, answered) in enumerate(rooms):
        left = first + number * (width + gap)
        centre = left + width / 2
        picture.frame(left, 40, width, 160)
        picture.text(centre, 62, name, anchor="middle")
        picture.text(centre, 100, upper, anchor="middle", colour=BLUE)
        picture.text(centre, 120, lower, anchor="middle", colour=BLUE)
        picture.text(centre, 172, answered, anchor="middle", colour=RED)
        if number:
            picture.line(left - gap, 108, left, 108, BLUE, arrow=True)
            picture.line(left - gap, 168, left, 168, RED, arrow=True)
    picture.text(first, 24, "a mutation", colour=BLUE)
    picture.text(first + 90, 24, "a rollback", colour=RED)
    # The stream is requested again, from the point that the history chose.
    back, node = first + 2 * (width + gap) + width / 2, first + width / 2
    for x1, y1, x2, y2 in ((back, 200, back, 216), (back, 216, node, 216)):
        picture.line(x1, y1, x2, y2, RED)
    picture.line(node, 216, node, 200, RED)
    picture.text((back + node) / 2, 232, "stream request", anchor="middle", colour=RED)
    below: list[tuple[int, int, str, str]] = [
        (first, width, "dcp-producer", "embedded cluster"),
        (first + width + gap, 2 * width + gap, "dcp-wire", "bytes to messages and back"),
        (first + 5 * (width + gap), width, "dcp-python", "conversion"),
    ]
    for left, wide, name, words in below:
        picture.frame(left, 252, wide, 60)
        picture.text(left + wide / 2, 276, name, anchor="middle")
        picture.text(left + wide / 2, 298, words, anchor="middle", colour=GREY)
    picture.save("architecture.svg")


if __name__ == "__main__":
    snapshots()
    branches()
    rollback()
    bounded()
    architecture()
