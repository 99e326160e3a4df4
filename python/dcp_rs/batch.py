"""Batches of changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_rs._arrow import require_pyarrow
from dcp_rs.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dcp_rs import _dcp_rs


class ChangeBatch:
    """Some changes, in seqno order within each vBucket, as columns.

    Made by a `dcp_rs.ChangeStream`. Any library that knows the Arrow PyCapsule
    interface takes it as it is, without a copy: `pyarrow.record_batch(batch)`.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: _dcp_rs.ChangeBatch) -> None:
        self._inner = inner

    @property
    def num_rows(self) -> int:
        """Number of changes."""
        return self._inner.num_rows

    @property
    def nbytes(self) -> int:
        """Size of the columns in bytes."""
        return self._inner.nbytes

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return self._inner.column_names

    @property
    def checkpoint(self) -> Checkpoint:
        """Where the stream stands once this batch has been processed.

        Store it with what was made of the batch, or after it, never before.
        """
        return Checkpoint._of(self._inner.checkpoint)  # noqa: SLF001 - the package's own

    def rows(self) -> Iterator[dict[str, object]]:
        """Iterates over the changes, each a dict by column name.

        A convenience: text is `str`, binary `bytes`, a timestamp a `datetime` in UTC, xattrs and
        objects are dicts. Columns are much faster for more than a look.
        """
        return iter(self._inner.to_dicts())

    def tuples(self) -> Iterator[tuple[object, ...]]:
        """Iterates over the changes, each a tuple in the order of `column_names`.

        The values are those of `rows`, at less cost: there is no dict to make for each change.
        """
        return self._inner.to_tuples()

    def to_pyarrow(self) -> pa.RecordBatch:
        """Gives the batch as a `pyarrow.RecordBatch`, without a copy.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("ChangeBatch.to_pyarrow").record_batch(self)

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Exports the batch over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_array__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """Exports the batch's schema over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_schema__()

    def __len__(self) -> int:
        """Gives the number of changes."""
        return self._inner.num_rows

    def __repr__(self) -> str:
        columns = ", ".join(self.column_names)
        return f"<dcp_rs.ChangeBatch rows={self.num_rows} columns=[{columns}]>"
