"""The embedded cluster."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs.client import Client, ConnectionOptions
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, kw_only=True)
class MutationToken:
    """Where a write lies in the history of its vBucket.

    Attributes:
        vbucket: vBucket written to.
        seqno: Position of the write.
        vbuuid: History branch written to.
        cas: Version of the document now.
    """

    vbucket: int
    seqno: int
    vbuuid: int
    cas: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document as it is stored.

    Attributes:
        value: Its bytes.
        cas: Its version.
        seqno: Position of its last change.
        rev: How many times it has changed.
        flags: The application's own 32 bits.
        expiry: Seconds since 1970 at which it expires; 0 never.
    """

    value: bytes = field(repr=False)
    cas: int
    seqno: int
    rev: int
    flags: int
    expiry: int


@dataclass(frozen=True, kw_only=True)
class ProducerOptions:
    """The arguments of `Producer`, checked."""

    nodes: int
    vbuckets: int
    bucket: str
    username: str
    password: str = field(repr=False)
    host: str
    port: int
    management_port: int
    tls: bool
    tls_port: int
    tls_certificate: str | os.PathLike[str] | None
    tls_key: str | os.PathLike[str] | None
    tls_client_ca: str | os.PathLike[str] | None
    tls_client_required: bool
    persist_delay: float

    def __post_init__(self) -> None:
        _checks.integer("nodes", self.nodes, 1, 64)
        _checks.integer("vbuckets", self.vbuckets, 1, 1024)
        for option in ("bucket", "username", "password", "host"):
            _checks.text(option, getattr(self, option))
        for option in ("port", "management_port", "tls_port"):
            _checks.integer(option, getattr(self, option), 0, 0xFFFF)
        self._check_tls()
        _checks.seconds("persist_delay", self.persist_delay, 0.0, 86_400)

    def _check_tls(self) -> None:
        _checks.flag("tls", self.tls)
        _checks.flag("tls_client_required", self.tls_client_required)
        for option in ("tls_certificate", "tls_key", "tls_client_ca"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise _checks.wrong_type(option, value, "a path")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate: it and tls_key go together")
        for option in ("tls_port", "tls_certificate", "tls_client_ca", "tls_client_required"):
            if getattr(self, option) and not self.tls:
                raise ConfigError(f"{option}: needs tls=True")
        if self.tls_client_required and self.tls_client_ca is None:
            raise ConfigError("tls_client_required: needs tls_client_ca")


@dataclass(frozen=True, kw_only=True)
class _WriteOptions:
    cas: int = 0
    expiry: int = 0
    flags: int = 0

    def __post_init__(self) -> None:
        _checks.integer("cas", self.cas, 0, (1 << 64) - 1)
        _checks.integer("expiry", self.expiry, 0, 0xFFFF_FFFF)
        _checks.integer("flags", self.flags, 0, 0xFFFF_FFFF)


class Producer:
    """A Couchbase cluster within this process: it speaks KV and DCP on loopback ports.

    Couchbase SDKs write to it and DCP clients read from it; and the program that holds it can do
    what no client can: persist at a given moment, forget deletions, roll a vBucket back, move one
    to another node. Nothing is written to disk.

    A context manager; it runs from when it is made until it is closed.

        >>> with Producer(nodes=2, vbuckets=16) as producer:
        ...     token = producer.upsert("airline_10", {"name": "40-Mile Air"})
        ...     producer.get("airline_10").value
        b'{"name":"40-Mile Air"}'

    Args:
        nodes: Number of nodes, each with a port of its own (1 to 64).
        vbuckets: Number of vBuckets, spread over the nodes (1 to 1024).
        bucket: Name of the bucket.
        username: Name that clients authenticate with.
        password: Password that clients authenticate with.
        host: Address to listen on; must be a loopback address.
        port: Port of the first node, the others follow; 0 lets the system choose.
        management_port: Port of the first node's HTTP, the others follow; 0 lets the system
            choose.
        tls: Whether TLS is spoken too, on ports of its own. A certificate authority is made for
            it, which `ca_pem` gives.
        tls_port: Port of the first node for KV over TLS, the others follow; 0 lets the system
            choose.
        tls_certificate: PEM file with a certificate for the nodes and those that signed it, in
            place of a made one.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with authorities whose certificates clients may show in place of a
            password; their subject's common name is the user name.
        tls_client_required: Whether clients without a certificate are refused on the TLS ports.
        persist_delay: How long a change waits in memory before it is persisted, in seconds.

    Raises:
        ConfigError: An option is wrong.
        ConnectError: A port cannot be listened on.
    """

    __slots__ = ("_inner", "_options")

    def __init__(
        self,
        *,
        nodes: int = 1,
        vbuckets: int = 64,
        bucket: str = "default",
        username: str = "Administrator",
        password: str = "password",  # noqa: S107 - what a fresh server is usually given
        host: str = "127.0.0.1",
        port: int = 0,
        management_port: int = 0,
        tls: bool = False,
        tls_port: int = 0,
        tls_certificate: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_client_ca: str | os.PathLike[str] | None = None,
        tls_client_required: bool = False,
        persist_delay: float = 0.05,
    ) -> None:
        self._options = ProducerOptions(
            nodes=nodes,
            vbuckets=vbuckets,
            bucket=bucket,
            username=username,
            password=password,
            host=host,
            port=port,
            management_port=management_port,
            tls=tls,
            tls_port=tls_port,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            tls_client_required=tls_client_required,
            persist_delay=persist_delay,
        )
        self._inner = _dcp_rs.Producer.start(self._options)

    @property
    def connection_string(self) -> str:
        """Where clients and Couchbase SDKs connect to: `couchbase://127.0.0.1:port`."""
        return self._inner.connection_string()

    @property
    def tls_connection_string(self) -> str | None:
        """Where clients connect to with TLS: `couchbases://127.0.0.1:port`.

        `None` if it does not speak TLS.
        """
        return self._inner.tls_connection_string()

    @property
    def ca_pem(self) -> str | None:
        """The certificate authority that was made for it, as PEM, for clients to trust.

        `None` if the certificate was given, or it does not speak TLS.
        """
        return self._inner.ca_pem()

    @property
    def management_urls(self) -> list[str]:
        """Where each node answers HTTP: `http://127.0.0.1:port`."""
        return self._inner.management_urls()

    @property
    def tls_management_urls(self) -> list[str]:
        """Where each node answers HTTP over TLS: `https://127.0.0.1:port`; empty without TLS."""
        return self._inner.tls_management_urls()

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""
        return self._options.bucket

    @property
    def bucket_uuid(self) -> str:
        """Identity of the bucket, drawn when the producer is made."""
        return self._inner.bucket_uuid()

    @property
    def num_vbuckets(self) -> int:
        """Number of vBuckets."""
        return self._options.vbuckets

    @property
    def connection_options(self) -> ConnectionOptions:
        """What to connect with: bucket, user name and password included."""
        return ConnectionOptions(
            connection_string=self.connection_string,
            bucket=self._options.bucket,
            username=self._options.username,
            password=self._options.password,
        )

    def connect(self) -> Client:
        """Connects a [`Client`][dcp_rs.Client] to it."""
        return Client(self.connection_options)

    def vbucket_of(self, key: str | bytes) -> int:
        """Gives the vBucket a key lies in."""
        return self._inner.vbucket_of(_key(key))

    def upsert(
        self,
        key: str | bytes,
        value: bytes | str | Mapping[str, object] | list[object],
        *,
        cas: int = 0,
        expiry: int = 0,
        flags: int = 0,
    ) -> MutationToken:
        """Writes a document, whether it exists or not.

        Args:
            key: Its key, 1 to 250 bytes.
            value: Its bytes, or text, or a mapping or list to be written as JSON.
            cas: Version that it must have; 0 for any.
            expiry: When it expires: 0 never, up to 30 days in seconds from now, above in seconds
                since 1970.
            flags: The application's own 32 bits.

        Raises:
            DocumentExistsError: It has another CAS.
            ConfigError: Key or value are too long.
        """
        options = _WriteOptions(cas=cas, expiry=expiry, flags=flags)
        return _token(self._inner.upsert(_key(key), _value(value), options))

    def insert(
        self,
        key: str | bytes,
        value: bytes | str | Mapping[str, object] | list[object],
        *,
        expiry: int = 0,
        flags: int = 0,
    ) -> MutationToken:
        """Writes a document that does not exist yet; arguments as of `upsert`.

        Raises:
            DocumentExistsError: It exists.
        """
        options = _WriteOptions(expiry=expiry, flags=flags)
        return _token(self._inner.insert(_key(key), _value(value), options))

    def remove(self, key: str | bytes, *, cas: int = 0) -> MutationToken:
        """Removes a document.

        Raises:
            DocumentNotFoundError: There is none.
            DocumentExistsError: It has another CAS.
        """
        return _token(self._inner.remove(_key(key), _WriteOptions(cas=cas)))

    def expire(self, key: str | bytes) -> MutationToken:
        """Expires a document as if its time had passed.

        Raises:
            DocumentNotFoundError: There is none.
        """
        return _token(self._inner.expire(_key(key), _WriteOptions()))

    def get(self, key: str | bytes) -> Document | None:
        """Gives a document, `None` if there is none."""
        found = self._inner.get(_key(key))
        return None if found is None else Document(**found)

    def high_seqnos(self) -> dict[int, int]:
        """Gives the highest seqno of each vBucket."""
        return self._inner.high_seqnos()

    def expire_due(self) -> int:
        """Expires every document whose time has passed; gives how many."""
        return self._inner.expire_due()

    def persist(self) -> None:
        """Persists everything and lets it leave memory.

        A stream from the beginning is then read from disk, where only the newest version of each
        key is kept.
        """
        self._inner.persist()

    def purge(self, vbucket: int, to: int) -> None:
        """Persists everything, then forgets the deletions of a vBucket up to seqno `to`.

        Raises:
            ConfigError: There is no such vBucket.
        """
        _checks.integer("vbucket", vbucket, 0, 0xFFFF)
        _checks.integer("to", to, 0, (1 << 64) - 1)
        self._inner.purge(vbucket, to)

    def roll_back(self, vbucket: int, to: int) -> None:
        """Takes a vBucket back to how it was at seqno `to`, as an unclean failover does.

        Changes above it are gone, a new history branch begins there, and the vBucket's streams
        end.

        Raises:
            ConfigError: There is no such vBucket, or the versions of that time are not kept.
        """
        _checks.integer("vbucket", vbucket, 0, 0xFFFF)
        _checks.integer("to", to, 0, (1 << 64) - 1)
        self._inner.roll_back(vbucket, to)

    def move_vbucket(self, vbucket: int, node: int) -> None:
        """Moves a vBucket to another node, numbered from 0, as a rebalance does.

        Raises:
            ConfigError: There is no such vBucket or node.
        """
        _checks.integer("vbucket", vbucket, 0, 0xFFFF)
        _checks.integer("node", node, 0, 0xFFFF)
        self._inner.move_vbucket(vbucket, node)

    def set_faults(self, rules: Iterable[Mapping[str, object]]) -> None:
        """Makes things go wrong as the rules say, in place of all former rules.

        A rule has a `reaction` and, unless it is about every packet, a `condition`; both are
        described in docs/guides/faults.md. It holds from the next packet of each connection on,
        while clients are connected. The first rule whose condition a packet meets reacts.

            >>> with Producer(vbuckets=1) as producer:
            ...     _ = producer.upsert("a", "1")
            ...     producer.set_faults(
            ...         [
            ...             {
            ...                 "condition": {"opcode": "DCP_STREAM_REQ", "nth": 1},
            ...                 "reaction": {"answer": {"status": "ETMPFAIL"}},
            ...             }
            ...         ]
            ...     )
            ...     with producer.connect() as client:  # which asks again
            ...         changes = sum(batch.num_rows for batch in client.stream(until="now"))
            ...     changes, producer.fault_counts()
            (1, [1])

        Args:
            rules: The rules; an empty list makes an end of them.

        Raises:
            ConfigError: A name means nothing, or a rule contradicts itself. The text names the
                member, and what was probably meant. The former rules stay.
        """
        self._inner.set_faults(json.dumps([dict(rule) for rule in rules]))

    def faults(self) -> list[dict[str, Any]]:
        """Gives the fault rules in force."""
        rules: list[dict[str, Any]] = json.loads(self._inner.faults()[0])
        return rules

    def fault_counts(self) -> list[int]:
        """Gives how often each rule of `faults` has reacted since it was set."""
        return self._inner.faults()[1]

    def close(self) -> None:
        """Closes all connections and ports. Closing twice is harmless."""
        self._inner.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a producer does not pickle: pickle its connection_options and connect with those"
        )

    def __repr__(self) -> str:
        return f"<dcp_rs.Producer {self._options!r}>"


def _key(key: str | bytes) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes):
        return key
    raise _checks.wrong_type("key", key, "text or bytes")


def _value(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":")).encode()
    raise _checks.wrong_type("value", value, "bytes, text, a dict or a list")


def _token(token: tuple[int, int, int, int]) -> MutationToken:
    vbucket, seqno, vbuuid, cas = token
    return MutationToken(vbucket=vbucket, seqno=seqno, vbuuid=vbuuid, cas=cas)
