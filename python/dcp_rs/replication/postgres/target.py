"""The target: what opens a table and commits to it."""

# ruff: noqa: SLF001 - targets of one class write together

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.postgres import refusals
from dcp_rs.replication.postgres.relation import check_columns, check_new_name, resolve
from dcp_rs.replication.postgres.session import Session
from dcp_rs.replication.postgres.states import States, has_states
from dcp_rs.replication.postgres.table import Table
from dcp_rs.replication.postgres.types import types_of
from dcp_rs.replication.sharing import called
from dcp_rs.replication.target import (
    LACKED,
    check_use,
    counted,
    is_scalar,
    lacking,
    overtaken,
    refuse_variants,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from dcp_rs.replication.postgres.relation import Relation
    from dcp_rs.replication.postgres.states import Found
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.target import Address, Commit

# URLs that libpq reads as intended. Its error about any other may show a part of the password.
_ENCODED = r"%(?!00)[0-9A-Fa-f]{2}"
_WORD = rf"(?:[^@:/?#%\[\]]|{_ENCODED})*"
_HOST = rf"(?:\[[^@/?#\[\]]*\]|(?:[^,@:/?#%\[\]]|{_ENCODED})*)(?::[0-9]*)?"
_HOSTS = re.compile(rf"(?:{_WORD}(?::{_WORD})?@)?{_HOST}(?:,{_HOST})*")
# How long the backend of a killed process may take to notice, and how long to try a commit again.
_WAIT_SECONDS = 30.0
# Seconds to wait before that, at first and at most.
_PAUSE = 0.05
_LONGEST_PAUSE = 2.0

Done = TypeVar("Done")


class PostgresTarget:
    """A table of a PostgreSQL database, version 12 or newer.

    Rows come in by `COPY`. The state is a row of the table `dcp_rs_replication` of the same
    database; rows that the server refuses go into the table `<table>_rejected` of the same schema.
    While it is open it holds an advisory lock of the table's name; one that has a share of the
    table shares that lock, and holds one of the share's name.

    Args:
        uri: Database, as libpq has it: `postgresql://user@host/database`.
        table: Name of the table, as `table` or `schema.table`; created if it does not exist.
        session: An open session, which several tables share.

    Raises:
        ConfigError: adbc-driver-postgresql is too old.
        ImportError: It is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log", "history"})
    takes_rejects: ClassVar[bool] = True
    commits_when_idle: ClassVar[bool] = True
    takes_structs: ClassVar[bool] = False

    def __init__(self, uri: str, table: str, *, session: Session | None = None) -> None:
        self._adbc = require("a PostgreSQL target", "adbc_driver_postgresql.dbapi", "postgres")
        self._uri = uri
        self._name = table
        self._shared = session
        self._share: BucketShare | None = None
        self._session: Session | None = None
        self._open: _Open | None = None
        # Whether the table lacked columns, until the next commit.
        self._is_lacking = False

    @classmethod
    def at(cls, address: Address) -> PostgresTarget:
        """Creates the target for `postgresql://user@host/database?table=name`.

        The table is `documents` by default; other options are libpq's.

        Raises:
            ConfigError: The user, the password or a host has a character that must be encoded.
        """
        check_host(address)
        return cls(address.url, address.options.get("table", "documents"))

    def take_share(self, share: BucketShare | None) -> None:
        """See `dcp_rs.replication.Target`."""
        self._share = share

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        with refusals.explained(self._name, self._adbc.Error):
            session = self._shared or Session(self._adbc, self._uri)
            try:
                found = self._find(session)
            finally:
                if self._shared is None:
                    session.close()
        return None if found is None else found.state

    def _find(self, session: Session) -> Found | None:
        if not has_states(session):
            return None
        with session.transaction():
            relation = resolve(session, self._name)
            return States(session, changes=False).find(relation, self._name, self._share)

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return is_scalar(old) and is_scalar(new)

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "PostgreSQL")
        want = types_of(schema)
        with refusals.explained(self._name, self._adbc.Error):
            session = self._session = self._shared or Session(self._adbc, self._uri)
            relation = resolve(session, self._name)
            check_columns(session, want)
            self._lock(session, relation)

            def prepare() -> State | None:
                with session.transaction():
                    if self._share is not None:
                        session.wait_for(relation.schema, relation.name, "")
                    # Another may have made or dropped it until the lock was held.
                    return self._prepare(session, resolve(session, self._name), want, mode, schema)

            return self._until_done(prepare)

    def _lock(self, session: Session, relation: Relation) -> None:
        """Locks the table for this session, as this release names it and as 0.2.0 did.

        Waits for a killed process whose commit is still in progress.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        share = self._share
        is_shared = share is not None
        locks: list[tuple[str, str | None, bool]] = [
            (relation.name, relation.schema, is_shared),
            (self._name, None, is_shared),
        ]
        if share is not None:
            locks.append((share.key(relation.name), relation.schema, False))
        for name, schema, with_others in locks:
            if _try_lock(session, name, schema, is_shared=with_others):
                continue
            # It may be one of another number of shares, which is refused in other words.
            self._find(session)
            while not _try_lock(session, name, schema, is_shared=with_others):
                if time.monotonic() > deadline:
                    self._find(session)
                    is_own = share is not None and not with_others
                    raise overtaken(called(name) if is_own else self._name)
                time.sleep(_PAUSE)

    def _prepare(
        self,
        session: Session,
        relation: Relation,
        want: dict[str, str],
        mode: Mode,
        schema: pa.Schema,
    ) -> State | None:
        states, share = States(session), self._share
        found = states.find(relation, self._name, share)
        state = None if found is None else found.state
        # A process of 0.2.0, which has no shares, has the lock of the name in its state.
        if found is not None and share is None and not _try_lock(session, found.name):
            raise overtaken(self._name)
        check_use(state, schema, mode)
        self._is_lacking = found is not None and found.rows == LACKED
        if found is None:
            check_new_name(session, states.table, relation, self._name)
        table = Table(session, relation, mode, self._name, share)
        table.prepare(want, is_known=state is not None, has_others=found is not None)
        name = self._name if share is None else share.key(self._name)
        self._open = _Open(states, table, name if found is None else found.name)
        if share is not None:
            states.begin(self._open.name)
        if state is None or found is None:
            return None
        if relation.oid is None:
            return replace(state, moved="it was dropped")
        moved = lacking(state, table.added)
        if moved:
            self._is_lacking = True
            states.lacked(relation)
            return replace(state, moved=moved)
        return counted(state, found.rows, table.rows)

    def newest(self, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
        """See `dcp_rs.replication.HistoryTarget.newest`."""
        if self._session is None or self._open is None:
            raise AssertionError("a target is opened before it is read")
        with refusals.explained(self._name, self._adbc.Error), self._session.transaction():
            return self._open.table.newest(identities, lost)

    def commit(self, commit: Commit) -> Commit:
        """See `dcp_rs.replication.Target.commit`."""
        return self.commit_together([(self, commit)])[0]

    @staticmethod
    def commit_together(commits: Sequence[tuple[PostgresTarget, Commit]]) -> list[Commit]:
        """Applies commits to tables that share a session, in one transaction.

        Returns:
            The commits as they were applied.
        """
        first = commits[0][0]
        return first._until_done(lambda: first._apply(commits))

    def _until_done(self, attempt: Callable[[], Done]) -> Done:
        """Tries a transaction again as long as what it fails of may pass."""
        deadline, pause = time.monotonic() + _WAIT_SECONDS, _PAUSE
        while True:
            try:
                return attempt()
            except self._adbc.Error as error:
                if not refusals.is_passing(error) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _apply(self, commits: Sequence[tuple[PostgresTarget, Commit]]) -> list[Commit]:
        if self._session is None:
            raise AssertionError("a target is opened before it commits")
        with contextlib.ExitStack() as undone, self._session.transaction():
            applied = [target._write(commit, undone) for target, commit in commits]
        for target, _ in commits:
            target._is_lacking = False
        return applied

    def _write(self, commit: Commit, undone: contextlib.ExitStack) -> Commit:
        """Writes a commit in the session's transaction; `undone` ends with that."""
        if self._open is None:
            raise AssertionError("a target is opened before it commits")
        states, table, name = self._open.states, self._open.table, self._open.name
        undone.enter_context(refusals.explained(self._name, self._adbc.Error))
        undone.enter_context(table.kept_on_failure())
        states.fence(name, commit.state, is_lacking=self._is_lacking)
        applied = table.write(commit)
        states.save(name, commit.state, table.rows)
        return applied

    def is_unavailable(self, error: Exception) -> bool:
        """See `dcp_rs.replication.outage.is_unavailable`."""
        return refusals.is_unavailable(error)

    def drop(self) -> None:
        """Removes the table, its state and its rejects."""
        if self._session is None or self._open is None:
            raise AssertionError("a target is opened before it is dropped")
        with refusals.explained(self._name, self._adbc.Error), self._session.transaction():
            self._open.table.drop()
            self._open.states.forget(self._open.name)

    def close(self) -> None:
        """Closes the connection, if it is its own."""
        if self._session is not None and self._shared is None:
            self._session.close()
        self._session = self._open = None

    def __repr__(self) -> str:
        return f"PostgresTarget(table={self._name!r})"


def check_host(address: Address) -> None:
    """Checks that libpq reads a URL as it is meant.

    Raises:
        ConfigError: The user, the password or a host has a character that must be encoded.
    """
    if _HOSTS.fullmatch(address.host) is None:
        raise ConfigError(
            "in a user name or password, write @ as %40, / as %2F, : as %3A, # as %23,"
            " ? as %3F and % as %25; or leave the password to PGPASSWORD or ~/.pgpass",
            option="target",
        )


def _try_lock(
    session: Session, name: str, schema: str | None = None, *, is_shared: bool = False
) -> bool:
    """Locks a name in a schema, that of new tables by default, if no other session has it.

    Sessions that share it may have it together.
    """
    values = [name] if schema is None else [name, schema]
    prefix = "current_schema()" if schema is None else "$2::text"
    lock = "pg_try_advisory_lock_shared" if is_shared else "pg_try_advisory_lock"
    found = session.run(
        f"SELECT {lock}(hashtext('dcp_rs'), hashtext(concat({prefix}, $1::text)))",
        *values,
    )
    return bool(found[0][0])


class _Open(NamedTuple):
    """What an open target writes to: the state under its name, and the rows."""

    states: States
    table: Table
    name: str
