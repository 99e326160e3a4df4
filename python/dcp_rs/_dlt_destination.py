"""What a destination of dlt has of a table."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import pyarrow as pa

_ROWS = 50_000
# What a type of dlt is, beside its name; of others, destinations decide.
_PARTS = {"bigint": ("precision",), "decimal": ("precision", "scale")}


@dataclass(frozen=True)
class Destination:
    """The table of a resource, read while dlt extracts."""

    pipeline: Any
    schema: Any
    table: str

    @classmethod
    def of_resource(cls, rows: pa.Schema) -> Destination:
        """Returns the table of the resource that is being extracted.

        Args:
            rows: Columns of the rows to load.

        Raises:
            ConfigError: It is not merged into, has columns of other types, or lacks packages that
                were extracted.
        """
        import dlt

        pipeline, schema = dlt.current.pipeline(), dlt.current.source_schema()
        # With what the caller of dlt has set.
        hints: Any = dlt.current.resource().compute_table_schema()
        table = schema.naming.normalize_tables_path(hints["name"])
        _check_merges(pipeline.destination, hints)
        _check_types(schema, table, rows, hints)
        # The source's own does not have the columns yet.
        found = cls(pipeline, pipeline.schemas.get(schema.name, schema), table)
        pending = pipeline.list_normalized_load_packages()
        if pending or pipeline.list_extracted_load_packages():
            raise ConfigError(
                "has packages that are not loaded yet: load them before you extract again, as "
                "pipeline.run does",
                option="pipeline",
            )
        return found

    def high_seqnos(self) -> dict[int, int]:
        """Returns the highest seqno that the table has, by vBucket."""
        query = "SELECT {vbucket}, MAX({seqno}) FROM {table} GROUP BY {vbucket}"
        found: dict[int, int] = {}
        for batch in self._select(query, ["vbucket", "seqno"], None):
            grouped = batch.group_by("vbucket").aggregate([("seqno", "max")])
            for row in grouped.to_pylist():
                vbucket, seqno = int(row["vbucket"]), int(row["seqno_max"])
                found[vbucket] = max(seqno, found.get(vbucket, 0))
        return found

    def keys(self, vbuckets: Collection[int]) -> Iterator[pa.Table]:
        """Returns the keys of vBuckets, with `vbucket`."""
        return self.keys_above(dict.fromkeys(vbuckets, -1))

    def keys_above(self, seqnos: Mapping[int, int]) -> Iterator[pa.Table]:
        """Returns the keys of rows above a seqno of their vBucket, with `vbucket`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not seqnos:
            return
        of = ", ".join(map(str, sorted(seqnos)))
        query = "SELECT {key}, {vbucket}, {seqno} FROM {table} WHERE {vbucket} "
        query += f"IN ({of})"
        limits = pa.array(seqnos.values(), pa.int64())
        known = pa.array(seqnos.keys(), pa.int64())
        for batch in self._select(query, ["key", "vbucket", "seqno"], sorted(seqnos)):
            place = pc.index_in(batch["vbucket"].cast(pa.int64()), value_set=known)
            above = pc.greater(batch["seqno"].cast(pa.int64()), limits.take(place))
            yield batch.filter(above).select(["key", "vbucket"])

    def _select(
        self, query: str, columns: list[str], vbuckets: list[int] | None
    ) -> Iterator[pa.Table]:
        from dlt.common.destination.exceptions import DestinationUndefinedEntity

        if not self._is_known():
            return
        try:
            if self._format == "delta":
                yield from self._scan_delta(columns, vbuckets)
            else:
                yield from self._query(query, columns)
        except DestinationUndefinedEntity:
            # dlt forgets what is gone only when it loads again.
            return

    def _is_known(self) -> bool:
        table = self.schema.tables.get(self.table)
        return table is not None and "seqno" in table["columns"]

    @property
    def _format(self) -> str | None:
        found: str | None = self.schema.tables[self.table].get("table_format")
        return found

    def _scan_delta(self, columns: list[str], vbuckets: list[int] | None) -> Iterator[pa.Table]:
        """Reads a table of files without the extension that DuckDB would fetch for it."""
        import pyarrow as pa
        import pyarrow.compute as pc
        from dlt.common.libs.deltalake import get_delta_tables

        table = get_delta_tables(self.pipeline, self.table, schema_name=self.schema.name)
        chosen = None if vbuckets is None else pc.field("vbucket").isin(vbuckets)
        scanned = (
            table[self.table]
            .to_pyarrow_dataset()
            .scanner(columns=columns, filter=chosen, batch_size=_ROWS)
        )
        for batch in scanned.to_batches():
            yield pa.Table.from_batches([batch])

    def _query(self, query: str, columns: list[str]) -> Iterator[pa.Table]:
        with self.pipeline.sql_client(schema_name=self.schema.name) as client:
            names = {
                name: client.escape_column_name(self.schema.naming.normalize_identifier(name))
                for name in columns
            }
            text = query.format(table=client.make_qualified_table_name(self.table), **names)
            # A result that is not read to its end goes before its connection: for one that has
            # outlived it, DuckDB waits forever when the database is opened again.
            with (
                client.execute_query(text) as cursor,
                contextlib.closing(cursor.iter_arrow(chunk_size=_ROWS)) as tables,
            ):
                while (table := _next(tables)) is not None:
                    # Some databases return names in capitals.
                    yield table.rename_columns(columns)


def _check_types(schema: Any, table: str, rows: pa.Schema, hints: Mapping[str, Any]) -> None:
    """Checks that the columns of a table are those of rows, which dlt would cast to them.

    Raises:
        ConfigError: They are not.
    """
    from dlt.common.libs.pyarrow import py_arrow_to_table_schema_columns

    # Without a table that dlt is told to drop.
    stored: Mapping[str, Any] = schema.tables.get(table, {}).get("columns", {})
    # Databases have JSON for what formats of files have types for.
    parts = {**_PARTS, "json": ("x-nested-type",)} if hints.get("table_format") else _PARTS
    for name, column in py_arrow_to_table_schema_columns(rows).items():
        known = stored.get(schema.naming.normalize_identifier(name), {})
        own = {**column, **hints["columns"].get(name, {})}
        both = ("data_type", *parts.get(own["data_type"], ()))
        if "data_type" in known and any(known.get(each) != own.get(each) for each in both):
            raise ConfigError(
                f"has {name} of another type than the table {table}, to which dlt would cast it:"
                ' run with refresh="drop_resources"',
                option="document_schema",
            )


def _next(tables: Iterator[pa.Table]) -> pa.Table | None:
    with warnings.catch_warnings():
        # How dlt asks DuckDB 2 for rows, of which DuckDB says that there is a quicker way.
        warnings.filterwarnings("ignore", "Arrow output on a DB-API result", UserWarning)
        return next(tables, None)


def _check_merges(destination: Any, hints: Mapping[str, Any]) -> None:
    """Checks that rows are replaced, which are otherwise appended in silence.

    Raises:
        ConfigError: They are not.
    """
    disposition = hints.get("write_disposition")
    if disposition != "merge":
        raise ConfigError(
            f"is {disposition}, and deletions and changes need merge: leave it out",
            option="write_disposition",
        )
    capabilities = destination.capabilities()
    strategies = capabilities.supported_merge_strategies or ()
    table_format = hints.get("table_format")
    if capabilities.merge_strategies_selector is not None:
        of_table = {"name": hints["name"], "table_format": table_format}
        strategies = capabilities.merge_strategies_selector(strategies, table_schema=of_table)
    if {"delete-insert", "upsert"}.isdisjoint(strategies):
        raise ConfigError(
            f"{destination.destination_name} does not replace rows"
            + (
                ': pass table_format="delta"'
                if table_format is None and destination.destination_name == "filesystem"
                else ", so deletions and changes would be appended: choose another one"
            ),
            option="table_format",
        )
