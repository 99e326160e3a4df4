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

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from dcp_rs import _checks, _keywords
from dcp_rs._libraries import require_pyarrow
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import BackfillOrder, Masks, Priority
from dcp_rs.replication.inferring import InferredField, InferredSchema, infer_schemas
from dcp_rs.replication.progress import Progress, TableProgress
from dcp_rs.replication.sharing import BucketShare, check_options, take_share
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    VALIDITY,
    Address,
    Commit,
    Database,
    Endings,
    GrowingTarget,
    HistoryTarget,
    Target,
)
from dcp_rs.replication.verification import Difference, TableVerification, Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from dcp_rs.documents import DocumentSchema
    from dcp_rs.replication.changes import Layout
    from dcp_rs.replication.core import Settings
    from dcp_rs.replication.health import Health
    from dcp_rs.replication.listening import Listening
    from dcp_rs.replication.reload import Reload
    from dcp_rs.replication.schemas import Contract, NewFields, OwnSchema, TypeConflicts
    from dcp_rs.replication.state import Nested
    from dcp_rs.replication.table import Table
    from dcp_rs.replication.tables import OneTable, TablePerCollection, Tables
    from dcp_rs.replication.target import OnError

__all__ = [
    "Commit",
    "Database",
    "Difference",
    "Endings",
    "GrowingTarget",
    "HistoryTarget",
    "InferredField",
    "InferredSchema",
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


class _Scheme(NamedTuple):
    """What writes to the URLs of a scheme.

    Attributes:
        target: Module and class for one table.
        database: Module and class for several tables.
        extra: The extra that brings the library.
    """

    target: str
    database: str
    extra: str


_SCHEMES = {
    "delta": _Scheme("delta.DeltaTarget", "delta.DeltaDatabase", "delta"),
    "duckdb": _Scheme("duckdb.DuckDBTarget", "duckdb_database.DuckDBDatabase", "duckdb"),
    "ducklake": _Scheme("ducklake.DuckLakeTarget", "ducklake.DuckLakeDatabase", "ducklake"),
    "iceberg": _Scheme("iceberg.IcebergTarget", "iceberg.IcebergDatabase", "iceberg"),
    "kafka": _Scheme("kafka.KafkaTarget", "kafka.KafkaDatabase", "kafka"),
    "parquet": _Scheme("parquet.ParquetTarget", "parquet.ParquetDatabase", "arrow"),
    "postgresql": _Scheme("postgres.PostgresTarget", "postgres.PostgresDatabase", "postgres"),
}
# Those whose tables can be in object storage or behind a catalog.
_STORED = ("delta", "parquet", "iceberg", "ducklake")
_MEMBERS = ("modes", "open", "commit", "close")
_MEMBERS_TO_GROW = ("stored", "widens")
_MEMBERS_OF_HISTORY = (*_MEMBERS, "newest")
_MEMBERS_OF_DATABASE = (*_MEMBERS, "target", "fold", "drop")


def open_target(url: str, storage_options: Mapping[str, str] | None = None) -> Target:
    """Creates the target for a URL.

    Args:
        url: `duckdb:///path?table=name`, also with `&value_format=variant`,
            `postgresql://user@host/database?table=name`,
            `ducklake+sqlite:///catalog.db?data=/folder&table=name`, also with `postgresql`;
            `delta:///folder`; for logs only `parquet:///folder` and
            `iceberg:///folder?table=namespace.name`; `kafka://broker:9092?topic=name`. In object
            storage, `delta+s3://bucket/path` and `parquet+s3://bucket/path`, also with `gs`, `az`
            and `abfss`.
        storage_options: As for `replicate`.

    Raises:
        ConfigError: The URL does not name a target, or the target's library is too old.
        ImportError: The target's library is not installed; the text names the extra to install.
    """
    address, scheme = _parse(url, storage_options)
    if "{" in address.options.get("table", ""):
        raise ConfigError(
            "the table of the URL is one table, whose name has no braces: name those of several"
            " collections by a template",
            option="target",
        )
    target: Target = _class(scheme.target).at(address)
    return target


def open_database(url: str, storage_options: Mapping[str, str] | None = None) -> Database:
    """Creates the place of several tables for a URL.

    Args:
        url: As for `open_target`, without `table`; for Delta, Iceberg and Parquet, the folder of
            the tables.
        storage_options: As for `replicate`.

    Raises:
        ConfigError: The URL does not name a place for several tables, or the library is too old.
        ImportError: The target's library is not installed; the text names the extra to install.
    """
    address, scheme = _parse(url, storage_options)
    if "table" in address.options:
        raise ConfigError(
            "names one table, and the tables of several collections are named by a template:"
            " leave out table",
            option="target",
        )
    database: Database = _class(scheme.database).at(address)
    return database


def _parse(url: str, storage_options: Mapping[str, str] | None) -> tuple[Address, _Scheme]:
    """Returns the parts of a target's URL, and what writes to it."""
    _checks.text("target", url)
    address = replace(Address.parse(url), storage_options=_strings(storage_options))
    if address.scheme not in _SCHEMES:
        raise ConfigError(
            f"must begin with one of {', '.join(f'{each}://' for each in _SCHEMES)}",
            option="target",
        )
    if "value_format" in address.options and address.scheme not in {"duckdb", "kafka"}:
        raise ConfigError(
            "value_format is an option of duckdb only, because dcp_rs cannot write a "
            f"VARIANT to {address.scheme}: leave it out, and the column value has the JSON",
            option="target",
        )
    scheme = _SCHEMES[address.scheme]
    if address.storage and address.scheme not in _STORED:
        raise ConfigError(
            f"{address.scheme} has no tables in {address.storage}: only"
            f" {', '.join(_STORED)} have a + in their URLs",
            option="target",
        )
    if address.storage_options and not (address.storage or address.is_catalog):
        raise ConfigError(
            "is for object storage and catalogs, such as delta+s3://bucket/path: leave it out",
            option="storage_options",
        )
    require_pyarrow("a target", scheme.extra)
    return address, scheme


def _strings(options: object) -> dict[str, str]:
    """Returns options of a storage, whose values are never shown."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError("must be a mapping of names to text", option="storage_options")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"must have text for each name, and {str(name)!r} has a"
                f" {type(value).__name__}: write it as text",
                option="storage_options",
            )
    return dict(options)


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)


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
        mode: `table` has a row for each document. `log` has a row for each change, including
            rollbacks and collection events. `history` has a row for each version of a document,
            with `valid_from`, `valid_to` and `is_current`.
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
        listen: Where to answer `/livez`, `/readyz`, `/status` and `/metrics` over HTTP, such as
            `127.0.0.1:9108`. Anyone who reaches it may read them: `0.0.0.0:9108` is reached from
            other machines. A port alone is one of 127.0.0.1.
        hung_after: Seconds after which `/livez` fails, if a commit or `on_progress` has not
            returned. Waiting for Couchbase does not count.
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
    require_pyarrow("replicate", _extra_of(target))
    from dcp_rs.replication.controls import check_commits
    from dcp_rs.replication.core import Replication, Settings
    from dcp_rs.replication.health import Health, Watch
    from dcp_rs.replication.reload import Reload
    from dcp_rs.replication.schemas import Contract

    _checks.instance("client", client, Client, "a Client")
    _checks.flag("once", once)
    check_commits(
        rows=commit_rows, size=commit_bytes, interval=commit_interval, hung_after=hung_after
    )
    _checks.seconds("target_retry_timeout", target_retry_timeout, 0, 365 * 86_400)
    _checks.flag("persisted_only", persisted_only)
    _checks.word("on_purge", on_purge, ("resync", "ignore"))
    if priority is not None:
        _checks.word("priority", priority, get_args(Priority))
    if backfill_order is not None:
        _checks.word("backfill_order", backfill_order, get_args(BackfillOrder))
    _checks.word("on_drop", on_drop, ("empty", "drop", "keep"))
    if on_error is not None:
        _checks.word("on_error", on_error, ("reject", "fail"))
    if isinstance(collections, str):
        collections = [collections]
    if stop is not None:
        _checks.instance("stop", stop, threading.Event, "a threading.Event")
    if on_progress is not None and not callable(on_progress):
        raise _checks.wrong_type("on_progress", on_progress, "a function")
    part = None if share is None else BucketShare.parse(share, client.num_vbuckets)
    if part is not None:
        check_options(mode, on_drop)
    settings = Settings(
        mode=mode,
        once=once,
        share=part,
        collections=None if collections is None else _checks.names("collections", collections),
        persisted_only=persisted_only,
        on_purge=on_purge,
        priority=priority,
        backfill_order=backfill_order,
        on_drop=on_drop,
        on_error=on_error,
        commit_rows=commit_rows,
        commit_bytes=commit_bytes,
        commit_interval=commit_interval,
        target_retry_timeout=target_retry_timeout,
        stop=threading.Event() if stop is None else stop,
        on_progress=on_progress,
    )
    again = Reload.of(reload)
    if reload is not None and mode in {"log", "history"}:
        raise ConfigError(
            f"a {mode} keeps what it has, and cannot be read again: replicate to another one",
            option="reload",
        )
    _checks.integer("sample", sample, 1, 1_000_000)
    contract = _contract(
        Contract(),
        {
            "document_schema": document_schema,
            "key_type": key_type,
            "deletes": deletes,
            "new_fields": new_fields,
            "type_conflicts": type_conflicts,
            "extra": extra,
            "nested": nested,
            "masks": Masks.of(drop_fields, hash_fields, hash_key),
        },
        mode,
    )
    written: Tables
    tables = template_of(target, tables) or tables
    if tables is None:
        written = _one(
            _opened(target, storage_options, open_target, part),
            settings,
            contract,
            sample=sample,
            reload=again,
        )
    else:
        place = _opened(target, storage_options, open_database, part)
        written = _each(place, tables, settings, contract, sample=sample, reload=again)
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
    require_pyarrow("verify", _extra_of(target))
    from dcp_rs.replication import comparing

    _checks.instance("client", client, Client, "a Client")
    _checks.text("target", target)
    _checks.integer("examples", examples, 0, 100_000)
    if isinstance(collections, str):
        collections = [collections]
    return comparing.verify(
        client,
        target,
        None if collections is None else _checks.names("collections", collections),
        None if vbuckets is None else _checks.vbuckets(vbuckets),
        examples,
    )


_WORDS = {
    "key_type": ("string", "binary"),
    "deletes": ("remove", "mark"),
    "new_fields": ("evolve", "ignore", "reject"),
    "type_conflicts": ("evolve", "null", "reject"),
    "extra": ("drop", "column"),
    "nested": ("json", "struct", "columns"),
}


def _contract(base: Contract, given: Mapping[str, Any], mode: str) -> Contract:
    """Returns a contract with options in place of some of another's."""
    for name, words in _WORDS.items():
        if given.get(name) is not None:
            _checks.word(name, given[name], words)
    if given.get("deletes") == "mark" and mode == "log":
        raise ConfigError("a log has a row for each deletion: leave it out", option="deletes")
    if given.get("deletes") == "mark" and mode == "history":
        raise ConfigError(
            "the last version of a removed document stays in a history, with the time at which it"
            " ended: leave it out",
            option="deletes",
        )
    return replace(base, **given)


def template_of(target: object, tables: object) -> str | None:
    """Returns the template of the topics that a URL names; `None` if it has none."""
    if not isinstance(target, str) or not target.startswith("kafka:"):
        return None
    topic = Address.parse(target).options.get("topic", "")
    if "{" not in topic:
        return None
    if tables is not None:
        raise ConfigError(
            "the topic of the target is a template already: leave out one of them", option="tables"
        )
    return topic


def _with_columns(contract: Contract, target: Target | Database, mode: str) -> Contract:
    """Returns a contract for rows with the columns that a target needs."""
    is_marked = mode == "table" and getattr(target, "marks_deletes", False)
    deletes = "mark" if is_marked else contract.deletes
    more = tuple(getattr(target, "columns", ()))
    if mode == "history":
        return replace(contract, more=(*more, "history"), reserved=VALIDITY)
    return replace(contract, deletes=deletes, more=more)


def _opened(
    target: Any,
    storage_options: Mapping[str, str] | None,
    opening: Callable[[str, Mapping[str, str] | None], Any],
    share: BucketShare | None,
) -> Any:
    """Returns the target of a URL, or one that is opened already, for a share."""
    if isinstance(target, str):
        target = opening(target, storage_options)
    elif storage_options is not None:
        raise ConfigError(
            "is for the URL of a target: give it to open_target", option="storage_options"
        )
    take_share(target, share)
    return target


def _one(
    target: Target | Database,
    settings: Settings,
    contract: Contract,
    *,
    sample: int,
    reload: Reload,
) -> OneTable:
    """Returns a target that is one table, which takes all changes."""
    from dcp_rs.replication.tables import OneTable

    if settings.share is not None:
        contract.check_shared()

    if settings.on_drop != "empty":
        raise ConfigError("applies to a table for each collection: set tables", option="on_drop")
    chosen = cast("Target", target)
    _check_members(chosen, _MEMBERS, "Target")
    settings = _checked(chosen, settings)
    if settings.mode == "history":
        _check_members(chosen, _MEMBERS_OF_HISTORY, "HistoryTarget")
    _check_nested(chosen, contract)
    contract = _with_columns(contract, chosen, settings.mode)
    layout = contract.layout(settings.mode)
    columns = _columns(contract, settings, chosen) if contract.is_own else layout
    table = _table(settings, columns, chosen, None)
    return OneTable(table, chosen, layout, settings.collections, samples=sample, reload=reload)


def _each(
    target: Target | Database,
    tables: object,
    settings: Settings,
    contract: Contract,
    *,
    sample: int,
    reload: Reload,
) -> TablePerCollection:
    """Returns a target that has a table for each collection."""
    from dcp_rs.replication.names import TableNames
    from dcp_rs.replication.tables import TablePerCollection

    names = TableNames.of(tables)
    chosen = cast("Database", target)
    _check_members(chosen, _MEMBERS_OF_DATABASE, "Database")
    settings = _checked(chosen, settings)
    by_pattern: dict[str, tuple[Contract, Settings]] = {}
    for pattern in names.templates:
        given = dict(names.options.get(pattern, {}))
        if "on_error" in given:
            _checks.word("on_error", given["on_error"], ("reject", "fail"))
        own = _checked(chosen, replace(settings, on_error=given.pop("on_error", settings.on_error)))
        of_pattern = _contract(contract, given, settings.mode)
        by_pattern[pattern] = _with_columns(of_pattern, chosen, settings.mode), own
        _check_nested(chosen, by_pattern[pattern][0])
        if settings.share is not None:
            of_pattern.check_shared()
    contracts = [each for each, _ in by_pattern.values()]
    # The stream decodes documents if it can decode all of them alike.
    first = contracts[0]
    is_shared = not any(
        each.is_own or each.document_schema is not first.document_schema for each in contracts
    )
    shared = [each.layout(settings.mode) for each in contracts]
    layout = shared[0] if is_shared else first.text_layout(settings.mode)

    def make(target: Target, collection: str) -> Table:
        pattern = names.pattern(collection)
        if pattern is None:
            raise AssertionError(f"{collection} has a table")
        own, of_table = by_pattern[pattern]
        if is_shared:
            return _table(of_table, own.layout(settings.mode), target, collection)
        return _table(of_table, _columns(own, of_table, target), target, collection)

    return TablePerCollection(
        chosen, names, make, layout, settings.collections, samples=sample, reload=reload
    )


def _columns(contract: Contract, settings: Settings, target: Target) -> OwnSchema:
    """Returns the columns of a table that has a schema of its own."""
    from dcp_rs.replication.schemas import OwnSchema

    missing = [name for name in _MEMBERS_TO_GROW if not hasattr(target, name)]
    if contract.is_own and missing:
        raise ConfigError(
            f"{type(target).__name__} lacks {', '.join(missing)} of"
            " dcp_rs.replication.GrowingTarget, which tables need that decide or change their"
            " columns",
            option="target",
        )
    return OwnSchema(contract, settings.mode, getattr(target, "widens", lambda _old, _new: False))


def check_mode(target: Target | Database, mode: object) -> None:
    """Checks that a target has a mode.

    Raises:
        ConfigError: It has not.
    """
    if mode not in list(target.modes):
        found = getattr(target, "why_not", {})
        why = next((why for each, why in found.items() if each == mode), None)
        raise ConfigError(
            f"must be {' or '.join(sorted(target.modes))} for this target, not {mode!r}"
            f"{f', since {why}' if why else ''}",
            option="mode",
        )


def _checked(target: Target | Database, settings: Settings) -> Settings:
    """Returns the settings for a target, which it can have."""
    check_mode(target, settings.mode)
    takes_rejects = getattr(target, "takes_rejects", False)
    if settings.on_error == "reject" and not takes_rejects:
        raise ConfigError(
            "this target has no place for rejects (takes_rejects): leave it out", option="on_error"
        )
    on_error: OnError = settings.on_error or ("reject" if takes_rejects else "fail")
    return replace(settings, on_error=on_error)


def _check_nested(target: Target | Database, contract: Contract) -> None:
    """Checks that a target has structs if objects are to be such, before one is seen."""
    if contract.nested == "struct" and not getattr(target, "takes_structs", True):
        raise ConfigError(
            "this target has no type for a struct: choose json or columns", option="nested"
        )


def _table(
    settings: Settings, layout: Layout | OwnSchema, target: Target, collection: str | None
) -> Table:
    from dcp_rs.replication.table import Table

    return Table(
        target,
        layout,
        settings.mode,
        on_error=settings.on_error or "fail",
        on_drop=settings.on_drop,
        collection=collection,
        share=settings.share,
    )


def _check_members(target: object, members: tuple[str, ...], protocol: str) -> None:
    missing = [name for name in members if not hasattr(target, name)]
    if len(missing) == len(members):
        raise _checks.wrong_type("target", target, f"a URL or a {protocol}")
    if missing:
        raise ConfigError(
            f"{type(target).__name__} lacks {', '.join(missing)} of dcp_rs.replication.{protocol}",
            option="target",
        )


def _extra_of(target: object) -> str:
    """Returns the extra that brings what a target needs."""
    scheme = target.partition(":")[0].partition("+")[0] if isinstance(target, str) else ""
    return _SCHEMES[scheme].extra if scheme in _SCHEMES else "arrow"
