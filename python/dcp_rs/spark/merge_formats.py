"""What Spark's SQL leaves to a table's format: which batch a table has, and how one is noted."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dcp_rs.exceptions import ConfigError
from dcp_rs.spark.merge_sql import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_DELTA_HISTORY = 20
# What changes no row. Delta's names of operations.
_UPKEEP = re.compile(
    r"OPTIMIZE|VACUUM (START|END)|(UN)?SET TBLPROPERTIES|CREATE TABLE( AS SELECT)?|ADD COLUMNS?"
    r"|CHANGE COLUMNS?|(ADD|DROP) CONSTRAINT|CLUSTER BY|UPGRADE PROTOCOL|REORG|COMPUTE STATS"
    r"|(ADD|DROP) (TABLE )?FEATURE( SUPPORT)?|SET COLUMN MAPPING|AUTO COMPACTION|CONVERT"
)
_MISSING = re.compile(
    r"ClassNotFound|NoClassDefFound|NoSuchMethod|NoSuchField|IncompatibleClassChange"
    r"|AbstractMethodError|DATA_SOURCE_NOT_FOUND|Cannot find catalog plugin"
    r"|CATALOG_PLUGIN_CLASS_NOT_FOUND|CATALOG_NOT_FOUND|DELTA_CONFIGURE_SPARK_SESSION"
    r"|REQUIRES_SINGLE_PART_NAMESPACE"
    r"|UNSUPPORTED_FEATURE\.TABLE_OPERATION|MERGE INTO TABLE is not supported"
    r"|Provider .* could not be instantiated|INCOMPATIBLE_DATA_SOURCE_REGISTER"
)
_DENIED = re.compile(
    r"INSUFFICIENT_PERMISSIONS|PERMISSION_DENIED|AccessDenied|AccessControlException"
    r"|Permission denied|NotAuthorized|Forbidden|UNAUTHORIZED_ACCESS"
    # A folder in which none can be made.
    r"|DELTA_CANNOT_CREATE_LOG_PATH|[Mm]kdirs? (failed|of \S+ failed)"
)
# The artifacts that exist, by the version of Spark.
_DELTA_RUNTIMES = {
    "4.0": "io.delta:delta-spark_4.0_2.13 4.1.0 to 4.4.0",
    "4.1": "io.delta:delta-spark_4.1_2.13 4.1.0 to 4.4.0",
    "4.2": "io.delta:delta-spark_4.2_2.13 4.4.0",
}
_ICEBERG_RUNTIMES = {
    "4.0": "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13 1.10.0 to 1.11.0",
    "4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13 1.11.0 or 1.12.0",
}


@dataclass(frozen=True)
class Batch:
    """A batch, as the commit that wrote it notes it.

    Attributes:
        application: Name of the query's transactions.
        number: The number that Spark gave the batch.
        seen: Version of the table that was looked at before the commit.
    """

    application: str
    number: int
    seen: int | None

    def dump(self) -> str:
        """Returns the note."""
        return json.dumps({"dcp_rs": [self.application, self.number, self.seen]})

    @classmethod
    def parse(cls, note: str | None) -> Batch | None:
        """Returns what is noted; `None` if that is not a batch."""
        try:
            application, number, seen = json.loads(note or "")["dcp_rs"]
        except (ValueError, TypeError, KeyError):
            return None
        return cls(application, number, seen)


@dataclass(frozen=True)
class Commit:
    """A commit to a table.

    Attributes:
        version: The version of the table that it made.
        what: What the format calls it.
        note: The batch that it wrote, if a query of this package made it.
        is_upkeep: Whether it changed no rows.
    """

    version: int
    what: str
    note: Batch | None
    is_upkeep: bool


class Format(Protocol):
    """A table format."""

    name: str
    runtimes: Mapping[str, str]

    def settings(self, batch: Batch) -> dict[str, str]:
        """Returns settings of the session under which a statement commits a batch once."""

    def commits(self, session: SparkSession, table: tuple[str, ...]) -> Iterator[Commit]:
        """Returns the commits that made a table what it is, newest first."""

    def stored(self, kind: Any) -> Any:
        """Returns the type that the format has for a column's."""


class Delta:
    """Delta Lake, by delta-spark."""

    name = "delta"
    runtimes: Mapping[str, str] = _DELTA_RUNTIMES

    def settings(self, batch: Batch) -> dict[str, str]:
        """Returns settings of the session under which a statement commits a batch once.

        Delta skips the statement, silently, if the table has this transaction.
        """
        return {
            "spark.databricks.delta.write.txnAppId": batch.application,
            "spark.databricks.delta.write.txnVersion": str(batch.number),
            "spark.databricks.delta.commitInfo.userMetadata": batch.dump(),
            # The source does not change, since the batch is materialised.
            "spark.databricks.delta.merge.materializeSource": "none",
        }

    def commits(self, session: SparkSession, table: tuple[str, ...]) -> Iterator[Commit]:
        """Returns the commits that made a table what it is, newest first."""
        found = -1
        for limit in (f" LIMIT {_DELTA_HISTORY}", ""):
            rows = session.sql(f"DESCRIBE HISTORY {quoted(*table)}{limit}").collect()
            for row in sorted(rows, key=lambda row: -row["version"]):
                version, what = row["version"], row["operation"]
                if found < 0 or version < found:
                    found = version
                    note = Batch.parse(row["userMetadata"])
                    # OPTIMIZE and others of a session that also merges have the note, too.
                    note = note if what == "MERGE" else None
                    yield Commit(version, what, note, _UPKEEP.fullmatch(what) is not None)
            if len(rows) < _DELTA_HISTORY:
                return

    def stored(self, kind: Any) -> Any:
        """Returns the type that the format has for a column's."""
        return kind


class Iceberg:
    """Apache Iceberg, by its runtime for Spark."""

    name = "iceberg"
    runtimes: Mapping[str, str] = _ICEBERG_RUNTIMES
    _NOTE = "dcp-rs-batch"

    def settings(self, batch: Batch) -> dict[str, str]:
        """Returns settings of the session under which a commit notes a batch."""
        return {f"spark.sql.iceberg.snapshot-property.{self._NOTE}": batch.dump()}

    def commits(self, session: SparkSession, table: tuple[str, ...]) -> Iterator[Commit]:
        """Returns the commits that made a table what it is, newest first."""
        heads, all_of = quoted(*table, "refs"), quoted(*table, "snapshots")
        main = session.table(heads).where("name = 'main'").select("snapshot_id").collect()
        note = f"summary['{self._NOTE}'] AS note"
        rows = session.table(all_of).selectExpr("snapshot_id", "parent_id", "operation", note)
        by_id = {row["snapshot_id"]: row for row in rows.collect()}
        version: int | None = main[0]["snapshot_id"] if main else None
        while version is not None and version in by_id:
            row = by_id[version]
            what = row["operation"]
            batch = Batch.parse(row["note"])
            yield Commit(version, what, batch, is_upkeep=what == "replace")
            version = row["parent_id"]

    def stored(self, kind: Any) -> Any:
        """Returns the type that the format has for a column's: it has no smaller integers."""
        from pyspark.sql import types

        if isinstance(kind, types.ByteType | types.ShortType):
            return types.IntegerType()
        if isinstance(kind, types.ArrayType):
            return types.ArrayType(self.stored(kind.elementType))
        if isinstance(kind, types.MapType):
            return types.MapType(self.stored(kind.keyType), self.stored(kind.valueType))
        if isinstance(kind, types.StructType):
            fields = [types.StructField(each.name, self.stored(each.dataType)) for each in kind]
            return types.StructType(fields)
        return kind


FORMATS: Mapping[str, Format] = {each.name: each for each in (Delta(), Iceberg())}


def of_catalog(session: SparkSession, table: tuple[str, ...]) -> Format:
    """Returns the format of a table that is to be created, by the catalog it is created in."""
    name = table[0] if len(table) > 2 else "spark_catalog"
    plugin = session.conf.get(f"spark.sql.catalog.{name}", "") or ""
    return FORMATS["iceberg" if "iceberg" in plugin.lower() else "delta"]


@contextmanager
def told(session: SparkSession, table: str, of: Format | None = None) -> Iterator[None]:
    """Makes errors of Spark that the user can mend say how.

    Raises:
        ConfigError: The format's runtime is missing or another version's, or a right is missing.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        _tell(error, session, table, of)
        raise


def _tell(error: Exception, session: SparkSession, table: str, of: Format | None) -> None:
    reason = " ".join(str(error).split())
    first = reason[:300]
    if _MISSING.search(reason):
        version = ".".join(session.version.split(".")[:2])
        # The catalog of a table's name may be either's.
        is_known = of is not None and not re.search(r"CATALOG_NOT_FOUND|_NAMESPACE", first)
        formats = (of,) if of is not None and is_known else tuple(FORMATS.values())
        needed = [each.runtimes.get(version) for each in formats]
        artifacts = " or ".join(each for each in needed if each)
        what = (
            f"needs {artifacts} on Spark {version} (spark.jars.packages), and its catalog in the "
            "session's settings"
            if artifacts
            else f"needs a runtime of {' or '.join(each.name for each in formats)} for Spark "
            f"{version}, of which none is known: use Spark "
            + " or ".join(dict.fromkeys(v for each in formats for v in each.runtimes))
        )
        raise ConfigError(
            f"table {table} {what}; for small tables merge_into(path) needs none ({first})",
            option="merge_into",
        ) from error
    if _DENIED.search(reason):
        raise ConfigError(
            f"table {table} cannot be read and changed by this user: grant SELECT and MODIFY "
            f"on it, and CREATE TABLE on its schema if it does not exist ({first})",
            option="merge_into",
        ) from error
