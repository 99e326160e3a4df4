"""The tables of docs/guides/sdks.md: a row for each answer, with the calls that get it."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "sdks.md"
HEAD = ("| answer | calls |", "|---|---|")
BETWEEN = "; "


def write(begin: str, end: str, answers: dict[str, str]) -> None:
    """Writes the table between two marks of the page."""
    calls: dict[str, list[str]] = {}
    for name, answer in answers.items():
        calls.setdefault(answer, []).append(name)
    rows = [f"| {answer} | {BETWEEN.join(names)} |" for answer, names in calls.items()]
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join([begin, "", *HEAD, *rows, "", end])
    PAGE.write_text(page.split(begin)[0] + table + page.split(end)[1], encoding="utf-8")


def read(begin: str, end: str) -> dict[str, str]:
    """The answer of each call in the table between two marks."""
    table = PAGE.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: answer for answer, names in rows[1:] for name in names.split(BETWEEN)}
