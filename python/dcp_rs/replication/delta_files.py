"""Files of a Delta table that no version of it names, and the lock under which they are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from dcp_rs.replication.storage import Objects

_LOG = "_delta_log"
_CHANGE_DATA = "_change_data"
# Every table that is kept has this column of few, small numbers. Its encoding tells our files from
# those of other writers, of which each chooses a dictionary.
_MARKED = "epoch"
_ENCODING = "DELTA_BINARY_PACKED"
# What deltalake decodes, panics at, or refuses in the path of a table, and what stands for bytes
# that are not UTF-8.
_REFUSED = frozenset("[]|^\\\x7f\ufffd") | {chr(each) for each in range(32)}
_HEX = frozenset("0123456789abcdefABCDEF")
_PAUSE = 0.05
_URI = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<path>.*)", re.DOTALL)


def local_folder(location: str) -> Path | None:
    """Returns the folder of a table, resolved; `None` if it is in an object store.

    Raises:
        ConfigError: deltalake would take its name for another.
    """
    uri = _URI.fullmatch(location)
    if uri is not None and uri["scheme"] != "file":
        return None
    try:
        folder = Path(os.path.realpath(location if uri is None else unquote(uri["path"])))
    except ValueError as error:
        raise ConfigError("has a NUL, which paths may not have", option="target") from error
    text = str(folder)
    places = [place for place, each in enumerate(text) if each == "%"]
    is_encoded = any(len(text) > n + 2 and _HEX.issuperset(text[n + 1 : n + 3]) for n in places)
    if is_encoded or any(each in _REFUSED or "\ud800" <= each <= "\udfff" for each in text):
        raise ConfigError(
            f"deltalake does not take the name of the folder {ascii(text)[1:-1]} as it is: "
            "choose one without percent-encoding, brackets, |, ^, backslashes, control characters "
            "and bytes that are not UTF-8",
            option="target",
        )
    return folder


def marking(deltalake: Any) -> Any:
    """Returns the properties of the Parquet files that are ours."""
    column = deltalake.ColumnProperties(encoding=_ENCODING, dictionary_enabled=False)
    return deltalake.WriterProperties(compression="SNAPPY", column_properties={_MARKED: column})


@contextlib.contextmanager
def locked(folder: Path | None, timeout: float) -> Iterator[bool]:
    """Keeps other processes of dcp_rs on this table from committing to it.

    Args:
        folder: Folder of the table.
        timeout: Seconds to wait for the lock.

    Yields:
        Whether it is locked. A file system may have no locks, and an object store has none.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    if folder is None:
        yield False
        return
    try:
        descriptor = os.open(folder / _LOG, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _take(descriptor, time.monotonic() + timeout)
    finally:
        os.close(descriptor)


def _take(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)
        except OSError:
            return False
        else:
            return True


def written_since(folder: Path, version: int) -> list[Path]:
    """Returns the Parquet files of dcp_rs that are not older than a version of the table.

    If the version's file in the log was cleaned up, there are none.
    """
    try:
        begun = (folder / _LOG / f"{version:020}.json").stat().st_mtime_ns
    except OSError:
        return []
    found = []
    for parent, folders, names in os.walk(folder):
        # Other writers do not look into hidden folders either.
        folders[:] = [each for each in folders if each[0] not in "._" or each == _CHANGE_DATA]
        for name in names:
            path = Path(parent, name)
            # VACUUM may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(".parquet") and path.stat().st_mtime_ns >= begun:
                    found.append(path)
    return found


def remove_unnamed(files: list[Path], named: AbstractSet[str]) -> None:
    """Removes files of ours that no version names."""
    for path in files:
        if path.name not in named and _is_ours(path):
            path.unlink(missing_ok=True)


def written_objects(objects: Objects, version: int | None) -> list[str]:
    """Returns the Parquet files in object storage that are not older than a version of the table.

    Args:
        objects: Objects of the table.
        version: The version, or `None` for all files. If its file in the log was cleaned up, there
            are none.
    """
    found = objects.files()
    begun = 0.0
    if version is not None:
        name = f"{_LOG}/{version:020}.json"
        begun = next((each.changed for each in found if each.name == name), float("inf"))
    return [
        each.name
        for each in found
        if each.name.endswith(".parquet")
        and each.changed >= begun
        and all(part[0] not in "._" or part == _CHANGE_DATA for part in each.name.split("/")[:-1])
    ]


def remove_unnamed_objects(objects: Objects, files: list[str], named: AbstractSet[str]) -> None:
    """Removes objects of ours that no version names."""
    for name in files:
        if name.rpartition("/")[2] not in named and _is_ours(objects.open(name)):
            objects.remove([name])


def _is_ours(path: Any) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return False
    if not metadata.num_row_groups or not str(metadata.created_by).startswith("parquet-rs"):
        return False
    group = metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    return any(each.path_in_schema == _MARKED and _ENCODING in each.encodings for each in columns)
