"""Delta Lake: a table or a log, with an application transaction that names the state."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication.delta_states import STATES, DeltaStates
from dcp_rs.replication.delta_table import DeltaTable
from dcp_rs.replication.folder import FolderOfTables
from dcp_rs.replication.target import IDENTITY, check_use, overtaken

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from dcp_rs.replication.delta_rejects import DeltaRejects
    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.target import Address, Commit

APPLICATION = "dcp_rs.replication"
"""Name of the transactions."""
# The version of a transaction is the number of the commit and this many random bits: an attempt
# that came to nothing leaves a document that no other attempt writes over.
_RANDOM_BITS = 20
_SAME = " AND ".join(f"t.{name} = s.{name}" for name in IDENTITY)


class DeltaTarget:
    """A Delta table in a folder of a file system.

    Each commit has a transaction of the application `dcp_rs.replication`. Its version names the
    document in the folder `_dcp_rs` of the table that holds the state, and that was written and
    synced before. Rejects are in the table `<folder>_rejected`.

    Args:
        folder: Folder of the table; created if it does not exist.

    Raises:
        ConfigError: deltalake takes the folder for another.
        ImportError: deltalake is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})
    takes_rejects: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._table = DeltaTable(os.fspath(folder), APPLICATION)
        if self._table.folder is None:
            raise ConfigError("must be a folder: object stores are not supported", option="target")
        self._folder: Path = self._table.folder
        self._states = DeltaStates(self._folder)
        self._rejects: DeltaRejects | None = None
        # Whether the rows are not what the state says, and the next commit replaces them.
        self._is_moved = False

    @classmethod
    def at(cls, address: Address) -> DeltaTarget:
        """Creates the target for `delta:///folder`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        address.allow()
        return cls(address.local_path("the table's folder", "delta:///folder"))

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        from dcp_rs.replication.delta_rejects import DeltaRejects

        self._table.is_log = mode == "log"
        self._rejects = DeltaRejects(self._folder, is_log=mode == "log")
        self._rejects.open()
        if not self._table.find():
            self._check_place()
            self._table.make(schema)
        transaction = self._table.version()
        self._table.check(schema)
        self._table.refused(schema.empty_table())
        state = None if transaction is None else self._load(transaction)
        check_use(state, schema, mode)
        self._table.widen(schema)
        self._table.clean()
        self._rejects.settle(state)
        if state is None or transaction is None:
            return None
        self._is_moved = bool(state.moved)
        # Numbers of commits go on from the newest, even if the state is that of an older one.
        return replace(state, commits=transaction >> _RANDOM_BITS)

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        transaction = self._table.version() if self._table.find() else None
        if transaction is None:
            return None
        return self._states.read(transaction) or self._states.newest()

    def widens(self, _old: pa.DataType, _new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return False

    def _check_place(self) -> None:
        """Checks that a table can be made in the folder without harm to files of others."""
        if any((each / "_delta_log").exists() for each in self._folder.parents):
            raise ConfigError(
                f"folder {self._folder} is inside another Delta table, whose VACUUM would "
                "remove its files: use another",
                option="target",
            )
        if self._folder.is_dir() and any(
            each.name[0] not in "._" for each in self._folder.iterdir()
        ):
            raise ConfigError(
                f"folder {self._folder} has files that dcp_rs did not write, which VACUUM "
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
                    f"the table's last commit names a state that is no longer in {self._folder}/"
                    "_dcp_rs: restore that folder, or replicate to another table"
                )
            moved = moved or "its log is of another time than its states"
            return replace(newest, moved=moved)
        if not moved:
            return state
        if self._table.is_log and not self._table.has_files:
            raise ConfigError(
                f"table {self._folder} names files that are gone: run FSCK REPAIR TABLE, "
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

    def commit(self, commit: Commit) -> Commit | None:
        """See `dcp_rs.replication.Target.commit`."""
        if self._rejects is None:
            raise AssertionError("it is opened before")
        rejects, given = self._rejects, commit
        # On a conflict, the rows are written again, not the rejects.
        applied: list[Commit] = []

        def is_due(before: int | None) -> bool:
            if (before or 0) >> _RANDOM_BITS != commit.state.commits - 1:
                raise overtaken(str(self._folder))
            return True

        def write(properties: Any) -> None:
            if not applied:
                ready = self._rejecting(given)
                rejects.write(ready)
                applied.append(ready)
            self._write(applied[0], properties)

        # Version of the transaction.
        number = commit.state.commits << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        self._states.write(number, commit.state)
        try:
            self._table.commit(number, write, is_due, self._has_moved)
        except BaseException:
            if self._table.lacks(number):
                self._states.remove(number)
            raise
        self._is_moved = False
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
            f"table {self._folder} is not as it was left, since {why}: start again, and it is "
            "loaded anew"
        )

    def _write(self, commit: Commit, properties: Any) -> None:
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

    def close(self) -> None:
        """Does nothing: no connection is kept."""

    def __repr__(self) -> str:
        return f"DeltaTarget({str(self._folder)!r})"


class DeltaDatabase(FolderOfTables[DeltaTarget]):
    """A folder with a Delta table for each of several collections."""

    modes = DeltaTarget.modes
    scheme = "delta"
    marker = STATES

    def state_in(self, folder: Path) -> State | None:
        """See `FolderOfTables`."""
        return DeltaStates(folder).newest_readable()

    def make(self, folder: Path) -> DeltaTarget:
        """See `FolderOfTables`."""
        return DeltaTarget(folder)
