"""The sink that has the executors merge batches into a table of Delta or Iceberg."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from dcp_rs._libraries import require_spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark import merge_sql
from dcp_rs.spark.connect import QueryOfBatch
from dcp_rs.spark.merge_rules import NEEDED, NUMBERS, rolled_back
from dcp_rs.spark.merge_sql import Removals
from dcp_rs.spark.merge_target import Target, again_if_lost, materialised
from dcp_rs.spark.options import options_as_written
from dcp_rs.spark.schema import EVENTS_ONLY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import StructType

_EVENT = "system_event"


class TableMerge:
    """The sink of `dcp_rs.spark.merge_into(table=...)` for one table."""

    def __init__(self, table: str, name: str | None = None) -> None:
        require_spark("merge_into")
        self._table = table
        self._query_of = QueryOfBatch(name)
        self._parts = merge_sql.parts_of(table)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Merges a batch in one commit, unless the table already has it."""
        with options_as_written():
            check_columns(batch.schema)
            again_if_lost(partial(self._merge, batch, batch_id))

    def _merge(self, batch: DataFrame, batch_id: int) -> None:
        target = Target(batch.sparkSession, self._parts, application_of(self._query_of(batch)))
        if not target.is_due(batch_id):
            return
        with materialised(batch) as changes:
            removals = removals_of(changes)
            target.take(changes, kept_columns(batch.schema), removals, batch_id)

    def __repr__(self) -> str:
        return f"merge_into(table={self._table!r})"


def application_of(query: str) -> str:
    """Returns the name of the transactions of a query.

    A table has transactions of its own, so that the query names them.
    """
    return f"dcp_rs.spark.{query}"


def check_columns(schema: StructType) -> None:
    """Checks that a batch has what a merge needs.

    Raises:
        ConfigError: It lacks a column, or the query has changed its type.
    """
    from pyspark.sql import types

    missing = [name for name in NEEDED if name not in schema.names]
    if missing:
        raise ConfigError(f"merge_into needs {', '.join(missing)} as well", option="columns")
    wrong = [
        name
        for name in NUMBERS
        if not isinstance(schema[name].dataType, types.IntegerType | types.LongType)
    ]
    if not isinstance(schema["key"].dataType, types.StringType | types.BinaryType):
        wrong.append("key")
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} must have the types of the source", option="merge_into"
        )


def kept_columns(schema: StructType) -> StructType:
    """Returns the columns of the table that keeps rows of a schema.

    Raises:
        ConfigError: Two of them are one to a table.
    """
    from pyspark.sql.types import StructType

    kept = [field for field in schema if field.name != "op" and not field.metadata.get(EVENTS_ONLY)]
    seen: dict[str, str] = {}
    for field in kept:
        other = seen.setdefault(field.name.lower(), field.name)
        if other is not field.name:
            raise ConfigError(
                f"{other} and {field.name} are one column to a table: rename one of them",
                option="document_schema",
            )
    return StructType(kept)


def removals_of(changes: DataFrame) -> Removals:
    """Checks the rows of a batch, and returns what it removes beside documents.

    Raises:
        ConfigError: A row cannot be merged, or a rollback cannot be followed.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    is_document = F.col("op").isin(*merge_sql.DOCUMENTS)
    is_known = is_document | F.col("op").isin("rollback", _EVENT)
    found = changes.agg(
        F.count_if(~is_known | F.col("op").isNull()).alias("strange"),
        F.count_if(is_document & F.col("key").isNull()).alias("keyless"),
        F.count_if(~is_document).alias("others"),
    ).first()
    if found is None or found["strange"]:
        raise ConfigError(
            f"op must be one of {', '.join((*merge_sql.DOCUMENTS, 'rollback', _EVENT))} in every "
            "row",
            option="merge_into",
        )
    if found["keyless"]:
        raise ConfigError(
            "key is null in a row, which could not be found again", option="merge_into"
        )
    if not found["others"]:
        return Removals()
    names = [name for name in ("collection_id", "value") if name in changes.columns]
    rows = changes.where(~is_document).select("op", "vbucket", "epoch", "seqno", *names).collect()
    return Removals(rolled_back(row for row in rows if row["op"] == "rollback"), _ended(rows))


def _ended(rows: list[Row]) -> dict[int, dict[int, tuple[int, int]]]:
    """Returns where collections ended: dropped, or flushed so that they begin again."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for row in rows:
        if row["op"] != _EVENT:
            continue
        if "value" not in row or "collection_id" not in row:
            raise ConfigError(
                "include=system_events needs value and collection_id as well", option="columns"
            )
        event = json.loads(row["value"])
        if event.get("event") != "EndCollection" and "flush_uid" not in event:
            continue
        places = found.setdefault(row["collection_id"], {})
        at = row["epoch"], row["seqno"]
        places[row["vbucket"]] = max(at, places.get(row["vbucket"], at))
    return found
