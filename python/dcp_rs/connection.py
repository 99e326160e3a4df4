"""Options of connections, and what the clients of a bucket have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from dcp_rs import _checks, _dcp_rs, _keywords
from dcp_rs.exceptions import ConfigError, ForkedProcessError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

# Options of a connection that are paths, which need not be UTF-8.
_PATHS = ("password_file", "tls_ca", "tls_certificate", "tls_key", "token_file")


@_keywords.checked
@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to connect to a bucket. Unlike a connection, the options can be pickled.

    The repr shows no `password`, `token`, `tls_key_password` or `credentials`, and hides a password
    in the connection string, where none belongs. A pickle contains them.

    The client reads files and calls functions for every connection, so you can replace passwords,
    tokens and certificates while streams run.

    Attributes:
        connection_string: `couchbase://host1,host2/bucket`, or `couchbases://` for TLS. Name the
            bucket here or in `bucket`. After a `?`, only `network` has a meaning; what tunes an SDK
            is passed over, and any other name is refused.
        username: User name; not needed with a client certificate.
        password: The user's password.
        password_file: File with the password, instead of `password`. A final newline is ignored.
        credentials: Function without arguments that returns `(username, password)`, instead of
            those options. It is called on separate threads, possibly several at once, and must
            return within `connect_timeout`. An exception that it raises becomes a
            `dcp_rs.exceptions.AuthenticationError` with its text, which must not contain a secret.
            To be pickled, it must be defined in a module.
        token: JSON web token (JWT), which Server 8.1 and newer accept instead of a user name and
            password, over TLS only (`couchbases://`); or a function without arguments that returns
            one, under the same conditions as `credentials`. The client asks the function for a
            newer token before the last one expires, and gives it to the server on the same
            connection: streams go on. A fixed token ends its connections when it expires.
        token_file: File with the token, read for every connection and again before the token
            expires. White space around the token is ignored.
        bucket: The bucket, if the connection string does not name it.
        connect_timeout: Longest time to open and set up one connection, in seconds.
        retry_timeout: How long to retry a vBucket without a stream before the whole stream fails,
            in seconds; 0 disables retries. It also applies to opening a stream, and covers
            everything that a restart, a failover or a new password may cause: lost and refused
            connections, a bucket that a node does not know yet, a refused user. The error names the
            vBucket and the last cause. If you have to fix something, it has the class of the cause,
            such as `dcp_rs.exceptions.AuthenticationError`; if the cluster did not answer, it is a
            `dcp_rs.exceptions.TimeoutError`. It does not apply to `dcp_rs.connect` itself.
        tls_ca: PEM file with the only certificate authorities to trust; by default, the system's
            and Capella's.
        tls_certificate: PEM file with a client certificate chain, instead of a user.
        tls_key: PEM file with its private key.
        tls_key_password: Passphrase of the private key, if it is encrypted (PKCS#8).
        network: Which addresses of the nodes to use: `default`, `external`, or `auto`, which
            chooses those that include the host of the connection string.
        srv_targets: Which targets of an SRV record to accept: `same_domain`, or `any`, which also
            follows records to other domains, with a warning.
        keep_connections: Seconds for which the client keeps the connections of a finished stream,
            for its next stream to reuse; 0 closes them at once.
        sasl_mechanisms: Authentication mechanisms, in order of preference: `PLAIN`, `SCRAM-SHA512`,
            `SCRAM-SHA256`, `SCRAM-SHA1`. The client uses the first that the server offers. With
            `couchbases://`, the default is `PLAIN`, which LDAP, PAM and saslauthd users need, then
            SCRAM. With `couchbase://`, it is SCRAM only, and `PLAIN` is refused.
        noop_interval: Seconds between the server's noops, a whole number from 1 to 3600. A
            connection that is silent for twice as long is closed as dead.
        buffer_size: Flow-control buffer of each connection in bytes, at least 64 KiB: the most that
            may be received but not yet taken.
        compressed: Whether to request documents compressed if that makes them smaller. It costs CPU
            time on both ends and pays off on a slow network. Readers get the documents as they were
            written either way.
        name: What the connections are for: the last part of what they call themselves in the
            server's logs and statistics, `dcp_rs:<version>/<host>/<pid>/<name>`. Up to 32 letters,
            digits, `-`, `_` and `.`.
    """

    connection_string: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    bucket: str | None = None
    connect_timeout: float = 10.0
    retry_timeout: float = 300.0
    tls_ca: str | os.PathLike[str] | None = None
    tls_certificate: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    tls_key_password: str | None = field(default=None, repr=False)
    network: Literal["auto", "default", "external"] = "auto"
    srv_targets: Literal["same_domain", "any"] = "same_domain"
    keep_connections: float = 0.0
    sasl_mechanisms: Sequence[str] | None = None
    password_file: str | os.PathLike[str] | None = None
    credentials: Callable[[], tuple[str, str]] | None = field(default=None, repr=False)
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    noop_interval: float = 20.0
    buffer_size: int = 8 * 1024 * 1024
    compressed: bool = False
    name: str = "client"

    def __post_init__(self) -> None:
        """Checks the options; connects to nothing.

        Raises:
            ConfigError: An option is wrong.
        """
        _checks.each_utf8(vars(self), but=_PATHS)
        _dcp_rs.check_connection(vars(self))
        _check_query(self.connection_string)
        if self.noop_interval % 1:
            raise ConfigError(
                f"{self.noop_interval} is not a whole number of seconds, which is "
                "what servers take",
                option="noop_interval",
                value=self.noop_interval,
            )

    def __getstate__(self) -> dict[str, object]:
        """Returns what is pickled.

        Raises:
            ConfigError: A function, `credentials` or `token`, cannot be pickled.
        """
        for option, secret in (("credentials", "password"), ("token", "token")):
            function = getattr(self, option)
            if callable(function):
                import pickle

                try:
                    pickle.dumps(function)
                except Exception as error:
                    raise ConfigError(
                        "this function cannot be pickled: use one that is defined in a "
                        f"module, or a file with the {secret}",
                        option=option,
                    ) from error
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return shown(self)


def _check_query(connection_string: str) -> None:
    """Checks the names after the `?` of a connection string.

    Raises:
        ConfigError: Nothing has one of them. Its value is not shown.
    """
    given = connection_string.partition("?")[2].split("&")
    own = {each.name for each in fields(ConnectionOptions)} - {"connection_string", *_OF_STRING}
    for name in filter(None, (each.partition("=")[0] for each in given)):
        if name in _OF_STRING or (name not in own and _OF_SDK.fullmatch(name)):
            continue
        import difflib

        near = difflib.get_close_matches(name, [*_OF_STRING, *own], 1)
        if near and near[0] in own:
            hint = f"set {near[0]}, which is an option of its own"
        else:
            hint = f"did you mean {near[0]}?" if near else "only network has a meaning there"
        raise ConfigError(f"has no option {name}: {hint}", option="connection_string")


def shown(options: Any) -> str:
    """Returns the repr of options: those that were given, without secrets."""
    given = {
        each.name: getattr(options, each.name)
        for each in fields(options)
        if each.repr and getattr(options, each.name) != each.default
    }
    given["connection_string"] = without_secrets(options.connection_string)
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{type(options).__name__}({named})"


_OF_STRING = ("network",)
# What Couchbase's SDKs tune by their strings, and a string that is shared with one may have: times,
# pools, tracing and other services, which say nothing about what is read here.
_OF_SDK = re.compile(
    r"(\w+_)?timeout|(enable|disable|max|idle|config|kv|dns|tcp|orphaned|threshold|http|dcp)_\w+"
    r"|(io|timeout|timeouts|compression|orphanReporter|thresholdRequestTracer|transactions)\.\w+"
    r"|preferred_server_group|show_queries|user_agent_extra|ip_protocol|dump_configuration"
)
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d+)?(?:=\w+)?"
_ADDRESSES = re.compile(rf"(?:\w+://)?{_HOST}(?:[,;]{_HOST})*(?:/[^/@:]*)?")


def without_secrets(connection_string: str) -> str:
    """Returns the hosts, the bucket and the names of options, and hides everything else."""
    addresses, mark, options = connection_string.partition("?")
    if _ADDRESSES.fullmatch(addresses) is None:
        return "***"
    names = (option.partition("=")[0] for option in options.split("&"))
    return addresses + mark + "&".join(f"{name}=***" for name in names if mark)


def connection_options(options: dict[str, Any]) -> ConnectionOptions:
    """Builds options from the arguments of `connect`."""
    given = options["connection_string"]
    if not isinstance(given, ConnectionOptions):
        return ConnectionOptions(**options)
    for name, value in options.items():
        if name != "connection_string" and value != getattr(ConnectionOptions, name):
            raise ConfigError(
                f"cannot be passed beside ConnectionOptions: set it there, "
                f"with dataclasses.replace(options, {name}=...)",
                option=name,
            )
    return given


class Bucket:
    """A connected bucket: what `dcp_rs.Client` and `dcp_rs.AsyncClient` have in common."""

    __slots__ = ("_inner", "_is_closed", "_options")

    _connected_by: ClassVar[str]

    def __init__(self, options: ConnectionOptions, inner: _dcp_rs.Client) -> None:
        self._options = options
        self._inner = inner
        self._is_closed = False

    @property
    def options(self) -> ConnectionOptions:
        """The options that the client was connected with."""
        return self._options

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""
        return self._inner.bucket_name

    @property
    def bucket_uuid(self) -> str:
        """UUID of the bucket. If it changes under the same name, the bucket was recreated."""
        return self._inner.bucket_uuid

    @property
    def num_vbuckets(self) -> int:
        """Number of vBuckets in the bucket."""
        return self._inner.num_vbuckets

    def vbuckets_by_node(self) -> dict[str, list[int]]:
        """Returns the vBuckets by the address of their node, without a request."""
        return self._inner.vbuckets_by_node()

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle."""
        raise TypeError(
            "a connection cannot be pickled: pickle its options (client.options) and connect again "
            f"with dcp_rs.{self._connected_by}(options)"
        )

    def __repr__(self) -> str:
        address = without_secrets(self._options.connection_string)
        try:
            bucket = f"bucket={self.bucket_name!r}"
        except ForkedProcessError:
            bucket = "of another process"
        closed = "closed " if self._is_closed else ""
        return f"<dcp_rs.{type(self).__name__} {closed}{address} {bucket}>"
