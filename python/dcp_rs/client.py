"""Connections to a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from dcp_rs import _checks, _dcp_rs, _deprecated, _keywords
from dcp_rs._stream_start import StreamStart
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.connection import Bucket, ConnectionOptions, connection_options
from dcp_rs.exceptions import ClosedError, ConfigError, DcpError
from dcp_rs.options import engine_options
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa

    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BackfillOrder, BatchPolicy, Include, Op, Priority, Share
    from dcp_rs.plan import ReadPlan
    from dcp_rs.planner import Offsets
    from dcp_rs.stores import CheckpointStore

# Scopes or collections that are named, and how alike names are of which one may be meant.
_SHOWN = 10
_ALIKE = 0.6


@_keywords.checked
def connect(
    connection_string: str | ConnectionOptions,
    *,
    username: str | None = None,
    password: str | None = None,
    password_file: str | os.PathLike[str] | None = None,
    credentials: Callable[[], tuple[str, str]] | None = None,
    token: str | Callable[[], str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    bucket: str | None = None,
    connect_timeout: float = 10.0,
    retry_timeout: float = 300.0,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_certificate: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    tls_key_password: str | None = None,
    network: Literal["auto", "default", "external"] = "auto",
    srv_targets: Literal["same_domain", "any"] = "same_domain",
    keep_connections: float = 0.0,
    sasl_mechanisms: Sequence[str] | None = None,
    noop_interval: float = 20.0,
    buffer_size: int = 8 * 1024 * 1024,
    compressed: bool = False,
    name: str = "client",
) -> Client:
    """Connects to a bucket.

        >>> with EmbeddedCluster() as cluster:
        ...     with connect(
        ...         cluster.connection_string,
        ...         bucket="default",
        ...         username="Administrator",
        ...         password="password",
        ...     ) as client:
        ...         client.bucket_name, client.num_vbuckets
        ('default', 64)

    Args:
        connection_string: `couchbase://host1,host2/bucket`, or `couchbases://` for TLS; or a
            `dcp_rs.ConnectionOptions`, and then no other argument.
        username: User name. `dcp_rs.ConnectionOptions` describes this and the following options in
            detail.
        password: The user's password.
        password_file: File with the password, read for every connection.
        credentials: Function that returns `(username, password)`, called for every connection.
        token: JSON web token instead of a user, over TLS; or a function that returns one.
        token_file: File with a token, read again before it expires.
        bucket: The bucket, if the connection string does not name it.
        connect_timeout: Longest time to open and set up one connection, in seconds.
        retry_timeout: How long a stream retries a vBucket before it fails, in seconds.
        tls_ca: PEM file with the certificate authorities to trust.
        tls_certificate: PEM file with a client certificate chain.
        tls_key: PEM file with its private key.
        tls_key_password: Passphrase of that key, if it is encrypted.
        network: `auto`, `default` or `external`.
        srv_targets: `same_domain` or `any`.
        keep_connections: Seconds for which the client keeps connections between streams.
        sasl_mechanisms: Authentication mechanisms, in order of preference.
        noop_interval: Seconds between the server's noops.
        buffer_size: Flow-control buffer of each connection in bytes.
        compressed: Whether to request documents compressed.
        name: What the connections are for, shown in the server's logs and statistics.

    Raises:
        ConfigError: An option is wrong, or no bucket is named.
        ConnectError: No node could be reached, or what answered is not a Couchbase node.
        AuthenticationError: The server refused the user name, password, token or certificate.
        BucketNotFoundError: The bucket does not exist.
        TimeoutError: It took longer than `connect_timeout`.
    """
    return Client(connection_options(dict(locals())))


class Client(Bucket):
    """A bucket to stream changes from, returned by `dcp_rs.connect`.

    A client is a context manager. You can use it from any thread, but not in a forked child. You
    cannot pickle it, but you can pickle its `options`.
    """

    __slots__ = ()

    _connected_by = "connect"

    def __init__(self, options: ConnectionOptions) -> None:
        _checks.instance("options", options, ConnectionOptions, "ConnectionOptions")
        super().__init__(options, _dcp_rs.Client.connect(vars(options)))

    def high_seqnos(self) -> dict[int, int]:
        """Fetches the highest seqno of each vBucket from the nodes.

        Raises:
            TimeoutError: A node did not answer within the connect timeout; the text says why.
            AuthenticationError: The server no longer accepts the user.
        """
        return self._inner.high_seqnos()

    def collections(self, collections: str | Iterable[str] | None = None) -> dict[str, int]:
        """Fetches the bucket's collections from the nodes.

        Args:
            collections: Names and patterns of those to return, as in `dcp_rs.Client.stream`; by
                default, all but those of the scope `_system`.

        Returns:
            ID of each collection by its name, such as `inventory.airline`, in order. A collection
            that is created again has another ID.

        Raises:
            ConfigError: A scope or collection that is named does not exist.
            TimeoutError: A node did not answer within the connect timeout; the text says why.
        """
        return collections_of(self, collections)

    def _earliest_of(
        self, collections: list[str] | None, readers: Iterable[Checkpoint]
    ) -> Checkpoint:
        """Returns where one stream of collections begins for all of several readers."""
        inner = [reader._inner for reader in readers]  # noqa: SLF001 - the package's own
        options = {"collections": collections}
        return Checkpoint._of(self._inner.earliest_of(options, inner))  # noqa: SLF001 - as above

    @_deprecated.accepts(_deprecated.OF_STREAM)
    @_keywords.checked
    def stream(
        self,
        *,
        start: Literal["earliest", "latest"] | Checkpoint | CheckpointStore = "earliest",
        default: Literal["earliest", "latest"] = "earliest",
        until: Literal["now"] | Mapping[int, int] | None = None,
        vbuckets: Iterable[int] | Share | None = None,
        collections: str | Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Op | Iterable[Op] | None = None,
        since: datetime | float | None = None,
        columns: Literal["basic", "full"] | Sequence[str] = "basic",
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        document_schema: str | pa.Schema | DocumentSchema | None = None,
        drop_fields: str | Iterable[str] | None = None,
        hash_fields: str | Iterable[str] | None = None,
        hash_key: str | bytes | None = None,
        include: Include | Iterable[Include] = (),
        persisted_only: bool = False,
        on_purge: Literal["resync", "ignore"] = "resync",
        out_of_order: bool = False,
        initial_deletions: Literal["deliver", "skip", "skip_if_supported"] = "deliver",
        priority: Priority | None = None,
        backfill_order: BackfillOrder | None = None,
        batch: BatchPolicy | None = None,
        on_rollback: Literal["emit", "fail", "resync"] = "emit",
        ack: Literal["next", "manual"] = "next",
    ) -> ChangeStream:
        """Opens a stream of changes.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     for n in range(3):
            ...         _ = cluster.upsert(f"key_{n}", b"{}")
            ...     with client.stream(until="now", columns=["op", "key"]) as stream:
            ...         sorted(row["key"] for batch in stream for row in batch.rows())
            ['key_0', 'key_1', 'key_2']

        Args:
            start: `earliest`, `latest`, a checkpoint to resume from, or a `dcp_rs.CheckpointStore`
                with such a checkpoint. With a `dcp_rs.SharedStore`, which all stores of this
                package are, the stream takes over its vBuckets from their previous reader.
            default: Where to start if the store has no position for any of the stream's vBuckets:
                `earliest`, or `latest`, which is saved in the store before the first batch, so that
                a restart does not start later.
            until: `None` never ends; `"now"` ends with the changes that the bucket has now, and a
                mapping of vBucket to seqno there. A mapping streams only the vBuckets that it
                names. Both read to the end of the snapshot that contains the last seqno.
            vbuckets: vBuckets to stream, or the `dcp_rs.Share` of one of several members; by
                default, all.
            collections: One or more collections to stream, as `scope.collection`, or as
                `collection` in the scope `_default`; by default, all. In patterns such as
                `inventory.*` for a whole scope or `*.events`, `*` matches any text and `?` one
                character; matching collections created later are streamed too. Scopes and
                collections named without wildcards must exist. Wildcards do not match the scope
                `_system`.
            keys: One or more patterns of keys to deliver: `*` matches any text, `?` one character,
                and a backslash escapes the next character. The server sends all keys anyway, and
                the checkpoint moves past the others.
            ops: One or more operations to deliver: `mutation`, `deletion`, `expiration`. Without
                the last two, a copy of the data keeps documents that are gone.
            since: Time of the earliest change to deliver, as a `datetime` with a time zone or
                seconds since 1970. It is compared with the CAS, which the server's clock sets. The
                stream still reads everything from `start` on, because servers cannot look up
                changes by time. Documents with CAS 0 are delivered. If an application has set a CAS
                that is not a time, it is compared as if it were one.
            columns: `basic`; `full`, which adds revision, expiry, flags, datatype and history
                branch; or the names of columns in order. See `dcp_rs.columns`. You can name columns
                of `document_schema` too; if you name none of them, all follow at the end. Without
                `value` and `document_schema`, the server does not send documents.
            key_type: `string`, or `binary` for keys that are not UTF-8.
            value_format: `binary`, `string` for text, or `variant` for Spark's variant: a struct of
                `value` and `metadata`, encoded as by Spark's `parse_json`.
            document_schema: Columns to decode JSON documents to, instead of `value`: in Spark SQL's
                syntax (`"name STRING, geo STRUCT<lat: DOUBLE>"`), as a `pyarrow.Schema`, or as a
                `dcp_rs.DocumentSchema`, which also says what to do with values that do not fit: by
                default, they are null and noted in the column `_malformed_fields`. Missing fields
                are null; other fields are ignored. The page on documents lists the types.
            drop_fields: One or more paths of fields that no column gets, such as `email` or
                `cards[].number`: they are taken out of each document before it is decoded. A path
                leads into every element of the arrays on its way. A name that is not of letters,
                digits, `_` and `-` is written as `["a name"]`. A document that is not JSON becomes
                a null, and is counted as malformed. Keys are not masked, and extended attributes
                are refused.
            hash_fields: One or more paths of fields of which only a hash is left: SHA-256 of the
                value's canonical JSON, as text of 64 hexadecimal digits. `tags[]` hashes each
                element of an array instead of the array. A null stays.
            hash_key: Secret of these hashes, which are HMAC-SHA-256 then. Without it, whoever can
                guess a value can find it.
            include: One or more of `xattrs`, `history`, `system_events`, `system_documents`, none
                of which is delivered otherwise. `xattrs`: `basic` and `full` have the column
                `xattrs`. `history`: every version of a document that the server still has, instead
                of only the newest one in each snapshot, in collections that keep their change
                history (Couchbase Server 7.2 or later, Magma buckets); `basic` and `full` have the
                column `history`. You can turn it on or off at a checkpoint; it applies to later
                changes. `system_events`: rows for changes of collections and scopes, and a row
                `caught_up` for each vBucket once it has delivered everything that it had when the
                stream was opened. `system_documents`: documents of the scope `_system`, which
                `collections` can also name, and records of distributed transactions (keys that
                begin with `_txn:`).
            persisted_only: Whether to deliver a change only once every present copy of its vBucket
                has it on disk, so that no failover to one of them takes it back. Off by default,
                unlike `persistedOnly` in Spark, because a stream's checkpoint finds its way back if
                a failover takes changes back. Unpersisted changes count towards the
                connection's `buffer_size`. On ephemeral buckets it has no effect, and an event says
                so.
            on_purge: What to do if the server has purged deletions above the position. `resync`
                delivers a rollback row and starts the vBucket over, as `on_rollback` allows.
                `ignore` resumes and never sees those deletions: their documents stay in your
                target. It needs Couchbase Server 7.2; older servers always resync. `fail`, as in
                plans, is refused: to a stream, the server does not tell a purge from another
                rollback.
            out_of_order: Whether the server may send the first load of a vBucket in the order of
                its keys, which is faster for one small collection of a large bucket (Couchbase
                Server 7.1 or later). The position of the vBucket stays at the beginning until the
                load is complete. If the connection is lost or the process ends before that, the
                load starts over with a rollback row to seqno 0 and the next `epoch`. Cannot be
                combined with `on_rollback="fail"`.
            initial_deletions: `skip` asks the server to leave out the deletions of a vBucket's
                first load, from its beginning to what the server has on disk, which saves reading
                the tombstones of documents that your target never had. Later deletions are
                delivered, and so are those that the server still has in memory; `ops` instead
                drops deletions for good. If a vBucket is rolled back to 0, its deletions are left
                out again, so discard what your target has of it. It needs a server that is newer
                than Couchbase Server 8.0; `skip_if_supported` delivers the deletions of others.
                Neither can be combined with `start="latest"`, `include="history"` or
                `out_of_order`.
            priority: Messages that a node sends in one turn: `low` 1; `medium` 5, as nodes do
                unless asked; `high` 50, which halves the time of a load and slows the slowest
                requests of others. Checkpoints do not depend on it.
            backfill_order: How a node reads vBuckets from disk: `round-robin`, as nodes do unless
                asked, or `sequential` (Couchbase Server 6.6 or later). A node without the setting,
                or without `priority`, is read without it, which is logged.
            batch: When a batch is delivered, as a `dcp_rs.BatchPolicy`; by default, with 10,000
                rows, 4 MiB or 0.1 seconds after its first row.
            on_rollback: `emit` delivers a row with the seqno from which the vBucket's changes are
                sent again, and resumes there; `resync` does the same from the vBucket's beginning;
                `fail` raises an error.
            ack: With `next`, taking the next batch acknowledges the previous one; with `manual`,
                you call `dcp_rs.ChangeStream.ack`, in any order, and the stream's checkpoint never
                moves past an unacknowledged batch.

        Raises:
            ConfigError: An option is wrong, or the server has no `initial_deletions="skip"`.
            CheckpointError: The checkpoint belongs to another bucket, is ahead, or was made with a
                filter that does not contain this one; or the store cannot be read or written.
            UnsupportedError: The server or bucket keeps no change history, which
                `include="history"` needs.
            ClosedError: The client is closed.
            ForkedProcessError: The client was made before a fork.
        """
        options = dict(locals())
        del options["self"]
        options, store = stream_options(options, self)
        with _suggesting(self):
            stream = ChangeStream(self._inner.stream(options), self.bucket_name)
        if store is not None:
            try:
                store.save(stream.checkpoint())
            except BaseException:
                stream.close()
                raise
        return stream

    @_keywords.checked
    def plan(
        self,
        *,
        start: Literal["earliest", "latest"] | Offsets | Checkpoint = "earliest",
        until: Literal["now"] | Offsets = "now",
        partitions: int | None = None,
        vbuckets: Iterable[int] | Share | None = None,
        collections: str | Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Op | Iterable[Op] | None = None,
        since: datetime | float | None = None,
        include: Include | Iterable[Include] = (),
        max_seqnos: int | None = None,
        persisted_only: bool = True,
        on_rollback: Literal["emit", "fail", "resync"] = "emit",
        on_purge: Literal["fail", "resync"] = "fail",
        is_last: bool = False,
    ) -> ReadPlan:
        """Plans a bounded read, in parts that other processes can read.

        Its bounds are taken now, at what every copy has on disk: what was just written comes with
        the next plan. A plan is complete once all of its partitions are: store `end`
        with what they brought, and start the next plan there. If one fails with
        `dcp_rs.exceptions.RollbackError`, discard what the plan brought and plan again from the
        same `start`.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     for n in range(3):
            ...         _ = cluster.upsert(f"key_{n}", b"{}")
            ...     plan = client.plan(partitions=2, persisted_only=False)
            ...     len(plan.partitions), plan.size
            ...     client.plan(start=plan.end, persisted_only=False).size
            (2, 3)
            0

        Args:
            start: `earliest`, `latest`, the `end` of an earlier plan, or a checkpoint of a stream.
            until: `now`, or the `end` of a plan, for the same end again.
            partitions: Most partitions, or one per node if there are more nodes; by default one per
                node, or four with `is_last`.
            vbuckets: vBuckets to read; this and the next five are as in `dcp_rs.Client.stream`.
            collections: Collections to read.
            keys: Patterns of keys to read.
            ops: Operations to read.
            since: Earliest change to read.
            include: Only `system_documents` makes a difference to a plan.
            max_seqnos: Most seqnos to read, an upper bound of the rows; by default, unlimited.
            persisted_only: On by default, unlike in `dcp_rs.Client.stream`, because a plan ends at
                offsets that a failover could take back. Whether to read only changes that every
                copy of a vBucket has on disk. Off on buckets without a disk.
            on_rollback: If the server's history differs from what was read before `start`: `emit`
                and `resync` begin with a rollback row, `fail` raises an error.
            on_purge: If deletions may have been purged before they were read: `fail`, or `resync`:
                a rollback row, then the vBucket from its beginning.
            is_last: Whether no later plan starts at the end. Then everything is read, persisted or
                not, to the ends of snapshots, and `end` is `None`.

        Raises:
            ConfigError: An option is wrong, or there is no such vBucket, scope or collection.
            RollbackError: The server has rolled back, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: `start` or `until` is damaged, or of another bucket or filter.
            TimeoutError: A node did not answer in time.
        """
        options = dict(locals())
        del options["self"]
        return plan_of(self, **options)

    def close(self) -> None:
        """Closes the client and the streams it has opened.

        Reading on from one raises `dcp_rs.exceptions.ClosedError`.
        """
        self._inner.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collections_of(bucket: Bucket, collections: str | Iterable[str] | None) -> dict[str, int]:
    """Fetches a bucket's collections. See `Client.collections`."""
    if not (collections is None or isinstance(collections, str)):
        collections = _checks.names("collections", collections)
    with _suggesting(bucket):
        return bucket._inner.collections({"collections": collections})  # noqa: SLF001 - as above


@contextmanager
def _suggesting(bucket: Bucket) -> Iterator[None]:
    """Adds the nearest collection to an error that one does not exist."""
    try:
        yield
    except ConfigError as error:
        better = with_nearest(bucket, error)
        if better is error:
            raise
        raise better from None


def with_nearest(bucket: Bucket, error: ConfigError) -> ConfigError:
    """Returns an error with the nearest collection, if it says that one does not exist."""
    text, name = str(error), error.value
    is_unknown = error.option == "collections" and "there is no" in text
    if not is_unknown or "did you mean" in text or not isinstance(name, str):
        return error
    if "," in name:
        # No name has one.
        text = f"{text.removeprefix('collections: ')}; pass several as a list"
        return ConfigError(text, option="collections", value=name)
    there = list(bucket._inner.collections({"collections": None}))  # noqa: SLF001 - as above
    listed, near = _alternatives(name, there)
    text = f"{text.removeprefix('collections: ')}{listed}"
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return ConfigError(f"{text}{hint}", option="collections", value=name)


def _alternatives(name: str, there: list[str]) -> tuple[str, list[str]]:
    """Returns what there is in place of a scope or collection, and which of it may be meant."""
    from difflib import SequenceMatcher

    def nearest(names: list[str], wanted: str) -> dict[str, float]:
        found = {each: SequenceMatcher(None, each, wanted).ratio() for each in names}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    scope, dot, collection = name.partition(".")
    scopes = [each.partition(".")[0] for each in there]
    listed, what = nearest(scopes, scope), ", which has the scopes "
    alike = [each for each, likeness in listed.items() if likeness >= _ALIKE]
    if not dot:
        near = alike
    else:
        siblings = [each.partition(".")[2] for each in there if each.startswith(f"{scope}.")]
        if siblings not in ([], ["_default"]):
            listed, what = nearest(siblings, collection), f", whose scope {scope} has "
        near = [each for each in there if each.partition(".")[2] == collection]
        likely = [each for each in there if each.partition(".")[0] in {scope, *alike}]
        by_name = nearest([each.partition(".")[2] for each in likely], collection)
        best = [each for each, likeness in by_name.items() if likeness >= _ALIKE][:1]
        near += [each for each in likely if each.partition(".")[2] in best]
    more = len(listed) - _SHOWN
    text = ", ".join(list(listed)[:_SHOWN])
    return f"{what}{text}{f' and {more} more' if more > 0 else ''}", near


def plan_of(
    bucket: Bucket,
    *,
    start: Literal["earliest", "latest"] | Offsets | Checkpoint,
    until: Literal["now"] | Offsets,
    partitions: int | None,
    max_seqnos: int | None,
    persisted_only: bool,
    on_rollback: Literal["emit", "fail", "resync"],
    on_purge: Literal["fail", "resync"],
    is_last: bool,
    **filters: Any,
) -> ReadPlan:
    """Plans a bounded read. See `Client.plan`."""
    from dcp_rs.planner import Planner, PlanOptions

    if isinstance(until, str):
        _checks.word("until", until, ("now",))
    options = PlanOptions(
        max_seqnos=max_seqnos,
        until=None if isinstance(until, str) else until,
        on_rollback=on_rollback,
        persisted_only=persisted_only,
        on_purge=on_purge,
        is_last=is_last,
    )
    if partitions is not None:
        _checks.integer("partitions", partitions, 1, 0xFFFF)
    with _suggesting(bucket):
        planner = Planner(bucket, filters.pop("vbuckets"), **filters)
        return planner.plan(start, options, count=partitions)


def stream_options(
    options: dict[str, Any], bucket: Bucket
) -> tuple[dict[str, Any], CheckpointStore | None]:
    """Builds the engine's options from the arguments of `Client.stream`.

    It may ask the nodes and a store, and block.

    Returns:
        The options, and the store in which to save the start of the stream at once, if any.
    """
    start = StreamStart(options.pop("start"), options.pop("default"))
    if bucket._is_closed:  # noqa: SLF001 - this module's own
        raise ClosedError("the client is closed")
    num_vbuckets = bucket.num_vbuckets
    # The check would exhaust an iterator.
    options = {
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in options.items()
    }
    options["vbuckets"] = start.vbuckets_of(options["vbuckets"], num_vbuckets)
    options = engine_options(options)
    # A store is not changed for a stream that cannot be opened.
    _checks.each_utf8(options)
    _dcp_rs.check_stream(options)
    if options["vbuckets"] is not None:
        _checks.existing("vbuckets", options["vbuckets"], num_vbuckets)
    if not (options["until"] is None or isinstance(options["until"], str)):
        options["until"] = dict(options["until"])
        _checks.existing("until", options["until"], num_vbuckets)
    if start.takes_over and options["collections"] is not None:
        _check_collections(bucket, options["collections"])
    options["start"] = start.start_of(options, num_vbuckets, bucket.bucket_uuid)
    return options, start.store if options["start"] == "latest" else None


def _check_collections(bucket: Bucket, collections: object) -> None:
    """Asks the nodes whether collections exist. If they do not answer, the stream waits for them.

    Raises:
        ConfigError: A scope or collection does not exist.
    """
    try:
        bucket._inner.collections({"collections": collections})  # noqa: SLF001 - as above
    except (ClosedError, ConfigError):
        raise
    except DcpError:
        pass
