"""Tables, as the options of a replication ask for them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.target import VALIDITY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from dcp_rs.replication.changes import Layout
    from dcp_rs.replication.core import Settings
    from dcp_rs.replication.reload import Reload
    from dcp_rs.replication.schemas import Contract, OwnSchema
    from dcp_rs.replication.table import Table
    from dcp_rs.replication.tables import OneTable, TablePerCollection
    from dcp_rs.replication.target import Database, OnError, Target

_MEMBERS = ("modes", "open", "commit", "close")
_MEMBERS_TO_GROW = ("stored", "widens")
_MEMBERS_OF_HISTORY = (*_MEMBERS, "newest")
_MEMBERS_OF_DATABASE = (*_MEMBERS, "target", "fold", "drop")
_WORDS = {
    "key_type": ("string", "binary"),
    "deletes": ("remove", "mark"),
    "new_fields": ("evolve", "ignore", "reject"),
    "type_conflicts": ("evolve", "null", "reject"),
    "extra": ("drop", "column"),
    "nested": ("json", "struct", "columns"),
}


def contract_of(base: Contract, given: Mapping[str, Any], mode: str) -> Contract:
    """Returns a contract with options in place of some of another's."""
    for name, words in _WORDS.items():
        if given.get(name) is not None:
            _checks.word(name, given[name], words)
    if given.get("deletes") == "mark" and mode == "log":
        raise ConfigError("a log has a row for each deletion: leave it out", option="deletes")
    if given.get("deletes") == "mark" and mode == "history":
        raise ConfigError(
            "the last version of a removed document stays in a history, with the time at which it"
            " ended: leave it out",
            option="deletes",
        )
    return replace(base, **given)


def one_table(
    target: Target | Database,
    settings: Settings,
    contract: Contract,
    *,
    sample: int,
    reload: Reload,
) -> OneTable:
    """Returns a target that is one table, which takes all changes."""
    from dcp_rs.replication.tables import OneTable

    if settings.share is not None:
        contract.check_shared()

    if settings.on_drop != "empty":
        raise ConfigError("applies to a table for each collection: set tables", option="on_drop")
    chosen = cast("Target", target)
    _check_members(chosen, _MEMBERS, "Target")
    settings = _checked(chosen, settings)
    if settings.mode == "history":
        _check_members(chosen, _MEMBERS_OF_HISTORY, "HistoryTarget")
    _check_nested(chosen, contract)
    contract = _with_columns(contract, chosen, settings.mode)
    layout = contract.layout(settings.mode)
    columns = _columns(contract, settings, chosen) if contract.is_own else layout
    table = _table(settings, columns, chosen, None)
    return OneTable(table, chosen, layout, settings.collections, samples=sample, reload=reload)


def table_per_collection(
    target: Target | Database,
    tables: object,
    settings: Settings,
    contract: Contract,
    *,
    sample: int,
    reload: Reload,
) -> TablePerCollection:
    """Returns a target that has a table for each collection."""
    from dcp_rs.replication.names import TableNames
    from dcp_rs.replication.tables import TablePerCollection

    names = TableNames.of(tables)
    chosen = cast("Database", target)
    _check_members(chosen, _MEMBERS_OF_DATABASE, "Database")
    settings = _checked(chosen, settings)
    by_pattern: dict[str, tuple[Contract, Settings]] = {}
    shared: list[Layout] = []
    for pattern in names.templates:
        given = dict(names.options.get(pattern, {}))
        with _naming(pattern, tuple(given)):
            if "on_error" in given:
                _checks.word("on_error", given["on_error"], ("reject", "fail"))
            on_error = given.pop("on_error", settings.on_error)
            own = _checked(chosen, replace(settings, on_error=on_error))
            of_pattern = contract_of(contract, given, settings.mode)
            by_pattern[pattern] = _with_columns(of_pattern, chosen, settings.mode), own
            _check_nested(chosen, by_pattern[pattern][0])
            if settings.share is not None:
                of_pattern.check_shared()
            shared.append(by_pattern[pattern][0].layout(settings.mode))
    contracts = [each for each, _ in by_pattern.values()]
    # The stream decodes documents if it can decode all of them alike.
    first = contracts[0]
    is_shared = not any(
        each.is_own or each.document_schema is not first.document_schema for each in contracts
    )
    layout = shared[0] if is_shared else first.text_layout(settings.mode)

    def make(target: Target, collection: str) -> Table:
        pattern = names.pattern(collection)
        if pattern is None:
            raise AssertionError(f"{collection} has a table")
        own, of_table = by_pattern[pattern]
        if is_shared:
            return _table(of_table, own.layout(settings.mode), target, collection)
        return _table(of_table, _columns(own, of_table, target), target, collection)

    return TablePerCollection(
        chosen, names, make, layout, settings.collections, samples=sample, reload=reload
    )


@contextlib.contextmanager
def _naming(pattern: str, given: Collection[str]) -> Iterator[None]:
    """Has errors in the options of a pattern of collections name the pattern."""
    try:
        yield
    except ConfigError as error:
        if error.option not in given:
            raise
        text = str(error).removeprefix(f"{error.option}: ")
        raise ConfigError(
            f"{error.option} of {pattern!r}: {text}", option="tables", value=error.value
        ) from error


def check_mode(target: Target | Database, mode: object) -> None:
    """Checks that a target has a mode.

    Raises:
        ConfigError: It has not.
    """
    if mode not in list(target.modes):
        found = getattr(target, "why_not", {})
        why = next((why for each, why in found.items() if each == mode), None)
        raise ConfigError(
            f"must be {' or '.join(sorted(target.modes))} for this target, not {mode!r}"
            f"{f', since {why}' if why else ''}",
            option="mode",
        )


def _with_columns(contract: Contract, target: Target | Database, mode: str) -> Contract:
    """Returns a contract for rows with the columns that a target needs.

    Raises:
        ConfigError: Removed documents are to be marked, and the target has no column for it.
    """
    is_marked = mode == "table" and getattr(target, "marks_deletes", False)
    if is_marked and contract.deletes == "mark":
        raise ConfigError(
            "this target has no column for it, and a tombstone for each removed document: leave it"
            " out",
            option="deletes",
        )
    deletes = "mark" if is_marked else contract.deletes
    more = tuple(getattr(target, "columns", ()))
    if mode == "history":
        return replace(contract, more=(*more, "history"), reserved=VALIDITY)
    return replace(contract, deletes=deletes, more=more)


def _columns(contract: Contract, settings: Settings, target: Target) -> OwnSchema:
    """Returns the columns of a table that has a schema of its own."""
    from dcp_rs.replication.schemas import OwnSchema

    missing = [name for name in _MEMBERS_TO_GROW if not hasattr(target, name)]
    if contract.is_own and missing:
        raise ConfigError(
            f"{type(target).__name__} lacks {', '.join(missing)} of"
            " dcp_rs.replication.GrowingTarget, which tables need that decide or change their"
            " columns",
            option="target",
        )
    return OwnSchema(contract, settings.mode, getattr(target, "widens", lambda _old, _new: False))


def _checked(target: Target | Database, settings: Settings) -> Settings:
    """Returns the settings for a target, which it can have."""
    check_mode(target, settings.mode)
    if settings.maintenance is not None:
        settings.maintenance.check(target)
    takes_rejects = getattr(target, "takes_rejects", False)
    if settings.on_error == "reject" and not takes_rejects:
        raise ConfigError(
            "this target has no place for rejects (takes_rejects): leave it out", option="on_error"
        )
    on_error: OnError = settings.on_error or ("reject" if takes_rejects else "fail")
    return replace(settings, on_error=on_error)


def _check_nested(target: Target | Database, contract: Contract) -> None:
    """Checks that a target has structs if objects are to be such, before one is seen."""
    if contract.nested == "struct" and not getattr(target, "takes_structs", True):
        raise ConfigError(
            "this target has no type for a struct: choose json or columns", option="nested"
        )


def _table(
    settings: Settings, layout: Layout | OwnSchema, target: Target, collection: str | None
) -> Table:
    from dcp_rs.replication.table import Table

    return Table(
        target,
        layout,
        settings.mode,
        on_error=settings.on_error or "fail",
        on_drop=settings.on_drop,
        collection=collection,
        share=settings.share,
        bucket=settings.bucket,
        num_vbuckets=settings.num_vbuckets,
    )


def _check_members(target: object, members: tuple[str, ...], protocol: str) -> None:
    missing = [name for name in members if not hasattr(target, name)]
    if len(missing) == len(members):
        raise _checks.wrong_type("target", target, f"a URL or a {protocol}")
    if missing:
        raise ConfigError(
            f"{type(target).__name__} lacks {', '.join(missing)} of dcp_rs.replication.{protocol}",
            option="target",
        )
