"""Parquet: a log in a folder of files, each a commit with its state in the footer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.folder import DEPTH, FolderOfTables
from dcp_rs.replication.parquet_folder import Footer, NumberedFiles
from dcp_rs.replication.rejects import SUFFIX, name_taken
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    make_folder,
    missing_columns,
    overtaken,
    refuse_variants,
    type_name,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_STATE = "dcp_rs.state"
_TIE = "dcp_rs.files"
# What the footer of a file of rejects has.
_REJECTS = "dcp_rs.rejects"
_LOCK = ".dcp_rs.lock"
# The lock of a folder of tables, which stands for those of its tables.
_LOCK_OF_TABLES = ".dcp_rs.tables.lock"


@dataclass(frozen=True)
class _Tie:
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
    def of(cls, footer: Footer) -> _Tie | None:
        found = footer.notes.get(_TIE.encode())
        return None if found is None else cls(**json.loads(found))


class ParquetTarget:
    """A folder of Parquet files, to which a log is appended.

    Each commit is a file, named by its number, whose footer has the state. Its rejects are a file
    of the same name in a folder beside it. The folder is locked while it is open.

    Args:
        folder: The folder; created if it does not exist.
        is_locked: Whether the folder of tables that it is in is locked, so that its own lock is
            held only while it is opened. Each lock needs an open file.

    Raises:
        ImportError: PyArrow is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"log"})
    takes_rejects: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str], *, is_locked: bool = False) -> None:
        require_pyarrow("a Parquet target")
        self._is_locked = is_locked
        self._outer: list[IO[bytes]] = []
        # Another spelling of it, or a link to it, is the same folder.
        self._folder = Path(os.path.realpath(folder))
        self._log = NumberedFiles(self._folder)
        self._rejects = NumberedFiles(Path(f"{self._folder}{SUFFIX}"))
        self._lock: IO[bytes] | None = None
        self._has_made_lock = False
        self._has_rejects = False
        self._commits = 0
        self._next = _Tie(1)
        self._lost: list[pa.Field] = []

    @classmethod
    def at(cls, address: Address) -> ParquetTarget:
        """Creates the target for `parquet:///folder`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        address.allow()
        folder = address.local_path("the folder", "parquet:///folder")
        if not os.path.realpath(folder).strip("/"):
            raise ConfigError(
                "/ is no folder for files: name one, as in parquet:///folder", option="target"
            )
        return cls(folder)

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - a log only
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "PyArrow")
        self._check_names()
        missing = [
            each for each in (self._folder, *self._folder.parents) if not os.path.lexists(each)
        ]
        try:
            make_folder(self._folder)
            self._take_lock()
            state = self._open(schema)
        except BaseException as error:
            self._undo(missing)
            if isinstance(error, OSError):
                raise _unusable(self._folder, error) from error
            raise
        if self._is_locked:
            self.close()
        return state

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        sizes = self._log.listing().sizes
        stored = self._footer(self._log, max(sizes)).notes.get(_STATE.encode()) if sizes else None
        return None if stored is None else State.from_json(stored.decode())

    def widens(self, _old: pa.DataType, _new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return False

    def _check_names(self) -> None:
        """Checks that neither folder has another use."""
        rejects, name = self._rejects, self._folder.name
        if (
            name.endswith(SUFFIX)
            and (self._folder.with_name(name.removesuffix(SUFFIX)) / _LOCK).exists()
        ):
            raise ConfigError(
                f"the folder {self._folder} is where the rejects of"
                f" {name.removesuffix(SUFFIX)} go: use another",
                option="target",
            )
        taken = name_taken(str(rejects.path))
        if not rejects.path.exists():
            return
        if not rejects.path.is_dir() or (rejects.path / _LOCK).exists():
            raise taken
        found = rejects.listing()
        if found.others:
            raise taken
        if found.sizes and _REJECTS.encode() not in self._footer(rejects, max(found.sizes)).notes:
            raise taken

    def _footer(self, files: NumberedFiles, number: int) -> Footer:
        import pyarrow as pa

        try:
            return files.read_footer(number)
        except pa.ArrowInvalid as error:
            raise CheckpointError(
                f"{files.file(number)} is damaged: restore it, or remove it, and the next start"
                " goes on from the file before it"
            ) from error

    def _open(self, schema: pa.Schema) -> State | None:
        found = self._log.listing()
        self._log.remove_unfinished(found.unfinished)
        if found.others:
            raise ConfigError(
                f"folder {self._folder} has files that dcp_rs did not write, such as"
                f" {min(found.others)}: move them, or use another folder",
                option="target",
            )
        state = self._load(found.sizes, schema) if found.sizes else None
        self._commits = 0 if state is None else state.commits
        self._has_rejects = self._rejects.path.exists()
        rejects = self._rejects.listing()
        self._rejects.remove_unfinished(rejects.unfinished)
        # Of a commit that came to nothing, or whose file was removed.
        for number in rejects.sizes:
            if number > self._commits:
                self._rejects.remove(number)
        return state

    def _load(self, sizes: dict[int, int], schema: pa.Schema) -> State:
        newest = max(sizes)
        footer = self._footer(self._log, newest)
        stored = footer.notes.get(_STATE.encode())
        if stored is None:
            raise ConfigError(
                f"folder {self._folder} has files that dcp_rs did not write, such as"
                f" {self._log.file(newest).name}: use another",
                option="target",
            )
        have = {field.name: type_name(field.type) for field in footer.schema}
        want = {field.name: type_name(field.type) for field in schema}
        self._check_case(have, missing_columns(have, want, str(self._folder)))
        # As null, so that the newest file has every column with its type.
        self._lost = [field for field in footer.schema if field.name not in want]
        state = State.from_json(stored.decode())
        tie = _Tie.of(footer)
        moved = self._why_moved(sizes, state, footer, tie)
        if moved or tie is None:
            self._next = _Tie(newest + 1)
        else:
            self._next = replace(tie, bytes_before=tie.bytes_before + sizes[newest])
        return replace(state, commits=newest, moved=moved)

    def _check_case(self, have: dict[str, str], added: dict[str, str]) -> None:
        lowered = {name.lower(): name for name in have}
        for name in added:
            if name.lower() in lowered:
                raise ConfigError(
                    f'the column "{name}" differs only in case from'
                    f' "{lowered[name.lower()]}" of folder {self._folder}, which many readers do'
                    " not tell apart: call it otherwise",
                    option="document_schema",
                )

    def _why_moved(
        self, sizes: dict[int, int], state: State, footer: Footer, tie: _Tie | None
    ) -> str:
        """Returns what others have done to the files; empty if nothing that matters."""
        import pyarrow as pa

        newest = max(sizes)
        if state.commits != newest:
            return f"{self._log.file(newest).name} is a copy of another file"
        if tie is None:
            return ""
        if tie.rows != footer.rows:
            return f"{self._log.file(newest).name} no longer has the rows that were written"
        oldest = min(number for number in sizes if number >= tie.first)
        if any(number not in sizes for number in range(oldest, newest)):
            return "files between the oldest and the newest were removed"
        before: int | None = 0
        if oldest > tie.first:
            # The oldest files may be removed.
            try:
                own = _Tie.of(self._log.read_footer(oldest))
            except pa.ArrowInvalid:
                own = None
            before = None if own is None or own.first != tie.first else own.bytes_before
        there = sum(sizes[number] for number in range(oldest, newest))
        if before is None or there != tie.bytes_before - before:
            return "files were replaced"
        return ""

    def _take_lock(self) -> None:
        if not self._is_locked:
            self._take_outer_locks()
        path = self._folder / _LOCK
        self._has_made_lock = not path.exists()
        self._lock = path.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_it = os.path.samestat(path.stat(), os.fstat(self._lock.fileno()))
        except (BlockingIOError, FileNotFoundError):
            is_it = False
        if not is_it:
            self._has_made_lock = False
            raise overtaken(str(self._folder))

    def _take_outer_locks(self) -> None:
        """Has nobody else write to a folder of tables that it is in."""
        for each in list(self._folder.parents)[:DEPTH]:
            path = each / _LOCK_OF_TABLES
            if path.exists():
                self._outer.append(path.open("ab"))
                try:
                    fcntl.flock(self._outer[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise overtaken(str(self._folder)) from None

    def _undo(self, missing: list[Path]) -> None:
        """Removes the lock and the folders, if this attempt has made them."""
        if self._has_made_lock:
            (self._folder / _LOCK).unlink(missing_ok=True)
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()
        self._has_made_lock = False
        self.close()

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        number = commit.state.commits
        is_next = number == self._commits + 1
        if not is_next or (self._commits and not self._log.file(self._commits).exists()):
            raise overtaken(str(self._folder))
        tie = replace(self._next, rows=len(commit.rows))
        notes = {_STATE: commit.state.to_json(), _TIE: json.dumps(asdict(tie))}
        try:
            if len(commit.rejects):
                self._write_rejects(commit)
            self._log.write(number, self._with_lost(commit.rows), notes)
        except BaseException as error:
            # Otherwise the commit is there, although it is not known to be durable.
            if len(commit.rejects) and not self._log.file(number).exists():
                with contextlib.suppress(OSError):
                    self._rejects.remove(number)
            if isinstance(error, OSError):
                raise _unusable(self._folder, error) from error
            raise
        size = self._log.file(number).stat().st_size
        self._next = replace(tie, bytes_before=tie.bytes_before + size)
        self._commits = number

    def _with_lost(self, rows: pa.Table) -> pa.Table:
        import pyarrow as pa

        for field in self._lost:
            rows = rows.append_column(field.with_nullable(True), pa.nulls(len(rows), field.type))
        return rows

    def _write_rejects(self, commit: Commit) -> None:
        if not self._has_rejects:
            # Somebody may have made it since.
            self._check_names()
            self._rejects.path.mkdir(exist_ok=True)
            self._has_rejects = True
        self._rejects.write(commit.state.commits, commit.rejects, {_REJECTS: self._folder.name})

    def close(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        for each in self._outer:
            each.close()
        self._outer.clear()

    def __repr__(self) -> str:
        return f"ParquetTarget({str(self._folder)!r})"


class ParquetDatabase(FolderOfTables[ParquetTarget]):
    """A folder with a folder of Parquet files for each of several logs."""

    modes = ParquetTarget.modes
    scheme = "parquet"
    marker = _LOCK

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._lock: IO[bytes] | None = None
        self._missing: list[Path] = []

    def state_in(self, folder: Path) -> State | None:
        """See `FolderOfTables`."""
        files = NumberedFiles(folder)
        sizes = files.listing().sizes
        stored = files.read_footer(max(sizes)).notes.get(_STATE.encode()) if sizes else None
        return None if stored is None else State.from_json(stored.decode())

    def make(self, folder: Path) -> ParquetTarget:
        """See `FolderOfTables`."""
        if self._lock is None:
            self._take_lock()
        return ParquetTarget(folder, is_locked=True)

    def _take_lock(self) -> None:
        """Locks the folder for all tables: a thousand locks would be a thousand open files."""
        self._missing = [
            each for each in (self._folder, *self._folder.parents) if not os.path.lexists(each)
        ]
        make_folder(self._folder)
        try:
            self._lock = (self._folder / _LOCK_OF_TABLES).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise overtaken(str(self._folder)) from None
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def close(self) -> None:
        """Closes the tables, and unlocks the folder; an empty one that it made is removed."""
        super().close()
        if self._lock is None:
            return
        if self._missing and len(list(self._folder.iterdir())) == 1:
            (self._folder / _LOCK_OF_TABLES).unlink(missing_ok=True)
            for each in self._missing:
                with contextlib.suppress(OSError):
                    each.rmdir()
        self._lock.close()
        self._lock = None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the folder {folder} cannot be read or written: {error.strerror or error}: mend"
        " that and start it again, which resumes from the last commit",
        option="target",
    )
