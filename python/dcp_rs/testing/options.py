"""What an embedded cluster is set up with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an [`EmbeddedCluster`][dcp_rs.testing.EmbeddedCluster].

        >>> with EmbeddedCluster(limits=Limits(max_connections=2)) as cluster:
        ...     cluster.num_nodes
        1

    Attributes:
        memory_quota: Bytes of documents and tombstones the bucket may hold.
        max_connections: Connections that a node serves at a time; more are closed at once.
        max_streams: Streams of one DCP connection; requests for more are refused.
        max_unacknowledged_bytes: Largest flow-control buffer a DCP client may ask for.
        authentication_timeout: How long a client may take to authenticate, in seconds.
        idle_timeout: How long a connection that is not for DCP may be idle, in seconds.
        dcp_idle_timeout: How long a DCP client that has enabled noops may be silent, in seconds.
        persistence_timeout: How long a client waits for a change to be persisted, in seconds.
        congestion_control: TCP congestion control of the connections, as `reno` or `cubic`; by
            default `reno` where the system lets the process choose.

    Raises:
        ConfigError: A limit is out of range.
    """

    memory_quota: int = 8 << 30
    max_connections: int = 1024
    max_streams: int = 65_536
    max_unacknowledged_bytes: int = 0xFFFF_FFFF
    authentication_timeout: float = 60.0
    idle_timeout: float = 300.0
    dcp_idle_timeout: float = 360.0
    persistence_timeout: float = 30.0
    congestion_control: str | None = None

    def __post_init__(self) -> None:
        _checks.integer("memory_quota", self.memory_quota, 0, (1 << 63) - 1)
        _checks.integer("max_connections", self.max_connections, 1, 1 << 20)
        _checks.integer("max_streams", self.max_streams, 1, 1 << 20)
        _checks.integer("max_unacknowledged_bytes", self.max_unacknowledged_bytes, 1, 0xFFFF_FFFF)
        for option in ("authentication_timeout", "idle_timeout", "dcp_idle_timeout"):
            _checks.seconds(option, getattr(self, option), 0.001, 86_400)
        _checks.seconds("persistence_timeout", self.persistence_timeout, 0.0, 86_400)
        _checks.text("congestion_control", self.congestion_control, optional=True)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The arguments of `EmbeddedCluster`, checked."""

    nodes: int
    vbuckets: int
    replicas: int
    bucket: str
    ephemeral: bool
    username: str
    password: str = field(repr=False)
    host: str
    port: int
    management_port: int
    alternate_host: str | None
    tls: bool
    tls_port: int
    tls_certificate: str | os.PathLike[str] | None
    tls_key: str | os.PathLike[str] | None
    tls_client_ca: str | os.PathLike[str] | None
    tls_client_required: bool
    data: str | os.PathLike[str] | None
    persist_delay: float
    history_bytes: int
    keeps_history: bool
    keeps_compressed: bool
    limits: Limits

    def __post_init__(self) -> None:
        _checks.integer("nodes", self.nodes, 1, 64)
        _checks.integer("vbuckets", self.vbuckets, 1, 1024)
        _checks.integer("replicas", self.replicas, 0, 3)
        for option in ("bucket", "username", "password", "host"):
            _checks.text(option, getattr(self, option))
        for option in ("ephemeral", "keeps_history", "keeps_compressed"):
            _checks.flag(option, getattr(self, option))
        for option in ("port", "management_port", "tls_port"):
            _checks.integer(option, getattr(self, option), 0, 0xFFFF)
        _checks.text("alternate_host", self.alternate_host, optional=True)
        self._check_tls()
        _checks.seconds("persist_delay", self.persist_delay, 0.0, 86_400)
        if not isinstance(self.limits, Limits):
            raise _checks.wrong_type("limits", self.limits, "a dcp_rs.testing.Limits")
        _checks.integer("history_bytes", self.history_bytes, 0, (1 << 63) - 1)
        if self.data is not None and not isinstance(self.data, str | os.PathLike):
            raise _checks.wrong_type("data", self.data, "a path")

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
