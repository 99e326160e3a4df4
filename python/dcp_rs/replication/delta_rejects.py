"""The rejects of a Delta table, in a table of their own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.replication import rejects
from dcp_rs.replication.delta_table import RANDOM_BITS, DeltaTable
from dcp_rs.replication.storage import Objects
from dcp_rs.replication.target import IDENTITY, overtaken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dcp_rs.replication.state import State
    from dcp_rs.replication.storage import Storage
    from dcp_rs.replication.target import Commit

_APPLICATION = "dcp_rs.replication.rejects"
_SAME = " AND ".join(f"t.{name} = s.{name}" for name in IDENTITY)


class DeltaRejects:
    """A Delta table for changes that cannot be rows, made when there is one.

    Each commit to it comes before that of the rows, with a transaction of the same number.

    Args:
        place: Folder or location of the table of rows.
        is_log: Whether rejects are only appended.
    """

    def __init__(self, place: Path | Storage, *, is_log: bool) -> None:
        self._is_log = is_log
        if isinstance(place, Path):
            self._table = DeltaTable(f"{place}{rejects.SUFFIX}", _APPLICATION, is_log=is_log)
        else:
            beside = place.beside(rejects.SUFFIX)
            self._table = DeltaTable(
                beside.url, _APPLICATION, beside.options, is_log=is_log, objects=Objects(beside)
            )
        # Version of the last transaction, without which another process has written: in object
        # storage, where nothing is locked.
        self._last: int | None = None
        self._is_there = False
        # Identities of its rows, if they are known.
        self._identities: pa.Table | None = None
        self._read_at = 0

    def open(self) -> None:
        """Looks for the table.

        Raises:
            ConfigError: Another table or file has its name.
        """
        folder = self._table.folder
        if folder is None:
            self._open_objects()
            return
        is_folder = folder.is_dir()
        self._is_there = is_folder and self._table.find()
        if self._is_there:
            is_taken = self._table.owner != _APPLICATION
        elif is_folder:
            # A log without a version is left by a process that was killed as it made the table.
            is_taken = any(each.name[0] not in "._" for each in folder.iterdir())
        else:
            is_taken = os.path.lexists(folder)
        if is_taken:
            raise rejects.name_taken(str(folder))
        if self._is_there:
            self._table.check(rejects.SCHEMA)

    def _open_objects(self) -> None:
        self._is_there = self._table.find()
        if self._is_there:
            is_taken = self._table.owner != _APPLICATION
        else:
            folders, files = self._objects.folders_and_files()
            names = [*folders, *(each.name for each in files)]
            is_taken = any(each[0] not in "._" for each in names)
        if is_taken:
            raise rejects.name_taken(self._table.location)
        if self._is_there:
            self._table.check(rejects.SCHEMA)
            self._last = self._table.version()

    @property
    def _objects(self) -> Objects:
        if self._table.objects is None:
            raise AssertionError("it is in object storage")
        return self._table.objects

    def settle(self, state: State | None) -> None:
        """Removes what was written for a commit that was not made.

        Args:
            state: State of the rows, or `None` before the first commit.
        """
        number = 0 if state is None else state.commits
        if not self._is_there:
            return
        # In object storage, a process that was overtaken may have written with any number, and one
        # that is about to is fenced by this commit.
        is_locked = self._table.objects is None
        if is_locked and (self._table.version() or 0) <= number:
            return
        rows = self._read(rejects.SCHEMA.names)
        kept = rows.slice(0, 0) if state is None else rows.filter(_is_before(rows, state))
        if len(kept) == len(rows):
            self._commit(number, lambda properties: self._table.append(kept[:0], properties))
        else:
            self._commit(number, lambda properties: self._table.overwrite(kept, properties))
        self._table.clean_objects(None)

    def write(self, commit: Commit) -> None:
        """Writes the rejects of a commit, and removes what the commit has settled."""
        if not self._is_there:
            if not len(commit.rejects):
                return
            if self._table.objects is not None and self._table.find():
                raise overtaken(self._table.location)
            self._table.make(rejects.SCHEMA)
            self._is_there = True
        new = commit.rejects
        if self._is_log:
            if len(new):
                self._commit(
                    commit.state.commits, lambda properties: self._table.append(new, properties)
                )
            return
        settled = self._among(commit.settled)
        if len(settled) and len(new):
            settled = settled.join(new.select(IDENTITY), list(IDENTITY), join_type="left anti")
        has_removals = bool(commit.settling) and bool(len(self._known()))
        if len(new) or len(settled) or has_removals:
            self._commit(
                commit.state.commits,
                lambda properties: self._table.merge(
                    new, settled, _SAME, commit.settling, properties
                ),
            )

    def _commit(self, number: int, write: Any) -> None:
        self._identities = None
        if self._table.objects is None:
            self._table.commit(number, write, lambda _: True)
            return
        number = number << RANDOM_BITS | secrets.randbits(RANDOM_BITS)

        def is_due(before: int | None) -> bool:
            if before != self._last:
                raise overtaken(self._table.location)
            return True

        self._table.commit(number, write, is_due)
        self._last = number

    def _known(self) -> pa.Table:
        self._table.find()
        if self._identities is None or self._table.number != self._read_at:
            self._read_at = self._table.number
            self._identities = self._read(IDENTITY)
        return self._identities

    def _read(self, columns: Sequence[str]) -> pa.Table:
        found = self._table.read(columns)
        return pa.table(
            {name: found[name].cast(rejects.SCHEMA.field(name).type) for name in columns}
        )

    def _among(self, settled: pa.Table) -> pa.Table:
        """Returns the identities that rejects have."""
        known = self._known()
        if not len(known) or not len(settled):
            return settled.slice(0, 0)
        return settled.join(known, list(IDENTITY), join_type="left semi")


def _is_before(rows: pa.Table, state: State) -> pa.ChunkedArray:
    """Whether rejects are not newer than a state."""
    positions = state.checkpoint.positions
    last = max([*positions, 0]) + 1
    epochs, seqnos = [-1] * (last + 1), [-1] * (last + 1)
    for vbucket, position in positions.items():
        epochs[vbucket], seqnos[vbucket] = position.epoch, position.seqno
    place = pc.min_element_wise(rows["vbucket"], last).cast(pa.int32()).combine_chunks()
    epoch = pa.array(epochs, pa.int64()).take(place)
    seqno = pa.array(seqnos, pa.int64()).take(place)
    is_read = pc.or_(
        pc.less(rows["epoch"], epoch),
        pc.and_(pc.equal(rows["epoch"], epoch), pc.less_equal(rows["seqno"], seqno)),
    )
    is_older = pc.less(rows["generation"], state.generation)
    return pc.or_(is_older, pc.and_(pc.equal(rows["generation"], state.generation), is_read))
