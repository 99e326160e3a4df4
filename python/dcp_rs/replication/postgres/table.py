"""The table that is kept in step, and that of its rejects."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import rejects
from dcp_rs.replication.history import newest_of
from dcp_rs.replication.postgres import refusals
from dcp_rs.replication.postgres.relation import (
    PREFIX,
    STATES,
    check_additions,
    check_rules,
    columns_of,
    has_triggers,
    identifier_limit,
    relation_of,
    unique_keys,
)
from dcp_rs.replication.postgres.session import qualified
from dcp_rs.replication.postgres.types import types_of
from dcp_rs.replication.target import (
    CHANGED,
    ENDED_BY,
    IDENTITY,
    IS_CURRENT,
    VALID_FROM,
    VALID_TO,
    check_key,
    missing_columns,
    quote_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from dcp_rs.replication.postgres.relation import Relation
    from dcp_rs.replication.postgres.session import Session
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Commit, Endings

# Temporary tables: rows to merge, identities of rows and of rejects to remove, and changed rows.
_ROWS, _DELETES, _SETTLED, _CHANGED = (
    f"{PREFIX}{what}" for what in ("rows", "deletes", "settled", "changed")
)
_IDENTITY = ", ".join(IDENTITY)
_SAME = " AND ".join(f"t.{name} = d.{name}" for name in IDENTITY)


class Table:
    """A table and its rejects, written within transactions that are not its own.

    Args:
        session: Session.
        relation: The table, which may not exist yet.
        mode: What it holds.
        name: Its name in errors.
        share: The share of the vBuckets whose rows are written; `None` for all.

    Attributes:
        rows: Rows that it has, of the share.
        added: Columns that it lacked.
    """

    def __init__(
        self,
        session: Session,
        relation: Relation,
        mode: Mode,
        name: str,
        share: BucketShare | None,
    ) -> None:
        self._session = session
        self._is_shared = share is not None
        # Condition of the rows that are counted and removed.
        self._own = "true" if share is None else share.condition
        self._relation = relation
        self._mode = mode
        self._name = name
        self._rejects = qualified(relation.schema, relation.rejects)
        self._is_partitioned = relation.kind == "p"
        self._has_triggers = False
        # Temporary tables for rows, deletes and identities of rejects.
        self._rows = self._deletes = self._settled = self._changed = ""
        self.rows = 0
        self.added: list[str] = []
        # Rejects that there are; `None` without a table of them.
        self._rejected: int | None = None

    # ----- opening -----

    def prepare(self, want: dict[str, str], *, is_known: bool, has_others: bool = False) -> None:
        """Creates the table, or adds missing columns.

        Args:
            want: Types of its columns.
            is_known: Whether it has a state.
            has_others: Whether other shares of it may have rows.

        Raises:
            ConfigError: It is another's, or cannot be written.
        """
        table = self._relation.quoted
        oid = self._relation.oid
        if oid is None:
            key = f", PRIMARY KEY ({_IDENTITY})" if self._mode == "table" else ""
            self._session.run(f"CREATE TABLE {table} ({_columns(want)}{key})")
            if self._mode == "history":
                self._session.run(f"CREATE INDEX ON {table} ({_IDENTITY})")
        else:
            those = f"{table} WHERE {self._own}" if has_others else table
            if not is_known and self._session.run(f"SELECT 1 FROM {those} LIMIT 1"):  # noqa: S608
                raise ConfigError(
                    f"table {self._name} has rows that dcp_rs did not write, or its state is gone"
                    f" from {STATES}: use another, or drop it",
                    option="target",
                )
            self._check(oid, want)
            self.rows = self._count(f"{table} WHERE {self._own}")
        self._prepare_rejects(is_known=is_known, has_others=has_others)
        if self._mode == "table" or self._has_triggers:
            identity = [want[each] for each in IDENTITY]
            self._stage_rows(want)
            self._deletes = self._staging(_DELETES, _IDENTITY, tuple(identity))
        if self._mode == "history":
            key = want["key"]
            self._deletes = self._staging(_DELETES, _IDENTITY, (want["collection_id"], key))
            columns = f"{_IDENTITY}, seqno, generation AS was_generation, {', '.join(CHANGED)}"
            self._changed = self._staging(_CHANGED, columns, key)

    def _check(self, oid: int, want: dict[str, str]) -> None:
        """Checks a table that is there, and adds missing columns."""
        have = columns_of(self._session, oid)
        if self._mode == "table":
            check_key(unique_keys(self._session, oid), self._name)
        kinds = {name: column.kind for name, column in have.items()}
        missing = missing_columns(kinds, want, self._name)
        check_additions(have, want, self._name)
        check_rules(self._session, oid, self._name, removes=self._mode != "log")
        self._has_triggers = has_triggers(self._session, oid)
        self.added = list(missing)
        for name, kind in missing.items():
            self._session.run(
                f"ALTER TABLE {self._relation.quoted} ADD COLUMN {quote_column(name)} {kind}"
            )

    def _stage_rows(self, want: dict[str, str]) -> None:
        columns = ", ".join(map(quote_column, want))
        self._rows = self._staging(_ROWS, columns, tuple(want.items()))

    def _grow(self, schema: pa.Schema) -> None:
        """Adds columns that the table lacks, and changes those of another type."""
        oid = relation_of(self._session, self._relation.schema, self._relation.name)
        if oid is None:
            return
        want, have = types_of(schema), columns_of(self._session, oid[0])
        for name, kind in want.items():
            column = quote_column(name)
            if name not in have:
                change = f"ADD COLUMN {column} {kind}"
            elif have[name].kind != kind:
                change = f"ALTER COLUMN {column} TYPE {kind} USING {column}::{kind}"
            else:
                continue
            self._session.run(f"ALTER TABLE {self._relation.quoted} {change}")
        if self._rows:
            self._stage_rows(want)

    def _staging(self, name: str, columns: str, kind: object) -> str:
        return self._session.staging(name, self._relation.quoted, columns, kind)

    def _count(self, table: str) -> int:
        return int(self._session.run(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - quoted

    # ----- rejects -----

    def _prepare_rejects(self, *, is_known: bool, has_others: bool) -> None:
        """Looks for the table of rejects. Those of a table that has no state are void."""
        if not self._has_rejects():
            return
        self._stage_settled()
        if not is_known:
            those = f"{self._rejects} WHERE {self._own}" if has_others else self._rejects
            self._session.run(f"DELETE FROM {those}")  # noqa: S608 - quoted
        self._rejected = self._count(f"{self._rejects} WHERE {self._own}")

    def _has_rejects(self) -> bool:
        """Whether there is a table of rejects.

        Raises:
            ConfigError: What has its name is none.
        """
        found = relation_of(self._session, self._relation.schema, self._relation.rejects)
        if found is None:
            return False
        oid, kind = found
        have = columns_of(self._session, oid)
        want = types_of(rejects.SCHEMA)
        kinds = {name: column.kind for name, column in have.items() if name in want}
        if kind not in {"r", "p"} or kinds != want:
            raise rejects.name_taken(f"{self._relation.schema}.{self._relation.rejects}")
        return True

    def _stage_settled(self) -> None:
        self._settled = self._session.staging(_SETTLED, self._rejects, _IDENTITY, None)

    def _create_rejects(self) -> None:
        if len(self._relation.rejects.encode()) > identifier_limit(self._session):
            raise ConfigError(
                f"PostgreSQL would cut the name {self._relation.rejects} of the table of "
                "rejects: give the table a shorter name, or fail at the first reject",
                option="target",
            )
        if self._is_shared:
            self._session.wait_for(self._relation.schema, self._relation.rejects)
        if self._has_rejects():
            # Another share has made it.
            if not self._is_shared:
                raise rejects.name_taken(f"{self._relation.schema}.{self._relation.rejects}")
            self._stage_settled()
            self._rejected = 0
            return
        required = {each.name for each in rejects.SCHEMA if not each.nullable}
        kinds = {
            name: f"{kind} NOT NULL" if name in required else kind
            for name, kind in types_of(rejects.SCHEMA).items()
        }
        self._session.run(f"CREATE TABLE {self._rejects} ({_columns(kinds)})")
        self._stage_settled()
        self._rejected = 0

    def _write_rejects(self, commit: Commit) -> None:
        if self._rejected:
            for condition in commit.settling:
                self._remove_rejects(f"WHERE ({condition}) AND {self._own}")
        if self._rejected and len(commit.settled):
            self._session.stage(self._settled, commit.settled)
            self._remove_rejects(f"t USING {self._settled} d WHERE {_SAME}")
        if not len(commit.rejects):
            return
        if self._rejected is None:
            self._create_rejects()
        self._session.copy(commit.rejects, self._relation.rejects, self._relation.schema)
        self._rejected = (self._rejected or 0) + len(commit.rejects)

    def _remove_rejects(self, those: str) -> None:
        gone = self._session.change(f"DELETE FROM {self._rejects} {those}")  # noqa: S608 - quoted
        self._rejected = max(0, (self._rejected or 0) - gone)

    def drop(self) -> None:
        """Removes the table and its rejects."""
        self._session.run(f"DROP TABLE IF EXISTS {self._relation.quoted}")
        if self._rejected is not None:
            self._session.run(f"DROP TABLE IF EXISTS {self._rejects}")

    # ----- writing -----

    @contextlib.contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """Forgets what is counted in the block if it raises."""
        before = self.rows, self._rejected, self._rows
        try:
            yield
        except BaseException:
            self.rows, self._rejected, self._rows = before
            raise

    def write(self, commit: Commit) -> Commit:
        """Applies a commit, and returns it with the rows that the server refused as rejects.

        Raises:
            DataError: It refused one, and `on_error` is `fail`.
        """
        if commit.schema is not None:
            self._grow(commit.schema)
        commit = rejects.rejecting(commit, refusals.with_nul(commit.rows))
        for condition in commit.removals:
            self._remove(f"WHERE ({condition}) AND {self._own}")
        self._remove_documents(commit.deletes)
        if commit.endings is not None:
            self._end(commit.endings)
        commit = rejects.rejecting(commit, self._write_rows(commit))
        self._write_rejects(commit)
        return commit

    def _end(self, endings: Endings) -> None:
        """Changes rows of a history."""
        table = self._relation.quoted
        opens = f"{IS_CURRENT} = true, {VALID_TO} = NULL, {ENDED_BY} = NULL"
        for condition in endings.reopened:
            self._session.run(f"UPDATE {table} SET {opens} WHERE {condition}")  # noqa: S608 - integers
        at = f"'{endings.at:%Y-%m-%d %H:%M:%S.%f}+00'::timestamptz"
        ends = f"{IS_CURRENT} = false, {VALID_TO} = greatest({VALID_FROM}, {at})"
        for condition in endings.ended:
            self._session.run(
                f"UPDATE {table} SET {ends} WHERE {IS_CURRENT} AND ({condition})"  # noqa: S608
            )
        if len(endings.changed):
            self._session.stage(self._changed, endings.changed)
            sets = ", ".join(f"{name} = d.{name}" for name in CHANGED)
            self._session.run(
                f"UPDATE {table} t SET {sets} FROM {self._changed} d"  # noqa: S608 - own names
                f" WHERE {_SAME} AND t.seqno = d.seqno AND t.generation = d.was_generation"
            )

    def newest(self, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
        """Returns what `dcp_rs.replication.HistoryTarget.newest` does."""
        self._session.stage(self._deletes, _without_nul(identities))
        return self._session.read(newest_of(self._relation.quoted, self._deletes, lost))

    def _write_rows(self, commit: Commit) -> dict[int, str]:
        """Writes rows, and returns why the others were refused, by their index.

        One that was refused because of another row is tried again after all others, and after the
        older rows of those refused are gone.
        """
        reasons: dict[int, str] = {}
        rows, is_first = commit.rows, True
        places: Sequence[int] = range(len(rows))
        appends = self._mode == "log" or commit.has_new_rows_only
        while True:
            refused = self._write_some(rows, appends=appends)
            if not refused and not reasons:
                return reasons
            for place in places:
                reasons.pop(place, None)
            reasons |= {places[at]: refusal.reason for at, refusal in refused.items()}
            if self._mode == "table":
                self._remove_documents(rows.take(sorted(refused)).select(IDENTITY))
            again = sorted(at for at, refusal in refused.items() if refusal.may_pass)
            if not again or (len(again) == len(rows) and not is_first):
                return reasons
            rows, places = rows.take(again), [places[at] for at in again]
            is_first = False

    def _write_some(self, rows: pa.Table, *, appends: bool) -> dict[int, refusals.Refusal]:
        """Writes rows, and returns those that were refused."""

        def write(some: pa.Table) -> None:
            with self._session.savepoint():
                # Once a row was refused, others may be there that no commit wrote: they are merged.
                if appends and (some is rows or self._mode != "table"):
                    self._append(some)
                else:
                    self._merge(some)

        return refusals.write_all_but_refused(rows, write, self._session.error)

    def _append(self, rows: pa.Table) -> None:
        if not self._has_triggers:
            self._session.copy(rows, self._relation.name, self._relation.schema)
            self.rows += len(rows)
        elif self._mode != "table":
            self.rows += self._session.change(self._insert(rows))
        else:
            self._merge(rows)

    def _merge(self, rows: pa.Table) -> None:
        names = [quote_column(name) for name in rows.column_names]
        taken = ", ".join(f"{name} = excluded.{name}" for name in names)
        insert = f"{self._insert(rows)} ON CONFLICT ({_IDENTITY}) DO UPDATE SET {taken}"
        if self._is_partitioned:
            # Where `RETURNING` has no `xmax`.
            before = self._matches()
            self._session.change(insert)
            self.rows += self._matches() - before
            return
        # Triggers may skip rows, so the server counts; a row that replaces another was locked.
        counted = self._session.run(
            f"WITH written AS ({insert} RETURNING t.xmax = 0 AS is_new)"  # noqa: S608 - quoted
            " SELECT count(*) FROM written WHERE is_new"
        )
        self.rows += int(counted[0][0])

    def _insert(self, rows: pa.Table) -> str:
        """Returns the statement that inserts rows, which it stages."""
        self._session.stage(self._rows, rows)
        names = ", ".join(map(quote_column, rows.column_names))
        return (
            f"INSERT INTO {self._relation.quoted} AS t ({names}) SELECT {names} FROM {self._rows}"  # noqa: S608
        )

    def _matches(self) -> int:
        """Returns how many of the staged rows have one of the same identity in the table."""
        return self._count(f"{self._relation.quoted} t JOIN {self._rows} d ON {_SAME}")

    def _remove_documents(self, identities: pa.Table) -> None:
        identities = _without_nul(identities)
        if len(identities):
            self._session.stage(self._deletes, identities)
            self._remove(f"t USING {self._deletes} d WHERE {_SAME}")

    def _remove(self, those: str) -> None:
        self.rows -= self._session.change(f"DELETE FROM {self._relation.quoted} {those}")  # noqa: S608


def _without_nul(identities: pa.Table) -> pa.Table:
    """Leaves out keys with NUL, which no row has and which cannot be looked for."""
    with_nul = refusals.with_nul(identities)
    if not with_nul:
        return identities
    return identities.take([at for at in range(len(identities)) if at not in with_nul])


def _columns(kinds: dict[str, str]) -> str:
    """Returns the columns of a table to create."""
    return ", ".join(f"{quote_column(name)} {kind}" for name, kind in kinds.items())
