"""Options of an embedded cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp_rs import _checks, _dcp_rs

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class User:
    """A user of a `dcp_rs.testing.EmbeddedCluster` with the role *Data DCP Reader*.

    The user may stream changes and read documents. The cluster refuses requests to write or for
    statistics, as a server does.

        >>> reader = User(username="reader", password="word", reads=["inventory"])
        >>> with EmbeddedCluster(users=[reader]) as cluster:
        ...     cluster.connect(username="reader", password="word").num_vbuckets
        64

    Attributes:
        username: User name to authenticate with.
        password: The password.
        reads: Where the user has the role: scopes such as `inventory` and collections such as
            `inventory.hotels`, in every bucket. `None` means whole buckets, an empty list nothing.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    username: str
    password: str = field(repr=False)
    reads: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _checks.text("username", self.username)
        _checks.text("password", self.password)
        if isinstance(self.reads, str):
            raise _checks.wrong_type("reads", self.reads, "a list of names")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a `dcp_rs.testing.EmbeddedCluster`.

        >>> with EmbeddedCluster(limits=Limits(max_connections=2)) as cluster:
        ...     cluster.num_nodes
        1

    Attributes:
        memory_quota: Bytes of documents and tombstones a bucket may hold, unless its quota is set
            when it is created.
        max_connections: Connections that a node serves at a time; it closes further ones at once.
        max_streams: Streams of one DCP connection; further requests are refused.
        max_unacknowledged_bytes: Largest flow-control buffer a DCP client may ask for.
        authentication_timeout: How long a client may take to authenticate, in seconds.
        idle_timeout: How long a connection that is not for DCP may be idle, in seconds.
        dcp_idle_timeout: How long a DCP client that has enabled noops may be silent, in seconds.
        persistence_timeout: How long a request that waits for persistence may wait, in seconds.
        congestion_control: TCP congestion control of the connections, such as `reno` or `cubic`; by
            default `reno`, if the system allows it.

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
