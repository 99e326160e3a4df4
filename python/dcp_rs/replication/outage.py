"""Targets that cannot be reached, or have no room, and are written to again later."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from typing import TYPE_CHECKING

from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError, DcpError

if TYPE_CHECKING:
    from dcp_rs.replication.health import Health
    from dcp_rs.replication.target import Database, Target

_log = logging.getLogger("dcp_rs.replication")

# What is said of disks and of links, and passes. A lack of memory or of file descriptors is this
# process's own.
_PASSING = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH,
}  # fmt: skip
# The same in the texts of libraries which keep nothing else: of HTTP clients, and of storages.
_PASSING_TEXTS = re.compile(
    rf"{os.strerror(errno.ENOSPC)}|Connection (refused|reset|aborted)|error sending request"
    r"|dns error|tcp connect|[Tt]imed out|operation timeout|NETWORK_CONNECTION|SlowDown|SLOW_DOWN"
    r"|ServiceUnavailable|SERVICE_UNAVAILABLE|TooManyRequests|InternalError|INTERNAL_FAILURE"
    r"|(HTTP|status|status code:) (429|5\d\d)\b|error for HTTP [A-Z]+ to"
    # Arrow's clients of Azure and Google.
    r"|Azure Error: \[\w*\] (429|5\d\d)\b|Error while sending request"
    r"|Fail to get a new connection|google::cloud::Status\(UNAVAILABLE"
)
# Of errors of pyiceberg, whose texts are those of a catalog.
_PASSING_NAMES = {"ServiceUnavailableError", "TooManyRequestsError"}
# Seconds between attempts, at first and at most; and between warnings.
_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_TOLD = 60.0
# Characters of an error's text that are kept.
_LENGTH = 300


class Unreachable(ConfigError):  # noqa: N818 - says what the target is
    """A storage or a catalog does not answer, or not now.

    At the start, its address is taken to be wrong.
    """


def is_unavailable(target: Target | Database, error: Exception) -> bool:
    """Whether an error says that a target cannot be written to now, though nothing is wrong.

    A target may have a method of this name. Otherwise, an error of the system says so.
    """
    tells = getattr(target, "is_unavailable", None)
    if tells is not None:
        return bool(tells(error))
    return any(is_passing(each) for each in (error, error.__cause__) if each is not None)


def is_passing(error: BaseException) -> bool:
    """Whether an error of a system, a library or a storage passes by itself."""
    if isinstance(error, DcpError):
        return isinstance(error, Unreachable)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if type(error).__name__ in _PASSING_NAMES:
        return True
    return _PASSING_TEXTS.search(str(error)) is not None


class Outage:
    """How long a target has been unavailable, and when to try again.

    Args:
        health: What is told of it.
        timeout: Seconds for which to try.
    """

    def __init__(self, health: Health, timeout: float) -> None:
        self._health = health
        self._begun = time.monotonic()
        self._pause = _PAUSE
        self._told = 0.0
        self.timeout = timeout

    def failed(self, error: Exception) -> float | None:
        """Notes an attempt that failed.

        Returns:
            When to try again; `None` if it has been tried long enough.
        """
        now = time.monotonic()
        again, self._pause = now + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if again > self._begun + self.timeout:
            return None
        text = " ".join(str(error).split())[:_LENGTH]
        self._health.target_failed(self._begun, text)
        if now - self._told >= _TOLD:
            self._told = now
            _log.warning(
                "the target is unavailable, and is tried again for up to %.0f s: %s",
                self._begun + self.timeout - now,
                text,
                extra=about("target_unavailable", seconds=now - self._begun, error=text),
            )
        return again

    def over(self) -> None:
        """Notes that it is over."""
        self._health.target_is_back()
        seconds = time.monotonic() - self._begun
        _log.info(
            "the target was unavailable for %.0f s, and is written to again",
            seconds,
            extra=about("target_available", seconds=seconds),
        )
