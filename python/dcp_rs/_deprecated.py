"""What was renamed: an old name works for one release, with a warning."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

_Named = TypeVar("_Named", bound="Callable[..., Any]")

_PACKAGE = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - frames have text
# Modules of Python that call this package for somebody.
_BETWEEN = (contextlib.__file__, dataclasses.__file__, functools.__file__)


@dataclass(frozen=True)
class Renamed:
    """An option with another name, and for an old flag its words."""

    old: str
    new: str
    words: tuple[str, str] | None = None
    """What `False` and `True` of the old name are now."""

    def value(self, given: object) -> object:
        """Returns the value of the new name."""
        if self.words is None:
            return given
        _checks.flag(self.old, given)
        return self.words[bool(given)]

    def old_value(self, value: object) -> object:
        """Returns the value of the old name."""
        return value if self.words is None else value == self.words[1]


def take(
    given: MutableMapping[str, Any],
    *renamed: Renamed,
    warn: Callable[[Renamed, object], None] | None = None,
) -> None:
    """Gives options their new names.

    Raises:
        ConfigError: An option has both names.
    """
    for each in renamed:
        if each.old not in given:
            continue
        if each.new in given:
            raise ConfigError(
                "are the new and the old name of one option: give the new one",
                option=(each.new, each.old),
            )
        value = each.value(given.pop(each.old))
        (warn or _warn)(each, value)
        given[each.new] = value


def accepts(*renamed: Renamed) -> Callable[[_Named], _Named]:
    """Makes a function, or a class and its instances, know old names of options."""

    def decorate(named: _Named) -> _Named:
        if not isinstance(named, type):
            return _accepting(named, renamed)
        named.__init__ = _accepting(named.__init__, renamed)  # type: ignore[misc]
        for each in renamed:
            setattr(named, each.old, property(functools.partial(_old, each)))
        return named

    return decorate


def _accepting(function: _Named, renamed: tuple[Renamed, ...]) -> _Named:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for each in renamed:
            if each.old in kwargs and each.new in kwargs:
                _forget_copied(kwargs, each.new)
        take(kwargs, *renamed)
        return function(*args, **kwargs)

    return cast("_Named", call)


def _forget_copied(given: dict[str, Any], name: str) -> None:
    """Takes out a value that `dataclasses.replace` has copied, rather than its caller given."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != dataclasses.__file__:
        return
    replaced = next(each for each in frame.f_locals.values() if hasattr(each, name))
    if given[name] == getattr(replaced, name):
        del given[name]


def _old(renamed: Renamed, options: object) -> object:
    value = getattr(options, renamed.new)
    _warn(renamed, value)
    return renamed.old_value(value)


def _warn(renamed: Renamed, value: object) -> None:
    warn(renamed.old, renamed.new if renamed.words is None else f"{renamed.new}={value!r}")


def warn(old: str, new: str) -> None:
    """Warns the caller of the package that an old name works for one release."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=_stack_level())


def _stack_level() -> int:
    """Returns the level of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and name not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    # The frame of this function counts for the caller, which warns.
    return max(level, 1)


OF_STREAM = Renamed("ignore_purged_tombstones", "on_purge", ("resync", "ignore"))
OF_PLAN = (
    Renamed("allow_data_loss", "on_purge", ("fail", "resync")),
    Renamed("max_rows", "max_seqnos"),
)
OF_PARTITIONS = Renamed("since", "start")
