"""State documents of an Iceberg table, each of which a snapshot names.

A state of 1,024 vBuckets has 180 KB. In the summary of a snapshot it would be in every later file
of metadata, so the summary has only where the document is. Names that begin with `_` are not
removed as orphans.
"""

from __future__ import annotations

import gzip
import json
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dcp_rs._logging import about
from dcp_rs.exceptions import CheckpointError
from dcp_rs.replication.state import State

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("dcp_rs.replication")

# In the summary of a snapshot.
COMMIT = "dcp_rs.commit"
DOCUMENT = "dcp_rs.document"
_COMPLETE = "dcp_rs.complete-generation"
# Property of a table: the newest commit's document, and how many rows the table has after it. It
# says what a table has whose own snapshots were expired after a compaction.
NEWEST = "dcp_rs.newest"
# Property that has the state itself, as 0.2.0 wrote it.
OLD = "dcp_rs.state"

_FOLDER = "_dcp_rs"
# At .gz, PyArrow would compress it once more.
_SUFFIX = ".json.gzip"


def new_document(table: Any, commits: int) -> str:
    """Returns where to write the state of a commit; no other attempt has the same."""
    name = f"{commits:012}-{secrets.token_hex(4)}{_SUFFIX}"
    return f"{table.location().rstrip('/')}/{_FOLDER}/{name}"


def write(table: Any, document: str, state: State) -> None:
    """Writes a state document."""
    with table.io.new_output(document).create() as file:
        file.write(gzip.compress(state.to_json().encode(), mtime=0))


def summary(state: State, document: str) -> dict[str, str]:
    """Returns what the summary of a commit's snapshot has."""
    return {
        COMMIT: str(state.commits),
        DOCUMENT: document,
        _COMPLETE: str(state.complete_generation),
    }


def newest(table: Any, document: str, rows: int) -> dict[str, str]:
    """Returns the property that a commit of rows sets."""
    before = table.current_snapshot()
    total = "0" if before is None else noted(before).get("total-records")
    records = None if total is None else int(total) + rows
    return {NEWEST: json.dumps({"document": document, "records": records})}


def noted(snapshot: Any) -> dict[str, str]:
    """Returns the summary of a snapshot."""
    return {} if snapshot.summary is None else dict(snapshot.summary.additional_properties)


def ancestors(table: Any) -> Iterator[Any]:
    """Returns the current snapshot and those before it, up to one that was expired."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)


def load(table: Any) -> State | None:
    """Returns the state that belongs to what a table holds; see `Target.open`.

    Raises:
        CheckpointError: It cannot be read, or is damaged.
    """
    if table.current_snapshot() is None:
        return None
    document, why = None, ""
    for snapshot in ancestors(table):
        document = noted(snapshot).get(DOCUMENT)
        if document is not None:
            break
        # A compaction has the same rows.
        if snapshot.summary is None or snapshot.summary.operation.value != "replace":
            why = "others have added, changed or removed rows"
    if document is None and OLD in table.properties:
        return State.from_json(table.properties[OLD])
    if document is None:
        found = json.loads(table.properties.get(NEWEST, "null"))
        if found is None:
            return None
        document = found["document"]
        total = noted(table.current_snapshot()).get("total-records")
        if not why and total != str(found["records"]):
            why = "its snapshots were expired, and it has not the rows that were written last"
    return replace(_read(table, document), moved=why)


def _read(table: Any, document: str) -> State:
    try:
        with table.io.new_input(document).open() as file:
            text = gzip.decompress(file.read()).decode()
    except (OSError, EOFError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(
            f"the state that the table's snapshot names cannot be read: {document}: {why}: restore"
            " it, or begin with a new table"
        ) from error
    return State.from_json(text)


def forget(table: Any, commits: int) -> None:
    """Removes the documents of snapshots that no longer exist, and of attempts that failed.

    Those above a number of commits are left, since another process may be about to commit them.
    """
    from pyiceberg.io.pyarrow import PyArrowFileIO

    if not isinstance(table.io, PyArrowFileIO):
        return  # Others do not list files.
    kept = {noted(each).get(DOCUMENT) for each in table.metadata.snapshots}
    kept.add((json.loads(table.properties.get(NEWEST, "null")) or {}).get("document"))
    names = {each.rpartition("/")[2] for each in kept if each}
    folder = f"{table.location().rstrip('/')}/{_FOLDER}"
    try:
        for name in _names(table.io, folder):
            number = name.partition("-")[0]
            if name not in names and number.isdecimal() and int(number) <= commits:
                table.io.delete(f"{folder}/{name}")
    except OSError as error:
        _log.warning(
            "state documents of expired snapshots cannot be removed: %s",
            error,
            extra=about("files_left", error=str(error)),
        )


def _names(io: Any, folder: str) -> list[str]:
    from pyarrow.fs import FileSelector

    scheme, netloc, path = io.parse_location(folder, io.properties)
    selector = FileSelector(path, allow_not_found=True)
    found = io.fs_by_scheme(scheme, netloc).get_file_info(selector)
    return [each.base_name for each in found if each.base_name.endswith(_SUFFIX)]
