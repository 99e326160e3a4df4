"""The Spark data source `couchbase.dcp`. Importing it needs PySpark."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyspark.sql.datasource as api

import dcp_rs
from dcp_rs._libraries import require_spark
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.spark.driver import Driver
from dcp_rs.spark.errors import SparkReadError, options_coded
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.planning import batch_partitions
from dcp_rs.spark.position import Position, log_remaining
from dcp_rs.spark.schema import Projection, schema
from dcp_rs.spark.worker import read_partition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from dcp_rs.planner import Offsets
    from dcp_rs.spark.partition import Partition

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before PySpark 4.2, which calls none of the methods that use the others
    TELLS_START = False

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stands in for what older versions do not have."""

else:
    TELLS_START = True

NAME = "couchbase.dcp"

# In the end of the first batch of a query that starts at `latest`: where the batch starts.
_START = "start"


class TaskPartition(api.InputPartition):
    """A partition of the read, as Spark hands it to a task."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition.node)
        self.partition = partition


class CouchbaseDcpReader(api.DataSourceReader):
    """Reads a bucket, or collections of it, up to a bound that is taken once per `load()`."""

    def __init__(self, table: Projection) -> None:
        self._table = table
        self._options = table.options

    @options_coded()
    def partitions(self) -> Sequence[api.InputPartition]:
        """Plans the partitions. Each action on the same data frame reads the same ranges."""
        return [TaskPartition(partition) for partition in batch_partitions(self._options)]

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads one partition."""
        return _read(self._table, partition)


class CouchbaseDcpStreamReader(api.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a bucket in micro-batches, on every version of Spark.

    Before 4.2, Spark does not say where a batch starts: `Position` finds out.

    It is created in two processes and pickled to others, so it opens no connection until it is
    used.
    """

    def __init__(self, table: Projection | SparkReadError) -> None:
        self._given = table
        self._driver: Driver | None = None
        self._initial: Offsets | None = None
        self._position = Position()

    @property
    def _table(self) -> Projection:
        # PySpark hides what is raised before there is a reader behind an UnboundLocalError.
        if isinstance(self._given, SparkReadError):
            raise self._given
        return self._given

    @property
    def _options(self) -> ReadOptions:
        return self._table.options

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without connections."""
        return {"_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens nothing."""
        self.__init__(state["_table"])  # type: ignore[misc]

    @options_coded()
    def initialOffset(self) -> Offsets:  # noqa: N802
        """Returns the offsets at which a query without a checkpoint starts."""
        self._position.is_new()
        return self._first()

    def _first(self) -> Offsets:
        if self._initial is None:  # called twice: `latest` must be the same both times
            where = self._options.starting_offsets
            driver = self._connected()
            if where == "earliest":
                self._initial = driver.earliest()
            elif where == "latest":
                self._initial = driver.latest()
            else:
                initial = driver.parse(where)
                if isinstance(initial, dcp_rs.Checkpoint):
                    raise ConfigError(
                        "a stream cannot start at a checkpoint: read from "
                        "it with partitions(options, start=...), and start at the end of those",
                        option="startingOffsets",
                    )
                self._initial = initial
        return self._initial

    @options_coded()
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit of each micro-batch."""
        if self._options.max_offsets_per_trigger is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    @options_coded()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Notes what is available now, so that the query ends there."""
        self._connected().fix_target()

    def latestOffset(  # noqa: N802
        self, start: Offsets | None = None, limit: ReadLimit | None = None
    ) -> Offsets:
        """Plans the end of the next micro-batch; rollbacks become rows or errors.

        Before PySpark 4.2, it gets no arguments.
        """
        with options_coded():  # inside: Spark counts the parameters of this method
            if start is not None:
                rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
                return self._end(start, rows)
            # Of a new query, Spark asks for the end first.
            start = self._position.start(self._first)
            end = self._end(start, self._options.max_offsets_per_trigger)
            self._position.ends_at(end)
            if self._options.max_offsets_per_trigger is not None:
                log_remaining(
                    end, self._connected().head(), "maxOffsetsPerTrigger bounds each batch"
                )
            return end

    def _end(self, start: Offsets, rows: int | None) -> Offsets:
        end = self._connected().end(start, rows)
        if end == {name: value for name, value in start.items() if name != _START}:
            return start  # to Spark, any difference is a new batch
        if start == self._initial and self._options.starting_offsets == "latest":
            # Spark does not store where the first batch starts, but asks again after a restart.
            return end | {_START: start}
        return end

    def reportLatestOffset(self) -> Offsets | None:  # noqa: N802
        """Returns what the server had when the last end was chosen; asks nothing."""
        with suppress(DcpError):  # an error here would end the query
            return None if self._driver is None else self._driver.head()
        return None

    @options_coded()
    def partitions(self, start: Offsets, end: Offsets) -> Sequence[api.InputPartition]:
        """Plans the partitions of a micro-batch, maybe long after its end was chosen.

        Before PySpark 4.2, a query that goes on first asks for those from the end of its newest
        batch to there, of which there are none.
        """
        is_again = not TELLS_START and self._position.is_planned(start, end)
        if start != end:
            start = end.get(_START, start)
        partitions = self._connected().partitions(start, end)
        if is_again:
            head = self._connected().latest()
            log_remaining(end, head, "the batch that was planned before the restart comes first")
        return [TaskPartition(partition) for partition in partitions]

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads one partition."""
        return _read(self._table, partition)

    def commit(self, end: Offsets) -> None:
        """Does nothing: the server keeps no positions."""

    def stop(self) -> None:
        """Closes the connections."""
        if self._driver is not None:
            self._driver.close()

    def _connected(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options)
            _leave_on_sigterm()
        return self._driver


class CouchbaseDcpDataSource(api.DataSource):
    """The data source, by the name `couchbase.dcp`.

    Options are those of `dcp_rs.spark.ReadOptions`.
    """

    @classmethod
    def name(cls) -> str:
        """Returns the name for `format`."""
        return NAME

    @options_coded()
    def schema(self) -> StructType:
        """Returns the columns of the change table that the options ask for."""
        return schema(self._parsed())

    def reader(self, schema: StructType) -> CouchbaseDcpReader:
        """Makes the reader of `spark.read`."""
        return CouchbaseDcpReader(self._project(schema))

    def streamReader(self, schema: StructType) -> CouchbaseDcpStreamReader:  # noqa: N802
        """Makes the reader of `spark.readStream`."""
        try:
            return CouchbaseDcpStreamReader(self._project_stream(schema))
        except SparkReadError as error:
            return CouchbaseDcpStreamReader(error)

    @options_coded()
    def _project_stream(self, wanted: StructType) -> Projection:
        if any(name.lower() == "endingoffsets" for name in self.options):
            raise ConfigError(
                "a stream has no end; use trigger(availableNow=True) to "
                "read what is there now, or spark.read",
                option="endingOffsets",
            )
        return self._project(wanted)

    @options_coded()
    def _project(self, wanted: StructType) -> Projection:
        return Projection.of(self._parsed(), wanted)

    def _parsed(self) -> ReadOptions:
        require_spark("dcp_rs.spark")
        return ReadOptions.parse(dict(self.options))


def _read(table: Projection, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, TaskPartition):
        # If there are none, Spark creates one itself.
        return iter(())
    return table.declared(read_partition(partition.partition))


def _leave_on_sigterm() -> None:
    """Lets `stop()` and destructors run when Spark ends the process that plans a query.

    Spark ends it with SIGTERM, by default without cleanup in Python. Only in that process.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is None or not spec.name.endswith("python_streaming_source_runner"):
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
