"""Names of keyword arguments: an unknown one is refused with the nearest that exists."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

_Named = TypeVar("_Named", bound="Callable[..., Any]")


def check(
    function: str,
    known: Collection[str],
    given: Iterable[str],
    others: Mapping[str, str] | None = None,
) -> None:
    """Checks the names of the keyword arguments of a call.

    Args:
        function: What is called.
        known: Names that there are.
        given: Names that were given.
        others: What to do in place of giving others.

    Raises:
        TypeError: One of them does not exist.
    """
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        import difflib

        # One word of several names points to each of them.
        close = [name for name in known if unknown in name.split("_")]
        close = close or difflib.get_close_matches(unknown, known, 1)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        if others and unknown in others:
            hint = f": {others[unknown]}"
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}{hint}")


def checked(named: _Named) -> _Named:
    """Makes a function, or the constructor of a class, check the names of its keyword arguments."""
    if isinstance(named, type):
        # A subclass may take other arguments, which it passes on by itself.
        named.__init__ = _checking(named.__init__, named.__name__)  # type: ignore[misc]
        return named
    return _checking(named, named.__qualname__)


def checked_but(others: Mapping[str, str]) -> Callable[[_Named], _Named]:
    """Makes a function do so, and say what to do in place of giving some others."""
    return lambda named: _checking(named, named.__qualname__, others)


def _checking(function: _Named, name: str, others: Mapping[str, str] | None = None) -> _Named:
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(name, known, kwargs, others)
        return function(*args, **kwargs)

    return cast("_Named", call)
