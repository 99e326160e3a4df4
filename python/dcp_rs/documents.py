"""Document schemas, converted to the engine's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _checks, _keywords
from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_OPTION = "document_schema"

MALFORMED = "_malformed"
"""Name of the column of malformed documents."""

MALFORMED_FIELDS = "_malformed_fields"
"""Name of the column that notes values that do not fit their columns."""


@_keywords.checked
@dataclass(frozen=True)
class DocumentSchema:
    """How to decode documents, for `document_schema` of `dcp_rs.Client.stream`.

        >>> documents = DocumentSchema("name STRING, op STRING", prefix="doc_")
        >>> Schema(columns=["key", "doc_name"], document_schema=documents).names
        ['key', 'doc_name']

    Attributes:
        schema: Columns to decode JSON documents to, as text or as a `pyarrow.Schema`. With `None`,
            documents stay in the column `value`, and are checked unless `value_format` is `binary`.
        prefix: Prefix of the names of these columns, for documents whose fields have the names of
            table columns.
        on_malformed: What to do with a document that is not a JSON object or has a value that does
            not fit the schema. `null` makes only this value null, and all columns of a document
            that is not a JSON object; the column `_malformed_fields` says why. `column` makes all
            columns of the document null and puts its bytes in the column `_malformed`. `fail` ends
            the stream with a `dcp_rs.exceptions.DataError`. Without a schema, this applies to
            `value_format`.
    """

    schema: str | pa.Schema | None = None
    prefix: str = ""
    on_malformed: Literal["null", "fail", "column"] = "null"


def as_options(given: Any) -> dict[str, object] | None:
    """Returns what the engine reads: a `DocumentSchema` by names, with its schema as text.

    Raises:
        ConfigError: It is not a schema, or has a type that documents cannot be decoded to.
        ImportError: It is an Arrow schema, and PyArrow is not installed.
    """
    if given is None:
        return None
    documents = given if isinstance(given, DocumentSchema) else DocumentSchema(given)
    return vars(documents) | {"schema": as_ddl(documents.schema)}


def as_ddl(schema: object) -> str | None:
    """Returns the text of a schema: of one that is text already, or of an Arrow schema.

    Raises:
        ConfigError: It is neither, or has a type that documents cannot be decoded to.
        ImportError: It is an Arrow schema, and PyArrow is not installed.
    """
    if schema is None:
        return None
    if isinstance(schema, str):
        _checks.utf8(_OPTION, schema)
        if schema.strip().lower() == "infer":
            raise ConfigError(
                "is inferred by dcp_rs.replicate alone: dcp-rs schema prints what it would be",
                option=_OPTION,
            )
        return schema
    if not hasattr(schema, "__arrow_c_schema__"):
        if isinstance(schema, dict):
            raise ConfigError(
                "must be text or a pyarrow.Schema, not dict: write 'name STRING, n BIGINT' or"
                " pyarrow.schema({...}); those of several collections are an option of"
                " dcp_rs.replicate, tables={pattern: {...}}",
                option=_OPTION,
            )
        raise _checks.wrong_type(_OPTION, schema, "text or a pyarrow.Schema")
    pa = require_pyarrow(_OPTION)
    # Through the C interface, a name would end at a NUL.
    return _fields(schema if isinstance(schema, pa.Schema) else pa.schema(schema), "")


def _fields(fields: pa.Schema | pa.StructType, path: str) -> str:
    return ", ".join(_field(field, path) for field in fields)


def _field(field: pa.Field, path: str) -> str:
    if "\0" in field.name:
        raise ConfigError("a name has a NUL, which no column can have", option=_OPTION)
    name = field.name.replace("`", "``")
    return f"`{name}` {_element(field, path + field.name)}"


def _element(field: pa.Field, path: str) -> str:
    if not field.nullable:
        raise ConfigError(f"{path} must be nullable: a document may lack any field", option=_OPTION)
    return _type(field.type, path)


def _type(arrow: pa.DataType, path: str) -> str:
    """Returns Spark's name of a type."""
    pa = require_pyarrow(_OPTION)
    if pa.types.is_decimal128(arrow) and 0 <= arrow.scale <= arrow.precision:
        return f"DECIMAL({arrow.precision}, {arrow.scale})"
    if pa.types.is_list(arrow):
        return f"ARRAY<{_element(arrow.value_field, f'{path}[]')}>"
    if pa.types.is_map(arrow):
        return f"MAP<{_type(arrow.key_type, path)}, {_element(arrow.item_field, f'{path}[]')}>"
    if pa.types.is_struct(arrow):
        if any(b"variant" in (field.metadata or {}) for field in arrow):
            return "VARIANT"
        return f"STRUCT<{_fields(arrow, f'{path}.')}>"
    name = {
        pa.bool_(): "BOOLEAN",
        pa.int8(): "TINYINT",
        pa.int16(): "SMALLINT",
        pa.int32(): "INT",
        pa.int64(): "BIGINT",
        pa.float32(): "FLOAT",
        pa.float64(): "DOUBLE",
        pa.string(): "STRING",
        pa.binary(): "BINARY",
        pa.date32(): "DATE",
        pa.timestamp("us", "UTC"): "TIMESTAMP",
        pa.timestamp("us"): "TIMESTAMP_NTZ",
    }.get(arrow)
    if name is None:
        raise ConfigError(
            f"{path} is {arrow}, which documents cannot be decoded to: use bool, int8 "
            "to int64, float32, float64, decimal128, string, binary, date32, timestamp[us], "
            "timestamp[us, tz=UTC], list, map, struct or a variant, and cast afterwards",
            option=_OPTION,
        )
    return name
