"""What the log of a Delta table says about commits that other writers made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dcp_rs._libraries import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Entry of the commit's own information: the version up to which it has looked at the log.
SEEN = "dcp_rs.seen"


@dataclass(frozen=True)
class Change:
    """A commit of another writer that adds or removes rows.

    Attributes:
        version: Version of the table that it made.
        operation: What its writer calls it, such as `RESTORE`.
        parameters: What its writer says about it.
    """

    version: int
    operation: str
    parameters: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"another writer made version {self.version} ({self.operation})"

    @property
    def restored(self) -> int | None:
        """The version that it restored, if it did and names it."""
        found = self.parameters.get("version")
        is_named = self.operation == "RESTORE" and str(found).isdecimal()
        return int(str(found)) if is_named else None


@dataclass(frozen=True)
class Since:
    """What was done since a commit of ours.

    Attributes:
        version: The version of the table that our commit made, if the log still has it.
        change: The newest change by another writer.
        is_complete: Whether the log still has all of the commits.
    """

    version: int | None
    change: Change | None
    is_complete: bool


class DeltaLog:
    """The commits of a Delta table, one JSON file each.

    Args:
        location: Folder or URI of the table.
        storage_options: Options of the object store, as `deltalake` has them.
    """

    def __init__(self, location: str, storage_options: dict[str, str] | None) -> None:
        require_pyarrow("a Delta table")
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        self._files = PyFileSystem(DeltaStorageHandler(location, storage_options))

    def actions(self, version: int) -> list[dict[str, Any]] | None:
        """Returns the actions of a commit; `None` if its file was cleaned up."""
        try:
            with self._files.open_input_file(f"_delta_log/{version:020}.json") as file:
                return [json.loads(line) for line in file.read().splitlines() if line.strip()]
        except FileNotFoundError:
            return None

    def since(self, newest: int, application: str, transaction: int, *, oldest: int = 0) -> Since:
        """Looks for changes by others since a transaction, or while it was committed.

        Operations that move rows between files, or that only change the schema or properties, are
        none: their files say that they change no data.

        Args:
            newest: Version of the table to begin at.
            application: Name of the transactions.
            transaction: Version of the transaction.
            oldest: Version of the table to end at.
        """
        change, ours, version = None, None, newest
        while version >= oldest:
            actions = self.actions(version)
            if actions is None:
                return Since(ours, change, ours is not None)
            if ours is None and {"appId": application, "version": transaction} in [
                {name: action["txn"].get(name) for name in ("appId", "version")}
                for action in actions
                if "txn" in action
            ]:
                ours = version
                oldest = int(_information(actions).get(SEEN, version - 1)) + 1
            elif change is None and any(each.get("dataChange", True) for each in _files(actions)):
                found = _information(actions)
                change = Change(
                    version,
                    str(found.get("operation", "unknown")),
                    found.get("operationParameters") or {},
                )
            version -= 1
        return Since(ours, change, is_complete=ours is not None or oldest > 0)

    def named(self, oldest: int, newest: int) -> set[str]:
        """Returns the names, without folders, of the files that commits add or remove."""
        return {
            PurePosixPath(unquote(each["path"])).name
            for version in range(oldest, newest + 1)
            for each in _files(self.actions(version) or [], "add", "remove", "cdc")
        }


def _information(actions: list[dict[str, Any]]) -> dict[str, Any]:
    return next((each["commitInfo"] for each in actions if "commitInfo" in each), {})


def _files(actions: list[dict[str, Any]], *kinds: str) -> Iterator[dict[str, Any]]:
    for action in actions:
        for kind in kinds or ("add", "remove"):
            if kind in action:
                yield action[kind]
