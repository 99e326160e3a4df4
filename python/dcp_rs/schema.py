"""The change table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp_rs import _dcp_rs, _display
from dcp_rs._libraries import require_pyarrow
from dcp_rs.documents import DocumentSchema, as_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from dcp_rs.options import Include


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """Description of a column of the change table.

    Attributes:
        name: Its name.
        included: When it is included: `basic` by default, `full` with `columns="full"`, `request`
            if you name it, or name it in `include`.
        nullable: Whether it can hold nulls.
        meaning: What it contains and when it is null.
    """

    name: str
    included: str
    nullable: bool
    meaning: str


def columns() -> list[ColumnInfo]:
    """Returns every column of the change table, in order.

    >>> [column.name for column in columns() if column.included == "basic"]
    ['op', 'key', 'value', 'scope', 'collection', 'vbucket', 'seqno', 'epoch', 'cas', 'timestamp']
    """
    return _dcp_rs.columns()


class Schema:
    """The columns that a stream would have, without a connection.

        >>> Schema(columns=["seqno", "key"]).names
        ['seqno', 'key']

    Pass it to `pyarrow.schema(Schema())`, or to any other user of the Arrow PyCapsule interface.

    Args:
        columns: `basic`, `full` or names. All arguments are those of `dcp_rs.Client.stream`.
        key_type: `string` or `binary`.
        value_format: `binary`, `string` or `variant`.
        document_schema: Columns to decode documents to.
        include: What is delivered on request; with `xattrs` and `history`, `basic` and `full` have
            the columns of these names.

    Raises:
        ConfigError: A column is unknown or named twice, or options contradict each other.
    """

    __slots__ = ("_inner",)

    def __init__(
        self,
        *,
        columns: Literal["basic", "full"] | Sequence[str] = "basic",
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        document_schema: str | pa.Schema | DocumentSchema | None = None,
        include: Include | Iterable[Include] = (),
    ) -> None:
        options = dict(locals())
        del options["self"]
        options["document_schema"] = as_options(document_schema)
        self._inner = _dcp_rs.Schema(options)

    @property
    def names(self) -> list[str]:
        """Names of the columns in order."""
        return self._inner.names

    def to_pyarrow(self) -> pa.Schema:
        """Returns the schema as a `pyarrow.Schema`.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("Schema.to_pyarrow").schema(self)

    def __arrow_c_schema__(self) -> object:
        """Exports the schema over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_schema__()

    def __repr__(self) -> str:
        return f"<dcp_rs.Schema [{_display.names(self.names)}]>"
