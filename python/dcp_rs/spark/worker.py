"""Code that runs in Spark's Python workers: reads a partition as Arrow batches."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_rs import _checks
from dcp_rs._clients import CLIENTS
from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import DcpError
from dcp_rs.spark.errors import SparkReadError, coded
from dcp_rs.spark.partition import Partition
from dcp_rs.spark.planning import partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa

    from dcp_rs.spark.options import ReadOptions


def read_partition(partition: Partition) -> Iterator[pa.RecordBatch]:
    """Reads one partition, in seqno order within each vBucket.

    Reads of this process share a connection and keep it for the next one. The stream is closed when
    the iterator is exhausted, closed or dropped.

    Args:
        partition: From `dcp_rs.spark.partitions`.

    Yields:
        Batches with the schema of `dcp_rs.spark.schema`.

    Raises:
        ConfigError: `partition` is not a partition.
        SparkReadError: The read failed; the text begins with a code in square brackets.
        ImportError: PyArrow is not installed.
    """
    _checks.instance("partition", partition, Partition, "a partition from dcp_rs.spark.partitions")
    pa = require_pyarrow("dcp_rs.spark", "spark")
    if partition.options.worker_gc_freeze:
        _freeze_once()
    doing = f"reading {len(partition.ranges)} vBuckets of bucket {partition.options.bucket}"
    connection, delivered = partition.options.connection(), False
    while True:
        is_kept = CLIENTS.get(connection) is not None
        try:
            with partition.open() as changes:
                for batch in changes:
                    delivered = True
                    yield _without_marks(partition.options, pa.record_batch(batch))
        except DcpError as error:
            CLIENTS.forget(connection)
            # A client of an earlier task may no longer work: its node may be gone, the bucket
            # recreated, the password changed. A new client shows the reason.
            if is_kept and not delivered:
                continue
            raise coded(error, doing) from error
        return


def _without_marks(options: ReadOptions, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leaves out what comes with system events, and documents that have columns."""
    if "system_events" not in options.include or "op" not in batch.schema.names:
        return batch
    import pyarrow as pa
    import pyarrow.compute as pc

    is_mark = pc.equal(batch["op"], "caught_up")
    if pc.any(is_mark).as_py():
        batch = batch.filter(pc.invert(is_mark))
    if options.value_is_of_events:
        is_event = pc.equal(batch["op"], "system_event")
        values = pc.if_else(is_event, batch["value"], pa.scalar(None, batch["value"].type))
        batch = batch.set_column(batch.schema.get_field_index("value"), "value", values)
    return batch


_frozen_in: int | None = None


def _freeze_once() -> None:
    """Excludes loaded modules from the garbage collection that Spark runs after every task.

    Only in a Spark worker: other processes must not be tuned.
    """
    global _frozen_in  # noqa: PLW0603 - the state of the process is what it is about
    context = sys.modules.get("pyspark.taskcontext")
    if context is None or context.TaskContext.get() is None or _frozen_in == os.getpid():
        return
    gc.collect()
    gc.freeze()
    _frozen_in = os.getpid()


@dataclass(frozen=True)
class MapInArrowTask:
    """A function for `DataFrame.mapInArrow`, which reads partitions by their numbers.

    Its length is the number of partitions. The data frame must have as many rows and Spark
    partitions: `spark.range(0, n, 1, n)`.
    """

    partitions: tuple[Partition, ...]

    def __len__(self) -> int:
        """Returns the number of partitions."""
        return len(self.partitions)

    def __bool__(self) -> bool:
        """Is always true, even if there is nothing to read."""
        return True

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Reads the partitions numbered in the first column of `batches`, one after the other."""
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        count = len(self)
        for number in numbers:
            if not 0 <= number < count:
                raise SparkReadError(
                    "COUCHBASE_DCP_CONFIG",
                    f"there is no partition {number}: use spark.range(0, {count}, 1, {count})",
                )
            yield from read_partition(self.partitions[number])


def map_in_arrow(
    options: Mapping[str, object] | ReadOptions, partitions: list[Partition] | None = None
) -> MapInArrowTask:
    """Creates the function for `DataFrame.mapInArrow`.

    Args:
        options: See `dcp_rs.spark.ReadOptions`.
        partitions: Partitions to read; by default, planned now.

    Returns:
        A function that can be pickled. With `task = map_in_arrow(options)` and `n = len(task)`, the
            data frame is `spark.range(0, n, 1, n).mapInArrow(task, schema(options))`, with the same
            options: Spark takes columns by their places. With fewer than `n` rows, it reads a part.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached.
    """
    return MapInArrowTask(tuple(_plan(options) if partitions is None else partitions))


# The parameter of `map_in_arrow` has the name of the function.
_plan = partitions
