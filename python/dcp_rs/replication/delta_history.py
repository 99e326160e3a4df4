"""A history in a Delta table: what a commit does to it, in one merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require_pyarrow
from dcp_rs.replication.target import (
    CHANGED,
    ENDED_BY,
    IDENTITY,
    IS_CURRENT,
    VALID_FROM,
    VALID_TO,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from dcp_rs.replication.delta_table import DeltaTable
    from dcp_rs.replication.target import Commit, Endings

# Columns of the source of a merge that the table has not, named as others like them.
_WAS, _IS_CHANGE = "_dcp_rs_was_generation", "_dcp_rs_is_change"
_SAME = " AND ".join(
    [f"t.{name} = s.{name}" for name in (*IDENTITY, "seqno")] + [f"t.generation = s.{_WAS}"]
)
_NO_SEQNO = "arrow_cast(NULL, 'Int64')"


def has_changes(commit: Commit) -> bool:
    """Whether a commit to a history does more than to add rows."""
    endings = commit.endings
    return endings is not None and bool(
        commit.removals or endings.reopened or endings.ended or len(endings.changed)
    )


def merge(table: DeltaTable, commit: Commit, endings: Endings, properties: Any) -> None:
    """Applies a commit.

    Args:
        table: The table.
        commit: The commit.
        endings: What it does to rows that the table has.
        properties: Properties of the commit to the table.
    """
    # A row that is lost may have the identity of one that replaces it.
    own = [_WAS, _IS_CHANGE]
    merge = (
        table.merger(_source(commit.rows, endings.changed), _SAME, properties, own)
        .when_matched_update(
            {f"`{name}`": f"s.`{name}`" for name in CHANGED}, predicate=f"s.{_IS_CHANGE}"
        )
        .when_matched_update_all(f"NOT s.{_IS_CHANGE}", except_cols=own)
        .when_not_matched_insert_all(f"NOT s.{_IS_CHANGE}", except_cols=own)
    )
    # The first that selects a row counts.
    if commit.removals:
        merge = merge.when_not_matched_by_source_delete(_any(table, commit.removals))
    opens = _any(table, endings.reopened) if endings.reopened else "false"
    if endings.ended:
        at, begins = _time(f"'{endings.at:%Y-%m-%dT%H:%M:%S.%f}Z'"), f"t.{VALID_FROM}"
        merge = merge.when_not_matched_by_source_update(
            {
                IS_CURRENT: "false",
                VALID_TO: f"CASE WHEN {begins} > {at} THEN {begins} ELSE {at} END",
                ENDED_BY: _NO_SEQNO,
            },
            f"(t.{IS_CURRENT} OR ({opens})) AND ({_any(table, endings.ended)})",
        )
    if endings.reopened:
        merge = merge.when_not_matched_by_source_update(
            {IS_CURRENT: "true", VALID_TO: _time("NULL"), ENDED_BY: _NO_SEQNO}, opens
        )
    merge.execute()


def _time(value: str) -> str:
    return f"arrow_cast({value}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _any(table: DeltaTable, conditions: Iterable[str]) -> str:
    return table.qualified(" OR ".join(f"({each})" for each in conditions))


def newest(table: DeltaTable, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
    """Returns what `HistoryTarget.newest` does."""
    from dcp_rs.replication.history import newest_of

    return table.beside("k", identities, newest_of("t", "k", lost))


def _source(rows: pa.Table, changed: pa.Table) -> pa.Table:
    """Returns new rows, and changes of others, as one source of a merge."""
    pa = require_pyarrow("a Delta table")
    there = changed.rename_columns(
        [_WAS if name == "was_generation" else name for name in changed.column_names]
    )
    new = rows.append_column(_WAS, rows["generation"])
    flag = pa.field(_IS_CHANGE, pa.bool_())
    padded = pa.table(
        {
            field.name: there[field.name].cast(field.type)
            if field.name in there.column_names
            else pa.nulls(len(there), field.type)
            for field in new.schema
        }
    ).cast(pa.schema([field.with_nullable(True) for field in new.schema]))
    parts = [
        part.append_column(flag, pa.array([is_change] * len(part), flag.type))
        for part, is_change in ((new, False), (padded, True))
    ]
    return pa.concat_tables(parts, promote_options="default")
