"""Connections to a bucket."""

from __future__ import annotations

import pickle
import re
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.documents import DocumentSchema, as_options
from dcp_rs.exceptions import ConfigError, ForkedProcessError
from dcp_rs.stores import CheckpointStore
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to connect: plain data that pickles, unlike a connection.

    The repr shows neither the password, not even one in the connection string, where it does not
    belong, nor `credentials`; a pickle holds them.

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
        tls_ca: PEM file with the certificate authorities to trust; the system's if not given.
        tls_certificate: PEM file with a client certificate chain, in place of a user.
        tls_key: PEM file with its private key.
        network: Which of the nodes' addresses to use: `default`, `external`, or `auto`, which
            takes those that the connection string's host is one of.
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
    network: str = "auto"
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
    network: Literal["auto", "default", "external"] = "auto",
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
        network: `auto`, `default` or `external`.
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
    options = dict(locals())
    if isinstance(connection_string, ConnectionOptions):
        del options["connection_string"]
        for name, value in options.items():
            if value != getattr(ConnectionOptions, name):
                raise ConfigError(
                    f"{name}: is an option of the ConnectionOptions that are given: set it there, "
                    f"with dataclasses.replace(options, {name}=...)"
                )
        return Client(connection_string)
    return Client(ConnectionOptions(**options))


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
        until: Literal["now"] | Mapping[int, int] | None = None,
        vbuckets: Iterable[int] | None = None,
        scope: str | None = None,
        collections: Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Iterable[Literal["mutation", "deletion", "expiration"]] | None = None,
        since: datetime | float | None = None,
        columns: Literal["basic", "full"] | Sequence[str] = "basic",
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        include_xattrs: bool = False,
        document_schema: str | pa.Schema | DocumentSchema | None = None,
        system_events: bool = False,
        system_documents: bool = False,
        persisted_only: bool = False,
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
                `dcp_rs.CheckpointStore`, whose checkpoint is gone on from; the
                beginning if it has none.
            until: `None` never ends; `"now"` ends with the changes there are at this moment; a
                mapping of vBucket to seqno ends there, and streams the vBuckets it names only. Both
                deliver to the end of the snapshot that holds the last seqno.
            vbuckets: vBuckets to stream, all if not given.
            scope: Scope to stream, with collections that are made in it later; all if not given.
            collections: Collections to stream, as `scope.collection`, or as `collection` within
                `scope` or else within `_default`.
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
            document_schema: Columns to decode JSON documents to, in place of `value`: as Spark's
                SQL lists them (`"name STRING, geo STRUCT<lat: DOUBLE>"`), or a `pyarrow.Schema`; or
                a `dcp_rs.DocumentSchema`, which also says what becomes of
                malformed documents. Fields that a document lacks are null, others are passed over.
                The guide lists the types.
            system_events: Whether changes of collections and scopes are rows too.
            system_documents: Whether to deliver documents of scope `_system`, and records of
                distributed transactions (keys that begin with `_txn:`). What `scope` or
                `collections` name is delivered in any case, except records of transactions.
            persisted_only: Off by default, unlike `persistedOnly` in Spark. Whether to deliver a
                change only once every copy of its vBucket that is present has it on disk, so that
                no failover to one of them takes it back. What waits counts towards the connection's
                `buffer_size`. Without effect on ephemeral buckets, which an event tells.
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
                filter that does not contain this one.
            ClosedError: The client is closed.
            ForkedProcessError: The client was made before a fork.
        """
        options = dict(locals())
        del options["self"]
        options["start"] = _begin(start)
        options["document_schema"] = as_options(document_schema)
        return ChangeStream(self._inner.stream(options))

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
        address = _without_secrets(self._options.connection_string)
        try:
            bucket = f"bucket={self.bucket_name!r}"
        except ForkedProcessError:
            bucket = "of another process"
        return f"<dcp_rs.Client {'closed ' if self._is_closed else ''}{address} {bucket}>"


def _begin(start: object) -> object:
    """Gives the engine's checkpoint; what is none of ours is left to the engine to judge."""
    # Before the stores: a checkpoint can be saved and loaded too.
    if isinstance(start, Checkpoint):
        return start._inner  # noqa: SLF001 - the package's own
    if not isinstance(start, CheckpointStore):
        return start
    stored = start.load()
    if stored is None:
        return "earliest"
    if not isinstance(stored, Checkpoint):
        raise _checks.wrong_type("start: load() of the store", stored, "a Checkpoint or None")
    return stored._inner  # noqa: SLF001 - the package's own
