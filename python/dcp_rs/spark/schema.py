"""The change table in Spark's types, exactly as in the engine's batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import dcp_rs
from dcp_rs._libraries import require_spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark.options import ReadOptions, options_as_written

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

EVENTS_ONLY = "couchbase.dcp.events"
"""In the metadata of the column `value` in which only events have one."""


@options_as_written()
def table_schema(options: ReadOptions) -> dcp_rs.Schema:
    """Returns the columns of a read.

    Raises:
        ConfigError: `columns` names one that does not exist, `documentSchema` is not understood,
            or options contradict each other.
    """
    return dcp_rs.Schema(**options.table())


def schema(options: Mapping[str, object] | ReadOptions) -> StructType:
    """Returns the Spark schema of a read, for `DataFrame.mapInArrow`.

    Args:
        options: Options of the read.

    Returns:
        A `StructType` with the names, types, nullability and order of the batches' schema.

    Raises:
        ConfigError: An option is wrong.
        ImportError: PySpark is not installed.
    """
    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    require_spark("dcp_rs.spark")
    from pyspark.sql.types import StructField, StructType

    fields = table_schema(parsed).to_pyarrow()
    notes = {"value": {EVENTS_ONLY: True}} if parsed.value_is_of_events else {}
    return StructType(
        [
            StructField(each.name, spark_type(each.type), each.nullable, notes.get(each.name))
            for each in fields
        ]
    )


@dataclass(frozen=True)
class Projection:
    """The columns that a user's schema names, in its order.

    Attributes:
        options: The read's options, with these columns.
        names: The columns. Those that are read may end with `_malformed`, which is added by
            `onMalformed=column`.
        nullable: Those that the schema lets be null, though the table's never are: Spark wants
            Arrow batches to say so too.
    """

    options: ReadOptions
    names: tuple[str, ...]
    nullable: frozenset[str]

    @classmethod
    def of(cls, options: ReadOptions, wanted: StructType) -> Self:
        """Checks a schema that a user gave to `.schema()`.

        Raises:
            ConfigError: It names a column that the table does not have, or another type.
        """
        names = tuple(field.name for field in wanted)
        if not names:
            raise ConfigError("names no column", option="schema")
        given = schema(options)
        projected = _reduced(options, names)
        read = given if tuple(given.names) == names else schema(projected)
        table = read.fields[: len(names)]
        for field, known in zip(wanted, table, strict=True):
            if field.dataType != known.dataType:
                raise ConfigError(
                    f"column {field.name} is {known.dataType.simpleString()}, not "
                    f"{field.dataType.simpleString()}; cast it after loading",
                    option="schema",
                )
            if known.nullable and not field.nullable:
                raise ConfigError(f"column {field.name} may be null", option="schema")
        nullable = frozenset(
            field.name
            for field, known in zip(wanted, table, strict=True)
            if field.nullable and not known.nullable
        )
        return cls(projected, names, nullable)

    def declared(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Returns the batches with the columns and the nullability of the user's schema."""
        return map(self._declare, batches)

    def _declare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        if batch.num_columns > len(self.names):
            batch = batch.select(self.names)
        if not self.nullable:
            return batch
        fields = [
            field.with_nullable(True) if field.name in self.nullable else field
            for field in batch.schema
        ]
        return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


def _reduced(options: ReadOptions, names: tuple[str, ...]) -> ReadOptions:
    """Returns the options to read only these columns, without decoding others."""
    of_changes = {column.name for column in dcp_rs.columns()}
    reduced = replace(options, columns=names)
    if of_changes.issuperset(names):
        reduced = replace(reduced, document_schema=None, document_prefix="")
    if "value" not in names:
        reduced = replace(reduced, value_format="binary")
    if reduced.document_schema is None and reduced.value_format == "binary":
        reduced = replace(reduced, on_malformed="null")
    return reduced


def spark_type(arrow_type: pa.DataType) -> DataType:
    """Returns the Spark type whose Arrow form `arrow_type` is."""
    import pyarrow as pa
    from pyspark.sql import types

    if pa.types.is_map(arrow_type):
        key, item = spark_type(arrow_type.key_type), spark_type(arrow_type.item_type)
        return types.MapType(key, item)
    if pa.types.is_list(arrow_type):
        return types.ArrayType(spark_type(arrow_type.value_type))
    if pa.types.is_struct(arrow_type):
        if any(b"variant" in (field.metadata or {}) for field in arrow_type):
            return types.VariantType()
        fields = [types.StructField(each.name, spark_type(each.type)) for each in arrow_type]
        return types.StructType(fields)
    if pa.types.is_decimal(arrow_type):
        return types.DecimalType(arrow_type.precision, arrow_type.scale)
    return {
        pa.binary(): types.BinaryType(),
        pa.bool_(): types.BooleanType(),
        pa.date32(): types.DateType(),
        pa.float32(): types.FloatType(),
        pa.float64(): types.DoubleType(),
        pa.int8(): types.ByteType(),
        pa.int16(): types.ShortType(),
        pa.int32(): types.IntegerType(),
        pa.int64(): types.LongType(),
        pa.string(): types.StringType(),
        pa.timestamp("us"): types.TimestampNTZType(),
        pa.timestamp("us", "UTC"): types.TimestampType(),
    }[arrow_type]
