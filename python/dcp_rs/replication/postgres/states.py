"""The table of states of a PostgreSQL database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_rs._logging import about
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.postgres.relation import STATES, names_of
from dcp_rs.replication.postgres.session import qualified
from dcp_rs.replication.sharing import SUFFIX, called, split_key
from dcp_rs.replication.state import State
from dcp_rs.replication.target import LACKED, overtaken

if TYPE_CHECKING:
    from dcp_rs.replication.postgres.relation import Relation
    from dcp_rs.replication.postgres.session import Session
    from dcp_rs.replication.sharing import BucketShare

_log = logging.getLogger("dcp_rs.replication")

_COLUMNS = ("table_name", "commits", "generation", "complete_generation", "state", "rows")
_ROWS = "ADD COLUMN IF NOT EXISTS rows bigint"
NOTHING = "{}"
"""State of a share that has not committed, which earlier releases can read."""


class Found(NamedTuple):
    """A state of the table, as it was saved.

    Attributes:
        name: Name that it is saved under.
        state: The state; `None` if only other shares of the table have one.
        rows: Rows that the table, or the share of it, had after the commit; `None` if that is not
            known.
    """

    name: str
    state: State | None
    rows: int | None


def _of(number: str | None) -> str:
    return "one process" if number is None else f"{number} shares"


def has_states(session: Session) -> bool:
    """Whether the table of states exists."""
    return session.run("SELECT to_regclass($1) IS NOT NULL", STATES)[0][0] is True


class States:
    """The table `dcp_rs_replication`, made if it does not exist.

    Args:
        session: Session, in a transaction.
        changes: Whether to add what an older release did not make.

    Raises:
        ConfigError: There is no schema for it.
    """

    def __init__(self, session: Session, *, changes: bool = True) -> None:
        self._session = session
        found = self._look()
        if not found:
            session.wait_for(STATES)
            found = self._look()
        # Without the right to create tables, `CREATE TABLE IF NOT EXISTS` fails though it exists.
        if found:
            schema, oid, is_owner = found[0]
            self.schema: str = schema
            self.table = qualified(schema, STATES)
            self._has_rows = self._gain_rows(oid, may_add=changes and is_owner, warns=changes)
            return
        schema = session.run("SELECT current_schema()::text")[0][0]
        if schema is None:
            raise ConfigError(
                f"no schema of search_path exists, so none for the table {STATES}: create one",
                option="target",
            )
        self.schema = schema
        self.table = qualified(schema, STATES)
        self._has_rows = True
        session.run(
            f"CREATE TABLE {self.table} (table_name text PRIMARY KEY, commits bigint,"
            " generation bigint, complete_generation bigint, state text, rows bigint)"
        )

    def _look(self) -> list[Any]:
        return self._session.run(
            "SELECT nspname::text, c.oid::bigint, pg_has_role(relowner, 'USAGE')"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE c.oid = to_regclass($1)",
            STATES,
        )

    def _gain_rows(self, oid: int, *, may_add: bool, warns: bool) -> bool:
        """Adds the column that an older release did not make."""
        if self._session.run(
            "SELECT 1 FROM pg_attribute WHERE attrelid = $1::bigint::oid AND attname = 'rows'"
            " AND NOT attisdropped",
            oid,
        ):
            return True
        if may_add:
            self._session.run(f"ALTER TABLE {self.table} {_ROWS}")
        elif warns:
            _log.warning(
                "nothing notices rows that others add or remove, since this role may not alter the "
                "table of states: let its owner run ALTER TABLE %s %s",
                self.table,
                _ROWS,
                extra=about("edits_not_noticed", table=self.table),
            )
        return may_add

    def find(self, relation: Relation, given: str, share: BucketShare | None) -> Found | None:
        """Returns the state of a table, or of a share of it, under whatever name it was saved.

        Raises:
            ConfigError: There are two.
            CheckpointError: It is damaged, or is that of another number of shares.
        """
        there = names_of(self._session, self.table, relation)
        self._check_number(there, given, share)
        names = (
            there if share is None else [key for key in there if split_key(key)[1] == str(share)]
        )
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(sorted(names))} are the same table, and each has a state: "
                f"keep the row of {self.table} that is right, and delete the other",
                option="target",
            )
        if share is not None and there and not names:
            return Found(share.key(given), None, None)
        if not names:
            self._refuse_elsewhere(relation, given)
            return None
        rows = "rows" if self._has_rows else "NULL::bigint"
        statement = f"SELECT state, {rows} FROM {self.table} WHERE table_name = $1"  # noqa: S608
        text, count = self._session.run(statement, names[0])[0]
        return Found(names[0], None if text == NOTHING else State.from_json(text), count)

    def _check_number(self, names: list[str], given: str, share: BucketShare | None) -> None:
        """Checks that a table is written by as many processes as before.

        Raises:
            CheckpointError: It is not.
        """
        of = None if share is None else str(share.of)
        for name in names:
            known = split_key(name)[1]
            before = None if known is None else known.partition("/")[2]
            if before == of:
                continue
            goes_on = "leave out share"
            if before is not None:
                goes_on = f"start it with the shares 1/{before} to {before}/{before}"
            raise CheckpointError(
                f"table {given} is that of {_of(before)}, and cannot become that of {_of(of)}:"
                f" {goes_on}; or replicate to a new table; or stop all that write to it, drop it,"
                f" and delete {', '.join(sorted(names))} from {self.table}"
            )

    def lacked(self, relation: Relation) -> None:
        """Notes of a table, and of all shares of it, that it lacked columns until now.

        Each is loaded again: by the next start, of which a share that is running hears with its
        next commit.
        """
        if not self._has_rows:
            return
        for name in names_of(self._session, self.table, relation):
            self._session.run(
                f"UPDATE {self.table} SET rows = {LACKED} WHERE table_name = $1"  # noqa: S608
                " AND state <> $2",
                name,
                NOTHING,
            )

    def begin(self, name: str) -> None:
        """Notes that there is a share, before its first commit."""
        self._session.run(
            f"INSERT INTO {self.table} (table_name, commits, generation, complete_generation,"  # noqa: S608
            " state) VALUES ($1, 0, 0, 0, $2) ON CONFLICT DO NOTHING",
            name,
            NOTHING,
        )

    def _refuse_elsewhere(self, relation: Relation, given: str) -> None:
        """Looks for the state in the tables of other schemas.

        Raises:
            ConfigError: It is there.
        """
        if relation.oid is None:
            return
        others = self._session.run(
            "SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE relname = $1 AND relkind = 'r' AND relpersistence <> 't' AND nspname <> $2"
            " AND has_schema_privilege(n.oid, 'USAGE')"
            " AND has_table_privilege(c.oid, 'SELECT')",
            STATES,
            self.schema,
        )
        for (schema,) in others:
            names = {f"{relation.schema}.{relation.name}"}
            if schema == relation.schema:
                names.add(relation.name)
            for name in names:
                statement = (
                    f"SELECT 1 FROM {qualified(schema, STATES)}"  # noqa: S608 - quoted
                    " WHERE regexp_replace(table_name, $2, '') = $1"
                )
                if self._session.run(statement, name, SUFFIX):
                    raise ConfigError(
                        f"the state of table {given} is in {schema}.{STATES}: put {schema}"
                        " first in search_path",
                        option="target",
                    )

    def fence(self, name: str, state: State, *, is_lacking: bool) -> None:
        """Keeps others from committing while this commit is made.

        Args:
            name: Name of the state.
            state: The state that is going to be saved.
            is_lacking: Whether it is known that the table lacked columns.

        Raises:
            ConcurrentWriterError: The state is not that of the commit before.
            ConfigError: The table lacked columns, which another share has added again.
        """
        if state.commits == 1 and state.share is None:
            return
        rows = "rows" if self._has_rows else "NULL::bigint"
        found = self._session.run(
            f"SELECT {rows} FROM {self.table}"  # noqa: S608
            " WHERE table_name = $1 AND commits = $2 FOR UPDATE",
            name,
            state.commits - 1,
        )
        if not found:
            raise overtaken(called(name))
        if found[0][0] == LACKED and not is_lacking:
            raise ConfigError(
                f"columns of {called(name)} were dropped while it was written to: start again",
                option="target",
            )

    def forget(self, name: str) -> None:
        """Removes a state."""
        self._session.run(f"DELETE FROM {self.table} WHERE table_name = $1", name)  # noqa: S608

    def save(self, name: str, state: State, rows: int) -> None:
        """Saves a state.

        Raises:
            ConcurrentWriterError: The state is not that of the commit before.
        """
        values: list[object] = [
            name,
            state.commits,
            state.generation,
            state.complete_generation,
            state.to_json(),
            *([rows] if self._has_rows else []),
        ]
        columns = _COLUMNS[: len(values)]
        if state.commits == 1 and state.share is None:
            places = ", ".join(f"${place}" for place in range(1, len(values) + 1))
            statement = (
                f"INSERT INTO {self.table} ({', '.join(columns)}) VALUES ({places})"  # noqa: S608
                " ON CONFLICT DO NOTHING RETURNING 1"
            )
        else:
            taken = ", ".join(f"{column} = ${place}" for place, column in enumerate(columns, 1))
            statement = (
                f"UPDATE {self.table} SET {taken}"  # noqa: S608
                " WHERE table_name = $1 AND commits = $2 - 1 RETURNING 1"
            )
        if not self._session.run(statement, *values):
            raise overtaken(called(name))
