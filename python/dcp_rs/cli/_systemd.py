"""What a service of systemd with `Type=notify` tells it: that it is ready, how it is, and lives."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING
from urllib.request import urlopen

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from dcp_rs.replication import Progress

# Seconds for an answer of the listener.
_TIMEOUT = 5.0


class Systemd:
    """Tells systemd how a replication is; without systemd, nobody.

    With a watchdog and a listener, a thread asks `/livez`, so that a commit that hangs ends the
    process.

    Args:
        listen: Where the replication listens, if it does.
    """

    def __init__(self, listen: str | None) -> None:
        self._socket = os.environ.get("NOTIFY_SOCKET")
        host, _, port = (listen or "").rpartition(":")
        # Whatever is listened on, loopback reaches it, but for another single address.
        is_any = host.strip("[]") in {"", "0.0.0.0", "::"}  # noqa: S104 - to ask, not to listen
        self._url = f"http://{'127.0.0.1' if is_any else host}:{port}/livez"
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        is_own = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._pace: float | None = None
        if self._socket and listen and is_own and microseconds.isdecimal():
            self._pace = int(microseconds) / 3e6
        self._over = threading.Event()
        self._is_ready = False

    def __enter__(self) -> Self:
        if self._pace is not None:
            threading.Thread(target=self._watch, name="dcp-rs-watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        _class: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()

    def take(self, progress: Progress) -> None:
        """Takes a report, of which the first says that the service is ready."""
        behind = "unknown" if progress.lag_seconds is None else f"{progress.lag_seconds:.0f} s"
        status = f"STATUS={progress.phase}, {progress.changes:,} changes, lag {behind}"
        self._tell(status if self._is_ready else f"READY=1\n{status}")
        self._is_ready = True

    def stopping(self) -> None:
        """Says that it ends."""
        self._tell("STOPPING=1")

    def _watch(self) -> None:
        while not self._over.wait(self._pace):
            try:
                with urlopen(self._url, timeout=_TIMEOUT):  # noqa: S310 - it is our own
                    self._tell("WATCHDOG=1")
            except OSError:
                # It does not live, or does not listen yet: systemd waits for the next one.
                continue

    def _tell(self, text: str) -> None:
        if not self._socket:
            return
        # One that begins with @ is in the abstract namespace.
        address = "\0" + self._socket[1:] if self._socket.startswith("@") else self._socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
            try:
                out.sendto(text.encode(), address)
            except OSError:
                # Nobody listens, or too slowly, which is no reason to stop.
                return
