"""A small HTTP server on a thread of its own, for probes and scrapes.

It answers GET and HEAD, reads no bodies, and closes each connection after one answer. What a client
can make it hold is bounded: bytes of a request, seconds and connections. If there are too many
connections, the oldest makes room, so that a probe is answered whatever others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from dcp_rs import _checks
from dcp_rs._libraries import require
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("dcp_rs.listener")

# Bytes of a request line and its headers.
_MAX_HEAD = 8 * 1024
# Seconds from the connection to the end of its answer.
_PATIENCE = 5.0
_MAX_CONNECTIONS = 32
# Of those that wait to be accepted.
_BACKLOG = 128
# Turns of the loop in which a connection that was accepted begins, or one that is aborted ends.
_TURNS = 5
_HOST = "127.0.0.1"


class Request(NamedTuple):
    """What is asked for.

    Attributes:
        path: The path, without the query.
        query: The query, as it was sent.
        accept: The header `Accept`; empty if there is none.
    """

    path: str
    query: str
    accept: str


class Answer(NamedTuple):
    """What is answered."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class Listener:
    """Answers HTTP requests until it is closed.

    Args:
        address: `host:port`, `[address]:port` for IPv6, or a port of 127.0.0.1. Port 0 is any free
            one.
        answer: Answers a request, on the listener's thread.

    Raises:
        ConfigError: The address is none, or cannot be listened on.
    """

    def __init__(self, address: str, answer: Callable[[Request], Answer]) -> None:
        self._answer = answer
        self._socket = _bound(*parse_address(address))
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._connections: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="dcp_rs-listener", daemon=True)
        self._thread.start()
        _log.info("listens on %s", self.url, extra=about("listening", url=self.url))

    def close(self) -> None:
        """Stops listening, and drops the connections."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=_MAX_HEAD, backlog=_BACKLOG
        )
        await self._over.wait()
        # A server that is closed drops what it has accepted and not begun, without closing it.
        self._loop.remove_reader(self._socket)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        # A transport that is aborted closes its socket in a later turn.
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a connection has a task")
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        self._connections[task] = None
        try:
            async with asyncio.timeout(_PATIENCE):
                writer.write(self._answered(await _head(reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            # The client went away, was too slow, or made room.
            writer.transport.abort()
        finally:
            self._connections.pop(task, None)

    def _answered(self, head: bytes | None) -> bytes:
        """Returns the whole answer to a request; `None` is one that is too long."""
        has_body, more = True, ""
        if head is None:
            answer = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif (parsed := _parsed_head(head)) is None:
            answer = _plain(HTTPStatus.BAD_REQUEST)
        else:
            method, request = parsed
            has_body = method != "HEAD"
            if method in {"GET", "HEAD"}:
                answer = self._safely(request)
            else:
                answer, more = _plain(HTTPStatus.METHOD_NOT_ALLOWED), "Allow: GET, HEAD\r\n"
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
            f"Cache-Control: no-store\r\nConnection: close\r\n{more}\r\n"
        )
        return lines.encode() + (answer.body if has_body else b"")

    def _safely(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        except Exception:  # noqa: BLE001 - it is logged
            _log.exception("a request could not be answered", extra=about("request_failed"))
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


def not_found(paths: list[str]) -> Answer:
    """Returns the answer to a request for something else."""
    return Answer(HTTPStatus.NOT_FOUND, f"there are {', '.join(paths)}\n".encode())


def _plain(status: HTTPStatus) -> Answer:
    return Answer(status, f"{status.phrase}\n".encode())


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """Reads the request line and the headers; `None` if they are too long."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None


def _parsed_head(head: bytes) -> tuple[str, Request] | None:
    """Returns the method and the request; `None` if it is no request of HTTP/1."""
    line, *headers = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        return None
    named = (header.partition(":") for header in headers)
    accept = [value.strip() for name, _, value in named if name.lower() == "accept"]
    path, _, query = parts[1].partition("?")
    return parts[0], Request(path, query, ",".join(accept))


def parse_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of an address to listen on.

    Raises:
        ConfigError: It is none.
    """
    _checks.text("listen", address)
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else _HOST
    is_port = port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not host or not is_port:
        raise ConfigError(
            "is not an address such as 127.0.0.1:9108; 0.0.0.0:9108 is reached from elsewhere",
            option="listen",
            value=address,
        )
    return host, int(port)


def check_listen(address: str) -> None:
    """Checks what listening needs: an address and a library.

    Raises:
        ConfigError: The address is none, or the library is too old.
        ImportError: The library is not installed.
    """
    parse_address(address)
    require("listen", "prometheus_client.exposition", "prometheus")


def check_address(address: str) -> None:
    """Checks that an address can be listened on now.

    Raises:
        ConfigError: It cannot.
    """
    _bound(*parse_address(address)).close()


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
            # Bound sockets may share a port until one of them listens.
            found.listen(_BACKLOG)
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        advice = {
            errno.EADDRINUSE: f"port {port} of {host} is in use: choose another one, or end what"
            " listens there",
            errno.EADDRNOTAVAIL: "this machine does not have the address",
            errno.EACCES: "the user may not listen there: choose a port above 1023",
        }
        why = advice.get(number or 0) or f"cannot be listened on: {error}"
        raise ConfigError(why, option="listen", value=f"{host}:{port}") from error
    return found
