"""Exceptions of dcp_rs.

Each class derives from `dcp_rs.exceptions.DcpError` and from Python's class for the same error, if
there is one: `except TimeoutError` and `except ConnectionError` work.

The text of an exception never contains a document's key or value, or a secret.
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
    """The server refused the user name, password or certificate."""

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
    """An option is wrong. The text says which, usually first, and what it must be."""

    code = "config"


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
    """A vBucket was rolled back, and the stream was opened with `on_rollback="fail"`."""

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
