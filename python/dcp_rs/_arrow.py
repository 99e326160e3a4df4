"""PyArrow, if it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def require_pyarrow(what: str) -> ModuleType | Any:
    """Imports PyArrow for `what`.

    Raises:
        ImportError: It is not installed; the text says which extra brings it.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(
            f'{what} needs pyarrow: install it with pip install "dcp-rs[arrow]"'
        ) from error
    return pa
