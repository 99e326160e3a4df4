"""The change table as Spark types it: exactly what the engine's batches are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError
from dcp_rs.spark.errors import missing_library
from dcp_rs.spark.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType

# name -> (Spark type, whether it may be null). Order is the table's.
_BASIC = {
    "op": ("string", False),
    "key": ("string", True),
    "value": ("binary", True),
    "scope": ("string", True),
    "collection": ("string", True),
    "vbucket": ("int", False),
    "seqno": ("bigint", False),
    "epoch": ("int", False),
    "cas": ("bigint", True),
    "timestamp": ("timestamp", True),
}
_FULL = {
    "rev": ("bigint", True),
    "expiry": ("timestamp", True),
    "deleted_at": ("timestamp", True),
    "flags": ("bigint", True),
    "datatype": ("string", True),
    "vbuuid": ("bigint", True),
    "snapshot_start": ("bigint", True),
    "snapshot_end": ("bigint", True),
}
_ON_REQUEST = {
    "xattrs": ("map<string,string>", True),
    "collection_id": ("bigint", True),
}
_ALL = _BASIC | _FULL | _ON_REQUEST


def column_names(options: ReadOptions) -> tuple[str, ...]:
    """Names the columns of a read, in order.

    Raises:
        ConfigError: `columns` names one that does not exist.
    """
    if options.columns is not None:
        for name in options.columns:
            if name not in _ALL:
                raise ConfigError(f"option columns: there is no column {name}")
        return options.columns
    names = [*_BASIC, *(_FULL if options.metadata == "full" else ())]
    if not options.include_value:
        names.remove("value")
    return (*names, "xattrs") if options.include_xattrs else tuple(names)


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
    try:
        from pyspark.sql import types
    except ImportError as error:
        raise missing_library(error) from error

    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    spark_types: dict[str, types.DataType] = {
        "bigint": types.LongType(),
        "binary": types.BinaryType(),
        "int": types.IntegerType(),
        "map<string,string>": types.MapType(types.StringType(), types.StringType()),
        "string": types.StringType(),
        "timestamp": types.TimestampType(),
    }
    fields = []
    for name in column_names(parsed):
        kind, nullable = _ALL[name]
        if name == "key" and parsed.key_type == "binary":
            kind = "binary"
        fields.append(types.StructField(name, spark_types[kind], nullable))
    return types.StructType(fields)
