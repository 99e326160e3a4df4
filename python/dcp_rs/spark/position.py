"""Where a query stands, for versions of Spark that do not say it.

PySpark 4.2 and later tell a source where a batch starts. On 4.0 and 4.1 the source has to know it:

* A new query asks for the end of its first batch, then for where it starts, then for the
  partitions between the two.
* A query that goes on from its checkpoint first asks for the partitions from the end of its newest
  planned batch to that same end. If that batch was not finished, its partitions follow, from where
  it starts; before them, if it was the first one, Spark asks where the query starts.
* From then on, a batch starts where the one before it ended.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dcp_rs.spark.errors import SparkReadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.planner import Offsets

_LOGGER = logging.getLogger("dcp_rs.spark")

_WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


class Position:
    """The end of the newest batch of a query, on versions before PySpark 4.2."""

    def __init__(self) -> None:
        self._end: Offsets | None = None
        # Whether an end was asked for before anything was known, which only a new query may do.
        self._is_assumed_new = False
        # The end that Spark named at a restart, until it is known whether its batch comes again.
        self._restarted_at: Offsets | None = None

    def start(self, initial: Callable[[], Offsets]) -> Offsets:
        """Returns where the next batch starts."""
        self._restarted_at = None
        if self._end is None:
            self._is_assumed_new = True
            return initial()
        return self._end

    def ends_at(self, end: Offsets) -> None:
        """Notes the end of the batch that Spark now plans."""
        self._end = end

    def is_new(self) -> None:
        """Notes that Spark asks where the query starts, as it does before a first batch."""
        self._is_assumed_new = False

    def is_planned(self, start: Offsets, end: Offsets) -> bool:
        """Notes the bounds of a batch.

        Returns:
            Whether Spark runs a batch again that it planned before a restart.

        Raises:
            SparkReadError: An end was chosen for a query that goes on before its start was known.
        """
        if self._is_assumed_new:
            raise SparkReadError(
                "COUCHBASE_DCP_SPARK_VERSION",
                f"{_WRAPPER} asks for the end of a batch before its start can be known: set it to "
                "false, or install pyspark 4.2 or later, which does not need it. The checkpoint "
                "stays usable",
            )
        is_again = start != end and self._restarted_at == end
        self._restarted_at = end if start == end and self._end is None else None
        self._end = end
        return is_again


def log_remaining(end: Offsets, head: Offsets | None, why: str) -> None:
    """Logs how many seqnos a batch leaves, as Spark may end the query after it.

    The source does not learn the trigger.
    """
    there = head["s"] if head is not None else []
    left = sum(max(0, last - read) for read, last in zip(end["s"], there, strict=False))
    if left:
        _LOGGER.warning(
            "%s: this batch leaves %d seqnos. Before PySpark 4.2, trigger(availableNow=True) ends "
            "after one batch: run the query again, as dcp_rs.spark.run_available_now does",
            why,
            left,
        )
