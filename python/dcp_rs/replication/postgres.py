"""PostgreSQL: a table and its state in one database, written in one transaction."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    IDENTITY,
    check_key,
    check_use,
    missing_columns,
    overtaken,
    quote,
    quote_column,
    refuse_variants,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_STATES = "dcp_rs_replication"
# URLs that libpq reads as intended. Its error about any other may show a part of the password.
_ENCODED = r"%(?!00)[0-9A-Fa-f]{2}"
_WORD = rf"(?:[^@:/?#%\[\]]|{_ENCODED})*"
_HOST = rf"(?:\[[^@/?#\[\]]*\]|(?:[^,@:/?#%\[\]]|{_ENCODED})*)(?::[0-9]*)?"
_HOSTS = re.compile(rf"(?:{_WORD}(?::{_WORD})?@)?{_HOST}(?:,{_HOST})*")
# How long the backend of a killed process may take to notice.
_PATIENCE = 30.0


class PostgresTarget:
    """A table of a PostgreSQL database, version 12 or newer.

    Rows come in by `COPY`. The state is a row of the table `dcp_rs_replication` of the same
    database. While it is open it holds an advisory lock of the table's name.

    Args:
        uri: Database, as libpq has it: `postgresql://user@host/database`.
        table: Name of the table, as `table` or `schema.table`; created if it does not exist.

    Raises:
        ImportError: adbc-driver-postgresql is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})

    def __init__(self, uri: str, table: str) -> None:
        self._adbc = require("a PostgreSQL target", "adbc_driver_postgresql.dbapi", "postgres")
        self._uri = uri
        self._table = table
        self._connection: Any = None

    @classmethod
    def at(cls, address: Address) -> PostgresTarget:
        """Creates the target for `postgresql://user@host/database?table=name`.

        The table is `documents` by default; other options are libpq's.

        Raises:
            ConfigError: The user, the password or a host has a character that must be encoded.
        """
        if _HOSTS.fullmatch(address.host) is None:
            raise ConfigError(
                "target: in a user name or password, write @ as %40, / as %2F, : as %3A, # as %23,"
                " ? as %3F and % as %25; or leave the password to PGPASSWORD or ~/.pgpass"
            )
        return cls(address.url, address.options.get("table", "documents"))

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "PostgreSQL")
        want = {each.name: _type(each) for each in schema}
        self._connection = self._adbc.connect(self._uri)
        self._lock()
        self._run(
            f"CREATE TABLE IF NOT EXISTS {_STATES} (table_name text PRIMARY KEY, commits bigint,"
            " generation bigint, complete_generation bigint, state text)"
        )
        found = self._run(
            f"SELECT state FROM {_STATES} WHERE table_name = $1",  # noqa: S608 - a constant
            self._table,
        )
        state = State.from_json(found[0][0]) if found else None
        try:
            check_use(state, schema, mode)
            self._prepare(want, mode, is_known=state is not None)
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()
        return state

    def _lock(self) -> None:
        """Waits for a killed process whose commit is still in progress."""
        deadline = time.monotonic() + _PATIENCE
        statement = (
            "SELECT pg_try_advisory_lock("
            "hashtext('dcp_rs'), hashtext(current_schema() || $1::text))"
        )
        while not self._run(statement, self._table)[0][0]:
            if time.monotonic() > deadline:
                raise overtaken(self._table)
            time.sleep(0.05)

    def _prepare(self, want: dict[str, str], mode: Mode, *, is_known: bool) -> None:
        """Creates the table, or adds missing columns."""
        table = quote(self._table)
        key = f", PRIMARY KEY ({', '.join(IDENTITY)})" if mode == "table" else ""
        columns = ", ".join(f"{quote_column(name)} {kind}" for name, kind in want.items())
        self._run(f"CREATE TABLE IF NOT EXISTS {table} ({columns}{key})")
        have = dict(
            self._run(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
                " WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
                table,
            )
        )
        if not is_known and self._run(f"SELECT 1 FROM {table} LIMIT 1"):  # noqa: S608
            raise ConfigError(
                f"target: table {self._table} has rows that dcp_rs did not write: use another"
            )
        if mode == "table":
            keys = self._run(
                "SELECT array_agg(attname) FROM pg_index"
                " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)"
                " WHERE indrelid = to_regclass($1) AND indisunique GROUP BY indexrelid",
                table,
            )
            check_key([key for (key,) in keys], self._table)
        for name, kind in missing_columns(have, want, self._table).items():
            self._run(f"ALTER TABLE {table} ADD COLUMN {quote_column(name)} {kind}")
        # Rows to merge and to remove; empty again after each transaction.
        names = ", ".join(map(quote_column, want))
        for staged, chosen in (("_dcp_rs_rows", names), ("_dcp_rs_deletes", ", ".join(IDENTITY))):
            self._run(
                f"CREATE TEMPORARY TABLE {staged} ON COMMIT DELETE ROWS"  # noqa: S608
                f" AS SELECT {chosen} FROM {table} WITH NO DATA"
            )

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        try:
            self._write(commit)
            self._connection.commit()
        except BaseException:
            with contextlib.suppress(self._adbc.Error):
                self._connection.rollback()
            raise

    def _write(self, commit: Commit) -> None:
        table = quote(self._table)
        self._save(commit.state)
        for condition in commit.removals:
            self._run(f"DELETE FROM {table} WHERE {condition}")  # noqa: S608 - integers only
        if len(commit.deletes):
            same = " AND ".join(f"t.{name} = d.{name}" for name in IDENTITY)
            self._copy("_dcp_rs_deletes", commit.deletes)
            self._run(f"DELETE FROM {table} t USING _dcp_rs_deletes d WHERE {same}")  # noqa: S608
        if not len(commit.rows):
            return
        if commit.has_new_rows_only:
            self._copy(self._table, commit.rows)
            return
        self._copy("_dcp_rs_rows", commit.rows)
        names = [quote_column(name) for name in commit.rows.column_names]
        taken = ", ".join(f"{name} = excluded.{name}" for name in names)
        self._run(
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(names)}"  # noqa: S608
            f" FROM _dcp_rs_rows ON CONFLICT ({', '.join(IDENTITY)}) DO UPDATE SET {taken}"
        )

    def _copy(self, table: str, rows: pa.Table) -> None:
        schema, _, name = table.rpartition(".")
        with self._connection.cursor() as cursor:
            cursor.adbc_ingest(
                name,
                rows.to_reader(),
                mode="append",
                temporary=name.startswith("_dcp_rs_"),
                db_schema_name=schema or None,
            )

    def _save(self, state: State) -> None:
        values = [state.commits, state.generation, state.complete_generation, state.to_json()]
        if state.commits == 1:
            statement = f"INSERT INTO {_STATES} VALUES ($1, $2, $3, $4, $5) RETURNING 1"  # noqa: S608
            values = [self._table, *values]
        else:
            statement = (
                f"UPDATE {_STATES} SET commits = $1, generation = $2, complete_generation = $3,"  # noqa: S608
                " state = $4 WHERE table_name = $5 AND commits = $6 RETURNING 1"
            )
            values += [self._table, state.commits - 1]
        if not self._run(statement, *values):
            raise overtaken(self._table)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str, *values: object) -> list[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            rows: list[Any] = cursor.fetchall() if cursor.description else []
            return rows

    def __repr__(self) -> str:
        return f"PostgresTarget(table={self._table!r})"


def _type(field: pa.Field) -> str:
    """Returns PostgreSQL's name of a column's type, as `format_type` writes it."""
    pa = require_pyarrow("a PostgreSQL target")
    kind = field.type
    if field.name == "value":
        return "json"
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return f"{_type(kind.value_field)}[]"
    if pa.types.is_decimal128(kind):
        return f"numeric({kind.precision},{kind.scale})"
    name = {
        pa.bool_(): "boolean",
        pa.int8(): "smallint",
        pa.int16(): "smallint",
        pa.int32(): "integer",
        pa.int64(): "bigint",
        pa.float32(): "real",
        pa.float64(): "double precision",
        pa.string(): "text",
        pa.binary(): "bytea",
        pa.date32(): "date",
        pa.timestamp("us", "UTC"): "timestamp with time zone",
        pa.timestamp("us"): "timestamp without time zone",
    }.get(kind)
    if name is None:
        raise ConfigError(
            f"document_schema: PostgreSQL has no column type for {field.name}, which is {kind}: "
            "declare it as STRING, which gives its JSON text"
        )
    return name
