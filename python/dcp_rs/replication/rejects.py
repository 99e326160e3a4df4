"""Changes that cannot be rows of a target, and the table that keeps them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.exceptions import ConfigError, DataError
from dcp_rs.replication.target import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcp_rs.replication.target import Commit, OnError

SUFFIX = "_rejected"
"""What the name of a table of rejects ends with, after that of the target's table."""

SCHEMA = pa.schema(
    [
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("scope", pa.string()),
        pa.field("collection", pa.string()),
        pa.field("collection_id", pa.int64(), nullable=False),
        pa.field("vbucket", pa.int32(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("seqno", pa.int64(), nullable=False),
        pa.field("cas", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)
"""Columns of a table of rejects: the key and the document as bytes, the position, the reason."""

# If more rows of a commit are refused, the table must be wrong, not the documents.
MAX_REFUSED = 200
# A bracket outside of strings, or a string.
_BRACKETS = re.compile(r"""[\[\]{}]|"(?:[^"\\]|\\.)*\"""", re.DOTALL)

NOT_UTF8 = "the key is not UTF-8"


def as_rejects(changes: pa.Table, documents: pa.ChunkedArray, reasons: Sequence[str]) -> pa.Table:
    """Returns changes, which have the columns of a target, as rows of the table of rejects.

    Args:
        changes: The changes. Without the column `op`, they are mutations.
        documents: The document of each, as bytes.
        reasons: Why each cannot be a row.
    """
    columns = {name: changes.column(name) for name in changes.column_names}
    columns.setdefault("op", pa.repeat(pa.scalar("mutation"), len(changes)))
    columns |= {"value": documents, "reason": pa.array(reasons, pa.string())}
    return pa.table([columns[each.name].cast(each.type) for each in SCHEMA], schema=SCHEMA)


def refuse(rejects: pa.Table, on_error: OnError) -> None:
    """Raises an error for the first of the rejects, if one ends the replication.

    Raises:
        DataError: There is one, and `on_error` is `fail`.
    """
    if on_error == "reject" or not len(rejects):
        return
    row = rejects.slice(0, 1).to_pylist()[0]
    error = DataError(
        f"vBucket {row['vbucket']} seqno {row['seqno']}: {row['reason']}: choose to reject such "
        "changes, which keeps them in a table of their own, or leave out the collection"
    )
    error.vbucket, error.seqno = row["vbucket"], row["seqno"]
    raise error


def rejecting(commit: Commit, reasons: Mapping[int, str]) -> Commit:
    """Returns a commit with some rows as rejects; in a table, their older rows are removed.

    Args:
        commit: The commit, of which nothing may have been written.
        reasons: Why a row cannot be written, by its index in `commit.rows`.

    Raises:
        DataError: `commit.on_error` is `fail`.
    """
    if not reasons:
        return commit
    indices = sorted(reasons)
    gone = commit.rows.take(indices)
    rejects = as_rejects(gone, commit.documents.take(indices), [reasons[each] for each in indices])
    refuse(rejects, commit.on_error)
    is_kept = pa.array([index not in reasons for index in range(len(commit.rows))])
    deletes = [commit.deletes]
    if commit.state.mode == "table" and not commit.has_new_rows_only:
        deletes.append(gone.select(IDENTITY).cast(commit.deletes.schema))
    return replace(
        commit,
        rows=commit.rows.filter(is_kept),
        deletes=pa.concat_tables(deletes),
        rejects=pa.concat_tables([commit.rejects, rejects]),
        documents=commit.documents.filter(is_kept),
    )


def refused_rows(count: int, why_refused: Callable[[pa.Array], str | None]) -> dict[int, str]:
    """Finds the rows that a target refuses, by halving.

    Args:
        count: Number of rows, which the target refuses as a whole.
        why_refused: Tries rows, given by their indices, without writing them. Returns why they are
            refused, or `None` if they are not.

    Returns:
        Why, by the row's index. It is empty if no rows are the reason, or so many that the table
        rather than its documents must be wrong.
    """
    if why_refused(pa.array([], pa.int64())) is not None:
        return {}
    found = _halve(count, why_refused)
    if not found:
        # Rows that are taken one by one contradict each other: each is tried with those before it.
        found = _halve(count, why_refused, taken=[])
    return found if len(found) <= MAX_REFUSED else {}


def _halve(
    count: int, why_refused: Callable[[pa.Array], str | None], taken: list[int] | None = None
) -> dict[int, str]:
    found: dict[int, str] = {}
    parts = [range(count // 2, count), range(count // 2)]
    while parts and len(found) <= MAX_REFUSED:
        part = parts.pop()
        reason = why_refused(pa.array([*(taken or ()), *part], pa.int64())) if part else None
        if reason is None:
            if taken is not None:
                taken.extend(part)
        elif len(part) > 1:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
        else:
            found[part[0]] = reason
    return found


def nested_beyond(levels: int, documents: pa.ChunkedArray) -> list[int]:
    """Returns the indices of JSON texts that are nested more deeply than so many levels."""
    opened = pc.add(
        pc.count_substring(documents, "["),
        pc.count_substring(documents, "{"),
    )
    suspects = pc.indices_nonzero(pc.fill_null(pc.greater(opened, levels), False))
    return [at for at in suspects.to_pylist() if _depth(documents[at].as_py()) > levels]


def _depth(text: str) -> int:
    """Returns how deeply a JSON text is nested."""
    deepest = depth = 0
    for bracket in _BRACKETS.findall(text):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def name_taken(table: str) -> ConfigError:
    """Returns the error for another table that has the name of the table of rejects."""
    return ConfigError(
        f"{table} is where changes go that cannot be written, and it is another table: "
        "rename it, or choose another target",
        option="target",
    )
