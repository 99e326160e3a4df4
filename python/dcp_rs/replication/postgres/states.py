"""The table of states of a PostgreSQL database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.postgres.relation import STATES, names_of
from dcp_rs.replication.postgres.session import qualified
from dcp_rs.replication.state import State
from dcp_rs.replication.target import overtaken

if TYPE_CHECKING:
    from dcp_rs.replication.postgres.relation import Relation
    from dcp_rs.replication.postgres.session import Session

_log = logging.getLogger("dcp_rs.replication")

_COLUMNS = ("table_name", "commits", "generation", "complete_generation", "state", "rows")
_ROWS = "ADD COLUMN IF NOT EXISTS rows bigint"


class Found(NamedTuple):
    """A state of the table, as it was saved.

    Attributes:
        name: Name that it is saved under.
        state: The state.
        rows: Rows that the table had after the commit; `None` if that is not known.
    """

    name: str
    state: State
    rows: int | None


def has_states(session: Session) -> bool:
    """Whether the table of states exists."""
    return session.run("SELECT to_regclass($1) IS NOT NULL", STATES)[0][0] is True


class States:
    """The table `dcp_rs_replication`, made if it does not exist.

    Args:
        session: Session, in a transaction.

    Raises:
        ConfigError: There is no schema for it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        found = session.run(
            "SELECT nspname::text, c.oid::bigint, pg_has_role(relowner, 'USAGE')"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE c.oid = to_regclass($1)",
            STATES,
        )
        # Without the right to create tables, `CREATE TABLE IF NOT EXISTS` fails though it exists.
        if found:
            schema, oid, is_owner = found[0]
            self.schema: str = schema
            self.table = qualified(schema, STATES)
            self._has_rows = self._gain_rows(oid, is_owner=is_owner)
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

    def _gain_rows(self, oid: int, *, is_owner: bool) -> bool:
        """Adds the column that an older release did not make."""
        if self._session.run(
            "SELECT 1 FROM pg_attribute WHERE attrelid = $1::bigint::oid AND attname = 'rows'"
            " AND NOT attisdropped",
            oid,
        ):
            return True
        if is_owner:
            self._session.run(f"ALTER TABLE {self.table} {_ROWS}")
            return True
        _log.warning(
            "nothing notices rows that others add or remove, since this role may not alter the "
            "table of states: let its owner run ALTER TABLE %s %s",
            self.table,
            _ROWS,
        )
        return False

    def find(self, relation: Relation, given: str) -> Found | None:
        """Returns the state of a table, under whatever name it was saved.

        Raises:
            ConfigError: There are two.
            CheckpointError: It is damaged.
        """
        names = names_of(self._session, self.table, relation)
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(sorted(names))} are the same table, and each has a state: "
                f"keep the row of {self.table} that is right, and delete the other",
                option="target",
            )
        if not names:
            self._refuse_elsewhere(relation, given)
            return None
        rows = "rows" if self._has_rows else "NULL::bigint"
        statement = f"SELECT state, {rows} FROM {self.table} WHERE table_name = $1"  # noqa: S608
        text, count = self._session.run(statement, names[0])[0]
        return Found(names[0], State.from_json(text), count)

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
                statement = f"SELECT 1 FROM {qualified(schema, STATES)} WHERE table_name = $1"  # noqa: S608
                if self._session.run(statement, name):
                    raise ConfigError(
                        f"the state of table {given} is in {schema}.{STATES}: put {schema}"
                        " first in search_path",
                        option="target",
                    )

    def fence(self, name: str, state: State) -> None:
        """Keeps others from committing while this commit is made.

        Raises:
            ConcurrentWriterError: The state is not that of the commit before.
        """
        if state.commits == 1:
            return
        found = self._session.run(
            f"SELECT 1 FROM {self.table} WHERE table_name = $1 AND commits = $2 FOR UPDATE",  # noqa: S608
            name,
            state.commits - 1,
        )
        if not found:
            raise overtaken(name)

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
        if state.commits == 1:
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
            raise overtaken(name)
