"""Connections to a bucket."""

from __future__ import annotations

import pickle
import re
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs._beginning import Beginning
from dcp_rs.documents import DocumentSchema, as_options
from dcp_rs.exceptions import ConfigError, ForkedProcessError
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.stores import CheckpointStore


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to connect: plain data that pickles, unlike a connection.

    The repr shows neither the password, not even one in the connection string, where it does not
    belong, nor `tls_key_password`, nor `credentials`; a pickle holds them.

    What is in files, and what `credentials` returns, is fetched again for every connection that is
    made, so that passwords and certificates may be replaced while streams run.

    Attributes:
        connection_string: `couchbase://host1,host2/bucket`, or `couchbases://` for TLS. The bucket
            may be left out here or given here only.
        username: Who connects; not needed with a client certificate.
        password: Their password.
        password_file: File with the password, in place of `password`; a final newline is dropped.
        credentials: Function without arguments that returns `(username, password)`, in place of
            those. It is called on a thread of its own, maybe on several at once, and given
            `connect_timeout` seconds. What it raises is shown as an
            `dcp_rs.exceptions.AuthenticationError` with its text, which must
            not hold a secret. To pickle, it must be a function of a module.
        bucket: The bucket, where the connection string names none.
        connect_timeout: Longest time for one connection to be made and set up, in seconds.
        tls_ca: PEM file with the certificate authorities to trust, and no others; the system's and
            Capella's if not given.
        tls_certificate: PEM file with a client certificate chain, in place of a user.
        tls_key: PEM file with its private key.
        tls_key_password: Passphrase of the private key, if it is encrypted (PKCS#8). Shown nowhere;
            a pickle holds it.
        network: Which of the nodes' addresses to use: `default`, `external`, or `auto`, which
            takes those that the connection string's host is one of.
        srv_targets: Which nodes to believe DNS about, where the connection string names a service:
            `same_domain`, or `any`, which follows records to other domains with a warning.
        keep_connections: Seconds for which a connection is kept that a finished stream leaves
            behind, so that the next stream of the client need not make one; 0: not at all.
        sasl_mechanisms: Mechanisms to authenticate with, of which the first that the server offers
            is used: `PLAIN`, `SCRAM-SHA512`, `SCRAM-SHA256`, `SCRAM-SHA1`. Unless given, `PLAIN`
            and then SCRAM with `couchbases://`, which users of LDAP, PAM and saslauthd need, and
            SCRAM only with `couchbase://`, where `PLAIN` is refused.
        noop_interval: Seconds between the server's noops; a connection that is silent for twice as
            long is taken for dead. In whole seconds, from 1 up.
        buffer_size: Flow-control buffer of each connection in bytes, from 64 KiB up: so much may be
            received and not yet taken.
        compressed: Whether to ask the server to send documents compressed that get smaller by it,
            which costs both ends processor time and pays on a slow network. Readers get documents
            as they were written either way.
    """

    connection_string: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    bucket: str | None = None
    connect_timeout: float = 10.0
    tls_ca: str | os.PathLike[str] | None = None
    tls_certificate: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    tls_key_password: str | None = field(default=None, repr=False)
    network: str = "auto"
    srv_targets: str = "same_domain"
    keep_connections: float = 0.0
    sasl_mechanisms: Sequence[str] | None = None
    password_file: str | os.PathLike[str] | None = None
    credentials: Callable[[], tuple[str, str]] | None = field(default=None, repr=False)
    noop_interval: float = 20.0
    buffer_size: int = 8 * 1024 * 1024
    compressed: bool = False

    def __post_init__(self) -> None:
        """Checks the options; connects to nothing.

        Raises:
            ConfigError: An option is wrong.
        """
        _dcp_rs.check_connection(vars(self))

    def __getstate__(self) -> dict[str, object]:
        """Gives what is pickled.

        Raises:
            ConfigError: The function that gives the credentials does not pickle.
        """
        if self.credentials is not None:
            try:
                pickle.dumps(self.credentials)
            except Exception as error:
                raise ConfigError(
                    "credentials: this function does not pickle: give one that is defined in a "
                    "module, or password_file"
                ) from error
        return dict(self.__dict__)

    def __repr__(self) -> str:
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if _is_shown(each, self)
        }
        given["connection_string"] = _without_secrets(self.connection_string)
        return (
            f"ConnectionOptions({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        )


def _is_shown(option: Field[Any], options: ConnectionOptions) -> bool:
    return option.repr and getattr(options, option.name) != option.default


_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d+)?(?:=\w+)?"
_ADDRESSES = re.compile(rf"(?:\w+://)?{_HOST}(?:[,;]{_HOST})*(?:/[^/@:]*)?")


def _without_secrets(connection_string: str) -> str:
    """Shows hosts, bucket and the names of options; nothing of what is not plainly that."""
    addresses, mark, options = connection_string.partition("?")
    if _ADDRESSES.fullmatch(addresses) is None:
        return "***"
    names = (option.partition("=")[0] for option in options.split("&"))
    return addresses + mark + "&".join(f"{name}=***" for name in names if mark)


def connect(
    connection_string: str | ConnectionOptions,
    *,
    username: str | None = None,
    password: str | None = None,
    password_file: str | os.PathLike[str] | None = None,
    credentials: Callable[[], tuple[str, str]] | None = None,
    bucket: str | None = None,
    connect_timeout: float = 10.0,
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
        connection_string: `couchbase://host1,host2/bucket`, or `couchbases://` for TLS; or
            `dcp_rs.ConnectionOptions`, and nothing else then.
        username: Who connects. `dcp_rs.ConnectionOptions` says more of this and of all that follow.
        password: The user's password.
        password_file: File with the password, read again for every connection.
        credentials: Function that returns `(username, password)`, called for every connection.
        bucket: The bucket, where the connection string names none.
        connect_timeout: Longest time for one connection to be made and set up, in seconds.
        tls_ca: PEM file with the certificate authorities to trust.
        tls_certificate: PEM file with a client certificate chain.
        tls_key: PEM file with its private key.
        tls_key_password: Passphrase of that key, if it is encrypted.
        network: `auto`, `default` or `external`.
        srv_targets: `same_domain` or `any`.
        keep_connections: Seconds for which connections are kept between streams.
        sasl_mechanisms: Mechanisms to authenticate with, in the order of preference.
        noop_interval: Seconds between the server's noops.
        buffer_size: Flow-control buffer of each connection in bytes.
        compressed: Whether to ask for documents compressed.

    Raises:
        ConfigError: An option is wrong, or no bucket is named.
        ConnectError: No node could be reached, or what answered is no Couchbase node.
        AuthenticationError: User name or password were refused.
        BucketNotFoundError: There is no such bucket.
        TimeoutError: It took longer than `connect_timeout`.
    """
    return Client(connection_options(dict(locals())))


def connection_options(options: dict[str, Any]) -> ConnectionOptions:
    """Makes options of the arguments of `connect`."""
    given = options["connection_string"]
    if not isinstance(given, ConnectionOptions):
        return ConnectionOptions(**options)
    for name, value in options.items():
        if name != "connection_string" and value != getattr(ConnectionOptions, name):
            raise ConfigError(
                f"{name}: is an option of the ConnectionOptions that are given: set it there, "
                f"with dataclasses.replace(options, {name}=...)"
            )
    return given


class Client:
    """A bucket to stream changes from; made by `dcp_rs.connect`.

    A context manager. Usable from any thread, but not in a forked child, and it does not pickle:
    its `options` do.
    """

    __slots__ = ("_inner", "_is_closed", "_options")

    def __init__(self, options: ConnectionOptions) -> None:
        _checks.instance("options", options, ConnectionOptions, "ConnectionOptions")
        self._is_closed = False
        self._options = options
        self._inner = _dcp_rs.Client.connect(vars(options))

    @property
    def options(self) -> ConnectionOptions:
        """What it was connected with."""
        return self._options

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""
        return self._inner.bucket_name

    @property
    def bucket_uuid(self) -> str:
        """Identity of the bucket: another one under the same name means it was recreated."""
        return self._inner.bucket_uuid

    @property
    def num_vbuckets(self) -> int:
        """How many vBuckets the bucket has."""
        return self._inner.num_vbuckets

    def vbuckets_by_node(self) -> dict[str, list[int]]:
        """Gives the vBuckets by the address of the node that holds them."""
        return dict(self._inner.vbuckets_by_node())

    def high_seqnos(self) -> dict[int, int]:
        """Asks every node for the highest seqno of each vBucket.

        Raises:
            TimeoutError: A node did not answer within the connect timeout; the text says why.
            AuthenticationError: The user is refused by now.
        """
        return self._inner.high_seqnos()

    def stream(
        self,
        *,
        start: Literal["earliest", "latest"] | Checkpoint | CheckpointStore = "earliest",
        default: Literal["earliest", "latest"] = "earliest",
        until: Literal["now"] | Mapping[int, int] | None = None,
        vbuckets: Iterable[int] | None = None,
        member: tuple[int, int] | None = None,
        scope: str | None = None,
        collections: Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Iterable[Literal["mutation", "deletion", "expiration"]] | None = None,
        since: datetime | float | None = None,
        columns: Literal["basic", "full"] | Sequence[str] = "basic",
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        include_xattrs: bool = False,
        history: bool = False,
        document_schema: str | pa.Schema | DocumentSchema | None = None,
        system_events: bool = False,
        system_documents: bool = False,
        persisted_only: bool = False,
        ignore_purged_tombstones: bool = False,
        out_of_order: bool = False,
        batch_rows: int = 10_000,
        batch_bytes: int = 4 * 1024 * 1024,
        linger: float = 0.1,
        on_rollback: Literal["emit", "fail", "resync"] = "emit",
        ack: Literal["next", "manual"] = "next",
        retry_timeout: float = 300.0,
    ) -> ChangeStream:
        """Opens a stream of changes.

            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     for n in range(3):
            ...         _ = cluster.upsert(f"key_{n}", b"{}")
            ...     with client.stream(until="now", columns=["op", "key"]) as stream:
            ...         sorted(row["key"] for batch in stream for row in batch.rows())
            ['key_0', 'key_1', 'key_2']

        Args:
            start: `earliest`, `latest`, a checkpoint to go on from, or a
                `dcp_rs.CheckpointStore`, whose checkpoint is gone on from. A
                `dcp_rs.SharedStore`, as all of this package are, takes the stream's vBuckets over
                from whoever read them before.
            default: Where to begin if the store has nothing of what is read: `earliest`, or
                `latest`, which is saved in the store before the first batch, so that a restart does
                not begin later.
            until: `None` never ends; `"now"` ends with the changes there are at this moment; a
                mapping of vBucket to seqno ends there, and streams the vBuckets it names only. Both
                deliver to the end of the snapshot that holds the last seqno.
            vbuckets: vBuckets to stream, all if not given.
            member: `(i, n)` in place of `vbuckets`: the share of reader `i`, from 0, of `n` that
                share the work. Of N vBuckets it has those from `i * N // n` up to, not including,
                `(i + 1) * N // n`.
            scope: Scope to stream, with collections that are made in it later; all if not given.
            collections: Collections to stream, as `scope.collection`, or as `collection` within
                `scope` or else within `_default`. In patterns, as `inventory.*` or `*.events`, `*`
                stands for any text and `?` for one character; collections made later that match are
                streamed too. Wildcards do not match scope `_system`.
            keys: Patterns of the keys to deliver, one or several: `*` stands for any text, `?` for
                one character, a backslash takes the meaning from the character behind it. The
                server sends the others nevertheless, and the checkpoint moves past them.
            ops: Operations to deliver: `mutation`, `deletion`, `expiration`. Without the latter two
                a copy of the data keeps documents that are gone.
            since: Earliest change to deliver, a `datetime` with a time zone or seconds since 1970.
                The time is that of the CAS, which the server's clock sets. All is read from `start`
                on nevertheless: servers do not look up changes by time. A document whose CAS is 0
                is delivered; one whose CAS is no time, as of an application that sets its own, is
                judged by it as if it were.
            columns: `basic`; or `full`, for revision, expiry, flags, datatype and history too; or
                the names of the columns in their order: see `dcp_rs.columns`. Columns of
                `document_schema` are named among them, or all stand behind them if none is. Without
                `value` and `document_schema` the server does not send documents.
            key_type: `string`, or `binary` for keys that are not UTF-8.
            value_format: `binary`, or `string` for text, or `variant` for Spark's variant: a struct
                of `value` and `metadata`, as its `parse_json` makes it.
            include_xattrs: Whether `basic` and `full` have the column `xattrs`.
            history: Whether every version of a document is a row that the server still has, in
                collections that keep their change history (Couchbase Server 7.2 on, buckets stored
                with Magma), in place of the newest one of each snapshot. `basic` and `full` then
                have the column `history`. May be turned on or off at a checkpoint, for what comes
                after it.
            document_schema: Columns to decode JSON documents to, in place of `value`: as Spark's
                SQL lists them (`"name STRING, geo STRUCT<lat: DOUBLE>"`), or a `pyarrow.Schema`; or
                a `dcp_rs.DocumentSchema`, which also says what becomes of
                malformed documents. Fields that a document lacks are null, others are passed over.
                The guide lists the types.
            system_events: Whether changes of collections and scopes are rows too, and that a
                vBucket is `caught_up`: everything was delivered that it had when the stream was
                opened.
            system_documents: Whether to deliver documents of scope `_system`, and records of
                distributed transactions (keys that begin with `_txn:`). What `scope` or
                `collections` name is delivered in any case, except records of transactions.
            persisted_only: Off by default, unlike `persistedOnly` in Spark. Whether to deliver a
                change only once every copy of its vBucket that is present has it on disk, so that
                no failover to one of them takes it back. What waits counts towards the connection's
                `buffer_size`. Without effect on ephemeral buckets, which an event tells.
            ignore_purged_tombstones: Whether a position below what the server has purged of its
                deletions is gone on from. The stream then misses those deletions, for good: their
                documents stay wherever it is written to. Otherwise the vBucket begins again, after
                a rollback row. Servers before 7.2 always begin again.
            out_of_order: Whether the server may send the first load of a vBucket in the order of
                its keys, which is faster where one small collection of a large bucket is read
                (Couchbase Server 7.1 on). The position of the vBucket stays at the beginning until
                the load is complete. If the connection is lost before, or the process ends, the
                load begins again with a rollback row to seqno 0 and another `epoch`. Not with
                `on_rollback="fail"`.
            batch_rows: Most rows of a batch.
            batch_bytes: Size of a batch in bytes above which it ends, at most 16 MiB.
            linger: How long the first row of a batch waits for others, in seconds. From
                2 ms on, what a busy connection brings may gather that long before it is read.
            on_rollback: `emit` a row that says where a vBucket's changes come again from and go on
                there; `resync` does the same from the vBucket's beginning; `fail` raises.
            ack: `next`: asking for the next batch acknowledges the one before it. `manual`:
                `dcp_rs.ChangeStream.ack` does, in any order, and the stream's
                checkpoint never passes a batch that is not acknowledged.
            retry_timeout: How long a vBucket may be without a stream, while it is tried again and
                again, before the whole stream fails, in seconds. It holds for opening the stream
                too, and for everything that a restart, a failover or a new password may pass
                through: lost and refused connections, a bucket that a node does not know yet, a
                refused user. The error names the vBucket and the last cause; its class is
                that of the cause where something has to be put right, as
                `dcp_rs.exceptions.AuthenticationError`, and
                `dcp_rs.exceptions.TimeoutError` where the cluster did not answer.
                0: nothing is tried again.

        Raises:
            ConfigError: An option is wrong.
            CheckpointError: The checkpoint belongs to another bucket, is ahead, or was made with a
                filter that does not contain this one; or the store cannot be read or written.
            UnsupportedError: `history` is asked of a server or bucket that keeps none.
            ClosedError: The client is closed.
            ForkedProcessError: The client was made before a fork.
        """
        options = dict(locals())
        del options["self"]
        options, store = stream_options(options, self.num_vbuckets)
        stream = ChangeStream(self._inner.stream(options), self.bucket_name)
        if store is not None:
            try:
                store.save(stream.checkpoint())
            except BaseException:
                stream.close()
                raise
        return stream

    def close(self) -> None:
        """Closes the client; no stream can be opened any more."""
        self._inner.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a connection does not pickle: pickle its options (client.options) and connect again "
            "with dcp_rs.connect(options)"
        )

    def __repr__(self) -> str:
        return shown(self, is_closed=self._is_closed)


class _OfBucket(Protocol):
    @property
    def options(self) -> ConnectionOptions: ...

    @property
    def bucket_name(self) -> str: ...


def shown(client: _OfBucket, *, is_closed: bool) -> str:
    """Shows a client without secrets."""
    address = _without_secrets(client.options.connection_string)
    try:
        bucket = f"bucket={client.bucket_name!r}"
    except ForkedProcessError:
        bucket = "of another process"
    name = type(client).__name__
    return f"<dcp_rs.{name} {'closed ' if is_closed else ''}{address} {bucket}>"


def stream_options(
    options: dict[str, Any], num_vbuckets: int
) -> tuple[dict[str, Any], CheckpointStore | None]:
    """Makes the engine's options of the arguments of `Client.stream`.

    Returns:
        The options, and the store that the stream's beginning is saved in at once, if any.
    """
    begin = Beginning(options.pop("start"), options.pop("default"), options.pop("member"))
    options["document_schema"] = as_options(options["document_schema"])
    if options["vbuckets"] is not None:
        # An iterator would be used up by the check.
        options["vbuckets"] = _checks.items("vbuckets", options["vbuckets"], "a list of vBuckets")
    # A store is not touched for a stream that cannot be opened.
    _dcp_rs.check_stream(options)
    options |= begin.of(options, num_vbuckets)
    return options, begin.store if options["start"] == "latest" else None
