"""DuckLake: tables and their states in one lake, written in one transaction."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._libraries import require_pyarrow
from dcp_rs.replication.duckdb import DuckDBTarget
from dcp_rs.replication.duckdb_catalog import STATES
from dcp_rs.replication.duckdb_database import DuckDBDatabase
from dcp_rs.replication.ducklake_catalogs import Lake
from dcp_rs.replication.ducklake_files import compact, forget
from dcp_rs.replication.target import IDENTITY, Maintained, overtaken, quote, refuse_variants

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from dcp_rs.replication.duckdb_catalog import Catalog
    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.target import Address, Commit

_SAME = " AND ".join(f"t.{name} = d.{name}" for name in IDENTITY)


class DuckLakeTarget(DuckDBTarget):
    """A table of a DuckLake.

    A lake has neither keys nor locks. What keeps two writers apart is the row of the table's state:
    each start puts a name of its own there, and each commit changes it. Of two transactions that
    change the table of states, DuckLake lets the first commit, and the other is tried again.

    Args:
        lake: The lake; created if it does not exist.
        table: Name of the table, as `table` or `schema.table`; created if it does not exist.
        connection: An open connection to the lake, which several tables share.
        catalog: Gives what is in the lake, if several tables share that.

    Raises:
        ImportError: duckdb is not installed.
    """

    # Each commit is a version of the lake, with files of its own.
    commits_when_idle: ClassVar[bool] = False
    compacts: ClassVar[bool] = True
    _has_keys: ClassVar[bool] = False

    def __init__(
        self,
        lake: Lake,
        table: str,
        *,
        connection: Any = None,
        catalog: Callable[[], Catalog] | None = None,
    ) -> None:
        super().__init__(lake, table, connection=connection, catalog=catalog)
        self._lake = lake
        self._writer = secrets.token_hex(8)
        # The last commit when it was opened, and the rows that there were.
        self._start = 0, 0

    @classmethod
    def at(cls, address: Address) -> DuckLakeTarget:
        """Creates the target for `ducklake+sqlite:///catalog.db?data=/folder&table=name`.

        The table is `documents` by default.

        Raises:
            ConfigError: The URL names no catalog, or has an option that there is not.
        """
        return cls(Lake(address), address.options.get("table", "documents"))

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "DuckLake")
        return super().open(schema, mode)

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        pa = require_pyarrow("a DuckLake target")
        signs = (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating)
        return any(
            is_one(old) and is_one(new) and old.bit_width < new.bit_width for is_one in signs
        )

    def _make_states(self) -> None:
        """Makes this writer the one whose commits count."""
        self._run(
            f"CREATE TABLE IF NOT EXISTS {STATES} (table_name VARCHAR, commits BIGINT,"
            " generation BIGINT, complete_generation BIGINT, state VARCHAR, rows BIGINT,"
            " writer VARCHAR)"
        )
        # Of writers that have committed nothing.
        self._run(f"DELETE FROM {STATES} WHERE table_name = ? AND commits = 0", [self._name])  # noqa: S608
        changed = self._run(
            f"UPDATE {STATES} SET writer = ? WHERE table_name = ?",  # noqa: S608 - a constant
            [self._writer, self._name],
        )
        if changed == [(0,)]:
            self._run(
                f"INSERT INTO {STATES} (table_name, commits, writer) VALUES (?, 0, ?)",  # noqa: S608
                [self._name, self._writer],
            )
        self._start = self._found()[0][0], self._count()

    def _found(self) -> list[Any]:
        """Returns commits, writer and rows of the states, of which there should be one."""
        return self._run(
            f"SELECT commits, writer, rows FROM {STATES} WHERE table_name = ?",  # noqa: S608
            [self._name],
        )

    def _write(self, commit: Commit) -> None:
        # First, so that rows of a writer that another has overtaken are not taken for bad ones.
        found = self._found()
        state = commit.state
        if [row[:2] for row in found] == [(state.commits, self._writer)]:
            return  # The answer to an earlier attempt was lost.
        if [row[:2] for row in found] != [(state.commits - 1, self._writer)]:
            raise overtaken(self._table)
        before = self._count()
        self._write_rows(commit)
        self._write_rejects(commit)
        # What others do to the rows between commits is to be noticed at the next start; what they
        # did before this one was.
        last, counted = self._start
        rows = counted if found[0][0] == last else found[0][2]
        rows += self._count() - before
        self._run(
            f"UPDATE {STATES} SET commits = ?, generation = ?, complete_generation = ?, state = ?,"  # noqa: S608
            " rows = ? WHERE table_name = ?",
            [
                state.commits,
                state.generation,
                state.complete_generation,
                state.to_json(),
                rows,
                self._name,
            ],
        )

    def _upsert(self, names: list[str], cells: str) -> None:
        taken = ", ".join(f"{name} = d.{name}" for name in names)
        self._run(
            f"MERGE INTO {quote(self._table)} t USING (SELECT {cells} FROM _rows) d ON {_SAME}"  # noqa: S608
            f" WHEN MATCHED THEN UPDATE SET {taken} WHEN NOT MATCHED THEN"
            f" INSERT ({', '.join(names)}) VALUES ({', '.join(f'd.{name}' for name in names)})"
        )

    def maintain(self, keep: float | None) -> Maintained | None:
        """See `dcp_rs.replication.MaintainedTarget`."""
        ((_, writer, rows),) = self._found()
        if writer != self._writer or rows != self._count():
            return None
        compacted, made = compact(self._run, self._place)
        return Maintained(compacted, made, 0 if keep is None else forget(self._run, keep))

    def is_unavailable(self, error: Exception) -> bool:
        """See `dcp_rs.replication.outage.is_unavailable`."""
        return self._lake.is_unavailable(error)

    def __repr__(self) -> str:
        return f"DuckLakeTarget({str(self._file)!r}, {self._table!r})"


class DuckLakeDatabase(DuckDBDatabase):
    """A DuckLake with several tables, which are written in one transaction.

    Args:
        lake: The lake; created if it does not exist.

    Raises:
        ImportError: duckdb is not installed.
    """

    commits_when_idle: ClassVar[bool] = False
    compacts: ClassVar[bool] = True

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        self._lake = lake

    @classmethod
    def at(cls, address: Address) -> DuckLakeDatabase:
        """Creates the database for `ducklake+sqlite:///catalog.db?data=/folder`.

        Raises:
            ConfigError: The URL names no catalog, or has an option that there is not.
        """
        return cls(Lake(address))

    def target(self, table: str) -> DuckLakeTarget:
        """See `dcp_rs.replication.Database.target`."""
        return DuckLakeTarget(self._lake, table, connection=self._connection, catalog=self._known)

    def is_unavailable(self, error: Exception) -> bool:
        """See `dcp_rs.replication.outage.is_unavailable`."""
        return self._lake.is_unavailable(error)

    def __repr__(self) -> str:
        return f"DuckLakeDatabase({str(self._file)!r})"
