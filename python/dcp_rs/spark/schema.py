"""The change table as Spark types it: exactly what the engine's batches are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dcp_rs
from dcp_rs.spark.errors import missing_library
from dcp_rs.spark.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType


def table_schema(options: ReadOptions) -> dcp_rs.Schema:
    """Gives the columns of a read.

    Raises:
        ConfigError: `columns` names one that does not exist, or contradicts another option.
    """
    return dcp_rs.Schema(
        columns=options.columns,
        metadata=options.metadata,
        include_value=options.include_value,
        include_xattrs=options.include_xattrs,
        key_type=options.key_type,
    )


def schema(options: Mapping[str, object] | ReadOptions) -> StructType:
    """Gives the Spark schema of a read, for `DataFrame.mapInArrow`.

    Args:
        options: The options that the read has.

    Returns:
        A `StructType` equal, in names, types, nullability and order, to the batches' schema.

    Raises:
        ConfigError: An option is wrong.
        ImportError: PySpark is not installed.
    """
    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    try:
        from pyspark.sql.types import StructField, StructType

        fields = table_schema(parsed).to_pyarrow()
    except ImportError as error:
        raise missing_library(error) from error
    return StructType(
        [StructField(field.name, _spark_type(field.type), field.nullable) for field in fields]
    )


def _spark_type(arrow_type: pa.DataType) -> DataType:
    """Gives the Spark type whose Arrow form `arrow_type` is."""
    import pyarrow as pa
    from pyspark.sql import types

    if pa.types.is_map(arrow_type):
        key, item = _spark_type(arrow_type.key_type), _spark_type(arrow_type.item_type)
        return types.MapType(key, item)
    return {
        pa.binary(): types.BinaryType(),
        pa.int32(): types.IntegerType(),
        pa.int64(): types.LongType(),
        pa.string(): types.StringType(),
        pa.timestamp("us", "UTC"): types.TimestampType(),
    }[arrow_type]
