"""Wireshark's dissector reads what our cluster says to a client that others wrote."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import time
from collections import Counter

import pytest
from programs import skip

# The fixtures build the programs, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300, func_only=True)]

# What the dissector of Wireshark 4.0 says of bodies that it does not take apart itself: SASL's
# challenges, the failover log in the answer to a stream request, keys after a stream id.
UNDECODED = {"Trailing stray characters"}
# Errors and what is malformed; the rest of Wireshark's severities are remarks.
ERROR = 0x800000
# A request to do nothing, told by its opaque: the last packet of a capture.
SENTINEL = struct.pack(">BBHBBHIIQ", 0x80, 0x0A, 0, 0, 0, 0, 0, 0x5E471E11, 0)


def await_true(condition, patience=60):
    """Waits for a condition; tells whether it came true."""
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


class Capture:
    """The packets of a port on the loopback interface."""

    def __init__(self, tshark, port, path):
        self.read_with = [tshark, "-r", str(path), "-d", f"tcp.port=={port},couchbase"]
        self.port = port
        self.path = path
        self.said = path.with_suffix(".txt")
        # A buffer of 64 MiB: nothing is to be lost while the machine has other things to do.
        command = [tshark, "-q", "-B", "64", "-i", "lo", "-f", f"tcp port {port}", "-w", str(path)]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stderr=said)

    def await_start(self):
        """Waits until packets are taken; gives the reason if they cannot be."""
        begun = await_true(lambda: self.process.poll() is not None or self._send_sentinel())
        if self.process.poll() is not None:
            return self.said.read_text().strip()
        return None if begun else "it does not begin"

    def _send_sentinel(self):
        """Tells whether a packet sent now is taken within a second or so."""
        if not self.path.exists():
            return False
        before = self.path.read_bytes().count(SENTINEL)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(SENTINEL)
            return await_true(lambda: self.path.read_bytes().count(SENTINEL) > before, patience=2)

    def stop(self):
        """Waits for what is still on its way, then ends."""
        assert await_true(self._send_sentinel), "packets are no longer taken"
        self.process.terminate()
        self.process.wait()

    def fields(self, display, *names):
        """Every occurrence of fields in the packets that a display filter lets pass, by name."""
        wanted = [part for name in names for part in ("-e", name)]
        separated = ["-E", "aggregator=\x1f", "-E", "separator=/t"]
        command = [*self.read_with, "-Y", display, "-T", "fields", *wanted, *separated]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        return {
            name: [field for row in rows for field in row[column].split("\x1f") if field]
            for column, name in enumerate(names)
        }


@pytest.fixture
def open_capture(require_tool, tmp_path):
    tshark = require_tool("tshark", "no capture is read")
    captures = []

    def open_one(port):
        captures.append(Capture(tshark, port, tmp_path / "capture.pcapng"))
        if reason := captures[-1].await_start():
            skip(f"no capture is read, capturing is not permitted here: {reason}")
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
    history.cluster.persist()
    history.write(500, prefix="more")
    capture = open_capture(int(history.cluster.connection_string.rpartition(":")[2]))
    seen = gocbcore.drain(history.cluster, buffer=20_000, **options)
    capture.stop()
    wrong = f"_ws.malformed || _ws.expert.severity >= {ERROR}"
    found = capture.fields(
        # Without the sentinels, which no login goes before.
        f"(couchbase || {wrong}) && !(couchbase.opcode == 0x0a)",
        "couchbase.opcode",
        "couchbase.extras.by_seqno",
        "_ws.expert.message",
        "_ws.expert.severity",
        "_ws.malformed",
    )
    assert not found["_ws.malformed"]
    assert not [s for s in found["_ws.expert.severity"] if int(re.match(r"\d+", s)[0]) >= ERROR]
    assert set(found["_ws.expert.message"]) <= UNDECODED
    opcodes = Counter(found["couchbase.opcode"])
    operations = Counter(line["op"] for line in seen.of("change"))
    told = {"0x57": "mutation", "0x58": "deletion", "0x59": "expiration"}
    assert {name: opcodes[code] for code, name in told.items()} == {
        name: operations[name] for name in told.values()
    }
    assert opcodes["0x56"] == len(seen.of("marker"))
    assert opcodes["0x5d"] > 1, "nothing was acknowledged"
    seqnos = Counter(found["couchbase.extras.by_seqno"])
    assert seqnos == Counter(str(line["seqno"]) for line in seen.of("change"))
