"""Keep a table in step with a bucket.

`dcp_rs.replicate` reads a bucket and writes to a *target*. It commits rows and the checkpoint after
them together, so a crash neither loses nor duplicates a change.

    >>> import dcp_rs, tempfile
    >>> from dcp_rs.testing import EmbeddedCluster
    >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
    ...     _ = cluster.upsert("airline_10", {"name": "40-Mile Air"})
    ...     folder = tempfile.mkdtemp()
    ...     done = dcp_rs.replicate(client, f"duckdb://{folder}/travel.duckdb", once=True)
    ...     done.changes, done.phase
    (1, 'done')

The guide lists the guarantees of each target. PyArrow is imported when a replication starts, the
library of a target when the target is created.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _checks, _keywords
from dcp_rs._libraries import require_pyarrow
from dcp_rs.client import Client
from dcp_rs.replication.inferring import InferredField, InferredSchema, infer_schemas
from dcp_rs.replication.opening import extra_of, open_database, open_target
from dcp_rs.replication.progress import Progress, TableProgress
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    Commit,
    Database,
    Endings,
    GrowingTarget,
    HistoryTarget,
    Maintained,
    MaintainedTarget,
    Target,
)
from dcp_rs.replication.verification import Difference, TableVerification, Verification

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BackfillOrder, Priority
    from dcp_rs.replication.health import Health
    from dcp_rs.replication.listening import Listening
    from dcp_rs.replication.schemas import NewFields, TypeConflicts
    from dcp_rs.replication.state import Nested

__all__ = [
    "Commit",
    "Database",
    "Difference",
    "Endings",
    "GrowingTarget",
    "HistoryTarget",
    "InferredField",
    "InferredSchema",
    "Maintained",
    "MaintainedTarget",
    "Progress",
    "State",
    "TableProgress",
    "TableVerification",
    "Target",
    "Verification",
    "infer_schemas",
    "open_database",
    "open_target",
    "replicate",
    "verify",
]


@_keywords.checked
def replicate(
    client: Client,
    target: str | Target | Database,
    *,
    storage_options: Mapping[str, str] | None = None,
    mode: Literal["table", "log", "history"] = "table",
    tables: str | Mapping[str, str | Mapping[str, Any]] | None = None,
    on_drop: Literal["empty", "drop", "keep"] = "empty",
    once: bool = False,
    share: str | None = None,
    reload: Iterable[int] | Mapping[str, Iterable[int] | None] | None = None,
    collections: str | Iterable[str] | None = None,
    document_schema: str | pa.Schema | DocumentSchema | None = None,
    sample: int = 1000,
    new_fields: NewFields | None = None,
    type_conflicts: TypeConflicts | None = None,
    extra: Literal["drop", "column"] = "drop",
    nested: Nested | None = None,
    drop_fields: str | Iterable[str] | None = None,
    hash_fields: str | Iterable[str] | None = None,
    hash_key: str | bytes | None = None,
    key_type: Literal["string", "binary"] = "string",
    deletes: Literal["remove", "mark"] = "remove",
    on_error: Literal["reject", "fail"] | None = None,
    persisted_only: bool = False,
    on_purge: Literal["resync", "ignore"] = "resync",
    priority: Priority | None = None,
    backfill_order: BackfillOrder | None = None,
    commit_rows: int = 100_000,
    commit_bytes: int = 64 * 1024 * 1024,
    commit_interval: float = 1.0,
    target_retry_timeout: float = 0.0,
    compact_every: float | None = None,
    keep_versions_for: float | None = None,
    listen: str | None = None,
    hung_after: float = 300.0,
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Keeps a table in step with a bucket until it is stopped.

    It resumes from the state in the target. If it cannot, because the bucket was recreated or you
    chose other collections, it loads a new *generation* from the beginning. In a table, the rows of
    the new generation replace the older ones, and the last of those are removed when the load is
    complete.

    Args:
        client: Client of the bucket. While the cluster, or a collection that is read, is
            unavailable, it retries for up to the client's `retry_timeout`.
        target: Where to write, as a URL or a `dcp_rs.replication.Target`; with `tables`, a
            `dcp_rs.replication.Database`.
        storage_options: Options of the object storage, as obstore and deltalake name them, such as
            `aws_region`, or properties of the catalog, as pyiceberg names them. What is missing
            comes from the environment. They are never shown.
        mode: `table` has a row for each document, `log` for each change, including rollbacks and
            collection events, `history` for each version of a document, with `valid_from`,
            `valid_to` and `is_current`.
        tables: Names of the tables, to have one for each collection: `collection` for
            `{scope}__{collection}`, another template with these fields, or a mapping of patterns of
            collections to templates, of which the first that matches counts. A pattern can also
            have a mapping, with the template as `table` and options in place of those given here:
            `document_schema`, `new_fields`, `type_conflicts`, `extra`, `nested`, `key_type`,
            `deletes` and `on_error`. A brace that belongs to a name is doubled. The URL of the
            target then has no `table`; for Delta, Iceberg and Parquet it is the folder of the
            tables. Collections that are created later have their tables at once.
        on_drop: What becomes of the table of a collection that is dropped: `empty` removes its
            rows, `drop` the table and its rejects, and `keep` keeps the rows until another
            collection has the name.
        once: Whether to return once everything is written that the bucket had at the start.
        share: Share of the vBuckets to replicate, as one of several processes that write the same
            tables: `2/5` is the second of five, numbered from 1. Each has a state of its own, all
            the same options, and their number cannot change. Only for PostgreSQL, for tables, and
            for columns that are declared.
        reload: vBuckets to read again from the beginning, of all tables, or by the collection of a
            table, where `None` stands for all; such as `dcp_rs.replication.Verification.reload`.
            Rows stay until newer ones replace them, and the others go when everything has been
            read.
        collections: Collections to read, as in `dcp_rs.Client.stream`.
        document_schema: Columns to decode JSON documents to, as in `dcp_rs.Client.stream`. `infer`
            finds them out, for each table once, from documents that the bucket has. Without it, the
            column `value` has the JSON, and `_malformed` has documents that are not JSON.
        sample: Documents of each collection to infer columns from.
        new_fields: What to do with a field that is no column: `evolve` adds a column, `ignore`
            leaves it out, `reject` rejects the document. `evolve` by default if columns are
            inferred, or else `ignore`.
        type_conflicts: What to do with a value that its column does not hold: `evolve` widens the
            type, if the target can without changing a value, `null` makes it null and notes it in
            `_malformed_fields`, `reject` rejects the document. `evolve` by default if columns are
            inferred, or else `null`.
        extra: What to do with what no column holds: `drop`, or `column`, which keeps it as JSON in
            the column `_extra`, and documents that are no JSON objects in `_malformed`.
        nested: What an inferred schema makes of objects within documents: `json`, the default, a
            column of text, `struct` a column of structs, `columns` a column for each member, such
            as `geo__lat`. Arrays are JSON.
        drop_fields: Fields that reach no table, as in `dcp_rs.Client.stream`: no column, no JSON,
            no reject. They are the same for all tables, and if you change them, tables are loaded
            anew; a log that was written with others is refused.
        hash_fields: Fields of which only a hash does, as there.
        hash_key: Secret of these hashes, as there. The state has a hash of it, to notice another.
        key_type: Type of the column `key`: `string`, or `binary` for keys that are not UTF-8.
        deletes: What becomes of the row of a document that is removed or expires: `remove`, or
            `mark`, which keeps the row without the document, with the time in `_deleted_at`. Only
            for a table, which is filled with the documents that there are.
        on_error: What to do with a change that the target cannot hold, such as one whose key is
            not UTF-8. `reject`, the default, puts it into a table of rejects beside the target's,
            as `<table>_rejected`; in a table, the document's row is removed. `fail` raises a
            `dcp_rs.exceptions.DataError`, as does a target of your own by default.
        persisted_only: Off by default, as in `dcp_rs.Client.stream`, because the target follows a
            rollback if a failover takes changes back. Whether to write only changes that every copy
            has on disk.
        on_purge: What to do if deletions were purged that the target does not have, as in
            `dcp_rs.Client.stream`: `resync` reads the vBucket again, `ignore` keeps their rows.
        priority: How much a node sends in one turn of a connection, as in `dcp_rs.Client.stream`.
        backfill_order: How a node reads vBuckets from disk, as in `dcp_rs.Client.stream`.
        commit_rows: Changes after which to commit.
        commit_bytes: Bytes of changes, as Arrow columns, after which to commit.
        commit_interval: Seconds after the first change after which to commit. A database that has
            caught up commits sooner, as soon as the stream brings nothing.
        target_retry_timeout: Seconds for which to try again while a database cannot be reached or a
            disk is full. 0, the default, raises at once.
        compact_every: Seconds after which to merge the small files of Delta tables and DuckLakes,
            again and again; with `once`, at the end. Other targets have tools of their own.
        keep_versions_for: Seconds for which old versions of these stay readable, at least an hour:
            files that only older ones need are removed after each compaction.
        listen: Where to answer `/livez`, `/readyz`, `/status` and `/metrics` over HTTP, such as
            `127.0.0.1:9108`. Anyone who reaches it may read them: `0.0.0.0:9108` is reached from
            other machines. A port alone is one of 127.0.0.1.
        hung_after: Seconds after which `/livez` fails, if a commit or `on_progress` has not
            returned. Neither waiting for Couchbase nor compacting counts.
        stop: Event that stops it: it commits what was read, and returns.
        on_progress: Function that is called with the `dcp_rs.replication.Progress`
            after each commit and about once a second, on the calling thread.

    Returns:
        The final progress.

    Raises:
        ConfigError: An option is wrong, a library is too old, or the table contradicts the schema;
            nothing was written.
        CheckpointError: The target's state is damaged, or of another number of shares.
        ConcurrentWriterError: Another process writes to the table, or to the share of it.
        DataError: `on_error` is `fail`, and the target cannot hold a change.
        DcpError: The stream failed. Commits are kept, and the next call resumes.
        ImportError: PyArrow or the target's library is not installed.
    """
    given = dict(locals())
    require_pyarrow("replicate", extra_of(target))
    from dcp_rs.replication.core import Replication
    from dcp_rs.replication.health import Health, Watch
    from dcp_rs.replication.preparing import prepare

    written, settings = prepare(given)
    health = Health(client.bucket_name, client.options.name, hung_after)
    try:
        with Watch(health), nullcontext() if listen is None else _listening(listen, health):
            return Replication(client, written, settings, health).run()
    finally:
        written.close()


def _listening(address: str, health: Health) -> Listening:
    from dcp_rs.replication.listening import Listening

    return Listening(address, health)


@_keywords.checked
def verify(
    client: Client,
    target: str,
    *,
    collections: str | Iterable[str] | None = None,
    vbuckets: Iterable[int] | None = None,
    examples: int = 10,
) -> Verification:
    """Compares tables with the bucket: keys, versions and counts.

    A table is compared with what the bucket had at the table's position, so writes and
    `dcp_rs.replicate` may go on: documents that have changed since are only counted. It reads every
    key of the bucket, but no documents, and holds the keys of some vBuckets in memory: of one, if
    that has more than half a million.

    Args:
        client: Client of the bucket.
        target: URL of the tables, as for `dcp_rs.replicate`. Without `table`, and for the folder of
            several Delta tables, all of them are compared.
        collections: Which collections to compare, of a target with a table for each.
        vbuckets: Which vBuckets to compare; by default, all.
        examples: How many differences to return of each table.

    Returns:
        What differs. Pass `Verification.reload` to `dcp_rs.replicate` to repair it.

    Raises:
        ConfigError: The target has no such table, or a log, which is not compared.
        CheckpointError: A state is damaged.
        ConcurrentWriterError: Another process has the DuckDB database open.
        DcpError: The bucket could not be read.
        ImportError: PyArrow or the target's library is not installed.
    """
    require_pyarrow("verify", extra_of(target))
    from dcp_rs.replication import comparing
    from dcp_rs.replication.opening import check_url

    _checks.instance("client", client, Client, "a Client")
    check_url(target)
    _checks.integer("examples", examples, 0, 100_000)
    if isinstance(collections, str):
        collections = [collections]
    if vbuckets is not None:
        vbuckets = _checks.vbuckets(vbuckets)
        _checks.existing("vbuckets", vbuckets, client.num_vbuckets)
    return comparing.verify(
        client,
        target,
        None if collections is None else _checks.names("collections", collections),
        vbuckets,
        examples,
    )
