"""What an embedded cluster is set up with."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_rs import _dcp_rs


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a `dcp_rs.testing.EmbeddedCluster`.

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
        _dcp_rs.check_limits(vars(self))
