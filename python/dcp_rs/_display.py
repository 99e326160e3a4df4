"""Display in reprs and notebooks: short for any amount of data, and escaped."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROWS = 10
"""Rows of a table that are shown."""
_COLUMNS = 20
_NAMES = 12
_CELL = 60


class _Cells(reprlib.Repr):
    """Cuts long values before they are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _CELL

    def repr_bytes(self, value: bytes, _level: int) -> str:
        """Shows bytes; `Repr` would format all of them before it cuts them."""
        return repr(value) if len(value) <= _CELL else f"{value[:_CELL]!r}…"


_CELLS = _Cells()


def shortened(value: object) -> str:
    """Returns the repr of a value, the beginning of a long one."""
    return _CELLS.repr(value)


def names(given: Sequence[str]) -> str:
    """Returns a list of names, or the first ones of many."""
    more = len(given) - _NAMES
    return ", ".join([*map(_short, given[:_NAMES]), *([f"… {more} more"] if more > 0 else [])])


def table(
    title: str, columns: Sequence[str], rows: Iterable[tuple[object, ...]], num_rows: int
) -> str:
    """Returns the first of `num_rows` rows as HTML, escaped: documents are untrusted."""
    shown, rest = columns[:_COLUMNS], len(columns) - _COLUMNS
    more = [f"… {rest} more columns"] if rest > 0 else []
    head = _row("th", [*map(_short, shown), *more])
    body = [_row("td", [_cell(cell) for cell in row[:_COLUMNS]]) for row in islice(rows, ROWS)]
    below = f"<p>… {num_rows - ROWS:,} more rows</p>" if num_rows > ROWS else ""
    size = f"{num_rows:,} rows, {len(columns)} columns"
    return (
        f"<div><p>{_escape(title)}: {size}</p><table><thead>{head}</thead>"
        f"<tbody>{''.join(body)}</tbody></table>{below}</div>"
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _cell(value: object) -> str:
    if isinstance(value, str):
        return _short(value)
    return "" if value is None else _short(_CELLS.repr(value), 4 * _CELL)


def _short(text: str, most: int = _CELL) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _escape(text: str) -> str:
    # Most readers show no table, and importing this takes a millisecond.
    import html

    return html.escape(text)
