"""Looking into DCP: what packets say, and why a server makes a client roll back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, cast

from dcp_rs import _checks, _dcp_rs
from dcp_rs.exceptions import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Decoder", "Packet", "RollbackExplanation", "decode", "explain_rollback"]

_MAX = (1 << 64) - 1


@dataclass(frozen=True)
class Packet:
    """One packet; as a string, it is one line, in which long values are cut.

    Attributes:
        fields: What the packet says, by name, in its order: `magic`, `opcode`, `vbucket` of a
            request or `status` of a response, `opaque`, `cas`, `datatype` and `length`, then what
            its opcode has. Keys and values are there, what would let others log in is not. If the
            packet is not what its opcode promises, `problem` says why.
    """

    fields: dict[str, object]
    _line: str = field(repr=False)

    def __str__(self) -> str:
        """Returns the packet as one line."""
        return self._line


class Decoder:
    """Decodes the packets of one connection, in whatever pieces they come.

    Remembers what is not a whole packet yet, and whether keys carry collection ids, which the
    answer to HELLO decides. Both directions of a connection share the latter: see
    `dcp_rs.debug.Decoder.other_way`.
    """

    def __init__(self, *, collections: bool = False) -> None:
        _checks.flag("collections", collections)
        self._rest = b""
        self._state = [collections]

    def other_way(self) -> Self:
        """Returns a decoder of the same connection's other direction."""
        other = type(self)()
        other._state = self._state  # noqa: SLF001 - its own
        return other

    def feed(self, data: bytes | bytearray | memoryview) -> list[Packet]:
        """Takes bytes and gives the packets that are complete now.

        Raises:
            ProtocolError: The bytes are no packets; the rest of the connection cannot be read.
            ConfigError: `data` is not bytes.
        """
        _checks.instance("data", data, bytes | bytearray | memoryview, "bytes")
        self._rest += bytes(data)
        packets, used, self._state[0] = _dcp_rs.decode(self._rest, self._state[0])
        self._rest = self._rest[used:]
        return [Packet(fields, line) for fields, line in packets]

    @property
    def missing(self) -> int:
        """How many bytes are missing to complete the packet that has begun; 0 if none has."""
        return _dcp_rs.wanted(self._rest) - len(self._rest) if self._rest else 0

    def __repr__(self) -> str:
        return f"<dcp_rs.debug.Decoder collections={self._state[0]} unfinished={len(self._rest)}>"


def decode(data: bytes | bytearray | memoryview, *, collections: bool = False) -> list[Packet]:
    """Decodes whole packets.

        >>> packet = bytes.fromhex("80550000040000030000000400001000000000000000000000000002")
        >>> decode(packet)[0].fields["reason"]
        'StateChanged'

    Args:
        data: One or more packets, one after the other.
        collections: Whether keys carry collection ids. An answer to HELLO among the packets
            decides it for those after it.

    Raises:
        ProtocolError: The bytes are no packets, or the last one is cut short.
        ConfigError: `data` is not bytes.
    """
    _checks.instance("data", data, bytes | bytearray | memoryview, "bytes")
    decoder = Decoder(collections=collections)
    packets = decoder.feed(data)
    if decoder.missing:
        raise ProtocolError(f"the last packet is cut short: {decoder.missing} bytes are missing")
    return packets


@dataclass(frozen=True, kw_only=True)
class RollbackExplanation:
    """What a server answers to a stream request, and why.

    Attributes:
        status: `ok` if the stream begins, `rollback` if the client must go back, `erange` if the
            request's seqnos contradict each other or the vBucket.
        seqno: Seqno to go back to; `None` unless `status` is `rollback`.
        reason: The rule that decided, with its numbers, in a sentence.
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
    """Says what a server answers to a stream request, and why.

    The embedded cluster decides by the same code, in the server's order of checks: the seqnos
    of the request among themselves, the rollback rules, and whether the vBucket reaches that
    far. All seqnos are of one vBucket.

        >>> print(explain_rollback(
        ...     failover_log=[(0xBEEF, 900), (0xCAFE, 0)], high_seqno=950,
        ...     vbuuid=0xCAFE, start_seqno=1000, snapshot_start=1000, snapshot_end=1000,
        ... ))
        rollback to 900: branch 0xcafe is shared up to seqno 900, where the next newer branch \
0xbeef begins; the client stands at seqno 1000 and has changes beyond it that this history does \
not have, so it must go back to seqno 900

    Args:
        failover_log: The server's history branches as `(vbuuid, seqno)`, newest first, as its
            failover log lists them (1 to 25).
        high_seqno: Highest seqno of the vBucket.
        vbuuid: Branch the client believes it is on.
        start_seqno: Last seqno the client has.
        snapshot_start: Where the snapshot starts that `start_seqno` lies in.
        snapshot_end: Where that snapshot ends; equal to `start_seqno` if it is complete.
        end_seqno: Last seqno wanted.
        purge_seqno: Seqno up to which the server purged deletions.
        client_purge_seqno: Purge seqno the client was told in a snapshot marker; 0 for none.
        collections_high_seqno: Highest seqno of the collections the client filters on; `None`
            without a filter.
        strict_vbuuid: Whether the request has the flag to check the branch at start 0 as well.
        ignore_purged_tombstones: Whether it has the flag to go on in spite of purged deletions.

    Raises:
        ConfigError: An argument is not a seqno, or no server could have such a failover log.
    """
    status, seqno, reason = _dcp_rs.explain_rollback(dict(locals()))
    return RollbackExplanation(
        status=cast("Literal['ok', 'rollback', 'erange']", status), seqno=seqno, reason=reason
    )
