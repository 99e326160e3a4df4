"""How a service waits for a cluster that is away when it starts."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dcp_rs._logging import about
from dcp_rs.client import Client
from dcp_rs.exceptions import DcpError
from dcp_rs.replication.health import Health
from dcp_rs.replication.listening import Listening

if TYPE_CHECKING:
    import threading

    from dcp_rs.connection import ConnectionOptions

_log = logging.getLogger("dcp_rs.replication")

# Seconds between attempts, at first and at most.
_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


def connect_patiently(
    options: ConnectionOptions, stop: threading.Event, listen: str | None
) -> Client | None:
    """Connects, and tries again for `retry_timeout` while no node can be reached.

    Args:
        options: How to connect.
        stop: Ends it.
        listen: Where to say meanwhile that it lives and is not ready.

    Returns:
        The client; `None` if it was stopped.

    Raises:
        DcpError: The cluster refuses, or the time is over.
    """
    deadline, pause = time.monotonic() + options.retry_timeout, _PAUSE
    with ExitStack() as meanwhile:
        health = Health(_bucket(options), options.name, math.inf)
        while True:
            try:
                return Client(options)
            except DcpError as error:
                left = deadline - time.monotonic()
                if not error.is_retryable or left <= 0:
                    raise
                if health.why_not_started is None:
                    meanwhile.enter_context(health.waiting())
                    if listen is not None:
                        meanwhile.enter_context(Listening(listen, health))
                    _log.warning(
                        "waits up to %g s, since %s",
                        options.retry_timeout,
                        error,
                        extra=about(
                            "stream_waits", seconds=options.retry_timeout, error=str(error)
                        ),
                    )
                health.why_not_started = f"it has not connected yet: {error}"
            if stop.wait(min(pause, left)):
                return None
            pause = min(2 * pause, _LONGEST_PAUSE)


def _bucket(options: ConnectionOptions) -> str:
    addresses = options.connection_string.partition("?")[0].rpartition("://")[2]
    return options.bucket or addresses.partition("/")[2]
