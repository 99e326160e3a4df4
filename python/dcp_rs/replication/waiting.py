"""Changes that wait for the commit of their table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_rs.replication.table import Table


class Part(NamedTuple):
    """Changes that were read for a table."""

    changes: pa.Table
    bytes: int
    oldest: int | None
    """The oldest time of a CAS, in microseconds since 1970; `None` without one."""


class Waiting:
    """The changes of a table that were read and not committed."""

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0
        # When the first of them was read.
        self.since = 0.0
        # Time of the CAS of the oldest, in microseconds since 1970, until they are committed.
        self.written: int | None = None
        self._parts: list[pa.Table] = []

    def add(self, part: Part, since: float) -> None:
        """Adds changes, of which the first was read at a moment."""
        if not self._parts:
            self.since = since
        self._parts.append(part.changes)
        self.written = earlier(self.written, part.oldest)
        self.rows += len(part.changes)
        self.bytes += part.bytes

    def take(self, schema: pa.Schema) -> pa.Table:
        """Returns the changes as one table, which wait no longer, but are not committed yet."""
        none = pa.Table.from_batches([], schema)
        found = pa.concat_tables([none, *self._parts])
        self._parts, self.rows, self.bytes = [], 0, 0
        return found

    def forget(self) -> None:
        """Forgets the changes, which a stream will bring again: no position counts them."""
        self._parts, self.rows, self.bytes, self.written = [], 0, 0, None


def oldest(changes: pa.RecordBatch | pa.Table) -> tuple[int | None, int | None]:
    """Returns the oldest and the newest time of a CAS, in microseconds since 1970."""
    found = pc.min_max(changes["timestamp"].cast(pa.int64()))
    return found["min"].as_py(), found["max"].as_py()


def earlier(one: int | None, other: int | None) -> int | None:
    """Returns the earlier of two times, of which either may be unknown."""
    return min((each for each in (one, other) if each is not None), default=None)


class Limits(NamedTuple):
    """What makes tables commit.

    Attributes:
        rows: Changes of a table after which it commits.
        bytes: Bytes of the changes that all tables may have waiting.
        seconds: Seconds after its first change after which a table commits.
    """

    rows: int
    bytes: int
    seconds: float


def due(tables: Sequence[Table], limits: Limits, now: float) -> list[Table]:
    """Returns the tables that are to commit now.

    A commit costs a table the same however few changes it has. So those that have most make room
    for the others.
    """
    chosen: list[Table] = []
    others: list[Table] = []
    for table in tables:
        waiting = table.waiting
        if waiting.rows:
            is_due = waiting.rows >= limits.rows or now - waiting.since >= limits.seconds
            (chosen if is_due else others).append(table)
    others.sort(key=lambda table: -table.waiting.bytes)
    left = sum(table.waiting.bytes for table in others)
    for table in others:
        if left <= limits.bytes:
            break
        chosen.append(table)
        left -= table.waiting.bytes
    return chosen
