"""Tools to inspect DCP: decode packets, and explain why a server makes a client roll back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs.exceptions import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Decoder", "Packet", "RollbackExplanation", "decode", "explain_rollback"]

_MAX = (1 << 64) - 1


@dataclass(frozen=True)
class Packet:
    """A packet. `str()` returns it as one line, with long values truncated.

    Attributes:
        fields: Fields of the packet by name, in order: `magic`, `opcode`, `vbucket` of a request or
            `status` of a response, `opaque`, `cas`, `datatype` and `length`, then those of its
            opcode. Keys and values are included, credentials are not. If the packet does not fit
            its opcode, `problem` says why.
    """

    fields: dict[str, object]
    _line: str = field(repr=False)

    def __str__(self) -> str:
        """Returns the packet as one line."""
        return self._line


class Decoded(NamedTuple):
    """What the engine makes of a piece of a connection."""

    packets: list[Packet]
    used: int
    """Bytes of these packets; after them, the next one is incomplete."""
    collections: bool
    """Whether keys of later packets have collection IDs, which an answer to HELLO may change."""


class Decoder:
    """Decodes the packets of one connection, in pieces of any size.

    It buffers incomplete packets, and learns from the answer to HELLO whether keys carry collection
    IDs. Both directions of a connection share this: see `dcp_rs.debug.Decoder.other_way`.
    """

    def __init__(self, *, collections: bool = False) -> None:
        _checks.flag("collections", collections)
        self._rest = b""
        self._state = [collections]

    def other_way(self) -> Self:
        """Returns a decoder for the other direction of the same connection."""
        other = type(self)()
        other._state = self._state  # noqa: SLF001 - its own
        return other

    def feed(self, data: bytes | bytearray | memoryview) -> list[Packet]:
        """Takes bytes and returns the packets that they complete.

        Raises:
            ProtocolError: The bytes are not packets, and the rest of the connection cannot be read.
            ConfigError: `data` is not bytes.
        """
        _checks.instance("data", data, bytes | bytearray | memoryview, "bytes")
        self._rest += bytes(data)
        decoded = _dcp_rs.decode(self._rest, self._state[0])
        self._rest, self._state[0] = self._rest[decoded.used :], decoded.collections
        return decoded.packets

    @property
    def missing(self) -> int:
        """Number of bytes missing from an incomplete packet; 0 if there is none."""
        return _dcp_rs.wanted(self._rest) - len(self._rest) if self._rest else 0

    def __repr__(self) -> str:
        return f"<dcp_rs.debug.Decoder collections={self._state[0]} unfinished={len(self._rest)}>"


def decode(data: bytes | bytearray | memoryview, *, collections: bool = False) -> list[Packet]:
    """Decodes whole packets.

        >>> packet = bytes.fromhex("80550000040000030000000400001000000000000000000000000002")
        >>> decode(packet)[0].fields["reason"]
        'StateChanged'

    Args:
        data: One or more consecutive packets.
        collections: Whether keys carry collection IDs. An answer to HELLO among the packets decides
            this for the packets after it.

    Raises:
        ProtocolError: The bytes are not packets, or the last one is incomplete.
        ConfigError: `data` is not bytes.
    """
    _checks.instance("data", data, bytes | bytearray | memoryview, "bytes")
    decoder = Decoder(collections=collections)
    packets = decoder.feed(data)
    if decoder.missing:
        raise ProtocolError(f"the last packet is incomplete: {decoder.missing} bytes are missing")
    return packets


@dataclass(frozen=True, kw_only=True)
class RollbackExplanation:
    """What a server answers to a stream request, and why.

    Attributes:
        status: `ok` if the stream starts, `rollback` if the client must roll back, `erange` if the
            seqnos of the request contradict each other or the vBucket.
        seqno: Seqno to roll back to; `None` unless `status` is `rollback`.
        reason: The rule that applied, with its numbers, as a sentence.
    """

    status: Literal["ok", "rollback", "erange"]
    seqno: int | None
    reason: str

    def __str__(self) -> str:
        to = "" if self.seqno is None else f" to {self.seqno}"
        return f"{self.status}{to}: {self.reason}"


def explain_rollback(
    *,
    failover_log: Iterable[tuple[int, int]],
    high_seqno: int,
    vbuuid: int,
    start_seqno: int,
    snapshot_start: int,
    snapshot_end: int,
    end_seqno: int = _MAX,
    purge_seqno: int = 0,
    client_purge_seqno: int = 0,
    collections_high_seqno: int | None = None,
    strict_vbuuid: bool = False,
    ignore_purged_tombstones: bool = False,
) -> RollbackExplanation:
    """Explains what a server answers to a stream request, and why.

    The embedded cluster uses the same code. It checks in the server's order: first that the seqnos
    of the request are consistent, then the rollback rules, then that the vBucket reaches that far.
    All seqnos belong to one vBucket.

        >>> print(explain_rollback(
        ...     failover_log=[(0xBEEF, 900), (0xCAFE, 0)], high_seqno=950,
        ...     vbuuid=0xCAFE, start_seqno=1000, snapshot_start=1000, snapshot_end=1000,
        ... ))
        rollback to 900: branch 0xcafe is shared up to seqno 900, where the next newer branch \
0xbeef begins; the client stands at seqno 1000 and has changes beyond seqno 900 that the vBucket's \
history lacks, so it must go back to seqno 900

    Args:
        failover_log: The server's history branches as `(vbuuid, seqno)`, newest first, as its
            failover log lists them (1 to 25).
        high_seqno: Highest seqno of the vBucket.
        vbuuid: Branch that the client believes it is on.
        start_seqno: Last seqno that the client has.
        snapshot_start: Start of the snapshot that contains `start_seqno`.
        snapshot_end: End of that snapshot; equal to `start_seqno` if it is complete.
        end_seqno: Last seqno requested.
        purge_seqno: Seqno up to which the server has purged deletions.
        client_purge_seqno: Purge seqno that the client received in a snapshot marker; 0 for none.
        collections_high_seqno: Highest seqno of the collections in the client's filter; `None`
            without a filter.
        strict_vbuuid: Whether the request has the flag to check the branch even at start 0.
        ignore_purged_tombstones: Whether it has the flag to resume despite purged deletions.

    Raises:
        ConfigError: An argument is not a seqno, or no server could have such a failover log.
    """
    return _dcp_rs.explain_rollback(dict(locals()))
