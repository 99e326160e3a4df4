"""Targets: where to write rows, and the state after them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from dcp_rs.documents import MALFORMED
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    import pyarrow as pa

    from dcp_rs.replication.state import Mode, State

OnError = Literal["reject", "fail"]

IDENTITY = ("collection_id", "key")
"""Columns that identify a document in a table."""

POSITION = (
    "scope",
    "collection",
    "collection_id",
    "vbucket",
    "epoch",
    "seqno",
    "cas",
    "timestamp",
)
"""Columns that say where and when a document was written, in every table."""

GENERATION = "generation"
"""Column of the load that a row belongs to, in every table."""

DELETED = "_deleted_at"
"""Column that says when a document was removed, if its row stays."""

VALID_FROM, VALID_TO, IS_CURRENT, ENDED_BY = VALIDITY = (
    "valid_from",
    "valid_to",
    "is_current",
    "valid_to_seqno",
)
"""Columns of a history that say when a version was the document, and the seqno that ended it."""

NO_HISTORY: dict[Mode, str] = {
    "history": "only duckdb, ducklake, postgresql and delta have histories: choose one of them, or"
    " write a log"
}
"""Why a target has no histories, as its `why_not`."""

CHANGED = ("generation", "epoch", VALID_TO, IS_CURRENT, ENDED_BY)
"""Columns of a history in which a row changes."""


@dataclass(frozen=True, kw_only=True)
class Endings:
    """What a commit does to the rows that a history has, before it adds others.

    First `reopened`, then `ended`, then `changed`.

    Attributes:
        reopened: Conditions in SQL that select rows which are current again, since what ended them
            was lost.
        ended: Conditions in SQL that select rows which end if they are current; their documents
            are gone with their collection, or were not among those that were read again.
        at: When those end, but no earlier than they began. They have no seqno that ended them.
        changed: Rows, by `collection_id`, `key`, `seqno` and `was_generation`, with new values of
            `generation`, `epoch`, `valid_to`, `is_current` and `valid_to_seqno`.
    """

    reopened: Sequence[str]
    ended: Sequence[str]
    at: datetime
    changed: pa.Table = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Changes that a target must apply atomically.

    In a table, first remove the rows that `removals` select, then those of `deletes`, then let
    `rows` replace those with the same identity. In the table of rejects, first remove the rows that
    `removals` select, then those of `settled`, then add `rejects`. In a log, append `rows` and
    `rejects`; the rest is empty. In a history, first remove the rows that `removals` select, then
    apply `endings`, then append `rows`; the table of rejects is as a table's, and loses the rows
    that `Endings.ended` selects too.

    Attributes:
        rows: For a table, the newest version of each document that was written. For a log, every
            change.
        deletes: Identities of removed documents.
        removals: Conditions in SQL, on the integer columns `vbucket`, `collection_id`, `epoch` and
            `generation`; of a history also `seqno`.
        has_new_rows_only: Whether no document of `rows` can be in the table.
        state: State to save. Its number of commits is one more than that of the state before.
        rejects: Changes that cannot be rows, with the columns of `rejects.SCHEMA`.
        settled: Identities, with the key as bytes, of all documents that the commit is about.
        documents: The document of each row as bytes.
        on_error: Whether a change that cannot be a row is rejected, or ends the replication. Use
            `rejects.rejecting` for rows that the target refuses.
        schema: Schema of the rows, if it is no longer that of the commit before. Columns are added,
            or changed to a type to which `widens` says that they can be.
        endings: What becomes of the rows of a history.
    """

    rows: pa.Table = field(repr=False)
    deletes: pa.Table = field(repr=False)
    removals: Sequence[str]
    has_new_rows_only: bool
    state: State
    rejects: pa.Table = field(repr=False)
    settled: pa.Table = field(repr=False)
    documents: pa.ChunkedArray = field(repr=False)
    on_error: OnError = "reject"
    schema: pa.Schema | None = field(default=None, repr=False)
    endings: Endings | None = None

    @property
    def settling(self) -> list[str]:
        """The conditions that select the rejects which go."""
        return [*self.removals, *(() if self.endings is None else self.endings.ended)]


class Target(Protocol):
    """A place to write rows to. `dcp_rs.replicate` calls it from one thread.

    A target that stores rejects has the attribute `takes_rejects`, which is true. Without it, a
    change that cannot be a row ends the replication. One that has no type for structs has the
    attribute `takes_structs`, which is false.

    A target for which a commit of few rows is cheap has the attribute `commits_when_idle`, which is
    true. Once it has caught up, it commits as soon as the stream brings nothing, and a change waits
    for `commit_interval` at most.

    A target whose rows have columns of the stream that others lack, such as `vbuuid`, names them in
    the attribute `columns`. One that writes something for a document that was removed has the
    attribute `marks_deletes`, which is true: the rows of its tables are as with `deletes="mark"`.

    A target to whose tables several processes can write, each a share of the vBuckets, has the
    method `take_share`, which is called with the share, or `None`, before `open`. State, counts
    and `Commit.removals` are then of the share's rows only.

    A target whose tables have schemas of their own is a `GrowingTarget`, and one that has the mode
    `history` is a `HistoryTarget`. One whose files grow in number is a `MaintainedTarget`.
    """

    modes: frozenset[Mode]
    """The modes that it supports."""

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """Opens or creates the table for rows of a schema, and returns the state saved last.

        It adds missing columns, unless another column has a type that contradicts the schema; then
        it changes nothing. If the table no longer holds what the state says, because somebody
        restored or edited it, it returns the state with the reason in `State.moved`.

        Raises:
            ConfigError: The table contradicts the schema.
            CheckpointError: The state is damaged.
        """

    def commit(self, commit: Commit) -> Commit | None:
        """Applies a commit atomically and durably.

        Returns:
            The commit as it was applied, if the target rejected some of its rows.

        Raises:
            ConcurrentWriterError: The state is no longer that of the previous commit, because
                another process writes to the table.
        """

    def close(self) -> None:
        """Closes the target."""


class GrowingTarget(Target, Protocol):
    """A target that takes commits with another schema than it was opened with."""

    def stored(self) -> State | None:
        """Returns the state saved last, before the target is opened. It changes nothing."""

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """Whether a commit can change a column's type, so that what is in it stays what it is."""


class HistoryTarget(Target, Protocol):
    """A target that has the mode `history`."""

    def newest(self, identities: pa.Table, lost: Sequence[str]) -> pa.Table:
        """Returns, of each of some documents, the row of the newest generation and seqno.

        Args:
            identities: The documents, each once.
            lost: Conditions in SQL that select rows which do not count.

        Returns:
            Rows with the columns of `history.KNOWN`, in any order.
        """


class Maintained(NamedTuple):
    """What became of a table's files.

    Attributes:
        compacted: Small files whose rows are in others now.
        made: Those others.
        removed: Files of old versions that were removed.
    """

    compacted: int
    made: int
    removed: int


class MaintainedTarget(Target, Protocol):
    """A target of files that grow in number, which has the attribute `compacts`, which is true."""

    def maintain(self, keep: float | None) -> Maintained | None:
        """Compacts small files, and removes those of old versions.

        The rows stay the same, and so does the state. It leaves a table alone that another process
        has written to since the last commit.

        Args:
            keep: Seconds for which versions stay readable after they were replaced; `None` to
                remove nothing.

        Returns:
            What was done; `None` if the table was left alone.
        """


class Database(Protocol):
    """A place for several tables, which are opened and closed with it."""

    modes: frozenset[Mode]
    """The modes that its tables support."""

    def open(self) -> dict[str, str]:
        """Opens it, and returns the collection of each table that has a state with one."""

    def target(self, table: str) -> Target:
        """Returns the target for a table, which is not open yet.

        Raises:
            ConfigError: There can be no table of that name.
        """

    def fold(self, table: str) -> str:
        """Returns what the name of a table is to the target, which may not tell some apart."""

    def commit(self, commits: Sequence[tuple[Target, Commit]]) -> list[Commit | None]:
        """Applies a commit to each of several tables; all of them atomically if it can.

        Returns:
            What `Target.commit` returns, for each.
        """

    def drop(self, target: Target) -> None:
        """Removes a table, its state and its rejects. A part may be gone already."""

    def close(self) -> None:
        """Closes it, and its tables."""


def check_use(state: State | None, schema: pa.Schema, mode: Mode) -> None:
    """Checks that a target with this state can be written in a mode, with a schema.

    Raises:
        ConfigError: It has the other mode, or is a table with documents in more columns.
    """
    if state is None:
        return
    if state.mode != mode:
        raise ConfigError(
            f"the target is a {state.mode}, not a {mode}: choose {state.mode}, or replicate to a"
            " new one",
            option="mode",
        )
    lost = sorted(set(state.documents) - set(schema.names))
    if DELETED in lost and mode == "table":
        raise ConfigError(
            f"the table has {DELETED}, which would be wrong from now on: set it to mark, or"
            " replicate to a new table",
            option="deletes",
        )
    if lost == [MALFORMED] and mode == "table":
        raise ConfigError(
            f"the table has {MALFORMED}, which would no longer be updated: "
            "set it to column, or replicate to a new table",
            option="on_malformed",
        )
    if lost and mode == "table":
        infer = "" if state.decision is None else ", or infer if they were inferred"
        raise ConfigError(
            f"lacks {', '.join(lost)}, which the table has and which would no"
            f" longer be updated: keep them{infer}, or replicate to a new table",
            option="document_schema",
        )


def check_key(keys: Iterable[Iterable[str]], table: str) -> None:
    """Checks that a table is unique by the columns that identify a document.

    Args:
        keys: Columns of each primary key or unique index.
        table: Name of the table, for the error.

    Raises:
        ConfigError: It is not, because it was created for a log or by another program.
    """
    if all(set(key) != set(IDENTITY) for key in keys):
        raise ConfigError(
            f"table {table} has no primary key ({', '.join(IDENTITY)}), without which no"
            " document can be replaced: drop it, or use another",
            option="target",
        )


def missing_columns(have: Mapping[str, str], want: Mapping[str, str], table: str) -> dict[str, str]:
    """Returns the columns to add to a table, by name and type.

    Args:
        have: Types of the table's columns, as the target calls them.
        want: Types that the rows' columns need, called likewise.
        table: Name of the table, for the error.

    Raises:
        ConfigError: A column has another type.
    """
    wrong = {
        name: f"{name} is {have[name]} but must be {kind}"
        for name, kind in want.items()
        if have.get(name, kind) != kind
    }
    if wrong:
        is_key = [*wrong] == ["key"]
        raise ConfigError(
            f"table {table} has other types: {'; '.join(wrong.values())}. Nothing was written: "
            f"{'keep the type of its keys' if is_key else 'change the schema'}, or write to a new"
            " table",
            option="key_type" if is_key else "document_schema",
        )
    return {name: kind for name, kind in want.items() if name not in have}


LACKED = -1
"""Rows in the state of a table that lacked columns, until its next commit: a start that dies before
that hides nothing."""


def counted(state: State, expected: int | None, found: int) -> State:
    """Returns the state, with a reason if its table is not as the state left it.

    Args:
        state: The state.
        expected: Rows that the table had, or `LACKED`; `None` if that is not known.
        found: Rows that it has.
    """
    if expected == LACKED:
        return replace(state, moved="it lacked columns")
    if expected in {None, found}:
        return state
    return replace(state, moved=f"it has {found} rows, and had {expected}")


def lacking(state: State, added: Iterable[str]) -> str:
    """Returns why the table of a state is not as it left it, if columns that it had were added.

    Args:
        state: The state.
        added: Columns that the table lacked.
    """
    had = {*state.documents, *POSITION, GENERATION}
    if state.mode == "history":
        had.update(VALIDITY)
    lost = [name for name in added if name in had]
    return f"it lacks {', '.join(lost)}" if lost else ""


def check_fold(names: Iterable[str], library: str) -> None:
    """Checks that names are different to a library that matches them without case.

    Raises:
        ConfigError: Two are the same to it.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} are one column to {library}, which does not"
                " tell capitals from small letters: leave one out",
                option="document_schema",
            )


def type_name(kind: pa.DataType) -> str:
    """Returns the name of a type, regardless of field names and offset sizes."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{each.name}: {type_name(each.type)}' for each in kind)}>"
    return str(kind).removeprefix("large_")


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a type has no parts, such as those of a list or a struct."""
    return bool(kind.num_fields == 0)


def has_variant(kind: pa.DataType) -> bool:
    """Whether a type is or contains a VARIANT."""
    parts = [kind.field(index) for index in range(kind.num_fields)]
    return any(b"variant" in (part.metadata or {}) or has_variant(part.type) for part in parts)


def refuse_variants(schema: pa.Schema, library: str) -> None:
    """Checks that no column is or contains a VARIANT.

    Raises:
        ConfigError: A column does.
    """
    for column in schema:
        if has_variant(column.type):
            raise variant_refused(column.name, library)


def variant_refused(column: str, library: str) -> ConfigError:
    """Returns the error for a VARIANT column that a library cannot write."""
    return ConfigError(
        f"{column} is a VARIANT, which {library} cannot write: declare it as "
        "STRING, which stores its JSON",
        option="document_schema",
    )


def overtaken(table: str) -> ConcurrentWriterError:
    """Returns the error for a state that another process has changed."""
    return ConcurrentWriterError(
        f"another process writes to {table}, since its state is not that of this process's last "
        "commit: let one of them write, and start it again"
    )


@dataclass(frozen=True)
class Address:
    """A parsed URL of a target.

    Attributes:
        scheme: Kind of target, such as `duckdb`.
        storage: What follows a `+` after it, such as `s3`; empty for a path on this machine.
        host: User, host and port; empty for a path on this machine.
        path: Path of the URL, decoded.
        options: Options after the question mark, by name.
        url: The URL without the option `table`.
        storage_options: Options of the object storage, or of the catalog.
    """

    scheme: str
    # May contain a password, like the options and the URL.
    host: str = field(repr=False)
    path: str
    options: dict[str, str] = field(repr=False)
    url: str = field(repr=False)
    storage: str = ""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parses a URL.

        Raises:
            ConfigError: The text is not a URL.
        """
        if "\0" in unquote(url):
            raise ConfigError(
                "has a NUL (%00), which neither paths nor names may have", option="target"
            )
        try:
            # A # is part of a path or a password, as SQL libraries take it.
            parts = urlsplit(url, allow_fragments=False)
            given = parse_qsl(parts.query, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ConfigError(
                "not a URL such as duckdb:///path?table=name", option="target"
            ) from error
        options = dict(given)
        for name in options:
            if sum(each == name for each, _ in given) > 1:
                raise ConfigError(f"gives {name} twice", option="target")
        kept = [each for each in parts.query.split("&") if not each.startswith("table=")]
        rest = url.partition("?")[0] + ("?" + "&".join(kept) if any(kept) else "")
        scheme, _, storage = parts.scheme.partition("+")
        # Two slashes, as of duckdb:///${FOLDER}, are another path to POSIX.
        path = re.sub("^//+", "/", unquote(parts.path))
        return cls(scheme, parts.netloc, path, options, rest, storage)

    @property
    def is_catalog(self) -> bool:
        """Whether it is the name of a catalog that pyiceberg's configuration has."""
        return self.scheme == "iceberg" and bool(self.host or self.storage)

    def allow(self, *names: str) -> None:
        """Checks that the URL has no other options than these.

        Raises:
            ConfigError: It has another option.
        """
        unknown = sorted(self.options.keys() - set(names))
        if unknown:
            near = get_close_matches(unknown[0], names, 1)
            hint = f": did you mean {near[0]}? It" if near else "; it"
            raise ConfigError(
                f"{self.scheme} has no option {', '.join(unknown)}{hint} takes "
                f"{', '.join(names) or 'none'}",
                option="target",
            )

    def local_path(self, what: str, example: str) -> str:
        """Returns the path of a target on this machine.

        Raises:
            ConfigError: The URL has no path, or has a host before it: `duckdb://data/file` is not
                `duckdb:///data/file`.
        """
        if self.host:
            raise ConfigError(
                f"{self.host!r} is a host here: write three slashes before a path, as in {example}",
                option="target",
            )
        if not self.path:
            raise ConfigError(f"name {what}, as in {example}", option="target")
        return self.path


def check_folder(folder: Path) -> None:
    """Checks that a target's folder is no file.

    Raises:
        ConfigError: It is one.
    """
    if folder.is_file():
        raise ConfigError(
            f"the folder {folder} cannot be created: a file has its name: use another",
            option="target",
        )


def make_folder(folder: Path) -> None:
    """Creates the folder of a target, and those above it, unless it is there.

    Raises:
        ConfigError: It cannot be created.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"the folder {folder} cannot be created: {why}", option="target"
        ) from error


def quote(name: str) -> str:
    """Returns a name quoted for SQL, `schema.table` part by part."""
    return ".".join(map(quote_column, name.split(".")))


def quote_column(name: str) -> str:
    """Returns the name of a column quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'
