"""A sender and a receiver of arbitrary bytes: the cost of loopback itself."""

from __future__ import annotations

import socket
import sys

CHUNK = 1 << 20


def send(descriptor: int, size: int) -> None:
    """Sends this many bytes once it gets the start signal."""
    sys.stdin.readline()
    chunk = b"x" * CHUNK
    with socket.socket(fileno=descriptor) as connection:
        for _ in range(size // CHUNK + 1):
            connection.sendall(chunk)


def drain(port: int) -> None:
    """Receives until the end."""
    buffer = bytearray(CHUNK)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv_into(buffer):
            pass


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    {"send": send, "drain": drain}[what](*map(int, numbers))
