"""Parquet: a log in a folder of files, each a commit with its state in the footer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.folder import DEPTH, FolderOfTables
from dcp_rs.replication.parquet_folder import NumberedFiles
from dcp_rs.replication.parquet_log import REJECTS, STATE, TIE, ParquetLog
from dcp_rs.replication.rejects import SUFFIX, name_taken
from dcp_rs.replication.state import State
from dcp_rs.replication.storage import Storage
from dcp_rs.replication.target import (
    make_folder,
    overtaken,
    refuse_variants,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_LOCK = ".dcp_rs.lock"
# The lock of a folder of tables, which stands for those of its tables.
_LOCK_OF_TABLES = ".dcp_rs.tables.lock"


class ParquetTarget(ParquetLog):
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

    def __init__(self, folder: str | os.PathLike[str], *, is_locked: bool = False) -> None:
        require_pyarrow("a Parquet target")
        self._is_locked = is_locked
        self._outer: list[IO[bytes]] = []
        # Another spelling of it, or a link to it, is the same folder.
        self._folder = Path(os.path.realpath(folder))
        self._log = NumberedFiles(self._folder)
        super().__init__(str(self._folder), self._log)
        self._rejects = NumberedFiles(Path(f"{self._folder}{SUFFIX}"))
        self._lock: IO[bytes] | None = None
        self._has_made_lock = False
        self._has_rejects = False

    @classmethod
    def at(cls, address: Address) -> ParquetLog:
        """Creates the target for `parquet:///folder` or `parquet+s3://bucket/path`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        if address.storage:
            from dcp_rs.replication.parquet_objects import StoredParquet

            return StoredParquet(Storage.of(address))
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
        if found.sizes and REJECTS.encode() not in self._footer(rejects, max(found.sizes)).notes:
            raise taken

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
        notes = {STATE: commit.state.to_json(), TIE: json.dumps(asdict(tie))}
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

    def _write_rejects(self, commit: Commit) -> None:
        if not self._has_rejects:
            # Somebody may have made it since.
            self._check_names()
            self._rejects.path.mkdir(exist_ok=True)
            self._has_rejects = True
        self._rejects.write(commit.state.commits, commit.rejects, {REJECTS: self._folder.name})

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
    why_not = ParquetTarget.why_not
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
        stored = files.read_footer(max(sizes)).notes.get(STATE.encode()) if sizes else None
        return None if stored is None else State.from_json(stored.decode())

    @classmethod
    def at(cls, address: Address) -> FolderOfTables[Any]:
        """Creates the database for `parquet:///folder` or `parquet+s3://bucket/path`."""
        if address.storage:
            from dcp_rs.replication.parquet_objects import StoredParquets

            return StoredParquets(Storage.of(address))
        return super().at(address)

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
