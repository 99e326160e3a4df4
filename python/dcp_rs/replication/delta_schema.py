"""What a Delta table's columns may be, and which tables deltalake writes as it should."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.target import check_fold, missing_columns, refuse_variants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

LIBRARY = "deltalake"
IS_DELETED = "_dcp_rs_is_deleted"
"""A column of the source of a merge."""
INDEX = "_dcp_rs_index"
"""A column of rows that are checked."""

_APPEND_ONLY = "delta.appendOnly"
_MAPPING = "delta.columnMapping.mode"
_CONSTRAINT = "delta.constraints."
# What deltalake is known to write, of the features that a table may have.
_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        # It adds this one itself, with properties of the table.
        "variantType",
    }
)
# The version of the protocol that has columns of this kind; those below need no feature of them.
_IDENTITY = 6
# Our own columns, and those of deltalake in a merge.
_RESERVED = ("_dcp_rs_", "__delta_rs_")
# Columns of the change data feed.
_FEED = "delta.enableChangeDataFeed"
_OF_FEED = frozenset({"_change_type", "_commit_version", "_commit_timestamp"})
# Types of which every value is the same after it was the name of a partition's folder. An empty
# text is null there, a negative decimal cannot be read, and a double is too long.
_FIT_TO_PARTITION = frozenset(
    {"byte", "short", "integer", "long", "boolean", "date", "timestamp", "timestamp_ntz"}
)
# Text that is short and never empty.
_FIT_TEXT = ("scope", "collection")


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Returns a schema in types that the table can have, every column nullable.

    Raises:
        ConfigError: A column is a VARIANT.
    """
    pa = require_pyarrow("a Delta table")
    refuse_variants(schema, LIBRARY)
    return pa.schema([_known(field).with_nullable(True) for field in schema])


def _known(field: pa.Field) -> pa.Field:
    pa = require_pyarrow("a Delta table")
    kind = field.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        kind = pa.timestamp(kind.unit, "UTC")
    elif pa.types.is_map(kind):
        kind = pa.map_(_known(kind.key_field), _known(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_known(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_known(each) for each in kind])
    return field.with_type(kind)


def check_names(schema: pa.Schema, *, is_log: bool) -> None:
    """Checks that a table can have columns of these names, and that they can be merged.

    Args:
        schema: The columns.
        is_log: Whether rows are only appended.

    Raises:
        ConfigError: A name cannot be used.
    """
    for name in schema.names:
        if "`" in name and not is_log:
            raise ConfigError(
                f"{name!a} has a backtick, with which deltalake cannot merge a "
                "column: leave it out, or write a log",
                option="document_schema",
            )
        if name.lower().startswith(_RESERVED):
            raise ConfigError(
                f"{name!a} is like the name of a column that merges add: give a prefix",
                option="document_schema",
            )
    _check_fields(list(schema))


def _check_fields(fields: Sequence[pa.Field]) -> None:
    check_fold([field.name for field in fields], "a Delta table")
    for field in fields:
        if "\0" in field.name:
            raise ConfigError(
                f"{field.name!a} has a NUL, at which deltalake would cut it: leave it out",
                option="document_schema",
            )
        kind = field.type
        _check_fields([kind.field(index) for index in range(kind.num_fields)])


def fields_to_add(table: Any, wanted: Sequence[Any], location: str) -> list[Any]:
    """Returns the fields that a table lacks.

    Args:
        table: Fields of the table.
        wanted: Fields that it must have.
        location: Name of the table, for the error.

    Raises:
        ConfigError: A column has another type, or another in capitals and small letters.
    """
    have = {field.name: field for field in table}
    by_lower = {name.lower(): name for name in have}
    for field in wanted:
        other = by_lower.get(field.name.lower(), field.name)
        if other != field.name:
            raise ConfigError(
                f"table {location} has the column {other}, and a Delta table does "
                f"not tell {field.name} from it: name it as the table does",
                option="document_schema",
            )
    missing = missing_columns(
        {name: _type(field) for name, field in have.items()},
        {field.name: _type(field) for field in wanted},
        location,
    )
    return [field for field in wanted if field.name in missing]


def _type(field: Any) -> str:
    """Returns the type of a field as normalized JSON text."""
    kind = json.loads(field.to_json())["type"]
    return kind if isinstance(kind, str) else json.dumps(kind, sort_keys=True)


def check_table(table: Any, schema: pa.Schema, location: str, *, is_log: bool) -> None:
    """Checks that deltalake can write a table, and that rows of a schema can be in it.

    Args:
        table: The table.
        schema: Columns of the rows.
        location: Name of the table, for the error.
        is_log: Whether rows are only appended.

    Raises:
        ConfigError: They cannot.
    """
    of_features = _of_features(table, is_log=is_log)
    for why in [*of_features, *_of_columns(table, schema, is_log=is_log)]:
        raise ConfigError(f"table {location} {why}", option="target")


def _of_features(table: Any, *, is_log: bool) -> Iterator[str]:
    protocol = table.protocol()
    properties: Mapping[str, str] = table.metadata().configuration
    if protocol.writer_features is None and protocol.min_writer_version >= _IDENTITY:
        yield (
            "may have identity columns (version 6 of the protocol), which deltalake cannot write: "
            "use another table"
        )
    for feature in protocol.writer_features or ():
        is_unused = feature == "columnMapping" and properties.get(_MAPPING, "none") == "none"
        if feature not in _FEATURES and not is_unused:
            yield (
                f"has the table feature {feature}, which deltalake cannot write: drop the "
                "feature, or use another table"
            )
    if properties.get(_MAPPING, "none") != "none":
        yield "maps columns (delta.columnMapping.mode), which deltalake cannot write: use another"
    if not is_log and properties.get(_APPEND_ONLY, "").lower() == "true":
        yield (
            f"is append-only ({_APPEND_ONLY}), so that no document can be replaced: unset the "
            "property, or use another table"
        )


def _of_columns(table: Any, schema: pa.Schema, *, is_log: bool) -> Iterator[str]:
    names = set(schema.names)
    metadata = table.metadata()
    has_feed = metadata.configuration.get(_FEED, "").lower() == "true"
    for field in json.loads(table.schema().to_json())["fields"]:
        name, notes = field["name"], field["metadata"]
        if "delta.invariants" in notes:
            yield f"has an invariant on column {name}: declare a CHECK constraint instead"
        if has_feed and name.lower() in _OF_FEED:
            yield f"has a change data feed ({_FEED}) and a column {name}: unset the property"
        if "delta.generationExpression" in notes and (name in names or not is_log):
            yield (
                f"generates the column {name}, which deltalake does not do when it replaces a row:"
                " use another table"
            )
        if name not in names and not field["nullable"]:
            yield (
                f"has the column {name}, which is NOT NULL and which dcp_rs does not write: drop "
                "NOT NULL, or the column"
            )
        if name in names and is_log and schema.field(name).nullable and not field["nullable"]:
            yield f"has the column {name}, which is NOT NULL, and not all events have it: drop that"
        if (
            name in metadata.partition_columns
            and name not in _FIT_TEXT
            and field["type"] not in _FIT_TO_PARTITION
        ):
            yield (
                f"is partitioned by {name}, which is {field['type']}: deltalake does not keep every"
                " value of that type: partition it by an integer, date, timestamp or collection"
            )


def constraints(table: Any) -> dict[str, str]:
    """Returns the conditions in SQL that rows of a table must meet, by name."""
    properties: Mapping[str, str] = table.metadata().configuration
    return {
        name.removeprefix(_CONSTRAINT): condition
        for name, condition in properties.items()
        if name.startswith(_CONSTRAINT)
    }


def nulls_refused(table: Any, rows: pa.Table) -> dict[int, str]:
    """Returns the indices of rows with a null in a column that may have none, and the reason."""
    pc = require_pyarrow("a Delta table").compute
    found: dict[int, str] = {}
    for field in table.schema().fields:
        if not field.nullable and field.name in rows.column_names and rows[field.name].null_count:
            for index in pc.indices_nonzero(pc.is_null(rows[field.name])).to_pylist():
                found[index] = f"the column {field.name} of the table is NOT NULL"
    return found
