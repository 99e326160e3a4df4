"""What PostgreSQL refuses: rows one by one, or all of them."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.replication.rejects import MAX_REFUSED
from dcp_rs.replication.target import quote_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUL = "text has the character NUL, which PostgreSQL does not store"

_TOO_DEEP = "54001"
_NOT_GRANTED = "42501"
_PLAIN = re.compile("[a-z_][a-z0-9_]*")
# Classes of SQLSTATE that are about values: data, constraints, checks of views, limits such as that
# of an entry in an index, and what a trigger raises.
_OF_ROWS = ("22", "23", "44", "54", "P0")
# Foreign key, unique and exclusion constraints, which a row may meet once other rows are there or
# gone.
_OF_OTHER_ROWS = ("23503", "23505", "23P01")
# Serialization failure, deadlock, lock not available.
_PASSING = ("40001", "40P01", "55P03")
# Classes of connections, of what the server lacks, of its operator, and of its system.
_UNAVAILABLE = ("08", "53", "57", "58")
_OF_DOCUMENTS = {
    "22021": NUL,
    "22P05": "text has a character that the database's encoding lacks",
    _TOO_DEEP: "JSON is nested deeper than PostgreSQL's max_stack_depth allows",
}
_CHANGED = "the table was changed while it was written to: start again"
_REMEDIES = {
    "0A000": "remove what needs it from the table, or replicate to another",
    "25006": "name the primary server, or let the role write",
    "3F000": "create the schema, or set search_path",
    "42703": _CHANGED,
    "42P01": _CHANGED,
    "53100": "make room on the server's disk",
    "53200": "give the server more memory, or set commit_rows and commit_bytes lower",
}
# What to run for what a role may not do, by the server's text, which is in English unless somebody
# chose another language.
_GRANTS = {
    r"permission denied for (?:table|relation) (.+)": (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO"
    ),
    r"permission denied for schema (.+)": "GRANT USAGE, CREATE ON SCHEMA {} TO",
    r'permission denied to create temporary tables in database "(.+)"': (
        "GRANT TEMPORARY ON DATABASE {} TO"
    ),
    r"must be owner of (?:table|relation) (.+)": "ALTER TABLE {} OWNER TO",
}
_REMEDIES_OF_CLASSES = {"42": "replicate to another table", "53": "raise the server's limit"}


class Refusal(NamedTuple):
    """Why the server refused a row.

    Attributes:
        reason: Text without a key or a value.
        code: The SQLSTATE.
    """

    reason: str
    code: str

    @property
    def is_deep(self) -> bool:
        """Whether JSON is nested too deep."""
        return self.code == _TOO_DEEP

    @property
    def is_of_document(self) -> bool:
        """Whether the document is wrong for every table, however many are."""
        return self.code in _OF_DOCUMENTS

    @property
    def may_pass(self) -> bool:
        """Whether it is due to other rows, which may change."""
        return self.code in _OF_OTHER_ROWS


def code_of(error: BaseException) -> str:
    """Returns the SQLSTATE of an error; empty if the server did not raise it."""
    return getattr(error, "sqlstate", None) or ""


def is_passing(error: BaseException) -> bool:
    """Whether the same transaction may succeed a little later."""
    return code_of(error) in _PASSING


def is_unavailable(error: BaseException) -> bool:
    """Whether the server cannot be reached, is shut down or has no room, and nothing is wrong."""
    cause = error.__cause__ if isinstance(error, ConfigError) else error
    if cause is None or isinstance(cause, DcpError):
        return False
    code = code_of(cause)
    # The driver's own name of what happened, if the server had no say.
    status = getattr(getattr(cause, "status_code", None), "name", "")
    return code.startswith(_UNAVAILABLE) if code else status in {"IO", "TIMEOUT"}


def refusal_of(error: BaseException) -> Refusal | None:
    """Returns why a row was refused, if that is what an error says."""
    code = code_of(error)
    if not code.startswith(_OF_ROWS):
        return None
    return Refusal(_reason(error, code), code)


def _reason(error: BaseException, code: str) -> str:
    """Returns a reason of names only: the server's own text may have values of the row."""
    constraint = _detail(error, "PG_DIAG_CONSTRAINT_NAME")
    column = _detail(error, "PG_DIAG_COLUMN_NAME")
    if code in _OF_DOCUMENTS:
        return _OF_DOCUMENTS[code]
    if constraint:
        return f"the constraint {constraint} refuses it"
    if code == "23502":
        return f"the column {column} takes no NULL"
    if code.startswith("P0"):
        return "a trigger refuses it"
    return f"PostgreSQL refuses it with SQLSTATE {code}"


def _detail(error: BaseException, name: str) -> str:
    # Of bytes, though the driver's documentation has the names as text.
    details = {_text(key): _text(value) for key, value in getattr(error, "details", None) or ()}
    return details.get(name, "")


def _text(data: str | bytes) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data


@contextlib.contextmanager
def explained(table: str, kind: type[Exception]) -> Iterator[None]:
    """Raises `ConfigError` in place of an error of the server that will not pass by itself.

    Args:
        table: Name of the table, for the error.
        kind: Class of the driver's errors.
    """
    try:
        yield
    except kind as error:
        code = code_of(error)
        told = f"target: PostgreSQL refuses to write table {table}"
        refusal = refusal_of(error)
        if refusal is not None:
            # The driver's error may have values of the row.
            raise ConfigError(
                f"{told}: {refusal.reason}: remove the constraint or trigger, or replicate to "
                "another table"
            ) from None
        primary = _detail(error, "PG_DIAG_MESSAGE_PRIMARY")
        if code == _NOT_GRANTED:
            remedy = _grant_of(primary)
        else:
            remedy = _REMEDIES.get(code) or _REMEDIES_OF_CLASSES.get(code[:2], "")
        if not remedy:
            raise
        raise ConfigError(f"{told}: {primary}: {remedy}") from error


def _grant_of(primary: str) -> str:
    """Returns what to do about a right that the role lacks."""
    for pattern, statement in _GRANTS.items():
        found = re.fullmatch(pattern, primary)
        if found is not None:
            name = found[1] if _PLAIN.fullmatch(found[1]) else quote_column(found[1])
            return f"run {statement.format(name)} <the role>, or let a role that may replicate"
    return "grant it to the role, or let a role that may replicate"


def with_nul(rows: pa.Table) -> dict[int, str]:
    """Returns the rows whose text has a NUL, with the reason.

    JSON, in the column `value`, writes it as an escape.
    """
    found: set[int] = set()
    for column in rows.schema:
        if column.name == "value":
            continue
        values = rows[column.name]
        parents = None
        if pa.types.is_list(column.type):
            values = values.combine_chunks()
            parents, values = pc.list_parent_indices(values), pc.list_flatten(values)
        if not pa.types.is_string(values.type):
            continue
        has_nul = pc.match_substring(values, "\0")
        if pc.any(has_nul).as_py():
            indices = pc.indices_nonzero(has_nul)
            found.update((indices if parents is None else parents.take(indices)).to_pylist())
    return dict.fromkeys(found, NUL)


def write_all_but_refused(
    rows: pa.Table, write: Callable[[pa.Table], None], kind: type[Exception]
) -> dict[int, Refusal]:
    """Writes rows, and returns those that the server refused, by their index.

    Args:
        rows: The rows.
        write: Function that writes some of the rows, or raises and has written nothing.
        kind: Class of the errors that it raises.

    Raises:
        Exception: The server failed, or refused so many that the table rather than they is wrong.
    """
    refused: dict[int, Refusal] = {}
    of_table = 0
    parts: list[pa.Array | None] = [None] if len(rows) else []
    while parts:
        part = parts.pop()
        try:
            write(rows if part is None else rows.take(part))
            continue
        except kind as error:
            refusal = refusal_of(error)
            if refusal is None or of_table > MAX_REFUSED:
                raise
        indices = pa.array(range(len(rows)), pa.int64()) if part is None else part
        if len(indices) == 1:
            refused[indices[0].as_py()] = refusal
            of_table += not refusal.is_of_document
            continue
        if refusal.is_deep:
            # Those nested deeply are then next to each other, and few parts have some.
            indices = indices.take(pc.sort_indices(_brackets(rows.take(indices))))
        middle = len(indices) // 2
        parts += [indices.slice(0, middle), indices.slice(middle)]
    return refused


def _brackets(rows: pa.Table) -> pa.ChunkedArray:
    """Returns how many brackets are opened in the JSON of each row: no fewer than its depth."""
    if "value" not in rows.column_names:
        return pa.chunked_array([pa.repeat(0, len(rows))])
    value = pc.fill_null(rows["value"], "")
    return pc.add(pc.count_substring(value, "["), pc.count_substring(value, "{"))
