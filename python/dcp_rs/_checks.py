"""Checks of options, which name the option and what it should have been."""

from __future__ import annotations

from dcp_rs.exceptions import ConfigError


def text(option: str, value: object, *, optional: bool = False) -> None:
    """Checks that `value` is text, or `None` if that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise wrong_type(option, value, "text")


def integer(option: str, value: object, low: int, high: int) -> None:
    """Checks that `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(option, value, "a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value} is not from {low} to {high}")


def flag(option: str, value: object) -> None:
    """Checks that `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise wrong_type(option, value, "True or False")


def wrong_type(option: str, value: object, expected: str) -> ConfigError:
    """Makes the error of a value of a wrong type; the value itself is not shown."""
    return ConfigError(f"{option}: must be {expected}, not {type(value).__name__}")
