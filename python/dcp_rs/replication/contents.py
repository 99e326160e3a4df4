"""What tables hold, as `dcp_rs.verify` reads it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.duckdb_catalog import STATES
from dcp_rs.replication.duckdb_file import DatabaseFile
from dcp_rs.replication.rejects import SUFFIX
from dcp_rs.replication.state import State
from dcp_rs.replication.target import DELETED, quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcp_rs.replication.target import Address

VERSIONS = pa.schema(
    [
        pa.field("collection_id", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("vbucket", pa.int32()),
        pa.field("seqno", pa.int64()),
        pa.field("cas", pa.int64()),
        pa.field("is_marked", pa.bool_()),
    ]
)
"""What is read of a row; whether it stays although its document was removed."""


class Part(NamedTuple):
    """The rows of some vBuckets, and the state that they belong to.

    Attributes:
        state: The state.
        rows: The rows, with the columns of `VERSIONS`.
        rejects: The rejects, likewise.
    """

    state: State
    rows: pa.Table
    rejects: pa.Table


class Contents(Protocol):
    """The tables of a place, to read only."""

    def states(self) -> dict[str, State]:
        """Returns the state of each table by its name."""

    def counts(self, table: str) -> dict[int, int]:
        """Returns how many rows a table has of each vBucket."""

    def read(self, table: str, vbuckets: Sequence[int]) -> Part:
        """Returns the rows of some vBuckets of a table, as one commit has left them."""

    def close(self) -> None:
        """Closes it."""


def columns(names: Sequence[str]) -> str:
    """Returns what to select of a table that has these columns."""
    marked = f'"{DELETED}" IS NOT NULL' if DELETED in names else "false"
    return f"collection_id, key, vbucket, seqno, cas, {marked} AS is_marked"


def as_versions(rows: pa.Table) -> pa.Table:
    """Returns rows with the columns and types of `VERSIONS`."""
    return rows.select(VERSIONS.names).cast(VERSIONS)


def among(vbuckets: Sequence[int]) -> str:
    """Returns the condition that selects vBuckets."""
    return f"vbucket IN ({', '.join(map(str, vbuckets))})"


class DuckDBContents:
    """The tables of a DuckDB database.

    Args:
        address: `duckdb:///path`, with `table` for one of the tables.

    Raises:
        ConcurrentWriterError: Another process has the database open.
        ConfigError: There is no such database.
    """

    def __init__(self, address: Address) -> None:
        file = self._file_of(address)
        if not file.exists():
            raise ConfigError(f"there is no database {file}: check its name", option="target")
        self._only = address.options.get("table")
        self._connection: Any = file.connect()

    @staticmethod
    def _file_of(address: Address) -> DatabaseFile:
        address.allow("table", "value_format")
        return DatabaseFile(address.local_path("the database", "duckdb:///path"))

    def states(self) -> dict[str, State]:
        """See `Contents`."""
        if not self._columns(STATES):
            return {}
        found = self._run(f"SELECT table_name, state FROM {STATES} WHERE commits > 0")  # noqa: S608 - a constant
        return {
            name: State.from_json(text)
            for name, text in found
            if self._only is None or name.lower() == self._only.lower()
        }

    def counts(self, table: str) -> dict[int, int]:
        """See `Contents`."""
        name = quote(table)
        return dict(self._run(f"SELECT vbucket, count(*) FROM {name} GROUP BY vbucket"))  # noqa: S608

    def read(self, table: str, vbuckets: Sequence[int]) -> Part:
        """See `Contents`."""
        with self._snapshot():
            found = self._run(f"SELECT state FROM {STATES} WHERE table_name = ?", table)  # noqa: S608
            state = State.from_json(found[0][0])
            return Part(state, self._rows(table, vbuckets), self._rows(table + SUFFIX, vbuckets))

    def _rows(self, table: str, vbuckets: Sequence[int]) -> pa.Table:
        names = self._columns(table)
        if not names:
            return VERSIONS.empty_table()
        found = self._connection.sql(
            f"SELECT {columns(names)} FROM {quote(table)} WHERE {among(vbuckets)}"  # noqa: S608
        )
        return as_versions(found.to_arrow_table())

    def _columns(self, table: str) -> list[str]:
        *schema, name = table.lower().split(".")
        found = self._run(
            "SELECT column_name FROM duckdb_columns() WHERE database_name = current_database()"
            " AND lower(table_name) = ? AND lower(schema_name) = coalesce(?, current_schema())",
            name,
            schema[-1] if schema else None,
        )
        return [each for (each,) in found]

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._run("BEGIN")
        try:
            yield
        finally:
            self._run("ROLLBACK")

    def _run(self, statement: str, *values: object) -> list[Any]:
        rows: list[Any] = self._connection.execute(statement, list(values)).fetchall()
        return rows

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
