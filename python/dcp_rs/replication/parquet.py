"""Parquet: a log in a folder of files, each a commit with its state in the footer."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
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

_STATE = b"dcp_rs.state"
_LOCK = ".dcp_rs.lock"
# Digits of a commit's number, which names its file.
_DIGITS = 12


class ParquetTarget:
    """A folder of Parquet files, to which a log is appended.

    Each commit is a file, named by its number, which is written and synced under a hidden name and
    then renamed. Its footer has the state. The folder is locked while it is open.

    Args:
        folder: The folder; created if it does not exist.

    Raises:
        ImportError: PyArrow is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"log"})

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_pyarrow("a Parquet target")
        self._folder = Path(folder)
        self._lock: IO[bytes] | None = None
        self._commits = 0

    @classmethod
    def at(cls, address: Address) -> ParquetTarget:
        """Creates the target for `parquet:///folder`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        address.allow()
        return cls(address.local_path("the folder", "parquet:///folder"))

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - a log only
        """See `dcp_rs.replication.Target.open`."""
        import pyarrow.parquet as pq

        refuse_variants(schema, "PyArrow")
        make_folder(self._folder)
        self._take_lock()
        # What a crash has left; other hidden files are not ours.
        for left in self._folder.glob(f".{'[0-9]' * _DIGITS}.parquet"):
            left.unlink()
        files = sorted(self._folder.glob("[!.]*.parquet"))
        if not files:
            return None
        found = pq.read_schema(files[-1])
        state = (found.metadata or {}).get(_STATE)
        if state is None:
            raise ConfigError(
                f"target: folder {self._folder} has files that dcp_rs did not write: use another"
            )
        have = {field.name: type_name(field.type) for field in found}
        want = {field.name: type_name(field.type) for field in schema}
        missing_columns(have, want, str(self._folder))
        loaded = State.from_json(state.decode())
        self._commits = loaded.commits
        return loaded

    def _take_lock(self) -> None:
        self._lock = (self._folder / _LOCK).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise overtaken(str(self._folder)) from error

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        import pyarrow.parquet as pq

        if commit.state.commits != self._commits + 1:
            raise overtaken(str(self._folder))
        name = f"{commit.state.commits:0{_DIGITS}}.parquet"
        hidden = self._folder / f".{name}"
        rows = commit.rows.replace_schema_metadata({_STATE: commit.state.to_json().encode()})
        with hidden.open("wb") as file:
            # It also contains the schema, which pq.read_schema returns with the state.
            pq.write_table(rows, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self._folder / name)
        _sync_folder(self._folder)
        self._commits = commit.state.commits

    def close(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __repr__(self) -> str:
        return f"ParquetTarget({str(self._folder)!r})"


def _sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
