"""Connections to a bucket."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs._documents import as_ddl
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import ConfigError
from dcp_rs.schema import TableOptions, names
from dcp_rs.stores import CheckpointStore
from dcp_rs.stream import ChangeStream, StreamOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa


SASL_MECHANISMS = ["PLAIN", "SCRAM-SHA512", "SCRAM-SHA256", "SCRAM-SHA1"]


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
            [`AuthenticationError`][dcp_rs.exceptions.AuthenticationError] with its text, which must
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

    def __post_init__(self) -> None:
        """Checks types and ranges.

        Raises:
            ConfigError: An option is wrong.
        """
        _checks.text("connection_string", self.connection_string)
        for option in ("username", "password", "bucket"):
            _checks.text(option, getattr(self, option), optional=True)
        _checks.seconds("connect_timeout", self.connect_timeout, 0.001, 86_400)
        _checks.seconds("keep_connections", self.keep_connections, 0, 86_400)
        for option in ("tls_ca", "tls_certificate", "tls_key", "password_file"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise _checks.wrong_type(option, value, "a path")
        _checks.word("network", self.network, ["auto", "default", "external"])
        self._check_sasl_mechanisms()
        if self.password is not None and self.password_file is not None:
            raise ConfigError("password, password_file: give one of them")
        if self.credentials is not None:
            self._check_credentials()

    def _check_sasl_mechanisms(self) -> None:
        names = self.sasl_mechanisms
        if names is None:
            return
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise _checks.wrong_type("sasl_mechanisms", names, "a list of names")
        for name in names:
            _checks.word("sasl_mechanisms", name, SASL_MECHANISMS)

    def _check_credentials(self) -> None:
        if not callable(self.credentials):
            raise _checks.wrong_type("credentials", self.credentials, "a function")
        for option in ("username", "password", "password_file", "tls_certificate"):
            if getattr(self, option) is not None:
                raise ConfigError(f"credentials, {option}: give one of them")

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
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        shown["connection_string"] = _without_secrets(self.connection_string)
        return (
            f"ConnectionOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
        )


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
            [`ConnectionOptions`][dcp_rs.ConnectionOptions], and nothing else then.
        username: See [`ConnectionOptions`][dcp_rs.ConnectionOptions], as for all that follow.
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

    Raises:
        ConfigError: An option is wrong, or no bucket is named.
        ConnectError: No node could be reached, or what answered is no Couchbase node.
        AuthenticationError: User name or password were refused.
        BucketNotFoundError: There is no such bucket.
        TimeoutError: It took longer than `connect_timeout`.
    """
    if isinstance(connection_string, ConnectionOptions):
        return Client(connection_string)
    return Client(
        ConnectionOptions(
            connection_string=connection_string,
            username=username,
            password=password,
            password_file=password_file,
            credentials=credentials,
            bucket=bucket,
            connect_timeout=connect_timeout,
            tls_ca=tls_ca,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            network=network,
            keep_connections=keep_connections,
            sasl_mechanisms=sasl_mechanisms,
        )
    )


class Client:
    """A bucket to stream changes from; made by [`connect`][dcp_rs.connect].

    A context manager. Usable from any thread, but not in a forked child, and it does not pickle:
    its `options` do.
    """

    __slots__ = ("_inner", "_options")

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._inner = _dcp_rs.Client.connect(options)

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
        """Identity of the bucket: another one under the same name means it was made anew."""
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
        start: Literal["earliest", "latest"]
        | Checkpoint
        | CheckpointStore
        | Mapping[int, tuple[int, int, int]] = "earliest",
        until: Literal["now"] | Mapping[int, int] | None = None,
        vbuckets: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        metadata: Literal["basic", "full"] = "basic",
        include_value: bool = True,
        include_xattrs: bool = False,
        key_type: Literal["string", "binary"] = "string",
        system_events: bool = False,
        value_format: Literal["binary", "string", "variant"] = "binary",
        document_schema: str | pa.Schema | None = None,
        document_prefix: str = "",
        on_malformed: Literal["null", "fail", "column"] = "null",
        scope: str | None = None,
        collections: Iterable[str] | None = None,
        batch_rows: int = 10_000,
        batch_bytes: int = 4 * 1024 * 1024,
        linger: float = 0.1,
        buffer_size: int = 8 * 1024 * 1024,
        clamp: bool = False,
        end_exists: bool = False,
        persisted_only: bool = False,
        end_persisted: bool = False,
        system_documents: bool = False,
        compressed: bool = False,
        on_rollback: Literal["emit", "fail", "resync"] = "emit",
        ack: Literal["next", "manual"] = "next",
        noop_interval: float = 20.0,
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
                [`CheckpointStore`][dcp_rs.CheckpointStore], whose checkpoint is gone on from; the
                beginning if it has none. Or, by vBucket, `(vbuuid, seqno, epoch)` of the ends of
                earlier reads, as [`Planner`][dcp_rs.planner.Planner] has them; other vBuckets
                start at the beginning.
            until: `None` never ends; `"now"` ends with the changes there are at this moment; a
                mapping of vBucket to seqno ends there, and streams the vBuckets it names only. Both
                deliver to the end of the snapshot that holds the last seqno, unless `clamp` is set.
            vbuckets: vBuckets to stream, all if not given.
            columns: Columns of the table in their order; those of `metadata` if not given. Without
                `value` the server does not send documents. See [`columns`][dcp_rs.columns].
            metadata: `basic`, or `full` for revision, expiry, flags, datatype and history too.
            include_value: Whether documents are part of the table.
            include_xattrs: Whether the column `xattrs` is.
            key_type: `string`, or `binary` for keys that are not UTF-8.
            system_events: Whether changes of collections and scopes are rows too.
            value_format: `binary`, or `string` for text, or `variant` for Spark's variant: a struct
                of `value` and `metadata`, as its `parse_json` makes it.
            document_schema: Columns to decode JSON documents to, in place of `value`: as Spark's
                SQL lists them (`"name STRING, geo STRUCT<lat: DOUBLE>"`), or a `pyarrow.Schema`.
                Fields that a document lacks are null, others are passed over. The guide lists the
                types.
            document_prefix: What the names of these columns begin with, where the documents have
                fields that are called as columns of the table are.
            on_malformed: What becomes of a document that is not JSON, does not fit
                `document_schema` or is not text: its columns are `null`; or the stream is to
                `fail` with a [`DataError`][dcp_rs.exceptions.DataError]; or its columns are null
                and its bytes in the `column` called `_malformed`.
            scope: Scope to stream, with collections that are made in it later; all if not given.
            collections: Collections to stream, as `scope.collection`, or as `collection` within
                `scope` or else within `_default`.
            batch_rows: Most rows of a batch.
            batch_bytes: Size of a batch in bytes above which it ends, at most 16 MiB.
            linger: How long the first row of a batch waits for others, in seconds. From
                2 ms on, what a busy connection brings may gather that long before it is read.
            buffer_size: Flow-control window of each node's connection in bytes: so much may be
                received and not yet taken.
            clamp: Whether to stop at the seqnos of `until` themselves, and deliver exactly the
                changes up to them. What the snapshot holds above may be newer versions of keys
                below, so this is for readers that go on from there, as micro-batches do.
            end_exists: Whether the seqnos of `until` were seen to exist. A vBucket that has less
                was rolled back since, and the stream raises instead of waiting for changes that
                may never come.
            persisted_only: Whether to deliver a change only once every copy of its vBucket that is
                present has it on disk, so that no failover to one of them takes it back. What
                waits counts towards `buffer_size`. Without effect on ephemeral buckets, which an
                event tells.
            end_persisted: Whether a stream with an end is complete only once the whole snapshot
                its last change lies in is on the disks of all copies. Needs `persisted_only`.
            system_documents: Whether to deliver documents of scope `_system`, and records of
                distributed transactions (keys that begin with `_txn:`). What `scope` or
                `collections` name is delivered in any case, except records of transactions.
            compressed: Whether to ask the server to send documents compressed that get smaller by
                it, which costs both ends processor time and pays on a slow network. The table has
                documents as they were written either way.
            on_rollback: `emit` a row that says where a vBucket's changes come again from and go on
                there; `resync` does the same from the vBucket's beginning; `fail` raises.
            ack: `next`: asking for the next batch acknowledges the one before it. `manual`:
                [`ChangeStream.ack`][dcp_rs.ChangeStream.ack] does, in any order, and the stream's
                checkpoint never passes a batch that is not acknowledged.
            noop_interval: Seconds between the server's noops; a connection that is silent for
                twice as long is taken for dead.
            retry_timeout: How long a vBucket may be without a stream, while it is tried again and
                again, before the whole stream fails, in seconds. It holds for opening the stream
                too, and for everything that a restart, a failover or a new password may pass
                through: lost and refused connections, a bucket that a node does not know yet, a
                refused user. The error names the vBucket and the last cause; its class is
                that of the cause where something has to be put right, as
                [`AuthenticationError`][dcp_rs.exceptions.AuthenticationError], and
                [`TimeoutError`][dcp_rs.exceptions.TimeoutError] where the cluster did not answer.
                0: nothing is tried again.

        Raises:
            ConfigError: An option is wrong.
            CheckpointError: The checkpoint belongs to another bucket, is ahead, or was made with a
                filter that does not contain this one.
            ClosedError: The client is closed.
            ForkedProcessError: The client was made before a fork.
        """
        begin = _resolve_start(start)
        _check_until(until)
        table = TableOptions(
            columns=names(columns),
            metadata=metadata,
            include_value=include_value,
            include_xattrs=include_xattrs,
            key_type=key_type,
            system_events=system_events,
            value_format=value_format,
            document_schema=as_ddl(document_schema),
            document_prefix=document_prefix,
            on_malformed=on_malformed,
        )
        options = StreamOptions(
            start=begin._inner if isinstance(begin, Checkpoint) else begin,  # noqa: SLF001
            until=until if until is None or isinstance(until, str) else dict(until),
            vbuckets=None if vbuckets is None else list(vbuckets),
            scope=scope,
            collections=None if collections is None else _names("collections", collections),
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
            linger=linger,
            buffer_size=buffer_size,
            clamp=clamp,
            end_exists=end_exists,
            persisted_only=persisted_only,
            end_persisted=end_persisted,
            system_documents=system_documents,
            compressed=compressed,
            on_rollback=on_rollback,
            ack=ack,
            noop_interval=noop_interval,
            retry_timeout=retry_timeout,
        )
        return ChangeStream(self._inner.stream(table, options))

    def close(self) -> None:
        """Closes the client; no stream can be opened any more."""
        self._inner.close()

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
        return f"<dcp_rs.Client {self._options!r}>"


def _names(option: str, values: Iterable[str]) -> list[str]:
    if isinstance(values, str):
        raise _checks.wrong_type(option, values, "a list of names")
    found = list(values)
    for value in found:
        _checks.text(option, value)
    return found


def _resolve_start(start: object) -> Checkpoint | dict[int, tuple[int, int, int]] | str:
    expected = "'earliest', 'latest', a Checkpoint or a CheckpointStore"
    # Before the stores: a checkpoint can be saved and loaded too.
    if isinstance(start, Checkpoint):
        return start
    if isinstance(start, CheckpointStore):
        stored = start.load()
        if stored is not None and not isinstance(stored, Checkpoint):
            raise _checks.wrong_type("start: load() of the store", stored, "a Checkpoint or None")
        return "earliest" if stored is None else stored
    if isinstance(start, Mapping):
        return {each: _planned(each, position) for each, position in start.items()}
    if not isinstance(start, str):
        raise _checks.wrong_type("start", start, expected)
    if start not in ("earliest", "latest"):
        # No word is suggested: `latest` for a misspelt `earliest` would skip everything there is.
        hint = f": read on from a file with dcp_rs.FileStore({start!r})" if "." in start else ""
        raise ConfigError(f"start: must be {expected}, not {start!r}{hint}")
    return start


def _planned(vbucket: object, position: object) -> tuple[int, int, int]:
    _checks.integer("start: vBucket", vbucket, 0, 0xFFFF)
    if not isinstance(position, tuple) or len(position) != 3:
        expected = "(vbuuid, seqno, epoch)"
        raise _checks.wrong_type(f"start: vBucket {vbucket}", position, expected)
    vbuuid, seqno, epoch = position
    _checks.integer("start: vbuuid", vbuuid, 0, (1 << 64) - 1)
    _checks.integer("start: seqno", seqno, 0, (1 << 64) - 1)
    _checks.integer("start: epoch", epoch, 0, (1 << 31) - 1)
    return vbuuid, seqno, epoch


def _check_until(until: object) -> None:
    if until is None:
        return
    if isinstance(until, str):
        _checks.word("until", until, ["now"])
        return
    try:
        seqnos = dict(until)  # type: ignore[call-overload]  # anything a dict can be made of
    except (TypeError, ValueError):
        raise _checks.wrong_type("until", until, "None, 'now' or seqnos by vBucket") from None
    if not seqnos:
        raise ConfigError("until: names no vBucket")
    for vbucket, seqno in seqnos.items():
        _checks.integer("until: vBucket", vbucket, 0, 0xFFFF)
        _checks.integer("until: seqno", seqno, 0, (1 << 64) - 1)
