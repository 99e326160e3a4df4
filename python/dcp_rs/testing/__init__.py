"""An embedded cluster for tests.

`dcp_rs.testing.EmbeddedCluster` runs inside this process. In pytest, use the fixtures
`couchbase_cluster`, one cluster for each test, and `couchbase_session_cluster`, one for all tests.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dcp_rs import _checks, _dcp_rs, _keywords
from dcp_rs.client import Client
from dcp_rs.connection import ConnectionOptions
from dcp_rs.exceptions import ClosedError, ConfigError, ConnectError, ForkedProcessError
from dcp_rs.testing.control import Control, MapVersion
from dcp_rs.testing.documents import Document, Documents, MutationToken
from dcp_rs.testing.options import Limits, User

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Document", "EmbeddedCluster", "Limits", "MapVersion", "MutationToken", "User"]


@_keywords.checked
class EmbeddedCluster(Documents, Control):
    """A Couchbase cluster inside this process, which speaks KV and DCP on loopback ports.

    Couchbase SDKs write to it and DCP clients read from it. Your program can also do what no client
    can: persist at a given moment, purge tombstones, roll back a vBucket, fail over a node, kill
    and restart it, rebalance, drop the bucket, and inject faults. It writes nothing to disk unless
    you pass `data`.

    It is a context manager, and runs until it is closed.

        >>> with EmbeddedCluster(nodes=2, vbuckets=16) as cluster:
        ...     token = cluster.upsert("airline_10", {"name": "40-Mile Air"})
        ...     cluster.get("airline_10").value
        b'{"name":"40-Mile Air"}'

    Args:
        nodes: Number of nodes, each with its own port (1 to 64).
        vbuckets: Number of vBuckets, distributed over the nodes (1 to 1024).
        replicas: Replicas of each vBucket, each on a different node (0 to 3); fewer if there are
            too few nodes.
        bucket: Name of the first bucket, which the methods of this class act on. SDKs can create
            others; `connect(bucket=...)` reads one of them.
        ephemeral: Whether the bucket is ephemeral, that is, has no disk.
        username: User name that clients authenticate with.
        password: Password that clients authenticate with.
        users: Other users, as `dcp_rs.testing.User`, who may only read.
        token_key: Key of JSON web tokens, which clients can authenticate with over TLS, as with
            Server 8.1: at least 32 bytes of text. Tokens are signed with HS256; their claim `sub`
            is the user name.
        host: Address to listen on. If other machines can reach it (`0.0.0.0` for all), you must set
            a password other than the default.
        port: Port of the first node; the other nodes use the next ones. 0 lets the system choose.
        management_port: HTTP port of the first node; the other nodes use the next ones. 0 lets the
            system choose.
        alternate_host: Name or address at which other machines reach the ports; announced to
            clients as the nodes' external address.
        tls: Whether to serve TLS too, on separate ports. `ca_pem` is the certificate authority
            created for it.
        tls_port: Port of the first node for KV over TLS; the other nodes use the next ones. 0 lets
            the system choose.
        tls_certificate: PEM file with a certificate chain for the nodes; by default, one is
            generated.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with authorities for client certificates. A client with such a
            certificate needs no password; the common name is the user name.
        tls_client_required: Whether to refuse clients without a certificate on the TLS ports.
        data: Folder that keeps the buckets when the cluster is closed or its process ends; created
            if it does not exist. It has the copy of each node: after a crash, what that copy had
            persisted, with prepared durable writes, overwritten versions and failover logs.
        persist_delay: How long a change waits in memory before it is persisted, in seconds.
        history_bytes: Bytes of overwritten documents to keep, so that vBuckets can be rolled back.
        keeps_history: Whether clients may stream every version of a document (`change_streams`), as
            far back as `history_bytes` allows.
        keeps_compressed: Whether values that clients send compressed stay compressed, as in the
            compression mode "passive"; otherwise they are inflated ("off").
        limits: Limits of memory, connections and times, as `dcp_rs.testing.Limits`.

    Raises:
        ConfigError: An option is wrong.
        ConnectError: The cluster cannot listen on a port.
    """

    __slots__ = ("__weakref__", "_ca_file", "_forget_ca_file", "_inner", "_options")

    def __init__(
        self,
        *,
        nodes: int = 1,
        vbuckets: int = 64,
        replicas: int = 0,
        bucket: str = "default",
        ephemeral: bool = False,
        username: str = "Administrator",
        password: str = "password",  # noqa: S107 - what a fresh server is usually given
        users: Sequence[User] | None = None,
        token_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        management_port: int = 0,
        alternate_host: str | None = None,
        tls: bool = False,
        tls_port: int = 0,
        tls_certificate: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_client_ca: str | os.PathLike[str] | None = None,
        tls_client_required: bool = False,
        data: str | os.PathLike[str] | None = None,
        persist_delay: float = 0.05,
        history_bytes: int = 256 << 20,
        keeps_history: bool = False,
        keeps_compressed: bool = False,
        limits: Limits | None = None,
    ) -> None:
        options = dict(locals())
        del options["self"]
        if users is not None:
            if not isinstance(users, list | tuple) or not all(isinstance(u, User) for u in users):
                raise _checks.wrong_type("users", users, "a list of dcp_rs.testing.User")
            options["users"] = [vars(user) for user in users]
        if isinstance(limits, Limits):
            options["limits"] = vars(limits)
        elif limits is not None:
            raise _checks.wrong_type("limits", limits, "a dcp_rs.testing.Limits")
        if data is not None:
            _checks.path("data", data)
        self._options = options
        self._ca_file: Path | None = None
        self._forget_ca_file: Callable[[], object] | None = None
        try:
            self._inner = _dcp_rs.EmbeddedCluster.start(options)
        except ConnectError as error:
            if error.code == "listen":
                error.args = (f"{error}: choose another port or host, or end what listens there",)
            raise

    @property
    def connection_string(self) -> str:
        """Connection string for clients and Couchbase SDKs: `couchbase://127.0.0.1:port`."""
        return self._inner.connection_string()

    @property
    def tls_connection_string(self) -> str | None:
        """Connection string for TLS: `couchbases://127.0.0.1:port`.

        `None` without TLS.
        """
        return self._inner.tls_connection_string()

    @property
    def ca_pem(self) -> str | None:
        """The generated certificate authority, as PEM, for clients to trust.

        `None` without TLS, or if you passed a certificate.
        """
        return self._inner.ca_pem()

    @property
    def ca_file(self) -> Path | None:
        """A file with `ca_pem`, for APIs that take a path. It exists until the cluster is closed.

        `None` without `ca_pem`.
        """
        pem = self.ca_pem
        if self._ca_file is None and pem is not None:
            folder = tempfile.mkdtemp(prefix="dcp_rs-")
            self._forget_ca_file = weakref.finalize(self, _remove, folder, os.getpid())
            self._ca_file = Path(folder) / "ca.pem"
            self._ca_file.write_text(pem)
        return self._ca_file

    @property
    def management_urls(self) -> list[str]:
        """HTTP address of each node: `http://127.0.0.1:port`."""
        return self._inner.management_urls()

    @property
    def tls_management_urls(self) -> list[str]:
        """HTTPS address of each node: `https://127.0.0.1:port`; empty without TLS."""
        return self._inner.tls_management_urls()

    @property
    def bucket_name(self) -> str:
        """Name of the first bucket."""
        bucket: str = self._options["bucket"]
        return bucket

    @property
    def bucket_uuid(self) -> str:
        """UUID of the first bucket, chosen when it is created; empty while it is dropped."""
        return self._inner.bucket_uuid()

    @property
    def num_vbuckets(self) -> int:
        """Number of vBuckets."""
        vbuckets: int = self._options["vbuckets"]
        return vbuckets

    @property
    def connection_options(self) -> ConnectionOptions:
        """Options to connect with, including the bucket, user name and password."""
        return ConnectionOptions(
            connection_string=self.connection_string,
            bucket=self._options["bucket"],
            username=self._options["username"],
            password=self._options["password"],
        )

    def connect(self, *, tls: bool = False, **options: Any) -> Client:
        """Connects a `dcp_rs.Client` to the cluster's bucket, as its user.

        Args:
            tls: Whether to connect over TLS, trusting `ca_file`.
            **options: Options of `dcp_rs.connect` to override.

        Raises:
            ConfigError: The cluster does not serve TLS.
        """
        _checks.flag("tls", tls)
        chosen: dict[str, Any] = {}
        if tls:
            address = self.tls_connection_string
            if address is None:
                raise ConfigError(
                    "start the cluster with tls=True to connect over TLS", option="tls"
                )
            chosen = {"connection_string": address, "tls_ca": self.ca_file}
        if options.get("password_file") is not None:
            chosen["password"] = None
        if any(options.get(name) is not None for name in ("credentials", "token", "token_file")):
            chosen |= {"username": None, "password": None}
        return Client(replace(self.connection_options, **(chosen | options)))

    def set_password(self, password: str) -> None:
        """Changes the password of the user `username`; other `users` keep theirs.

        Open connections stay open; new ones need the new password.

        Raises:
            ConfigError: The password is not allowed; the old one stays in force.
        """
        _checks.text("password", password)
        self._inner.set_password(password)
        self._options["password"] = password

    def close(self) -> None:
        """Closes all connections and ports. Closing twice has no effect."""
        self._inner.shutdown()
        if self._forget_ca_file is not None:
            self._forget_ca_file()
            self._ca_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "an embedded cluster cannot be pickled: pickle its connection_options and connect with"
            " those"
        )

    def __repr__(self) -> str:
        try:
            state = self.connection_string
        except ClosedError:
            state = "closed"
        except ForkedProcessError:
            state = "of another process"
        shown = f"bucket={self.bucket_name!r} vbuckets={self.num_vbuckets}"
        return f"<dcp_rs.testing.EmbeddedCluster {state} {shown}>"


def _remove(folder: str, process: int) -> None:
    # A forked child runs this at its end, too.
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
