"""Packets recorded from real servers, shown."""

import json
import os
import struct
from pathlib import Path

import pytest

from dcp_rs import debug
from dcp_rs.debug import Decoder
from dcp_rs.exceptions import ConfigError, ProtocolError
from reading import TRACES

# Another folder's recordings are judged by their packets; names are known of the project's only.
FOLDER = Path(os.environ.get("DCP_TRACES", TRACES))
IS_OWN_FOLDER = FOLDER.resolve() == TRACES.resolve()
TRACE_FILES = sorted(FOLDER.glob("*.jsonl"))


MAGICS = {0x08, 0x18, 0x80, 0x81, 0x82, 0x83}


def recorded(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "hex" in line]


def decoded(path):
    """Decodes each packet of a trace by itself, with what its connection agreed on before."""
    ways = {}
    for line in recorded(path):
        connection = line.get("conn", 0)
        if connection not in ways:
            decoder = Decoder()
            ways[connection] = {line["dir"]: decoder}
        if line["dir"] not in ways[connection]:
            (other,) = ways[connection].values()
            ways[connection][line["dir"]] = other.other_way()
        raw = bytes.fromhex(line["hex"])
        if line["dir"] == "c2s" and raw[0] not in MAGICS:
            # Sent on purpose, to see what a server does.
            with pytest.raises(ProtocolError, match="magic"):
                debug.decode(raw)
            continue
        (packet,) = ways[connection][line["dir"]].feed(raw)
        yield line, packet


def test_there_are_traces():
    assert len(TRACE_FILES) > (100 if IS_OWN_FOLDER else 0)


@pytest.mark.parametrize("path", TRACE_FILES, ids=lambda path: path.stem)
def test_every_recorded_packet_is_understood(path):
    count = 0
    for line, packet in decoded(path):
        count += 1
        on_purpose = "errors" in path.stem if IS_OWN_FOLDER else line["dir"] == "c2s"
        raw = bytes.fromhex(line["hex"])
        assert packet.fields["length"] == len(raw)
        assert "\n" not in str(packet)
        if not on_purpose:
            assert "problem" not in packet.fields, str(packet)
    assert len(recorded(path)) - 1 <= count > 0


def test_what_a_trace_says_is_what_was_seen():
    packets = [packet.fields for _, packet in decoded(TRACES / "6.0.5-multi-vb.jsonl")]
    first, _, _ = (TRACES / "6.0.5-multi-vb.jsonl").read_text().partition("\n")
    meta = json.loads(first)["meta"]["expected"]
    opcodes = [packet["opcode"] for packet in packets if "status" not in packet]
    assert opcodes.count("DCP_STREAM_END") == len(meta["ends"]) == 8
    mutations = [packet for packet in packets if packet["opcode"] == "DCP_MUTATION"]
    assert {packet["vbucket"] for packet in mutations} == set(range(8))
    for vbucket in range(8):
        seqnos = [packet["seqno"] for packet in mutations if packet["vbucket"] == vbucket]
        assert seqnos == sorted(seqnos)
        assert seqnos


def test_keys_lose_their_collection_ids_once_hello_agreed_on_them():
    keyed = [
        (bytes.fromhex(line["hex"]), packet.fields["key"].encode())
        for line, packet in decoded(TRACES / "8.0.2-sdk-python-scram.jsonl")
        if "collection_id" in packet.fields
    ]
    assert len(keyed) >= 3
    for raw, key in keyed:
        # Behind the id, which is behind the header and the extras; its length counts both.
        key_length = int.from_bytes(raw[2:4], "big")
        assert raw[24 + raw[4] :][:key_length].endswith(key)
        assert key_length > len(key)


def test_passwords_are_not_shown():
    (line, auth), *_ = [
        (line, packet)
        for line, packet in decoded(TRACES / "8.0.2-sdk-python-plain.jsonl")
        if packet.fields["opcode"] == "SASL_AUTH" and "status" not in packet.fields
    ]
    _, user, password = bytes.fromhex(line["hex"])[24:].decode().split("\0")
    assert auth.fields["mechanism"] == "PLAIN"
    assert auth.fields["username"] == user
    assert auth.fields["password"] == "(not shown)"
    # It is the word that names the field.
    assert str(auth).count(password) == 1
    assert repr(auth).count(password) == 1


def test_values_are_python_objects():
    xattrs = bytes.fromhex("0000000a00000006") + b"_s\0{}\0"
    extras = struct.pack(">QQIIIHB", 5, 1, 0, 0, 0, 0, 0)
    body = extras + b"k" + xattrs + b"\xff"
    header = struct.pack(">BBHBBHIIQ", 0x80, 0x57, 1, len(extras), 4, 7, len(body), 1, 2**64 - 1)
    (packet,) = debug.decode(header + body)
    assert list(packet.fields)[:7] == [
        "magic",
        "opcode",
        "vbucket",
        "opaque",
        "cas",
        "datatype",
        "length",
    ]
    assert packet.fields["cas"] == 2**64 - 1
    assert packet.fields["seqno"] == 5
    assert packet.fields["key"] == "k"
    assert packet.fields["xattrs"] == [{"name": "_s", "value": "{}"}]
    assert packet.fields["value"] == b"\xff"
    prepares = [
        packet.fields
        for _, packet in decoded(TRACES / "8.0.2-sync-live.jsonl")
        if packet.fields["opcode"] == "DCP_PREPARE"
    ]
    assert prepares
    assert all(packet["deleted"] in (True, False) for packet in prepares)


def test_packets_come_in_any_pieces():
    path = TRACES / "6.0.5-multi-vb.jsonl"
    stream = b"".join(bytes.fromhex(line["hex"]) for line in recorded(path))
    whole = debug.decode(stream)
    for size in (1, 7, 23, 24, 25, 1000):
        decoder = Decoder()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [packet for piece in pieces for packet in decoder.feed(piece)] == whole
        assert decoder.missing == 0


def test_what_is_no_packet_is_an_error():
    packet = bytes.fromhex("80550000040000030000000400001000000000000000000000000002")
    line = (
        "ClientRequest DCP_STREAM_END vbucket=3 opaque=0x1000 cas=0x0 datatype=raw length=28"
        " reason=StateChanged"
    )
    assert [str(each) for each in debug.decode(packet * 2)] == [line] * 2
    assert debug.decode(b"") == []
    for cut in range(1, len(packet)):
        with pytest.raises(ProtocolError, match="bytes are missing"):
            debug.decode(packet[:cut])
    with pytest.raises(ProtocolError, match="magic"):
        debug.decode(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        debug.decode(packet[:8] + b"\xff\xff\xff\xff" + packet[12:24])
    with pytest.raises(ConfigError, match="data: must be bytes"):
        debug.decode("8055")


def test_a_malformed_message_is_shown_as_such():
    # A stream end whose extras are two bytes short.
    packet = bytes.fromhex("8055000002000003000000020000100000000000000000000002")
    (shown,) = debug.decode(packet)
    assert shown.fields["opcode"] == "DCP_STREAM_END"
    assert "extras" in shown.fields["problem"]
    assert "problem=" in str(shown)
