"""Packets of the Couchbase binary protocol, for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs.exceptions import ProtocolError


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
        """Gives the packet as one line."""
        return self._line


class Decoder:
    """Decodes the packets of one connection, in whatever pieces they come.

    Remembers what is not a whole packet yet, and whether keys carry collection ids, which the
    answer to HELLO decides. Both directions of a connection share the latter: see
    [`other_way`][dcp_rs.packets.Decoder.other_way].
    """

    def __init__(self, *, collections: bool = False) -> None:
        self._rest = b""
        self._state = [collections]

    def other_way(self) -> Self:
        """Gives a decoder of the same connection's other direction."""
        other = type(self)()
        other._state = self._state  # noqa: SLF001 - its own
        return other

    def feed(self, data: bytes) -> list[Packet]:
        """Takes bytes and gives the packets that are complete now.

        Raises:
            ProtocolError: The bytes are no packets; the rest of the connection cannot be read.
        """
        self._rest += data
        packets, used, self._state[0] = _dcp_rs.decode(self._rest, self._state[0])
        self._rest = self._rest[used:]
        return [Packet(fields, line) for fields, line in packets]

    @property
    def missing(self) -> int:
        """How many bytes are missing to complete the packet that has begun; 0 if none has."""
        return _dcp_rs.wanted(self._rest) - len(self._rest) if self._rest else 0


def decode(data: bytes, *, collections: bool = False) -> list[Packet]:
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
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _checks.wrong_type("data", data, "bytes")
    decoder = Decoder(collections=collections)
    packets = decoder.feed(bytes(data))
    if decoder.missing:
        raise ProtocolError(f"the last packet is cut short: {decoder.missing} bytes are missing")
    return packets
