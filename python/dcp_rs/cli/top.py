"""`dcp-rs top`: show a bucket and its reader, live in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from typing import TYPE_CHECKING, Any

import click

from dcp_rs.cli._options import command, connection_options, output_options, reading_options
from dcp_rs.cli._output import print_picture, write
from dcp_rs.cli._reader import reader_options
from dcp_rs.cli._top import Monitor, Sample, live_picture, picture
from dcp_rs.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcp_rs.cli._reader import Reader
    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.stream import ChangeStream

_QUIT = frozenset("qQ")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Also false if it is not a number.
    if not 0.1 <= seconds <= 86_400:
        raise click.BadParameter(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return seconds


@command()
@connection_options
@reader_options(required=False)
@click.option(
    "--interval",
    type=_interval,
    default=1.0,
    metavar="SECONDS",
    help="Refresh interval (1).",
)
@click.option("--once", is_flag=True, help="Print a single snapshot and exit.")
@reading_options(
    only=(
        "start", "vbuckets", "collections", "include", "persisted_only", "priority",
        "backfill_order", "on_rollback",
    )
)  # fmt: skip
@output_options
def top(
    connection: ConnectionOptions,
    reader: Reader | None,
    interval: float,
    reading: dict[str, Any],
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Show rates, lag, states and nodes, live; press q to quit.

    Reads the bucket without its documents, from now on or from --start. Shows the rates of writes
    (seqnos) and reads (changes), and how far it is behind, or the reader that is given. As JSON,
    prints a line for each interval.
    """
    reading.setdefault("start", "latest")
    with (
        Client(connection) as client,
        # The rows are counted and dropped: the server sends no documents for these columns.
        client.stream(columns=["seqno"], key_type="binary", **reading) as stream,
        _drained(stream) as failure,
    ):
        monitor = Monitor(client, stream, _seqnos_of(reader, client))
        if not once and not as_json and sys.stdout.isatty():
            _run(monitor, failure, interval)
        else:
            show = _print_json if as_json else _print_picture
            while not failure.wait(interval):
                show(monitor.sample())
                if once:
                    break
        failure.check()


def _seqnos_of(reader: Reader | None, client: Client) -> Callable[[], dict[int, int]] | None:
    if reader is None:
        return None
    # Fails now, not at the first refresh, if the reader cannot be read.
    reader.seqnos(client)
    return lambda: reader.seqnos(client)


def _print_json(sample: Sample) -> None:
    write([f"{json.dumps(sample.record())}\n".encode()])


def _print_picture(sample: Sample) -> None:
    print_picture(picture(sample))
    sys.stdout.flush()


class _Failure:
    """Why the stream ended, if it did."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self.error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self._is_over.set()

    def wait(self, seconds: float) -> bool:
        return self._is_over.wait(seconds)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def _drained(stream: ChangeStream) -> Iterator[_Failure]:
    """Reads a stream on a thread, batch by batch: rows are counted by the stream."""
    failure = _Failure()

    def read() -> None:
        try:
            for _ in stream:
                pass
        except Exception as error:  # noqa: BLE001 - raised on the main thread
            failure.end(error)
        else:
            failure.end(None)

    thread = threading.Thread(target=read, name="dcp-rs top", daemon=True)
    thread.start()
    try:
        yield failure
    finally:
        stream.close()
        thread.join(5)


def _run(monitor: Monitor, failure: _Failure, interval: float) -> None:
    """Draws until q is pressed or the stream ends."""
    from rich.live import Live

    # By default it would end the process and leave the terminal without echo, on the other screen.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _keys() as pressed, Live(screen=True, auto_refresh=False, redirect_stderr=False) as live:
        # The first one soon, but not at once: a rate needs some time.
        due = time.monotonic() + min(interval, 0.3)
        while not failure.wait(0):
            if pressed(min(max(due - time.monotonic(), 0), 0.2)) in _QUIT:
                return
            if time.monotonic() >= due:
                live.update(live_picture(monitor.sample()), refresh=True)
                due = time.monotonic() + interval


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Returns a function that waits for a key press, without Enter; `""` if there is none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return os.read(file, 1).decode("ascii", "replace") if ready else ""

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
