"""Lets Spark find the data source `couchbase.dcp` by itself.

Spark imports every top-level module called `pyspark_*` and takes its `DefaultSource`; if one of
them raises, it finds none of any. So this one imports no native code and never raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import DataSource
except Exception:  # noqa: BLE001, S110 - whatever is wrong with it, others are to be found
    pass
else:
    if TYPE_CHECKING:
        from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
        from pyspark.sql.types import StructType

        from dcp_rs.spark.source import CouchbaseDcpDataSource

    class DefaultSource(DataSource):
        """Hands everything to `dcp_rs.spark.source`, which it imports when it is used."""

        @classmethod
        def name(cls) -> str:
            """Gives the name for `format`."""
            return "couchbase.dcp"

        def schema(self) -> StructType:
            """Gives the columns of the change table that the options ask for."""
            return self._source().schema()

        def reader(self, schema: StructType) -> DataSourceReader:
            """Makes the reader of `spark.read`."""
            return self._source().reader(schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
            """Makes the reader of `spark.readStream`."""
            return self._source().streamReader(schema)

        def _source(self) -> CouchbaseDcpDataSource:
            from dcp_rs.spark.source import CouchbaseDcpDataSource

            return CouchbaseDcpDataSource(self.options)
