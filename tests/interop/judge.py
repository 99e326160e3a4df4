"""Judges what a client did, from the lines its program printed and from what the documents are.

Nothing here is the project's own: a fault in it cannot hide in the judge as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A collection's number and a key.
Document = tuple[int, str]


@dataclass(frozen=True)
class Version:
    """A version of a document; its CAS tells it from every other."""

    cas: int
    gone: bool


@dataclass
class Reading:
    """One process of a client."""

    lines: list[dict[str, Any]]
    # Why it did not come to its end: it waited for something, or it was over before.
    stalled: str = ""
    stopped: str = ""


@dataclass
class Verdict:
    """What a client did wrong; nothing if it was right."""

    faults: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return ", ".join(self.faults) or "right"


@dataclass
class Table:
    """What somebody has who applies every change, and takes back what a rollback takes back."""

    # By document, every version delivered: vBucket, seqno, version.
    versions: dict[Document, list[tuple[int, int, Version]]] = field(default_factory=dict)
    # By vBucket, what was delivered and need not come again: seqno, CAS.
    delivered: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)

    def take(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["line"] == "change":
                self.change(line)
            elif line["line"] == "rollback":
                self.roll_back(line["vb"], line["to"])

    def change(self, line: dict[str, Any]) -> None:
        vbucket, seqno, cas = line["vb"], line["seqno"], line["cas"]
        known = self.delivered.setdefault(vbucket, set())
        if (seqno, cas) in known:
            self.doubled.append(f"{line['key']} (vBucket {vbucket}, seqno {seqno})")
        known.add((seqno, cas))
        version = Version(cas, line["op"] != "mutation")
        document = line["collection"], line["key"]
        self.versions.setdefault(document, []).append((vbucket, seqno, version))

    def roll_back(self, vbucket: int, seqno: int) -> None:
        self.forget_delivered(vbucket, seqno)
        for document, versions in self.versions.items():
            self.versions[document] = [v for v in versions if v[0] != vbucket or v[1] <= seqno]

    def forget_delivered(self, vbucket: int, seqno: int) -> None:
        """What is above may come again: it was rolled back, or not stored as read."""
        known = self.delivered.get(vbucket, set())
        self.delivered[vbucket] = {each for each in known if each[0] <= seqno}

    def newest(self, document: Document) -> Version | None:
        versions = self.versions.get(document)
        return versions[-1][2] if versions else None


def table_of(lines: list[dict[str, Any]]) -> Table:
    """What somebody has who was told that by one process."""
    table = Table()
    table.take(lines)
    return table


def judge(truth: dict[Document, Version], readings: list[Reading]) -> Verdict:
    """Judges a client's processes, one after another, that went on from each other's positions.

    Args:
        truth: The newest version of each document, deletions too.
        readings: What each process printed.
    """
    table, verdict = Table(), Verdict()
    for number, reading in enumerate(readings):
        if number:
            stored = {line["vb"]: line["seqno"] for line in _of(readings[number - 1], "vbucket")}
            for vbucket in list(table.delivered):
                table.forget_delivered(vbucket, stored.get(vbucket, 0))
        table.take(reading.lines)
        if reading.stopped:
            verdict.faults["stopped"] = reading.stopped
            break
        if reading.stalled:
            verdict.faults["stalled"] = reading.stalled
            break
    if table.doubled:
        verdict.faults["doubled"] = _some(table.doubled)
    # Of a client that is not at its end nobody can say that it would have lost anything.
    if not verdict.faults.keys() & {"stopped", "stalled"}:
        lost = [key for (number, key), v in truth.items() if table.newest((number, key)) != v]
        if lost:
            verdict.faults["lost"] = _some(lost)
    return verdict


def _of(reading: Reading, kind: str) -> list[dict[str, Any]]:
    return [line for line in reading.lines if line["line"] == kind]


def _some(names: list[str]) -> str:
    return f"{len(names)}, the first of them {names[0]}"
