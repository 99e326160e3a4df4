"""What PostgreSQL tables hold, as `dcp_rs.verify` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_rs._libraries import require
from dcp_rs.replication.contents import VERSIONS, Part, among, as_versions, columns
from dcp_rs.replication.postgres.relation import STATES, names_of, resolve
from dcp_rs.replication.postgres.session import Session, qualified
from dcp_rs.replication.postgres.states import NOTHING
from dcp_rs.replication.postgres.target import check_host
from dcp_rs.replication.sharing import split_key
from dcp_rs.replication.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from dcp_rs.replication.target import Address

_SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresContents:
    """The tables of a PostgreSQL database.

    Args:
        address: `postgresql://host/database`, with `table` for one of the tables.

    Raises:
        ConfigError: The user, the password or a host has a character that must be encoded.
    """

    def __init__(self, address: Address) -> None:
        check_host(address)
        adbc = require("a PostgreSQL target", "adbc_driver_postgresql.dbapi", "postgres")
        self._only = address.options.get("table")
        self._session = Session(adbc, address.url)
        self._states = ""

    def states(self) -> dict[str, State]:
        """See `Contents`."""
        found = self._session.run(
            "SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE c.oid = to_regclass($1)",
            STATES,
        )
        if not found:
            return {}
        self._states = qualified(found[0][0], STATES)
        rows = self._session.run(f"SELECT table_name, state FROM {self._states}")  # noqa: S608
        # Of a share that has not committed there is nothing to compare.
        states = {name: State.from_json(text) for name, text in rows if text != NOTHING}
        if self._only is None:
            return states
        relation = resolve(self._session, self._only)
        names = names_of(self._session, self._states, relation)
        return {name: states[name] for name in names if name in states}

    def counts(self, table: str) -> dict[int, int]:
        """See `Contents`."""
        name = resolve(self._session, split_key(table)[0]).quoted
        return dict(
            self._session.run(f"SELECT vbucket, count(*) FROM {name} GROUP BY vbucket")  # noqa: S608
        )

    def read(self, table: str, vbuckets: Sequence[int]) -> Part:
        """See `Contents`."""
        relation = resolve(self._session, split_key(table)[0])
        with self._session.transaction(_SNAPSHOT):
            found = self._session.run(
                f"SELECT state FROM {self._states} WHERE table_name = $1",  # noqa: S608 - quoted
                table,
            )
            return Part(
                State.from_json(found[0][0]),
                self._rows(relation.schema, relation.name, vbuckets),
                self._rows(relation.schema, relation.rejects, vbuckets),
            )

    def _rows(self, schema: str, table: str, vbuckets: Sequence[int]) -> pa.Table:
        found = self._session.run(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass($1)"
            " AND attnum > 0 AND NOT attisdropped",
            qualified(schema, table),
        )
        if not found:
            return VERSIONS.empty_table()
        query = f"SELECT {columns([name for (name,) in found])} FROM {qualified(schema, table)}"  # noqa: S608
        return as_versions(self._session.read(f"{query} WHERE {among(vbuckets)}"))

    def close(self) -> None:
        """Closes the session."""
        self._session.close()
