"""PostgreSQL's types of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


def types_of(schema: pa.Schema) -> dict[str, str]:
    """Returns the types of columns, by name.

    Raises:
        ConfigError: There is none for a column.
    """
    return {each.name: _type(each) for each in schema}


def _type(field: pa.Field) -> str:
    """Returns PostgreSQL's name of a column's type, as `format_type` writes it."""
    pa = require_pyarrow("a PostgreSQL target")
    kind = field.type
    if field.name == "value" and pa.types.is_string(kind):
        return "json"
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return f"{_type(kind.value_field)}[]"
    if pa.types.is_decimal128(kind):
        return f"numeric({kind.precision},{kind.scale})"
    name = {
        pa.bool_(): "boolean",
        pa.int8(): "smallint",
        pa.int16(): "smallint",
        pa.int32(): "integer",
        pa.int64(): "bigint",
        pa.float32(): "real",
        pa.float64(): "double precision",
        pa.string(): "text",
        pa.binary(): "bytea",
        pa.date32(): "date",
        pa.timestamp("us", "UTC"): "timestamp with time zone",
        pa.timestamp("us"): "timestamp without time zone",
    }.get(kind)
    if name is None:
        raise ConfigError(
            f"PostgreSQL has no column type for {field.name}, which is {kind}: "
            "declare it as STRING, which gives its JSON text",
            option="document_schema",
        )
    return name
