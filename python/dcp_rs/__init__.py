"""Read a Couchbase bucket's changes as Arrow tables.

    >>> import dcp_rs
    >>> with dcp_rs.testing.EmbeddedCluster() as cluster:  # in place of a real one
    ...     _ = cluster.upsert("airline_10", {"name": "40-Mile Air"})
    ...     with dcp_rs.connect(
    ...         cluster.connection_string,
    ...         bucket="default",
    ...         username="Administrator",
    ...         password="password",
    ...     ) as client:
    ...         for batch in client.stream(until="now"):
    ...             for row in batch.rows():
    ...                 print(row["op"], row["key"], row["value"])
    mutation airline_10 b'{"name":"40-Mile Air"}'

Couchbase streams every change of a bucket over DCP, the Database Change Protocol. Delivery is at
least once and, within a vBucket, in seqno order. If a key is written twice, only its latest version
may be delivered.

* `dcp_rs.connect` returns a `dcp_rs.Client`. `dcp_rs.Client.stream` returns a
  `dcp_rs.ChangeStream`: an iterator, an async iterator and an Arrow C stream of
  `dcp_rs.ChangeBatch`.
* `dcp_rs.connect_async` returns a `dcp_rs.AsyncClient`, which does the same for asyncio.
* `dcp_rs.metrics` exports metrics of streams to Prometheus and OpenTelemetry.
* A `dcp_rs.Checkpoint` is the position to resume from. A `dcp_rs.CheckpointStore` keeps it:
  `dcp_rs.FileStore` in a file, `dcp_rs.SqlStore` in a table, `dcp_rs.ObjectStore` in object
  storage, `dcp_rs.MemoryStore` in memory, or your own.
* `dcp_rs.Client.plan` returns a `dcp_rs.ReadPlan`, whose `dcp_rs.Partition`s other processes read.
* `dcp_rs.replicate` keeps a table in step with a bucket, and `dcp_rs.verify` compares them.
* `dcp_rs.testing` has an embedded cluster, which Couchbase SDKs and DCP clients can use like a real
  one.
* `dcp_rs.debug` decodes recorded packets, and explains why a server makes a client roll back.
* `dcp_rs.spark` reads a bucket in Spark.

PyArrow is optional; functions that need it say so.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from dcp_rs import exceptions
from dcp_rs._dcp_rs import DEBUG_BUILD, __version__
from dcp_rs.batch import ChangeBatch
from dcp_rs.checkpoint import Checkpoint, Position, StoredFilter
from dcp_rs.client import Client, connect
from dcp_rs.connection import ConnectionOptions
from dcp_rs.documents import DocumentSchema
from dcp_rs.exceptions import DcpError
from dcp_rs.options import BatchPolicy, Share
from dcp_rs.plan import Partition, ReadPlan
from dcp_rs.schema import ColumnInfo, Schema, columns
from dcp_rs.stores import CheckpointStore, FileStore, MemoryStore, SharedStore
from dcp_rs.stream import ChangeStream, StreamEvent, StreamStats, VbucketStats

if TYPE_CHECKING:
    from dcp_rs import debug as debug
    from dcp_rs import dlt as dlt
    from dcp_rs import importing as importing
    from dcp_rs import metrics as metrics
    from dcp_rs import planner as planner
    from dcp_rs import polars as polars
    from dcp_rs import ray as ray
    from dcp_rs import replication as replication
    from dcp_rs import spark as spark
    from dcp_rs import testing
    from dcp_rs.async_client import AsyncClient, connect_async
    from dcp_rs.object_store import ObjectStore
    from dcp_rs.pipeline import Pipeline
    from dcp_rs.replication import replicate, verify
    from dcp_rs.sql_store import SqlStore

__all__ = [
    "AsyncClient",
    "BatchPolicy",
    "ChangeBatch",
    "ChangeStream",
    "Checkpoint",
    "CheckpointStore",
    "Client",
    "ColumnInfo",
    "ConnectionOptions",
    "DcpError",
    "DocumentSchema",
    "FileStore",
    "MemoryStore",
    "ObjectStore",
    "Partition",
    "Pipeline",
    "Position",
    "ReadPlan",
    "Schema",
    "Share",
    "SharedStore",
    "SqlStore",
    "StoredFilter",
    "StreamEvent",
    "StreamStats",
    "VbucketStats",
    "__version__",
    "columns",
    "connect",
    "connect_async",
    "exceptions",
    "replicate",
    "testing",
    "verify",
]

# Imported on first use: every process that only reads, such as each task in Spark, would wait for
# them, and for asyncio.
_LATE = {
    "AsyncClient": "async_client",
    "ObjectStore": "object_store",
    "Pipeline": "pipeline",
    "SqlStore": "sql_store",
    "connect_async": "async_client",
    "replicate": "replication",
    "testing": "testing",
    "verify": "replication",
}
# Not in `__all__`: a star import would hide the libraries that some are named after.
_MODULES = (
    "debug",
    "dlt",
    "importing",
    "metrics",
    "planner",
    "polars",
    "ray",
    "replication",
    "spark",
)
_LATE.update(zip(_MODULES, _MODULES, strict=True))

if not TYPE_CHECKING:  # type checkers would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_LATE[name]}")
        value = module if name == _LATE[name] else getattr(module, name)
        return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


if DEBUG_BUILD:
    warnings.warn(
        "dcp_rs was built without optimizations: build it with `maturin build --release`",
        RuntimeWarning,
        stacklevel=2,
    )
