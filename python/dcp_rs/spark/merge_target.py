"""One table that the executors merge batches into."""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.target import variant_refused
from dcp_rs.spark import merge_sql
from dcp_rs.spark.merge_formats import FORMATS, Batch, Format, of_catalog, told
from dcp_rs.spark.merge_rules import check_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from dcp_rs.spark.merge_sql import Removals

_log = logging.getLogger("dcp_rs")

# Property of a table that names the query which keeps it, as in `merge_into(path)`.
_OWNER = "dcp_rs.application"
_OPTION = "merge_into"

# What Spark says if an executor with rows of a batch is gone.
_LOST = re.compile(r"CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|Checkpoint block \S+ not found")
_ATTEMPTS = 4


class Target:
    """A table, as a session sees it.

    Args:
        session: Session of the batch.
        parts: Parts of the table's name.
        application: Name of the query's transactions.
        is_one_of_many: Whether batches without rows for it leave it alone.
    """

    def __init__(
        self,
        session: SparkSession,
        parts: tuple[str, ...],
        application: str,
        *,
        is_one_of_many: bool = False,
    ) -> None:
        self.name = ".".join(parts)
        self._session = session
        self._parts = parts
        self._sql = merge_sql.quoted(*parts)
        self._application = application
        self._is_one_of_many = is_one_of_many
        self._format: Format | None = None
        self._seen: int | None = None
        with told(session, self.name):
            self._open()

    @property
    def exists(self) -> bool:
        """Whether there is such a table."""
        return self._format is not None

    @property
    def is_kept(self) -> bool:
        """Whether it is this query's."""
        return self.exists and self._owner() == self._application

    # ----- what the table is -----

    def _open(self) -> None:
        from pyspark.errors import AnalysisException

        # Statements alone: Spark Connect keeps what methods of the catalog do, by the session and
        # a number that each of its processes counts from 0, and answers from that.
        try:
            rows = self._session.sql(f"DESCRIBE TABLE EXTENDED {self._sql}").collect()
        except AnalysisException as error:
            if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
                raise
            return
        found = {row["col_name"]: row["data_type"] for row in rows}
        provider = (found.get("Provider") or "").lower()
        if provider not in FORMATS:
            raise ConfigError(
                f"table {self.name} is of the format {provider or found.get('Type') or 'unknown'}, "
                f"not {' or '.join(FORMATS)}: choose another name",
                option=_OPTION,
            )
        self._format = FORMATS[provider]
        if self._format.name == "iceberg":
            # A session keeps what it knows of a table for a while, whoever writes to it.
            self._session.sql(f"REFRESH TABLE {self._sql}").collect()

    def _owner(self) -> str | None:
        rows = self._session.sql(f"SHOW TBLPROPERTIES {self._sql}").collect()
        found: str | None = {row["key"]: row["value"] for row in rows}.get(_OWNER)
        return found

    def is_due(self, batch: int) -> bool:
        """Whether to write a batch.

        Raises:
            ConfigError: The table is not this query's, or not as the query left it.
        """
        with told(self._session, self.name, self._format):
            last = self._last()
        if batch > last + 1 and not (self._is_one_of_many or last == _UNKNOWN):
            raise ConfigError(
                f"table {self.name} lacks the batches of this query before {batch}: start a new "
                "table with a new checkpoint",
                option=_OPTION,
            )
        if batch <= last:
            _log.info(
                "%s has batch %d of %s",
                self.name,
                batch,
                self._application,
                extra=about("batch_skipped", table=self.name, batch=batch),
            )
        return batch > last

    def _last(self) -> int:
        """Returns the last batch that the table has; -1 for none."""
        if self._format is None:
            return -1
        owner = self._owner()
        if owner is not None and owner != self._application:
            raise ConfigError(
                f"table {self.name} belongs to {owner}, not to {self._application}: go on with the "
                "checkpoint of its query, or use another table",
                option=_OPTION,
            )
        if owner is None:
            if not self._session.table(self._sql).isEmpty():
                raise ConfigError(
                    f"table {self.name} has rows that dcp_rs did not write: use another",
                    option=_OPTION,
                )
            return -1
        return self._last_noted(self._format)

    def _last_noted(self, of: Format) -> int:
        last: Batch | None = None
        strange: str | None = None
        for commit in of.commits(self._session, self._parts):
            if self._seen is None:
                self._seen = commit.version
            if last is not None and commit.version == last.seen:
                break
            if commit.note is not None and commit.note.application == self._application:
                if last is not None:
                    break  # another driver of the query
                last = commit.note
            elif not commit.is_upkeep:
                strange = strange or f"{commit.what} made version {commit.version}"
        if last is None:
            return _UNKNOWN if self._is_of_path(strange) else -1
        if strange is not None:
            raise ConfigError(
                f"table {self.name} is not as this query left it, since {strange}: start a new "
                "table with a new checkpoint",
                option=_OPTION,
            )
        return last.number

    def _is_of_path(self, strange: str | None) -> bool:
        """Whether batches are in it that are not noted, as those of `merge_into(path)`."""
        if strange is None or self._session.table(self._sql).isEmpty():
            return False
        _log.warning(
            "%s is taken over from merge_into(path): %s",
            self.name,
            strange,
            extra=about("table_taken_over", table=self.name),
        )
        return True

    # ----- writing -----

    def take(self, changes: DataFrame, columns: StructType, removals: Removals, batch: int) -> None:
        """Merges a batch, in one commit.

        Args:
            changes: The batch, materialised.
            columns: Columns of the table, without what is no column of a document's row.
            removals: What the batch removes beside documents.
            batch: Its number.

        Raises:
            ConfigError: The table has other columns, or cannot be written.
        """
        of = self.check(columns)
        with told(self._session, self.name, of):
            if self._format is None:
                self._create(changes, columns, of)
            else:
                self._widen(columns, of)
                if self._owner() is None:
                    self._own()
            note = Batch(self._application, batch, self._seen)
            self._merge(changes, columns.names, removals, of.settings(note))

    def check(self, columns: StructType) -> Format:
        """Checks that the table can have columns, and returns its format.

        Raises:
            ConfigError: It has other types, or columns that these lack.
        """
        of = self._format or of_catalog(self._session, self._parts)
        for field in columns:
            if of.name != "delta" and "variant" in field.dataType.simpleString():
                raise variant_refused(field.name, of.name)
        if self._format is not None:
            with told(self._session, self.name, of):
                self._added(columns, of)
        return of

    def _merge(
        self,
        changes: DataFrame,
        columns: Sequence[str],
        removals: Removals,
        settings: Mapping[str, str],
    ) -> None:
        if "collection_id" not in columns:
            removals = merge_sql.Removals(removals.rolled_back)
        with _view(changes) as view, _set(self._session, settings):
            source = merge_sql.newest(view, columns, removals)
            self._session.sql(merge_sql.merge(self._sql, source, columns, removals)).collect()

    def _create(self, changes: DataFrame, columns: StructType, of: Format) -> None:
        schema = self._parts[:-1]
        if schema and self._is_one_of_many:
            self._session.sql(f"CREATE SCHEMA IF NOT EXISTS {merge_sql.quoted(*schema)}")
        rows = changes.where("false").select(*map(merge_sql.quoted, columns.names))
        writer = rows.writeTo(self._sql).using(of.name)
        writer.tableProperty(_OWNER, self._application).create()
        self._format = of
        _log.info("created %s", self.name, extra=about("table_created", table=self.name))
        for commit in of.commits(self._session, self._parts):
            self._seen = commit.version
            break

    def _own(self) -> None:
        properties = f"{merge_sql.text(_OWNER)} = {merge_sql.text(self._application)}"
        self._session.sql(f"ALTER TABLE {self._sql} SET TBLPROPERTIES ({properties})").collect()

    def _widen(self, columns: StructType, of: Format) -> None:
        """Adds the columns that the table lacks."""
        added = self._added(columns, of)
        if added:
            _log.info(
                "%s gains %s",
                self.name,
                ", ".join(added),
                extra=about("columns_changed", table=self.name),
            )
            self._session.sql(f"ALTER TABLE {self._sql} ADD COLUMNS ({', '.join(added)})").collect()

    def _added(self, columns: StructType, of: Format) -> list[str]:
        """Returns the columns that the table lacks, if it contradicts none."""
        table = self._session.table(self._sql).schema
        check_kept(self.name, [name for name in table.names if name not in columns.names])
        added, wrong = _compare(table, columns, of)
        if wrong:
            raise ConfigError(
                f"table {self.name} has other types: {'; '.join(wrong)}: start a new table with "
                "a new checkpoint",
                option="document_schema",
            )
        return added


# The last batch of a table that notes none.
_UNKNOWN = -2


def _compare(
    table: StructType, columns: StructType, of: Format, within: str = ""
) -> tuple[list[str], list[str]]:
    """Returns columns and fields of structs that a table lacks, and those of other types."""
    from pyspark.sql.types import StructType as Struct

    known = {field.name.lower(): field.dataType for field in table}
    added: list[str] = []
    wrong: list[str] = []
    for field in columns:
        path = within + merge_sql.quoted(field.name)
        kind: DataType = of.stored(field.dataType)
        found = known.get(field.name.lower())
        if found is None:
            added.append(f"{path} {merge_sql.type_of(kind)}")
        elif isinstance(kind, Struct) and isinstance(found, Struct):
            more, others = _compare(found, kind, of, f"{path}.")
            added += more
            wrong += others
        elif _plain(found) != _plain(kind):
            there, here = found.simpleString(), kind.simpleString()
            wrong.append(f"{field.name} is {there} but would be {here}")
    return added, wrong


def _plain(kind: DataType) -> str:
    # Whether elements may be null is the table's own.
    return merge_sql.type_of(kind).lower()


@contextmanager
def _set(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Changes settings of a session for one statement."""
    before: dict[str, str | None] = {name: session.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, earlier)


@contextmanager
def _view(changes: DataFrame) -> Iterator[str]:
    """Gives changes a name in SQL."""
    name = f"_dcp_rs_{secrets.token_hex(8)}"
    changes.createOrReplaceTempView(name)
    try:
        yield name
    finally:
        changes.sparkSession.catalog.dropTempView(name)


@contextmanager
def materialised(batch: DataFrame) -> Iterator[DataFrame]:
    """Reads a batch once, whatever is done with it.

    If an executor is lost, so is what it holds: `persist` would read the partition again, with
    fewer rows perhaps, between the two scans of a merge. See `again_if_lost`.
    """
    changes = batch.localCheckpoint(eager=True)
    try:
        yield changes
    finally:
        _release(changes)


def again_if_lost(merge: Callable[[], None]) -> None:
    """Merges a batch, and begins again if an executor that held some of it is lost.

    What has been committed until then is found in the table, as after the death of the driver.

    Args:
        merge: Looks at the table, reads the batch and merges it.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            merge()
        except Exception as error:
            if not left or not _LOST.search(str(error)):
                raise
            _log.warning(
                "a batch is read again, since an executor that held some of it is gone",
                extra=about("batch_read_again"),
            )
        else:
            return


def _release(changes: Any) -> None:
    """Frees the blocks of a batch, which Spark otherwise keeps until the JVM collects garbage."""
    plan = getattr(changes, "_jdf", None)
    if plan is not None:  # Spark Connect frees them itself
        plan.queryExecution().logical().rdd().unpersist(False)
