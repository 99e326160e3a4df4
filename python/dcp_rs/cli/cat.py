"""`dcp-rs cat`: a bucket's changes as lines."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from dcp_rs.checkpoint import Checkpoint
from dcp_rs.client import connect
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "cat",
        help="print a bucket's changes",
        description="Prints changes, a line each.",
    )
    parser.add_argument("connection_string", metavar="CONNSTR", help="couchbase://host[/bucket]")
    parser.add_argument("--bucket", help="bucket, where CONNSTR names none")
    parser.add_argument("--username", help="user name")
    parser.add_argument(
        "--password-env",
        metavar="NAME",
        default="DCP_RS_PASSWORD",
        help="environment variable with the password (DCP_RS_PASSWORD)",
    )
    parser.add_argument("--start", choices=["earliest", "latest"], default="earliest")
    parser.add_argument("--until", choices=["now"], help="stop with the changes there are now")
    parser.add_argument("--columns", help="columns, with commas between")
    parser.add_argument("--metadata", choices=["basic", "full"], default="basic")
    parser.add_argument("--scope", help="scope to read")
    parser.add_argument("--collections", help="collections to read, with commas between")
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="go on from the checkpoint in FILE if there is one, and keep it up to date",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    start: Any = options.start
    if options.checkpoint is not None and os.path.exists(options.checkpoint):  # noqa: PTH110
        start = Checkpoint.load(options.checkpoint)
    password = os.environ.get(options.password_env)
    if options.username is not None and password is None:
        raise ConfigError(f"the variable {options.password_env} holds no password")
    show = _as_json if options.json else _as_line
    with (
        connect(
            options.connection_string,
            bucket=options.bucket,
            username=options.username,
            password=password if options.username is not None else None,
        ) as client,
        client.stream(
            start=start,
            until=options.until,
            columns=_words(options.columns),
            metadata=options.metadata,
            scope=options.scope,
            collections=_words(options.collections),
        ) as stream,
    ):
        for batch in stream:
            for row in batch.rows():
                print(show(row))
            if options.checkpoint is not None:
                batch.checkpoint.save(options.checkpoint)


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _as_line(row: dict[str, object]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in row.items() if value is not None)


def _as_json(row: dict[str, object]) -> str:
    return json.dumps({name: _plain(value) for name, value in row.items()})


def _text(value: object) -> str:
    text = str(_plain(value))
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, int | str | dict) or value is None:
        return value
    return value.isoformat()  # type: ignore[attr-defined]  # a datetime is all that is left
