"""An attempt to commit to an Iceberg table, whose files are removed if it comes to nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.iceberg_states import DOCUMENT, noted
from dcp_rs.replication.outage import Unreachable, is_passing
from dcp_rs.replication.target import overtaken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_log = logging.getLogger("dcp_rs.replication")

# Seconds before each time that the catalog is asked for a commit that failed.
_PAUSES = (0.0, 0.2, 1.0)
_RETRIES = "commit.retry.num-retries"


class Unsettled(Unreachable):
    """A catalog does not say whether a commit that failed is there."""


class Attempt:
    """One commit, which is the only one that its snapshot's summary says to have a document.

    Args:
        catalog: Catalog of pyiceberg.
        table: The table, as it must be when it is committed.
        name: Name of the table.
        document: The document.
    """

    def __init__(self, catalog: Any, table: Any, name: str, document: str) -> None:
        self._catalog, self._table, self._name = catalog, table, name
        self._document = document
        self._files: list[str] = []

    def run(self, write: Callable[[Any], None]) -> None:
        """Commits what is written to a transaction.

        Raises:
            ConcurrentWriterError: The table is no longer what was loaded.
            ConfigError: It is gone, or refuses to be written; `Unreachable` if that may
                pass, of which `Unsettled` is one.
        """
        # In this copy of the metadata alone. From 0.12 on, pyiceberg repeats a commit that lost
        # against another on top of that, which would double rows and replace the newer state.
        self._table.metadata.properties[_RETRIES] = "0"
        try:
            with self._noting_files(), self._table.transaction() as transaction:
                write(transaction)
        except BaseException as error:
            has_landed = self._has_landed()
            if has_landed and isinstance(error, Exception):
                _log.warning(
                    "a commit is there, although it failed: %s",
                    error,
                    extra=about("commit_answer_lost", error=str(error)),
                )
                self._table.refresh()
                return
            if has_landed is None and isinstance(error, Exception):
                raise Unsettled(
                    f"table {self._name}: a commit has failed, and the catalog does not say whether"
                    f" it is there: {' '.join(str(error).split())}",
                    option="target",
                ) from error
            if has_landed is False and not _is_unknown(error):
                self._remove(self._files)
            refused = _refused(self._name, error)
            if refused is not None:
                raise refused from error
            raise
        self._remove_merged()

    @contextlib.contextmanager
    def _noting_files(self) -> Iterator[None]:
        """Notes each file that is written for the table."""
        io, catalog = self._table.io, self._catalog
        new_output, remove = io.new_output, io.delete
        # Of catalogs that write metadata themselves, which do it with files of their own.
        write_metadata = getattr(catalog, "_write_metadata", None)

        def noting(location: str) -> Any:
            self._files.append(location)
            return new_output(location)

        def noting_metadata(metadata: Any, io: Any, metadata_path: str) -> None:
            # Other threads may use the same catalog.
            if self._is_in(metadata):
                self._files.append(metadata_path)
            if write_metadata is not None:
                write_metadata(metadata, io, metadata_path)

        def delete(location: Any) -> None:
            # From 0.12 on, pyiceberg removes the files of a commit that lost against another, which
            # can be the same one if its request came twice.
            if location not in self._files:
                remove(location)

        io.new_output, io.delete = noting, delete
        if write_metadata is not None:
            vars(catalog)["_write_metadata"] = noting_metadata
        try:
            yield
        finally:
            for name in ("new_output", "delete"):
                vars(io).pop(name)
            vars(catalog).pop("_write_metadata", None)

    def _is_in(self, metadata: Any) -> bool:
        is_it = metadata.table_uuid == self._table.metadata.table_uuid
        return is_it and any(
            noted(each).get(DOCUMENT) == self._document for each in metadata.snapshots
        )

    def _has_landed(self) -> bool | None:
        """Whether the catalog has the commit; `None` if it does not say."""
        from pyiceberg.exceptions import NoSuchTableError

        for pause in _PAUSES:
            time.sleep(pause)
            try:
                return self._is_in(self._catalog.load_table(self._name).metadata)
            except NoSuchTableError:
                return False
            except Exception:  # noqa: BLE001, S112 - whatever it is, the answer is missing
                continue
        return None

    def _remove_merged(self) -> None:
        """Removes manifests that pyiceberg has written and then merged into another."""
        lists = [each for each in self._files if each.endswith(".avro")]
        if len(lists) <= 2:  # The manifest, and the list of manifests.
            return
        named = set()
        # An overwrite makes two: one without what was there, and one with the new rows.
        for snapshot in self._table.metadata.snapshots:
            if snapshot.manifest_list in lists:
                named.add(snapshot.manifest_list)
                named |= {each.manifest_path for each in snapshot.manifests(self._table.io)}
        self._remove([each for each in lists if each not in named])

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:
            try:
                self._table.io.delete(file)
            except FileNotFoundError:
                pass  # pyiceberg has removed some, and others were not begun.
            except Exception as error:  # noqa: BLE001 - what ended the attempt is more important
                _log.warning(
                    "a file of a commit that failed cannot be removed: %s",
                    error,
                    extra=about("files_left", error=str(error)),
                )


def _is_unknown(error: BaseException) -> bool:
    from pyiceberg.exceptions import CommitStateUnknownException
    from requests import RequestException

    # The catalog may have the request, and make the commit yet.
    return isinstance(error, (CommitStateUnknownException, RequestException))


def _refused(table: str, error: BaseException) -> Exception | None:
    """Returns the error for a refusal; `None` for what is not known."""
    from pyiceberg import exceptions

    if isinstance(error, exceptions.CommitFailedException):
        return overtaken(table)
    permanent = (OSError, exceptions.UnauthorizedError, exceptions.ForbiddenError)
    if isinstance(error, (*permanent, exceptions.NoSuchTableError)):
        return (Unreachable if is_passing(error) else ConfigError)(
            f"table {table} cannot be written: {' '.join(str(error).split())}: mend that"
            " and start it again, which resumes from the last commit",
            option="target",
        )
    return None
