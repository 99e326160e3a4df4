"""Several tables of one PostgreSQL database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from dcp_rs._libraries import require
from dcp_rs.replication.postgres import refusals
from dcp_rs.replication.postgres.relation import STATES
from dcp_rs.replication.postgres.session import Session, qualified
from dcp_rs.replication.postgres.target import PostgresTarget, check_host
from dcp_rs.replication.sharing import split_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit


class PostgresDatabase:
    """A PostgreSQL database with several tables, which are written in one transaction.

    Args:
        uri: Database, as libpq has it: `postgresql://user@host/database`.

    Raises:
        ConfigError: adbc-driver-postgresql is too old.
        ImportError: It is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = PostgresTarget.modes
    takes_rejects: ClassVar[bool] = True
    commits_when_idle: ClassVar[bool] = True
    takes_structs: ClassVar[bool] = False

    def __init__(self, uri: str) -> None:
        self._adbc = require("a PostgreSQL target", "adbc_driver_postgresql.dbapi", "postgres")
        self._uri = uri
        self._session: Session | None = None
        self._share: BucketShare | None = None

    @classmethod
    def at(cls, address: Address) -> PostgresDatabase:
        """Creates the database for `postgresql://user@host/database`, with options of libpq.

        Raises:
            ConfigError: The user, the password or a host has a character that must be encoded.
        """
        check_host(address)
        return cls(address.url)

    def take_share(self, share: BucketShare | None) -> None:
        """See `dcp_rs.replication.Target`."""
        self._share = share

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        with refusals.explained("the database", self._adbc.Error):
            session = self._session = Session(self._adbc, self._uri)
            found = session.run(
                "SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
                " WHERE c.oid = to_regclass($1)",
                STATES,
            )
            if not found:
                return {}
            table = qualified(found[0][0], STATES)
            rows = session.run(f"SELECT table_name, state FROM {table}")  # noqa: S608 - quoted
        own = None if self._share is None else str(self._share)
        collections = {
            split_key(name)[0]: json.loads(state).get("collection")
            for name, state in rows
            if split_key(name)[1] == own
        }
        return {name: collection for name, collection in collections.items() if collection}

    def target(self, table: str) -> PostgresTarget:
        """See `dcp_rs.replication.Database.target`."""
        target = PostgresTarget(self._uri, table, session=self._session)
        target.take_share(self._share)
        return target

    def fold(self, table: str) -> str:
        """See `dcp_rs.replication.Database.fold`."""
        return table

    def commit(self, commits: Sequence[tuple[PostgresTarget, Commit]]) -> list[Commit]:
        """See `dcp_rs.replication.Database.commit`."""
        return PostgresTarget.commit_together(commits)

    def drop(self, target: PostgresTarget) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        target.drop()

    def is_unavailable(self, error: Exception) -> bool:
        """See `dcp_rs.replication.outage.is_unavailable`."""
        return refusals.is_unavailable(error)

    def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __repr__(self) -> str:
        return "PostgresDatabase()"
