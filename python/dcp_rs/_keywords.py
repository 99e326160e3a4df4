"""Names of keyword arguments: an unknown one is refused with the nearest that exists."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

_Named = TypeVar("_Named", bound="Callable[..., Any]")


def check(function: str, known: Collection[str], given: Iterable[str]) -> None:
    """Checks the names of the keyword arguments of a call.

    Raises:
        TypeError: One of them does not exist.
    """
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        import difflib

        close = difflib.get_close_matches(unknown, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}{hint}")


def checked(named: _Named) -> _Named:
    """Makes a function, or the constructor of a class, check the names of its keyword arguments."""
    if isinstance(named, type):
        # A subclass may take other arguments, which it passes on by itself.
        named.__init__ = _checking(named.__init__, named.__name__)  # type: ignore[misc]
        return named
    return _checking(named, named.__qualname__)


def _checking(function: _Named, name: str) -> _Named:
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(name, known, kwargs)
        return function(*args, **kwargs)

    return cast("_Named", call)
