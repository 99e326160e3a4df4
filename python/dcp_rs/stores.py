"""Where checkpoints are kept."""

from __future__ import annotations

import os
import threading
from typing import Protocol, runtime_checkable

from dcp_rs import _checks
from dcp_rs.checkpoint import Checkpoint


@runtime_checkable
class CheckpointStore(Protocol):
    """Keeps one checkpoint. Write your own by giving a class these two methods.

    `dcp_rs.Client.stream` takes a store as `start`, and goes on from what it has.
    What reads the stream saves, once it has done with a batch: with what it made of the batch in
    one transaction, or afterwards, never before.

        >>> class TableStore:
        ...     def __init__(self, database):
        ...         self.database = database
        ...
        ...     def load(self):
        ...         found = self.database.execute("SELECT document FROM position").fetchone()
        ...         return None if found is None else dcp_rs.Checkpoint.from_json(found[0])
        ...
        ...     def save(self, checkpoint):
        ...         document = checkpoint.to_json()
        ...         self.database.execute(
        ...             "INSERT OR REPLACE INTO position VALUES (1, ?)", [document]
        ...         )
        >>> import dcp_rs, sqlite3
        >>> database = sqlite3.connect(":memory:")
        >>> _ = database.execute("CREATE TABLE position (id INTEGER PRIMARY KEY, document TEXT)")
        >>> store = TableStore(database)
        >>> with dcp_rs.testing.EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     for key in ("a", "b"):
        ...         _ = cluster.upsert(key, b"1")
        ...         for batch in client.stream(start=store, until="now"):
        ...             with database:  # one transaction
        ...                 print([row["key"] for row in batch.rows()])
        ...                 store.save(batch.checkpoint)
        ['a']
        ['b']

    A store may be called from any thread, one call at a time.
    """

    def load(self) -> Checkpoint | None:
        """Gives the checkpoint that was saved last; `None` if none ever was.

        A checkpoint that is damaged must raise, never be taken for none: the reader would begin
        anew, or pass over changes.
        """

    def save(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint in place of the one before it, durably, whole or not at all."""


class FileStore:
    """Keeps a checkpoint in a file that only its owner may read.

    The file is written next to its place, synced and renamed into it: after a crash there is the
    old checkpoint or the new one. It carries a version and a checksum, the bucket's UUID and a hash
    of the filter, which are checked when a stream goes on from it.

    It never goes back: of two readers that share a file, the slower gets an error, and what the
    faster has saved stays. A rollback is no step back. A save locks the file `<path>.lock`, which
    stays there. To read again on purpose, remove the file, or write it with `Checkpoint.save`.

        >>> import dcp_rs, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dcp_rs.FileStore(f"{folder}/positions.json").load() is None
        True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        _checks.path("path", path)
        self._path = os.fspath(path)

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    def load(self) -> Checkpoint | None:
        """Reads the file; `None` if there is none.

        Raises:
            CheckpointError: It cannot be read, or is damaged.
        """
        if not os.path.lexists(self._path):
            return None
        return Checkpoint.load(self._path)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the file.

        Raises:
            CheckpointError: It cannot be written, or another reader has saved a checkpoint that is
                further; what was there still is.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        checkpoint._store(self._path)  # noqa: SLF001 - the package's own

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


class MemoryStore:
    """Keeps a checkpoint for as long as the process lives: for tests, and for what starts anew.

    >>> import dcp_rs
    >>> dcp_rs.MemoryStore().load() is None
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checkpoint: Checkpoint | None = None

    def load(self) -> Checkpoint | None:
        """Gives the checkpoint that was saved last; `None` if none ever was."""
        with self._lock:
            return self._checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint.

        Raises:
            CheckpointError: Another reader has saved one that is further, which is kept.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        with self._lock:
            if self._checkpoint is not None:
                checkpoint._check_ahead(self._checkpoint)  # noqa: SLF001 - the package's own
            self._checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"<dcp_rs.MemoryStore {self.load() or 'empty'}>"
