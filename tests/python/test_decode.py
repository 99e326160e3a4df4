"""Packets recorded from real servers, shown."""

import json
import os
from pathlib import Path

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError, ProtocolError
from dcp_rs.packets import Decoder
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
                dcp_rs.decode(raw)
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
        assert packet.size == len(raw)
        assert packet.opcode == raw[1]
        assert raw.endswith(packet.extras + packet.key + packet.value)
        assert "\n" not in str(packet)
        json.dumps(packet.to_dict())
        if not on_purpose:
            assert packet.error is None, str(packet)
    assert len(recorded(path)) - 1 <= count > 0


def test_what_a_trace_says_is_what_was_seen():
    packets = [packet for _, packet in decoded(TRACES / "6.0.5-multi-vb.jsonl")]
    first, _, _ = (TRACES / "6.0.5-multi-vb.jsonl").read_text().partition("\n")
    meta = json.loads(first)["meta"]["expected"]
    names = [packet.name for packet in packets if not packet.is_response]
    assert names.count("DCP_STREAM_END") == len(meta["ends"]) == 8
    mutations = [packet for packet in packets if packet.name == "DCP_MUTATION"]
    assert {packet.vbucket for packet in mutations} == set(range(8))
    for vbucket in range(8):
        seqnos = [p.fields["seqno"] for p in mutations if p.vbucket == vbucket]
        assert seqnos == sorted(seqnos)
        assert seqnos


def test_keys_lose_their_collection_ids_once_hello_agreed_on_them():
    packets = [p for _, p in decoded(TRACES / "8.0.2-sdk-python-scram.jsonl")]
    keyed = [p for p in packets if "collection_id" in p.fields]
    assert len(keyed) >= 3
    for packet in keyed:
        key = packet.fields["key"].encode()
        assert packet.key.endswith(key)
        assert len(packet.key) > len(key)


def test_passwords_are_not_among_the_fields():
    packets = [p for _, p in decoded(TRACES / "8.0.2-sdk-python-plain.jsonl")]
    (auth, *_) = [p for p in packets if p.name == "SASL_AUTH" and not p.is_response]
    user, password = auth.value.split(b"\0")[1:]
    assert auth.fields == {"mechanism": "PLAIN"}
    assert password.decode() not in str(auth)
    assert password.decode() not in json.dumps(auth.to_dict())
    assert password not in repr(auth).encode()
    assert user


def test_packets_come_in_any_pieces():
    path = TRACES / "6.0.5-multi-vb.jsonl"
    stream = b"".join(bytes.fromhex(line["hex"]) for line in recorded(path))
    whole = dcp_rs.decode(stream)
    for size in (1, 7, 23, 24, 25, 1000):
        decoder = Decoder()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [packet for piece in pieces for packet in decoder.feed(piece)] == whole
        assert decoder.missing == 0


def test_what_is_no_packet_is_an_error():
    packet = bytes.fromhex("80550000040000030000000400001000000000000000000000000002")
    assert [str(each) for each in dcp_rs.decode(packet * 2)] == [
        "DCP_STREAM_END vb=3 opaque=0x1000 reason=StateChanged"
    ] * 2
    assert dcp_rs.decode(b"") == []
    for cut in range(1, len(packet)):
        with pytest.raises(ProtocolError, match="bytes are missing"):
            dcp_rs.decode(packet[:cut])
    with pytest.raises(ProtocolError, match="magic"):
        dcp_rs.decode(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        dcp_rs.decode(packet[:8] + b"\xff\xff\xff\xff" + packet[12:24])
    with pytest.raises(ConfigError, match="data: must be bytes"):
        dcp_rs.decode("8055")


def test_a_malformed_message_is_shown_as_such():
    # A stream end whose extras are two bytes short.
    packet = bytes.fromhex("8055000002000003000000020000100000000000000000000002")
    (shown,) = dcp_rs.decode(packet)
    assert shown.name == "DCP_STREAM_END"
    assert "extras" in shown.error
    assert "MALFORMED" in str(shown)
