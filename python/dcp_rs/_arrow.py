"""Optional libraries."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def require(what: str, module: str, package: str) -> ModuleType | Any:
    """Imports a library that `what` needs.

    Raises:
        ImportError: It is not installed; the text says what to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{what} needs {module}: install it with pip install "{package}"'
        ) from error


def require_pyarrow(what: str, extra: str = "arrow") -> ModuleType | Any:
    """Imports PyArrow for `what`.

    Raises:
        ImportError: It is not installed; the text names the extra to install.
    """
    return require(what, "pyarrow", f"dcp-rs[{extra}]")
