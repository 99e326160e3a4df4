"""Data sources that repeat one batch, and nothing else: what Spark itself allows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType


@lru_cache
def batch_in(path: str) -> pa.RecordBatch:
    """The batch of a file, read once per process."""
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).get_batch(0)


class CachedReader(DataSourceReader):
    """Gives its rows in equal parts."""

    def __init__(self, path: str, rows: int, tasks: int) -> None:
        self._path, self._rows, self._tasks = path, rows, tasks

    def partitions(self) -> list[InputPartition]:
        """Gives the parts."""
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        """Repeats the batch."""
        batch = batch_in(self._path)
        left = self._rows // self._tasks
        while left > 0:
            yield batch.slice(0, min(left, batch.num_rows))
            left -= batch.num_rows


class TickReader(DataSourceStreamReader):
    """Gives the batch in each task of every micro-batch."""

    def __init__(self, path: str, tasks: int) -> None:
        self._path, self._tasks = path, tasks

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Begins."""
        return {"tick": 0}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: ARG002, N802
        """Goes on by one."""
        return {"tick": start["tick"] + 1}

    def partitions(self, start: object, end: object) -> list[InputPartition]:  # noqa: ARG002
        """Gives the parts."""
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        """Gives the batch."""
        return iter([batch_in(self._path)])


class CachedDataSource(DataSource):
    """The data source, by the name `cached`."""

    @classmethod
    def name(cls) -> str:
        """Gives the name for `format`."""
        return "cached"

    def reader(self, schema: StructType) -> CachedReader:  # noqa: ARG002
        """Makes the reader."""
        return CachedReader(
            self.options["batch"], int(self.options["rows"]), int(self.options["tasks"])
        )

    def streamReader(self, schema: StructType) -> TickReader:  # noqa: ARG002, N802
        """Makes the reader of micro-batches."""
        return TickReader(self.options["batch"], int(self.options.get("tasks", "1")))
