"""Run a query until it has read what there is."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dcp_rs import _checks
from dcp_rs.spark.driver import Driver
from dcp_rs.spark.errors import SparkReadError
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.progress import last_batch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyspark.sql.streaming.query import StreamingQuery

    from dcp_rs.planner import Offsets


def run_available_now(
    writer: Any, options: Mapping[str, object] | ReadOptions, *, timeout: float | None = None
) -> StreamingQuery:
    """Runs a query with `trigger(availableNow=True)` until it has read what there is now.

    On PySpark 4.0 and 4.1 this trigger ends a query after one batch, even if `maxOffsetsPerTrigger`
    left rows, or if the batch was planned before a restart. Then the query is run again, up to the
    changes that may be read when this function is called.

        changes = spark.readStream.format("couchbase.dcp").options(**options).load()
        writer = changes.writeStream.foreachBatch(sink).option("checkpointLocation", "...")
        dcp_rs.spark.run_available_now(writer, options)

    Args:
        writer: A `DataStreamWriter` with its sink and its checkpoint; not started.
        options: The options of the stream. It connects with them, in this process.
        timeout: Seconds that all runs together may take; by default, unlimited.

    Returns:
        The last run, which has ended.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached; or `COUCHBASE_DCP_TIMEOUT`: the time is over,
            and the query stopped. Its checkpoint stays usable.
    """
    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    if timeout is not None:
        _checks.seconds("timeout", timeout, 0, 1e9)
    deadline = None if timeout is None else time.monotonic() + timeout
    with Driver(parsed) as driver:
        target = driver.latest()
    from dcp_rs.spark.source import TELLS_START

    # Before PySpark 4.2, a run may be a batch that was planned before, of which Spark reports
    # nothing if its sink did not read it.
    may_have_skipped = not TELLS_START
    # It may also end on a branch that was lost, at a seqno that the next run reads again.
    may_be_lost = not TELLS_START
    while True:
        query: StreamingQuery = writer.trigger(availableNow=True).start()
        left = None if deadline is None else deadline - time.monotonic()
        if not _wait(query, left):
            query.stop()
            raise SparkReadError(
                "COUCHBASE_DCP_TIMEOUT",
                f"the query has not read what there is after {timeout} s; run it again",
            )
        batch = last_batch(query, str(target["bucket"]))
        if batch is None and may_have_skipped:
            may_have_skipped = False
            continue
        if batch is None or batch[0] == batch[1]:
            return query
        if _reaches(batch[1], target):
            if not may_be_lost or batch[1]["u"] == target["u"]:
                return query
            may_be_lost = False


def _wait(query: StreamingQuery, seconds: float | None) -> bool:
    if seconds is None:
        query.awaitTermination()
        return True
    # Spark takes no 0.
    return bool(query.awaitTermination(max(1, math.ceil(seconds))))


def _reaches(end: Mapping[str, Any], target: Offsets) -> bool:
    """Whether a read that ends here has what there was, unless it was rolled back since."""
    return all(read >= last for read, last in zip(end["s"], target["s"], strict=False))
