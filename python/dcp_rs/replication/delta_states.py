"""The states of a Delta table, as documents in a folder of it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from dcp_rs.exceptions import CheckpointError, DcpError
from dcp_rs.replication.state import State

if TYPE_CHECKING:
    from pathlib import Path

    from dcp_rs.replication.storage import Objects

STATES = "_dcp_rs"
"""Name of the folder in that of the table."""
# The table as the last commit left it.
_LEFT = "left.json"
# Documents that are kept, in case that an older version of the table is restored.
_KEPT = 50


class DeltaStates:
    """Documents with states, each named by the version of its transaction.

    Args:
        table: Folder of the table.
    """

    def __init__(self, table: Path) -> None:
        self._folder = table / STATES

    def read(self, transaction: int) -> State | None:
        """Returns the state of a transaction; `None` if there is no document.

        Raises:
            CheckpointError: The document is damaged.
        """
        text = self._text(f"{transaction}.json")
        return None if text is None else State.from_json(text)

    def _text(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def newest(self) -> State | None:
        """Returns the state with the highest number.

        Raises:
            CheckpointError: Its document is damaged.
        """
        numbers = self._numbers()
        return self.read(numbers[-1]) if numbers else None

    def newest_readable(self) -> State | None:
        """Returns the state with the highest number that no process has left half-written."""
        for number in reversed(self._numbers()):
            with contextlib.suppress(CheckpointError):
                return self.read(number)
        return None

    def write(self, transaction: int, state: State) -> None:
        """Writes a document durably.

        Raises:
            DcpError: It cannot be written.
        """
        path = self._folder / f"{transaction}.json"
        is_ours = False
        try:
            self._folder.mkdir(exist_ok=True)
            with path.open("x") as file:
                is_ours = True
                file.write(state.to_json())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # One that is there has the state of another attempt, however improbable its number.
            if is_ours:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise DcpError(
                f"the folder {self._folder} cannot be written: {error.strerror}: the next start "
                "resumes"
            ) from error

    def remove(self, transaction: int) -> None:
        """Removes the document of a commit that was not made."""
        self._unlink(f"{transaction}.json")

    def keep(self, transaction: int, *, rows: int, since: int | None = None) -> None:
        """Notes how many rows a transaction has left, and forgets old documents.

        Args:
            transaction: Version of the transaction.
            rows: Rows of the table.
            since: Version of the table since which files may be left that none names.
        """
        # Without it, the log says whether others have changed the table, as long as it goes back.
        with contextlib.suppress(OSError, DcpError):
            self._note(json.dumps({"transaction": transaction, "rows": rows, "since": since}))
        for number in self._numbers()[:-_KEPT]:
            if number != transaction:
                self.remove(number)

    def rows(self, transaction: int) -> int | None:
        """Returns how many rows a transaction has left, if that is known."""
        return self._left(transaction, "rows")

    def since(self, transaction: int) -> int | None:
        """Returns since which version files may be left that none names, if that is noted."""
        return self._left(transaction, "since")

    def _left(self, transaction: int, what: str) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DcpError):
            found = json.loads(self._text(_LEFT) or "{}")
            if found["transaction"] == transaction:
                return int(found[what])
        return None

    def _note(self, text: str) -> None:
        new = self._folder / f".{_LEFT}"
        new.write_text(text)
        new.replace(self._folder / _LEFT)

    def _unlink(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        return sorted(int(each.stem) for each in self._folder.glob("[0-9]*.json"))


class StoredStates(DeltaStates):
    """The same documents, in object storage.

    Args:
        objects: Objects of the table.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def write(self, transaction: int, state: State) -> None:
        """See `DeltaStates`. No other attempt has the name, so it may be put twice."""
        self._objects.put(f"{STATES}/{transaction}.json", state.to_json().encode())

    def _text(self, name: str) -> str | None:
        data = self._objects.get(f"{STATES}/{name}")
        return None if data is None else data.decode()

    def _note(self, text: str) -> None:
        self._objects.put(f"{STATES}/{_LEFT}", text.encode())

    def _unlink(self, name: str) -> None:
        self._objects.remove([f"{STATES}/{name}"])

    def _numbers(self) -> list[int]:
        _, found = self._objects.folders_and_files(f"{STATES}/")
        names = [each.name.rpartition("/")[2].removesuffix(".json") for each in found]
        return sorted(int(each) for each in names if each.isdecimal())
