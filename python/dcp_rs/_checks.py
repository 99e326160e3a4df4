"""Checks of options, which name the option and what it should have been."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from types import UnionType


def text(option: str, value: object, *, optional: bool = False) -> None:
    """Checks that `value` is text, or `None` if that is allowed."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise wrong_type(option, value, "text")
    if value is not None:
        utf8(option, value)


def integer(option: str, value: object, low: int, high: int) -> None:
    """Checks that `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(option, value, "a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{value} is not from {low} to {high}", option=option, value=value)


def seconds(option: str, value: object, low: float, high: float) -> None:
    """Checks that `value` is a number of seconds from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(option, value, "a number of seconds")
    if not low <= value <= high:
        shown = [f"{int(each) if each == each // 1 else each}" for each in (value, low, high)]
        raise ConfigError(
            "{} is not from {} to {} seconds".format(*shown), option=option, value=value
        )


def flag(option: str, value: object) -> None:
    """Checks that `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise wrong_type(option, value, "True or False")


def path(option: str, value: object) -> None:
    """Checks that `value` is a path."""
    if not isinstance(value, str | os.PathLike):
        raise wrong_type(option, value, "a path")
    try:
        has_nul = b"\0" in os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ConfigError("is not a valid path", option=option) from error
    if has_nul:
        raise ConfigError("is not a valid path: it has a NUL", option=option, value=value)
    if not os.fspath(value):
        raise ConfigError("must not be empty", option=option)


def instance(option: str, value: object, expected: type | UnionType, name: str) -> None:
    """Checks that `value` is an `expected`; errors call it `name`."""
    if not isinstance(value, expected):
        raise wrong_type(option, value, name)


def word(option: str, value: object, allowed: tuple[str, ...]) -> None:
    """Checks that `value` is one of a few words."""
    expected = " or ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise wrong_type(option, value, expected)
    if value not in allowed:
        raise ConfigError(f"must be {expected}, not {value!r}", option=option, value=value)


def names(option: str, value: object) -> list[str]:
    """Returns the names in any iterable but text."""
    found = items(option, value, "a list of names")
    for each in found:
        text(option, each)
    return cast("list[str]", found)


def items(option: str, value: object, expected: str) -> list[object]:
    """Returns the items of any iterable but text."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise wrong_type(option, value, expected)
    return list(value)


VBUCKETS = "a list of vBuckets, such as range(64)"
"""What the option `vbuckets` is."""


def vbuckets(value: object) -> list[int]:
    """Returns the numbers of vBuckets in any iterable but text."""
    found = items("vbuckets", value, VBUCKETS)
    for each in found:
        integer("vbuckets", each, 0, 0xFFFF)
    return cast("list[int]", found)


def existing(option: str, vbuckets: Iterable[int], num_vbuckets: int) -> None:
    """Checks that a bucket of so many vBuckets has those that an option names."""
    for each in vbuckets:
        if each >= num_vbuckets:
            error = ConfigError(
                f"vBucket {each} does not exist: the bucket has {num_vbuckets} vBuckets, "
                f"from 0 to {num_vbuckets - 1}",
                option=option,
                value=each,
            )
            error.vbucket = each
            raise error


def utf8(option: str, value: str) -> bytes:
    """Returns text as UTF-8; fails on lone surrogates."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("cannot be encoded as UTF-8", option=option) from error


def each_utf8(options: Mapping[str, object], *, but: Collection[str] = ()) -> None:
    """Checks that text among the options, alone or in lists, can be encoded as UTF-8.

    The engine only sees that it is not text that it can take.
    """
    for option, value in options.items():
        if option not in but:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, str):
                    utf8(option, each)


def wrong_type(option: str, value: object, expected: str) -> ConfigError:
    """Returns the error for a value of a wrong type, without the value itself."""
    return ConfigError(
        f"must be {expected}, not {type(value).__name__}", option=option, value=value
    )
