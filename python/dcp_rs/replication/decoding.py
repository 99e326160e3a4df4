"""Decodes the documents of a table apart from its stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs import _dcp_rs
from dcp_rs._logging import about
from dcp_rs.documents import MALFORMED
from dcp_rs.schema import columns as change_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_rs.replication.inferring import InferredField
    from dcp_rs.replication.state import Nested

_log = logging.getLogger("dcp_rs.documents")

EXTRA = "_extra"
"""Column of JSON with what no other column holds."""

_FLAGS = "_flags"
# What a document is to its columns: a sum of these.
HAS_UNMAPPED, HAS_MALFORMED, IS_MALFORMED = 1, 2, 4

# Columns that PostgreSQL has in every table, and ours that are no columns of a stream.
_OTHERS = ("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid", "generation", "_deleted_at")
RESERVED = (
    *(each.name for each in change_columns()),
    *_OTHERS,
    MALFORMED,
    "_malformed_fields",
    EXTRA,
)
"""Names that columns of inferred schemas do not have."""


class Documents(NamedTuple):
    """Documents, as the engine takes them.

    Attributes:
        offsets: Where each begins in the bytes, and where the last one ends.
        bytes: The bytes.
        kinds: For each row 0 for none, 1 for JSON or 2 for another document.
    """

    offsets: memoryview
    bytes: memoryview
    kinds: memoryview

    @classmethod
    def of(cls, changes: pa.Table, only: pa.Array | None = None) -> Documents:
        """Returns the documents of changes, with the columns of a stream.

        Args:
            changes: The changes.
            only: Whether each row counts.
        """
        is_document = pc.equal(changes["op"], "mutation")
        if only is not None:
            is_document = pc.and_(is_document, only)
        is_json = pc.fill_null(pc.equal(changes["datatype"], "json"), False)
        kinds = pc.if_else(is_document, pc.if_else(is_json, 1, 2), 0).cast(pa.uint8())
        found = bytes_of(changes).combine_chunks()
        _, offsets, data = found.buffers()
        ends = view_of(offsets).cast("i")[found.offset : found.offset + len(found) + 1]
        if not len(found):
            ends = memoryview(b"\0\0\0\0").cast("i")
        return cls(ends, view_of(data), view_of(as_array(kinds).buffers()[1])[: len(found)])


def bytes_of(changes: pa.Table) -> pa.ChunkedArray:
    """Returns the documents of changes as bytes."""
    found = changes["value"].cast(pa.binary())
    if MALFORMED in changes.column_names and changes[MALFORMED].null_count < len(changes):
        found = pc.coalesce(found, changes[MALFORMED])
    return found


def as_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column as an array of its own, that begins at its first buffer's beginning."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if len(chunks) == 1 and not chunks[0].offset:
        return chunks[0]
    return pa.concat_arrays([pa.array([], column.type), *chunks])


def view_of(buffer: pa.Buffer | None) -> memoryview:
    """Returns the bytes of a buffer of PyArrow."""
    return memoryview(b"") if buffer is None else memoryview(buffer).cast("B")


class Decoded(NamedTuple):
    """What documents are in columns.

    Attributes:
        columns: The columns by name, with the notes of what does not fit.
        flags: What each document is to its columns.
        missing: Fields of the schema that no document has.
        documents: Documents that are JSON objects.
    """

    columns: dict[str, pa.Array]
    flags: pa.Array
    missing: list[str]
    documents: int

    def has(self, flag: int) -> pa.Array:
        """Returns whether each document has a flag."""
        return pc.not_equal(pc.bit_wise_and(self.flags, pa.scalar(flag, pa.int8())), 0)


class Decoder:
    """Decodes documents to the columns of a schema.

    Args:
        schema: The schema as text.
        nested: What becomes of objects.
        prefix: Prefix of the names of columns; `None` to find names that are free.
        is_exact: Whether a number that its column would round does not fit, nor text in a column of
            numbers.
        keeps_rest: Whether a document of which a value does not fit keeps the other values.
        reserved: Other names that no column has.

    Raises:
        ConfigError: The schema is wrong.
    """

    def __init__(
        self,
        schema: str,
        nested: Nested = "json",
        *,
        prefix: str | None = None,
        is_exact: bool,
        keeps_rest: bool = True,
        reserved: Sequence[str] = (),
    ) -> None:
        self._inner = _dcp_rs.DocumentDecoder(
            {
                "schema": schema,
                "nested": nested,
                "reserved": [*RESERVED, *reserved],
                "prefix": prefix,
                "is_exact": is_exact,
                "keeps_extra": True,
                "keeps_rest": keeps_rest,
            }
        )
        self.keeps_rest = keeps_rest
        self.names: Sequence[str] = self._inner.names
        self.schema: str = self._inner.schema
        self.fields: list[pa.Field] = [
            each for each in pa.schema(self._inner) if each.name != _FLAGS
        ]

    def decode(self, changes: pa.Table) -> Decoded:
        """Decodes the documents of changes."""
        decoded = self._inner.decode(*Documents.of(changes))
        found = pa.record_batch(decoded)
        columns = dict(zip(found.schema.names, found.columns, strict=True))
        return Decoded(columns, columns.pop(_FLAGS), decoded.missing, decoded.documents)

    def grown(
        self, changes: pa.Table, only: pa.Array, *, adds_fields: bool, widens_types: bool
    ) -> str:
        """Returns a schema whose columns hold these documents, too."""
        given = Documents.of(changes, only)
        return self._inner.grown(*given, adds_fields, widens_types)


class Inference:
    """What documents were seen to have, to infer the schema that holds them.

    Args:
        nested: What becomes of objects.
        examples: Whether to keep an example of each field.
        reserved: Other names that no column has.
    """

    def __init__(
        self, nested: Nested, *, examples: bool = False, reserved: Sequence[str] = ()
    ) -> None:
        self._inner = _dcp_rs.Inference(
            {"nested": nested, "reserved": [*RESERVED, *reserved], "examples": examples}
        )

    def add(self, changes: pa.Table) -> None:
        """Adds the documents of changes."""
        self._inner.add(*Documents.of(changes))

    @property
    def objects(self) -> int:
        """Documents that are JSON objects."""
        return self._inner.objects

    @property
    def others(self) -> int:
        """Documents that are other JSON."""
        return self._inner.others

    @property
    def binary(self) -> int:
        """Documents that are not JSON."""
        return self._inner.binary

    @property
    def schema(self) -> str | None:
        """The schema as text; `None` if no column can be made."""
        return self._inner.schema

    @property
    def fields(self) -> list[InferredField]:
        """The fields."""
        return self._inner.fields

    def warn_of_left_out(self, collection: str) -> None:
        """Warns of fields that have no column, since another column's name differs in case only.

        Args:
            collection: The collection of the documents.
        """
        kept = {name.lower(): name for name in _names(self.schema)}
        for field in self.fields:
            name = field.path[0]
            column = kept.get(name.lower(), name)
            if len(field.path) == 1 and column != name and field.type is not None:
                _log.warning(
                    "in %s, the field %s has no column, since that of %s differs in case only:"
                    " set extra to keep it in _extra",
                    collection,
                    name,
                    column,
                    extra=about(
                        "field_left_out", collection=collection, kept=column, left_out=name
                    ),
                )


def _names(schema: str | None) -> Sequence[str]:
    """Returns the names of the fields of a schema."""
    return [] if schema is None else Decoder(schema, prefix="", is_exact=False).names
