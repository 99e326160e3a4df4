"""Stores that keep checkpoints."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dcp_rs import _checks
from dcp_rs._claims import Claims, joined, owners_from_json, owners_to_json
from dcp_rs._dcp_rs import CheckpointLock
from dcp_rs.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@runtime_checkable
class CheckpointStore(Protocol):
    """Keeps one checkpoint. To write your own store, implement these two methods.

    Pass a store to `dcp_rs.Client.stream` as `start` to resume from its checkpoint. Save each
    batch's checkpoint after you have processed the batch, or in the same transaction as your
    results, never before.

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

    A store may be called from any thread, but only one call runs at a time.
    """

    def load(self) -> Checkpoint | None:
        """Returns the checkpoint saved last, or `None` if none was ever saved.

        If the checkpoint is damaged, raise an error instead of returning `None`: otherwise, the
        reader would start over or skip changes.
        """

    def save(self, checkpoint: Checkpoint) -> None:
        """Replaces the checkpoint, durably and atomically."""


@runtime_checkable
class SharedStore(CheckpointStore, Protocol):
    """A checkpoint store that several readers can share, each with its own vBuckets.

    All stores of this package can be shared. A stream that starts from one claims the vBuckets that
    it reads, and its checkpoints contain only those, so `save` must keep the positions of other
    vBuckets.

    The guide lists what each store guarantees if two readers claim the same vBuckets.
    """

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes over vBuckets from their previous reader, and returns their stored positions.

        From then on, if another reader saves any of them, it must get a
        `dcp_rs.exceptions.TakenOverError`, and none of them may be written. Returns `None` if
        nothing is stored.
        """


class FileStore:
    """Keeps a checkpoint in a file that only its owner can read.

    A save writes a temporary file, syncs it and renames it, so a crash leaves either the old or the
    new checkpoint. The file contains a version, a checksum, the bucket's UUID and the filter, which
    are checked when a stream resumes from it.

    Readers on one machine can share the file, each with its own vBuckets, because a save changes
    only those that the checkpoint names. A stream that starts from the store, or otherwise its
    first save, takes over its vBuckets; after that, saves of their previous reader fail. A save
    never moves a vBucket back, but a rollback does not count as moving back. To read again on
    purpose, call `reset`. The file `<path>.lock` serves as a lock and records the owners of
    vBuckets; it is not removed.

        >>> import dcp_rs, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dcp_rs.FileStore(f"{folder}/positions.json").load() is None
        True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        _checks.path("path", path)
        self._path = os.fspath(path)
        self._claims = Claims()

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    def load(self) -> Checkpoint | None:
        """Reads the file; `None` if there is none.

        Raises:
            CheckpointError: The file cannot be read or is damaged.
        """
        if not os.path.lexists(self._path):
            return None
        return Checkpoint.load(self._path)

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes over vBuckets and returns their stored positions, or `None` if there is no file.

        Raises:
            CheckpointError: The file cannot be read or locked, or is damaged.
        """
        wanted = _checks.vbuckets(vbuckets)
        with CheckpointLock(self._path) as lock:
            kept = self.load()
            self._own(lock, owners_from_json(lock.read()), wanted)
        return None if kept is None else kept.restricted_to(wanted)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the positions in the checkpoint and keeps all others.

        Raises:
            TakenOverError: Another reader has taken over one of the vBuckets; the file is
                unchanged.
            CheckpointError: The file cannot be written, or another reader has saved a later
                position; the file is unchanged.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        with CheckpointLock(self._path) as lock:
            owners = owners_from_json(lock.read())
            self._claims.check(owners, self._path)
            document = joined(self.load(), checkpoint)
            unclaimed = checkpoint.seqnos.keys() - self._claims.vbuckets
            if unclaimed:
                self._own(lock, owners, unclaimed)
            document.save(self._path)

    def reset(self, vbuckets: Iterable[int]) -> None:
        """Removes the positions of vBuckets, which are then read from the beginning.

        It takes over the vBuckets: the next save of a reader that is still running fails.

        Raises:
            CheckpointError: There is no file, or it cannot be read or written.
        """
        forgotten = _checks.vbuckets(vbuckets)
        with CheckpointLock(self._path) as lock:
            kept = Checkpoint.load(self._path)
            self._own(lock, owners_from_json(lock.read()), forgotten)
            kept.restricted_to(kept.seqnos.keys() - set(forgotten)).save(self._path)

    def _own(self, lock: CheckpointLock, owners: dict[int, str], vbuckets: Collection[int]) -> None:
        owners |= dict.fromkeys(vbuckets, self._claims.token)
        # After a crash, a partial document has no owners, so no reader saves before a claim.
        lock.write(owners_to_json(owners))
        self._claims.vbuckets.update(vbuckets)

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


class MemoryStore:
    """Keeps a checkpoint in memory, for tests and for programs that always start over.

    >>> import dcp_rs
    >>> dcp_rs.MemoryStore().load() is None
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checkpoint: Checkpoint | None = None

    def load(self) -> Checkpoint | None:
        """Returns the checkpoint that was saved last; `None` if none ever was."""
        with self._lock:
            return self._checkpoint

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Returns the stored positions of vBuckets, or `None` if nothing was ever saved.

        Readers that share a `MemoryStore` are in one process and are not protected from each other.
        """
        wanted, kept = _checks.vbuckets(vbuckets), self.load()
        return None if kept is None else kept.restricted_to(wanted)

    def save(self, checkpoint: Checkpoint) -> None:
        """Stores the positions in the checkpoint and keeps all others.

        Raises:
            CheckpointError: Another reader has saved a later position, which is kept.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        with self._lock:
            self._checkpoint = joined(self._checkpoint, checkpoint)

    def __repr__(self) -> str:
        return f"<dcp_rs.MemoryStore {self.load() or 'empty'}>"
