"""A proxy before an HTTP server that fails some requests, each in one of the ways storage fails."""

import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import unescape

# Headers that are of a connection.
_OWN = {"connection", "expect", "transfer-encoding", "content-length"}
KINDS = ("refused", "slow", "twice", "lost", "throttled")


class FaultyProxy:
    """Forwards requests, and fails one in so many.

    Args:
        server: Address of the server.
        seed: Chooses the requests and how they fail.
        one_in: Of how many requests one fails; 0 for none.
    """

    def __init__(self, server, seed=0, one_in=20):
        self.server = urlsplit(server)
        self.chance, self.one_in = random.Random(seed), one_in
        self.failed = dict.fromkeys(KINDS, 0)
        # Status and code to answer all requests with, and whether to refuse those that write.
        self.refuse, self.refuse_writes = None, False
        # A REST catalog of Iceberg, whose paths no bucket has.
        self.catalog = None
        # Whether the server is one of Google's JSON API, which has not all of the XML API.
        self.takes_json = False
        # Whether to hang up on all.
        self.is_away = False
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_one(self):
                with contextlib.suppress(OSError):
                    proxy._answer(self)

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.handle_one)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_):
                pass  # A client that was killed.

        self._http = Server(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]

    def _fault(self):
        with self._lock:
            if not self.one_in or self.chance.randrange(self.one_in):
                return None
            kind = self.chance.choice(KINDS)
            self.failed[kind] += 1
            return kind

    def _answer(self, request):
        body = _body_of(request)
        if self._refuse(request):
            return
        fault = "refused" if self.is_away else self._fault()
        if fault == "refused":
            self._hang_up(request)
            return
        if fault == "throttled":
            request.send_response_only(503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if fault == "slow":
            time.sleep(0.3)
        answer = self._forward(request, body)
        if fault == "twice":
            answer = self._forward(request, body)
        if fault == "lost":
            self._hang_up(request)
            return
        status, headers, data = answer
        request.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                request.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        is_head = request.command == "HEAD"
        request.send_header("Content-Length", length if is_head and length else str(len(data)))
        request.end_headers()
        if not is_head:
            request.wfile.write(data)

    def _refuse(self, request):
        refuse = self.refuse
        if self.refuse_writes and request.command not in {"GET", "HEAD"}:
            refuse = 403, "AccessDenied"
        if refuse is None:
            return False
        status, code = refuse
        text = f"<Error><Code>{code}</Code></Error>".encode()
        request.send_response_only(status)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)
        return True

    def _hang_up(self, request):
        request.close_connection = True
        request.connection.close()

    def _forward(self, request, body):
        is_of_catalog = self.catalog is not None and request.path.startswith("/v1/")
        server = urlsplit(self.catalog) if is_of_catalog else self.server
        connection = http.client.HTTPConnection(server.hostname, server.port, timeout=60)
        with contextlib.closing(connection):
            headers = {
                name: value
                for name, value in request.headers.items()
                if name.lower() not in _OWN | ({"host"} if self.takes_json else set())
            }
            method, path = request.command, request.path
            is_json = self.takes_json and method == "PUT" and not path.startswith("/upload/")
            if is_json:
                method, path = "POST", _upload(path, headers)
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            status, headers, data = answer.status, answer.getheaders(), answer.read()
            if is_json and status == http.HTTPStatus.OK:
                made = json.loads(data)
                headers += [("ETag", made["etag"]), ("x-goog-generation", made["generation"])]
            if self.takes_json and (after := parse_qs(urlsplit(path).query).get("start-after")):
                data = _listed(data, after[0])
            return status, headers, data

    def run(self):
        """Serves, and takes settings from standard input, a JSON document a line."""
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        sys.stdout.write(f"{self.port}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            for name, value in json.loads(line).items():
                setattr(self, name, value)
            sys.stdout.write(f"{json.dumps(self.failed)}\n")
            sys.stdout.flush()


def _upload(path, headers):
    """Gives the path of the JSON API for a put of the XML API."""
    _, bucket, name = path.split("/", 2)
    only_if = headers.get("x-goog-if-generation-match")
    condition = "" if only_if is None else f"&ifGenerationMatch={only_if}"
    return f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}{condition}"


def _listed(data, after):
    """Gives a list of objects without those whose names are not after one."""

    def kept(found):
        return found[0] if unescape(found[1].decode()) > after else b""

    return re.sub(rb"<Contents><Key>(.*?)</Key>.*?</Contents>", kept, data, flags=re.DOTALL)


def _body_of(request):
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    parts = []
    while size := int(request.rfile.readline().partition(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    while request.rfile.readline().strip():
        pass
    return b"".join(parts)


class Faults:
    """A proxy in a process of its own: a library may wait for an answer and hold the GIL.

    Args:
        server: Address of the server.
        settings: Attributes of the proxy.
    """

    def __init__(self, server, **settings):
        self._process = subprocess.Popen(
            [sys.executable, __file__, server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.set(**settings)

    def set(self, **settings):
        """Changes attributes of the proxy; gives how many requests it has failed, by kind."""
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    FaultyProxy(sys.argv[1], one_in=0).run()
