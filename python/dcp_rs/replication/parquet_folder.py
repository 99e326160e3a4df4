"""A folder of Parquet files that are named by the numbers of commits."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

# Digits of a number in a file's name.
_DIGITS = 12
# Columns with a value for each row, of which no dictionary is tried.
_UNIQUE = frozenset({"key", "value", "seqno", "cas", "timestamp"})
_NUMBERED = re.compile(rf"(\.?)([0-9]{{{_DIGITS}}})\.parquet")


@dataclass(frozen=True)
class Footer:
    """What the footer of a file says.

    Attributes:
        schema: Columns of the file.
        rows: How many rows it has.
        notes: Further metadata.
    """

    schema: pa.Schema
    rows: int
    notes: Mapping[bytes, bytes]


@dataclass(frozen=True)
class Listing:
    """The Parquet files of a folder.

    Attributes:
        sizes: Bytes of each file, by number.
        others: Names of files that are not named by a number.
        unfinished: Numbers of files that are being written, or that a crash has left.
    """

    sizes: dict[int, int]
    others: list[str]
    unfinished: list[int]


class NumberedFiles:
    """The files of a folder.

    A file is written and synced under a hidden name, and then renamed.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, number: int) -> Path:
        """Returns the path of a file."""
        return self.path / file_name(number)

    def _hidden(self, number: int) -> Path:
        return self.path / f".{self.file(number).name}"

    def listing(self) -> Listing:
        """Lists the files. A folder that does not exist has none."""
        found = Listing({}, [], [])
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if not entry.name.endswith(".parquet"):
                    continue
                named = _NUMBERED.fullmatch(entry.name)
                if named is not None and named[1]:
                    found.unfinished.append(int(named[2]))
                elif named is not None and entry.is_file():
                    found.sizes[int(named[2])] = entry.stat().st_size
                elif not entry.name.startswith("."):
                    found.others.append(entry.name)
        return found

    def read_footer(self, number: int) -> Footer:
        """Reads the footer of a file.

        Raises:
            OSError: The file cannot be read.
            pyarrow.ArrowInvalid: It is damaged.
        """
        import pyarrow.parquet as pq

        # A path would be taken for a URI if it looks like one.
        with self.file(number).open("rb") as file:
            found = pq.read_metadata(file)
        return Footer(found.schema.to_arrow_schema(), found.num_rows, found.metadata or {})

    def write(self, number: int, rows: pa.Table, notes: Mapping[str, str]) -> None:
        """Writes a file, durably. If it fails before the rename, no file is left."""
        hidden = self._hidden(number)
        try:
            with hidden.open("wb") as file:
                write_parquet(file, rows, notes)
                file.flush()
                os.fsync(file.fileno())
            hidden.rename(self.file(number))
        except BaseException:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise
        sync_folder(self.path)

    def remove(self, number: int) -> None:
        """Removes a file, if it is there."""
        self.file(number).unlink(missing_ok=True)

    def remove_unfinished(self, numbers: list[int]) -> None:
        """Removes what a crash has left."""
        for number in numbers:
            self._hidden(number).unlink(missing_ok=True)


def file_name(number: int) -> str:
    """Returns the name of the file of a commit."""
    return f"{number:0{_DIGITS}}.parquet"


def write_parquet(file: IO[bytes], rows: pa.Table, notes: Mapping[str, str]) -> None:
    """Writes rows, and notes in the footer."""
    import pyarrow.parquet as pq

    repeating = [name for name in rows.column_names if name not in _UNIQUE]
    with pq.ParquetWriter(
        file, rows.schema, compression="zstd", use_dictionary=repeating
    ) as writer:
        writer.write_table(rows)
        # In the schema's metadata it would be stored twice.
        writer.add_key_value_metadata(dict(notes))


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
