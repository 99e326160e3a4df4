"""What a replication is asked to do, checked before anything is read or written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, get_args

from dcp_rs import _checks
from dcp_rs._listener import check_listen
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import BackfillOrder, Masks, Priority
from dcp_rs.replication.assembling import contract_of, one_table, table_per_collection
from dcp_rs.replication.controls import check_commits
from dcp_rs.replication.core import Settings
from dcp_rs.replication.maintenance import Policy
from dcp_rs.replication.opening import open_database, open_target, opened, template_of
from dcp_rs.replication.reload import Reload
from dcp_rs.replication.schemas import Contract
from dcp_rs.replication.sharing import BucketShare, check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_rs.replication.tables import Tables

_OF_CONTRACTS = (
    "document_schema", "key_type", "deletes", "new_fields", "type_conflicts", "extra", "nested",
)  # fmt: skip
_OF_SETTINGS = (
    "mode", "once", "persisted_only", "on_purge", "priority", "backfill_order", "on_drop",
    "on_error", "commit_rows", "commit_bytes", "commit_interval", "target_retry_timeout",
    "on_progress",
)  # fmt: skip


def prepare(given: Mapping[str, Any]) -> tuple[Tables, Settings]:
    """Checks the arguments of `dcp_rs.replicate`, and makes what they ask for.

    The target is made, not opened: nothing is read or written.

    Args:
        given: All of them.

    Raises:
        ConfigError: One is wrong, or the target cannot do what is asked of it.
        ImportError: The target's library is not installed.
    """
    _check(given)
    collections, stop, share = given["collections"], given["stop"], given["share"]
    if isinstance(collections, str):
        collections = [collections]
    part = None if share is None else BucketShare.parse(share, given["client"].num_vbuckets)
    if part is not None:
        check_options(given["mode"], given["on_drop"])
    settings = Settings(
        **{name: given[name] for name in _OF_SETTINGS},
        bucket=given["client"].bucket_name,
        num_vbuckets=given["client"].num_vbuckets,
        share=part,
        collections=None if collections is None else _checks.names("collections", collections),
        maintenance=Policy.of(given["compact_every"], given["keep_versions_for"]),
        stop=threading.Event() if stop is None else stop,
    )
    masks = Masks.of(given["drop_fields"], given["hash_fields"], given["hash_key"])
    options = {name: given[name] for name in _OF_CONTRACTS} | {"masks": masks}
    contract = contract_of(Contract(), options, given["mode"])
    sample, reload = given["sample"], Reload.of(given["reload"], given["client"].num_vbuckets)
    target, storage_options = given["target"], given["storage_options"]
    tables = template_of(target, given["tables"]) or given["tables"]
    if tables is None:
        one = opened(target, storage_options, open_target, part)
        return one_table(one, settings, contract, sample=sample, reload=reload), settings
    place = opened(target, storage_options, open_database, part)
    written = table_per_collection(place, tables, settings, contract, sample=sample, reload=reload)
    return written, settings


def _check(given: Mapping[str, Any]) -> None:
    """Checks what needs no other argument, or few."""
    _checks.instance("client", given["client"], Client, "a Client")
    for name in ("once", "persisted_only"):
        _checks.flag(name, given[name])
    check_commits(
        rows=given["commit_rows"],
        size=given["commit_bytes"],
        interval=given["commit_interval"],
        hung_after=given["hung_after"],
    )
    _checks.seconds("target_retry_timeout", given["target_retry_timeout"], 0, 365 * 86_400)
    _checks.word("on_purge", given["on_purge"], ("resync", "ignore"))
    _checks.word("on_drop", given["on_drop"], ("empty", "drop", "keep"))
    for name, words in (
        ("priority", get_args(Priority)),
        ("backfill_order", get_args(BackfillOrder)),
        ("on_error", ("reject", "fail")),
    ):
        if given[name] is not None:
            _checks.word(name, given[name], words)
    if given["listen"] is not None:
        check_listen(given["listen"])
    if given["stop"] is not None:
        _checks.instance("stop", given["stop"], threading.Event, "a threading.Event")
    if given["on_progress"] is not None and not callable(given["on_progress"]):
        raise _checks.wrong_type("on_progress", given["on_progress"], "a function")
    if given["reload"] is not None and given["mode"] in {"log", "history"}:
        raise ConfigError(
            f"a {given['mode']} keeps what it has, and cannot be read again: replicate to another"
            " one",
            option="reload",
        )
    _checks.integer("sample", given["sample"], 1, 1_000_000)
