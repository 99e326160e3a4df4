"""The change table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp_rs import _checks, _dcp_rs
from dcp_rs._arrow import require_pyarrow
from dcp_rs._documents import as_ddl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """What the change table says about one column.

    Attributes:
        name: Its name.
        included: When it is there: `basic` unless columns are named, `full` with
            `metadata="full"`, `request` if it is named or asked for by an option of its own.
        nullable: Whether it can hold nulls.
        meaning: What it holds and when it is null.
    """

    name: str
    included: str
    nullable: bool
    meaning: str


def columns() -> list[ColumnInfo]:
    """Gives every column of the change table, in its order.

    >>> [column.name for column in columns() if column.included == "basic"]
    ['op', 'key', 'value', 'scope', 'collection', 'vbucket', 'seqno', 'epoch', 'cas', 'timestamp']
    """
    return [
        ColumnInfo(name=name, included=included, nullable=nullable, meaning=meaning)
        for name, included, nullable, meaning in _dcp_rs.columns()
    ]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which columns a table has; the arguments of the same names of `Client.stream`."""

    columns: list[str] | None = None
    metadata: str = "basic"
    include_value: bool = True
    include_xattrs: bool = False
    key_type: str = "string"
    system_events: bool = False
    value_format: str = "binary"
    document_schema: str | None = None
    document_prefix: str = ""
    on_malformed: str = "null"

    def __post_init__(self) -> None:
        if self.columns is not None:
            _check_columns(self.columns)
        _checks.word("metadata", self.metadata, ["basic", "full"])
        _checks.flag("include_value", self.include_value)
        _checks.flag("include_xattrs", self.include_xattrs)
        _checks.word("key_type", self.key_type, ["string", "binary"])
        _checks.flag("system_events", self.system_events)
        _checks.word("value_format", self.value_format, ["binary", "string", "variant"])
        _checks.text("document_schema", self.document_schema, optional=True)
        _checks.text("document_prefix", self.document_prefix)
        _checks.word("on_malformed", self.on_malformed, ["null", "fail", "column"])


def _check_columns(columns: object) -> None:
    if isinstance(columns, str) or not isinstance(columns, list):
        raise _checks.wrong_type("columns", columns, "a list of column names")
    for name in columns:
        _checks.text("columns", name)


class Schema:
    """The columns a stream would have, without a connection.

        >>> Schema(columns=["seqno", "key"]).names
        ['seqno', 'key']

    `pyarrow.schema(Schema())` and other users of the Arrow PyCapsule interface take it as it is.

    Args:
        columns: As of [`Client.stream`][dcp_rs.Client.stream], like the others.
        metadata: `basic` or `full`.
        include_value: Whether documents are part of the table.
        include_xattrs: Whether extended attributes are.
        key_type: `string` or `binary`.
        value_format: `binary`, `string` or `variant`.
        document_schema: Columns that documents are decoded to.
        document_prefix: What the names of these begin with.
        on_malformed: `null`, `fail` or `column`.

    Raises:
        ConfigError: A column is unknown or named twice, or options contradict each other.
    """

    __slots__ = ("_inner",)

    def __init__(
        self,
        *,
        columns: Sequence[str] | None = None,
        metadata: Literal["basic", "full"] = "basic",
        include_value: bool = True,
        include_xattrs: bool = False,
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        document_schema: str | pa.Schema | None = None,
        document_prefix: str = "",
        on_malformed: Literal["null", "fail", "column"] = "null",
    ) -> None:
        self._inner = _dcp_rs.Schema(
            TableOptions(
                columns=names(columns),
                metadata=metadata,
                include_value=include_value,
                include_xattrs=include_xattrs,
                key_type=key_type,
                value_format=value_format,
                document_schema=as_ddl(document_schema),
                document_prefix=document_prefix,
                on_malformed=on_malformed,
            )
        )

    @property
    def names(self) -> list[str]:
        """Names of the columns in order."""
        return self._inner.names

    def to_pyarrow(self) -> pa.Schema:
        """Gives the schema as a `pyarrow.Schema`.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("Schema.to_pyarrow").schema(self)

    def __arrow_c_schema__(self) -> object:
        """Exports the schema over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_schema__()

    def __repr__(self) -> str:
        return f"<dcp_rs.Schema [{', '.join(self.names)}]>"


def names(columns: Sequence[str] | None) -> list[str] | None:
    """Makes a list of any sequence of names; a lone text is kept, to be refused by its type."""
    if columns is None or isinstance(columns, str):
        return columns  # type: ignore[return-value]  # refused by TableOptions
    return list(columns)
