"""Exceptions of dcp_rs.

Each class derives from `dcp_rs.exceptions.DcpError` and from Python's class for the same error, if
there is one: `except TimeoutError` and `except ConnectionError` work.

The text of an exception never contains a document's key or value, or a secret.
"""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AccessDeniedError",
    "AuthenticationError",
    "BucketNotFoundError",
    "CheckpointError",
    "ClosedError",
    "ConcurrentWriterError",
    "ConfigError",
    "ConnectError",
    "DataError",
    "DcpError",
    "DocumentExistsError",
    "DocumentNotFoundError",
    "ForkedProcessError",
    "ProtocolError",
    "RollbackError",
    "ServerError",
    "StreamEndedError",
    "TakenOverError",
    "TimeoutError",
    "UnsupportedError",
    "UnusablePacketError",
]


class DcpError(Exception):
    """Base class of all errors. The text says what happened, why, and what to do.

    Attributes:
        code: Kind of the error, as a word that does not change between releases, such as
            `connection_lost`. Each class has one for errors that are no more specific than it;
            `None` only in this one.
        vbucket: The vBucket, if the error is about one.
        seqno: The seqno, if the error is about one: that of a rollback, of a change that cannot be
            converted, or of an unusable packet.
        status: Status of the server's response, as a number of the protocol.
        is_retryable: Whether the same call may succeed later without a change on your side.
    """

    code: str | None = None
    vbucket: int | None = None
    seqno: int | None = None
    status: int | None = None
    is_retryable: bool = False


class AccessDeniedError(DcpError, PermissionError):
    """The user lacks a privilege."""

    code = "access_denied"


class AuthenticationError(DcpError, PermissionError):
    """The server refused the user name, password, token or certificate."""

    code = "authentication"


class BucketNotFoundError(DcpError, LookupError):
    """The bucket does not exist, or the user may not access it."""

    code = "bucket_not_found"


class CheckpointError(DcpError, ValueError):
    """A checkpoint is damaged, behind a stored one, or belongs to another bucket or filter."""

    code = "checkpoint"


class ClosedError(DcpError):
    """The client, stream or cluster is closed."""

    code = "closed"


class ConcurrentWriterError(DcpError):
    """Another process writes to the same target. Nothing of this commit was written."""

    code = "concurrent_writer"


class ConfigError(DcpError, ValueError):
    """An option is wrong. The text begins with its name, and says what it must be.

    Attributes:
        option: Name of the option as you write it: `retry_timeout` in Python, `retryTimeout` in
            Spark, `--retry-timeout` on the command line. The first, if options contradict each
            other. `None` if the cause is no option, such as a library that is too old.
        value: Its value, if that is text, a number or a truth value, or a list of these; `None` if
            it is something else or may be a secret, such as a password or a document.
    """

    code = "config"
    option: str | None = None
    value: object = None

    def __init__(
        self,
        problem: str = "",
        *,
        option: str | Sequence[str] | None = None,
        value: object = None,
    ) -> None:
        """Creates the error; `problem` does not repeat the names of the options."""
        options = [option] if isinstance(option, str) else list(option or ())
        super().__init__(f"{', '.join(options)}: {problem}" if options else problem)
        # In its state, so that a pickle keeps them.
        self._options, self._problem = options, problem
        self.option = options[0] if options else None
        if self.option not in _SECRET:
            self.value = _plain(value)

    def _rename(self, names: Mapping[str, str], hints: Mapping[str, str] | None = None) -> None:
        """Calls the options as another layer does, and those that would help as in `hints`."""
        hints = names if hints is None else hints
        renamed = [names.get(each, each) for each in self._options]
        if renamed:
            # Another option may be what helps.
            self._problem = re.sub(
                r"\bset (\w+_\w+)", lambda it: f"set {hints.get(it[1], it[1])}", self._problem
            )
            self.args = (f"{', '.join(renamed)}: {self._problem}",)
            self._options, self.option = renamed, renamed[0]


_SECRET = frozenset({
    "connection_string", "connectionString", "credentials", "key", "password", "rules", "target",
    "tls_key_password", "tlsKeyPassword", "token", "token_key", "users", "value", "xattrs",
})  # fmt: skip
"""Options whose value may contain a secret or a document, by each of their names."""


def _plain(value: object) -> object:
    """Returns a copy of what is worth showing and can be pickled."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) in (list, tuple):
        items = [_plain(each) for each in value]  # type: ignore[attr-defined]
        return None if None in items else items
    return None


class ConnectError(DcpError, ConnectionError):
    """A connection failed, or was lost for good."""

    code = "connect"


class DataError(DcpError, ValueError):
    """A change cannot be converted to a row, or deletions were purged before they were read.

    `vbucket` and `seqno` say which change, or up to where deletions were purged.
    """

    code = "data"


class DocumentExistsError(DcpError):
    """The document already exists, or has another CAS."""

    code = "document_exists"


class DocumentNotFoundError(DcpError, LookupError):
    """The document does not exist."""

    code = "document_not_found"


class ForkedProcessError(DcpError, RuntimeError):
    """The object was created before a fork: create another one in this process."""

    code = "forked_process"


class ProtocolError(DcpError):
    """The peer violated the protocol, or bytes are malformed."""

    code = "protocol"


class RollbackError(DcpError):
    """A vBucket was rolled back, and the stream was opened with `on_rollback="fail"`.

    Otherwise, its first load was interrupted four times in a row, each time below the seqno up to
    which the server had purged deletions by then.
    """

    code = "rollback"


class ServerError(DcpError):
    """The server refused a request: `status` says why."""

    code = "status"


class StreamEndedError(DcpError):
    """The server ended a vBucket's stream early, for good."""

    code = "stream_ended"


class TakenOverError(CheckpointError):
    """Another reader has taken over vBuckets in a store. Stop reading them."""

    code = "taken_over"


class TimeoutError(DcpError, builtins.TimeoutError):  # noqa: A001 - it is one
    """An operation timed out."""

    code = "timeout"


class UnsupportedError(DcpError):
    """The server lacks a feature that is needed."""

    code = "unsupported"


class UnusablePacketError(ProtocolError):
    """The server sends an unusable packet, again after every reconnect.

    The text names the vBucket, seqno, opcode and problem; the attributes have `vbucket` and
    `seqno`. To continue with the other vBuckets, read without this one.
    """

    code = "unusable_packet"
