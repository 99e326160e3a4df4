"""A relay in front of a producer's node, which shortens the time between noops.

Some clients ask for noops every three minutes and let nobody change that. The relay changes it for
them, in packets of the same length, and has the cluster map lead to itself.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter

REQUEST_FROM_SERVER, RESPONSE_FROM_CLIENT, NOOP = 0x80, 0x81, 0x5C
HEADER = 24


class Relay:
    """Relays connections to the KV port of a producer with one node, and counts noops."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        # By opaque: the noops of the producer, and the client's answers.
        self.noops: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()
        self.answered_twice = threading.Event()
        own, node = (f'"kv":{number}'.encode() for number in (self.address[10:], port))
        assert len(own) == len(node), "ports that the system chooses have five digits"
        self._map = (node, own)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for source, target, change in (
                    (client, server, self._to_server),
                    (server, client, self._to_client),
                ):
                    arguments = (source, target, change)
                    threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, change) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as packets:
            while len(header := packets.read(HEADER)) == HEADER:
                (length,) = struct.unpack_from(">I", header, 8)
                target.sendall(change(header + packets.read(length)))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _to_server(self, packet: bytes) -> bytes:
        if packet[:2] == bytes([RESPONSE_FROM_CLIENT, NOOP]):
            self.answers[int.from_bytes(packet[12:16], "big")] += 1
            if len(self.answers) >= 2:
                self.answered_twice.set()
        return packet.replace(b"set_noop_interval180", b"set_noop_interval001")

    def _to_client(self, packet: bytes) -> bytes:
        if packet[:2] == bytes([REQUEST_FROM_SERVER, NOOP]):
            self.noops[int.from_bytes(packet[12:16], "big")] += 1
        return packet.replace(*self._map)
