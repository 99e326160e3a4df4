"""Everything that dcp_rs raises.

Each class is a `dcp_rs.exceptions.DcpError` and, where Python has a class for the same
thing, that as well: `except TimeoutError` and `except ConnectionError` work.

No text of an exception holds a document's key or value, or a secret.
"""

from __future__ import annotations

import builtins

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
    """Something went wrong. The text says what, and what to check.

    Attributes:
        code: What kind of thing, in a word that does not change between releases, such as
            `connection_lost`; `None` if there is no finer one than the class.
        vbucket: vBucket concerned, if it is about one.
        seqno: Seqno concerned: the one rolled back to, or that of a row that cannot be shown or of
            a packet that cannot be used.
        status: What the server answered, as the number of the protocol.
        is_retryable: Whether the same call may succeed later with nothing changed on this side.
    """

    code: str | None = None
    vbucket: int | None = None
    seqno: int | None = None
    status: int | None = None
    is_retryable: bool = False


class AccessDeniedError(DcpError, PermissionError):
    """The user may not do that."""


class AuthenticationError(DcpError, PermissionError):
    """User name, password or certificate were refused."""


class BucketNotFoundError(DcpError, LookupError):
    """There is no such bucket, or the user may not see it."""


class CheckpointError(DcpError, ValueError):
    """A checkpoint is damaged, behind a stored one, or belongs to another bucket or filter."""


class ClosedError(DcpError):
    """The client, stream or cluster has been closed on this side."""


class ConcurrentWriterError(DcpError):
    """Another process writes to the same target. Nothing of this commit was written."""


class ConfigError(DcpError, ValueError):
    """An option is wrong. The text begins with its name."""


class ConnectError(DcpError, ConnectionError):
    """A connection could not be made, or was lost for good."""


class DataError(DcpError, ValueError):
    """A change cannot be shown as a row: `vbucket` and `seqno` say which."""


class DocumentExistsError(DcpError):
    """The document exists although it must not, or has another CAS."""


class DocumentNotFoundError(DcpError, LookupError):
    """There is no such document."""


class ForkedProcessError(DcpError, RuntimeError):
    """The object was made before a fork: make another one in this process."""


class ProtocolError(DcpError):
    """The peer broke the protocol, or bytes are not what they should be."""


class RollbackError(DcpError):
    """A vBucket was rolled back, and the stream was opened with `on_rollback="fail"`."""


class ServerError(DcpError):
    """The server refused a request: `status` says why."""


class StreamEndedError(DcpError):
    """The server ended a vBucket's stream before its end was reached, for good."""


class TakenOverError(CheckpointError):
    """Another reader has taken over vBuckets in a store. Stop reading them."""


class TimeoutError(DcpError, builtins.TimeoutError):  # noqa: A001 - it is one
    """Something took longer than allowed."""


class UnsupportedError(DcpError):
    """The server lacks a feature that is needed."""


class UnusablePacketError(ProtocolError):
    """The server sends a packet that cannot be used, again after every reconnect.

    The text names vBucket, seqno, opcode and what is wrong; `vbucket` and `seqno` do too. Read
    without that vBucket to go on with the others.
    """
