"""DuckDB: a table and its state in one database, written in one transaction."""

# ruff: noqa: SLF001 - targets of one class write together

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.exceptions import ConfigError, DataError
from dcp_rs.replication.duckdb_catalog import STATES, Catalog, Place
from dcp_rs.replication.duckdb_file import DatabaseFile
from dcp_rs.replication.rejects import (
    SCHEMA,
    SUFFIX,
    name_taken,
    nested_beyond,
    refused_rows,
    rejecting,
)
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    CHANGED,
    ENDED_BY,
    IDENTITY,
    IS_CURRENT,
    LACKED,
    VALID_FROM,
    VALID_TO,
    check_fold,
    check_key,
    check_use,
    counted,
    has_variant,
    is_scalar,
    lacking,
    missing_columns,
    overtaken,
    quote,
    quote_column,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit, Endings

_T = TypeVar("_T")

# Seconds for which a transaction that conflicts with another thread's is repeated.
_WAIT_SECONDS = 30.0
# Levels of JSON that DuckDB 2.0 makes a VARIANT of; it crashes at some 20,000.
_VARIANT_DEPTH = 1_000
# That a row of a table, t, and a registered one, d, are of one document.
_SAME = " AND ".join(f"t.{name} = d.{name}" for name in IDENTITY)
# Types of columns by the format of values and the schema, as opening a database takes 20 ms.
_WANTED: dict[tuple[str, bytes], dict[str, str]] = {}
_MAX_WANTED = 64
_VARIANT = {"ARROW:extension:name": "arrow.parquet.variant", "ARROW:extension:metadata": ""}


class DuckDBTarget:
    """A table of a DuckDB database.

    The state is a row of the table `dcp_rs_replication` of the same database, and rejects go to the
    table `<table>_rejected`.

        >>> DuckDBTarget("travel.duckdb", "airlines")
        DuckDBTarget('travel.duckdb', 'airlines')

    Args:
        path: The database's file; created if it does not exist.
        table: Name of the table, as `table` or `schema.table`; created if it does not exist.
        value_format: Type of the column `value`: `json`, or `variant`.
        connection: An open connection to the database, which several tables share.
        catalog: Gives what is in the database, if several tables share that.

    Raises:
        ConfigError: `value_format` is neither.
        ImportError: duckdb is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log", "history"})
    takes_rejects: ClassVar[bool] = True
    commits_when_idle: ClassVar[bool] = True
    _has_keys: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str] | DatabaseFile,
        table: str,
        value_format: str = "json",
        *,
        connection: Any = None,
        catalog: Callable[[], Catalog] | None = None,
    ) -> None:
        if value_format not in {"json", "variant"}:
            raise ConfigError(
                f"value_format must be json or variant, not {value_format!r}", option="target"
            )
        self._duckdb = require("a DuckDB target", "duckdb", "duckdb")
        self._file = path if isinstance(path, DatabaseFile) else DatabaseFile(path)
        self._table = table
        self._value_type = value_format.upper()
        self._shared = self._connection = connection
        # What the state is stored under.
        self._name = table
        self._place = Place("", "")
        self._catalog = catalog or self._read_catalog
        self._rejects = ""
        self._has_rejects = False

    @classmethod
    def at(cls, address: Address) -> DuckDBTarget:
        """Creates the target for `duckdb:///path?table=name&value_format=json`.

        The table is `documents` by default.

        Raises:
            ConfigError: There is no path, or another option.
        """
        address.allow("table", "value_format")
        path = address.local_path("the database", "duckdb:///path?table=name")
        options = {"table": "documents", "value_format": "json"} | address.options
        return cls(path, options["table"], options["value_format"])

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        check_fold(schema.names, "DuckDB")
        want = self._wanted(schema)
        was_there = self._file.exists()
        self._connection = self._connect()
        try:
            if any("VARIANT" in kind for kind in want.values()):
                self._check_format()
            return self._retrying(partial(self._open, schema, mode, want))
        except BaseException:
            self.close()
            if not was_there:
                self._file.remove()
            raise

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        if not self._file.exists():
            return None
        self._connection = self._connect()
        try:
            return self._load(self._catalog())
        finally:
            self.close()

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return is_scalar(old) and is_scalar(new)

    def _open(self, schema: pa.Schema, mode: Mode, want: dict[str, str]) -> State | None:
        with self._transaction():
            catalog = self._catalog()
            state = self._load(catalog)
            check_use(state, schema, mode)
            added = self._prepare(want, mode, catalog, is_known=state is not None)
            self._find_rejects(catalog)
            self._make_states()
            return None if state is None else self._checked(state, added)

    def _make_states(self) -> None:
        self._run(
            f"CREATE TABLE IF NOT EXISTS {STATES} (table_name VARCHAR PRIMARY KEY,"
            " commits BIGINT, generation BIGINT, complete_generation BIGINT, state VARCHAR)"
        )
        if not any(row[0] == "rows" for row in self._run(f"DESCRIBE {STATES}")):
            # Releases up to 0.2 did not store it.
            self._run(f"ALTER TABLE {STATES} ADD COLUMN rows BIGINT")

    def _retrying(self, work: Callable[[], _T]) -> _T:
        """Does work in a transaction that may conflict with other threads of this process."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                return work()
            except self._duckdb.TransactionException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _connect(self) -> Any:
        return self._shared or self._file.connect()

    @contextlib.contextmanager
    def _connected(self, path: str) -> Iterator[None]:
        before, self._connection = self._connection, self._duckdb.connect(path)
        try:
            yield
        finally:
            self._connection.close()
            self._connection = before

    def _read_catalog(self) -> Catalog:
        return Catalog.of(self._connection)

    def _load(self, catalog: Catalog) -> State | None:
        """Returns the state of the table, under whichever of its names it was stored."""
        self._place = catalog.place(self._table)
        mine = catalog.states_of(self._place)
        if len(mine) > 1:
            raise ConfigError(
                f"{STATES} has {len(mine)} states of one table, {', '.join(mine)}: delete"
                " those that are not its own",
                option="target",
            )
        owner = self._place.table.removesuffix(SUFFIX)
        if owner != self._place.table:
            for name in catalog.states_of(self._place._replace(table=owner)):
                raise ConfigError(
                    f"{self._table} is the table of rejects of {name}", option="target"
                )
        if not mine:
            return None
        # Under the name that it began with.
        self._name = mine[0]
        ((text,),) = self._run(
            f"SELECT state FROM {STATES} WHERE table_name = ?",  # noqa: S608 - a constant
            [self._name],
        )
        return State.from_json(text)

    def _checked(self, state: State, added: list[str]) -> State:
        """Returns the state, with a reason if the table is not as it left it."""
        moved = lacking(state, added)
        if moved:
            self._run(
                f"UPDATE {STATES} SET rows = {LACKED} WHERE table_name = ?",  # noqa: S608 - constants
                [self._name],
            )
            return replace(state, moved=moved)
        ((expected,),) = self._run(
            f"SELECT rows FROM {STATES} WHERE table_name = ?",  # noqa: S608 - a constant
            [self._name],
        )
        return counted(state, expected, self._count())

    def _count(self) -> int:
        found: int = self._run(f"SELECT count(*) FROM {quote(self._table)}")[0][0]  # noqa: S608
        return found

    def _prepare(
        self, want: dict[str, str], mode: Mode, catalog: Catalog, *, is_known: bool
    ) -> list[str]:
        """Creates the table, or adds missing columns; returns those."""
        table = quote(self._table)
        has_key = self._has_keys and mode == "table"
        key = f", PRIMARY KEY ({', '.join(IDENTITY)})" if has_key else ""
        columns = ", ".join(f"{quote_column(name)} {kind}" for name, kind in want.items())
        if self._place in catalog.views:
            raise ConfigError(f"{self._table} is a view: choose another name", option="target")
        self._run(f"CREATE TABLE IF NOT EXISTS {table} ({columns}{key})")
        described = self._run(f"DESCRIBE {table}")
        if not is_known and self._run(f"SELECT 1 FROM {table} LIMIT 1"):  # noqa: S608
            raise ConfigError(
                f"table {self._table} has rows that dcp_rs did not write, or its state is gone from"
                f" {STATES}: use another, or drop it",
                option="target",
            )
        if has_key:
            in_keys = {row[0] for row in described if row[3] is not None}
            check_key([in_keys.intersection(IDENTITY)], self._table)
        ours = {name.lower() for name in want}
        for name, _, is_nullable, _, default, _ in described:
            if name.lower() not in ours and is_nullable == "NO" and default is None:
                raise ConfigError(
                    f"column {name} of table {self._table} takes no null and has no "
                    "default, so no row could be added: give it a default",
                    option="target",
                )
        have = self._named_as(want, described)
        added = missing_columns(have, want, self._table)
        for name, kind in added.items():
            self._run(f"ALTER TABLE {table} ADD COLUMN {quote_column(name)} {kind}")
        names = ", ".join(map(quote_column, want))
        nulls = ", ".join("NULL" for _ in want)
        try:
            self._run(f"EXPLAIN INSERT INTO {table} ({names}) SELECT {nulls} WHERE false")
        except self._duckdb.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"table {self._table} cannot be written to: {reason}", option="target"
            ) from error
        return list(added)

    def _named_as(self, want: dict[str, str], described: list[Any]) -> dict[str, str]:
        """Returns the types of the table's columns, with the names of those wanted."""
        # Of capitals and small letters, DuckDB keeps those that the column was made with.
        stored = {name.lower(): name for name in want}
        return {stored.get(row[0].lower(), row[0]): row[1] for row in described}

    def _grow(self, schema: pa.Schema) -> None:
        """Adds columns that the table lacks, and changes those of another type."""
        table, want = quote(self._table), self._wanted(schema)
        have = self._named_as(want, self._run(f"DESCRIBE {table}"))
        for name, kind in want.items():
            if name not in have:
                self._run(f"ALTER TABLE {table} ADD COLUMN {quote_column(name)} {kind}")
            elif have[name] != kind:
                self._run(f"ALTER TABLE {table} ALTER COLUMN {quote_column(name)} TYPE {kind}")

    def _find_rejects(self, catalog: Catalog) -> None:
        """Looks whether there is a table of rejects.

        Raises:
            ConfigError: Another table has its name.
        """
        place = self._place._replace(table=self._place.table + SUFFIX)
        self._rejects = ".".join(quote_column(part) for part in place)
        self._has_rejects = False
        if place not in catalog.tables:
            return
        have = {row[0]: row[1] for row in self._run(f"DESCRIBE {self._rejects}")}
        with self._registered(_rejects=SCHEMA.empty_table()):
            if have != self._types_of("_rejects"):
                raise name_taken(self._table + SUFFIX)
        self._has_rejects = True

    def _types_of(self, registered: str) -> dict[str, str]:
        described = self._run(f"DESCRIBE SELECT * FROM {registered}")  # noqa: S608 - a constant
        return {row[0]: row[1] for row in described}

    def _wanted(self, schema: pa.Schema) -> dict[str, str]:
        """Returns DuckDB's types of the columns, which are those of all tables of a schema."""
        key = self._value_type, schema.serialize().to_pybytes()
        if key not in _WANTED:
            # In memory, so that a refused schema leaves no file.
            with self._connected(":memory:"):
                _WANTED[key] = self._types(schema)
            while len(_WANTED) > _MAX_WANTED:
                del _WANTED[next(iter(_WANTED))]
        return _WANTED[key]

    def _types(self, schema: pa.Schema) -> dict[str, str]:
        """Returns DuckDB's types of the columns.

        Raises:
            ConfigError: There is to be a VARIANT, and this DuckDB or database takes none.
        """
        with self._registered(_rows=schema.empty_table()):
            found = self._types_of("_rows")
        if found.get("value") == "VARCHAR":
            found["value"] = self._value_type
        elif self._value_type != "JSON":
            raise ConfigError(
                "value_format is for documents that are one column, value: leave it out",
                option="target",
            )
        if self._value_type == "VARIANT" or any(has_variant(each.type) for each in schema):
            self._check_variant()
        return found

    def _check_variant(self) -> None:
        # 1.5 knows the type, but not in Arrow data, and makes a value of a null.
        if int(self._duckdb.__version__.partition(".")[0]) < 2:
            raise ConfigError(
                f"DuckDB {self._duckdb.__version__} does not support VARIANT: install 2.0 or later",
                option="target",
            )

    def _check_format(self) -> None:
        """Checks that the database can hold a VARIANT.

        Raises:
            ConfigError: An older DuckDB made it.
        """
        self._run("BEGIN")
        try:
            self._run("CREATE TABLE _dcp_rs_variant (value VARIANT)")
        except self._duckdb.Error as error:
            raise ConfigError(
                f"the database {self._file} is in a format that has no VARIANT, of an older"
                " DuckDB: use a new one",
                option="target",
            ) from error
        finally:
            self._run("ROLLBACK")

    def commit(self, commit: Commit) -> Commit:
        """See `dcp_rs.replication.Target.commit`."""
        return self.commit_together([(self, commit)])[0]

    @staticmethod
    def commit_together(commits: Sequence[tuple[DuckDBTarget, Commit]]) -> list[Commit]:
        """Applies commits to tables that share a connection, in one transaction.

        Returns:
            The commits as they were applied.
        """
        parts = [(each, rejecting(commit, each._too_deep(commit))) for each, commit in commits]
        first = parts[0][0]
        while True:
            begun: list[int] = []
            try:
                first._retrying(partial(first._apply, parts, begun))
            except (first._duckdb.IntegrityError, first._duckdb.DataError) as error:
                at = begun[-1]
                target, commit = parts[at]
                refused = refused_rows(len(commit.rows), partial(target._why_refused, commit))
                if not refused:
                    raise
                try:
                    parts[at] = target, rejecting(commit, refused)
                except DataError as failure:
                    raise failure from error
            else:
                for target, commit in parts:
                    target._has_rejects = target._has_rejects or bool(len(commit.rejects))
                return [commit for _, commit in parts]

    def _apply(self, parts: Sequence[tuple[DuckDBTarget, Commit]], begun: list[int]) -> None:
        """Applies commits; `begun` has the indices of those that were tried."""
        begun.clear()
        with self._transaction():
            for index, (target, commit) in enumerate(parts):
                begun.append(index)
                with target._given(commit):
                    target._write(commit)

    def _too_deep(self, commit: Commit) -> dict[int, str]:
        """Returns the rows whose JSON DuckDB 2.0 could not make a VARIANT of without crashing."""
        if self._value_type != "VARIANT" or "value" not in commit.rows.column_names:
            return {}
        deep = nested_beyond(_VARIANT_DEPTH, commit.rows["value"])
        reason = f"the document is nested more than {_VARIANT_DEPTH} levels deep"
        return dict.fromkeys(deep, reason)

    def _why_refused(self, commit: Commit, rows: pa.Array) -> str | None:
        """Returns why DuckDB refuses some rows of a commit; `None` if it takes them."""
        with self._given(replace(commit, rows=commit.rows.take(rows))) as some:
            self._run("BEGIN")
            try:
                self._write_rows(some)
            except (self._duckdb.IntegrityError, self._duckdb.DataError) as error:
                # The rest of the text may show values.
                kind, _, text = str(error).partition(": ")
                is_safe = text.startswith(("CHECK", "NOT NULL"))
                return f"DuckDB refuses it: {text if is_safe else kind}"
            finally:
                with contextlib.suppress(self._duckdb.Error):
                    self._run("ROLLBACK")
        return None

    @contextlib.contextmanager
    def _given(self, commit: Commit) -> Iterator[Commit]:
        """Has DuckDB know a commit's rows, deletes and so on by these names."""
        pa = require_pyarrow("a DuckDB target")
        settled = commit.settled
        if settled.num_rows:
            settled = settled.set_column(1, "key", settled["key"].cast(pa.binary()))
        given = {"_rows": commit.rows, "_deletes": commit.deletes, "_rejects": commit.rejects}
        if commit.endings is not None:
            given["_changed"] = commit.endings.changed
        if self._has_rejects:
            given["_settled"] = settled
        # It takes a few milliseconds to make one known.
        with self._registered(**{name: table for name, table in given.items() if len(table)}):
            yield commit

    def _write(self, commit: Commit) -> None:
        # First, so that rows of a writer that another has overtaken are not taken for bad ones.
        self._save(commit.state)
        self._write_rows(commit)
        self._write_rejects(commit)
        self._run(
            f"UPDATE {STATES} SET rows = (SELECT count(*) FROM {quote(self._table)})"  # noqa: S608
            " WHERE table_name = ?",
            [self._name],
        )

    def _write_rows(self, commit: Commit) -> None:
        if commit.schema is not None:
            self._grow(commit.schema)
        table = quote(self._table)
        for condition in commit.removals:
            self._run(f"DELETE FROM {table} WHERE {condition}")  # noqa: S608 - integers only
        if len(commit.deletes):
            self._run(f"DELETE FROM {table} t USING _deletes d WHERE {_SAME}")  # noqa: S608
        if commit.endings is not None:
            self._end(commit.endings)
        if len(commit.rows):
            self._insert(commit.rows, is_new=commit.has_new_rows_only)

    def _end(self, endings: Endings) -> None:
        """Changes rows of a history."""
        table = quote(self._table)
        opens = f"{IS_CURRENT} = true, {VALID_TO} = NULL, {ENDED_BY} = NULL"
        for condition in endings.reopened:
            self._run(f"UPDATE {table} SET {opens} WHERE {condition}")  # noqa: S608 - integers
        at = f"'{endings.at:%Y-%m-%d %H:%M:%S.%f}+00'::TIMESTAMPTZ"
        ends = f"{IS_CURRENT} = false, {VALID_TO} = greatest({VALID_FROM}, {at})"
        for condition in endings.ended:
            self._run(f"UPDATE {table} SET {ends} WHERE {IS_CURRENT} AND ({condition})")  # noqa: S608
        if len(endings.changed):
            sets = ", ".join(f"{name} = d.{name}" for name in CHANGED)
            self._run(
                f"UPDATE {table} t SET {sets} FROM _changed d"  # noqa: S608 - own names
                f" WHERE {_SAME} AND t.seqno = d.seqno AND t.generation = d.was_generation"
            )

    def newest(self, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
        """See `dcp_rs.replication.HistoryTarget.newest`."""
        from dcp_rs.replication.history import newest_of

        query = newest_of(quote(self._table), "_identities", lost)
        with self._registered(_identities=identities):
            found: pa.Table = self._connection.sql(query).to_arrow_table()
        return found

    def _insert(self, rows: pa.Table, *, is_new: bool) -> None:
        names = list(map(quote_column, rows.column_names))
        cells = self._cells(rows.schema)
        if is_new:
            self._run(
                f"INSERT INTO {quote(self._table)} ({', '.join(names)})"  # noqa: S608 - quoted
                f" SELECT {cells} FROM _rows"
            )
        else:
            self._upsert(names, cells)

    def _upsert(self, names: list[str], cells: str) -> None:
        # Not OR REPLACE: that fails if the table has another unique index, and would reset columns
        # that are not ours. To set a column of an index, even to what it has, takes DuckDB six
        # times as long: it removes the row and adds another one.
        kept = set(map(quote_column, IDENTITY))
        taken = ", ".join(f"{name} = excluded.{name}" for name in names if name not in kept)
        self._run(
            f"INSERT INTO {quote(self._table)} ({', '.join(names)}) SELECT {cells} FROM _rows"  # noqa: S608
            f" ON CONFLICT ({', '.join(IDENTITY)}) DO UPDATE SET {taken}"
        )

    def _write_rejects(self, commit: Commit) -> None:
        if self._has_rejects and commit.state.mode != "log":
            for condition in commit.settling:
                self._run(f"DELETE FROM {self._rejects} WHERE {condition}")  # noqa: S608 - integers
            if len(commit.settled):
                self._run(f"DELETE FROM {self._rejects} t USING _settled d WHERE {_SAME}")  # noqa: S608
        if not len(commit.rejects):
            return
        if not self._has_rejects:
            types = self._types_of("_rejects")
            columns = ", ".join(f"{quote_column(name)} {kind}" for name, kind in types.items())
            self._run(f"CREATE TABLE {self._rejects} ({columns})")
        self._run(f"INSERT INTO {self._rejects} SELECT * FROM _rejects")  # noqa: S608

    def _cells(self, schema: pa.Schema) -> str:
        """Returns what to select of the rows: documents as DuckDB's JSON, or as malformed.

        DuckDB refuses some that others take for JSON, such as those with half a surrogate pair.
        """
        columns = schema.names
        if "value" not in columns or str(schema.field("value").type) != "string":
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
                f"INSERT INTO {STATES} (table_name, commits, generation, complete_generation,"  # noqa: S608
                " state) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1"
            )
            values = [self._name, *values]
        else:
            statement = (
                f"UPDATE {STATES} SET commits = ?, generation = ?, complete_generation = ?,"  # noqa: S608
                " state = ? WHERE table_name = ? AND commits = ? RETURNING 1"
            )
            values += [self._name, state.commits - 1]
        if not self._run(statement, values):
            raise overtaken(self._table)

    def drop(self) -> None:
        """Removes the table, its state and its rejects."""
        with self._transaction():
            self._run(f"DROP TABLE IF EXISTS {quote(self._table)}")
            if self._has_rejects:
                self._run(f"DROP TABLE {self._rejects}")
            self._run(f"DELETE FROM {STATES} WHERE table_name = ?", [self._name])  # noqa: S608

    def close(self) -> None:
        """Closes the connection, if it is its own."""
        if self._connection is not None and self._shared is None:
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
                # Not in a transaction that has failed, whose end forgets them.
                with contextlib.suppress(self._duckdb.Error):
                    self._connection.unregister(name)

    def __repr__(self) -> str:
        return f"DuckDBTarget({str(self._file)!r}, {self._table!r})"


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
