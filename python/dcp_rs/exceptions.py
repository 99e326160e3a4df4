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
            `connection_lost`; `None` if it is no more specific than the class.
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


class AuthenticationError(DcpError, PermissionError):
    """The server refused the user name, password or certificate."""


class BucketNotFoundError(DcpError, LookupError):
    """The bucket does not exist, or the user may not access it."""


class CheckpointError(DcpError, ValueError):
    """A checkpoint is damaged, behind a stored one, or belongs to another bucket or filter."""


class ClosedError(DcpError):
    """The client, stream or cluster is closed."""


class ConcurrentWriterError(DcpError):
    """Another process writes to the same target. Nothing of this commit was written."""


class ConfigError(DcpError, ValueError):
    """An option is wrong. The text says which, usually first, and what it must be."""


class ConnectError(DcpError, ConnectionError):
    """A connection failed, or was lost for good."""


class DataError(DcpError, ValueError):
    """A change cannot be converted to a row, or deletions were purged before they were read.

    `vbucket` and `seqno` say which change, or up to where deletions were purged.
    """


class DocumentExistsError(DcpError):
    """The document already exists, or has another CAS."""


class DocumentNotFoundError(DcpError, LookupError):
    """The document does not exist."""


class ForkedProcessError(DcpError, RuntimeError):
    """The object was created before a fork: create another one in this process."""


class ProtocolError(DcpError):
    """The peer violated the protocol, or bytes are malformed."""


class RollbackError(DcpError):
    """A vBucket was rolled back, and the stream was opened with `on_rollback="fail"`."""


class ServerError(DcpError):
    """The server refused a request: `status` says why."""


class StreamEndedError(DcpError):
    """The server ended a vBucket's stream early, for good."""


class TakenOverError(CheckpointError):
    """Another reader has taken over vBuckets in a store. Stop reading them."""


class TimeoutError(DcpError, builtins.TimeoutError):  # noqa: A001 - it is one
    """An operation timed out."""


class UnsupportedError(DcpError):
    """The server lacks a feature that is needed."""


class UnusablePacketError(ProtocolError):
    """The server sends an unusable packet, again after every reconnect.

    The text names the vBucket, seqno, opcode and problem; the attributes have `vbucket` and
    `seqno`. To continue with the other vBuckets, read without this one.
    """
