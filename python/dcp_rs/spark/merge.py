"""A sink for streaming queries: a Delta table in step with a bucket's documents."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs._libraries import require
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.changes import newest, vbuckets_in
from dcp_rs.replication.delta_files import local_folder
from dcp_rs.replication.delta_schema import LIBRARY
from dcp_rs.replication.delta_table import DeltaTable
from dcp_rs.replication.target import variant_refused
from dcp_rs.spark.connect import QueryOfBatch
from dcp_rs.spark.merge_rules import IDENTITY, NEEDED, NUMBERS, check_kept, rolled_back
from dcp_rs.spark.options import options_as_written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

_log = logging.getLogger("dcp_rs")

_OPS = ("mutation", "deletion", "expiration", "rollback")
# Scope and collection are null in clusters without collections.
_SAME = (
    "t.key = s.key AND (t.scope IS NOT DISTINCT FROM s.scope)"
    " AND (t.collection IS NOT DISTINCT FROM s.collection)"
)
# A type that is or contains a variant, as JSON.
_VARIANT = re.compile(r'(?:^|[tT]ype":)"variant"')


class MergeInto:
    """The sink of `dcp_rs.spark.merge_into`."""

    def __init__(
        self,
        location: str,
        storage_options: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        require("merge_into", LIBRARY, "delta")
        # To refuse a folder that cannot be one before there is a batch.
        local_folder(location)
        self._location = location
        self._storage_options = storage_options
        self._name = name
        self._query_of = QueryOfBatch(name)
        self._query = ""
        self._table: DeltaTable | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Commits a batch, unless the table already has it."""
        with options_as_written():
            missing = [name for name in NEEDED if name not in batch.schema.names]
            if missing:
                raise ConfigError(
                    f"merge_into needs {', '.join(missing)} as well", option="columns"
                )
            for field in batch.schema:
                if _VARIANT.search(field.dataType.json()):
                    raise variant_refused(field.name, LIBRARY)
            self._take(self._of(self._query_of(batch)), batch, batch_id)

    def __reduce__(self) -> tuple[type[MergeInto], tuple[Any, ...]]:
        """Pickles what it was made of."""
        return type(self), (self._location, self._storage_options, self._name)

    def __repr__(self) -> str:
        return f"merge_into({self._location!r})"

    def _of(self, query: str) -> DeltaTable:
        """Returns the table, with the transactions of a query."""
        if self._table is None or self._query != query:
            application = f"dcp_rs.spark.{query}"
            self._table = DeltaTable(self._location, application, self._storage_options)
            self._query = query
        return self._table

    def _take(self, table: DeltaTable, batch: DataFrame, batch_id: int) -> None:
        is_due = partial(self._is_due, batch_id)
        if not is_due(table.version() if table.find() else None):
            _log.info(
                "%s has batch %d of query %s",
                self._location,
                batch_id,
                self._query,
                extra=about("batch_skipped", table=self._location, batch=batch_id),
            )
            return
        changes = batch.toArrow()
        _check_rows(changes)
        removals = _removals(changes)
        rows = changes.drop_columns("op")
        if not table.find():
            table.make(rows.schema)
            is_due(table.version())
        check_kept(self._location, sorted(set(table.columns) - set(rows.column_names)))
        table.check(rows.schema)
        self._check_unmoved(table)
        table.widen(rows.schema)
        write = partial(_write, table, _newest(changes), removals)
        table.commit(batch_id, write, is_due, self._has_moved)

    def _check_unmoved(self, table: DeltaTable) -> None:
        """Checks that no other writer has changed rows since the last batch.

        Raises:
            ConfigError: One has. This batch and those after it would not bring the rows back.
        """
        last = table.version()
        if last is not None and (change := table.since(last).change) is not None:
            raise self._has_moved(str(change))

    def _has_moved(self, why: str) -> ConfigError:
        return ConfigError(
            f"table {self._location} is not as this query left it, since {why}: start "
            "a new table with a new checkpoint",
            option="merge_into",
        )

    def _is_due(self, batch_id: int, before: int | None) -> bool:
        """Whether to write a batch, given the last one in the table."""
        last = -1 if before is None else before
        if batch_id > last + 1:
            raise ConfigError(
                f"table {self._location} lacks the batches of this query before "
                f"{batch_id}: start a new table with a new checkpoint",
                option="merge_into",
            )
        return batch_id > last


def _check_rows(changes: pa.Table) -> None:
    """Checks that a batch has rows of the source, which the query may have changed.

    Raises:
        ConfigError: A row cannot be merged.
    """
    kinds = {name: changes.schema.field(name).type for name in NEEDED}
    wrong = [name for name in NUMBERS if not pa.types.is_integer(kinds[name])]
    if not (pa.types.is_string(kinds["key"]) or pa.types.is_binary(kinds["key"])):
        wrong.append("key")
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} must have the types of the source", option="merge_into"
        )
    if not pc.all(pc.is_in(changes["op"], pa.array(_OPS)), min_count=0).as_py():
        raise ConfigError(f"op must be one of {', '.join(_OPS)} in every row", option="merge_into")
    is_keyless = pc.and_(pc.is_null(changes["key"]), pc.not_equal(changes["op"], "rollback"))
    if pc.any(is_keyless, min_count=0).as_py():
        raise ConfigError(
            "key is null in a row, which could not be found again", option="merge_into"
        )


def _removals(changes: pa.Table) -> list[str]:
    """Returns the conditions of rows that a rollback reverts.

    Raises:
        ConfigError: Only some of a vBucket's changes come again.
    """
    rollbacks = changes.filter(pc.equal(changes["op"], "rollback"))
    by_epoch = rolled_back(rollbacks.select(["vbucket", "epoch", "seqno"]).to_pylist())
    return [f"epoch < {epoch} AND {vbuckets_in(vbuckets)}" for epoch, vbuckets in by_epoch.items()]


def _newest(changes: pa.Table) -> pa.Table:
    """Returns the newest change of each document."""
    changes = changes.filter(pc.not_equal(changes["op"], "rollback"))
    place = [("epoch", "ascending"), ("seqno", "ascending")]
    return newest(changes, IDENTITY, pc.sort_indices(changes, sort_keys=place))


def _write(table: DeltaTable, changes: pa.Table, removals: list[str], properties: Any) -> None:
    is_written = pc.equal(changes["op"], "mutation")
    rows = changes.filter(is_written).drop_columns("op")
    if table.is_empty:
        table.append(rows, properties)
        return
    deletes = changes.filter(pc.invert(is_written)).select(IDENTITY)
    table.merge(rows, deletes, _SAME, removals, properties)
