"""Reads some documents of each collection, to infer schemas from."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.documents import MALFORMED, DocumentSchema
from dcp_rs.options import BatchPolicy
from dcp_rs.replication.decoding import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcp_rs.client import Client
    from dcp_rs.options import Masks
    from dcp_rs.replication.decoding import Inference

# Bytes of documents to infer from, of all collections.
_BYTES = 256 * 1024 * 1024
# Rows of collections of which enough is known, after which a stream without these is opened.
_WASTED = 10_000
_COLUMNS = ["op", "value", "vbucket", "collection_id", "datatype", MALFORMED]


class Sampler:
    """Takes documents of collections, from as many vBuckets as it can.

    Args:
        limit: Documents to take of each collection.
        shares: Number of collections, which share the memory.
        vbuckets: Number of vBuckets.
    """

    def __init__(self, limit: int, shares: int, vbuckets: int) -> None:
        self._limit = limit
        self._bytes_left: dict[int, int] = defaultdict(lambda: max(_BYTES // max(shares, 1), 1))
        self._each = max(-(-limit // max(vbuckets, 1)), 1)
        self._taken: dict[int, int] = defaultdict(int)
        self._seen: dict[int, int] = defaultdict(int)
        self._by_vbucket: dict[tuple[int, int], int] = defaultdict(int)

    def is_full(self, collection: int) -> bool:
        """Whether enough documents of a collection were taken."""
        return self._taken[collection] >= self._limit or self._bytes_left[collection] <= 0

    def choose(self, changes: pa.Table) -> dict[int, list[int]]:
        """Returns the indices of the documents to take, by the ID of their collection."""
        rows = zip(
            changes["op"].to_pylist(),
            changes["collection_id"].to_pylist(),
            changes["vbucket"].to_pylist(),
            pc.binary_length(bytes_of(changes)).to_pylist(),
            strict=True,
        )
        chosen: dict[int, list[int]] = defaultdict(list)
        for index, (op, collection, vbucket, size) in enumerate(rows):
            if op != "mutation" or self.is_full(collection):
                continue
            # If few vBuckets have the documents, each gives more of them.
            share = self._each << min(self._seen[collection] // self._limit, 32)
            self._seen[collection] += 1
            if self._by_vbucket[collection, vbucket] >= share:
                continue
            self._by_vbucket[collection, vbucket] += 1
            self._taken[collection] += 1
            self._bytes_left[collection] -= size or 0
            chosen[collection].append(index)
        return chosen

    def forget(self, collection: int) -> None:
        """Begins a collection anew, which is not full."""
        self._taken[collection] = self._seen[collection] = 0
        self._bytes_left.pop(collection, None)
        for key in [key for key in self._by_vbucket if key[0] == collection]:
            del self._by_vbucket[key]


def sample(
    client: Client,
    collections: Mapping[str, int],
    make: Callable[[str], Inference],
    limit: int,
    masks: Masks,
) -> dict[str, Inference]:
    """Reads documents of collections.

    It reads at most what the bucket has now, and stops as soon as it has enough of each.

    Args:
        client: Client of the bucket.
        collections: IDs of the collections by name.
        make: Makes what the documents of a collection are added to.
        limit: Documents to read of each.
        masks: Which of their fields are masked.

    Returns:
        What the documents have, by the name of the collection.
    """
    sampler = Sampler(limit, len(collections), client.num_vbuckets)
    by_id = {number: name for name, number in collections.items()}
    found = {name: make(name) for name in collections}
    left = dict(by_id)
    while left:
        before = len(left)
        is_complete = _read(client, left, sampler, found, masks)
        left = {number: name for number, name in left.items() if not sampler.is_full(number)}
        if is_complete or len(left) == before:
            break
        for number, name in left.items():
            sampler.forget(number)
            found[name] = make(name)
    return found


def _read(
    client: Client,
    collections: Mapping[int, str],
    sampler: Sampler,
    found: Mapping[str, Inference],
    masks: Masks,
) -> bool:
    """Reads documents; returns whether it has read all, or enough."""
    wasted = 0
    with client.stream(
        start="earliest",
        until="now",
        collections=list(collections.values()),
        columns=_COLUMNS,
        value_format="string",
        document_schema=DocumentSchema(None, on_malformed="column"),
        initial_deletions="skip_if_supported",
        on_rollback="resync",
        batch=BatchPolicy(linger=0.05),
        **masks.options,
    ) as stream:
        for batch in stream:
            changes = pa.Table.from_batches([batch.to_pyarrow()])
            chosen = sampler.choose(changes)
            for number, indices in chosen.items():
                if number in collections:
                    found[collections[number]].add(changes.take(indices))
            if all(map(sampler.is_full, collections)):
                return True
            wasted += len(changes) - sum(map(len, chosen.values()))
            if wasted > _WASTED and any(map(sampler.is_full, collections)):
                return False
    return True
