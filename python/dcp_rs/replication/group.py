"""Tables that take their changes from one stream."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from dcp_rs.batch import by_collection
from dcp_rs.replication.reader import Reader, of_documents
from dcp_rs.replication.waiting import Part

if TYPE_CHECKING:
    import threading

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.reader import Batch, Read
    from dcp_rs.replication.table import Table
    from dcp_rs.stream import ChangeStream


_numbers = itertools.count()


class Buffer:
    """Changes that were read but not committed.

    Args:
        rows: Rows after which to commit.
        size: Bytes after which to commit.
        interval: Seconds after the first change after which to commit.
        splits: Whether to split what was read by collection.
    """

    def __init__(self, rows: int, size: int, interval: float, *, splits: bool) -> None:
        self.checkpoint: Checkpoint | None = None
        self.rows = 0
        self._splits = splits
        self._read: list[Batch] = []
        self._bytes = 0
        self._since = 0.0
        self.limit(rows, size, interval)

    def limit(self, rows: int, size: int, interval: float) -> None:
        """Changes when to commit."""
        self._limits = rows, size, interval

    def add(self, batch: Batch, checkpoint: Checkpoint) -> None:
        """Adds a batch that was read, and where the stream stands after it."""
        if not self._read:
            self._since = time.monotonic()
        self._read.append(batch)
        self.rows += batch.changes.num_rows
        self._bytes += batch.changes.nbytes
        self.checkpoint = checkpoint

    @property
    def since(self) -> float:
        """When the first change was added."""
        return self._since

    @property
    def written(self) -> int | None:
        """Time of the CAS of the oldest change, in microseconds since 1970; `None` without one."""
        found = (batch.oldest for batch in self._read)
        return min((each for each in found if each is not None), default=None)

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
        if not self._read:
            return interval
        return self._since + interval - time.monotonic()

    def take(self, schema: pa.Schema) -> tuple[dict[int | None, Part], Checkpoint] | None:
        """Returns the changes by collection and the position after them, and forgets them.

        What concerns a vBucket or a scope is under `None`, as is everything if it is not split.
        `None` if not even a position was read.
        """
        read, size, written, checkpoint = self._read, self._bytes, self.written, self.checkpoint
        self._read, self.checkpoint = [], None
        self.rows = self._bytes = 0
        if checkpoint is None:
            return None
        parts: dict[int | None, Part] = {}
        if self._splits:
            split = by_collection(batch.whole for batch in read)
            for number, (rows, nbytes, oldest) in split.items():
                some = rows if number is not None else [of_documents(each) for each in rows]
                parts[number] = Part(pa.Table.from_batches(some, schema), nbytes, oldest)
            parts.setdefault(None, Part(schema.empty_table(), 0, None))
        else:
            changes = pa.Table.from_batches([batch.changes for batch in read], schema)
            parts[None] = Part(changes, size, written)
        return parts, checkpoint


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

    def read(self, stream: ChangeStream, news: threading.Event) -> None:
        """Begins to read a stream."""
        self.stream, self._reader = stream, Reader(stream, news)
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
