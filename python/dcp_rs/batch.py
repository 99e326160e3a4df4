"""Batches of changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, overload

from dcp_rs import _checks, _dcp_rs, _display
from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd
    import polars as pl
    import pyarrow as pa


class ChangeBatch:
    """A batch of changes as columns, in seqno order within each vBucket.

    A `dcp_rs.ChangeStream` returns batches. Any library that supports the Arrow PyCapsule interface
    can take them, without a copy on the side of dcp_rs: `pyarrow.record_batch(batch)`.

    A batch is also a sequence of rows, which are dicts created on access. A slice is a batch with
    some of the rows; it makes no copy and has no checkpoint.

        >>> with EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        ...     for n in range(3):
        ...         _ = cluster.upsert(f"key_{n}", b"{}")
        ...     batch = next(client.stream(until="now", columns=["key", "seqno"]))
        >>> len(batch), batch[0], [row["key"] for row in batch[1:]]
        (3, {'key': 'key_0', 'seqno': 1}, ['key_1', 'key_2'])
    """

    __slots__ = ("_inner", "_is_part")

    def __init__(self, inner: _dcp_rs.ChangeBatch) -> None:
        self._inner = inner
        self._is_part = False

    @property
    def num_rows(self) -> int:
        """Number of changes."""
        return self._inner.num_rows

    @property
    def nbytes(self) -> int:
        """Size of the columns in bytes."""
        return self._inner.nbytes

    def __copy__(self) -> Self:
        """Returns the batch itself, which never changes."""
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        """Returns the batch itself, which never changes."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a batch cannot be pickled: pickle its columns (batch.to_pyarrow()) and its checkpoint"
        )

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return self._inner.column_names

    @property
    def checkpoint(self) -> Checkpoint:
        """The position of the stream after this batch.

        Save it together with your results, or after them, never before.

        Raises:
            ConfigError: This is a slice of a batch, and resuming after it would skip the other
                rows.
        """
        if self._is_part:
            raise ConfigError("a slice has none: use that of the whole batch", option="checkpoint")
        return Checkpoint._of(self._inner.checkpoint)  # noqa: SLF001 - the package's own

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batch, as a `pyarrow.Schema`.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("ChangeBatch.schema").schema(self)

    def rows(self) -> Iterator[dict[str, object]]:
        """Iterates over the changes as dicts by column name, like `for row in batch`.

        Text becomes `str`, binary `bytes`, timestamps a `datetime` in UTC, and xattrs and objects
        dicts. This is convenient, but columns are much faster for large amounts of data.
        """
        return iter(self._inner.to_dicts())

    def tuples(self) -> Iterator[tuple[object, ...]]:
        """Iterates over the changes as tuples in the order of `column_names`.

        The values are those of `rows`. It is faster, because it creates no dict for each change.
        """
        return self._inner.to_tuples()

    def to_pyarrow(self) -> pa.RecordBatch:
        """Returns the batch as a `pyarrow.RecordBatch`, without a copy.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("ChangeBatch.to_pyarrow").record_batch(self)

    def to_polars(self) -> pl.DataFrame:
        """Returns the batch as a `polars.DataFrame`, without a copy if Polars needs none.

        Raises:
            ImportError: Polars is not installed.
        """
        frame: pl.DataFrame = require("ChangeBatch.to_polars", "polars").DataFrame(self)
        return frame

    def to_pandas(self) -> pd.DataFrame:
        """Returns the batch as a `pandas.DataFrame`, converted by PyArrow.

        Whole numbers that can be null, such as `cas`, are pandas' nullable integers: as floats they
        would lose digits.

        Raises:
            ImportError: pandas or PyArrow is not installed.
        """
        pd = require("ChangeBatch.to_pandas", "pandas")
        pa = require_pyarrow("ChangeBatch.to_pandas")

        nullable = {
            pa.int8(): pd.Int8Dtype(),
            pa.int16(): pd.Int16Dtype(),
            pa.int32(): pd.Int32Dtype(),
            pa.int64(): pd.Int64Dtype(),
        }
        batch = pa.record_batch(self)
        frame = batch.to_pandas()
        for column, field in zip(batch.columns, batch.schema, strict=True):
            if field.nullable and field.type in nullable:
                frame[field.name] = column.to_pandas(types_mapper=nullable.get)
        return frame

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Exports the batch over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_array__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """Exports the batch's schema over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_schema__()

    def __len__(self) -> int:
        """Returns the number of changes."""
        return self._inner.num_rows

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Iterates over the changes, as `rows` does."""
        return self.rows()

    @overload
    def __getitem__(self, index: int) -> dict[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> dict[str, object] | Self:
        """Returns a change as a dict, or a batch of some of the changes, without a copy.

        Raises:
            IndexError: There is no such row.
            ConfigError: The index is neither a row number nor a slice, or the slice has a step.
        """
        if isinstance(index, slice):
            return self._part(index)
        if not isinstance(index, int):
            raise _checks.wrong_type(
                "index",
                index,
                "the number of a row or a slice (columns: to_pyarrow(), to_polars())",
            )
        rows = len(self)
        if not -rows <= index < rows:
            raise IndexError(f"index: row {index} is out of range: the batch has {rows} rows")
        row: dict[str, object] = self._inner.slice(index % rows, 1).to_dicts()[0]
        return row

    def _part(self, index: slice) -> Self:
        for bound in (index.start, index.stop, index.step):
            if bound is not None and not isinstance(bound, int):
                raise _checks.wrong_type("index", bound, "a slice of whole numbers")
        if index.step not in {None, 1}:
            raise ConfigError(f"slices with a step are not supported: {index.step}", option="index")
        start, stop, _ = index.indices(len(self))
        rows = max(stop - start, 0)
        if rows == len(self):
            return self
        part = type(self)(self._inner.slice(start, rows))
        part._is_part = True  # noqa: SLF001 - its own
        return part

    def __repr__(self) -> str:
        columns = _display.names(self.column_names)
        return f"<dcp_rs.ChangeBatch rows={self.num_rows} columns=[{columns}]>"

    def _repr_html_(self) -> str:
        """Returns the first rows as a table, for notebooks."""
        shown = self._inner.slice(0, _display.ROWS).to_tuples()
        return _display.table("dcp_rs.ChangeBatch", self.column_names, shown, self.num_rows)


class CollectionRows(NamedTuple):
    """Rows of a collection."""

    rows: list[pa.RecordBatch]
    nbytes: int
    oldest: int | None
    """The oldest time of a CAS, in microseconds since 1970; `None` without one."""


def by_collection(batches: Iterable[ChangeBatch]) -> dict[int | None, CollectionRows]:
    """Returns the rows of batches by the ID of their collection, `None` for those without one.

    Each row is copied once, and the rows of a collection are one batch, unless there is one only.

    Raises:
        ImportError: PyArrow is not installed.
    """
    made = require_pyarrow("batches by collection").record_batch
    found = _dcp_rs.by_collection([batch._inner for batch in batches])  # noqa: SLF001 - its own
    return {
        number: CollectionRows([made(each) for each in rows], nbytes, oldest)
        for number, (rows, nbytes, oldest) in found.items()
    }
