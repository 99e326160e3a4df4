"""A log of Parquet files, each a commit with its state in the footer, wherever they are."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.state import State
from dcp_rs.replication.target import NO_HISTORY, missing_columns, type_name

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from dcp_rs.replication.parquet_folder import Footer, Listing
    from dcp_rs.replication.state import Mode

# What the footer of a file has, and that of a file of rejects.
STATE = "dcp_rs.state"
TIE = "dcp_rs.files"
REJECTS = "dcp_rs.rejects"


class Files(Protocol):
    """Files that are named by the numbers of commits."""

    def file(self, number: int) -> Path:
        """Returns the path of a file."""

    def listing(self) -> Listing:
        """Lists the files."""

    def read_footer(self, number: int) -> Footer:
        """Reads the footer of a file."""


@dataclass(frozen=True)
class Tie:
    """Ties a file to those before it, so that the next start notices what became of them.

    Attributes:
        first: Number of the first file that counts. Those before it belong to older generations,
            or to a release that tied none.
        bytes_before: Bytes of the files from `first` on that are before this one.
        rows: Rows of this file.
    """

    first: int
    bytes_before: int = 0
    rows: int = 0

    @classmethod
    def of(cls, footer: Footer) -> Tie | None:
        """Reads it from a footer, if that has one."""
        found = footer.notes.get(TIE.encode())
        return None if found is None else cls(**json.loads(found))


class ParquetLog:
    """What files of a log say, which a target appends to.

    Args:
        place: Name of the place of the files, for errors.
        log: The files.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"log"})
    why_not: ClassVar[dict[Mode, str]] = NO_HISTORY
    takes_rejects: ClassVar[bool] = True

    def __init__(self, place: str, log: Files) -> None:
        self._place = place
        self._log_files = log
        self._commits = 0
        self._next = Tie(1)
        self._lost: list[pa.Field] = []

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        sizes = self._log_files.listing().sizes
        stored = (
            self._footer(self._log_files, max(sizes)).notes.get(STATE.encode()) if sizes else None
        )
        return None if stored is None else State.from_json(stored.decode())

    def widens(self, _old: pa.DataType, _new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return False

    def _footer(self, files: Files, number: int) -> Footer:
        import pyarrow as pa

        try:
            return files.read_footer(number)
        except pa.ArrowInvalid as error:
            raise CheckpointError(
                f"{files.file(number)} is damaged: restore it, or remove it, and the next start"
                " goes on from the file before it"
            ) from error

    def _load(self, sizes: dict[int, int], schema: pa.Schema) -> State:
        newest = max(sizes)
        footer = self._footer(self._log_files, newest)
        stored = footer.notes.get(STATE.encode())
        if stored is None:
            raise ConfigError(
                f"{self._place} has files that dcp_rs did not write, such as"
                f" {self._log_files.file(newest).name}: use another",
                option="target",
            )
        have = {field.name: type_name(field.type) for field in footer.schema}
        want = {field.name: type_name(field.type) for field in schema}
        self._check_case(have, missing_columns(have, want, self._place))
        # As null, so that the newest file has every column with its type.
        self._lost = [field for field in footer.schema if field.name not in want]
        state = State.from_json(stored.decode())
        tie = Tie.of(footer)
        moved = self._why_moved(sizes, state, footer, tie)
        if moved or tie is None:
            self._next = Tie(newest + 1)
        else:
            self._next = replace(tie, bytes_before=tie.bytes_before + sizes[newest])
        return replace(state, commits=newest, moved=moved)

    def _check_case(self, have: dict[str, str], added: dict[str, str]) -> None:
        lowered = {name.lower(): name for name in have}
        for name in added:
            if name.lower() in lowered:
                raise ConfigError(
                    f'the column "{name}" differs only in case from'
                    f' "{lowered[name.lower()]}" of {self._place}, which many readers do'
                    " not tell apart: call it otherwise",
                    option="document_schema",
                )

    def _why_moved(
        self, sizes: dict[int, int], state: State, footer: Footer, tie: Tie | None
    ) -> str:
        """Returns what others have done to the files; empty if nothing that matters."""
        import pyarrow as pa

        newest = max(sizes)
        if state.commits != newest:
            return f"{self._log_files.file(newest).name} is a copy of another file"
        if tie is None:
            return ""
        if tie.rows != footer.rows:
            return f"{self._log_files.file(newest).name} no longer has the rows that were written"
        oldest = min(number for number in sizes if number >= tie.first)
        if any(number not in sizes for number in range(oldest, newest)):
            return "files between the oldest and the newest were removed"
        before: int | None = 0
        if oldest > tie.first:
            # The oldest files may be removed.
            try:
                own = Tie.of(self._log_files.read_footer(oldest))
            except pa.ArrowInvalid:
                own = None
            before = None if own is None or own.first != tie.first else own.bytes_before
        there = sum(sizes[number] for number in range(oldest, newest))
        if before is None or there != tie.bytes_before - before:
            return "files were replaced"
        return ""

    def _with_lost(self, rows: pa.Table) -> pa.Table:
        import pyarrow as pa

        for field in self._lost:
            rows = rows.append_column(field.with_nullable(True), pa.nulls(len(rows), field.type))
        return rows
