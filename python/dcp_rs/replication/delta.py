"""Delta Lake: a table or a log, with an application transaction that names the state."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs.exceptions import CheckpointError
from dcp_rs.replication.delta_table import DeltaTable
from dcp_rs.replication.state import State
from dcp_rs.replication.target import IDENTITY, check_use, make_folder, overtaken

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_APPLICATION = "dcp_rs.replication"
_STATES = "_dcp_rs"
# A version is the number of the commit and this many random bits: an attempt that came to nothing
# leaves a document that no other attempt writes over.
_RANDOM_BITS = 20


class DeltaTarget:
    """A Delta table in a folder of a file system.

    Each commit has a transaction of the application `dcp_rs.replication`. Its version names the
    document in the folder `_dcp_rs` of the table that holds the state, and that was written and
    synced before.

    Args:
        folder: Folder of the table; created if it does not exist.

    Raises:
        ImportError: deltalake is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._table = DeltaTable(str(self._folder), _APPLICATION)

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
        make_folder(self._folder)
        self._table.make(schema)
        state = self._load()
        check_use(state, schema, mode)
        self._table.widen(schema)
        return state

    def _load(self) -> State | None:
        version = self._table.version()
        if version is None:
            return None
        try:
            return State.from_json((self._folder / _STATES / f"{version}.json").read_text())
        except OSError as error:
            raise CheckpointError(
                f"the state that the table's last commit names cannot be read: {error.strerror}"
            ) from error

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        version = commit.state.commits << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        self._write_state(version, commit.state)

        def is_due(before: int | None) -> bool:
            if (before or 0) >> _RANDOM_BITS != commit.state.commits - 1:
                raise overtaken(str(self._folder))
            return True

        write = partial(self._write, commit)
        before = self._table.commit(version, write, is_due)
        self._forget_states(before, version)

    def _write(self, commit: Commit, properties: Any) -> None:
        is_append = commit.has_new_rows_only or self._table.is_empty
        if is_append and not commit.removals:
            self._table.append(commit.rows, properties)
            return
        same = " AND ".join(f"t.{name} = s.{name}" for name in IDENTITY)
        self._table.merge(commit.rows, commit.deletes, same, commit.removals, properties)

    def _write_state(self, version: int, state: State) -> None:
        folder = self._folder / _STATES
        folder.mkdir(exist_ok=True)
        with (folder / f"{version}.json").open("x") as file:
            file.write(state.to_json())
            file.flush()
            os.fsync(file.fileno())

    def _forget_states(self, before: int | None, version: int) -> None:
        """Removes the state documents that neither this nor the previous commit names."""
        for path in (self._folder / _STATES).glob("*.json"):
            if path.stem not in {str(before), str(version)}:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing: no connection is kept."""

    def __repr__(self) -> str:
        return f"DeltaTarget({str(self._folder)!r})"
