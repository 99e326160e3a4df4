"""Results on standard output, progress on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType


def write(chunks: Iterable[bytes], *, durably: bool = False) -> None:
    """Writes to standard output and flushes it.

    Args:
        chunks: What to write.
        durably: Whether to sync it to disk, if it goes to a file: a checkpoint must not count what
            could still be lost.
    """
    sys.stdout.flush()
    output = sys.stdout.buffer
    output.writelines(chunks)
    output.flush()
    if durably:
        sync()


def sync() -> None:
    """Syncs what was written to disk, if it went to a file."""
    output = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(output).st_mode):
        os.fsync(output)


def width() -> int | None:
    """Returns the width of the terminal; `None` if standard output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_records(
    columns: Sequence[str], records: Iterable[dict[str, object]], *, as_json: bool
) -> None:
    """Prints records: a JSON line for each, or a table of `columns`."""
    if as_json:
        write(f"{json.dumps(record)}\n".encode() for record in records)
        return
    rows = [[_cell(record[name]) for name in columns] for record in records]
    are_numbers = [
        any(cell.isdecimal() for cell in column) for column in zip(*rows, strict=True)
    ] or [False] * len(columns)
    table = [[name.replace("_", " ").upper() for name in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            f"{cell:>{width}}" if is_number else f"{cell:<{width}}"
            for cell, width, is_number in zip(line, widths, are_numbers, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def print_picture(picture: RenderableType) -> None:
    """Prints a rendered picture, without colours unless on a terminal."""
    from rich.console import Console

    Console(highlight=False, width=width() or 100).print(picture)


def print_line(line: str) -> None:
    """Prints a line to standard error, into which no thread prints another one."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Reporter:
    """Prints a progress line: in place on a terminal, about once a second elsewhere.

    If it cannot be printed, for example because its reader has closed the pipe, the work goes on.

    Args:
        in_place: Whether a line may replace the one before, and be cut.
    """

    def __init__(self, *, in_place: bool = True) -> None:
        self._is_terminal = in_place and sys.stderr.isatty()
        self._last = time.monotonic()
        self._is_open = False

    def is_due(self) -> bool:
        """Whether another line is due."""
        return time.monotonic() - self._last >= (0.1 if self._is_terminal else 1.0)

    def show(self, line: str) -> None:
        """Shows a temporary line."""
        self._last = time.monotonic()
        try:
            if self._is_terminal:
                cells = shutil.get_terminal_size().columns - 1
                self._is_open = True
                print(f"\r{line[:cells]}\x1b[K", end="", file=sys.stderr, flush=True)
            else:
                print_line(line)
        except OSError:
            # Nobody reads it any more, which is no reason to stop.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def finish(self, line: str) -> None:
        """Shows the last line, which stays."""
        self.show(line)
        self.close()

    def close(self) -> None:
        """Ends the line that is being shown."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                print(file=sys.stderr, flush=True)
