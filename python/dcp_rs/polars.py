"""Read a bucket in Polars, as a lazy frame. Install the extra `polars`.

>>> import dcp_rs.polars
>>> with EmbeddedCluster() as cluster, cluster.connect() as client:
...     for n in range(5):
...         _ = cluster.upsert(f"key_{n}", {"n": n})
...     changes = dcp_rs.polars.scan(client, document_schema="n BIGINT")
...     changes.filter(n=3).select("key", "n").collect().rows()
[('key_3', 3)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _keywords
from dcp_rs._adapters import Delivery, Filters, plan_of
from dcp_rs._libraries import require
from dcp_rs.options import Masks
from dcp_rs.schema import columns as _all_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    import pyarrow as pa
    from polars import DataFrame, Expr, LazyFrame

    from dcp_rs.client import Client
    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BatchPolicy, Include, Op
    from dcp_rs.plan import ReadPlan

# The narrowest column: what is read where rows are only counted.
_NARROW = "vbucket"


@_keywords.checked
def scan(
    client: Client,
    plan: ReadPlan | None = None,
    *,
    collections: str | Iterable[str] | None = None,
    keys: str | Iterable[str] | None = None,
    ops: Op | Iterable[Op] | None = None,
    since: datetime | float | None = None,
    columns: Literal["basic", "full"] | Sequence[str] = "basic",
    key_type: Literal["string", "binary"] = "string",
    value_format: Literal["binary", "string"] = "binary",
    document_schema: str | pa.Schema | DocumentSchema | None = None,
    drop_fields: str | Iterable[str] | None = None,
    hash_fields: str | Iterable[str] | None = None,
    hash_key: str | bytes | None = None,
    include: Include | Iterable[Include] = (),
    batch: BatchPolicy | None = None,
) -> LazyFrame:
    """Returns the changes of a bucket as a lazy frame, without reading any.

    The bounds are taken now: every `collect` reads up to them, as `dcp_rs.Partition.open` says.
    Only the columns that a query uses are made, and the server sends no documents if none of them
    needs any. A slice ends the read. A predicate is applied to each batch; what the engine itself
    can leave out is an argument. The rows of a vBucket are in the order of their seqnos, but those
    of different vBuckets follow each other.

    Args:
        client: A client of the bucket, which must be open when the frame is collected.
        plan: What to read; by default, everything up to now. To continue where an earlier plan
            ended, pass `client.plan(start=end)`.
        collections: As in `dcp_rs.Client.stream`, like the options below; the first four only
            without `plan`.
        keys: As there.
        ops: As there.
        since: As there.
        columns: As there.
        key_type: As there.
        value_format: As there. Polars has no type for `variant`.
        document_schema: As there. Documents are decoded, and malformed ones noticed, only if a
            query uses one of their columns.
        drop_fields: As there.
        hash_fields: As there.
        hash_key: As there.
        include: As there.
        batch: As there.

    Raises:
        ConfigError: An option is wrong, or Polars is too old.
        ImportError: Polars is not installed.
        DcpError: As `dcp_rs.Client.plan`. `collect` raises what `dcp_rs.Partition.open` and a
            stream raise.
    """
    pl = require("dcp_rs.polars.scan", "polars", "polars")
    shape: dict[str, Any] = {
        "key_type": key_type,
        "value_format": value_format,
        "include": include,
    }
    masks = Masks.of(drop_fields, hash_fields, hash_key)
    delivery = Delivery.of(columns, document_schema, shape, masks, batch)
    filters = Filters(collections, keys, ops, since)
    plan = plan_of(client, plan, filters, shape["include"])
    source = _Source(client, plan, delivery)
    # Polars marks this as unstable.
    register = pl.io.plugins.register_io_source
    found: LazyFrame = register(source, schema=pl.Schema(delivery.schema))
    return found


class _Source:
    """What Polars calls for the frames of a query."""

    def __init__(self, client: Client, plan: ReadPlan, delivery: Delivery) -> None:
        self._client, self._plan, self._delivery = client, plan, delivery
        self._names = delivery.schema.names

    def __call__(
        self,
        with_columns: list[str] | None,
        predicate: Expr | None,
        n_rows: int | None,
        _batch_size: int | None,
    ) -> Iterator[DataFrame]:
        """Reads the partitions, one after the other."""
        import polars as pl

        wanted = self._names if with_columns is None else with_columns
        left = n_rows
        for partition in self._plan.partitions:
            with partition.open(self._client, **self._reading(wanted)) as stream:
                for batch in stream if left != 0 else ():
                    frame = pl.DataFrame(batch)
                    if left is not None:
                        frame = frame.head(left)
                        left -= frame.height
                    if predicate is not None:
                        frame = frame.filter(predicate)
                    yield frame.select(wanted)
                    if left == 0:
                        return

    def _reading(self, wanted: list[str]) -> dict[str, Any]:
        known = {column.name for column in _all_columns()}
        needs_documents = not known.issuperset(wanted)
        schema = self._delivery.document_schema if needs_documents else None
        columns = [name for name in self._names if name in wanted] or [_NARROW]
        return {**self._delivery.options, "columns": columns, "document_schema": schema}
