"""What an Iceberg table must be like to be written by pyiceberg."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.target import missing_columns, type_name

if TYPE_CHECKING:
    import pyarrow as pa

_FORMAT = "write.format.default"
# Of the format of tables, the newest that pyiceberg writes.
_VERSION = 2


def as_iceberg(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with types that Iceberg supports, all of whose columns are optional."""
    pa = require_pyarrow("an Iceberg target")
    return pa.schema([_known(field).with_nullable(True) for field in schema])


def _known(field: pa.Field) -> pa.Field:
    pa = require_pyarrow("an Iceberg target")
    kind = field.type
    if kind in {pa.int8(), pa.int16()}:
        kind = pa.int32()
    elif pa.types.is_map(kind):
        kind = pa.map_(_known(kind.key_field), _known(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_known(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_known(each) for each in kind])
    return field.with_type(kind)


def refuse_lost_nulls(schema: pa.Schema) -> None:
    """Checks that pyiceberg writes a null of every column as null.

    Raises:
        ConfigError: It does not.
    """
    for field in schema:
        if _loses_nulls(field.type):
            raise ConfigError(
                f"{field.name} is or has an ARRAY or a MAP of STRUCT, which"
                " pyiceberg writes as empty if it is null: declare it as STRING",
                option="document_schema",
            )


def _loses_nulls(kind: pa.DataType) -> bool:
    """Whether a type is or contains a list or map of structs.

    pyiceberg makes these anew from their offsets, on which no null is marked.
    """
    pa = require_pyarrow("an Iceberg target")
    if pa.types.is_map(kind):
        parts = [kind.item_type]
    else:
        parts = [kind.field(index).type for index in range(kind.num_fields)]
    is_struct = any(pa.types.is_struct(part) for part in parts)
    return (is_struct and not pa.types.is_struct(kind)) or any(map(_loses_nulls, parts))


def check_table(table: Any, name: str, schema: pa.Schema) -> pa.Schema:
    """Returns the schema of rows as a table takes them.

    Args:
        table: The table.
        name: Its name.
        schema: Columns of the rows, which say whether they can be null.

    Raises:
        ConfigError: It cannot be written, by pyiceberg or with these rows.
    """
    if table.metadata.format_version > _VERSION:
        raise ConfigError(
            f"table {name} has format-version {table.metadata.format_version}, and"
            f" pyiceberg writes {_VERSION}: use another table",
            option="target",
        )
    kind = table.properties.get(_FORMAT, "parquet")
    if kind.lower() != "parquet":
        raise ConfigError(
            f"table {name} has the property {_FORMAT}={kind}, and pyiceberg writes Parquet:"
            " set it to parquet",
            option="target",
        )
    for field in table.spec().fields:
        source = table.schema().find_field(field.source_id)
        try:
            field.transform.pyarrow_transform(source.field_type)
        except Exception as error:
            raise ConfigError(
                f"table {name} is partitioned by {field.name} ({field.transform}), which"
                f" pyiceberg cannot write: {' '.join(str(error).split())}",
                option="target",
            ) from error
    required = {each.name for each in table.schema().fields if each.required}
    for column in sorted(required):
        if column not in schema.names or schema.field(column).nullable:
            raise ConfigError(
                f"table {name} requires a value for {column}, which not every row has:"
                " make that column optional",
                option="target",
            )
    return schema_with(schema, required)


def schema_with(schema: pa.Schema, required: set[str]) -> pa.Schema:
    """Returns a schema as Iceberg has it, with the columns that must have a value."""
    pa = require_pyarrow("an Iceberg target")
    return pa.schema([each.with_nullable(each.name not in required) for each in as_iceberg(schema)])


def is_promotion(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether Iceberg can change a column from one type to another."""
    pa = require_pyarrow("an Iceberg target")
    if pa.types.is_decimal128(old) and pa.types.is_decimal128(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    small = {pa.int8(), pa.int16(), pa.int32()}
    return (old in small and new == pa.int64()) or (old, new) == (pa.float32(), pa.float64())


def missing(table: Any, name: str, schema: pa.Schema) -> dict[str, str]:
    """Returns the columns that a table lacks.

    Raises:
        ConfigError: A column has another type, or differs only in case from one that it has.
    """
    have = {field.name: type_name(field.type) for field in table.schema().as_arrow()}
    added = missing_columns(have, {field.name: type_name(field.type) for field in schema}, name)
    lowered = {column.lower(): column for column in have}
    for column in added:
        if column.lower() in lowered:
            raise ConfigError(
                f'the column "{column}" differs only in case from'
                f' "{lowered[column.lower()]}" of table {name}, which many readers do not tell'
                " apart: call it otherwise",
                option="document_schema",
            )
    return added
