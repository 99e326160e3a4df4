"""Data sources that only repeat one batch: the upper limit of Spark itself."""

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
    """Returns the batch of a file, read once per process."""
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).get_batch(0)


def repeated(path: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Repeats the batch of a file until there are so many rows."""
    batch = batch_in(path)
    while rows > 0:
        yield batch.slice(0, min(rows, batch.num_rows))
        rows -= batch.num_rows


def share(rows: int, tasks: int, number: int) -> int:
    """Returns how many of the rows a task has, of equal shares."""
    return rows * (number + 1) // tasks - rows * number // tasks


class CachedReader(DataSourceReader):
    """Returns its rows in equal partitions."""

    def __init__(self, path: str, rows: int, tasks: int) -> None:
        self._path, self._rows, self._tasks = path, rows, tasks

    def partitions(self) -> list[InputPartition]:
        """Returns the partitions."""
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Repeats the batch."""
        return repeated(self._path, share(self._rows, self._tasks, partition.value))


class TickReader(DataSourceStreamReader):
    """Returns the batch in each task of every micro-batch, or as many rows as are asked for."""

    def __init__(self, path: str, tasks: int, rows: int | None) -> None:
        self._path, self._tasks, self._rows = path, tasks, rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Returns the first offset."""
        return {"tick": 0}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: ARG002, N802
        """Returns the next offset."""
        return {"tick": start["tick"] + 1}

    def partitions(self, start: object, end: object) -> list[InputPartition]:  # noqa: ARG002
        """Returns the partitions."""
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Returns the batch."""
        if self._rows is None:
            return iter([batch_in(self._path)])
        return repeated(self._path, share(self._rows, self._tasks, partition.value))


class CachedDataSource(DataSource):
    """The data source named `cached`."""

    @classmethod
    def name(cls) -> str:
        """Returns the name for `format`."""
        return "cached"

    def reader(self, schema: StructType) -> CachedReader:  # noqa: ARG002
        """Returns the reader."""
        return CachedReader(
            self.options["batch"], int(self.options["rows"]), int(self.options["tasks"])
        )

    def streamReader(self, schema: StructType) -> TickReader:  # noqa: ARG002, N802
        """Returns the micro-batch reader."""
        rows = self.options.get("rows")
        tasks = int(self.options.get("tasks", "1"))
        return TickReader(self.options["batch"], tasks, None if rows is None else int(rows))
