"""Checks of options, which name the option and what it should have been."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def text(option: str, value: object, *, optional: bool = False) -> None:
    """Checks that `value` is text, or `None` if that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise wrong_type(option, value, "text")


def word(option: str, value: object, choices: Iterable[str]) -> None:
    """Checks that `value` is one of a few words; suggests one that is spelt much like it."""
    known = list(choices)
    *others, last = (repr(each) for each in known)
    expected = f"{', '.join(others)} or {last}" if others else last
    if not isinstance(value, str):
        raise wrong_type(option, value, expected)
    if value in known:
        return
    nearest = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.7)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"{option}: must be {expected}, not {value!r}{suggestion}")


def integer(option: str, value: object, low: int, high: int) -> None:
    """Checks that `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(option, value, "a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value} is not from {low} to {high}")


def seconds(option: str, value: object, low: float = 0.0, high: float = 1e9) -> None:
    """Checks that `value` is a number of seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(option, value, "a number of seconds")
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value} is not from {low:g} to {high:g} seconds")


def flag(option: str, value: object) -> None:
    """Checks that `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise wrong_type(option, value, "True or False")


def wrong_type(option: str, value: object, expected: str) -> ConfigError:
    """Makes the error of a value of a wrong type; the value itself is not shown."""
    return ConfigError(f"{option}: must be {expected}, not {type(value).__name__}")
