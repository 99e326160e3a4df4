"""Delta Lake: a table or a log, with an application transaction that names the state."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._arrow import require_pyarrow
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.state import State
from dcp_rs.replication.target import IDENTITY, missing_columns, overtaken

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_APPLICATION = "dcp_rs.replication"
_STATES = "_dcp_rs"
# A version is the number of the commit and this many random bits: an attempt that came to nothing
# leaves a document that no other attempt writes over.
_RANDOM_BITS = 20
# How long a commit is tried again that others, such as OPTIMIZE, get in the way of.
_PATIENCE = 30.0
_COLUMNS = re.compile(r"\b(vbucket|collection_id|epoch|generation)\b")


class DeltaTarget:
    """A Delta table in a folder of a file system.

    Each commit has a transaction of the application `dcp_rs.replication`. Its version names the
    document in the folder `_dcp_rs` of the table that holds the state, and that was written and
    synced before.

    Args:
        folder: Folder of the table; made if it is not there.

    Raises:
        ImportError: deltalake is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import deltalake
        except ImportError as error:
            raise ImportError(
                'a Delta target needs deltalake: install it with pip install "dcp-rs[delta]"'
            ) from error
        self._deltalake = deltalake
        self._folder = Path(folder)
        self._table: Any = None

    @classmethod
    def at(cls, address: Address) -> DeltaTarget:
        """Makes the target of `delta:///folder`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        address.allow()
        if not address.path:
            raise ConfigError("target: name the table's folder, as in delta:///folder")
        return cls(address.path)

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - both alike
        """See `dcp_rs.replication.Target.open`."""
        delta = self._deltalake
        nullable = _nullable(schema)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._table = delta.DeltaTable.create(str(self._folder), nullable, mode="ignore")
        state = self._load()
        have = {field.name: field.to_json() for field in self._table.schema().fields}
        fields = {field.name: field for field in delta.Schema.from_arrow(nullable).fields}
        if state is None and self._table.file_uris():
            raise ConfigError(
                f"target: table {self._folder} has rows that dcp_rs did not write: name another"
            )
        missing = missing_columns(
            {name: _type(text) for name, text in have.items()},
            {name: _type(field.to_json()) for name, field in fields.items()},
            str(self._folder),
        )
        if missing:
            self._table.alter.add_columns([fields[name] for name in missing])
        return state

    def _load(self) -> State | None:
        version = self._table.transaction_version(_APPLICATION)
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
        transaction = self._deltalake.Transaction(_APPLICATION, version)
        properties = self._deltalake.CommitProperties(app_transactions=[transaction])
        deadline = time.monotonic() + _PATIENCE
        while True:
            self._table.update_incremental()
            before = self._table.transaction_version(_APPLICATION) or 0
            if before >> _RANDOM_BITS != commit.state.commits - 1:
                raise overtaken(str(self._folder))
            try:
                self._write(commit, properties)
                # What changes no row makes no commit of its own.
                if self._table.transaction_version(_APPLICATION) != version:
                    self._append(commit.rows.slice(0, 0), properties)
            except self._deltalake.exceptions.CommitFailedError:
                if time.monotonic() > deadline:
                    raise
                continue
            break
        self._forget_states(before, version)

    def _write(self, commit: Commit, properties: Any) -> None:
        is_append = commit.has_new_rows_only or not len(self._table.file_uris())
        if is_append and not commit.removals:
            self._append(commit.rows, properties)
            return
        same = " AND ".join(f"t.{name} = s.{name}" for name in IDENTITY)
        merge = (
            self._table.merge(
                _merged(commit),
                same,
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            .when_matched_delete("s._is_deleted")
            .when_matched_update_all(except_cols=["_is_deleted"])
            .when_not_matched_insert_all("NOT s._is_deleted", except_cols=["_is_deleted"])
        )
        if commit.removals:
            gone = _COLUMNS.sub(r"t.\1", " OR ".join(f"({each})" for each in commit.removals))
            merge = merge.when_not_matched_by_source_delete(gone)
        merge.execute()

    def _append(self, rows: pa.Table, properties: Any) -> None:
        self._deltalake.write_deltalake(
            self._table, rows.cast(_nullable(rows.schema)), mode="append",
            commit_properties=properties, schema_mode="merge",
        )  # fmt: skip
        self._table.update_incremental()

    def _write_state(self, version: int, state: State) -> None:
        folder = self._folder / _STATES
        folder.mkdir(exist_ok=True)
        with (folder / f"{version}.json").open("x") as file:
            file.write(state.to_json())
            file.flush()
            os.fsync(file.fileno())

    def _forget_states(self, before: int, version: int) -> None:
        """Removes the documents that no commit of now or of before names."""
        for path in (self._folder / _STATES).glob("*.json"):
            if path.stem not in {str(before), str(version)}:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Forgets the table."""
        self._table = None

    def __repr__(self) -> str:
        return f"DeltaTarget({str(self._folder)!r})"


def _nullable(schema: pa.Schema) -> pa.Schema:
    pa = require_pyarrow("a Delta target")
    return pa.schema([field.with_nullable(True) for field in schema])


def _type(field: str) -> str:
    """Gives the type of a field's JSON document, in which order does not count."""
    kind = json.loads(field)["type"]
    return kind if isinstance(kind, str) else json.dumps(kind, sort_keys=True)


def _merged(commit: Commit) -> pa.Table:
    """Gives the rows and the identities to delete as one source of a merge."""
    pa = require_pyarrow("a Delta target")
    rows, deletes = commit.rows, commit.deletes
    written = rows.cast(_nullable(rows.schema))
    removed = pa.table(
        {
            field.name: deletes[field.name].cast(field.type)
            if field.name in IDENTITY
            else pa.nulls(len(deletes), field.type)
            for field in written.schema
        },
        schema=written.schema,
    )
    parts = [
        part.append_column("_is_deleted", pa.array([is_deleted] * len(part), pa.bool_()))
        for part, is_deleted in ((written, False), (removed, True))
    ]
    return pa.concat_tables(parts)
