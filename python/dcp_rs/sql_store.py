"""Checkpoints in a table of an SQL database."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_rs import _checks
from dcp_rs._claims import Claims, in_ranges, joined
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import ModuleType

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")

# Placeholders by parameter style.
_PLACEHOLDERS = {
    "qmark": ["?", "?", "?"],
    "format": ["%s", "%s", "%s"],
    "pyformat": ["%s", "%s", "%s"],
    "numeric": [":1", ":2", ":3"],
    "named": [":1", ":2", ":3"],
}

# How long to retry a claim whose rows others insert at the same time.
_CONTENDED_SECONDS = 10.0


class _Row(NamedTuple):
    owner: str
    document: str | None


class SqlStore:
    """Keeps a checkpoint in a table, a row for each vBucket.

    You can save positions and results in one transaction: pass your connection to `save_with`, and
    commit both. Each change then takes effect exactly once, even if the reader crashes.

    Readers can share a table, each with its own vBuckets. A stream that starts from the store, or
    otherwise its first save, takes over its vBuckets; after that, saves of their previous reader
    fail.

        >>> import dcp_rs, os, sqlite3, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def connect():
        ...     return sqlite3.connect(os.path.join(folder.name, "orders.db"))
        >>> store = dcp_rs.SqlStore(connect, table="positions")
        >>> results = connect()
        >>> _ = results.execute("CREATE TABLE orders (key TEXT PRIMARY KEY)")
        >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     _ = cluster.upsert("order_1", b"{}")
        ...     for batch in client.stream(start=store, until="now"):
        ...         with results:  # one transaction
        ...             keys = [(row["key"],) for row in batch.rows()]
        ...             _ = results.executemany("INSERT INTO orders VALUES (?)", keys)
        ...             store.save_with(results, batch.checkpoint)
        >>> results.execute("SELECT key FROM orders").fetchall()
        [('order_1',)]
        >>> len(store.load())
        1
        >>> results.close()
        >>> folder.cleanup()

    Errors of the driver are not wrapped.

    Args:
        connect: Function that returns a new connection of a DB-API 2.0 driver, such as those for
            SQLite and PostgreSQL, not in autocommit mode. Each load, claim and save calls it and
            closes the connection. DuckDB's are refused: their cursors do not share a transaction.
        table: Name of the table, optionally with a schema; one table per checkpoint. The store
            creates it if it does not exist:
            `vbucket INTEGER PRIMARY KEY, owner VARCHAR(16) NOT NULL, document TEXT`.
    """

    def __init__(self, connect: Callable[[], Any], *, table: str = "dcp_rs_positions") -> None:
        if not callable(connect):
            raise _checks.wrong_type("connect", connect, "a function that returns a connection")
        _checks.text("table", table)
        if _NAME.fullmatch(table) is None:
            raise ConfigError(
                f"{table!r} is not a table name: use letters, digits and _, optionally with "
                "a schema and a dot before it",
                option="table",
            )
        self._connect = connect
        self._table = table
        self._claims = Claims()
        self._is_made = False

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._table

    def load(self) -> Checkpoint | None:
        """Reads the table; `None` if it has no positions.

        Raises:
            CheckpointError: A row is damaged.
        """
        with self._transaction() as (_, cursor, sql):
            return _join(self._rows(cursor, sql, range(0x10000)))

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes over vBuckets and returns their stored positions, or `None` if there are none.

        Raises:
            CheckpointError: A row is damaged.
        """
        wanted = sorted(set(_checks.vbuckets(vbuckets)))
        if not wanted:
            return None
        self._insert_missing(wanted)
        with self._transaction() as (_, cursor, sql):
            # Row by row in one order, as saves do, so that no two wait for each other.
            owners = [(self._claims.token, each) for each in wanted]
            cursor.executemany(sql("UPDATE {table} SET owner = {1} WHERE vbucket = {2}"), owners)
            rows = self._rows(cursor, sql, wanted)
        self._claims.vbuckets.update(wanted)
        return _join(rows)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the rows whose positions have moved, in one transaction.

        Raises:
            TakenOverError: Another reader has taken over one of the vBuckets; nothing was written.
            CheckpointError: Another reader has saved a later position; nothing was written.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        unclaimed = sorted(checkpoint.seqnos.keys() - self._claims.vbuckets)
        if unclaimed:
            with self._transaction() as (_, cursor, sql):
                # A claim that is behind must not take anything over.
                joined(_join(self._rows(cursor, sql, unclaimed)), checkpoint)
            self.claim(unclaimed)
        with self._transaction() as (connection, _, _):
            self.save_with(connection, checkpoint)

    def save_with(self, connection: Any, checkpoint: Checkpoint) -> None:
        """Writes the rows whose positions have moved, in the caller's transaction.

        Commit it afterwards, or roll it back if this raises.

        Args:
            connection: A connection to the same database.
            checkpoint: The checkpoint to save, such as `batch.checkpoint`.

        Raises:
            TakenOverError: Another reader has taken over one of the vBuckets: roll back.
            CheckpointError: Another reader has saved a later position: roll back.
            ConfigError: The store has not claimed the vBuckets: start the stream from it.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        named, claimed = sorted(checkpoint.seqnos), self._claims.vbuckets
        if not claimed.issuperset(named):
            unclaimed = in_ranges(set(named) - claimed)
            raise ConfigError(
                f"this store has not claimed vBuckets {unclaimed}: start the stream "
                "from the store, or call its claim() before the transaction",
                option="checkpoint",
            )
        if not claimed:
            return
        sql = _Sql(connection, self._table)
        with closing(connection.cursor()) as cursor:
            rows = self._rows(cursor, sql, claimed)
            self._check(rows)
            joined(_join({each: rows[each] for each in named}), checkpoint)
            documents = {each: checkpoint.restricted_to([each]).to_json() for each in named}
            moved = [
                (documents[each], each, self._claims.token)
                for each in named
                if rows[each].document != documents[each]
            ]
            if not moved:
                return
            # Queries may show the table as it was when the transaction began: only an update knows
            # who owns a row now.
            cursor.executemany(
                sql("UPDATE {table} SET document = {1} WHERE vbucket = {2} AND owner = {3}"),
                moved,
            )
            if cursor.rowcount != len(moved):
                # Not every driver adds them up, but a transaction sees what it has written itself.
                written = self._rows(cursor, sql, [each for _, each, _ in moved])
                self._check(
                    {
                        each: row if row.document == documents[each] else _Row("", None)
                        for each, row in written.items()
                    },
                    among=written,
                )

    def _check(self, rows: dict[int, _Row], *, among: Iterable[int] | None = None) -> None:
        owners = {vbucket: row.owner for vbucket, row in rows.items()}
        self._claims.check(owners, f"table {self._table}", among)

    def _rows(self, cursor: Any, sql: _Sql, wanted: Collection[int]) -> dict[int, _Row]:
        cursor.execute(
            sql("SELECT vbucket, owner, document FROM {table} WHERE vbucket BETWEEN {1} AND {2}"),
            (min(wanted), max(wanted)),
        )
        rows = {int(vbucket): _Row(*rest) for vbucket, *rest in cursor.fetchall()}
        return {vbucket: rows[vbucket] for vbucket in wanted if vbucket in rows}

    def _insert_missing(self, wanted: list[int]) -> None:
        """Inserts a row for each missing vBucket: only existing rows can be locked."""
        end = time.monotonic() + _CONTENDED_SECONDS
        while True:
            with self._transaction() as (_, cursor, sql):
                there = self._rows(cursor, sql, wanted)
            missing = [(each, "", None) for each in wanted if each not in there]
            if not missing:
                return
            try:
                with self._transaction() as (_, cursor, sql):
                    cursor.executemany(sql("INSERT INTO {table} VALUES ({1}, {2}, {3})"), missing)
            except sql.driver.Error:
                # Another reader has inserted some of them.
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[Any, Any, _Sql]]:
        opened = self._connect()
        sql = _Sql(opened, self._table)
        with closing(opened) as connection:
            if _is_autocommit(connection):
                raise ConfigError(
                    "returns connections in autocommit mode: turn it off", option="connect"
                )
            if not self._is_made:
                self._create(connection, sql)
                self._is_made = True
            with closing(connection.cursor()) as cursor:
                try:
                    yield connection, cursor, sql
                    connection.commit()
                except BaseException:
                    with contextlib.suppress(sql.driver.Error):
                        connection.rollback()
                    raise

    def _create(self, connection: Any, sql: _Sql) -> None:
        """Creates the table if it does not exist; only then is the privilege needed."""
        if self._is_there(connection, sql):
            return
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute(
                    sql(
                        "CREATE TABLE {table} (vbucket INTEGER PRIMARY KEY,"
                        " owner VARCHAR(16) NOT NULL, document TEXT)"
                    )
                )
            connection.commit()
        except sql.driver.Error:
            connection.rollback()
            if not self._is_there(connection, sql):
                raise

    def _is_there(self, connection: Any, sql: _Sql) -> bool:
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute(sql("SELECT vbucket FROM {table} WHERE vbucket < 0"))
                cursor.fetchall()
        except sql.driver.Error:
            connection.rollback()
            return False
        return True

    def __repr__(self) -> str:
        return f"<dcp_rs.SqlStore table {self._table!r}>"


class _Sql:
    """Statements in the parameter style of a connection's driver."""

    def __init__(self, connection: Any, table: str) -> None:
        self.driver = _driver_of(connection)
        self._table = table
        self._marks = _PLACEHOLDERS[self.driver.paramstyle]

    def __call__(self, statement: str) -> str:
        return statement.format("", *self._marks, table=self._table)


def _is_autocommit(connection: Any) -> bool:
    # With sqlite3, the level `None` means it too, unless a transaction was begun.
    is_begun = getattr(connection, "in_transaction", True)
    return getattr(connection, "autocommit", False) is True or (
        not is_begun and getattr(connection, "isolation_level", "") is None
    )


def _driver_of(connection: Any) -> ModuleType:
    """Finds the module of a connection, which has a `paramstyle` and errors by DB-API 2.0."""
    name = type(connection).__module__
    if name.partition(".")[0] in {"duckdb", "_duckdb"}:
        raise ConfigError(
            "the cursors of DuckDB's connections do not share a transaction, which the "
            "store needs: use SQLite, PostgreSQL or dcp_rs.FileStore",
            option="connect",
        )
    while name:
        module = sys.modules.get(name)
        if getattr(module, "paramstyle", None) in _PLACEHOLDERS and hasattr(module, "Error"):
            return module  # type: ignore[return-value]
        name = name.rpartition(".")[0]
    raise ConfigError(
        f"must return a connection of DB-API 2.0, not {type(connection).__name__}",
        option="connect",
    )


def _join(rows: dict[int, _Row]) -> Checkpoint | None:
    found: Checkpoint | None = None
    for row in rows.values():
        if row.document is not None:
            part = Checkpoint.from_json(row.document)
            found = part if found is None else found.merged_with(part)
    return found
