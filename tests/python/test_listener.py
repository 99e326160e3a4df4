"""The HTTP server of probes and scrapes, and what hostile clients can make of it."""

import contextlib
import gc
import socket
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus

import pytest

from dcp_rs import _listener
from dcp_rs._listener import Answer, Listener
from dcp_rs.exceptions import ConfigError
from lag import until


@pytest.fixture
def seen():
    return []


@pytest.fixture
def listener(seen):
    def answer(request):
        seen.append(request)
        if request.path == "/wrong":
            raise ValueError("canary of an error")
        return Answer(HTTPStatus.OK, b"x" * (1 << 22) if request.path == "/long" else b"ok\n")

    with contextlib.closing(Listener("127.0.0.1:0", answer)) as running:
        yield running


def connected(listener):
    host, _, port = listener.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def asked(listener, sent):
    """Sends bytes, and gives the first line of the answer, or nothing."""
    with connected(listener) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        return connection.makefile("rb").readline().decode().strip()


def get(listener, path="/", **headers):
    request = urllib.request.Request(f"{listener.url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as found:
        return found.status, found.read()


def test_a_request_has_its_path_query_and_accept(listener, seen):
    assert get(listener, "/a?b=c%20d", Accept="text/plain;q=0.5") == (200, b"ok\n")
    assert seen == [("/a", "b=c%20d", "text/plain;q=0.5")]
    assert asked(listener, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n") == "HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"GET /\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2_000 + b"\r\n", 431),
        (b"GET /wrong HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_what_is_no_request_is_refused(listener, sent, status):
    assert asked(listener, sent) in {f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", None, ""}
    assert get(listener) == (200, b"ok\n")


def test_a_client_that_is_slow_is_dropped(listener, monkeypatch):
    monkeypatch.setattr(_listener, "_PATIENCE", 0.5)
    with connected(listener) as silent, connected(listener) as slow, connected(listener) as deaf:
        # Four megabytes that nobody reads.
        deaf.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 10:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begun < 5
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""
        assert get(listener) == (200, b"ok\n")
        until(lambda: not listener._connections)


def test_many_connections_leave_room_for_another(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(3 * _listener._MAX_CONNECTIONS):
            stack.enter_context(connected(listener))
        begun = time.monotonic()
        assert get(listener) == (200, b"ok\n")
        assert time.monotonic() - begun < _listener._PATIENCE / 2
        assert len(listener._connections) <= _listener._MAX_CONNECTIONS


def test_closing_leaves_no_socket():
    for _ in range(20):
        running = Listener("0", lambda _: Answer(HTTPStatus.OK, b""))
        with connected(running), connected(running):
            running.close()
    # An unclosed socket warns when it is collected, and a warning is an error.
    gc.collect()


def test_closing_ends_the_thread_and_frees_the_port(listener):
    with connected(listener):
        pass
    address = listener.url.removeprefix("http://")
    with pytest.raises(ConfigError, match=r"^listen: .*in use"):
        Listener(address, None)
    listener.close()
    assert "dcp_rs-listener" not in {thread.name for thread in threading.enumerate()}
    again = Listener(address, lambda _: Answer(HTTPStatus.OK, b"again"))
    assert get(again) == (200, b"again")
    again.close()
    # For the fixture, which closes it once more.
    listener.close = lambda: None


@pytest.mark.parametrize(
    "address", ["", "here", ":9108", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "::1", 9108]
)
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match=r"^listen: "):
        Listener(address, None)


@pytest.mark.parametrize("address", ["192.0.2.1:9108", "no-such-host.invalid:9108"])
def test_an_address_of_elsewhere_is_refused(address):
    with pytest.raises(ConfigError, match=r"^listen: "):
        Listener(address, None)


def test_a_port_alone_is_of_loopback():
    with contextlib.closing(Listener("0", lambda _: Answer(HTTPStatus.OK, b""))) as found:
        assert found.url.startswith("http://127.0.0.1:")
