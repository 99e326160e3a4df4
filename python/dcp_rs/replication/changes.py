"""Converts the stream's batches to rows to commit."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs import _dcp_rs
from dcp_rs.documents import MALFORMED, MALFORMED_FIELDS, DocumentSchema, as_options
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.decoding import (
    EXTRA,
    HAS_MALFORMED,
    IS_MALFORMED,
    Decoded,
    bytes_of,
)
from dcp_rs.replication.rejects import NOT_UTF8, as_rejects
from dcp_rs.replication.target import (
    DELETED,
    ENDED_BY,
    GENERATION,
    IDENTITY,
    IS_CURRENT,
    POSITION,
    VALIDITY,
)
from dcp_rs.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dcp_rs.options import Masks
    from dcp_rs.replication.decoding import Decoder
    from dcp_rs.replication.state import Decision, Mode

# Columns that say what a system event is about.
_OF_EVENTS = ["op", "vbucket", "epoch", "value"]
# Columns that are read only for decisions, not written.
_READ_ONLY = ("snapshot_end", "datatype")
# Columns that note what does not fit. They hold no documents, so a table that gains one is not
# loaded again.
_NOTES = (MALFORMED, MALFORMED_FIELDS)


@dataclass(frozen=True)
class Layout:
    """Which columns are read, and which are kept.

    Attributes:
        options: Options of the stream.
        read: Schema of its batches.
        schema: Schema of the rows of a target.
        documents: Names of the columns that hold documents.
        keeps_text: Whether documents are kept as JSON, in the column `value`.
        notes: Names of the columns that note what does not fit.
        decision: What was decided about the columns of documents, if they are the table's own.
        decoder: Decodes documents that the stream has as text, if they have columns of their own.
        masks: Which fields of documents are masked, as in a state.
    """

    # May contain the key of hashes.
    options: dict[str, Any] = field(repr=False)
    read: pa.Schema
    schema: pa.Schema
    documents: tuple[str, ...]
    keeps_text: bool
    notes: tuple[str, ...]
    decision: Decision | None = None
    decoder: Decoder | None = None
    masks: str | None = None

    @classmethod
    def of(
        cls,
        mode: Mode,
        document_schema: str | pa.Schema | DocumentSchema | None,
        key_type: Literal["string", "binary"] = "string",
        deletes: Literal["remove", "mark"] = "remove",
        masks: Masks | None = None,
        *,
        more: Sequence[str] = (),
    ) -> Layout:
        """Creates the layout for a mode.

        Args:
            mode: `table`, `log` or `history`.
            document_schema: Columns of documents.
            key_type: Type of the column `key`.
            deletes: What becomes of the row of a removed document.
            masks: Which fields of documents are masked.
            more: Other columns of the stream that rows have, `op` included.

        Raises:
            ConfigError: The schema is not one, or contradicts the columns.
        """
        if isinstance(document_schema, DocumentSchema) and document_schema.schema is None:
            raise ConfigError(
                "names no columns, so that no documents would be written: leave it"
                " out to write them as JSON",
                option="document_schema",
            )
        keeps_text = document_schema is None
        documents = DocumentSchema(None, on_malformed="column") if keeps_text else document_schema
        decoded = Schema(
            columns="basic", value_format="string", document_schema=documents
        ).to_pyarrow()
        basic = set(Schema().names)
        names = tuple(name for name in decoded.names if name not in basic)
        for name in names:
            # As for other columns: some targets do not tell capitals from small letters.
            own = (GENERATION, *((DELETED,) if deletes == "mark" else ()))
            if name.lower() in {*own, *(VALIDITY if mode == "history" else ())}:
                raise ConfigError(
                    f'the column "{name}" would appear twice: give a prefix, such as doc_',
                    option="document_schema",
                )
        others = [name for name in more if name != "op"]
        columns = ["op", "key", "value", *POSITION, *others, *names]
        given: dict[str, Any] = {
            # A key that is not UTF-8 would end the stream.
            "key_type": "binary",
            "value_format": "string",
            "document_schema": documents,
        }
        read = Schema(columns=[*columns, *_READ_ONLY], **given).to_pyarrow()
        if masks is not None:
            # A column that can hold no hash is refused before anything is read.
            _dcp_rs.Schema({**given, "document_schema": as_options(documents), **masks.options})
        keeps_op = mode == "log" or "op" in more
        kept = [column for column in columns if column != "op" or keeps_op]
        if mode != "log" and not keeps_text:
            kept.remove("value")
        fields = [read.field(name) for name in kept]
        if key_type == "string":
            place = kept.index("key")
            fields[place] = fields[place].with_type(pa.string())
        place = kept.index("epoch")
        fields.insert(place, pa.field(GENERATION, pa.int32(), nullable=False))
        if mode == "history":
            place = len(fields) - len(names)
            fields[place:place] = map(_validity, VALIDITY)
        marks = (DELETED,) if deletes == "mark" else ()
        fields += [pa.field(name, pa.timestamp("us", tz="UTC")) for name in marks]
        if mode != "log":
            fields = [
                each.with_nullable(False) if each.name in IDENTITY else each for each in fields
            ]
        return cls(
            options={
                "columns": [*columns, *_READ_ONLY],
                **given,
                **({} if masks is None else masks.options),
            },
            read=read,
            schema=pa.schema([each.remove_metadata() for each in fields]),
            documents=("value", *names, *marks)
            if keeps_text
            else (*(name for name in names if name != MALFORMED_FIELDS), *marks),
            keeps_text=keeps_text,
            notes=tuple(name for name in names if name in _NOTES),
            masks=None if masks is None else masks.text,
        )

    def decided(
        self,
        mode: Mode,
        decision: Decision | None,
        decoder: Decoder | None,
        *,
        keeps_extra: bool,
        keeps_malformed: bool,
    ) -> Layout:
        """Returns the layout of a table whose columns of documents are its own.

        Args:
            mode: `table`, `log` or `history`.
            decision: What was decided about these columns; `None` if nothing was.
            decoder: Decodes documents to them, if they have any.
            keeps_extra: Whether what no column holds has a column.
            keeps_malformed: Whether documents that are no JSON objects have a column.
        """
        if decision is not None and decision.kind == "json":
            return replace(self, decision=decision)
        own: list[pa.Field] = []
        if decoder is not None:
            own = [each for each in decoder.fields if each.name != EXTRA or keeps_extra]
            own += [self.schema.field(MALFORMED)] if keeps_malformed else []
        kept = [each for each in self.schema if each.name not in {"value", MALFORMED, DELETED}]
        if decision is not None and decision.kind == "binary":
            own = [pa.field("value", pa.binary())]
        elif mode == "log":
            kept.insert(self.schema.get_field_index("value"), self.schema.field("value"))
        marks = [self.schema.field(DELETED)] if self.marks_deletes else []
        names = [each.name for each in [*own, *marks]]
        return replace(
            self,
            schema=pa.schema([*kept, *(each.remove_metadata() for each in own), *marks]),
            documents=tuple(name for name in names if name != MALFORMED_FIELDS),
            keeps_text=False,
            notes=tuple(name for name in names if name in _NOTES),
            decision=decision,
            decoder=decoder,
        )

    @property
    def marks_deletes(self) -> bool:
        """Whether the row of a removed document stays, and says when it was removed."""
        return DELETED in self.schema.names

    @property
    def has_text_keys(self) -> bool:
        """Whether a key is text in the target."""
        return bool(pa.types.is_string(self.schema.field("key").type))

    def rejects(self, changes: pa.Table, generation: int) -> pa.Table:
        """Returns changes as rows of the table of rejects, since their keys are not UTF-8."""
        numbered = changes.append_column(
            GENERATION, pa.repeat(pa.scalar(generation, pa.int32()), len(changes))
        )
        return as_rejects(numbered, bytes_of(changes), [NOT_UTF8] * len(changes))

    def malformed(self, changes: pa.Table) -> int:
        """Returns how many of the rows that `rows` made have something that does not fit."""
        noted = [pc.is_valid(changes[name]) for name in self.notes]
        return int(pc.sum(functools.reduce(pc.or_, noted)).as_py() or 0) if noted else 0

    def rows(self, changes: pa.Table, generation: int, decoded: Decoded | None = None) -> pa.Table:
        """Returns changes as rows of a target.

        Args:
            changes: The changes.
            generation: Number of the load that they belong to.
            decoded: Their documents, if the layout has a decoder.
        """
        columns = {name: changes.column(name) for name in changes.column_names}
        if decoded is not None:
            columns |= decoded.columns
            is_malformed = decoded.has(IS_MALFORMED)
            if self.decoder is not None and not self.decoder.keeps_rest:
                is_malformed = pc.or_(is_malformed, decoded.has(HAS_MALFORMED))
            columns[MALFORMED] = pc.if_else(
                is_malformed, bytes_of(changes), pa.scalar(None, pa.binary())
            )
        if self.marks_deletes:
            is_removed = pc.not_equal(columns["op"], "mutation")
            columns[DELETED] = pc.if_else(is_removed, columns["timestamp"], None)
        if self.decision is not None and self.decision.kind == "binary":
            # One that was decided before fields were masked: bytes cannot be.
            is_masked = self.masks is not None
            none = pa.nulls(len(changes), pa.binary())
            columns["value"] = none if is_masked else bytes_of(changes)
        elif "value" in self.schema.names:
            is_event = pc.equal(columns["op"], "system_event")
            is_json = pc.or_(is_event, pc.fill_null(pc.equal(columns["datatype"], "json"), False))
            value = columns["value"]
            kept = is_json if self.keeps_text else is_event
            # Copying every document costs as much as writing it.
            if not pc.all(pc.or_(kept, value.is_null())).as_py():
                columns["value"] = pc.if_else(kept, value, pa.scalar(None, pa.string()))
                if self.keeps_text:
                    # Text that is not JSON. Bytes that are not text are already included.
                    columns[MALFORMED] = pc.coalesce(
                        columns[MALFORMED],
                        pc.if_else(is_json, pa.scalar(None, pa.binary()), value.cast(pa.binary())),
                    )
        columns[GENERATION] = pa.repeat(pa.scalar(generation, pa.int32()), len(changes))
        columns["key"] = columns["key"].cast(self.schema.field("key").type)
        return pa.table([columns[name] for name in self.schema.names], schema=self.schema)


def _validity(name: str) -> pa.Field:
    """Returns a column that says when a version was the document."""
    times = pa.timestamp("us", tz="UTC")
    kind = {IS_CURRENT: pa.bool_(), ENDED_BY: pa.int64()}.get(name, times)
    return pa.field(name, kind)


@dataclass
class Reduced:
    """The effect of changes on a table.

    Attributes:
        written: Newest version of each document that was written, columns as read.
        deletes: Identities of the documents that were removed.
        cleared: vBuckets by collection and epoch, whose documents from before these changes are
            gone.
        replaces_others: Whether those of all other collections are gone instead, as in the table of
            one collection that keeps them after a drop.
    """

    written: pa.Table
    deletes: pa.Table
    cleared: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    replaces_others: bool = False

    def removals(self, generation: int, unread: Callable[[int], bool]) -> list[str]:
        """Returns the conditions that select the rows of collections that were cleared.

        Args:
            generation: Generation of the rows.
            unread: Says of a vBucket that the table has no rows of it.

        Rows of smaller epochs and generations stay until the end of the catch-up that reads them
        again, in which the collection begins again too.
        """
        sign = "<>" if self.replaces_others else "="
        read = {
            place: [vbucket for vbucket in vbuckets if not unread(vbucket)]
            for place, vbuckets in self.cleared.items()
        }
        return [
            f"collection_id {sign} {collection} AND generation = {generation} AND epoch = {epoch}"
            f" AND {vbuckets_in(vbuckets)}"
            for (collection, epoch), vbuckets in read.items()
            if vbuckets
        ]


def vbuckets_in(vbuckets: Iterable[int]) -> str:
    """Returns a condition in SQL that selects vBuckets."""
    chosen = sorted(vbuckets)
    # A list of a thousand takes a database longer to parse than the rows to remove.
    if chosen[-1] - chosen[0] == len(chosen) - 1:
        return f"vbucket BETWEEN {chosen[0]} AND {chosen[-1]}"
    return f"vbucket IN ({', '.join(map(str, chosen))})"


def reduce(
    changes: pa.Table,
    *,
    each_once: bool,
    keeps_dropped: bool = False,
    marks_deletes: bool = False,
) -> Reduced:
    """Reduces changes, in the order of the stream, to what they leave of each document.

    Args:
        changes: Changes, with the columns of a layout.
        each_once: Whether each document is known to occur once.
        keeps_dropped: Whether the documents of a dropped collection stay until another collection
            begins. All changes are then about collections that had the same name.
        marks_deletes: Whether removed documents count as written.
    """
    special = pc.is_in(changes["op"], pa.array(["rollback", "system_event"]))
    limits: Mapping[int, Mapping[int, int]] = {}
    cleared: dict[tuple[int, int], set[int]] = {}
    if pc.any(special).as_py():
        index = pa.array(range(len(changes)), pa.int64())
        indexed = changes.select(_OF_EVENTS).append_column("_index", index)
        limits, cleared = _limits(indexed.filter(special), keeps_dropped=keeps_dropped)
        if keeps_dropped:
            limits = _of_others(limits, pc.unique(changes["collection_id"]).to_pylist())
        kept = pc.invert(special)
        for collection, by_vbucket in limits.items():
            last = [by_vbucket.get(vbucket, -1) for vbucket in range(max(by_vbucket) + 2)]
            place = pc.min_element_wise(changes["vbucket"], len(last) - 1)
            is_before = pc.greater(pa.array(last, pa.int64()).take(place.combine_chunks()), index)
            is_of = pc.fill_null(pc.equal(changes["collection_id"], collection), False)
            kept = pc.and_(kept, pc.invert(pc.and_(is_of, is_before)))
        changes = changes.filter(kept)
    if not each_once or limits:
        changes = newest(changes, IDENTITY)
    if marks_deletes:
        none = changes.slice(0, 0).select(IDENTITY)
        return Reduced(changes, none, cleared, replaces_others=keeps_dropped)
    is_written = pc.equal(changes["op"], "mutation")
    return Reduced(
        changes.filter(is_written),
        changes.filter(pc.invert(is_written)).select(IDENTITY),
        cleared,
        replaces_others=keeps_dropped,
    )


def newest(changes: pa.Table, identity: Sequence[str], order: pa.Array | None = None) -> pa.Table:
    """Keeps the last change of each document.

    Args:
        changes: Changes.
        identity: Columns that tell documents apart.
        order: Indices of the changes in their order; as they are if not given.
    """
    index = pa.array(range(len(changes)), pa.int64())
    keyed = changes.select(identity)
    if order is not None:
        keyed = keyed.take(order)
    keyed = keyed.append_column("_index", index)
    last = keyed.group_by(list(identity)).aggregate([("_index", "max")])["_index_max"]
    if len(last) == len(changes):
        return changes
    last = last.take(pc.sort_indices(last))
    return changes.combine_chunks().take(last if order is None else order.take(last))


def _limits(
    special: pa.Table, *, keeps_dropped: bool
) -> tuple[dict[int, dict[int, int]], dict[tuple[int, int], set[int]]]:
    """Returns, by collection and vBucket, up to where documents were removed; and `cleared`.

    An event that begins a collection says so too: it is sent again when the collection is flushed.
    """
    limits: dict[int, dict[int, int]] = defaultdict(dict)
    cleared: dict[tuple[int, int], set[int]] = defaultdict(set)
    clearing = {"BeginCollection"} if keeps_dropped else {"BeginCollection", "EndCollection"}
    events = special.filter(pc.equal(special["op"], "system_event"))
    for row in events.to_pylist():
        event = json.loads(row["value"])
        if event["event"] in clearing:
            collection = int(event["collection_id"], 16)
            limits[collection][row["vbucket"]] = row["_index"]
            cleared[collection, row["epoch"]].add(row["vbucket"])
    return limits, cleared


def _of_others(
    limits: Mapping[int, Mapping[int, int]], collections: Iterable[int | None]
) -> dict[int, dict[int, int]]:
    """Returns, by collection, up to where the beginning of another one removes its documents."""
    found: dict[int, dict[int, int]] = {}
    for other in collections:
        for collection, by_vbucket in limits.items():
            if other is not None and other != collection:
                of_other = found.setdefault(other, {})
                for vbucket, index in by_vbucket.items():
                    of_other[vbucket] = max(index, of_other.get(vbucket, -1))
    return found


def with_text_keys(changes: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns the changes whose keys are UTF-8, and the others."""
    try:
        changes["key"].cast(pa.string())
    except pa.ArrowInvalid:
        is_text = pa.array([_is_utf8(key) for key in changes["key"].to_pylist()])
        return changes.filter(is_text), changes.filter(pc.invert(is_text))
    return changes, changes.slice(0, 0)


def _is_utf8(key: bytes | None) -> bool:
    try:
        _ = key is None or key.decode()
    except UnicodeDecodeError:
        return False
    return True


def rolled_back(changes: pa.Table | pa.RecordBatch) -> set[int]:
    """Returns the vBuckets that have a rollback row."""
    return set(pc.filter(changes["vbucket"], is_rollback(changes)).to_pylist())


def is_rollback(changes: pa.Table | pa.RecordBatch) -> pa.ChunkedArray | pa.Array:
    """Returns whether each change is a rollback row."""
    return pc.equal(changes["op"], "rollback")


def count(changes: pa.Table, mode: Mode) -> int:
    """Returns how many changes are rows of a log, or are about documents of a table."""
    if mode == "log":
        return len(changes)
    special = pc.is_in(changes["op"], pa.array(["rollback", "system_event"]))
    return len(changes) - int(pc.sum(special).as_py() or 0)


def has_end_of_collection(changes: pa.RecordBatch) -> bool:
    """Whether a collection was dropped."""
    events = pc.filter(changes["value"], pc.equal(changes["op"], "system_event"))
    return any(json.loads(event)["event"] == "EndCollection" for event in events.to_pylist())


class FirstSnapshots:
    """Tells whether changes belong to the first snapshot of each vBucket.

    Each document occurs once in a snapshot, and two that end at the same seqno of a branch describe
    the same state: so documents of the first one cannot be in a table that was empty.
    """

    def __init__(self, *, is_possible: bool, seen: Iterable[int] = ()) -> None:
        self._is_possible = is_possible
        self._ends: dict[int, int] = dict.fromkeys(seen, -1)

    def is_unread(self, vbucket: int) -> bool:
        """Whether no document of a vBucket was among the changes, in a table that was empty."""
        return self._is_possible and vbucket not in self._ends

    def hold(self, changes: pa.Table) -> bool:
        """Whether all documents of the next changes belong to these first snapshots."""
        if not self._is_possible:
            return False
        ends = (
            changes.select(["vbucket", "snapshot_end", "epoch"])
            .group_by("vbucket")
            .aggregate([("snapshot_end", "min"), ("snapshot_end", "max"), ("epoch", "max")])
        )
        are_first = True
        columns = ("vbucket", "snapshot_end_min", "snapshot_end_max", "epoch_max")
        rows = zip(*(ends[name].to_pylist() for name in columns), strict=True)
        for vbucket, first, last, epoch in rows:
            if first is None:
                continue
            end = self._ends.setdefault(vbucket, first)
            if epoch > 0 or not first == last == end:
                are_first = False
                self._ends[vbucket] = -1
        return are_first
