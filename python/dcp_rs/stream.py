"""Streams of changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

from dcp_rs import _checks, _display
from dcp_rs._libraries import require_pyarrow
from dcp_rs.batch import ChangeBatch
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import ConfigError, ForkedProcessError

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from dcp_rs import _dcp_rs


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """Statistics of a stream. Each vBucket is counted in exactly one state.

    Attributes:
        opening: vBuckets whose stream is being opened.
        streaming: vBuckets that are streaming.
        backing_off: vBuckets that wait before their stream is reopened.
        complete: vBuckets that have reached their end.
        failed: vBuckets that cannot be streamed.
        connections: Connections in use.
        reconnects: Connections lost, and nodes that could not be reached when they were needed. A
            lasting outage counts once, however often the client retries.
        batches: Batches taken.
        rows: Rows in those batches.
        malformed: Documents in them that are malformed, so that all their columns are null.
        partly_malformed: Documents in them of which only some values do not fit their columns, so
            that these are null. See `on_malformed` of `dcp_rs.DocumentSchema`.
        buffered_bytes: Bytes received but not yet taken.
        unpersisted_rows: Rows received that not every copy of their vBucket has on disk yet; 0
            unless the stream has `persisted_only`.
        unpersisted_bytes: Their bytes, part of `buffered_bytes`.
        unpersisted_seconds: How long the oldest of them has waited; 0 if there are none.
        diverged: vBuckets whose changes wait because their copies are on different history
            branches, for example after a failover.
        disconnected: vBuckets that have not been streaming for three seconds, whose lag is unknown:
            their nodes cannot be reached, or have no answer.
        lag: Seqnos behind the server, summed over all vBuckets that are not complete; `None` while
            the lag of one of them is unknown. See `VbucketStats.lag`.
        max_lag: Lag of the vBucket that is furthest behind.
        elapsed: Seconds since the stream was opened.
    """

    opening: int
    streaming: int
    backing_off: int
    complete: int
    failed: int
    connections: int
    reconnects: int
    batches: int
    rows: int
    malformed: int
    partly_malformed: int
    buffered_bytes: int
    unpersisted_rows: int
    unpersisted_bytes: int
    unpersisted_seconds: float
    diverged: int
    disconnected: int
    lag: int | None
    max_lag: int | None
    elapsed: float

    @property
    def rows_per_second(self) -> float:
        """Rows taken per second since the stream was opened."""
        return self.rows / self.elapsed if self.elapsed else 0.0


@dataclass(frozen=True, kw_only=True)
class VbucketStats:
    """State and position of one vBucket of a stream.

    Attributes:
        vbucket: The vBucket.
        state: `opening`, `streaming`, `backing_off`, `complete` or `failed`.
        seqno: Last seqno taken.
        high_seqno: Highest seqno that the server is known to have, of the scope or collections if
            the stream has such a filter. It is learned from snapshot markers, and fetched when the
            stream is opened, every 10 seconds, and when you read statistics older than a second.
            `None` if nothing is known yet.
        persisted_seqno: Seqno up to which every copy of the vBucket last reported to have
            everything on disk; 0 while copies do not answer or are on different branches. `None`
            without `persisted_only`.
        unpersisted_seconds: How long changes have waited for that; `None` if none do.
        is_diverged: Whether they wait because the copies are on different history branches, for
            example after a failover.
        is_disconnected: Whether it has not been streaming for three seconds, so that its lag is
            unknown.
    """

    vbucket: int
    state: str
    seqno: int
    high_seqno: int | None
    persisted_seqno: int | None
    unpersisted_seconds: float | None
    is_diverged: bool
    is_disconnected: bool = False

    @property
    def lag(self) -> int | None:
        """Seqnos behind the server, an upper bound of the changes to come.

        0 means that everything up to `high_seqno` was taken, which may be old. There may be fewer
        changes than seqnos, because a seqno may belong to an older version of a document or to a
        collection that the stream does not read.
        """
        if self.high_seqno is None or self.is_disconnected:
            return None
        return max(self.high_seqno - self.seqno, 0)


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """Something that happened to a stream. A reader need not act on events to be correct.

    Attributes:
        kind: `opened`, `ended`, `rolled_back`, `moved` (the cluster map names another node),
            `caught_up` (the vBucket has delivered everything that it had when the stream was
            opened), `backing_off`, `connection_lost`, `lagging` (the server has changes of the
            vBucket but does not send them, although the reader waits), `unpersisted` (changes have
            waited for a minute to be on the disks of all copies), `nothing_persisted`
            (`persisted_only` has no effect on a bucket without a disk) or `dropped` (older events
            were discarded).
        vbucket: The vBucket, if the event is about one.
        node: Address of the node, if the event is about one.
        message: Details, for people.
        cause: The reason, for programs. For `connection_lost`, the `code` of an error, such as
            `timeout`. For `ended` and `backing_off`, the protocol's name of the reason or status in
            lower case, such as `state_changed` or `not_my_vbucket`. For `moved`, `map_changed`. For
            `rolled_back`, `rollback`, the status with which the server refused to resume.
            Otherwise, `None`.
    """

    kind: str
    vbucket: int | None
    node: str | None
    message: str
    cause: str | None = None


class ChangeStream:
    """Changes of a bucket, batch by batch, returned by `dcp_rs.Client.stream`.

    Read it in one of three ways:

    * `for batch in stream` blocks until the next batch; other threads keep running, and Ctrl-C
      interrupts the wait. `dcp_rs.ChangeStream.poll` takes a timeout.
    * `async for batch in stream` can be cancelled without losing a batch. Tasks that wait at the
      same time are served in order.
    * As an Arrow C stream: `pyarrow.table(stream)`, `polars.DataFrame(stream)`,
      `duckdb.from_arrow(pyarrow.RecordBatchReader.from_stream(stream))`. This consumes the stream:
      it works once, and you cannot iterate over the stream afterwards. The library raises its own
      errors, with the text of dcp_rs's error, even for Ctrl-C.

    Taking the next batch acknowledges the previous one, which lets the server send more. You may
    keep batches for as long as you like, but a stream that was read to its end has none left, as a
    `pyarrow.RecordBatchReader`: to read again, open another. With `ack="manual"`, the stream waits
    for `dcp_rs.ChangeStream.ack` instead, and can be read only in the first two ways.

    If the stream fails, taking the next batch raises a `dcp_rs.DcpError` once; then the stream is
    over. It can be resumed from its `checkpoint`.

    A stream is a context manager, for `with` and `async with`. Closing it closes its connections.

        >>> import asyncio
        >>> async def count(stream):
        ...     async with stream:
        ...         return sum([batch.num_rows async for batch in stream])
        >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     for n in range(3):
        ...         _ = cluster.upsert(f"key_{n}", b"{}")
        ...     asyncio.run(count(client.stream(until="now")))
        3
    """

    __slots__ = ("_bucket_name", "_inner", "_is_closed")

    def __init__(self, inner: _dcp_rs.ChangeStream, bucket_name: str = "") -> None:
        self._inner = inner
        self._bucket_name = bucket_name
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChangeBatch:
        batch = self._inner.next()
        if batch is None:
            raise StopIteration
        return ChangeBatch(batch)

    def poll(self, timeout: float) -> ChangeBatch | None:
        """Waits for the next batch, but no longer than `timeout`.

        Like `next(stream)`, it acknowledges the previous batch. It returns `None` if no batch
        arrived in time, or at once if the stream is over: check `dcp_rs.ChangeStream.is_over`.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     _ = cluster.upsert("key", b"{}")
            ...     stream = client.stream(until="now")
            ...     while not stream.is_over:
            ...         if (batch := stream.poll(1.0)) is not None:
            ...             print(batch.num_rows)
            1

        Args:
            timeout: Seconds to wait; 0 does not wait.

        Raises:
            ConfigError: `timeout` is not a number of seconds, or is more than a day.
            ClosedError: The stream has been closed.
        """
        _checks.seconds("timeout", timeout, 0, 86_400)
        batch = self._inner.next(float(timeout))
        return None if batch is None else ChangeBatch(batch)

    @property
    def is_over(self) -> bool:
        """Whether the stream has delivered its last batch, because of its end or an error.

        It becomes true when you try to read past the end, for example with
        `dcp_rs.ChangeStream.poll`.
        """
        return self._inner.is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch:
        import asyncio

        loop = asyncio.get_running_loop()
        turn = self._inner.new_turn()
        try:
            while True:
                there = loop.create_future()
                notify = partial(loop.call_soon_threadsafe, _settle, there)
                batch = self._inner.poll_next(turn, notify)
                if batch is not None:
                    return ChangeBatch(batch)
                # If cancelled here, nothing is lost: the batch stays in the stream.
                await there
        finally:
            self._inner.leave(turn)

    def checkpoint(self) -> Checkpoint:
        """Returns the position after the last batch taken.

        With `ack="manual"`, it is the end of the acknowledged batches without a gap, in each
        vBucket.
        """
        return Checkpoint._of(self._inner.checkpoint)  # noqa: SLF001 - the package's own

    def ack(self, batch: ChangeBatch) -> None:
        """Acknowledges that a batch of a stream with `ack="manual"` has been processed.

        You can call it in any order, from any thread, even after the stream was closed. It lets the
        server send more, and `checkpoint` moves past the batch once all earlier ones are
        acknowledged. Acknowledging a batch twice has no further effect.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     _ = cluster.upsert("key", b"{}")
            ...     with client.stream(until="now", ack="manual") as stream:
            ...         batch = next(stream)
            ...         before = len(stream.checkpoint())
            ...         stream.ack(batch)
            ...         before, stream.checkpoint() == batch.checkpoint
            (0, True)

        Raises:
            ConfigError: The batch belongs to another stream or is a slice, or the stream does not
                have `ack="manual"`.
        """
        _checks.instance("batch", batch, ChangeBatch, "a ChangeBatch")
        if batch._is_part:  # noqa: SLF001 - the package's own
            raise ConfigError("is a slice of a batch: acknowledge the whole one", option="batch")
        self._inner.ack(batch._inner)  # noqa: SLF001 - the package's own

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""
        return self._bucket_name

    @property
    def is_closed(self) -> bool:
        """Whether you have closed the stream."""
        return self._is_closed

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return self._inner.column_names

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch, as a `pyarrow.Schema`.

        Raises:
            ImportError: PyArrow is not installed.
        """
        return require_pyarrow("ChangeStream.schema").schema(_SchemaOf(self._inner))

    def stats(self) -> StreamStats:
        """Returns statistics of the stream."""
        return self._inner.stats()

    def vbucket_stats(self) -> list[VbucketStats]:
        """Returns the state and position of every vBucket, in ascending order."""
        return self._inner.vbucket_stats()

    def collection_lag(self) -> dict[str, int | None]:
        """Returns the lag of each collection that the stream reads.

        For each `scope.collection`, this is the number of seqnos between the reader and the
        collection's newest change, summed over the vBuckets that are not complete; `None` while one
        of their nodes has not answered. The collections of a vBucket share its seqnos, so this is
        an upper bound of the changes to come, and the lags of collections do not add up to that of
        the stream.

        A stream with `collections` asks the nodes for these seqnos from its start. Any other stream
        does so from the first call on, which may return nothing yet.
        """
        return self._inner.collection_lag()

    def events(self) -> list[StreamEvent]:
        """Returns the events since the last call, oldest first.

        An event may come a moment after the changes that it is about. If you do not read events,
        the oldest are dropped, and an event says how many.
        """
        return self._inner.events()

    def read_all(self) -> pa.Table:
        """Reads a stream with an `until` to its end and returns a `pyarrow.Table`.

        Raises:
            ImportError: PyArrow is not installed.
            ConfigError: The stream has `ack="manual"`.
        """
        pa = require_pyarrow("ChangeStream.read_all")
        if self._inner.is_manual:
            raise ConfigError(
                'a stream with ack="manual" is read batch by batch', option="read_all"
            )
        batches = [pa.record_batch(batch) for batch in self]
        return pa.Table.from_batches(batches, schema=self.schema)

    def close(self) -> None:
        """Closes the stream and its connections. Batches that were not taken are discarded."""
        self._inner.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inner.close_soon()
        self._is_closed = True

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Exports the stream, once, over the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """Exports the schema over the Arrow PyCapsule interface; reads nothing."""
        return self._inner.__arrow_c_schema__()

    def __array__(self, *_args: object, **_options: object) -> NoReturn:
        """Refuses to be an array, of which pandas would make a frame of batches."""
        raise TypeError(
            "a stream is no array: for pandas, use stream.read_all().to_pandas(), or "
            "batch.to_pandas() for each batch"
        )

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a stream cannot be pickled: pickle the client's options and the stream's checkpoint, "
            "and open another one with them"
        )

    def __repr__(self) -> str:
        try:
            columns = f"columns=[{_display.names(self.column_names)}]"
        except ForkedProcessError:
            columns = "of another process"
        return f"<dcp_rs.ChangeStream {'closed ' if self._is_closed else ''}{columns}>"


class _SchemaOf:
    """Shows PyArrow the schema of a stream without its data."""

    def __init__(self, inner: _dcp_rs.ChangeStream) -> None:
        self._inner = inner

    def __arrow_c_schema__(self) -> object:
        return self._inner.__arrow_c_schema__()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
