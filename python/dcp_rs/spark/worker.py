"""Code that runs in Spark's Python workers: reads a partition as Arrow batches."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dcp_rs
from dcp_rs import _checks, _dcp_rs
from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import DcpError
from dcp_rs.spark.errors import SparkReadError, coded
from dcp_rs.spark.partition import Partition
from dcp_rs.spark.planning import partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa

    from dcp_rs.spark.options import ReadOptions


# The options that a connection depends on.
_CONNECTION = (
    "connection_string",
    "bucket",
    "username",
    "password",
    "password_file",
    "password_env",
    "token",
    "token_file",
    "connect_timeout",
    "tls_ca",
    "tls_certificate",
    "tls_key",
    "tls_key_password",
    "srv_targets",
    "network",
    "sasl_mechanisms",
    "flow_control_buffer_bytes",
    "compressed",
)


# Seconds for which a connection waits for the next task. Spark ends workers that are idle for a
# minute; until then the engine answers the server's noops.
_KEEP_CONNECTIONS = 55.0

# Seconds after which an unused client is closed: its cluster may be gone.
_KEEP_CLIENT = 600.0


class _Clients:
    """The clients of this process, with their connections, by their options.

    Spark keeps a worker for many tasks and forks new ones at any time; it kills them after a
    minute of idleness or when a task is cancelled. So a client is kept for the next task, but
    nothing depends on it. A forked child sees its parent's entries under another process id and
    leaves them alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, object], _dcp_rs.Client] = {}
        self._asked_for: dict[tuple[int, object], float] = {}
        # How many reads use the clients of these options, and those to close after them.
        self._reads: Counter[tuple[int, object]] = Counter()
        self._left: dict[tuple[int, object], list[_dcp_rs.Client]] = {}
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()

    def get(self, options: ReadOptions) -> _dcp_rs.Client | None:
        """Returns the client of these options, if there is one."""
        key = self._key(options)
        with self._lock:
            self._close_forgotten(key)
            return self._clients.get(key)

    def keep(self, options: ReadOptions, client: _dcp_rs.Client) -> None:
        """Keeps a client for the next task."""
        with self._lock:
            self._clients[self._key(options)] = client

    @contextmanager
    def reading(self, options: ReadOptions) -> Iterator[None]:
        """Keeps the clients of these options open meanwhile."""
        key = self._key(options)
        with self._lock:
            self._reads[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads[key] -= 1
                left = []
                if not self._reads[key]:
                    del self._reads[key]
                    left = self._left.pop(key, [])
            for client in left:
                client.close()

    def forget(self, options: ReadOptions) -> None:
        """Closes the client of these options, if there is one, once no read uses it."""
        key = self._key(options)
        with self._lock:
            client = self._clients.pop(key, None)
            if client is not None and self._reads[key]:
                self._left.setdefault(key, []).append(client)
                return
        if client is not None:
            client.close()

    def _close_forgotten(self, asked_for: tuple[int, object]) -> None:
        """Closes the clients of this process that have not been used for a long time."""
        now = time.monotonic()
        self._asked_for[asked_for] = now
        for key, last in list(self._asked_for.items()):
            is_idle = not self._reads[key] and now - last > _KEEP_CLIENT
            if key[0] == os.getpid() and is_idle:
                del self._asked_for[key]
                client = self._clients.pop(key, None)
                if client is not None:
                    client.close()

    @staticmethod
    def _key(options: ReadOptions) -> tuple[int, object]:
        return os.getpid(), tuple(getattr(options, name) for name in _CONNECTION)


_CLIENTS = _Clients()


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
    ranges = partition.ranges
    doing = f"reading {len(ranges)} vBuckets of bucket {partition.options.bucket}"
    rollbacks = _dcp_rs.rollback_rows(partition.plan, partition.options.stream())
    if rollbacks is not None:
        yield pa.record_batch(rollbacks)
    if not any(each.size for each in ranges):
        return
    delivered = False
    while True:
        kept = _CLIENTS.get(partition.options)
        try:
            for batch in _stream(kept, partition):
                delivered = True
                yield pa.record_batch(batch)
        except DcpError as error:
            _CLIENTS.forget(partition.options)
            # A client of an earlier task may no longer work: its node may be gone, the bucket
            # recreated, the password changed. A new client shows the reason.
            if kept is not None and not delivered:
                continue
            raise coded(error, doing) from error
        return


def _stream(kept: _dcp_rs.Client | None, partition: Partition) -> Iterator[dcp_rs.ChangeBatch]:
    options = partition.options
    connection = replace(options.connection(), keep_connections=_KEEP_CONNECTIONS)
    with _CLIENTS.reading(options):
        task = _dcp_rs.open_task(vars(connection), kept, partition.plan, options.stream())
        _CLIENTS.keep(options, task.client)
        with dcp_rs.ChangeStream(task.stream) as changes:
            yield from changes


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
            data frame is `spark.range(0, n, 1, n).mapInArrow(task, schema(options))`.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached.
    """
    return MapInArrowTask(tuple(_plan(options) if partitions is None else partitions))


# The parameter of `map_in_arrow` has the name of the function.
_plan = partitions
