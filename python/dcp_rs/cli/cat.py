"""`dcp-rs cat`: a bucket's changes as lines."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from dcp_rs import _dcp_rs
from dcp_rs.cli._connection import add_connection, connected, given, words
from dcp_rs.stores import FileStore

if TYPE_CHECKING:
    import argparse

_STREAM = _dcp_rs.defaults()["stream"]
_READING = ("start", "until", "columns", "scope", "collections")

# How bytes that are not UTF-8 begin in a line.
_BYTES = '{"base64":'


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "cat",
        help="print a bucket's changes",
        description="Prints changes, a line each. Keys and values that are not UTF-8 are shown as"
        ' {"base64":"..."}, with --json too. A checkpoint is stored once its rows are written, to'
        " disk if standard output is a file.",
    )
    add_connection(parser)
    parser.add_argument("--start", choices=["earliest", "latest"])
    parser.add_argument("--until", choices=["now"], help="stop with the changes there are now")
    parser.add_argument(
        "--columns",
        type=_columns,
        help=f"basic, full, or columns with commas between ({_STREAM['columns']})",
    )
    parser.add_argument("--scope", help="scope to read")
    parser.add_argument(
        "--collections", type=words, help="collections to read, with commas between"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="go on from the checkpoint in FILE if there is one, and keep it up to date",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    store = None if options.checkpoint is None else FileStore(options.checkpoint)
    kept = None if store is None else store.load()
    show = _as_json if options.json else _as_line
    reading = given(options, _READING)
    if kept is not None:
        reading["start"] = kept
    with (
        connected(options) as client,
        client.stream(key_type="binary", **reading) as stream,
    ):
        if store is not None and kept is None and options.start == "latest":
            # A restart before the first change must not begin later than this start.
            store.save(stream.checkpoint())
        for batch in stream:
            for row in batch.rows():
                print(show(row))
            _hand_over(durably=store is not None)
            if store is not None:
                store.save(batch.checkpoint)
        if store is not None:
            # Past what the filter leaves out after the last row.
            store.save(stream.checkpoint())


def _hand_over(*, durably: bool) -> None:
    """Hands over what was printed: a checkpoint must not count what could still be lost."""
    sys.stdout.flush()
    if durably:
        output = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(output).st_mode):
            os.fsync(output)


def _columns(text: str) -> str | list[str]:
    return text if text in {"basic", "full"} else words(text)


def _as_line(row: dict[str, object]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in row.items() if value is not None)


def _as_json(row: dict[str, object]) -> str:
    return json.dumps({name: _plain(value) for name, value in row.items()})


def _text(value: object) -> str:
    """Text as it is where nobody can mistake it, and in JSON where not."""
    plain = _plain(value)
    if isinstance(plain, dict):
        return json.dumps(plain, separators=(",", ":"))
    text = str(plain)
    is_clear = text.isprintable() and " " not in text and not text.startswith(('"', _BYTES))
    return text if is_clear else json.dumps(text)


def base64_of(value: bytes) -> dict[str, str]:
    """Gives bytes as JSON has them."""
    return {"base64": base64.b64encode(value).decode()}


def _plain(value: object) -> object:
    """A value as JSON has it; bytes that are not UTF-8 as an object, which no text is."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64_of(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, int | str) or value is None:
        return value
    return value.isoformat()  # type: ignore[attr-defined]  # a datetime is all that is left
