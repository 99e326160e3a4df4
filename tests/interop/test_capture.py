"""Wireshark's dissector reads what our producer says to a client that others wrote."""

from __future__ import annotations

import subprocess
import time
from collections import Counter

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]

# What the dissector of Wireshark 4.0 says of bodies that it does not take apart itself: SASL's
# challenges, the failover log in the answer to a stream request, keys after a stream id.
UNDECODED = {"Trailing stray characters"}


class Capture:
    """The packets of a port on the loopback interface."""

    def __init__(self, tshark, port, path):
        self.read_with = [tshark, "-r", str(path), "-d", f"tcp.port=={port},couchbase"]
        self.path = path
        command = [tshark, "-q", "-i", "lo", "-f", f"tcp port {port}", "-w", str(path)]
        self.said = path.with_suffix(".txt")
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stderr=said)

    def await_start(self):
        """Waits until packets are taken; gives the reason if they cannot be."""
        for _ in range(200):
            if self.process.poll() is not None:
                return self.said.read_text().strip()
            if self.path.exists() and self.path.stat().st_size > 0:
                return None
            time.sleep(0.05)
        return "it does not begin"

    def stop(self):
        """Takes what is still on its way, then ends."""
        size = -1
        while size != (size := self.path.stat().st_size):
            time.sleep(0.5)
        self.process.terminate()
        self.process.wait()

    def fields(self, name, display):
        """Every occurrence of a field in the packets that a display filter lets pass."""
        command = [
            *self.read_with,
            "-Y",
            display,
            "-T",
            "fields",
            "-e",
            name,
            "-E",
            "aggregator=\t",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return [field for line in done.stdout.splitlines() for field in line.split("\t") if field]


@pytest.fixture
def open_capture(require_tool, tmp_path):
    tshark = require_tool("tshark", "no capture is read")
    captures = []

    def open_one(port):
        captures.append(Capture(tshark, port, tmp_path / "capture.pcapng"))
        if reason := captures[-1].await_start():
            pytest.skip(f"no capture is read, capturing is not permitted here: {reason}")
        return captures[-1]

    yield open_one
    for capture in captures:
        capture.process.kill()
        capture.process.wait()


# Not with V2.2 snapshot markers: this dissector takes those for V2.1.
@pytest.mark.parametrize(
    "options",
    [
        {"collections": False},
        {"collections": True},
        {"expirations": True},
        {"stream_ids": [3], "filter": [0]},
    ],
    ids=["plain", "collections", "expirations", "stream ids"],
)
def test_the_dissector_finds_no_malformed_packet(gocbcore, open_history, open_capture, options):
    history = open_history(gocbcore)
    history.write(1000)
    history.producer.persist()
    history.write(500, prefix="more")
    capture = open_capture(int(history.producer.connection_string.rpartition(":")[2]))
    seen = gocbcore.drain(history.producer, buffer=20_000, **options)
    capture.stop()
    assert not capture.fields("frame.number", "_ws.malformed || _ws.expert.severity >= 0x800000")
    assert set(capture.fields("_ws.expert.message", "couchbase")) <= UNDECODED
    opcodes = Counter(capture.fields("couchbase.opcode", "couchbase"))
    operations = Counter(line["op"] for line in seen.of("change"))
    told = {"0x57": "mutation", "0x58": "deletion", "0x59": "expiration"}
    assert {name: opcodes[code] for code, name in told.items()} == {
        name: operations[name] for name in told.values()
    }
    assert opcodes["0x56"] == len(seen.of("marker"))
    assert opcodes["0x5d"] > 1, "nothing was acknowledged"
    seqnos = Counter(capture.fields("couchbase.extras.by_seqno", "couchbase"))
    assert seqnos == Counter(str(line["seqno"]) for line in seen.of("change"))
