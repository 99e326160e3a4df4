"""Options that several commands share, with the names they have in Python."""

from __future__ import annotations

import functools
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs import _dcp_rs, _deprecated
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.connection import ConnectionOptions
from dcp_rs.documents import DocumentSchema
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dcp_rs.stores import FileStore

    Command = Callable[..., Any]
    Decorator = Callable[[Command], Command]

PASSWORD_VARIABLE = "DCP_RS_PASSWORD"  # noqa: S105 - the name of a variable

_STREAM = _dcp_rs.defaults()["stream"]


# ----- commands -----


class _ConnectionOption(click.Option):
    """An option that says how to connect, not what to do."""


class _Command(click.Command):
    """Lists the command's own options before those of its connection.

    Of an option that is given twice, click takes the last, as others do. Of two lists, that would
    leave out the first in silence.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        lists = [
            each for each in given if isinstance(each, click.Option) and each.metavar == "LIST"
        ]
        for option in lists:
            if lists.count(option) > 1 and not option.multiple:
                name = option.opts[0]
                text = f"{name}: is given twice: give it once, with commas between the values"
                raise click.UsageError(text, ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Connection options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                is_own = not isinstance(parameter, _ConnectionOption)
                sections["Options" if is_own else "Connection options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


command = functools.partial(click.command, cls=_Command)
_connection_option = functools.partial(click.option, cls=_ConnectionOption)


def is_about_connection(parameter: click.Parameter) -> bool:
    """Whether a parameter says how to connect, not what to do."""
    return isinstance(parameter, _ConnectionOption) or parameter.name == "connection_string"


def as_option(parameter: click.Parameter) -> click.Parameter:
    """Returns an option in place of an argument."""
    if not isinstance(parameter, click.Argument):
        return parameter
    name = str(parameter.name)
    kind = _ConnectionOption if is_about_connection(parameter) else click.Option
    what = "How to reach the cluster" if is_about_connection(parameter) else "What to write to"
    return kind(
        [f"--{name.replace('_', '-')}"],
        metavar=parameter.metavar,
        help=f"{what}, as for replicate.",
    )


# ----- values -----


def words(text: str) -> list[str]:
    """Splits a list at its commas."""
    return [word.strip() for word in text.split(",")]


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` up, whose range is not part of the help."""

    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdecimal()
        if not is_number or not least <= int(text) <= sys.maxsize:
            raise click.BadParameter(
                f"{text!r} is not a whole number from {least} to {sys.maxsize}"
            )
        return int(text)

    return parse


def vbucket_set(text: str) -> set[int]:
    """Parses vBucket numbers such as 0-63,70."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        are_numbers = all(each.isascii() and each.isdecimal() for each in (first, last))
        if not are_numbers or not int(first) <= int(last) <= 0xFFFF:
            raise click.BadParameter(f"{text!r} is not a list such as 0-63,70")
        found.update(range(int(first), int(last) + 1))
    return found


def _vbuckets(text: str) -> Share | list[int]:
    member, slash, of = text.partition("/")
    if not slash:
        return sorted(vbucket_set(text))
    if not all(each.isascii() and each.isdecimal() for each in (member, of)):
        raise click.BadParameter(f"{text!r} is not a member and the number of members, such as 0/3")
    try:
        return Share(int(member), int(of))
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _columns(text: str) -> str | list[str]:
    return text if text in {"basic", "full"} else words(text)


def moment(text: str) -> datetime:
    """Parses a time with its zone, such as 2026-01-31T00:00:00Z."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.utcoffset() is None:
        raise click.BadParameter(
            f"{text!r} is not a time with its zone, such as 2026-01-31T00:00:00Z"
        )
    return found


def _start(text: str) -> str | Checkpoint:
    if text in {"earliest", "latest"}:
        return text
    if not Path(text).exists():
        raise click.BadParameter(
            f"there is no file {text!r}: give earliest, latest or a file with a checkpoint"
        )
    return Checkpoint.load(text)


def file_name(text: str) -> str:
    """Refuses an empty file name, which would stand for the working folder, or for nothing."""
    if not text:
        raise click.BadParameter("must not be empty")
    return text


def specified(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that were given; the package has defaults for the others."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def with_options(decorators: Iterable[Any], take: Callable[[dict[str, Any]], None]) -> Decorator:
    """Adds options to a command; `take` turns their values into the command's arguments."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**options: Any) -> Any:
            take(options)
            return command(**options)

        made: Command = wrapped
        for decorator in reversed(list(decorators)):
            made = decorator(made)
        return made

    return decorate


# ----- output -----


def _take_output(options: dict[str, Any]) -> None:
    output, is_json = options.pop("output"), options.pop("json")
    if is_json and output == "table":
        raise click.UsageError("--json and --output table contradict each other")
    options["as_json"] = is_json or (
        not sys.stdout.isatty() if output is None else output == "json"
    )


# Passes `as_json` to the command.
output_options = with_options(
    [
        click.option(
            "--output",
            type=click.Choice(["table", "json"]),
            help="Tables or JSON lines (tables on a terminal, else JSON lines).",
        ),
        click.option("--json", is_flag=True, help="Short for --output json."),
    ],
    _take_output,
)


# ----- authentication -----


def password_options(otherwise: str, option: Callable[..., Any] = click.option) -> list[Any]:
    """Returns the options for a password."""
    return [
        option(
            "--password-env",
            metavar="NAME",
            help=f"Environment variable with the password; {otherwise} if not given.",
        ),
        option(
            "--password-file", type=Path, metavar="FILE", help="File that contains the password."
        ),
    ]


def call_options(error: ConfigError, commands: Iterable[click.Command]) -> ConfigError:
    """Makes an error call options as on the command line."""
    every = [each for of in commands for each in (of, *getattr(of, "commands", {}).values())]
    options = {
        name: option
        for command in every
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
        for name in (option.removeprefix("--").replace("-", "_"), str(parameter.name))
    }
    options["hash_key"] = "--hash-key-env"
    options |= {"connection_string": "CONNSTR", "target": "TARGET"}
    error._rename(options)  # noqa: SLF001
    return error


def password(password_env: str | None, password_file: Path | None) -> str | None:
    """Returns the password that the options name, or `None`.

    Names of variables and files are not shown: they may be the password itself, given by mistake.

    Raises:
        ConfigError: The variable or the file cannot be read.
    """
    return _secret(
        password_env, password_file, option_env="--password-env", option_file="--password-file"
    )


def _secret(
    variable: str | None, file: Path | None, *, option_env: str, option_file: str
) -> str | None:
    """Returns the secret in a variable or a file, or `None`."""
    if variable is not None and file is not None:
        raise click.UsageError(f"{option_env} and {option_file}: give one of them")
    if file is not None:
        return secret_in(file, option_file)
    if variable is not None:
        value = os.environ.get(variable)
        if value is None:
            raise ConfigError(
                "the variable is not set: set it, or check its name", option=option_env
            )
        return value
    return None


def secret_in(file: Path, option: str) -> str:
    """Returns the text of a file with a secret, without its last line break.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return file.read_text("utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"the file cannot be read: {why}", option=option) from None


def _of_user(password_env: str | None, password_file: Path | None) -> str:
    found = password(password_env, password_file)
    if found is None:
        found = os.environ.get(PASSWORD_VARIABLE)
    if found is None and sys.stdin.isatty():
        found = str(click.prompt("Password", hide_input=True, err=True))
    if found is None:
        raise ConfigError(
            f"the user needs a password: set {PASSWORD_VARIABLE}, name another variable with"
            " --password-env, or a file with --password-file",
            option="--username",
        )
    return found


def _take_connection(options: dict[str, Any]) -> None:
    names = ("password_env", "password_file")
    variable, file = (options.pop(name) for name in names)
    taken = {name: options.pop(name) for name in _CONNECTION}
    connection = specified(taken)
    passphrase = options.pop("tls_key_password_env")
    if passphrase is not None:
        connection["tls_key_password"] = os.environ.get(passphrase)
        if connection["tls_key_password"] is None:
            raise ConfigError("the variable is not set: set it", option="--tls-key-password-env")
    if not {"username", "tls_certificate", "token_file"} & connection.keys():
        raise ConfigError(
            f"no user is given: pass one, with the password in {PASSWORD_VARIABLE}, in"
            " another variable with --password-env or in a file with --password-file; or, with"
            " couchbases://, pass --token-file, or --tls-certificate and --tls-key",
            option="--username",
        )
    if {"username", "token_file"} <= connection.keys():
        raise ConfigError(
            "a token names its user: pass one of them", option=("--token-file", "--username")
        )
    if "username" in connection:
        secret = _of_user(variable, file)
        # A pipe, as the shell's <(...) is, has been read to its end.
        if file is None or not file.is_file():
            connection["password"] = secret
        else:
            # Read for each connection: the password in it may change.
            connection["password_file"] = file
    connection.setdefault("name", click.get_current_context().info_name or "dcp-rs")
    options["connection"] = ConnectionOptions(**connection)


_CONNECTION = {
    "connection_string": click.argument("connection_string", metavar="CONNSTR"),
    "bucket": _connection_option("--bucket", help="Bucket, if CONNSTR does not name it."),
    "username": _connection_option(
        "--username", help="User name, unless you use a client certificate."
    ),
    "token_file": _connection_option(
        "--token-file",
        metavar="FILE",
        help="File with a token (JWT), instead of a user; with couchbases:// only.",
    ),
    "tls_ca": _connection_option(
        "--tls-ca",
        metavar="FILE",
        help="PEM file with authorities to trust (the system's and Capella's).",
    ),
    "tls_certificate": _connection_option(
        "--tls-certificate", metavar="FILE", help="PEM chain of a client, instead of a user."
    ),
    "tls_key": _connection_option(
        "--tls-key", metavar="FILE", help="Private key of --tls-certificate."
    ),
    "srv_targets": _connection_option(
        "--srv-targets",
        type=click.Choice(["same_domain", "any"]),
        help=f"Which SRV targets to accept ({ConnectionOptions.srv_targets}).",
    ),
    "network": _connection_option(
        "--network",
        type=click.Choice(["auto", "default", "external"]),
        help=f"Which addresses of the nodes to use ({ConnectionOptions.network}).",
    ),
    "sasl_mechanisms": _connection_option(
        "--sasl-mechanisms",
        type=words,
        metavar="LIST",
        help="Mechanisms in order of preference: PLAIN, SCRAM-SHA512, SCRAM-SHA256, SCRAM-SHA1.",
    ),
    "connect_timeout": _connection_option(
        "--connect-timeout",
        type=float,
        metavar="SECONDS",
        help=f"Longest time to open a connection ({ConnectionOptions.connect_timeout:g}).",
    ),
    "retry_timeout": _connection_option(
        "--retry-timeout",
        type=float,
        metavar="SECONDS",
        help=f"How long to retry a vBucket ({ConnectionOptions.retry_timeout:g}).",
    ),
    "noop_interval": _connection_option(
        "--noop-interval",
        type=float,
        metavar="SECONDS",
        help=f"Interval of the server's noops ({ConnectionOptions.noop_interval:g}).",
    ),
    "buffer_size": _connection_option(
        "--buffer-size",
        type=int,
        metavar="BYTES",
        help=f"Flow-control buffer of a connection ({ConnectionOptions.buffer_size}).",
    ),
    "compressed": _connection_option(
        "--compressed", is_flag=True, help="Request compressed documents."
    ),
    "name": _connection_option(
        "--name",
        metavar="NAME",
        help="What the connections are for, shown in the server's logs (the command).",
    ),
}

# Passes `connection`, a `ConnectionOptions`, to the command.
connection_options = with_options(
    [
        *_CONNECTION.values(),
        _connection_option(
            "--tls-key-password-env",
            metavar="NAME",
            help="Environment variable with the passphrase of --tls-key, if it is encrypted.",
        ),
        *password_options(
            f"{PASSWORD_VARIABLE}, or a prompt on a terminal,", option=_connection_option
        ),
    ],
    _take_connection,
)


# ----- what to read -----

vbuckets_option = click.option(
    "--vbuckets",
    type=vbucket_set,
    metavar="LIST",
    help="Only these vBuckets, such as 0-63,70 (all).",
)

_READING = {
    "start": click.option(
        "-o",
        "--start",
        type=_start,
        metavar="START",
        help="earliest, latest, or a checkpoint file.",
    ),
    "columns": click.option(
        "--columns",
        type=_columns,
        metavar="LIST",
        help="basic, full, or names of columns, separated by commas.",
    ),
    "vbuckets": click.option(
        "--vbuckets",
        type=_vbuckets,
        metavar="LIST",
        help="vBuckets to read, such as 0-63,70, or 0/3 for the share of the first of three"
        " members (all).",
    ),
    "collections": click.option(
        "--collections",
        type=words,
        metavar="LIST",
        help='Collections to read, such as "inventory.*,*.events" (all).',
    ),
    "keys": click.option(
        "--keys", type=words, metavar="LIST", help="Keys to read, such as order::*,user::?."
    ),
    "ops": click.option(
        "--ops",
        type=words,
        metavar="LIST",
        help="Operations to read, of mutation, deletion, expiration.",
    ),
    "since": click.option(
        "--since",
        type=moment,
        metavar="TIME",
        help="Skip earlier changes, for example 2026-01-31T00:00:00Z.",
    ),
    "document_schema": click.option(
        "--document-schema",
        metavar="COLUMNS",
        help='Columns to decode documents to, such as "name STRING, n BIGINT".',
    ),
    "document_prefix": click.option(
        "--document-prefix", metavar="TEXT", help="Prefix of these columns."
    ),
    "on_malformed": click.option(
        "--on-malformed",
        type=click.Choice(["null", "fail", "column"]),
        help="What to do with values that do not fit: null makes them null and notes them in the"
        " column _malformed_fields, column does so with the whole document and keeps its bytes in"
        " _malformed, fail ends the command (null).",
    ),
    "drop_fields": click.option(
        "--drop-fields",
        multiple=True,
        metavar="PATH",
        help="Field of documents to leave out everywhere, such as cards[].number; may be repeated.",
    ),
    "hash_fields": click.option(
        "--hash-fields",
        multiple=True,
        metavar="PATH",
        help="Field of which to keep only a hash; may be repeated.",
    ),
    "hash_key_env": click.option(
        "--hash-key-env",
        metavar="NAME",
        help="Environment variable with a secret for these hashes.",
    ),
    "hash_key_file": click.option(
        "--hash-key-file",
        type=Path,
        metavar="FILE",
        help="File with a secret for these hashes.",
    ),
    "include": click.option(
        "--include",
        type=words,
        metavar="LIST",
        help="What to read as well: xattrs, history (every version, in collections that keep"
        " them), system_events (changes of collections and scopes), system_documents (the scope"
        " _system and transaction records).",
    ),
    "persisted_only": click.option(
        "--persisted-only", is_flag=True, help="Read only changes that every copy has on disk."
    ),
    "on_purge": click.option(
        "--on-purge",
        type=click.Choice(["resync", "ignore"]),
        help="What to do if deletions were purged that were not read: resync starts the vBucket"
        f" over, ignore misses them ({_STREAM['on_purge']}).",
    ),
    "out_of_order": click.option(
        "--out-of-order", is_flag=True, help="Allow first loads in key order."
    ),
    "initial_deletions": click.option(
        "--initial-deletions",
        type=click.Choice(["deliver", "skip", "skip_if_supported"]),
        help="Whether the server leaves out the deletions of first loads"
        f" ({_STREAM['initial_deletions']}).",
    ),
    "priority": click.option(
        "--priority",
        type=click.Choice(["low", "medium", "high"]),
        help="How much a node sends in one turn: high makes a load quicker, and the slowest"
        " requests of other clients slower (medium, unless the node is asked).",
    ),
    "backfill_order": click.option(
        "--backfill-order",
        type=click.Choice(["round-robin", "sequential"]),
        help="How a node reads vBuckets from disk (round-robin, unless the node is asked).",
    ),
    "on_rollback": click.option(
        "--on-rollback",
        type=click.Choice(["emit", "fail", "resync"]),
        help=f"What to do if the server has lost changes ({_STREAM['on_rollback']}).",
    ),
    "key_type": click.option(
        "--key-type",
        type=click.Choice(["string", "binary"]),
        help="binary for keys that are not UTF-8 (string).",
    ),
    "value_format": click.option(
        "--value-format",
        type=click.Choice(["binary", "string", "variant"]),
        help="Type of the column `value` (binary).",
    ),
}


_OLD = {
    "ignore_purged_tombstones": click.option(
        "--ignore-purged-tombstones", is_flag=True, hidden=True
    ),
}


def _warn(renamed: _deprecated.Renamed, value: object) -> None:
    old, new = (f"--{name.replace('_', '-')}" for name in (renamed.old, renamed.new))
    print(f"dcp-rs: {old} is deprecated: use {new} {value}", file=sys.stderr)


def resume_from(store: FileStore, reading: dict[str, Any]) -> None:
    """Makes `reading` start from a store, or at its own start if the store is empty."""
    start = reading.get("start", "earliest")
    if not isinstance(start, Checkpoint):
        reading |= {"start": store, "default": start}
    elif store.load() is not None:
        raise ConfigError(
            f"{store.path} has a checkpoint to resume from: give one file", option="start"
        )


def reading_options(*, but: Iterable[str] = (), only: Iterable[str] | None = None) -> Decorator:
    """Passes `reading` to the command: the arguments of `Client.stream` that were given."""
    names = [name for name in only or _READING if name not in set(but)]
    options_of = {name: _READING[name] for name in names}
    # `replicate` never had the old name.
    if only is None:
        options_of |= _OLD

    def take(options: dict[str, Any]) -> None:
        reading = specified({name: options.pop(name) for name in options_of})
        _deprecated.take(reading, _deprecated.OF_STREAM, warn=_warn)
        key = _secret(
            reading.pop("hash_key_env", None),
            reading.pop("hash_key_file", None),
            option_env="--hash-key-env",
            option_file="--hash-key-file",
        )
        if key is not None:
            reading["hash_key"] = key
        how = {
            python: reading.pop(option)
            for option, python in (("document_prefix", "prefix"), ("on_malformed", "on_malformed"))
            if option in reading
        }
        if "document_schema" in reading:
            reading["document_schema"] = DocumentSchema(reading["document_schema"], **how)
        elif how:
            raise click.UsageError(
                "--document-prefix and --on-malformed need --document-schema: give it too"
            )
        options["reading"] = reading

    return with_options(options_of.values(), take)
