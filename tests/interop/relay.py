"""A relay in front of a cluster's node, which shortens the time between noops.

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
    """Relays connections to the ports of a cluster with one node, and counts noops."""

    def __init__(self, kv_port: int, management_port: int) -> None:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        own_kv, own_management = (each.getsockname()[1] for each in listeners)
        self.address = f"127.0.0.1:{own_kv}"
        self.management_url = f"http://127.0.0.1:{own_management}"
        self._sockets: list[socket.socket] = listeners
        # By opaque: the noops of the cluster, and the client's answers.
        self.noops: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()
        self.answered_twice = threading.Event()
        # What cluster maps say, and what they are to say.
        self._map = [
            (f'"{service}":{port}'.encode(), f'"{service}":{own}'.encode())
            for service, port, own in (
                ("kv", kv_port, own_kv),
                ("mgmt", management_port, own_management),
            )
        ]
        for text, other in self._map:
            assert len(text) == len(other), "ports that the system chooses have five digits"
        kv = (self._copy_packets, self._to_server), (self._copy_packets, self._to_client)
        management = (self._copy_text, None), (self._copy_text, self._lead_here)
        self._listen(listeners[0], kv_port, *kv)
        self._listen(listeners[1], management_port, *management)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _listen(self, listener, port, to_server, to_client) -> None:
        arguments = (listener, port, to_server, to_client)
        threading.Thread(target=self._accept, args=arguments, daemon=True).start()

    def _accept(self, listener, port, to_server, to_client) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                self._sockets += [client, server]
                for source, target, (copy, change) in (
                    (client, server, to_server),
                    (server, client, to_client),
                ):
                    arguments = (source, target, change)
                    threading.Thread(target=copy, args=arguments, daemon=True).start()

    @staticmethod
    def _copy_packets(source: socket.socket, target: socket.socket, change) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as packets:
            while len(header := packets.read(HEADER)) == HEADER:
                (length,) = struct.unpack_from(">I", header, 8)
                target.sendall(change(header + packets.read(length)))
        _shut_down(source, target)

    @staticmethod
    def _copy_text(source: socket.socket, target: socket.socket, change) -> None:
        with contextlib.suppress(OSError):
            held = b""
            while data := source.recv(1 << 16):
                data, held = change(held + data) if change else (data, b"")
                target.sendall(data)
        _shut_down(source, target)

    def _lead_here(self, text: bytes) -> tuple[bytes, bytes]:
        """Changes ports; gives apart what may be the beginning of one."""
        for each in self._map:
            text = text.replace(*each)
        longest = max(len(wanted) for wanted, _ in self._map)
        for kept in range(min(longest - 1, len(text)), 0, -1):
            if any(wanted.startswith(text[-kept:]) for wanted, _ in self._map):
                return text[:-kept], text[-kept:]
        return text, b""

    def _to_server(self, packet: bytes) -> bytes:
        if packet[:2] == bytes([RESPONSE_FROM_CLIENT, NOOP]):
            self.answers[int.from_bytes(packet[12:16], "big")] += 1
            if len(self.answers) >= 2:
                self.answered_twice.set()
        return packet.replace(b"set_noop_interval180", b"set_noop_interval001")

    def _to_client(self, packet: bytes) -> bytes:
        if packet[:2] == bytes([REQUEST_FROM_SERVER, NOOP]):
            self.noops[int.from_bytes(packet[12:16], "big")] += 1
        for each in self._map:
            packet = packet.replace(*each)
        return packet


def _shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
