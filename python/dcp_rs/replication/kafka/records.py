"""Rows as the columns of records."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs import _dcp_rs
from dcp_rs.documents import MALFORMED
from dcp_rs.replication.decoding import as_array, view_of
from dcp_rs.replication.target import DELETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_rs.replication.kafka.settings import Settings

HEADERS = (
    "op",
    "seqno",
    "vbuuid",
    "epoch",
    "vbucket",
    "cas",
    "generation",
    "collection_id",
    "collection",
)
"""Headers of a record, in the order that one header for all has them."""

JOINED = "dcp"
"""Name of the one header for all."""

SPECIAL = ("rollback", "system_event")
"""What rows of a log tell about a whole vBucket."""

COLUMNS = ("op", "vbuuid")
"""Columns that rows need beyond those of other targets."""

COLUMNS_OF_ENVELOPE = ("rev", "expiry", "flags")
"""Columns that the envelope needs too."""

# What librdkafka takes for no header.
_NONE = -(2**63)
# More than a batch of one record has beside its key and value, and than all headers have.
_OVERHEAD = 128
_OF_HEADERS = 896
# More than compression adds to what does not compress, as a share: a broker may do it anew.
_ADDED = 2048
# Records that are sent at a time: what librdkafka copies is still in the processor's caches.
_AT_ONCE = 5_000
_TO_ESCAPE = r'["\\\x00-\x1f]'


@dataclass(frozen=True)
class Records:
    """Columns of records of one topic.

    Attributes:
        keys: Keys as bytes.
        values: Values as bytes; null for a tombstone.
        partitions: Partition of each; -1 for the one of its key.
        headers: Name, number in each record, and words that these are places of, if there are any.
    """

    keys: pa.Array
    values: pa.Array | pa.ChunkedArray
    partitions: pa.Array
    headers: list[tuple[str, pa.Array, list[str]]]

    def __len__(self) -> int:
        return len(self.keys)

    def sizes(self) -> pa.Array:
        """Returns the most bytes that a broker may see in a batch of each alone."""
        own = [
            pc.fill_null(pc.binary_length(column), 0).cast(pa.int64())
            for column in (self.keys, self.values)
        ]
        size = pc.add(*own)
        fixed = _OVERHEAD + (_OF_HEADERS if self.headers else 0)
        return pc.add(pc.add(size, pc.divide(size, _ADDED)), fixed)

    def send(self, producer: Any, topic: str, count: int, headers: str, timeout: float) -> None:
        """Adds them to the transaction."""
        numbers = [
            (name, view_of(numbers.buffers()[1]).cast("q"), words)
            for name, numbers, words in self.headers
        ]
        partitions = view_of(self.partitions.buffers()[1]).cast("i")
        joined = JOINED if headers == "one" and numbers else None
        for begin in range(0, len(self), _AT_ONCE):
            end = min(begin + _AT_ONCE, len(self))
            producer.send(
                topic,
                count,
                _bytes(self.keys[begin:end]),
                _bytes(self.values[begin:end]),
                partitions[begin:end],
                [(name, own[begin:end], words) for name, own, words in numbers],
                joined,
                timeout,
            )

    def to_all(self, count: int) -> Records:
        """Returns them once for each partition."""
        places = pa.array([row for row in range(len(self)) for _ in range(count)], pa.int64())
        partitions = pa.array(list(range(count)) * len(self), pa.int32())
        headers = [
            (name, as_array(numbers.take(places)), words) for name, numbers, words in self.headers
        ]
        return Records(self.keys.take(places), self.values.take(places), partitions, headers)


def _bytes(column: pa.Array | pa.ChunkedArray) -> tuple[memoryview, memoryview, memoryview]:
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else as_array(column)
    _, offsets, data = column.buffers()
    # A slice shares the buffers of all rows.
    ends = view_of(offsets).cast("i")[column.offset : column.offset + len(column) + 1]
    own = view_of(data)[ends[0] : ends[-1]] if ends else memoryview(b"")
    if not column.null_count:
        return ends, own, memoryview(b"")
    nulls = as_array(column.is_null().cast(pa.uint8()))
    return ends, own, view_of(nulls.buffers()[1])[: len(column)]


@dataclass(frozen=True)
class Implied:
    """The position of the records of a table that have none.

    Attributes:
        collection_id: Their collection.
        generation: The load that they belong to.
        num_vbuckets: Number of vBuckets, one of which each key says.
    """

    collection_id: int
    generation: int
    num_vbuckets: int

    @classmethod
    def stored(cls, found: Any) -> Implied:
        """Reads what a state has.

        Raises:
            KeyError, TypeError, ValueError: It is damaged.
        """
        implied = cls(**{field.name: int(found[field.name]) for field in fields(cls)})
        if not 0 <= implied.num_vbuckets < 1 << 16:
            raise ValueError("no bucket has as many vBuckets")
        return implied

    def of(self, key: bytes) -> dict[str, int]:
        """Returns the position of a record."""
        return {
            "collection_id": self.collection_id,
            "vbucket": _dcp_rs.vbucket_of_key(key, self.num_vbuckets),
            "epoch": 0,
            "generation": self.generation,
        }

    def are_others(self, rows: pa.Table) -> pa.ChunkedArray:
        """Returns whether each row has another position."""
        found = _dcp_rs.vbuckets_of_keys(_bytes(rows["key"].cast(pa.binary())), self.num_vbuckets)
        of_keys = pa.Array.from_buffers(pa.uint16(), len(rows), [None, pa.py_buffer(found)])
        differences = [
            pc.not_equal(rows["vbucket"], of_keys.cast(rows["vbucket"].type)),
            pc.not_equal(rows["collection_id"], self.collection_id),
            pc.not_equal(rows["generation"], self.generation),
            pc.not_equal(rows["epoch"], 0),
        ]
        return reduce(pc.or_, differences)


def of_rows(
    rows: pa.Table,
    documents: pa.ChunkedArray,
    count: int,
    settings: Settings,
    implied: Implied | None = None,
) -> Records:
    """Returns rows as records.

    Args:
        rows: Rows of a commit.
        documents: The document of each, as bytes.
        count: Number of the topic's partitions.
        settings: Options of the target.
        implied: The position of records of a table that have none.
    """
    is_document = pc.equal(rows["op"], "mutation")
    if settings.value_format == "envelope":
        is_row = pc.is_in(rows["op"], pa.array(SPECIAL))
        removed = pc.invert(pc.or_(is_document, is_row))
        # A log says what happened; a table has a tombstone, for which a compacted topic needs null.
        with_envelope = (
            is_document if DELETED in rows.column_names else pc.or_(is_document, removed)
        )
        values = pc.if_else(with_envelope, _envelopes(rows, documents), None)
        values = pc.if_else(is_row, documents, values)
    else:
        is_event = pc.equal(rows["op"], "system_event")
        has_value = pc.or_(is_document, is_event)
        values = documents
        if not pc.all(has_value).as_py():
            values = pc.if_else(has_value, documents, pa.scalar(None, pa.binary()))
    return Records(
        as_array(keys_of(rows, settings)),
        values.cast(pa.binary()),
        as_array(partitions_of(rows, count, settings)),
        headers_of(rows) if settings.headers != "none" else _needed_headers(rows, values, implied),
    )


def surely_small(settings: Settings) -> int:
    """Returns how large a document may be whose record is not too large, whatever is around it."""
    # Base64 adds a third. Keys have 250 bytes, each of which may take six in an envelope.
    return settings.message_bytes // 2 - 4096


def keys_of(rows: pa.Table, settings: Settings) -> pa.ChunkedArray:
    """Returns the keys of records."""
    key = rows["key"].cast(pa.binary())
    if settings.key_format == "key":
        return key
    path = pc.binary_join_element_wise(rows["scope"], rows["collection"], ".")
    # A collection that was dropped meanwhile has no name, and its documents go with their ID.
    path = pc.coalesce(path, rows["collection_id"].cast(pa.string()))
    return pc.binary_join_element_wise(path.cast(pa.binary()), key, b".")


def partitions_of(rows: pa.Table, count: int, settings: Settings) -> pa.ChunkedArray | pa.Array:
    """Returns the partitions of records; -1 for that of the key."""
    if settings.partition_by == "key":
        return pa.repeat(pa.scalar(-1, pa.int32()), len(rows))
    vbucket = rows["vbucket"]
    return pc.subtract(vbucket, pc.multiply(pc.divide(vbucket, count), count)).cast(pa.int32())


def headers_of(
    rows: pa.Table, names: Sequence[str] = HEADERS
) -> list[tuple[str, pa.Array, list[str]]]:
    """Returns the headers of records, of those that the rows have columns for."""
    found: list[tuple[str, pa.Array, list[str]]] = []
    for name in names:
        words: list[str] | None = None
        if name == "collection":
            column, words = collections_of(rows)
        elif name in rows.column_names:
            column = rows[name]
        else:
            continue
        if pa.types.is_string(column.type):
            encoded = as_array(column).dictionary_encode()
            column, words = encoded.indices, encoded.dictionary.to_pylist()
        # Numbers without words are numbers.
        words = [] if words is None else words or [""]
        numbers = pc.fill_null(column.cast(pa.int64()), _NONE)
        found.append((name, as_array(numbers), words))
    return found


def _needed_headers(
    rows: pa.Table, values: pa.ChunkedArray, implied: Implied | None
) -> list[tuple[str, pa.Array, list[str]]]:
    """Returns the headers of those records that cannot be without."""
    if implied is None:
        # In a log, what concerns a vBucket; the envelope of a document has its position.
        are_needed = pc.is_in(rows["op"], pa.array(SPECIAL))
    else:
        are_needed = pc.and_(pc.is_valid(values), implied.are_others(rows))
    if not pc.any(are_needed).as_py():
        return []
    are_needed = as_array(are_needed)
    return [
        (name, as_array(pc.if_else(are_needed, numbers, _NONE)), words)
        for name, numbers, words in headers_of(rows)
    ]


def collections_of(rows: pa.Table) -> tuple[pa.Array, list[str]]:
    """Returns the names of collections, and the place there of each row's; null if it has none."""
    named = (
        rows.select(["collection_id", "scope", "collection"])
        .group_by("collection_id", use_threads=False)
        .aggregate([("scope", "first"), ("collection", "first")])
    )
    names = pc.binary_join_element_wise(named["scope_first"], named["collection_first"], ".")
    are_named = pc.is_valid(names)
    ids = named["collection_id"].filter(are_named).combine_chunks()
    places = pc.index_in(rows["collection_id"], value_set=ids)
    return as_array(places.cast(pa.int64())), names.filter(are_named).to_pylist()


def tombstones(found: Sequence[tuple[int, bytes]]) -> Records:
    """Returns tombstones for keys in partitions."""
    keys = pa.array([key for _, key in found], pa.binary())
    partitions = pa.array([partition for partition, _ in found], pa.int32())
    return Records(keys, pa.nulls(len(keys), pa.binary()), partitions, [])


def _envelopes(rows: pa.Table, documents: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns documents in the envelope of the connector's RawJsonWithMetadataSourceHandler."""
    text = documents.cast(pa.binary())
    if MALFORMED in rows.column_names and rows[MALFORMED].null_count < len(rows):
        text = pc.if_else(pc.is_null(rows[MALFORMED]), text, _in_base64(rows[MALFORMED]))
    members = {
        "event": _quoted(rows["op"]),
        "partition": rows["vbucket"],
        "key": _quoted(rows["key"]),
        "cas": rows["cas"],
        "bySeqno": rows["seqno"],
        "revSeqno": rows["rev"],
        "expiration": pc.divide(rows["expiry"].cast(pa.int64()), 1_000_000),
        "flags": rows["flags"],
        "vbUuid": rows["vbuuid"],
        "content": text,
    }
    parts: list[Any] = []
    for name, column in members.items():
        parts.append(("," if parts else "{") + json.dumps(name) + ":")
        of_text = column.cast(pa.string()).cast(pa.binary()) if column is not text else text
        default = b"0" if name == "expiration" else b"null"
        parts.append(pc.fill_null(of_text, pa.scalar(default, pa.binary())))
    binary = [
        pa.scalar(part.encode(), pa.binary()) if isinstance(part, str) else part for part in parts
    ]
    empty = pa.scalar(b"", pa.binary())
    return pc.binary_join_element_wise(*binary, pa.scalar(b"}", pa.binary()), empty)


def _quoted(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns text as strings of JSON."""
    column = pc.cast(column, pa.string()) if not pa.types.is_binary(column.type) else column
    if pa.types.is_binary(column.type):
        texts = [
            None if each is None else each.decode("utf-8", "replace") for each in column.to_pylist()
        ]
        column = pa.chunked_array([pa.array(texts, pa.string())])
    if pc.any(pc.match_substring_regex(column, _TO_ESCAPE)).as_py():
        texts = [None if each is None else json.dumps(each) for each in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])
    return pc.binary_join_element_wise('"', column, '"', "")


def _in_base64(column: pa.ChunkedArray) -> pa.Array:
    from base64 import b64encode

    return pa.array(
        [None if each is None else b'"%s"' % b64encode(each) for each in column.to_pylist()],
        pa.binary(),
    )
