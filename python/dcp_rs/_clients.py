"""Clients that this process keeps for its next read of a plan."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_rs import _dcp_rs
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    from dcp_rs.connection import ConnectionOptions

# Seconds for which a connection waits for the next read. Spark ends workers that are idle for a
# minute; until then the engine answers the server's noops.
_KEEP_CONNECTIONS = 55.0

# Seconds after which an unused client is dropped: its cluster may be gone.
_KEEP_CLIENT = 600.0

_Key = tuple[int, object]


class Opened(NamedTuple):
    """The stream of a plan, and the client that it uses."""

    client: _dcp_rs.Client
    stream: _dcp_rs.ChangeStream


class Clients:
    """The clients of this process, with their connections, by their options.

    A process may run many reads, be forked at any time, and be killed when a read is cancelled, as
    Spark's workers are. So a client is kept for the next read, but nothing depends on it: one that
    is dropped closes its connections once no stream uses it. A forked child sees its parent's
    entries under another process id and leaves them alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[_Key, _dcp_rs.Client] = {}
        self._asked_for: dict[_Key, float] = {}
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()

    def get(self, options: ConnectionOptions) -> _dcp_rs.Client | None:
        """Returns the client of these options, if there is one."""
        key = _key(options)
        with self._lock:
            idle = self._take_idle(key)
            client = self._clients.get(key)
        # Their connections are closed without the lock.
        del idle
        return client

    def keep(self, options: ConnectionOptions, client: _dcp_rs.Client) -> None:
        """Keeps a client for the next read."""
        with self._lock:
            replaced, self._clients[_key(options)] = self._clients.get(_key(options)), client
        del replaced

    def forget(self, options: ConnectionOptions) -> None:
        """Drops the client of these options, if there is one."""
        with self._lock:
            dropped = self._clients.pop(_key(options), None)
        del dropped

    def _take_idle(self, asked_for: _Key) -> list[_dcp_rs.Client | None]:
        """Takes out the clients of this process that have not been used for a long time."""
        now = time.monotonic()
        self._asked_for[asked_for] = now
        idle = [
            key
            for key, last in self._asked_for.items()
            if key[0] == os.getpid() and now - last > _KEEP_CLIENT
        ]
        for key in idle:
            del self._asked_for[key]
        return [self._clients.pop(key, None) for key in idle]


CLIENTS = Clients()


def open_plan(
    plan: _dcp_rs.ReadPlan, connection: ConnectionOptions, delivery: dict[str, Any]
) -> ChangeStream:
    """Opens the stream of a plan on the client that is kept for a connection, or on a new one.

    It retries for as long as the plan allows.

    Args:
        plan: What to read.
        connection: How to connect.
        delivery: The engine's options of the stream.

    Raises:
        DcpError: The stream cannot be opened.
    """
    kept_longer = max(connection.keep_connections, _KEEP_CONNECTIONS)
    options = vars(replace(connection, keep_connections=kept_longer))
    client, stream = _dcp_rs.open_plan(options, CLIENTS.get(connection), plan, delivery)
    CLIENTS.keep(connection, client)
    return ChangeStream(stream, client.bucket_name)


def _key(options: ConnectionOptions) -> _Key:
    values = (getattr(options, each.name) for each in fields(options))
    return os.getpid(), tuple(
        value if value is None or isinstance(value, str) or not hasattr(value, "__iter__")
        else tuple(value)
        for value in values
    )  # fmt: skip
