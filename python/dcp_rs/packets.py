"""Packets of the Couchbase binary protocol, for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from dcp_rs import _checks, _dcp_rs
from dcp_rs.exceptions import ProtocolError


@dataclass(frozen=True, kw_only=True)
class Packet:
    """One packet.

    Attributes:
        name: Its opcode by name, such as `DCP_MUTATION`.
        opcode: Its opcode as a number.
        magic: Its first byte.
        is_response: Whether it answers a request.
        vbucket: vBucket of a request, `None` for a response.
        status: Status of a response, `None` for a request.
        status_name: The same by name, such as `ROLLBACK`.
        opaque: Token that a response repeats, and every message of a stream.
        cas: Version of a document; 0 in most packets.
        datatype: What the value is made of: `raw`, or some of `json`, `snappy` and `xattr`.
        size: Bytes of the whole packet.
        fields: What the packet says, by name. What an exchange of passwords says is not in it.
        error: Why the packet is not what its opcode promises, if it is not.
        framing_extras: Framing extras as sent.
        extras: Extras as sent.
        key: Key as sent, with its collection id on connections with collections.
        value: Value as sent.
    """

    name: str
    opcode: int
    magic: int
    is_response: bool
    vbucket: int | None
    status: int | None
    status_name: str | None
    opaque: int
    cas: int
    datatype: str
    size: int
    fields: dict[str, object]
    error: str | None
    framing_extras: bytes = field(repr=False)
    extras: bytes = field(repr=False)
    key: bytes = field(repr=False)
    value: bytes = field(repr=False)

    def __str__(self) -> str:
        """Gives the packet as one line."""
        words = [self.name]
        if self.is_response:
            words.append(str(self.status_name))
        else:
            words.append(f"vb={self.vbucket}")
        words.append(f"opaque={self.opaque:#x}")
        if self.cas:
            words.append(f"cas={self.cas:#x}")
        if self.datatype != "raw":
            words.append(f"datatype={self.datatype}")
        words += [f"{name}={_shown(name, value)}" for name, value in self.fields.items()]
        if self.value:
            words.append(f"value={len(self.value)}B")
        if self.error is not None:
            words.append(f"MALFORMED: {self.error}")
        return " ".join(words)

    def to_dict(self) -> dict[str, object]:
        """Gives what the packet says as JSON can hold it, without its raw parts."""
        header: dict[str, object] = {
            "name": self.name,
            "opcode": self.opcode,
            "magic": self.magic,
            "is_response": self.is_response,
            "vbucket": self.vbucket,
            "status": self.status_name,
            "opaque": self.opaque,
            "cas": self.cas,
            "datatype": self.datatype,
            "size": self.size,
            "fields": self.fields,
            "value_bytes": len(self.value),
        }
        if self.error is not None:
            header["error"] = self.error
        return header


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
        return [Packet(**packet) for packet in packets]

    @property
    def missing(self) -> int:
        """How many bytes are missing to complete the packet that has begun; 0 if none has."""
        return _dcp_rs.wanted(self._rest) - len(self._rest) if self._rest else 0


def decode(data: bytes, *, collections: bool = False) -> list[Packet]:
    """Decodes whole packets.

        >>> packet = bytes.fromhex("80550000040000030000000400001000000000000000000000000002")
        >>> print(decode(packet)[0])
        DCP_STREAM_END vb=3 opaque=0x1000 reason=StateChanged

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


def _shown(name: str, value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_shown(name, each) for each in value) + "]"
    if isinstance(value, tuple):
        vbuuid, seqno = value
        return f"{vbuuid:#x}@{seqno}" if name == "failover_log" else f"{vbuuid}:{seqno}"
    if name == "vbuuid":
        return f"{value:#x}"
    if isinstance(value, str) and (not value or not value.isprintable() or " " in value):
        return repr(value)
    return str(value)
