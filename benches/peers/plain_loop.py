"""The loop of a simple Python program without a library.

One node, one socket, one message at a time, unpacked and counted. Input and output are as for the
other clients (`count.rs`). With `compressed` in its job, it requests compressed values and
decompresses each of them with python-snappy.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

HEADER = struct.Struct(">BBHBBHIIQ")
HELLO, SASL_AUTH, SELECT_BUCKET, ALL_VB_SEQNOS = 0x1F, 0x21, 0x89, 0x48
DCP_OPEN, DCP_CONTROL, STREAM_REQ, STREAM_END, BUFFER_ACK = 0x50, 0x5E, 0x53, 0x55, 0x5D
MUTATION, DELETION, EXPIRATION, NOOP = 0x57, 0x58, 0x59, 0x5C
# What flow control counts: messages of streams.
COUNTED = {0x55, 0x56, 0x57, 0x58, 0x59, 0x5F, 0x64, 0x65}
CHANGES = {MUTATION, DELETION, EXPIRATION}
SNAPPY, SNAPPY_FEATURE = 0x02, 0x0A


def request(
    opcode: int, key: bytes = b"", *, extras: bytes = b"", value: bytes = b"", vbucket: int = 0
) -> bytes:
    """Encodes a request, with the vBucket as its opaque."""
    length = len(extras) + len(key) + len(value)
    header = HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, length, vbucket, 0)
    return header + extras + key + value


def call(connection: socket.socket, packet: bytes) -> bytes:
    """Sends a request; returns the body of the response."""
    connection.sendall(packet)
    header = receive(connection, 24)
    _, opcode, _, _, _, status, length, _, _ = HEADER.unpack(header)
    body = receive(connection, length)
    if status:
        sys.exit(f"request {opcode:#x} is refused: {status:#x}")
    return body


def receive(connection: socket.socket, length: int) -> bytes:
    """Reads exactly this many bytes."""
    parts = b""
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            sys.exit("the node closed the connection")
        parts += part
    return parts


def open_streams(connection: socket.socket, job: dict) -> int:
    """Logs in and requests all streams; returns their number."""
    compressed = job.get("compressed", False)
    features = (0x0B, 0x12, 0x06, 0x02, *([SNAPPY_FEATURE] if compressed else []))
    codes = struct.pack(f">{len(features)}H", *features)
    call(connection, request(HELLO, b"plain-loop", value=codes))
    secret = f"\0{job['username']}\0{job['password']}".encode()
    call(connection, request(SASL_AUTH, b"PLAIN", value=secret))
    call(connection, request(SELECT_BUCKET, job["bucket"].encode()))
    call(connection, request(DCP_OPEN, b"plain-loop", extras=struct.pack(">II", 0, 1)))
    buffer = str(job["buffer"]).encode()
    call(connection, request(DCP_CONTROL, b"connection_buffer_size", value=buffer))
    # Without this, only the default collection is streamed.
    call(connection, request(DCP_CONTROL, b"enable_noop", value=b"true"))
    if compressed:
        call(connection, request(DCP_CONTROL, b"force_value_compression", value=b"true"))
    seqnos = call(connection, request(ALL_VB_SEQNOS, extras=struct.pack(">I", 1)))
    ends = list(struct.iter_unpack(">HQ", seqnos))
    requests = [
        request(
            STREAM_REQ,
            extras=struct.pack(">IIQQQQQ", 0, 0, 0, end, 0, 0, 0),
            vbucket=vbucket,
        )
        for vbucket, end in ends
    ]
    connection.sendall(b"".join(requests))
    return len(ends)


class Count:
    """Totals."""

    def __init__(self, connection: socket.socket, streams: int, *, compressed: bool) -> None:
        self.connection, self.streams = connection, streams
        self.decompress = None
        if compressed:
            import snappy

            self.decompress = snappy.decompress
        self.changes = self.size = self.unacknowledged = 0

    def read(self, buffer: int) -> None:
        """Reads until all streams have ended."""
        pending = b""
        while self.streams:
            received = self.connection.recv(1 << 18)
            if not received:
                sys.exit("the node closed the connection")
            pending += received
            pending = pending[self.take(pending) :]
            if self.unacknowledged >= buffer // 2:
                ack = struct.pack(">I", self.unacknowledged)
                self.connection.sendall(request(BUFFER_ACK, extras=ack))
                self.unacknowledged = 0

    def take(self, pending: bytes) -> int:
        """Processes the whole messages; returns their length in bytes."""
        at, have = 0, len(pending)
        unpack, counted, of_changes = HEADER.unpack_from, COUNTED, CHANGES
        decompress = self.decompress
        while have - at >= 24:
            _, opcode, key_len, extras_len, datatype, status, length, opaque, _ = unpack(
                pending, at
            )
            end = at + 24 + length
            if end > have:
                break
            if opcode in of_changes:
                key = pending[at + 24 + extras_len : at + 24 + extras_len + key_len]
                value = pending[at + 24 + extras_len + key_len : end]
                if decompress is not None and datatype & SNAPPY:
                    value = decompress(value)
                self.changes += 1
                self.size += len(key) + len(value)
            else:
                self.take_other(opcode, status, opaque)
            if opcode in counted:
                self.unacknowledged += end - at
            at = end
        return at

    def take_other(self, opcode: int, status: int, opaque: int) -> None:
        """Processes a message that is not a change."""
        if opcode == STREAM_END:
            self.streams -= 1
        elif opcode == STREAM_REQ and status:
            sys.exit(f"a stream is refused: {status:#x}")
        elif opcode == NOOP:
            self.connection.sendall(HEADER.pack(0x81, NOOP, 0, 0, 0, 0, 0, opaque, 0))


def main() -> None:
    """Counts changes."""
    job = json.loads(sys.stdin.readline())
    host, _, port = job["nodes"][0].rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started = time.perf_counter()
        streams = open_streams(connection, job)
        count = Count(connection, streams, compressed=job.get("compressed", False))
        count.read(job["buffer"])
        seconds = time.perf_counter() - started
    counted = {
        "line": "counted",
        "changes": count.changes,
        "bytes": count.size,
        "seconds": seconds,
    }
    print(json.dumps(counted), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
