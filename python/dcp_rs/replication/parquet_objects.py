"""Parquet in object storage: a log of objects, each a commit with its state in the footer."""

from __future__ import annotations

import io
import json
import re
import secrets
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.folder import StoredTables
from dcp_rs.replication.outage import Unreachable
from dcp_rs.replication.parquet_folder import Footer, Listing, file_name, write_parquet
from dcp_rs.replication.parquet_log import REJECTS, STATE, TIE, ParquetLog
from dcp_rs.replication.rejects import SUFFIX, name_taken
from dcp_rs.replication.state import State
from dcp_rs.replication.storage import Objects
from dcp_rs.replication.target import overtaken, refuse_variants

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.storage import Found, Storage
    from dcp_rs.replication.target import Commit

# In the footer of a file, and in the name of that of its rejects: which attempt at the commit wrote
# it. Of several attempts, the log has one.
_ATTEMPT = "dcp_rs.attempt"
_NAMED = re.compile(r"([0-9]{12})(?:-([0-9a-f]{16}))?\.parquet")
# How long to ask for what became of a commit whose answer was lost.
_WAIT_SECONDS = 60.0


class NumberedObjects:
    """The Parquet files below a location, named by the numbers of commits.

    Args:
        storage: The location.
    """

    def __init__(self, storage: Storage) -> None:
        self.objects = Objects(storage)
        self.path = storage.url

    def file(self, number: int) -> Path:
        """Returns the name of a file."""
        return Path(file_name(number))

    def listing(self) -> Listing:
        """Lists the files."""
        found = Listing({}, [], [])
        for each in self.objects.folders_and_files()[1]:
            named = _NAMED.fullmatch(each.name)
            if named is not None and named[2] is None:
                found.sizes[int(named[1])] = each.size
            elif each.name.endswith(".parquet") and not each.name.startswith("."):
                found.others.append(each.name)
        return found

    def attempts(self) -> dict[str, tuple[int, str]]:
        """Returns the files of rejects, with the number and the attempt of each."""
        names = [each.name for each in self.objects.folders_and_files()[1]]
        matches = {name: _NAMED.fullmatch(name) for name in names}
        return {name: (int(m[1]), m[2]) for name, m in matches.items() if m is not None and m[2]}

    def read_footer(self, number: int) -> Footer:
        """Reads the footer of a file.

        Raises:
            pyarrow.ArrowInvalid: It is damaged.
        """
        import pyarrow.parquet as pq

        found = pq.read_metadata(self.objects.open(file_name(number)))
        return Footer(found.schema.to_arrow_schema(), found.num_rows, found.metadata or {})

    def create(self, number: int, rows: pa.Table, notes: Mapping[str, str]) -> int | None:
        """Writes a file, if no other attempt has; returns its bytes, or `None`.

        Args:
            number: Number of the commit.
            rows: Its rows.
            notes: What its footer has, with the attempt.

        Raises:
            ConfigError: The storage refuses it.
            Unreachable: It does not answer.
        """
        data = _as_bytes(rows, notes)
        deadline, pause = time.monotonic() + _WAIT_SECONDS, 0.05
        while True:
            done = self.objects.create(file_name(number), data)
            # A put that was sent twice, or whose answer was lost, may have been made.
            if done is False and not self.is_of(number, notes[_ATTEMPT]):
                return None
            if done is not None:
                return len(data)
            if time.monotonic() + pause > deadline:
                raise Unreachable(
                    f"{self.path} does not answer for {_WAIT_SECONDS:g} s: the next start resumes"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def is_of(self, number: int, attempt: str) -> bool:
        """Whether an attempt wrote the file of a number."""
        return self.read_footer(number).notes.get(_ATTEMPT.encode()) == attempt.encode()


class StoredParquet(ParquetLog):
    """Parquet files in object storage, to which a log is appended.

    Each commit is an object, named by its number, that is put only if there is none of the name.
    Each start makes such a commit without rows: another process, whose next commit has that number,
    can make none. The rejects of a commit are an object of the same number and attempt beside it.

    Args:
        storage: Where it is.

    Raises:
        ImportError: PyArrow or obstore is not installed.
    """

    def __init__(self, storage: Storage) -> None:
        require_pyarrow("a Parquet target")
        self._storage = storage
        self._log = NumberedObjects(storage)
        super().__init__(storage.url, self._log)
        self._rejects = NumberedObjects(storage.beside(SUFFIX))
        # Whether this process has made a commit, if only one without rows.
        self._has_claimed = False

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - a log only
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "PyArrow")
        self._storage.probe()
        found = self._log.listing()
        self._check_files(found)
        state = self._load(found.sizes, schema) if found.sizes else None
        self._commits = 0 if state is None else state.commits
        self._has_claimed = False
        if state is None:
            self._log.objects.check_conditional()
        elif not state.moved:
            # The load that follows if it is moved does not go on from these files.
            state, self._has_claimed = self._claim(state, schema), True
        self._clean_rejects()
        return state

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        self._storage.probe()
        return super().stored()

    def _check_files(self, found: Listing) -> None:
        if found.others:
            raise ConfigError(
                f"{self._place} has files that dcp_rs did not write, such as"
                f" {min(found.others)}: use another path",
                option="target",
            )
        if self._rejects.listing().others != sorted(self._rejects.attempts()):
            raise name_taken(self._rejects.path)

    def _claim(self, state: State, schema: pa.Schema) -> State:
        """Takes the number of the next commit from other processes."""
        claimed = replace(state, commits=state.commits + 1)
        self._create(claimed, schema.empty_table(), secrets.token_hex(8))
        return claimed

    def _create(self, state: State, rows: pa.Table, attempt: str) -> None:
        tie = replace(self._next, rows=len(rows))
        notes = {STATE: state.to_json(), TIE: json.dumps(asdict(tie)), _ATTEMPT: attempt}
        size = self._log.create(state.commits, self._with_lost(rows), notes)
        if size is None:
            raise overtaken(self._place)
        self._next = replace(tie, bytes_before=tie.bytes_before + size)
        self._commits = state.commits

    def _clean_rejects(self) -> None:
        """Removes the rejects of attempts that are not in the log, and cannot come to it."""
        there = self._log.listing().sizes
        for name, (number, attempt) in self._rejects.attempts().items():
            is_undone = self._has_claimed and number > self._commits
            if number in there:
                is_undone = not self._log.is_of(number, attempt)
            if is_undone:
                self._rejects.objects.remove([name])

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        if commit.state.commits != self._commits + 1:
            raise overtaken(self._place)
        attempt = secrets.token_hex(8)
        rejects = f"{file_name(commit.state.commits).removesuffix('.parquet')}-{attempt}.parquet"
        if len(commit.rejects):
            data = _as_bytes(commit.rejects, {REJECTS: self._place})
            self._rejects.objects.put(rejects, data)
        # If that fails, it may have been made all the same: a start knows whether it was.
        self._create(commit.state, commit.rows, attempt)
        if not self._has_claimed:
            # From now on, no other process can commit what it has begun.
            self._has_claimed = True
            self._clean_rejects()

    def close(self) -> None:
        """Does nothing: no connection is kept."""

    def __repr__(self) -> str:
        return f"StoredParquet({self._place!r})"


class StoredParquets(StoredTables[StoredParquet]):
    """Parquet files in object storage for each of several logs."""

    modes = StoredParquet.modes
    why_not = StoredParquet.why_not
    scheme = "parquet"
    marker = "0"

    def is_table(self, _folders: list[str], files: list[Found]) -> bool:
        """See `StoredTables`."""
        return any(_NAMED.fullmatch(each.name) for each in files)

    def state_at(self, storage: Storage) -> State | None:
        """See `StoredTables`."""
        files = NumberedObjects(storage)
        sizes = files.listing().sizes
        stored = files.read_footer(max(sizes)).notes.get(STATE.encode()) if sizes else None
        return None if stored is None else State.from_json(stored.decode())

    def make(self, folder: Path) -> StoredParquet:
        """See `FolderOfTables`."""
        return StoredParquet(self._storage.below(str(folder)))


def _as_bytes(rows: pa.Table, notes: Mapping[str, str]) -> bytes:
    file: Any = io.BytesIO()
    write_parquet(file, rows, notes)
    data: bytes = file.getvalue()
    return data
