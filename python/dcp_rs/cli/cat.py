"""`dcp-rs cat`: a bucket's changes as lines."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from dcp_rs import _dcp_rs
from dcp_rs.cli._options import PASSWORD_VARIABLE, add_password, password
from dcp_rs.client import ConnectionOptions, connect
from dcp_rs.exceptions import ConfigError
from dcp_rs.stores import FileStore

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_STREAM = _dcp_rs.defaults()["stream"]
_CONNECTION = (
    "bucket",
    "username",
    "tls_ca",
    "tls_certificate",
    "tls_key",
    "network",
    "connect_timeout",
)
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
    parser.add_argument("connection_string", metavar="CONNSTR", help="couchbase://host[/bucket]")
    parser.add_argument("--bucket", help="bucket, where CONNSTR names none")
    parser.add_argument("--username", help="user name")
    add_password(parser, PASSWORD_VARIABLE)
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file with the authorities to trust (the system's)"
    )
    parser.add_argument(
        "--tls-certificate", metavar="FILE", help="PEM chain of a client, in place of a user"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key")
    parser.add_argument(
        "--network",
        choices=["auto", "default", "external"],
        help=f"which of the nodes' addresses to use ({ConnectionOptions.network})",
    )
    parser.add_argument(
        "--connect-timeout",
        metavar="SECONDS",
        type=float,
        help=f"longest time for a connection to be made ({ConnectionOptions.connect_timeout:g})",
    )
    parser.add_argument("--start", choices=["earliest", "latest"])
    parser.add_argument("--until", choices=["now"], help="stop with the changes there are now")
    parser.add_argument(
        "--columns",
        type=_columns,
        help=f"basic, full, or columns with commas between ({_STREAM['columns']})",
    )
    parser.add_argument("--scope", help="scope to read")
    parser.add_argument(
        "--collections", type=_words, help="collections to read, with commas between"
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
    secret = _password(options)
    connection = _given(options, _CONNECTION)
    if secret is not None and options.password_file is not None:
        # Read again for each connection: the password in it may change.
        connection["password_file"] = options.password_file
    else:
        connection["password"] = secret
    reading = _given(options, _READING)
    if kept is not None:
        reading["start"] = kept
    with (
        connect(options.connection_string, **connection) as client,
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


def _password(options: argparse.Namespace) -> str | None:
    found = password(options)
    if found is None and options.username is not None:
        found = os.environ.get(PASSWORD_VARIABLE)
        if found is None:
            raise ConfigError(
                f"there is no password for the user: set {PASSWORD_VARIABLE} to it, name another"
                " variable with --password-env, or a file with --password-file"
            )
    return found if options.username is not None else None


def _hand_over(*, durably: bool) -> None:
    """Hands over what was printed: a checkpoint must not count what could still be lost."""
    sys.stdout.flush()
    if durably:
        output = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(output).st_mode):
            os.fsync(output)


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Gives the options that are on the command line: others have the defaults of the package."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _columns(text: str) -> str | list[str]:
    return text if text in {"basic", "full"} else _words(text)


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
