"""The statement that merges a batch into a table, and the conditions in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.changes import vbuckets_in
from dcp_rs.spark.merge_rules import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql.types import DataType

DOCUMENTS = ("mutation", "deletion", "expiration")
"""The ops of a document's change."""

# A name between dots: with backticks, of which one that belongs to it is doubled, or without.
_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.\s]+)")
_NEWER = "(s.epoch > t.epoch OR s.epoch = t.epoch AND s.seqno > t.seqno)"
# Scope and collection are null in clusters without collections.
_SAME = " AND ".join(f"t.{name} <=> s.{name}" for name in IDENTITY)


def parts_of(name: str) -> tuple[str, ...]:
    """Returns the parts of a table's name.

    Raises:
        ConfigError: It is no name of a table.
    """
    found: list[str] = []
    place = 0
    while match := _PART.match(name, place):
        quoted, plain = match.groups()
        found.append(plain if quoted is None else quoted.replace("``", "`"))
        place = match.end()
        if place == len(name):
            return tuple(found)
        if name[place] != ".":
            break
        place += 1
    raise ConfigError(
        f"{name!r} is no name of a table: write catalog.schema.table, with backticks around a "
        "part that has a dot or a space; a folder is the first argument, without table=",
        option="table",
    )


def quoted(*parts: str) -> str:
    """Returns a name in SQL."""
    return ".".join(f"`{part.replace('`', '``')}`" for part in parts)


def text(value: str) -> str:
    """Returns a text in SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def type_of(kind: DataType) -> str:
    """Returns a type in SQL, with names of fields quoted."""
    from pyspark.sql import types

    if isinstance(kind, types.StructType):
        fields = (f"{quoted(each.name)}: {type_of(each.dataType)}" for each in kind)
        return f"STRUCT<{', '.join(fields)}>"
    if isinstance(kind, types.ArrayType):
        return f"ARRAY<{type_of(kind.elementType)}>"
    if isinstance(kind, types.MapType):
        return f"MAP<{type_of(kind.keyType)}, {type_of(kind.valueType)}>"
    return kind.simpleString()


@dataclass(frozen=True)
class Removals:
    """What a batch removes without naming documents.

    Attributes:
        rolled_back: vBuckets by the epoch that follows their rollback: rows of smaller epochs go.
        ended: By collection, the epoch and seqno in each vBucket before which its documents are
            gone, since it was dropped or flushed.
    """

    rolled_back: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ended: Mapping[int, Mapping[int, tuple[int, int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to remove."""
        return bool(self.rolled_back or self.ended)

    def condition(self) -> str:
        """Returns the condition of the rows that go.

        Rows at or after the rollback or the event stay, so that it is right for a table that
        already has the batch.
        """
        found = [
            f"epoch < {epoch} AND {vbuckets_in(vbuckets)}"
            for epoch, vbuckets in self.rolled_back.items()
        ]
        for collection, by_vbucket in self.ended.items():
            places = ", ".join(f"{vbucket}, {_place(*at)}" for vbucket, at in by_vbucket.items())
            found.append(
                f"collection_id = {collection} AND "
                f"{_place('epoch', 'seqno')} < try_element_at(map({places}), vbucket)"
            )
        return " OR ".join(f"({each})" for each in found) or "false"


def _place(epoch: int | str, seqno: int | str) -> str:
    kinds = f"CAST({epoch} AS INT)", f"CAST({seqno} AS BIGINT)"
    return f"named_struct('epoch', {kinds[0]}, 'seqno', {kinds[1]})"


def newest(view: str, columns: Iterable[str], removals: Removals) -> str:
    """Returns the query of the newest change of each document that is not removed at once."""
    chosen = ", ".join(quoted(name) for name in ("op", *columns))
    ops = ", ".join(map(text, DOCUMENTS))
    kept = f" AND NOT coalesce({removals.condition()}, false)" if removals else ""
    place = f"PARTITION BY {', '.join(IDENTITY)} ORDER BY epoch DESC, seqno DESC"
    placed = (
        f"SELECT *, row_number() OVER ({place}) AS _place FROM {view} WHERE op IN ({ops}){kept}"  # noqa: S608 - quoted
    )
    return f"SELECT {chosen} FROM ({placed}) WHERE _place = 1"  # noqa: S608 - quoted


def merge(table: str, source: str, columns: Sequence[str], removals: Removals) -> str:
    """Returns the statement that merges the newest changes into a table.

    A row replaces only an older one, by `(epoch, seqno)`, so that a batch that runs again changes
    nothing.

    Args:
        table: The table, quoted.
        source: The query of the changes, each document once.
        columns: Columns of the table.
        removals: What is removed beside the documents in the source.
    """
    names = [quoted(name) for name in columns]
    assigned = ", ".join(f"{name} = s.{name}" for name in names)
    values = ", ".join(f"s.{name}" for name in names)
    insert = f"INSERT ({', '.join(names)}) VALUES ({values})"  # noqa: S608 - quoted
    lines = [
        f"MERGE INTO {table} t USING ({source}) s ON {_SAME}",
        f"WHEN MATCHED AND {_NEWER} AND s.op <> 'mutation' THEN DELETE",
        f"WHEN MATCHED AND {_NEWER} THEN UPDATE SET {assigned}",
        f"WHEN NOT MATCHED AND s.op = 'mutation' THEN {insert}",
    ]
    if removals:
        lines.append(f"WHEN NOT MATCHED BY SOURCE AND ({removals.condition()}) THEN DELETE")
    return "\n".join(lines)
