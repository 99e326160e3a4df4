"""Where checkpoints are kept."""

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


@runtime_checkable
class SharedStore(CheckpointStore, Protocol):
    """A checkpoint store that several readers may share, each with vBuckets of its own.

    All stores of this package are such. A stream that starts from one claims the vBuckets it reads,
    and its checkpoints have those only, so that `save` must keep what a checkpoint does not name.

    The guide says what each store promises when two readers claim the same vBuckets.
    """

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes vBuckets over from whoever had them, and gives what is stored of them.

        From then on every other reader's save of any of them must fail with a
        `dcp_rs.exceptions.TakenOverError`, and write nothing of them. `None` if nothing is stored.
        """


class FileStore:
    """Keeps a checkpoint in a file that only its owner may read.

    The file is written next to its place, synced and renamed into it: after a crash there is the
    old checkpoint or the new one. It carries a version and a checksum, the bucket's UUID and a hash
    of the filter, which are checked when a stream goes on from it.

    Readers on one machine may share it, each with its own vBuckets: a save changes those that the
    checkpoint names. Who starts a stream from the store takes its vBuckets over, or else with the
    first save, and a save of whoever had them before fails. No save takes a vBucket back; a
    rollback is no step back. A save locks the file `<path>.lock`, which stays there and says who
    owns which vBuckets. To read again on purpose, call `reset`.

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
            CheckpointError: It cannot be read, or is damaged.
        """
        if not os.path.lexists(self._path):
            return None
        return Checkpoint.load(self._path)

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes vBuckets over, and gives what is stored of them; `None` if there is no file.

        Raises:
            CheckpointError: The file cannot be read, locked or is damaged.
        """
        wanted = _checks.vbuckets(vbuckets)
        with CheckpointLock(self._path) as lock:
            kept = self.load()
            self._own(lock, owners_from_json(lock.read()), wanted)
        return None if kept is None else kept.restricted_to(wanted)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the positions that the checkpoint has; others stay.

        Raises:
            TakenOverError: Another reader has taken over a vBucket of this store's; what was there
                still is.
            CheckpointError: The file cannot be written, or another reader has saved a checkpoint
                that is further; what was there still is.
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
        """Forgets the positions of vBuckets, which are read from the beginning then.

        Takes them over: a reader that is still running fails with its next save.

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
        # Half of it, after a crash, is read as nobody's, and then nobody saves before a claim.
        lock.write(owners_to_json(owners))
        self._claims.vbuckets.update(vbuckets)

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

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Gives what is stored of vBuckets; `None` if nothing ever was.

        Readers of one `MemoryStore` are in one process and do not fence each other.
        """
        wanted, kept = _checks.vbuckets(vbuckets), self.load()
        return None if kept is None else kept.restricted_to(wanted)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keeps the positions that the checkpoint has; others stay.

        Raises:
            CheckpointError: Another reader has saved one that is further, which is kept.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        with self._lock:
            self._checkpoint = joined(self._checkpoint, checkpoint)

    def __repr__(self) -> str:
        return f"<dcp_rs.MemoryStore {self.load() or 'empty'}>"
