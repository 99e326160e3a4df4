"""Logs on standard error: as lines for people or as JSON, by module and without floods."""

from __future__ import annotations

import difflib
import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from dcp_rs.cli._output import print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LEVELS = ("debug", "info", "warning", "error")
# The loggers below dcp_rs, which others are below.
_MODULES = (
    "consumer", "documents", "listener", "producer", "proto", "replication", "spark",
)  # fmt: skip
# Seconds for which records of one reason are counted after one was shown.
_QUIET = 10.0
# Answers to who reads them, and what is seldom by itself.
_ALWAYS = ("reloaded", "target_unavailable", "target_available", "commit_slow")
# What differs between errors of one kind, such as seconds and positions.
_NUMBERS = re.compile(r"\w*\d\w*")
# Reasons that are remembered.
_REASONS = 1000
# A word that others chose may not take the place of one of ours.
_OURS = ("time", "level", "logger", "event", "message")


class _AsJson(logging.Formatter):
    """Makes a JSON object of a log record."""

    def __init__(self, context: dict[str, object]) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "event": getattr(record, "event", None),
            "message": record.getMessage(),
            **self._context,
        }
        fields = getattr(record, "fields", {})
        found |= {name: value for name, value in fields.items() if name not in _OURS}
        repeated = getattr(record, "repeated", 0)
        if repeated:
            found["repeated"] = repeated
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _AsText(logging.Formatter):
    """Makes a line for people."""

    def format(self, record: logging.LogRecord) -> str:
        repeated = getattr(record, "repeated", 0)
        more = f" (and {repeated} more like it)" if repeated else ""
        return f"{super().format(record)}{more}"


class _Seldom(logging.Filter):
    """Lets one record of each reason through in a while, and counts the others.

    A reason is an event of a logger, about a node or a table, with the kind of its error: a node
    that cannot be reached at first may refuse the password afterwards. Errors always pass, as do a
    few events, and what was asked for with the level `debug`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR or record.levelno < logging.INFO:
            return True
        fields = getattr(record, "fields", {})
        event = getattr(record, "event", None) or record.msg
        if event in _ALWAYS:
            return True
        kind = _NUMBERS.sub("", str(fields.get("error", "")))
        reason = (record.name, event, fields.get("node"), fields.get("table"), kind)
        now = time.monotonic()
        shown, count = self._seen.get(reason, (-_QUIET, 0))
        if now - shown < _QUIET:
            self._seen[reason] = shown, count + 1
            return False
        while len(self._seen) >= _REASONS:
            del self._seen[next(iter(self._seen))]
        self._seen.pop(reason, None)
        self._seen[reason] = now, 0
        record.repeated = count
        return True


class Logs:
    """Has logs, warnings and errors go to standard error as lines, from `begin` to `end`."""

    def __init__(self) -> None:
        self._handler: logging.Handler | None = None
        self._is_json = False
        self._before: list[tuple[logging.Logger, int]] = []
        self.context: dict[str, object] = {}
        """Fields that every JSON line has, such as the bucket."""

    def begin(self, *, as_json: bool, levels: Iterable[tuple[str, int]] = ()) -> None:
        """Begins, with levels of loggers."""
        self._is_json = as_json
        self.context.clear()
        self._handler = logging.StreamHandler(sys.stderr)
        text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        self._handler.setFormatter(_AsJson(self.context) if as_json else _AsText(text))
        self._handler.addFilter(_Seldom())
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(capture=True)
        self._set(levels)

    def change_levels(self, levels: Iterable[tuple[str, int]]) -> None:
        """Has loggers other levels than those that it began with."""
        self._reset()
        self._set(levels)

    def _set(self, levels: Iterable[tuple[str, int]]) -> None:
        for name, level in levels:
            logger = logging.getLogger(name)
            self._before.append((logger, logger.level))
            logger.setLevel(level)

    def _reset(self) -> None:
        for logger, level in reversed(self._before):
            logger.setLevel(level)
        self._before.clear()

    def end(self) -> None:
        """Ends, also if it was not begun."""
        if self._handler is not None:
            logging.captureWarnings(capture=False)
            logging.getLogger().removeHandler(self._handler)
            self._handler, self._is_json = None, False
            self._reset()

    def complain(self, message: str) -> None:
        """Prints an error that ends the command."""
        if not self._is_json:
            print(f"dcp-rs: {message}", file=sys.stderr)
        else:
            line = {
                "time": time.time(),
                "level": "ERROR",
                "logger": "dcp_rs",
                "event": "failed",
                "message": message,
                **self.context,
            }
            print_line(json.dumps(line))


LOGS = Logs()


def level_of(text: str) -> tuple[str, int]:
    """Parses a level, or a module and its level, and returns the name of the logger and the level.

    Raises:
        BadParameter: There is no such level or module.
    """
    module, equals, word = text.rpartition("=")
    if word not in _LEVELS:
        raise click.BadParameter(f"{word!r} is not {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}")
    name = module.removeprefix("dcp_rs").removeprefix(".")
    top = name.partition(".")[0]
    if equals and name and top not in _MODULES:
        close = difflib.get_close_matches(top, _MODULES, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_MODULES)}"
        raise click.BadParameter(f"there is no module {top!r}: {hint}")
    return (f"dcp_rs.{name}" if name else "dcp_rs"), getattr(logging, word.upper())


_OPTIONS = (
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        help="Logs as lines for people, or as JSON lines with events and fields (text). With json,"
        " progress is JSON lines too.",
    ),
    click.option(
        "--log-level",
        "log_levels",
        type=level_of,
        multiple=True,
        metavar="[MODULE=]LEVEL",
        help="Log from LEVEL up: debug, info, warning or error (warning); such as"
        " consumer.cluster=debug. May be repeated.",
    ),
)


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options `log_format` and `log_levels`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
