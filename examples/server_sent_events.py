"""Changes as server-sent events, for browsers, with the standard library alone.

Each browser has its own stream. `EventSource` reconnects by itself and sends the ID of the last
event that it saw; the stream resumes after that event.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import dcp_rs

PASSWORD = os.environ.get("COUCHBASE_PASSWORD", "password")
KEPT = 1000  # checkpoints to resume from


def serve(client: dcp_rs.Client, port: int) -> None:
    """Serves until Ctrl-C."""
    checkpoints: dict[str, dcp_rs.Checkpoint] = {}
    numbers = count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            seen = checkpoints.get(self.headers.get("Last-Event-ID", ""))
            columns = ["op", "key", "collection", "seqno"]
            with client.stream(start=seen or "earliest", columns=columns) as stream:
                for batch in stream:
                    # One event for each batch, so that its ID is that of a checkpoint.
                    number = str(next(numbers))
                    checkpoints[number] = batch.checkpoint
                    checkpoints.pop(str(int(number) - KEPT), None)
                    self.send(f"id: {number}\ndata: {json.dumps(list(batch.rows()))}\n\n")

        def send(self, event: str) -> None:
            self.wfile.write(event.encode())

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR PORT")
    with dcp_rs.connect(sys.argv[1], username="Administrator", password=PASSWORD) as connected:
        try:
            serve(connected, int(sys.argv[2]))
        except KeyboardInterrupt:
            print("stopped")
