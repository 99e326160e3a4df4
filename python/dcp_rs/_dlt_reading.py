"""What a run of dlt reads of a collection: the newest row of each document that changed.

A destination may merge a package without an order among its rows, so a package has one row for each
key. Where history was lost, documents that only the destination has are found by reading its keys.
"""

from __future__ import annotations

import logging
import tempfile
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_rs._dlt_destination import Destination
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError, RollbackError
from dcp_rs.planner import Planner, PlanOptions
from dcp_rs.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import BinaryIO

    import pyarrow as pa

    from dcp_rs.client import Client
    from dcp_rs.options import Masks
    from dcp_rs.plan import Partition
    from dcp_rs.planner import Offsets

_log = logging.getLogger("dcp_rs")

# Changes of a partition, whose keys are in memory at a time.
_PARTITION = 500_000
# How often a read starts over because the bucket has rolled back meanwhile.
_ATTEMPTS = 5
_COLUMNS = ["key", "vbucket", "epoch", "seqno", "cas", "timestamp"]


@dataclass(frozen=True)
class Reading:
    """How a collection is read."""

    client: Client
    collection: str
    options: Mapping[str, Any]
    masks: Masks
    persisted_only: bool
    max_seqnos: int | None

    @property
    def has_binary_keys(self) -> bool:
        """Whether keys are bytes."""
        return self.options.get("key_type") == "binary"

    def rows(self) -> Iterator[pa.Table]:
        """Yields the rows of a package, and moves the position in the state of the resource."""
        import dlt

        state = dlt.current.resource_state()
        destination = Destination.of_resource(self._schema())
        read_to = destination.high_seqnos()
        identity = self.client.collections(self.collection)[self.collection]
        start = state.get("end") if state.get("collection_id") == identity else None
        with ExitStack() as files:
            spools, end = self._read(destination, start, read_to, files)
            for spool in spools:
                # dlt writes the first package of a table as it is.
                yield from spool.newest(with_deletions=bool(read_to))
        # Only now: what was not yielded is not in the package.
        state.update(collection_id=identity, end=end)

    def _read(
        self,
        destination: Destination,
        start: Offsets | None,
        read_to: Mapping[int, int],
        files: ExitStack,
    ) -> tuple[list[Spool], Offsets]:
        """Reads everything since `start`, and once more if the bucket rolls back meanwhile."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                found = self._attempt(destination, start, read_to, files)
            except RollbackError:
                if attempt == _ATTEMPTS:
                    raise
                continue
            if found is not None:
                return found
            _log.warning(
                "the table of %s has changes that its state lacks and the bucket no longer has: it "
                "is loaded again",
                self.collection,
                extra=about("table_reloaded", collection=self.collection),
            )
            start = None
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self,
        destination: Destination,
        start: Offsets | None,
        read_to: Mapping[int, int],
        files: ExitStack,
    ) -> tuple[list[Spool], Offsets] | None:
        """Reads once; `None` if the destination has changes that were lost unnoticed."""
        planner = Planner(self.client, collections=self.collection)
        limits = PlanOptions(
            persisted_only=self.persisted_only,
            max_seqnos=self.max_seqnos,
            on_rollback="resync",
            on_purge="resync",
        )
        planner.observe(persisted=self.persisted_only)
        begin = planner.earliest() if start is None else start
        end = planner.end(begin, limits)
        size = sum(max(0, last - first) for first, last in zip(begin["s"], end["s"], strict=True))
        count = min(self.client.num_vbuckets, 1 + size // _PARTITION)
        partitions = planner.partitions(begin, end, limits, count=count)
        anew = {
            each.vbucket
            for partition in partitions
            for each in partition.ranges
            if each.rolled_back
        }
        if start is None:
            anew.update(read_to)
        # A package that did not come to its end, or whose state was lost, has left newer rows.
        ahead = {
            vbucket: begin["s"][vbucket]
            for vbucket, seqno in read_to.items()
            if vbucket not in anew and seqno > begin["s"][vbucket]
        }
        spools, left = [], set(read_to)
        for partition in partitions:
            spool = self._spool(files)
            mine = left.intersection(partition.vbuckets)
            left -= mine
            spool.remove(destination.keys(mine & anew))
            self._fill(spool, partition)
            if not spool.has_all(destination.keys_above(_of(ahead, mine))):
                return None
            spools.append(spool)
        if not Spool.is_empty(destination.keys_above(_of(ahead, left))):
            return None
        if left & anew:
            spool = self._spool(files)
            spool.remove(destination.keys(left & anew))
            spool.finish()
            spools.append(spool)
        return spools, end

    def _fill(self, spool: Spool, partition: Partition) -> None:
        with partition.open(self.client, **self._shape, **self.masks.options) as stream:
            for batch in stream:
                spool.add(batch.to_pyarrow())
        spool.finish()

    def _spool(self, files: ExitStack) -> Spool:
        file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - as the line says
        return Spool(file, self._schema())

    @property
    def _shape(self) -> dict[str, Any]:
        schema = self.options.get("document_schema")
        with_documents = (
            {"value_format": "string"} if schema is None else {"document_schema": schema}
        )
        return {
            "columns": ["op", *_COLUMNS, *(["value"] if schema is None else [])],
            "key_type": self.options.get("key_type", "string"),
            **with_documents,
        }

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        schema = pa.schema(Schema(**self._shape))
        if "_deleted" in schema.names:
            raise ConfigError("has _deleted, the column of deletions", option="document_schema")
        return schema.append(pa.field("_deleted", pa.bool_(), nullable=False))


def _of(ahead: Mapping[int, int], vbuckets: Collection[int]) -> dict[int, int]:
    return {vbucket: seqno for vbucket, seqno in ahead.items() if vbucket in vbuckets}


class Spool:
    """The rows of a partition in a temporary file, of which the last of each key counts."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        import pyarrow as pa

        self._file = file
        fields = [each for each in schema if each.name != "op"]
        # A key is null only in a rollback row, which is none of these.
        self._schema = pa.schema(
            each.with_nullable(False) if each.name == "key" else each for each in fields
        )
        self._writer = pa.ipc.new_stream(file, self._schema)
        self._keys: list[pa.Array] = []
        self._last: Any = None

    def remove(self, keys: Iterable[pa.Table]) -> None:
        """Adds a deletion for each key, which a later row of the key replaces."""
        import pyarrow as pa

        for table in keys:
            count = len(table)
            given = {
                "key": table["key"].combine_chunks(),
                "vbucket": table["vbucket"].combine_chunks(),
                "epoch": pa.repeat(0, count),
                "seqno": pa.repeat(0, count),
                "_deleted": pa.repeat(True, count),
            }
            columns = [
                given[each.name].cast(each.type)
                if each.name in given
                else pa.nulls(count, each.type)
                for each in self._schema
            ]
            self._write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds the changes of a batch of the stream."""
        import pyarrow as pa
        import pyarrow.compute as pc

        batch = batch.filter(pc.not_equal(batch["op"], "rollback"))
        deleted = pc.not_equal(batch["op"], "mutation")
        columns = [
            deleted if each.name == "_deleted" else batch[each.name] for each in self._schema
        ]
        self._write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def _write(self, batch: pa.RecordBatch) -> None:
        if len(batch):
            self._writer.write_batch(batch)
            self._keys.append(batch["key"])

    def finish(self) -> None:
        """Finds the last row of each key."""
        import pyarrow as pa

        self._writer.close()
        keys = pa.chunked_array(self._keys, self._schema.field("key").type)
        places = _range(len(keys))
        grouped = pa.table({"key": keys, "place": places}).group_by("key", use_threads=False)
        self._last = grouped.aggregate([("place", "max")])["place_max"].combine_chunks().sort()

    def has_all(self, keys: Iterable[pa.Table]) -> bool:
        """Whether each of some keys has a row."""
        import pyarrow as pa
        import pyarrow.compute as pc

        own = pa.chunked_array(self._keys, self._schema.field("key").type)
        return all(
            pc.all(pc.is_in(each["key"].cast(own.type), value_set=own)).as_py() is not False
            for each in keys
        )

    @staticmethod
    def is_empty(keys: Iterable[pa.Table]) -> bool:
        """Whether there are no keys."""
        return not any(len(each) for each in keys)

    def newest(self, *, with_deletions: bool) -> Iterator[pa.Table]:
        """Yields the last row of each key, batch by batch."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._file.seek(0)
        last, first = self._last, 0
        for batch in pa.ipc.open_stream(self._file):
            low = bisect_left(last, first, key=lambda each: each.as_py())
            first += len(batch)
            high = bisect_left(last, first, key=lambda each: each.as_py())
            chosen = pc.subtract(last.slice(low, high - low), first - len(batch))
            rows = batch.take(chosen)
            if not with_deletions:
                rows = rows.filter(pc.invert(rows["_deleted"]))
            if len(rows):
                yield pa.Table.from_batches([rows])


def _range(count: int) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.subtract(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count)), 1)
