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
        try:
            return State.from_json((self._folder / f"{transaction}.json").read_text())
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
        try:
            self._folder.mkdir(exist_ok=True)
            with path.open("x") as file:
                file.write(state.to_json())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise DcpError(
                f"the folder {self._folder} cannot be written: {error.strerror}: the next start "
                "resumes"
            ) from error

    def remove(self, transaction: int) -> None:
        """Removes the document of a commit that was not made."""
        (self._folder / f"{transaction}.json").unlink(missing_ok=True)

    def keep(self, transaction: int, *, rows: int) -> None:
        """Notes how many rows a transaction has left, and forgets old documents."""
        new = self._folder / f".{_LEFT}"
        # Without it, the log says whether others have changed the table, as long as it goes back.
        with contextlib.suppress(OSError):
            new.write_text(json.dumps({"transaction": transaction, "rows": rows}))
            new.replace(self._folder / _LEFT)
        for number in self._numbers()[:-_KEPT]:
            if number != transaction:
                (self._folder / f"{number}.json").unlink(missing_ok=True)

    def rows(self, transaction: int) -> int | None:
        """Returns how many rows a transaction has left, if that is known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((self._folder / _LEFT).read_text())
            if found["transaction"] == transaction:
                return int(found["rows"])
        return None

    def _numbers(self) -> list[int]:
        return sorted(int(each.stem) for each in self._folder.glob("[0-9]*.json"))
