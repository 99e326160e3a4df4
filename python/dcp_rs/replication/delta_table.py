"""A Delta table that is written by one application, with each commit made only once."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.target import missing_columns, refuse_variants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

LIBRARY = "deltalake"
# Property of the table that names the application which writes to it.
_OWNER = "dcp_rs.application"
# How long to retry a commit that conflicts with others, such as OPTIMIZE.
_PATIENCE = 30.0
# A column of the source of a merge; no field of a document may have this name.
_IS_DELETED = "_dcp_rs_is_deleted"
_COLUMNS = re.compile(r"\b(vbucket|collection_id|epoch|generation)\b")


class DeltaTable:
    """A Delta table, and the transactions of an application in it.

    Args:
        location: Folder or URI of the table.
        application: Name of the transactions. No other application of dcp_rs may write to it.
        storage_options: Options of the object store, as `deltalake` has them.

    Raises:
        ImportError: deltalake is not installed.
    """

    def __init__(
        self, location: str, application: str, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._deltalake = require("a Delta table", LIBRARY, "delta")
        self.location = location
        self._application = application
        self._storage = None if storage_options is None else dict(storage_options)
        self._table: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows, so far as is known."""
        return not self._table.file_uris()

    @property
    def columns(self) -> list[str]:
        """Names of its columns, so far as is known."""
        return [field.name for field in self._table.schema().fields]

    def find(self) -> bool:
        """Looks for the table, or at what was added to it; whether it is there."""
        delta = self._deltalake
        if self._table is not None:
            self._table.update_incremental()
        elif delta.DeltaTable.is_deltatable(self.location, self._storage):
            self._table = delta.DeltaTable(self.location, storage_options=self._storage)
        return self._table is not None

    def make(self, schema: pa.Schema) -> None:
        """Makes the table if it is not there."""
        self._table = self._deltalake.DeltaTable.create(
            self.location,
            delta_schema(schema),
            mode="ignore",
            configuration={_OWNER: self._application},
            storage_options=self._storage,
            raise_if_key_not_exists=False,
        )

    def version(self) -> int | None:
        """Returns the version of the application's last transaction; `None` before the first.

        Raises:
            ConfigError: The table is another application's.
        """
        owner = self._table.metadata().configuration.get(_OWNER)
        found: int | None = self._table.transaction_version(self._application)
        if owner not in {None, self._application}:
            raise ConfigError(
                f"target: table {self.location} belongs to {owner}, not to {self._application}: "
                "use another table"
            )
        if found is None and not self.is_empty:
            raise ConfigError(
                f"target: table {self.location} has rows that dcp_rs did not write: use another"
            )
        return found

    def widen(self, schema: pa.Schema) -> None:
        """Adds the columns that the table lacks.

        Raises:
            ConfigError: A column has another type; nothing was written.
        """
        wanted = self._deltalake.Schema.from_arrow(delta_schema(schema)).fields
        fields = {field.name: field for field in wanted}
        missing = missing_columns(
            {field.name: _type(field) for field in self._table.schema().fields},
            {name: _type(field) for name, field in fields.items()},
            self.location,
        )
        if missing:
            self._table.alter.add_columns([fields[name] for name in missing])
        if _OWNER not in self._table.metadata().configuration:
            self._table.alter.set_table_properties(
                {_OWNER: self._application}, raise_if_not_exists=False
            )

    def commit(
        self, version: int, write: Callable[[Any], None], is_due: Callable[[int | None], bool]
    ) -> int | None:
        """Makes a commit with a transaction of this version.

        Args:
            version: Of the transaction.
            write: Writes the rows, with the properties of the commit. Called again if another
                commit was made meanwhile.
            is_due: Says, of the version of the last transaction, whether this one is to be made.

        Returns:
            The version of the transaction before.
        """
        transaction = self._deltalake.Transaction(self._application, version)
        properties = self._deltalake.CommitProperties(app_transactions=[transaction])
        deadline = time.monotonic() + _PATIENCE
        while True:
            self._table.update_incremental()
            before = self.version()
            if not is_due(before):
                return before
            try:
                write(properties)
                # Without changed rows, the operation makes no commit.
                if self._table.transaction_version(self._application) != version:
                    self.append(self._table.schema().to_arrow(), properties)
            except self._deltalake.exceptions.CommitFailedError:
                if time.monotonic() > deadline:
                    raise
                continue
            return before

    def append(self, rows: pa.Table | pa.Schema, properties: Any) -> None:
        """Appends rows; or none, of a schema."""
        pa = require_pyarrow("a Delta table")
        if not isinstance(rows, pa.Table):
            rows = pa.schema(rows).empty_table()
        self._deltalake.write_deltalake(
            self._table, rows.cast(delta_schema(rows.schema)), mode="append",
            commit_properties=properties, schema_mode="merge",
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
            self._table.merge(
                _source(rows, deletes),
                same,
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            .when_matched_delete(f"s.{_IS_DELETED}")
            .when_matched_update_all(except_cols=[_IS_DELETED])
            .when_not_matched_insert_all(f"NOT s.{_IS_DELETED}", except_cols=[_IS_DELETED])
        )
        if removals:
            gone = _COLUMNS.sub(r"t.\1", " OR ".join(f"({each})" for each in removals))
            merge = merge.when_not_matched_by_source_delete(gone)
        merge.execute()


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Returns a schema in types that the table can have, every column nullable.

    Raises:
        ConfigError: A column is a VARIANT.
    """
    pa = require_pyarrow("a Delta table")
    refuse_variants(schema, LIBRARY)
    return pa.schema([_known(field).with_nullable(True) for field in schema])


def _known(field: pa.Field) -> pa.Field:
    pa = require_pyarrow("a Delta table")
    kind = field.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        kind = pa.timestamp(kind.unit, "UTC")
    elif pa.types.is_map(kind):
        kind = pa.map_(_known(kind.key_field), _known(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_known(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_known(each) for each in kind])
    return field.with_type(kind)


def _type(field: Any) -> str:
    """Returns the type of a field as normalized JSON text."""
    kind = json.loads(field.to_json())["type"]
    return kind if isinstance(kind, str) else json.dumps(kind, sort_keys=True)


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
        part.append_column(_IS_DELETED, pa.array([is_deleted] * len(part), pa.bool_()))
        for part, is_deleted in ((written, False), (removed, True))
    ]
    return pa.concat_tables(parts)
