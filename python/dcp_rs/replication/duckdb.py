"""DuckDB: a table and its state in one database, written in one transaction."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._arrow import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    IDENTITY,
    check_key,
    check_use,
    has_variant,
    missing_columns,
    overtaken,
    quote,
    quote_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_STATES = "dcp_rs_replication"
_VARIANT = {"ARROW:extension:name": "arrow.parquet.variant", "ARROW:extension:metadata": ""}


class DuckDBTarget:
    """A table of a DuckDB database.

    The state is a row of the table `dcp_rs_replication` of the same database.

        >>> DuckDBTarget("travel.duckdb", "airlines")
        DuckDBTarget('travel.duckdb', 'airlines')

    Args:
        path: The database's file; created if it does not exist.
        table: Name of the table, as `table` or `schema.table`; created if it does not exist.
        value_format: Type of the column `value`: `json`, or `variant`.

    Raises:
        ConfigError: `value_format` is neither.
        ImportError: duckdb is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})

    def __init__(
        self, path: str | os.PathLike[str], table: str, value_format: str = "json"
    ) -> None:
        if value_format not in {"json", "variant"}:
            raise ConfigError(f"value_format: {value_format!r} is neither json nor variant")
        try:
            import duckdb
        except ImportError as error:
            raise ImportError(
                'a DuckDB target needs duckdb: install it with pip install "dcp-rs[duckdb]"'
            ) from error
        self._duckdb = duckdb
        self._path = path
        self._table = table
        self._value_type = value_format.upper()
        self._connection: Any = None

    @classmethod
    def at(cls, address: Address) -> DuckDBTarget:
        """Creates the target for `duckdb:///path?table=name&value_format=json`.

        The table is `documents` by default.

        Raises:
            ConfigError: There is no path, or another option.
        """
        address.allow("table", "value_format")
        path = address.local_path("the database", "duckdb:///path?table=name")
        options = {"table": "documents"} | address.options
        return cls(path, **options)

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        self._connection = self._duckdb.connect(os.fspath(self._path))
        self._run(
            f"CREATE TABLE IF NOT EXISTS {_STATES} (table_name VARCHAR PRIMARY KEY,"
            " commits BIGINT, generation BIGINT, complete_generation BIGINT, state VARCHAR)"
        )
        state = self._load()
        check_use(state, schema, mode)
        self._prepare(schema, mode, is_known=state is not None)
        return state

    def _load(self) -> State | None:
        found = self._run(
            f"SELECT state FROM {_STATES} WHERE table_name = ?",  # noqa: S608 - a constant
            [self._table],
        )
        return State.from_json(found[0][0]) if found else None

    def _prepare(self, schema: pa.Schema, mode: Mode, *, is_known: bool) -> None:
        """Creates the table, or adds missing columns."""
        table = quote(self._table)
        want = self._types(schema)
        key = f", PRIMARY KEY ({', '.join(IDENTITY)})" if mode == "table" else ""
        columns = ", ".join(f"{quote_column(name)} {kind}" for name, kind in want.items())
        with self._transaction():
            self._run(f"CREATE TABLE IF NOT EXISTS {table} ({columns}{key})")
            described = self._run(f"DESCRIBE {table}")
            have = {row[0]: row[1] for row in described}
            if not is_known and self._run(f"SELECT 1 FROM {table} LIMIT 1"):  # noqa: S608
                raise ConfigError(
                    f"target: table {self._table} has rows that dcp_rs did not write: use another"
                )
            if mode == "table":
                in_keys = {row[0] for row in described if row[3] is not None}
                check_key([in_keys.intersection(IDENTITY)], self._table)
            for name, kind in missing_columns(have, want, self._table).items():
                self._run(f"ALTER TABLE {table} ADD COLUMN {quote_column(name)} {kind}")

    def _types(self, schema: pa.Schema) -> dict[str, str]:
        """Returns DuckDB's types of the columns.

        Raises:
            ConfigError: There is to be a VARIANT, and this DuckDB takes none.
        """
        with self._registered(_rows=schema.empty_table()):
            found = {row[0]: row[1] for row in self._run("DESCRIBE SELECT * FROM _rows")}
        if "value" in found:
            found["value"] = self._value_type
        elif self._value_type != "JSON":
            raise ConfigError("value_format: document_schema has no column value to be a variant")
        variants = {each.name for each in schema if has_variant(each.type)}
        lost = [name for name in variants if "VARIANT" not in found[name]]
        if lost or (self._value_type == "VARIANT" and not self._has_variant()):
            raise ConfigError(
                f"target: DuckDB {self._duckdb.__version__} does not support VARIANT: install "
                "2.0 or later"
            )
        return found

    def _has_variant(self) -> bool:
        try:
            self._run("CREATE OR REPLACE TEMPORARY TABLE _dcp_rs_variant (value VARIANT)")
        except self._duckdb.Error:  # older releases know the type, and have no tables with it
            return False
        return True

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        table, state = quote(self._table), commit.state
        names = ", ".join(map(quote_column, commit.rows.column_names))
        same = " AND ".join(f"t.{name} = d.{name}" for name in IDENTITY)
        with self._registered(_rows=commit.rows, _deletes=commit.deletes), self._transaction():
            self._save(state)
            for condition in commit.removals:
                self._run(f"DELETE FROM {table} WHERE {condition}")  # noqa: S608 - integers only
            if len(commit.deletes):
                self._run(f"DELETE FROM {table} t USING _deletes d WHERE {same}")  # noqa: S608
            if len(commit.rows):
                insert = "INSERT" if commit.has_new_rows_only else "INSERT OR REPLACE"
                cells = self._cells(commit.rows.column_names)
                self._run(f"{insert} INTO {table} ({names}) SELECT {cells} FROM _rows")  # noqa: S608

    def _cells(self, columns: Sequence[str]) -> str:
        """Returns what to select of the rows: documents as DuckDB's JSON, or as malformed.

        DuckDB refuses some that others take for JSON, such as those with half a surrogate pair.
        """
        if "value" not in columns:
            return "*"
        cells = [f"TRY_CAST(value AS JSON)::{self._value_type} AS value"]
        if "_malformed" in columns:
            refused = "CASE WHEN TRY_CAST(value AS JSON) IS NULL THEN encode(value) END"
            cells.append(f"coalesce(_malformed, {refused}) AS _malformed")
        return f"* REPLACE ({', '.join(cells)})"

    def _save(self, state: State) -> None:
        values = [state.commits, state.generation, state.complete_generation, state.to_json()]
        if state.commits == 1:
            statement = (
                f"INSERT INTO {_STATES} VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1"  # noqa: S608
            )
            values = [self._table, *values]
        else:
            statement = (
                f"UPDATE {_STATES} SET commits = ?, generation = ?, complete_generation = ?,"  # noqa: S608
                " state = ? WHERE table_name = ? AND commits = ? RETURNING 1"
            )
            values += [self._table, state.commits - 1]
        if not self._run(statement, values):
            raise overtaken(self._table)

    def close(self) -> None:
        """Closes the database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str, values: list[object] | None = None) -> list[Any]:
        rows: list[Any] = self._connection.execute(statement, values).fetchall()
        return rows

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN")
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            with contextlib.suppress(self._duckdb.Error):
                self._run("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _registered(self, **tables: pa.Table) -> Iterator[None]:
        for name, table in tables.items():
            self._connection.register(name, table.cast(_tagged(table.schema)))
        try:
            yield
        finally:
            for name in tables:
                self._connection.unregister(name)

    def __repr__(self) -> str:
        return f"DuckDBTarget({str(self._path)!r}, {self._table!r})"


def _tagged(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with DuckDB's names for VARIANT."""
    pa = require_pyarrow("a DuckDB target")
    return pa.schema([_tagged_field(field) for field in schema])


def _tagged_field(field: pa.Field) -> pa.Field:
    pa = require_pyarrow("a DuckDB target")
    kind = field.type
    if not has_variant(kind):
        return field
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_tagged_field(kind.value_field)))
    if pa.types.is_map(kind):
        return field.with_type(pa.map_(kind.key_field, _tagged_field(kind.item_field)))
    if any(b"variant" in (part.metadata or {}) for part in kind):
        return field.with_metadata(_VARIANT)
    return field.with_type(pa.struct([_tagged_field(part) for part in kind]))
