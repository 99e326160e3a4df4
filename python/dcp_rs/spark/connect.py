"""Which query a batch belongs to. Spark Connect does not tell `foreachBatch`.

Its server runs the function in a Python process for each query, as a client of its own. The
process begins in the session that started the query, where the function is unpickled, and which
lists its queries. From PySpark 4.3 on, each batch is in another session, which lists none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.connect.streaming.query import StreamingQueryManager

# Set by the server for its Python processes.
_SERVER = "SPARK_CONNECT_LOCAL_URL"


class QueryOfBatch:
    """Finds the id of the query that runs a batch. It is pickled with the sink.

    Args:
        name: The query's `queryName`, if Connect has to find it among others.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        # Over Connect, Spark makes the sink again in the process that it runs batches in.
        self._queries = queries_of_worker()
        self._known = ""

    def __call__(self, batch: DataFrame) -> str:
        """Returns the id, which the query's checkpoint has.

        Raises:
            ConfigError: It cannot be found, or not told from others.
        """
        context = getattr(batch.sparkSession, "sparkContext", None)
        query: str | None = context and context.getLocalProperty("sql.streaming.queryId")
        if query:
            return query
        # A process of Connect has one query, which is the only one of its session at first.
        if self._queries is None or not self._known:
            self._known = query_id(self._queries, self._name)
        return self._known

    def __reduce__(self) -> tuple[type[QueryOfBatch], tuple[str | None]]:
        """Pickles without the queries of this process."""
        return type(self), (self._name,)


def queries_of_worker() -> StreamingQueryManager | None:
    """Returns the queries of this process's session, if it runs batches over Connect."""
    if _SERVER not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession

    session = SparkSession.getActiveSession()
    return None if session is None else session.streams


def query_id(queries: StreamingQueryManager | None, name: str | None) -> str:
    """Returns the id of the query that runs this batch, which its checkpoint has.

    It is one of those that are active, since it runs a batch.

    Args:
        queries: Those of the session that started it.
        name: Its `queryName`; if it is `None`, it must be the only one.

    Raises:
        ConfigError: It cannot be found, or not told from others.
    """
    if queries is None:
        raise ConfigError("works only in foreachBatch of a streaming query", option="merge_into")
    active = queries.active
    found = [query for query in active if name is None or query.name == name]
    if len(found) == 1:
        return str(found[0].id)
    if name is not None:
        raise ConfigError(
            f"there is no query {name!r} in the session: set it to the queryName", option="name"
        )
    if not found:
        raise ConfigError(
            "the session has no streaming query: create the sink before the query, not in "
            "foreachBatch",
            option="merge_into",
        )
    raise ConfigError(
        f"Spark Connect does not say which of {len(active)} queries of the session runs the batch: "
        "set queryName of the query, and name to the same",
        option="name",
    )
