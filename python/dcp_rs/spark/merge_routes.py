"""The sink that gives each collection a table of its own."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require_spark
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.names import TableNames
from dcp_rs.spark import merge_sql
from dcp_rs.spark.connect import QueryOfBatch
from dcp_rs.spark.merge_table import application_of, check_columns, kept_columns, removals_of
from dcp_rs.spark.merge_target import Target, again_if_lost, materialised
from dcp_rs.spark.options import options_as_written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from dcp_rs.spark.merge_sql import Removals

_log = logging.getLogger("dcp_rs")

_SCHEMA = "document_schema"
_OPTION = "tables"


@dataclass(frozen=True)
class _Step:
    """What a batch does to a table.

    Attributes:
        target: The table.
        rows: Its rows in the batch.
        columns: Columns that it keeps.
    """

    target: Target
    rows: DataFrame
    columns: StructType


class RoutedMerge:
    """The sink of `dcp_rs.spark.merge_into` for a table per collection.

    Args:
        tables: A template of names, or templates and options by pattern of collections.
        name: The query's `queryName`, if Connect has to find it among others.
    """

    def __init__(self, tables: str | Mapping[str, object], name: str | None = None) -> None:
        require_spark("merge_into")
        self._tables = tables
        self._query_of = QueryOfBatch(name)
        self._names = TableNames.of(tables)
        for pattern, options in self._names.options.items():
            others = [name for name in options if name != _SCHEMA]
            if others:
                raise ConfigError(
                    f"{pattern!r} has {', '.join(others)}, which merge_into has not: it has "
                    f"table and {_SCHEMA}",
                    option=_OPTION,
                )
            if options.get(_SCHEMA) is not None:
                _decoder(options[_SCHEMA])
        for template in self._names.templates.values():
            merge_sql.parts_of(template)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Merges a batch, with a commit for each table that it changes."""
        with options_as_written():
            check_columns(batch.schema)
            again_if_lost(partial(self._merge, batch, batch_id))

    def _merge(self, batch: DataFrame, batch_id: int) -> None:
        application = application_of(self._query_of(batch))
        with materialised(batch) as changes:
            removals = removals_of(changes)
            steps = self._steps(changes, removals, application)
            # So that none is written if another cannot be.
            due = [step for step in steps if step.target.is_due(batch_id)]
            for step in due:
                step.target.check(step.columns)
            for step in due:
                step.target.take(step.rows, step.columns, removals, batch_id)

    def __repr__(self) -> str:
        return f"merge_into({self._tables!r})"

    def _steps(self, changes: DataFrame, removals: Removals, application: str) -> list[_Step]:
        session = changes.sparkSession
        routes = self._routes(changes)
        found: dict[str, _Step] = {}
        taken: dict[str, str] = {}
        for collection, parts in routes.items():
            name = ".".join(parts)
            other = taken.setdefault(name.lower(), collection)
            if other != collection:
                raise ConfigError(
                    f"{other} and {collection} have one table, {name}: use {{scope}} and "
                    "{collection}",
                    option=_OPTION,
                )
            target = Target(session, parts, application, is_one_of_many=True)
            scope, _, plain = collection.partition(".")
            rows = changes.where(
                f"scope = {merge_sql.text(scope)} AND collection = {merge_sql.text(plain)}"
            )
            pattern = self._names.pattern(collection)
            schema = self._names.options.get(pattern or "", {}).get(_SCHEMA)
            if schema is not None:
                rows = _decoded(rows, schema)
            found[name.lower()] = _Step(target, rows, kept_columns(rows.schema))
        if removals:
            for parts in self._kept(session):
                name = ".".join(parts)
                target = Target(session, parts, application, is_one_of_many=True)
                if name.lower() not in found and target.is_kept:
                    columns = session.table(merge_sql.quoted(*parts)).schema
                    found[name.lower()] = _Step(target, _without_rows(changes, columns), columns)
        return list(found.values())

    def _routes(self, changes: DataFrame) -> dict[str, tuple[str, ...]]:
        """Returns the names of the tables of the collections in a batch."""
        is_named = "key IS NOT NULL AND op IN ('mutation', 'deletion', 'expiration')"
        pairs = changes.where(is_named).select("scope", "collection").distinct().collect()
        found: dict[str, tuple[str, ...]] = {}
        for row in sorted(pairs, key=str):
            if row["scope"] is None or row["collection"] is None:
                # Only a collection that was dropped before it was read has no name.
                _log.warning(
                    "changes of a collection without a name are left out: it was dropped",
                    extra=about("changes_left_out"),
                )
                continue
            name = f"{row['scope']}.{row['collection']}"
            pattern = self._names.pattern(name)
            if pattern is None:
                raise ConfigError(
                    f"names no table for {name}: add a pattern, or leave it out of collections",
                    option=_OPTION,
                )
            template = self._names.templates[pattern]
            found[name] = tuple(
                part.format(scope=row["scope"], collection=row["collection"])
                for part in merge_sql.parts_of(template)
            )
        return found

    def _kept(self, session: SparkSession) -> Iterator[tuple[str, ...]]:
        """Returns names of tables that the templates may have made."""
        for template in dict.fromkeys(self._names.templates.values()):
            *within, name = merge_sql.parts_of(template)
            for schema in _schemas(session, tuple(within)):
                inside = f" IN {merge_sql.quoted(*schema)}" if schema else ""
                for row in session.sql(f"SHOW TABLES{inside}").collect():
                    if _matches(name, row["tableName"]):
                        yield (*schema, row["tableName"])


def _schemas(session: SparkSession, within: tuple[str, ...]) -> list[tuple[str, ...]]:
    *outside, last = within or ("",)
    if "{" not in last:
        return [within]
    inside = f" IN {merge_sql.quoted(*outside)}" if outside else ""
    rows = session.sql(f"SHOW SCHEMAS{inside}").collect()
    return [(*outside, row[0]) for row in rows if _matches(last, row[0])]


def _matches(template: str, name: str) -> bool:
    plain = re.split(r"\{(?:scope|collection)\}", template)
    expression = ".*".join(re.escape(each.replace("{{", "{").replace("}}", "}")) for each in plain)
    return re.fullmatch(expression, name, re.IGNORECASE) is not None


def _without_rows(changes: DataFrame, columns: StructType) -> DataFrame:
    """Returns no rows, with the columns of a table that a batch only removes from."""
    names = [
        f"CAST(NULL AS {merge_sql.type_of(field.dataType)}) AS {merge_sql.quoted(field.name)}"
        for field in columns
    ]
    return changes.where("false").selectExpr("op", *names)


# ----- decoding -----


def _decoder(schema: str) -> Any:
    from dcp_rs.replication.decoding import Decoder

    return Decoder(schema, prefix="", is_exact=False)


def _decoded(rows: DataFrame, schema: str) -> DataFrame:
    """Decodes the documents of rows to columns instead of `value`, on the executors.

    Raises:
        ConfigError: The rows have no documents.
    """
    from pyspark.sql.types import BinaryType, StringType, StructField, StructType

    from dcp_rs.replication.decoding import EXTRA
    from dcp_rs.spark.schema import spark_type

    kind = rows.schema["value"].dataType if "value" in rows.columns else None
    if not isinstance(kind, BinaryType | StringType):
        raise ConfigError(
            "need the documents in value: leave documentSchema and valueFormat=variant out",
            option=_OPTION,
        )
    fields = [each for each in _decoder(schema).fields if each.name != EXTRA]
    taken = [field for field in rows.schema if field.name != "value"]
    new = [StructField(each.name, spark_type(each.type)) for each in fields]
    return rows.mapInArrow(
        partial(_decode, schema, tuple(each.name for each in fields)), StructType(taken + new)
    )


def _decode(
    schema: str, names: tuple[str, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    decoder = _decoder(schema)
    for batch in batches:
        table = pa.Table.from_batches([batch])
        if "datatype" not in table.column_names:
            table = table.append_column("datatype", pa.repeat("json", len(table)))
        decoded = decoder.decode(table).columns
        kept = {
            name: column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if name != "value"
        }
        yield pa.RecordBatch.from_pydict(kept | {name: decoded[name] for name in names})
