"""A way to a cluster that somebody listens to."""

import select
import socket
import threading


class Tap:
    """A port that leads to a node and keeps what passes, one connection at a time."""

    def __init__(self, cluster):
        first = cluster.connection_string.partition("://")[2].partition(",")[0]
        host, _, port = first.rpartition(":")
        self._node = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._last = None
        self.sent = self.received = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def port(self):
        return self._listener.getsockname()[1]

    def _run(self):
        while True:
            client, address = self._listener.accept()
            with client:
                if address == self._last:
                    return
                with socket.create_connection(self._node) as node:
                    self._carry(client, node)

    def _carry(self, client, node):
        while True:
            for ready in select.select([client, node], [], [])[0]:
                try:
                    data = ready.recv(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    return
                if ready is client:
                    self.sent += data
                    node.sendall(data)
                else:
                    self.received += data
                    client.sendall(data)

    def close(self):
        with socket.socket() as last:
            last.bind(("127.0.0.1", 0))
            self._last = last.getsockname()
            last.connect(self._listener.getsockname())
            self._thread.join()
        self._listener.close()
