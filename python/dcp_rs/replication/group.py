"""Tables that take their changes from one stream."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from dcp_rs.replication.reader import Reader

if TYPE_CHECKING:
    import threading

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.reader import Read
    from dcp_rs.replication.table import Table
    from dcp_rs.stream import ChangeStream


_numbers = itertools.count()


class Buffer:
    """Changes that were read but not committed.

    Args:
        rows: Rows after which to commit.
        size: Bytes after which to commit.
        interval: Seconds after the first change after which to commit.
    """

    def __init__(self, rows: int, size: int, interval: float) -> None:
        self.checkpoint: Checkpoint | None = None
        self.rows = 0
        self._parts: dict[int | None, list[pa.RecordBatch]] = {}
        self._bytes = 0
        self._since = 0.0
        self._written: list[int] = []
        self.limit(rows, size, interval)

    def limit(self, rows: int, size: int, interval: float) -> None:
        """Changes when to commit."""
        self._limits = rows, size, interval

    def add(self, batch: pa.RecordBatch, read: Read) -> None:
        """Adds a batch that was read."""
        if not self._parts:
            self._since = time.monotonic()
        for number, part in read.parts.items():
            self._parts.setdefault(number, []).append(part)
        if read.oldest is not None:
            self._written.append(read.oldest)
        self.rows += batch.num_rows
        self._bytes += batch.nbytes
        self.checkpoint = read.checkpoint

    @property
    def since(self) -> float:
        """When the first change was added."""
        return self._since

    @property
    def written(self) -> int | None:
        """Time of the CAS of the oldest change, in microseconds since 1970; `None` without one."""
        return min(self._written, default=None)

    def is_full(self) -> bool:
        """Whether there are so many changes that they are to be committed now."""
        rows, size, _ = self._limits
        return self.rows >= rows or self._bytes >= size

    def is_due(self) -> bool:
        """Whether to commit now."""
        return self.is_full() or self.seconds_left() <= 0

    def seconds_left(self) -> float:
        """Returns the seconds until the next commit."""
        interval = self._limits[2]
        if not self._parts:
            return interval
        return self._since + interval - time.monotonic()

    def take(self, schema: pa.Schema) -> tuple[dict[int | None, pa.Table], Checkpoint] | None:
        """Returns the changes by collection and the position after them, and forgets them.

        `None` if not even a position was read.
        """
        parts, checkpoint = self._parts, self.checkpoint
        self._parts, self._written, self.checkpoint = {}, [], None
        self.rows = self._bytes = 0
        if checkpoint is None:
            return None
        changes = {number: pa.Table.from_batches(some, schema) for number, some in parts.items()}
        # Of the vBuckets, or of everything if the changes are not split.
        changes.setdefault(None, pa.Table.from_batches([], schema))
        return changes, checkpoint


class Group:
    """A stream, and the tables that take its changes.

    Args:
        tables: The tables, by the name of their collection; by `None` a single table.
        collections: Which collections the stream reads.
        buffer: Where changes wait to be committed.
    """

    def __init__(
        self, tables: dict[str | None, Table], collections: list[str] | None, buffer: Buffer
    ) -> None:
        self.number = next(_numbers)
        self.tables = tables
        self.collections = collections
        self.buffer = buffer
        # Those of the collections that existed when the stream was opened.
        self.reads = collections
        # Whether it reads up to what the bucket has now, and then ends.
        self.until_now = True
        self.phase: Literal["opening", "reading", "idle", "complete"] = "opening"
        # When the oldest change was read that waits for the commit of its table.
        self.waits_since: float | None = None
        # Position up to which the stream's changes were taken from the buffer.
        self.position: Checkpoint | None = None
        self.stream: ChangeStream | None = None
        self._reader: Reader | None = None

    def read(self, stream: ChangeStream, news: threading.Event, *, splits: bool) -> None:
        """Begins to read a stream, and splits what it brings by collection if need be."""
        self.stream, self._reader = stream, Reader(stream, news, splits=splits)
        self.phase = "reading"

    def take(self) -> Read | None:
        """Takes what was read next; `None` if nothing was.

        Raises:
            DcpError: The stream failed. What was read before has been taken.
        """
        return None if self._reader is None else self._reader.take()

    @property
    def has_uncommitted(self) -> bool:
        """Whether changes were taken and not committed."""
        return self.buffer.rows > 0 or self.waits_since is not None

    @property
    def uncommitted(self) -> int:
        """Changes that were read and not committed."""
        waiting = sum(table.waiting.rows for table in self.tables.values())
        return self.buffer.rows + waiting + (0 if self._reader is None else self._reader.waiting)

    def note_waiting(self) -> None:
        """Notes how long changes have waited for the commit of their table."""
        found = [each.waiting.since for each in self.tables.values() if each.waiting.rows]
        self.waits_since = min(found, default=None)

    def close(self) -> None:
        """Closes the stream. What was not taken is dropped."""
        if self._reader is not None:
            self._reader.close()
        self.stream = self._reader = self.position = None
        self.phase = "opening"
