"""A Delta table that is written by one application, with each commit made only once."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shutil
import tempfile
import time
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError, DcpError
from dcp_rs.replication.delta_files import (
    local_folder,
    locked,
    marking,
    remove_unnamed,
    remove_unnamed_objects,
    written_objects,
    written_since,
)
from dcp_rs.replication.delta_log import SEEN, DeltaLog
from dcp_rs.replication.delta_schema import (
    INDEX,
    IS_DELETED,
    LIBRARY,
    check_names,
    check_table,
    constraints,
    delta_schema,
    fields_to_add,
    nulls_refused,
)
from dcp_rs.replication.outage import is_passing
from dcp_rs.replication.target import Maintained, check_folder, overtaken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from dcp_rs.replication.delta_log import Since
    from dcp_rs.replication.storage import Objects

RANDOM_BITS = 20
"""The version of a transaction is the number of the commit and this many random bits: an attempt
that came to nothing leaves a document that no other attempt writes over."""

# Property of the table that names the application which writes to it.
_OWNER = "dcp_rs.application"
# How long to retry a commit that conflicts with others, such as OPTIMIZE, and the pauses before.
_WAIT_SECONDS = 30.0
_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_COLUMNS = re.compile(r"\b(vbucket|collection_id|epoch|generation|seqno|valid_to_seqno)\b")
# Where the rows of a table with constraints are checked, in the folder for what is no data.
_SCRATCH = "_dcp_rs/check-"
_VECTORS = "deletionVectors"
# How deltalake begins to tell of rows that a constraint refuses.
_INVALID = "Invalid data found"


class DeltaTable:
    """A Delta table, and the transactions of an application in it.

    Args:
        location: Folder or URI of the table.
        application: Name of the transactions. No other application of dcp_rs may write to it.
        storage_options: Options of the object store, as `deltalake` has them.
        is_log: Whether rows are only appended.
        objects: Objects of the table, if it is in object storage.

    Raises:
        ConfigError: deltalake takes the folder for another.
        ImportError: deltalake is not installed.
    """

    def __init__(
        self,
        location: str,
        application: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        is_log: bool = False,
        objects: Objects | None = None,
    ) -> None:
        self.objects = objects
        self._deltalake = require("a Delta table", LIBRARY, "delta")
        self.folder = local_folder(location)
        self.location = location if self.folder is None else str(self.folder)
        self.is_log = is_log
        self._application = application
        self._storage = None if storage_options is None else dict(storage_options)
        self._table: Any = None
        # Version of the table up to which the commits of others were looked at.
        self._seen = -1
        # Version that the application's last commit made, if it was looked for.
        self._last: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows, so far as is known."""
        return not self._table.file_uris()

    @property
    def files(self) -> set[str]:
        """Names of its files without folders, so far as is known."""
        return {PurePosixPath(unquote(each)).name for each in self._table.file_uris()}

    @property
    def has_files(self) -> bool:
        """Whether its files are there. VACUUM may have removed those of a version restored."""
        if self.objects is not None:
            there = {PurePosixPath(each.name).name for each in self.objects.files()}
            return self.files <= there
        return all(
            Path(each).exists() or Path(unquote(each)).exists() for each in self._table.file_uris()
        )

    @property
    def rows(self) -> int:
        """Number of its rows, by the statistics of its files and by deletion vectors."""
        found: int = self._table.count()
        if _VECTORS not in (self._table.protocol().writer_features or ()):
            return found
        vectors = self._table.deletion_vectors().read_all()["selection_vector"].to_pylist()
        return found - sum(list(each).count(False) for each in vectors)

    @property
    def columns(self) -> list[str]:
        """Names of its columns, so far as is known."""
        return [field.name for field in self._table.schema().fields]

    @property
    def number(self) -> int:
        """Number of its version, so far as is known."""
        found: int = self._table.version()
        return found

    @property
    def owner(self) -> str | None:
        """The application that writes to it, if it is known."""
        found: str | None = self._table.metadata().configuration.get(_OWNER)
        return found

    @cached_property
    def _log(self) -> DeltaLog:
        return DeltaLog(self.location, self._storage)

    @property
    def last(self) -> int | None:
        """Version that the application's last commit made, if it was looked for."""
        return self._last

    # ----- opening -----

    def find(self) -> bool:
        """Looks for the table, or at what was added to it; whether it is there.

        Raises:
            ConfigError: It cannot be opened.
        """
        delta = self._deltalake
        if self.folder is not None:
            check_folder(self.folder)
        try:
            if self._table is not None:
                self._table.update_incremental()
            elif delta.DeltaTable.is_deltatable(self.location, self._storage):
                self._table = delta.DeltaTable(self.location, storage_options=self._storage)
        except self._errors as error:
            if self.objects is not None:
                raise self.objects.storage.refused(error) from None
            raise ConfigError(
                f"deltalake cannot open table {self.location}: {_line(error)}: repair it, "
                "or use another",
                option="target",
            ) from error
        return self._table is not None

    def make(self, schema: pa.Schema) -> None:
        """Makes the table if it is not there; if that fails, no folder is left.

        Raises:
            ConfigError: A column cannot be one of a Delta table, or the table cannot be made.
        """
        check_names(schema, is_log=self.is_log)
        wanted = delta_schema(schema)
        new = _first_new(self.folder)
        failures: tuple[type[Exception], ...] = (*self._errors, ValueError)
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._table = self._deltalake.DeltaTable.create(
                self.location,
                wanted,
                mode="ignore",
                configuration={_OWNER: self._application},
                storage_options=self._storage,
                raise_if_key_not_exists=False,
            )
        except failures as error:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
            if self.objects is not None:
                if self.find():  # The answer was lost.
                    return
                raise self.objects.storage.refused(error) from None
            why = (isinstance(error, OSError) and error.strerror) or _line(error)
            raise ConfigError(
                f"the folder {self.location} cannot be created: {why}", option="target"
            ) from error

    def version(self) -> int | None:
        """Returns the version of the application's last transaction; `None` before the first.

        Raises:
            ConfigError: The table is another application's.
        """
        found: int | None = self._table.transaction_version(self._application)
        if self.owner not in {None, self._application}:
            are_queries = {str(self.owner)[:13], self._application[:13]} == {"dcp_rs.spark."}
            go_on = ", or go on with the checkpoint of its query" if are_queries else ""
            raise ConfigError(
                f"table {self.location} belongs to {self.owner}, not to "
                f"{self._application}: use another table{go_on}",
                option="target",
            )
        if found is None and not self.is_empty:
            raise ConfigError(
                f"table {self.location} has rows that dcp_rs did not write: use another",
                option="target",
            )
        return found

    def check(self, schema: pa.Schema) -> None:
        """Checks that rows of a schema can be written.

        Raises:
            ConfigError: They cannot; nothing was written.
        """
        check_names(schema, is_log=self.is_log)
        check_table(self._table, schema, self.location, is_log=self.is_log)
        self._missing(schema)

    def widen(self, schema: pa.Schema) -> None:
        """Adds the columns that the table lacks.

        Raises:
            ConfigError: A column has another type; nothing was written.
        """
        missing = self._missing(schema)
        try:
            if missing:
                self._table.alter.add_columns(missing)
            if self.owner is None:
                self._table.alter.set_table_properties(
                    {_OWNER: self._application}, raise_if_not_exists=False
                )
        except self._errors as error:
            raise self._typed(error, is_conflict=False) from error

    def _missing(self, schema: pa.Schema) -> list[Any]:
        wanted = self._deltalake.Schema.from_arrow(delta_schema(schema)).fields
        return fields_to_add(self._table.schema().fields, wanted, self.location)

    # ----- what others did -----

    def since(self, transaction: int) -> Since:
        """Looks for changes of rows by others since a transaction."""
        self._seen = self.number
        found = self._log.since(self.number, self._application, transaction)
        self._last = found.version
        return found

    def at(self, version: int) -> DeltaTable | None:
        """Returns the table as it was at a version, if its log is still there.

        Raises:
            Unreachable: The storage does not answer.
        """
        old = DeltaTable(
            self.location, self._application, self._storage, is_log=self.is_log,
            objects=self.objects,
        )  # fmt: skip
        try:
            old._table = self._deltalake.DeltaTable(
                self.location, version=version, storage_options=self._storage
            )
        except self._errors as error:
            if self.objects is not None and is_passing(error):
                raise self.objects.storage.refused(error) from None
            return None
        return old

    # ----- committing -----

    def commit(
        self,
        version: int,
        write: Callable[[Any], None],
        is_due: Callable[[int | None], bool],
        moved: Callable[[str], DcpError] | None = None,
    ) -> None:
        """Makes a commit with a transaction of this version.

        Args:
            version: Of the transaction.
            write: Writes the rows, with the properties of the commit. Called again if another
                commit was made meanwhile.
            is_due: Says, of the version of the last transaction, whether this one is to be made.
            moved: Gives the error for a change of rows that another writer has made.

        Raises:
            ConcurrentWriterError: Another process of dcp_rs commits to the table.
            ConfigError: The table refuses the commit.
            DcpError: It cannot be written.
        """
        try:
            with locked(self.folder, _WAIT_SECONDS) as is_locked:
                self._commit(version, write, is_due, moved, is_locked=is_locked)
        except BlockingIOError as error:
            raise overtaken(self.location) from error

    def _commit(
        self,
        version: int,
        write: Callable[[Any], None],
        is_due: Callable[[int | None], bool],
        moved: Callable[[str], DcpError] | None,
        *,
        is_locked: bool,
    ) -> None:
        deadline, pause = time.monotonic() + _WAIT_SECONDS, _PAUSE
        while True:
            self.find()
            before = self.version()
            if not is_due(before):
                return
            seen = self.number
            if moved is not None and before is not None and seen != self._seen:
                self._refuse_changes(before, self._seen + 1, moved)
            try:
                write(self._properties(version, seen))
                # Without changed rows, the operation makes no commit.
                if not self._has(version):
                    self.append_nothing(self._properties(version, seen))
            except BaseException as error:  # noqa: BLE001 - raised again after cleaning up
                if is_locked:
                    self._clean(seen)
                # What follows a commit, such as a checkpoint of the log, may fail as well.
                if not (isinstance(error, self._errors) and self._is_made(version)):
                    is_conflict = isinstance(error, self._conflict) and self.number != seen
                    if not is_conflict or time.monotonic() + pause > deadline:
                        raised = self._typed(error, is_conflict=is_conflict)
                        raise raised from (None if raised is error else error)
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
            if moved is not None and self.number > seen + 1:
                self._refuse_changes(version, 0, moved)
            self._seen = self.number
            return

    def _properties(self, version: int, seen: int) -> Any:
        delta = self._deltalake
        return delta.CommitProperties(
            app_transactions=[delta.Transaction(self._application, version)],
            custom_metadata={SEEN: seen},
        )

    def lacks(self, transaction: int) -> bool:
        """Whether it is certain that a transaction is not the application's newest."""
        with contextlib.suppress(*self._errors):
            return not self._has(transaction)
        return False

    def _has(self, transaction: int) -> bool:
        self._table.update_incremental()
        return bool(self._table.transaction_version(self._application) == transaction)

    def _is_made(self, transaction: int) -> bool:
        with contextlib.suppress(*self._errors):
            return self._has(transaction)
        return False

    def _refuse_changes(
        self, transaction: int, oldest: int, moved: Callable[[str], DcpError]
    ) -> None:
        found = self._log.since(self.number, self._application, transaction, oldest=oldest)
        if found.change is not None:
            raise moved(str(found.change))
        if not found.is_complete:
            raise moved("commits of others are no longer in its log")

    @property
    def _conflict(self) -> type[Exception]:
        found: type[Exception] = self._deltalake.exceptions.CommitFailedError
        return found

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        """What deltalake raises; errors of Arrow in its code have no class of their own."""
        known = self._deltalake.exceptions
        return (known.DeltaError, OSError, require_pyarrow("a Delta table").ArrowException)

    def _typed(self, error: BaseException, *, is_conflict: bool) -> BaseException:
        """Returns what to raise for an error."""
        if isinstance(error, DcpError) or not isinstance(error, self._errors):
            return error
        known = self._deltalake.exceptions
        table, why = f"table {self.location}", _line(error)
        if self.objects is not None:
            why = self.objects.storage.shown(error)
        if is_conflict:
            return ConcurrentWriterError(
                f"{table} was committed to by others for too long: {why}: try again later"
            )
        if _INVALID in str(error):
            # The rest of the text has the rows.
            error.args = (why,)
            return ConfigError(
                f"{table} refuses rows: {why}: drop its constraint, or use another table",
                option="target",
            )
        if self.objects is not None and is_passing(error):
            return self.objects.storage.refused(error)
        refusals = (known.CommitFailedError, known.SchemaMismatchError, known.DeltaProtocolError)
        if isinstance(error, refusals):
            return ConfigError(
                f"{table} refuses a commit: {why}: alter it, or use another table", option="target"
            )
        return DcpError(f"{table} cannot be written: {why}: the next start resumes")

    # ----- files -----

    def clean(self) -> None:
        """Removes the files of commits that were not finished, unless a commit is in progress."""
        with contextlib.suppress(BlockingIOError), locked(self.folder, 0.0) as is_locked:
            if is_locked and self.folder is not None:
                self._clean(self.number if self._last is None else self._last)
                for left in self.folder.glob(f"{_SCRATCH}*"):
                    shutil.rmtree(left, ignore_errors=True)

    def clean_objects(self, version: int | None) -> None:
        """Removes objects of ours that were written after a version and that none names.

        Only for one whose commit fails all that other processes have begun.

        Args:
            version: Of the table; `None` for all that were written.
        """
        if self.objects is None:
            return
        with contextlib.suppress(*self._errors):
            found = written_objects(self.objects, version)
            if found:
                self._table.update_incremental()
                named = self._log.named(version or 0, self.number) | self.files
                remove_unnamed_objects(self.objects, found, named)

    def _clean(self, version: int) -> None:
        """Removes files of ours that were written after a version and that none names."""
        if self.folder is None:
            return
        with contextlib.suppress(*self._errors):
            files = written_since(self.folder, version)
            if files:
                self._table.update_incremental()
                named = self._log.named(version, self.number)
                remove_unnamed(files, named | self.files)

    def maintain(self, transaction: int, keep: float | None) -> Maintained | None:
        """Compacts small files, and removes those of versions older than `keep` seconds.

        Args:
            transaction: The application's newest, or the table is left alone.
            keep: Seconds, of which deltalake takes whole hours; `None` to remove nothing.

        Raises:
            DcpError: It cannot be done.
        """
        try:
            with locked(self.folder, 0.0) as is_locked:
                self.find()
                if self.version() != transaction or self.since(transaction).change is not None:
                    return None
                seen = self.number
                try:
                    # One at a time: each holds the rows of a file in memory.
                    done = self._table.optimize.compact(max_concurrent_tasks=1)
                except BaseException:
                    if is_locked:
                        self._clean(seen)
                    raise
                removed = []
                if keep is not None:
                    removed = self._table.vacuum(
                        math.ceil(keep / 3600), dry_run=False, enforce_retention_duration=False
                    )
                return Maintained(done["numFilesRemoved"], done["numFilesAdded"], len(removed))
        except BlockingIOError:
            return None
        except self._errors as error:
            is_conflict = isinstance(error, self._conflict)
            raise self._typed(error, is_conflict=is_conflict) from error

    # ----- writing -----

    def append(self, rows: pa.Table | pa.Schema, properties: Any) -> None:
        """Appends rows; or none, of a schema."""
        self._write(rows, "append", properties)

    def append_nothing(self, properties: Any) -> None:
        """Makes a commit without rows."""
        self.append(self._table.schema().to_arrow(), properties)

    def overwrite(self, rows: pa.Table, properties: Any) -> None:
        """Has rows take the place of all that are there."""
        self._write(rows, "overwrite", properties)

    def _write(self, rows: pa.Table | pa.Schema, mode: str, properties: Any) -> None:
        pa = require_pyarrow("a Delta table")
        if not isinstance(rows, pa.Table):
            rows = pa.schema(rows).empty_table()
        self._deltalake.write_deltalake(
            self._table, rows.cast(delta_schema(rows.schema)), mode=mode,
            commit_properties=properties, schema_mode="merge",
            writer_properties=marking(self._deltalake),
        )  # fmt: skip
        self._table.update_incremental()

    def merge(
        self,
        rows: pa.Table,
        deletes: pa.Table,
        same: str,
        removals: Sequence[str],
        properties: Any,
    ) -> None:
        """Has rows take the place of those with the same identity.

        Args:
            rows: What to write.
            deletes: Identities of the rows to remove.
            same: Condition in SQL that `t`, a row of the table, and `s` are of one identity.
            removals: Conditions in SQL, on integer columns, of other rows to remove.
            properties: Properties of the commit.
        """
        merge = (
            self.merger(_source(rows, deletes), same, properties, [IS_DELETED])
            .when_matched_delete(f"s.{IS_DELETED}")
            .when_matched_update_all(except_cols=[IS_DELETED])
            .when_not_matched_insert_all(f"NOT s.{IS_DELETED}", except_cols=[IS_DELETED])
        )
        if removals:
            gone = self.qualified(" OR ".join(f"({each})" for each in removals))
            merge = merge.when_not_matched_by_source_delete(gone)
        merge.execute()

    def merger(self, source: pa.Table, same: str, properties: Any, own: Sequence[str]) -> Any:
        """Returns a merge to add clauses to.

        Args:
            source: What to write, `s` in conditions.
            same: Condition in SQL that `t`, a row of the table, and `s` are of one identity.
            properties: Properties of the commit.
            own: Columns that the table does not get.
        """
        names = set(source.column_names) - set(own)
        return self._table.merge(
            source.cast(delta_schema(source.schema)),
            same,
            source_alias="s",
            target_alias="t",
            merge_schema=bool(names - set(self.columns)),
            commit_properties=properties,
            writer_properties=marking(self._deltalake),
        )

    @staticmethod
    def qualified(condition: str) -> str:
        """Returns a condition on integer columns as one on `t`."""
        return _COLUMNS.sub(r"t.\1", condition)

    # ----- reading -----

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Reads columns of all rows."""
        return self._query(self._table, f"SELECT {', '.join(columns)} FROM t")  # noqa: S608 - own names

    def beside(self, name: str, rows: pa.Table, query: str) -> pa.Table:
        """Returns what a query finds in the table, `t`, and in other rows, by their name."""
        with self._scratch() as folder:
            given = rows.cast(delta_schema(rows.schema))
            self._deltalake.write_deltalake(folder, given)
            other = self._deltalake.DeltaTable(folder)
            found = self._deltalake.QueryBuilder().register("t", self._table).register(name, other)
            pa = require_pyarrow("a Delta table")
            return pa.table(found.execute(query))

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[str]:
        """Makes a folder for a table that is not kept."""
        # Beside an object storage, on a disk.
        above = Path(tempfile.gettempdir()) if self.folder is None else self.folder
        folder = above / f"{_SCRATCH}{secrets.token_hex(8)}"
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def refused(self, rows: pa.Table) -> dict[int, str]:
        """Returns the indices of rows that constraints of the table refuse, with the reason.

        Raises:
            ConfigError: A constraint cannot be evaluated.
        """
        found = nulls_refused(self._table, rows)
        conditions = constraints(self._table)
        if not conditions or (self.folder is None and self.objects is None):
            return found
        pa = require_pyarrow("a Delta table")
        index = pa.field(INDEX, pa.int64())
        schema = delta_schema(pa.schema(self._table.schema().to_arrow())).append(index)
        numbered = rows.cast(delta_schema(rows.schema)).append_column(
            index, pa.array(range(len(rows)), index.type)
        )
        try:
            with self._scratch() as folder:
                table = self._deltalake.DeltaTable.create(folder, schema)
                self._deltalake.write_deltalake(table, numbered, mode="append", schema_mode="merge")
                table.update_incremental()
                for name, condition in conditions.items():
                    query = f"SELECT {INDEX} FROM t WHERE ({condition}) IS NOT TRUE"  # noqa: S608 - the table's own
                    for refused in self._query(table, query)[INDEX].to_pylist():
                        found[refused] = f"the constraint {name} of the table refuses it"
        except self._errors as error:
            raise ConfigError(
                f"table {self.location} has a constraint that deltalake cannot evaluate: "
                f"{_line(error)}: drop it, or use another table",
                option="target",
            ) from error
        return found

    def _query(self, table: Any, query: str) -> pa.Table:
        pa = require_pyarrow("a Delta table")
        return pa.table(self._deltalake.QueryBuilder().register("t", table).execute(query))


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return next(iter(str(error).splitlines()), type(error).__name__).strip().rstrip(".")


def _first_new(folder: Path | None) -> Path | None:
    """Returns the first folder that has to be made for a table."""
    if folder is None:
        return None
    log = folder / "_delta_log"
    return next(
        (each for each in [*reversed(folder.parents), folder, log] if not each.exists()), None
    )


def _source(rows: pa.Table, deletes: pa.Table) -> pa.Table:
    """Returns the rows and the identities to delete as one source of a merge."""
    pa = require_pyarrow("a Delta table")
    written = rows.cast(delta_schema(rows.schema))
    removed = pa.table(
        {
            field.name: deletes[field.name].cast(field.type)
            if field.name in deletes.column_names
            else pa.nulls(len(deletes), field.type)
            for field in written.schema
        },
        schema=written.schema,
    )
    parts = [
        part.append_column(IS_DELETED, pa.array([is_deleted] * len(part), pa.bool_()))
        for part, is_deleted in ((written, False), (removed, True))
    ]
    return pa.concat_tables(parts)
