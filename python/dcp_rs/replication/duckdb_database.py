"""Several tables of one DuckDB database."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._libraries import require
from dcp_rs.replication.duckdb import DuckDBTarget
from dcp_rs.replication.duckdb_catalog import STATES, Catalog
from dcp_rs.replication.duckdb_file import DatabaseFile
from dcp_rs.replication.state import State

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit


class DuckDBDatabase:
    """A DuckDB database with several tables, which are written in one transaction.

    Args:
        path: The database's file; created if it does not exist.
        value_format: Type of the column `value`: `json`, or `variant`.

    Raises:
        ImportError: duckdb is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = DuckDBTarget.modes
    takes_rejects: ClassVar[bool] = True
    commits_when_idle: ClassVar[bool] = True

    def __init__(
        self, path: str | os.PathLike[str] | DatabaseFile, value_format: str = "json"
    ) -> None:
        require("a DuckDB target", "duckdb", "duckdb")
        self._file = path if isinstance(path, DatabaseFile) else DatabaseFile(path)
        self._value_format = value_format
        self._connection: Any = None
        self._was_there = True
        # What it has, read once for all tables that are opened before the next commit.
        self._catalog: Catalog | None = None

    @classmethod
    def at(cls, address: Address) -> DuckDBDatabase:
        """Creates the database for `duckdb:///path?value_format=json`.

        Raises:
            ConfigError: There is no path, or another option.
        """
        address.allow("value_format")
        return cls(address.local_path("the database", "duckdb:///path"), **address.options)

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        self._was_there, self._catalog = self._file.exists(), None
        self._connection = self._file.connect()
        found: dict[str, str | None] = {}
        for name in chain.from_iterable(self._known().states.values()):
            ((text,),) = self._connection.execute(
                f"SELECT state FROM {STATES} WHERE table_name = ?",  # noqa: S608 - a constant
                [name],
            ).fetchall()
            found[name] = State.from_json(text).collection
        return {name: collection for name, collection in found.items() if collection is not None}

    def _known(self) -> Catalog:
        if self._catalog is None:
            self._catalog = Catalog.of(self._connection)
        return self._catalog

    def target(self, table: str) -> DuckDBTarget:
        """See `dcp_rs.replication.Database.target`."""
        return DuckDBTarget(
            self._file,
            table,
            self._value_format,
            connection=self._connection,
            catalog=self._known,
        )

    def fold(self, table: str) -> str:
        """See `dcp_rs.replication.Database.fold`."""
        return table.lower()

    def commit(self, commits: Sequence[tuple[DuckDBTarget, Commit]]) -> list[Commit]:
        """See `dcp_rs.replication.Database.commit`."""
        self._catalog = None
        return DuckDBTarget.commit_together(commits)

    def drop(self, target: DuckDBTarget) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        self._catalog = None
        target.drop()

    def close(self) -> None:
        """Closes the database; an empty one that it made is removed."""
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        with contextlib.closing(connection):
            found = connection.execute("SELECT 1 FROM duckdb_tables() LIMIT 1").fetchall()
        if not found and not self._was_there:
            self._file.remove()

    def __repr__(self) -> str:
        return f"DuckDBDatabase({str(self._file)!r})"
