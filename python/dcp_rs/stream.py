"""Streams of changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

from dcp_rs import _checks, _display
from dcp_rs._arrow import require_pyarrow
from dcp_rs.batch import ChangeBatch
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import ConfigError, ForkedProcessError

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs import _dcp_rs


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """What a stream is doing. Each vBucket is counted in exactly one of the states.

    Attributes:
        opening: vBuckets whose stream is being opened.
        streaming: vBuckets that are streaming.
        backing_off: vBuckets that wait before they are opened again.
        complete: vBuckets that have reached their end.
        failed: vBuckets that cannot be streamed.
        connections: Connections in use.
        reconnects: Outages: connections lost, and nodes that could not be reached when they were
            needed. One that lasts counts once, however often the connection is tried.
        batches: Batches taken.
        rows: Rows in those batches.
        buffered_bytes: Bytes received and not yet taken.
        unpersisted_rows: Rows received that wait until every copy of their vBucket has them on
            disk; 0 unless the stream has `persisted_only`.
        unpersisted_bytes: Their bytes, part of `buffered_bytes`.
        unpersisted_seconds: For how long the oldest of them has waited; 0 if there are none.
        diverged: vBuckets whose changes wait because copies are on different branches of
            history, as after a failover.
        lag: Seqnos behind the server, of all vBuckets that are not complete together; `None` while
            that of one of them is not known. `VbucketStats.lag` says what counts.
        max_lag: The same of the vBucket that is furthest behind.
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
    buffered_bytes: int
    unpersisted_rows: int
    unpersisted_bytes: int
    unpersisted_seconds: float
    diverged: int
    lag: int | None
    max_lag: int | None
    elapsed: float

    @property
    def rows_per_second(self) -> float:
        """Rows taken per second since the stream was opened."""
        return self.rows / self.elapsed if self.elapsed else 0.0


@dataclass(frozen=True, kw_only=True)
class VbucketStats:
    """Where one vBucket of a stream stands.

    Attributes:
        vbucket: The vBucket.
        state: `opening`, `streaming`, `backing_off`, `complete` or `failed`.
        seqno: Last seqno taken.
        high_seqno: Highest seqno that the server is known to have, of the scope or the collections
            where the stream is of those: from the snapshot `seqno` lies in, and asked for when the
            stream is opened, every 10 seconds, and when figures are looked at that are older than
            a second. `None` if nothing is known yet.
        persisted_seqno: Up to here every copy of the vBucket has everything on disk, as last
            heard; 0 while copies are not heard from or are on different branches. `None` if it
            was not asked for: see `persisted_only`.
        unpersisted_seconds: For how long changes have waited for that; `None` if none do.
        is_diverged: Whether they wait because copies are on different branches of history, as
            after a failover.
    """

    vbucket: int
    state: str
    seqno: int
    high_seqno: int | None
    persisted_seqno: int | None
    unpersisted_seconds: float | None
    is_diverged: bool

    @property
    def lag(self) -> int | None:
        """Seqnos behind the server; fewer changes, since older versions are left out.

        0 means that everything was taken that the server has for the stream. It is an upper bound
        of what is to come: a seqno in between may be an older version of a document, or belong to
        a collection that the stream does not read.
        """
        return None if self.high_seqno is None else max(self.high_seqno - self.seqno, 0)


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """Something that happened to a stream; nothing a reader must know in order to be right.

    Attributes:
        kind: `opened`, `ended`, `rolled_back`, `moved` (the cluster map names another node),
            `caught_up` (everything was delivered that the vBucket had when the stream was opened),
            `backing_off`, `connection_lost`, `lagging` (the server has changes of the vBucket and
            does not send them, though the reader waits), `unpersisted` (changes wait for long to be
            on the disks of all copies), `nothing_persisted` (`persisted_only` has no effect on a
            bucket without disks) or `dropped` (older events, untaken).
        vbucket: The vBucket, if it is about one.
        node: Address of the node, if it is about one.
        message: The rest, for people.
        cause: Why, for programs: of `connection_lost` the `code` of an error, as `timeout`; of
            `ended` and `backing_off` the protocol's name of the reason or status in lower case, as
            `state_changed` or `not_my_vbucket`; of `moved` `map_changed`; of `rolled_back`
            `rollback`, the status with which the server refused to go on from the position.
            `None` for the others.
    """

    kind: str
    vbucket: int | None
    node: str | None
    message: str
    cause: str | None = None


class ChangeStream:
    """Changes of a bucket, batch by batch; opened by `dcp_rs.Client.stream`.

    Read it in one of three ways:

    * `for batch in stream`, which waits; other threads run meanwhile, and Ctrl-C ends the wait; or
      `dcp_rs.ChangeStream.poll`, which waits for so long and no longer;
    * `async for batch in stream`, which cancelling leaves intact: no batch is lost. Tasks that ask
      at the same time are served in the order they asked;
    * as an Arrow C stream: `pyarrow.table(stream)`, `polars.DataFrame(stream)`,
      `duckdb.from_arrow(pyarrow.RecordBatchReader.from_stream(stream))`. That takes the stream: it
      can be done once, and not be iterated over afterwards. Errors, Ctrl-C among them, are then
      the library's own, with our text in them.

    Asking for the next batch acknowledges the one before it, which lets the server send more.
    Batches may be kept for as long as one likes. Opened with `ack="manual"`, the stream waits for
    `dcp_rs.ChangeStream.ack` instead, and is read in the first two ways only.

    A context manager, for `with` and `async with`. Closing it ends its connections.

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
        """Waits for the next batch for so long and no longer.

        Like `next(stream)`, it acknowledges the batch before. `None` means that there was none in
        time; or, at once, that the stream is over, which `dcp_rs.ChangeStream.is_over` tells.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     _ = cluster.upsert("key", b"{}")
            ...     stream = client.stream(until="now")
            ...     while not stream.is_over:
            ...         if (batch := stream.poll(1.0)) is not None:
            ...             print(batch.num_rows)
            1

        Args:
            timeout: Seconds to wait; 0 takes what is there.

        Raises:
            ConfigError: `timeout` is no number of seconds, or more than a day.
            ClosedError: The stream has been closed.
        """
        _checks.seconds("timeout", timeout, 0, 86_400)
        batch = self._inner.next(float(timeout))
        return None if batch is None else ChangeBatch(batch)

    @property
    def is_over(self) -> bool:
        """Whether everything has been read and nothing more comes, because of an end or an error.

        Known once the end was asked for, as by `dcp_rs.ChangeStream.poll`.
        """
        return self._inner.is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch:
        loop = asyncio.get_running_loop()
        turn = self._inner.new_turn()
        try:
            while True:
                there = loop.create_future()
                notify = partial(loop.call_soon_threadsafe, _settle, there)
                batch, is_over = self._inner.poll_next(turn, notify)
                if batch is not None:
                    return ChangeBatch(batch)
                if is_over:
                    raise StopAsyncIteration
                # Cancelled here, nothing is lost: what comes stays in the stream.
                await there
        finally:
            self._inner.leave(turn)

    def checkpoint(self) -> Checkpoint:
        """Gives where the reader stands: after the last batch that it was given.

        With `ack="manual"`: after what was acknowledged, in each vBucket without a gap.
        """
        return Checkpoint._of(self._inner.checkpoint)  # noqa: SLF001 - the package's own

    def ack(self, batch: ChangeBatch) -> None:
        """Says that a batch of a stream with `ack="manual"` has been processed.

        In any order, from any thread, also after the stream was closed. The server sends more as
        bytes come back; `checkpoint` counts the batch once it counts all before it. Twice is the
        same as once.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     _ = cluster.upsert("key", b"{}")
            ...     with client.stream(until="now", ack="manual") as stream:
            ...         batch = next(stream)
            ...         before = len(stream.checkpoint())
            ...         stream.ack(batch)
            ...         before, stream.checkpoint() == batch.checkpoint
            (0, True)

        Raises:
            ConfigError: The batch is another stream's or a slice, or the stream acknowledges by
                itself.
        """
        _checks.instance("batch", batch, ChangeBatch, "a ChangeBatch")
        if batch._is_part:  # noqa: SLF001 - the package's own
            raise ConfigError("batch: is a slice of a batch: acknowledge the whole one")
        self._inner.ack(batch._inner)  # noqa: SLF001 - the package's own

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""
        return self._bucket_name

    @property
    def is_closed(self) -> bool:
        """Whether the stream was closed on this side."""
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
        """Gives the numbers of what the stream is doing."""
        return StreamStats(**self._inner.stats())  # type: ignore[arg-type]

    def vbucket_stats(self) -> list[VbucketStats]:
        """Gives where every vBucket stands, ascending."""
        return [
            VbucketStats(
                vbucket=vbucket,
                state=state,
                seqno=seqno,
                high_seqno=high_seqno,
                persisted_seqno=persisted_seqno,
                unpersisted_seconds=waited,
                is_diverged=is_diverged,
            )
            for vbucket, state, seqnos, waited, is_diverged in self._inner.vbucket_stats()
            for seqno, high_seqno, persisted_seqno in [seqnos]
        ]

    def collection_lag(self) -> dict[str, int | None]:
        """Gives how far the server is ahead in each collection that the stream reads.

        By `scope.collection`: the seqnos between the reader and the collection's newest change,
        added up over the vBuckets that are not complete; `None` while one of their nodes has not
        said it. A vBucket's collections share its seqnos, so that this is an upper bound of the
        changes to come, and the collections' lags do not add up to the stream's.

        Nodes are asked for it from the first call on, unless the stream is of a scope or of
        collections: the first call may give nothing then, and the answers are there a moment later.
        """
        return dict(self._inner.collection_lag())

    def events(self) -> list[StreamEvent]:
        """Gives what has happened since the last call, oldest first.

        An event may come a moment after the changes it is about. Events that nobody takes are
        dropped, the oldest first; an event says how many.
        """
        return [
            StreamEvent(kind=kind, vbucket=vbucket, node=node, message=message, cause=cause)
            for kind, vbucket, node, message, cause in self._inner.events()
        ]

    def read_all(self) -> pa.Table:
        """Reads to the end of a stream with an `until` and gives one `pyarrow.Table`.

        Raises:
            ImportError: PyArrow is not installed.
            ConfigError: The stream has `ack="manual"`.
        """
        pa = require_pyarrow("ChangeStream.read_all")
        if self._inner.is_manual:
            raise ConfigError('read_all: a stream with ack="manual" is read batch by batch')
        batches = [pa.record_batch(batch) for batch in self]
        return pa.Table.from_batches(batches, schema=self.schema)

    def close(self) -> None:
        """Ends the stream and its connections. Batches that were not taken are dropped."""
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
        """Hands the stream over, once, by the Arrow PyCapsule interface."""
        return self._inner.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """Exports the schema over the Arrow PyCapsule interface; reads nothing."""
        return self._inner.__arrow_c_schema__()

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a stream does not pickle: pickle the client's options and the stream's checkpoint, "
            "and open another one with them"
        )

    def __repr__(self) -> str:
        try:
            columns = f"columns=[{_display.names(self.column_names)}]"
        except ForkedProcessError:
            columns = "of another process"
        return f"<dcp_rs.ChangeStream {'closed ' if self._is_closed else ''}{columns}>"


class _SchemaOf:
    """Shows PyArrow the schema of a stream and nothing to read."""

    def __init__(self, inner: _dcp_rs.ChangeStream) -> None:
        self._inner = inner

    def __arrow_c_schema__(self) -> object:
        return self._inner.__arrow_c_schema__()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
