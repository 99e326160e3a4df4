"""A session with a PostgreSQL server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dcp_rs.replication.target import quote_column

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_SAVEPOINT = "dcp_rs"


def _connected(uri: str) -> Any:
    """Connects, as `adbc_driver_postgresql.dbapi.connect` does, and releases what fails.

    That leaves 14 KB for each attempt, of which an outage has hundreds.
    """
    import adbc_driver_manager as manager
    import adbc_driver_postgresql
    from adbc_driver_manager import dbapi

    path = adbc_driver_postgresql._driver_path()  # noqa: SLF001 - there is no other way to it
    database = _made(manager.AdbcDatabase, driver=path, uri=uri)
    try:
        connection = _made(manager.AdbcConnection, database)
    except BaseException:
        database.close()
        raise
    return dbapi.Connection(database, connection, autocommit=True)


def _made(kind: Any, *arguments: Any, **options: Any) -> Any:
    """Makes a handle of the driver; one whose constructor fails is not released by itself."""
    made = kind.__new__(kind)
    try:
        made.__init__(*arguments, **options)
    except BaseException:
        made.close()
        raise
    return made


class Session:
    """A connection whose transactions and savepoints are begun and ended by this class.

    The driver's own transactions allow no savepoint to be returned to.

    Args:
        driver: The module `adbc_driver_postgresql.dbapi`.
        uri: Database, as libpq has it.
    """

    def __init__(self, driver: Any, uri: str) -> None:
        self.error: type[Exception] = driver.Error
        self._connection = _connected(uri)
        # Temporary tables by what they hold, and those with rows of the current transaction.
        self._staging: dict[tuple[str, object], str] = {}
        self._filled: set[str] = set()
        # The driver sends UTF-8, and the server takes it for what the database or PGCLIENTENCODING
        # says.
        self.run("SET client_encoding TO 'UTF8'")

    def run(self, statement: str, *values: object) -> list[Any]:
        """Runs a statement and returns its rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            rows: list[Any] = cursor.fetchall() if cursor.description else []
            return rows

    def wait_for(self, *names: str) -> None:
        """Waits until no other transaction does what these names, joined, stand for."""
        self.run("SELECT pg_advisory_xact_lock(hashtext('dcp_rs'), hashtext($1))", "..".join(names))

    def read(self, statement: str) -> pa.Table:
        """Runs a query and returns its rows as Arrow columns."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetch_arrow_table()

    def change(self, statement: str) -> int:
        """Runs a statement and returns how many rows it changed."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.rowcount)

    def copy(self, rows: pa.Table, table: str, schema: str | None = None) -> int:
        """Appends rows to a table by `COPY`, without a schema to a temporary one."""
        with self._connection.cursor() as cursor:
            return int(
                cursor.adbc_ingest(
                    table,
                    rows.to_reader(),
                    mode="append",
                    temporary=schema is None,
                    db_schema_name=schema,
                )
            )

    def staging(self, name: str, like: str, columns: str, kind: object) -> str:
        """Returns a temporary table, which is empty again after each transaction.

        Tables that need columns of the same types share one.

        Args:
            name: What it is called, or begins with.
            like: Table that has its columns.
            columns: Names of the columns, quoted.
            kind: Tells columns of the same types from others.
        """
        found = self._staging.get((name, kind))
        if found is None:
            count = sum(base == name for base, _ in self._staging)
            found = f"{name}_{count}" if count else name
            self.run(
                f"CREATE TEMPORARY TABLE {found} ON COMMIT DELETE ROWS"  # noqa: S608 - quoted
                f" AS SELECT {columns} FROM {like} WITH NO DATA"
            )
            self._staging[name, kind] = found
        return found

    def stage(self, staging: str, rows: pa.Table) -> None:
        """Fills a temporary table."""
        if staging in self._filled:
            self.run(f"TRUNCATE {staging}")
        self._filled.add(staging)
        self.copy(rows, staging)

    @contextlib.contextmanager
    def transaction(self, kind: str = "ISOLATION LEVEL READ COMMITTED") -> Iterator[None]:
        """Commits what is done in the block, or undoes all of it."""
        self.run(f"BEGIN {kind}")
        self._filled.clear()
        made = dict(self._staging)
        try:
            # A deferred constraint would refuse a row when nobody can tell which.
            self.run("SET CONSTRAINTS ALL IMMEDIATE")
            yield
            self.run("COMMIT")
        except BaseException:
            self._staging = made
            with contextlib.suppress(self.error):
                self.run("ROLLBACK")
            raise

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undoes what is done in the block if it raises; the transaction goes on."""
        self.run(f"SAVEPOINT {_SAVEPOINT}")
        try:
            yield
        except self.error:
            self.run(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            self.run(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            raise
        self.run(f"RELEASE SAVEPOINT {_SAVEPOINT}")

    def close(self) -> None:
        """Closes the connection; an open transaction is undone."""
        self._connection.close()


def qualified(schema: str, name: str) -> str:
    """Returns the name of a table with that of its schema, quoted for SQL."""
    return f"{quote_column(schema)}.{quote_column(name)}"
