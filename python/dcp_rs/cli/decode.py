"""`dcp-rs decode`: print packets as lines."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dcp_rs.cli._options import file_name, output_options
from dcp_rs.cli._rows import base64_of
from dcp_rs.debug import Decoder, Packet
from dcp_rs.exceptions import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DIRECTIONS = {"c2s": "->", "s2c": "<-"}
# What JSON from outside can raise where it is no packet.
_NO_PACKET = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
)  # fmt: skip


@dataclass(frozen=True)
class _Piece:
    """Bytes of one direction of one connection; `None` where it was closed."""

    connection: int
    direction: str | None
    data: bytes | None


@click.command()
@click.argument("file", metavar="FILE", type=file_name)
@click.option(
    "--collections",
    is_flag=True,
    help="Keys carry collection IDs, even if no answer to HELLO says so.",
)
@output_options
def decode(file: str, *, collections: bool, as_json: bool) -> None:
    """Print a line for each recorded packet.

    FILE is a trace (JSON lines with `dir` and `hex`), a hex dump, or raw bytes; the format is
    detected. - is standard input.
    """
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    show = _as_json if as_json else _as_line
    for piece, packet in _packets(_pieces(data), collections=collections):
        print(show(piece, packet))


def _packets(
    pieces: Iterable[_Piece], *, collections: bool
) -> Iterator[tuple[_Piece, Packet | None]]:
    decoders: dict[tuple[int, str | None], Decoder] = {}
    for piece in pieces:
        if piece.data is None:
            yield piece, None
            continue
        where = (piece.connection, piece.direction)
        if where not in decoders:
            same = next((decoders[other] for other in decoders if other[0] == where[0]), None)
            decoders[where] = same.other_way() if same else Decoder(collections=collections)
        for packet in decoders[where].feed(piece.data):
            yield piece, packet
    for decoder in decoders.values():
        if decoder.missing:
            missing = f"{decoder.missing} bytes are missing"
            raise ProtocolError(f"the last packet is incomplete: {missing}")


def _pieces(data: bytes) -> Iterator[_Piece]:
    if data.lstrip()[:1] == b"{":
        return _trace(data)
    hex_bytes = _hex_dump(data)
    return iter([_Piece(0, None, data if hex_bytes is None else hex_bytes)])


def _trace(data: bytes) -> Iterator[_Piece]:
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "meta" in record:
                continue
            content = None if record.get("eof") else bytes.fromhex(record["hex"])
            direction = record["dir"]
            if direction not in _DIRECTIONS:
                raise ValueError(f"dir is none of {', '.join(_DIRECTIONS)}")
            piece = _Piece(int(record.get("conn", 0)), direction, content)
        except _NO_PACKET as error:
            raise ProtocolError(f"line {number} of the trace is not a packet: {error!r}") from error
        yield piece


def _hex_dump(data: bytes) -> bytes | None:
    """Returns the bytes of a hex dump; `None` if it is not one.

    Takes bare digits, `0x` in front of them, and the output of `xxd` and `hexdump -C`, whose
    offsets and characters are left out.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return None
    joined = ""
    for line in text.splitlines():
        joined += re.sub(r"0x|[\s,:]", "", _without_margins(line, len(joined) // 2))
    if not joined or len(joined) % 2 or re.fullmatch(r"[0-9a-fA-F]+", joined) is None:
        return None
    return bytes.fromhex(joined)


def _without_margins(line: str, offset: int) -> str:
    """Removes the offset at the start of a line of a dump, and the characters at its end."""
    bytes_only = line.partition("|")[0]
    margin = re.match(r"\s*([0-9a-fA-F]{7,8})(:|\s|$)", bytes_only)
    # Without offsets, the first eight digits are data.
    if margin is None or int(margin[1], 16) != offset:
        return bytes_only
    bytes_only = bytes_only[margin.end() :].strip()
    # `xxd` has two spaces before the characters; `hexdump` has them between the halves too.
    return bytes_only.partition("  ")[0] if margin[2] == ":" else bytes_only


def _as_line(piece: _Piece, packet: Packet | None) -> str:
    words = []
    if piece.direction is not None:
        words.append(f"{piece.connection} {_DIRECTIONS.get(piece.direction, piece.direction)}")
    words.append("closed" if packet is None else str(packet))
    return " ".join(words)


def _as_json(piece: _Piece, packet: Packet | None) -> str:
    record: dict[str, object] = {}
    if piece.direction is not None:
        record |= {"conn": piece.connection, "dir": piece.direction}
    record |= {"eof": True} if packet is None else packet.fields
    return json.dumps(record, default=base64_of)
