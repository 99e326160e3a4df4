"""Delta Lake: a table, a log or a history, with an application transaction that names the state."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._logging import about
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication import delta_history
from dcp_rs.replication.delta_states import STATES, DeltaStates, StoredStates
from dcp_rs.replication.delta_table import RANDOM_BITS, DeltaTable
from dcp_rs.replication.folder import FolderOfTables, StoredTables
from dcp_rs.replication.storage import Objects, Storage
from dcp_rs.replication.target import IDENTITY, check_use, overtaken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from dcp_rs.replication.delta_rejects import DeltaRejects
    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.storage import Found
    from dcp_rs.replication.target import Address, Commit, Maintained

_log = logging.getLogger("dcp_rs.replication")
# Tables for which a warning was logged.
_warned: set[str] = set()

APPLICATION = "dcp_rs.replication"
"""Name of the transactions."""
_SAME = " AND ".join(f"t.{name} = s.{name}" for name in IDENTITY)


class DeltaTarget:
    """A Delta table in a folder of a file system, or in object storage.

    Each commit has a transaction of the application `dcp_rs.replication`. Its version names the
    document in the folder `_dcp_rs` of the table that holds the state, and that was written and
    synced before. Rejects are in the table `<folder>_rejected`.

    On a file system, a commit locks the table. In object storage, each start makes a commit without
    rows: it fails those that another process has begun, whose files are then removed.

    Args:
        folder: Folder of the table, or its location in object storage; created if it does not
            exist.

    Raises:
        ConfigError: deltalake takes the folder for another, or the location is wrong.
        ImportError: deltalake is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log", "history"})
    takes_rejects: ClassVar[bool] = True
    compacts: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str] | Storage) -> None:
        self._storage = folder if isinstance(folder, Storage) else None
        if isinstance(folder, Storage):
            objects = Objects(folder)
            self._table = DeltaTable(folder.url, APPLICATION, folder.options, objects=objects)
            self._states: DeltaStates = StoredStates(objects)
        else:
            self._table = DeltaTable(os.fspath(folder), APPLICATION)
            if self._table.folder is None:
                raise ConfigError(
                    "must be a folder: write delta+s3://bucket/path for object storage",
                    option="target",
                )
            self._states = DeltaStates(self._table.folder)
        # Version of the last transaction, and whether this process has made one.
        self._transaction: int | None = None
        self._has_claimed = False
        self._rejects: DeltaRejects | None = None
        # Whether the rows are not what the state says, and the next commit replaces them.
        self._is_moved = False

    @classmethod
    def at(cls, address: Address) -> DeltaTarget:
        """Creates the target for `delta:///folder` or `delta+s3://bucket/path`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        if address.storage:
            return cls(Storage.of(address))
        address.allow()
        return cls(address.local_path("the table's folder", "delta:///folder"))

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        from dcp_rs.replication.delta_rejects import DeltaRejects

        self._table.is_log = mode == "log"
        if self._storage is not None:
            prepare(self._storage)
        self._rejects = DeltaRejects(self._place, is_log=mode == "log")
        self._rejects.open()
        if not self._table.find():
            self._check_place()
            self._table.make(schema)
        transaction = self._table.version()
        self._table.check(schema)
        self._table.refused(schema.empty_table())
        state = None if not _number(transaction) else self._load(transaction or 0)
        if state is None and not self._table.is_empty:
            raise ConfigError(
                f"table {self._table.location} has rows that dcp_rs did not write: use another",
                option="target",
            )
        check_use(state, schema, mode)
        self._table.widen(schema)
        self._transaction = transaction
        if self._storage is not None:
            self._claim(state)
        self._table.clean()
        self._rejects.settle(state)
        if state is None or transaction is None:
            return None
        self._is_moved = bool(state.moved)
        # Numbers of commits go on from the newest, even if the state is that of an older one.
        return replace(state, commits=transaction >> RANDOM_BITS)

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        if self._storage is not None:
            self._storage.probe()
        transaction = self._table.version() if self._table.find() else None
        if transaction is None or not _number(transaction):
            return None
        return self._states.read(transaction) or self._states.newest()

    def widens(self, _old: pa.DataType, _new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return False

    @property
    def _place(self) -> Path | Storage:
        place = self._storage or self._table.folder
        if place is None:
            raise AssertionError("it is in a folder or in object storage")
        return place

    def _check_place(self) -> None:
        """Checks that a table can be made in the folder without harm to files of others."""
        if self._storage is not None:
            _check_objects(self._storage)
            return
        folder = self._table.folder
        if folder is None:
            raise AssertionError("it is a folder")
        if any((each / "_delta_log").exists() for each in folder.parents):
            raise ConfigError(
                f"folder {self._table.location} is inside another Delta table, whose VACUUM would "
                "remove its files: use another",
                option="target",
            )
        if folder.is_dir() and any(each.name[0] not in "._" for each in folder.iterdir()):
            raise ConfigError(
                f"folder {self._table.location} has files that dcp_rs did not write, which VACUUM "
                "would remove: use another",
                option="target",
            )

    # ----- the state -----

    def _load(self, transaction: int) -> State:
        """Returns the state that belongs to the rows, or one that tells that there is none."""
        state, moved = self._states.read(transaction), self._moved(transaction)
        if state is None:
            newest = self._states.newest()
            if newest is None:
                raise CheckpointError(
                    "the table's last commit names a state that is no longer in"
                    f" {self._table.location}/_dcp_rs: restore that folder, or"
                    " replicate to another table"
                )
            moved = moved or "its log is of another time than its states"
            return replace(newest, moved=moved)
        if not moved:
            return state
        if self._table.is_log and not self._table.has_files:
            raise ConfigError(
                f"table {self._table.location} names files that are gone: run FSCK REPAIR TABLE, "
                "or restore a version whose files are there",
                option="target",
            )
        return self._restored(transaction) or replace(state, moved=moved)

    def _moved(self, transaction: int) -> str:
        """Says what others did to the rows since a transaction."""
        found = self._table.since(transaction)
        if found.change is not None:
            return str(found.change)
        expected = None if found.is_complete else self._states.rows(transaction)
        if expected is not None and self._table.rows != expected:
            return f"it has {self._table.rows} rows instead of {expected}"
        return ""

    def _restored(self, transaction: int) -> State | None:
        """Returns the state of the version that another writer has restored, if it is known."""
        change = self._table.since(transaction).change
        if change is None or change.restored is None:
            return None
        old = self._table.at(change.restored)
        if old is None or old.files != self._table.files or not old.has_files:
            return None
        before = old.version()
        if before is None:
            return None
        found = old.since(before)
        return self._states.read(before) if found.is_complete and found.change is None else None

    # ----- committing -----

    def _claim(self, state: State | None) -> None:
        """Fails the commits that other processes have begun, and removes files that none names."""
        before, since = self._transaction, self._table.last
        self._has_claimed = state is None or not state.moved
        if state is not None and state.moved:
            return  # After a commit of ours, the next start would not see what others did.
        if before is not None and self._states.since(before) is not None:
            since = self._states.since(before)
        number = _number(before) << RANDOM_BITS | secrets.randbits(RANDOM_BITS)

        def is_due(found: int | None) -> bool:
            if found != before:
                raise overtaken(self._table.location)
            return True

        if state is not None:
            self._states.write(number, state)
        self._table.commit(number, self._table.append_nothing, is_due)
        self._transaction = number
        if state is not None:
            self._states.keep(number, rows=self._table.rows, since=since)
        self._table.clean_objects(None if state is None else since)

    def commit(self, commit: Commit) -> Commit | None:
        """See `dcp_rs.replication.Target.commit`."""
        if self._rejects is None:
            raise AssertionError("it is opened before")
        rejects, given = self._rejects, commit
        # On a conflict, the rows are written again, not the rejects.
        applied: list[Commit] = []

        def is_due(before: int | None) -> bool:
            if (before or 0) >> RANDOM_BITS != commit.state.commits - 1:
                raise overtaken(self._table.location)
            # Nothing is locked there: a process that has started since has made a commit.
            if self._storage is not None and before != self._transaction:
                raise overtaken(self._table.location)
            return True

        def write(properties: Any) -> None:
            if not applied:
                ready = self._rejecting(given)
                rejects.write(ready)
                applied.append(ready)
            self._write(applied[0], properties)

        # Version of the transaction.
        number = commit.state.commits << RANDOM_BITS | secrets.randbits(RANDOM_BITS)
        self._states.write(number, commit.state)
        try:
            self._table.commit(number, write, is_due, self._has_moved)
        except BaseException:
            if self._table.lacks(number):
                self._states.remove(number)
            raise
        self._is_moved = False
        self._transaction = number
        if self._storage is not None and not self._has_claimed:
            self._has_claimed = True
            self._table.clean_objects(None)
        self._states.keep(number, rows=self._table.rows)
        return applied[0] if applied[0] is not given else None

    def _rejecting(self, commit: Commit) -> Commit:
        """Returns a commit without the rows that constraints of the table refuse."""
        reasons = self._table.refused(commit.rows)
        if commit.state.mode == "log":
            for index, reason in reasons.items():
                op = commit.rows["op"][index].as_py()
                if op != "mutation":
                    raise ConfigError(
                        f"a log without a {op} would be wrong, and {reason}: drop it",
                        option="target",
                    )
        # It needs PyArrow, which a target is created without.
        from dcp_rs.replication.rejects import rejecting

        return rejecting(commit, reasons)

    def _has_moved(self, why: str) -> ConcurrentWriterError:
        return ConcurrentWriterError(
            f"table {self._table.location} is not as it was left, since {why}: start again, and it"
            " is loaded anew"
        )

    def newest(self, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
        """See `dcp_rs.replication.HistoryTarget.newest`."""
        return delta_history.newest(self._table, identities, lost)

    def _write(self, commit: Commit, properties: Any) -> None:
        if commit.endings is not None and delta_history.has_changes(commit):
            delta_history.merge(self._table, commit, commit.endings, properties)
            return
        if self._is_moved and commit.state.mode == "table":
            # Rows that others added may double ours, and a merge would keep both.
            self._table.overwrite(commit.rows, properties)
            return
        has_no_rows = not (len(commit.rows) or len(commit.deletes))
        is_append = commit.has_new_rows_only or self._table.is_empty or has_no_rows
        if is_append and not commit.removals:
            # If there is only a position, a merge would read the table's files for nothing.
            self._table.append(commit.rows, properties)
            return
        self._table.merge(commit.rows, commit.deletes, _SAME, commit.removals, properties)

    def maintain(self, keep: float | None) -> Maintained | None:
        """See `dcp_rs.replication.MaintainedTarget`."""
        if self._transaction is None or self._is_moved:
            return None
        return self._table.maintain(self._transaction, keep)

    def close(self) -> None:
        """Does nothing: no connection is kept."""

    def __repr__(self) -> str:
        return f"DeltaTarget({self._table.location!r})"


def _number(transaction: int | None) -> int:
    """Returns the number of a transaction's commit; 0 before the first with rows."""
    return (transaction or 0) >> RANDOM_BITS


def prepare(storage: Storage) -> None:
    """Checks that storage answers and keeps two writers apart, and says which others it does not.

    Raises:
        ConfigError: It does not.
    """
    storage.probe()
    if storage.url.startswith("s3:") and storage.url not in _warned:
        _warned.add(storage.url)
        _log.warning(
            "%s: writers of S3 that make no conditional puts, such as Spark without a commit"
            " coordinator, can overwrite a commit: let none of them write to this table",
            storage.url,
            extra=about("writers_not_fenced", location=storage.url),
        )


def _check_objects(storage: Storage) -> None:
    """Checks that a table can be made at a location without harm to files of others."""
    for each in storage.parents:
        folders, _ = Objects(each).folders_and_files()
        if "_delta_log" in folders:
            raise ConfigError(
                f"{storage.url} is inside another Delta table, whose VACUUM would remove its"
                " files: use another path",
                option="target",
            )
    objects = Objects(storage)
    folders, files = objects.folders_and_files()
    if any(each[0] not in "._" for each in [*folders, *(each.name for each in files)]):
        raise ConfigError(
            f"{storage.url} has files that dcp_rs did not write, which VACUUM would remove: use"
            " another path",
            option="target",
        )
    objects.check_conditional()


class DeltaDatabase(FolderOfTables[DeltaTarget]):
    """A folder with a Delta table for each of several collections."""

    modes = DeltaTarget.modes
    compacts = DeltaTarget.compacts
    scheme = "delta"
    marker = STATES

    def state_in(self, folder: Path) -> State | None:
        """See `FolderOfTables`."""
        return DeltaStates(folder).newest_readable()

    def make(self, folder: Path) -> DeltaTarget:
        """See `FolderOfTables`."""
        return DeltaTarget(folder)

    @classmethod
    def at(cls, address: Address) -> FolderOfTables[DeltaTarget]:
        """Creates the database for `delta:///folder` or `delta+s3://bucket/path`."""
        return StoredDelta(Storage.of(address)) if address.storage else super().at(address)


class StoredDelta(StoredTables[DeltaTarget]):
    """A Delta table in object storage for each of several collections."""

    modes = DeltaTarget.modes
    compacts = DeltaTarget.compacts
    scheme = "delta"
    marker = STATES

    def is_table(self, folders: list[str], _files: list[Found]) -> bool:
        """See `StoredTables`."""
        return STATES in folders

    def state_at(self, storage: Storage) -> State | None:
        """See `StoredTables`."""
        return StoredStates(Objects(storage)).newest_readable()

    def make(self, folder: Path) -> DeltaTarget:
        """See `FolderOfTables`."""
        return DeltaTarget(self._storage.below(str(folder)))
