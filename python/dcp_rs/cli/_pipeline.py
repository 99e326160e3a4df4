"""The pipeline file: the options of `dcp-rs replicate` as TOML, under the names they have there."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs.cli._options import as_option, command, is_about_connection
from dcp_rs.cli.replicate import replicate, replication_options
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# A variable, or what stands for the two characters `${`.
_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Secrets, which a file names and never holds, and the options for the names.
SECRETS = {
    "password": "password_env",
    "tls_key_password": "tls_key_password_env",
    "hash_key": "hash_key_env",
}
_CONNECTION = "connection"
# A mapping of tables is no option of the command line.
_TABLES = "tables"
# A list of KEY=VALUE on the command line.
_STORAGE = "storage_options"
_META = "dcp_rs.cli.pipeline"
# Of the variables that win over a file.
_PREFIX = "DCP_RS"
_MOST_BYTES = 1024 * 1024
_SOURCES = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def _key(parameter: click.Parameter) -> str:
    # What may be repeated is a list, which has the name of Python's argument.
    if parameter.multiple:
        return str(parameter.name)
    return max(parameter.opts, key=len).removeprefix("--").replace("-", "_")


# Each option by its key: those of the connection, and the others.
PARAMETERS = [as_option(each) for each in replicate.params]
KEYS: dict[bool, dict[str, click.Parameter]] = {
    is_connection: {
        _key(each): each
        for each in PARAMETERS
        if is_about_connection(each) == is_connection and not getattr(each, "hidden", False)
    }
    for is_connection in (True, False)
}


@replication_options
def arguments(**given: Any) -> dict[str, Any]:
    """Turns values of options into the arguments of the command `replicate`."""
    return given


class File:
    """A pipeline file that was read.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, str] = {}
        """What each option is called here, by its name in Python."""
        self.values: dict[str, Any] = {}
        """Values of options, by the names of click's parameters."""
        self.tables: Mapping[str, Any] | None = None
        """Tables by patterns of collections, if it has them."""
        for is_connection, key, value in self._entries(_parsed(path)):
            self._take(key, value, is_connection=is_connection)

    def called(self, name: str) -> str:
        """Returns what an option is called here; empty if it is not here."""
        return self.names.get(name, "")

    def take(self, other: File, options: Iterable[str]) -> None:
        """Takes the values of some options from another file."""
        for name in options:
            for mine, others in ((self.values, other.values), (self.names, other.names)):
                mine.pop(name, None)
                if name in others:
                    mine[name] = others[name]

    def _entries(self, found: dict[str, Any]) -> Iterator[tuple[bool, str, Any]]:
        connection = found.pop(_CONNECTION, {})
        if not isinstance(connection, dict):
            raise self._wrong(_CONNECTION, "must be a table, as [connection] begins")
        yield from ((True, key, value) for key, value in connection.items())
        yield from ((False, key, value) for key, value in found.items())

    def _take(self, key: str, value: Any, *, is_connection: bool) -> None:
        called = f"{_CONNECTION}.{key}" if is_connection else key
        keys = KEYS[is_connection]
        if key in SECRETS and SECRETS[key] in keys:
            key, value = SECRETS[key], self._variable(called, value)
        else:
            value = self._filled(called, value)
        if key == _TABLES and isinstance(value, dict):
            self.tables = value
            return
        parameter = keys.get(key)
        if parameter is None:
            if isinstance(value, dict) and not is_connection:
                raise self._unknown_table(key)
            raise self._unknown(called, key, is_connection=is_connection)
        self.names[key] = self.names[str(parameter.name)] = f"{called} of {self.path.name}"
        given = _for_click(parameter, value)
        if given is None:
            raise self._wrong(called, f"must be {_kind(parameter)}")
        try:
            parameter.type_cast_value(click.Context(replicate), given)
        except click.BadParameter as error:
            raise self._wrong(called, error.message) from error
        self.values[str(parameter.name)] = given

    def _unknown(self, called: str, key: str, *, is_connection: bool) -> ConfigError:
        if key in KEYS[not is_connection]:
            other = "above the first table" if is_connection else f"in [{_CONNECTION}]"
            return self._wrong(called, f"belongs {other}")
        keys = KEYS[is_connection]
        known = [*keys, *(each for each, of in SECRETS.items() if of in keys)]
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
        return self._wrong(called, f"there is no such key: {hint}")

    def _unknown_table(self, name: str) -> ConfigError:
        known = (_CONNECTION, _STORAGE, _TABLES)
        close = difflib.get_close_matches(name.lower(), known, 1, 0.5)
        hint = (
            f"did you mean [{close[0]}]?"
            if close
            else f"there are {', '.join(f'[{each}]' for each in known)}"
        )
        return self._wrong(name, f"there is no such table: {hint}")

    def _wrong(self, called: str, problem: str) -> ConfigError:
        return ConfigError(problem, option=f"{called} of {self.path.name}")

    def _variable(self, called: str, value: Any) -> str:
        """Returns the variable that a secret names."""
        named = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if named is None or named[1] is None:
            raise self._wrong(
                called, 'must be a variable, as in "${PASSWORD}": a file is no place for a secret'
            )
        self._value_of(called, named[1])
        return named[1]

    def _value_of(self, called: str, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise self._wrong(
                called, f"${{{name}}} names no variable: write $${{ for the characters ${{"
            )
        value = os.environ.get(name)
        if value is None:
            raise self._wrong(called, f"the variable {name} is not set: set it, or check its name")
        return value

    def _filled(self, called: str, value: Any) -> Any:
        """Puts the values of variables into the texts of a value."""
        if isinstance(value, dict):
            return {key: self._filled(f"{called}.{key}", each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._filled(called, each) for each in value]
        if not isinstance(value, str):
            return value

        def fill(found: re.Match[str]) -> str:
            return "${" if found[1] is None else self._value_of(called, found[1])

        return _VARIABLE.sub(fill, value)


def _parsed(path: Path) -> dict[str, Any]:
    called = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", option=called) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"has more than {_MOST_BYTES} bytes", option=called)
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # What it says has the place, and no text of the file.
        raise ConfigError(f"is not TOML: {error}", option=called) from error


def _for_click(parameter: click.Parameter, value: Any) -> Any:
    """Returns a value as the command line would bring it; `None` if its type is another."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if getattr(parameter, "is_flag", False):
        return value if isinstance(value, bool) else None
    if parameter.type is click.INT:
        return value if is_number and isinstance(value, int) else None
    if parameter.type is click.FLOAT:
        return value if is_number else None
    if parameter.name == _STORAGE and isinstance(value, dict):
        value = [f"{key}={each}" for key, each in value.items()]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        return None
    if parameter.multiple:
        return tuple(texts)
    return value if isinstance(value, str) else ",".join(texts) if _is_list(parameter) else None


def _is_list(parameter: click.Parameter) -> bool:
    return parameter.multiple or (
        isinstance(parameter, click.Option) and parameter.metavar == "LIST"
    )


def _kind(parameter: click.Parameter) -> str:
    if getattr(parameter, "is_flag", False):
        return "true or false"
    if parameter.type is click.INT:
        return "a whole number"
    if parameter.type is click.FLOAT:
        return "a number"
    if parameter.name == _STORAGE:
        return "a table of strings"
    return "a string or a list of strings" if _is_list(parameter) else "a string"


_TEXT: dict[str, Any] = {"type": "string"}


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of the file, for editors."""
    whole = _schema_of_table(is_connection=False)
    whole["properties"][_CONNECTION] = _schema_of_table(is_connection=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A pipeline of dcp-rs",
        **whole,
    }


def _schema_of_table(*, is_connection: bool) -> dict[str, Any]:
    found = {key: _schema_of(each) for key, each in KEYS[is_connection].items()}
    for secret, of in SECRETS.items():
        if of in found:
            about = "A variable, as in ${PASSWORD}, which holds the secret."
            found[secret] = {**_TEXT, "pattern": r"^\$\{[A-Za-z_]\w*\}$", "description": about}
    properties = dict(sorted(found.items()))
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_of(parameter: click.Parameter) -> dict[str, Any]:
    found = _TEXT
    if getattr(parameter, "is_flag", False):
        found = {"type": "boolean"}
    elif parameter.type in (click.INT, click.FLOAT):
        found = {"type": "integer" if parameter.type is click.INT else "number"}
    elif isinstance(parameter.type, click.Choice):
        found = {"enum": list(parameter.type.choices)}
    elif parameter.name == _STORAGE:
        found = {"type": "object", "additionalProperties": _TEXT}
    elif _is_list(parameter):
        found = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}
    elif parameter.name == _TABLES:
        found = {"type": ["string", "object"]}
    return found | {"description": str(getattr(parameter, "help", ""))}


def file_of(context: click.Context) -> File:
    """Returns the file of a command."""
    file: File = context.meta[_META]
    return file


def is_given(context: click.Context, name: str) -> bool:
    """Whether a flag or a variable gives an option, which then wins over the file."""
    return context.get_parameter_source(name) in _SOURCES


def merged(context: click.Context) -> dict[str, Any]:
    """Returns the arguments of the command `replicate`: a file's, and what was given instead.

    Raises:
        ConfigError: Something is missing, or wrong; what the file has is called as there.
    """
    file = file_of(context)
    values = {name: value for name, value in context.params.items() if name != "file"}
    tables = None if is_given(context, _TABLES) else file.tables
    with context.scope(cleanup=False), called_as_in(context):
        for name in ("connection_string", "target"):
            if values.get(name) is None:
                raise ConfigError("is missing: add it to the file", option=name)
        found: dict[str, Any] = arguments(**values)
    return found if tables is None else found | {_TABLES: tables}


@contextlib.contextmanager
def called_as_in(context: click.Context, file: File | None = None) -> Iterator[None]:
    """Has errors call an option as the file does, unless it was given in another way.

    Args:
        context: Context of the command.
        file: The file, if it is not the one that the command began with.
    """
    try:
        yield
    except ConfigError as error:
        call_as_in(context, error, file)
        raise


def call_as_in(context: click.Context, error: ConfigError, file: File | None = None) -> None:
    """Makes an error call an option as the file does, or would; nothing if there is no file."""
    found = file or context.meta.get(_META)
    if found is None:
        return
    names = {
        name: found.called(name) or f"{called} of {found.path.name}"
        for called, key, parameter in _every_key()
        for name in (key, str(parameter.name))
        if not is_given(context, str(parameter.name))
    }
    # Arguments of other commands, for which there are flags here.
    given = {
        name: f"--{name.replace('_', '-')}"
        for name in ("connection_string", "target")
        if is_given(context, name)
    }
    flags = {f"--{name.replace('_', '-')}": called for name, called in names.items()}
    # So that nothing makes flags of them later.
    hints = {name: f"the key {name}" for name in names}
    error._rename(names | flags | given, hints)  # noqa: SLF001 - the package's own


def _every_key() -> Iterator[tuple[str, str, click.Parameter]]:
    """Yields how each key is written, the key, and its option."""
    for is_connection, keys in KEYS.items():
        where = f"{_CONNECTION}." if is_connection else ""
        yield from ((f"{where}{key}", key, each) for key, each in keys.items())
        for secret, of in SECRETS.items():
            if of in keys:
                yield f"{where}{secret}", secret, keys[of]


def _check_variables() -> None:
    """Refuses misspelt variables.

    Others of the prefix pass: Kubernetes sets some for a service of that name.

    Raises:
        ConfigError: One is nearly an option.
    """
    # DCP_RS_PASSWORD is what `password_env` names by itself.
    known = [*(str(each.name).upper() for each in PARAMETERS), *map(str.upper, SECRETS)]
    for name in os.environ:
        option = name.removeprefix(f"{_PREFIX}_")
        if option in known or option == name:
            continue
        near = difflib.get_close_matches(option, known, 1, 0.8)
        if near:
            raise ConfigError(
                f"there is no such variable: did you mean {_PREFIX}_{near[0]}?", option=name
            )


def _load(context: click.Context, _parameter: click.Parameter, path: str) -> Path:
    _check_variables()
    file = File(Path(path))
    context.meta[_META], context.default_map = file, file.values
    return file.path


def file_command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a command that takes a pipeline file, and options that win over it."""
    argument = click.Argument(["file"], metavar="FILE", is_eager=True, callback=_load)
    context_settings = {"auto_envvar_prefix": _PREFIX}

    def make(function: Callable[..., Any]) -> click.Command:
        passing = click.pass_context(function)
        made: click.Command = command(context_settings=context_settings, **settings)(passing)
        made.params[:0] = [argument, *PARAMETERS]
        return made

    return make


@file_command(add_help_option=False)
def _nothing(context: click.Context, **_: Any) -> None:
    """Does nothing: it is made to parse a file."""


def given_in(path: Path) -> dict[str, Any]:
    """Returns the arguments of the command `replicate` that a file has.

    Raises:
        ConfigError: Something in it is wrong.
    """
    try:
        return merged(_nothing.make_context("dcp-rs", [str(path)]))
    except click.UsageError as error:
        # A variable that the environment has in place of a key.
        raise ConfigError(error.format_message(), option=str(path)) from error
