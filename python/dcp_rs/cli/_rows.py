"""Changes as lines: as JSON, by a format string like kcat's, and as a table for people."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, NoReturn, Protocol

import click
from rich.cells import cell_len, set_cell_size

from dcp_rs._dcp_rs import json_depth
from dcp_rs.documents import MALFORMED_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Row = tuple[object, ...]


class Lines(Protocol):
    """Formats rows as lines."""

    def of(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Returns what to write for each row."""


# ----- JSON -----


def base64_of(value: bytes) -> dict[str, str]:
    """Returns bytes without a column as a JSON object with base64."""
    return {"base64": base64.b64encode(value).decode()}


class JsonLines:
    """A JSON object for each row.

    A document that is JSON is embedded as it was written, except for line breaks, which become
    spaces: parsing numbers and writing them again would lose digits. So are the notes of malformed
    fields. Other bytes are text, or base64 under the column's name with the suffix `_base64`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._makers = [_member_maker(name) for name in names]

    def of(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Returns a line for each row."""
        for row in rows:
            members = [make(value) for make, value in zip(self._makers, row, strict=True)]
            yield f"{{{', '.join(members)}}}\n".encode()


def _member_maker(name: str) -> Callable[[object], str]:
    """Returns a function that formats a column's value as an object member."""
    before, before_base64 = f"{_encode(name)}: ", f"{_encode(f'{name}_base64')}: "
    text_of = _embedded if name == "value" else _quoted

    def make(value: object) -> str:
        if isinstance(value, bytes):
            text = text_of(value)
            if text is None:
                return f'{before_base64}"{base64.b64encode(value).decode()}"'
            return before + text
        if name == "xattrs" and isinstance(value, dict):
            return before + _xattrs(value)
        if name == MALFORMED_FIELDS and isinstance(value, str):
            return before + value
        return before + _json(value)

    return make


def _xattrs(value: dict[str, str]) -> str:
    """Returns extended attributes, each of which is JSON."""
    members = (
        f"{_encode(name)}: {_embedded(text.encode()) or _encode(text)}"
        for name, text in value.items()
    )
    return f"{{{', '.join(members)}}}"


def _json(value: object) -> str:
    if isinstance(value, str):
        return _encode(value)
    if isinstance(value, dict):
        members = (f"{_encode(str(name))}: {_json(each)}" for name, each in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return _encode(value)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64_of(value)
    # Dates and times, and decimals, whose digits a float would lose.
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_encode = json.JSONEncoder(ensure_ascii=False, default=_plain).encode


def _quoted(value: bytes) -> str | None:
    """Returns bytes as a JSON string; `None` if they are not text."""
    try:
        return _encode(value.decode())
    except UnicodeDecodeError:
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


# Only whether it is JSON counts: numbers stay text, however many digits they have.
_check_json = json.JSONDecoder(
    parse_int=str, parse_float=str, parse_constant=_no_constant, object_pairs_hook=len
).decode
# Of deeper documents a line would be of no use: jq reads no more levels.
_MOST_LEVELS = 10_000
_LINE_BREAKS = str.maketrans("\r\n", "  ")


def _embedded(value: bytes) -> str | None:
    """Returns JSON text in a line; `None` if it is not JSON."""
    try:
        text = value.decode()
        _check_json(text)
    except ValueError:
        return None
    except RecursionError:
        # Python's decoder reads about a thousand levels.
        if (json_depth(value) or _MOST_LEVELS + 1) > _MOST_LEVELS:
            return None
    # JSON strings contain none: they are escaped there.
    return text.translate(_LINE_BREAKS)


# ----- format strings -----

_COLUMNS = {
    "k": "key", "K": "key", "s": "value", "S": "value", "o": "seqno", "p": "vbucket",
    "c": "collection", "C": "scope", "O": "op", "T": "timestamp",
}  # fmt: skip
_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(
    r"%\{(?P<column>[^}]*)\}|%(?P<letter>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)"
    r"|(?P<literal>[^%\\]+)",
    re.DOTALL,
)


class FormattedLines:
    r"""Rows by a format string such as `%k %s\n`; keys and documents are written unchanged."""

    def __init__(self, text: str) -> None:
        self._parts: list[_Part] = [_part(token) for token in _TOKEN.finditer(text)]
        self.columns = list(dict.fromkeys(each[0] for each in self._parts if each[0] is not None))

    def of(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Returns what to write for each row, of the columns in `columns`."""
        plan = [
            (None if name is None else self.columns.index(name), literal, make)
            for name, literal, make in self._parts
        ]
        for row in rows:
            yield b"".join(literal if at is None else make(row[at]) for at, literal, make in plan)


# The column of a part, or its literal bytes, and the function that formats the column.
_Part = tuple[str | None, bytes, Callable[..., bytes]]


def _part(token: re.Match[str]) -> _Part:
    kind = token.lastgroup or ""
    text = token[kind]
    if kind == "literal":
        return None, text.encode(), _raw
    if kind == "hex":
        return None, bytes.fromhex(text), _raw
    if kind == "column" and text:
        return text, b"", _raw
    if kind == "letter" and text in _COLUMNS:
        return _COLUMNS[text], b"", _MAKERS.get(text, _raw)
    escaped = b"%" if token[0] == "%%" else _ESCAPES.get(text) if kind == "escape" else None
    if escaped is None:
        raise click.BadParameter(
            f"{token[0]!r} is unknown: use %{', %'.join(_COLUMNS)}, %{{column}}, %% and"
            r" \n \r \t \0 \\ \xFF"
        )
    return None, escaped, _raw


def _raw(value: object) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else _json(value).strip('"')).encode()


def _length(value: object) -> bytes:
    return b"-1" if value is None else str(len(_raw(value))).encode()


def _milliseconds(value: datetime | None) -> bytes:
    # In integers: a float has barely enough digits for microseconds.
    return (
        b""
        if value is None
        else b"%d" % (int(value.timestamp()) * 1000 + value.microsecond // 1000)
    )


_MAKERS: dict[str, Callable[..., bytes]] = {"K": _length, "S": _length, "T": _milliseconds}


# ----- tables -----

_LEAST = 8
# Columns whose later rows may be wider than the first ones.
_ROOM = {"seqno": 8, "op": 12, "scope": 10, "collection": 10, "key": 16}


class TableLines:
    """Rows under a heading, in columns as wide as the first rows need.

    On a terminal of `width` cells, long values are cut; the last column gets the remaining width.
    """

    def __init__(self, names: Sequence[str], width: int | None) -> None:
        self._names = names
        self._width = width
        self._widths: list[int] = []
        self._are_numbers: list[bool] = []

    def of(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Returns a line for each row, and the heading before the first one."""
        rows = list(rows)
        lines = [[clear(cell) for cell in row] for row in rows]
        if not self._widths and lines:
            self._are_numbers = [
                any(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)
            ]
            heading = [name.upper() for name in self._names]
            columns = zip(heading, *lines, strict=True)
            widths = [max(map(cell_len, column)) for column in columns]
            room = [_ROOM.get(name, 0) for name in self._names]
            self._widths = _fitted(list(map(max, widths, room)), self._width)
            yield self._line(heading)
        yield from map(self._line, lines)

    def _line(self, cells: Sequence[str]) -> bytes:
        shown = map(self._cell, cells, self._widths, self._are_numbers)
        return f"{'  '.join(shown).rstrip()}\n".encode()

    def _cell(self, cell: str, width: int, is_number: bool) -> str:  # noqa: FBT001 - see map
        if cell_len(cell) <= width:
            return f"{cell:>{width}}" if is_number else set_cell_size(cell, width)
        return cell if self._width is None else f"{set_cell_size(cell, width - 1)}…"


class FieldLines:
    """A line for each column of a row."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def of(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Returns the lines of each row; null columns have none."""
        width = max(map(len, self._names))
        for row in rows:
            for name, value in zip(self._names, row, strict=True):
                if value is not None:
                    yield f"{name:{width}}  {clear(value)}\n".encode()


def _fitted(widths: list[int], total: int | None) -> list[int]:
    """Narrows the widest columns until a line fits, and gives the last one the remaining width."""
    if total is None:
        return widths
    left = total - sum(widths) - 2 * (len(widths) - 1)
    while left < 0:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= _LEAST:
            break
        widths[widest] -= 1
        left += 1
    widths[-1] += max(left, 0)
    return widths


def clear(value: object) -> str:
    """Returns a printable value: a document cannot move the cursor or end the line."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        text = value.decode("utf-8", "backslashreplace")
    elif isinstance(value, str):
        text = value
    elif isinstance(value, datetime):
        text = value.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    elif isinstance(value, date | Decimal):
        text = str(value)
    else:
        text = _json(value)
    return text if text.isprintable() else "".join(map(_clear_character, text))


def _clear_character(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\n\r\t" else character.encode("unicode_escape").decode()
