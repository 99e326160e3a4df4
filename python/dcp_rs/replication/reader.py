"""A stream that is read by a separate thread, so that reading and writing overlap."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.compute as pc

from dcp_rs.replication.waiting import oldest

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.batch import ChangeBatch
    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.stream import ChangeStream

# Batches read ahead, each of up to the stream's `max_bytes`.
_AHEAD = 4


class Batch(NamedTuple):
    """A batch that was read."""

    whole: ChangeBatch
    changes: pa.RecordBatch
    """Its rows that concern documents or collections."""
    oldest: int | None
    """Time of the CAS of its oldest change, in microseconds since 1970; `None` without one."""
    newest: int | None
    """That of its newest change."""


class Read(NamedTuple):
    """What was read: a batch, or no more."""

    batch: Batch | None
    checkpoint: Checkpoint
    """Where the stream stands after it."""


class Reader:
    """Reads a stream ahead, by a few batches.

    Args:
        stream: The stream.
        news: Event that is set when there is something to take.
    """

    def __init__(self, stream: ChangeStream, news: threading.Event) -> None:
        self._stream = stream
        self._news = news
        self._queue: queue.Queue[Read | Exception] = queue.Queue(_AHEAD)
        # Changes, each counted by one thread only.
        self._put = self._taken = 0
        self._thread = threading.Thread(target=self._run, name="dcp_rs-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in self._stream:
                changes = of_documents(batch.to_pyarrow())
                self._put += changes.num_rows
                self._add(Read(Batch(batch, changes, *oldest(changes)), batch.checkpoint))
            self._add(Read(None, self._stream.checkpoint()))
        except Exception as error:  # noqa: BLE001 - raised again where it is taken
            self._add(error)

    def _add(self, found: Read | Exception) -> None:
        self._queue.put(found)
        self._news.set()

    def take(self) -> Read | None:
        """Takes what was read next; `None` if nothing was.

        Raises:
            DcpError: The stream failed. What was read before has been taken.
        """
        try:
            found = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        if found.batch is not None:
            self._taken += found.batch.changes.num_rows
        return found

    @property
    def waiting(self) -> int:
        """Changes that were read and not taken."""
        return self._put - self._taken

    def close(self) -> None:
        """Closes the stream. What was not taken is dropped."""
        self._stream.close()
        while self._thread.is_alive():
            self._make_room()
        self._taken = self._put

    def _make_room(self) -> None:
        """Makes room for a waiting thread."""
        try:
            self._queue.get(timeout=0.01)
        except queue.Empty:
            self._thread.join(0.01)


def of_documents(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Leaves out rows about the stream itself, which concern no documents or collections."""
    others = pc.equal(changes["op"], "caught_up")
    return changes.filter(pc.invert(others)) if pc.any(others).as_py() else changes
