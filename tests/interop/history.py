"""Everything that was written to a cluster, to hold what a client was sent against."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_rs.testing import EmbeddedCluster


@dataclass(frozen=True)
class Change:
    """A version of a document, as it was written or as a client was sent it."""

    seqno: int
    key: str
    op: str
    cas: int
    size: int
    crc: int
    # Number of the collection.
    collection: int = 0

    def told_as(self, expiration: str) -> Change:
        """The same as a client is told of it, to whom an expiration may be a deletion."""
        return replace(self, op=expiration) if self.op == "expiration" else self


@dataclass
class History:
    """Everything that was ever written to a cluster, by vBucket."""

    cluster: EmbeddedCluster
    seed: int = 1
    versions: dict[int, list[Change]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.versions = {vbucket: [] for vbucket in range(self.cluster.num_vbuckets)}
        self._collections = {None: 0}
        self._keys: dict[str, tuple[itertools.count[int], defaultdict[int, deque[str]]]] = {}

    def create_collection(self, path: str) -> int:
        """Creates a collection, given as scope.collection, and its scope; gives its number."""
        scope = path.partition(".")[0]
        if scope not in self.cluster.collections():
            self.cluster.create_scope(scope)
        self.cluster.create_collection(path)
        for each in self.cluster.manifest()["scopes"]:
            for collection in each["collections"]:
                name = f"{each['name']}.{collection['name']}"
                self._collections[name] = int(collection["uid"], 16)
        return self._collections[path]

    def drop_collection(self, path: str) -> None:
        """Drops a collection; its documents are no longer expected."""
        self.cluster.drop_collection(path)
        number = self._collections.pop(path)
        for vbucket, versions in self.versions.items():
            self.versions[vbucket] = [v for v in versions if v.collection != number]

    def upsert(self, key: str, value: bytes, collection: str | None = None) -> None:
        token = self.cluster.upsert(key, value, collection=collection)
        self._note(token, key, "mutation", value, collection)

    def remove(self, key: str, collection: str | None = None) -> None:
        token = self.cluster.remove(key, collection=collection)
        self._note(token, key, "deletion", b"", collection)

    def expire(self, key: str, collection: str | None = None) -> None:
        token = self.cluster.expire(key, collection=collection)
        self._note(token, key, "expiration", b"", collection)

    def _note(self, token, key: str, op: str, value: bytes, collection: str | None) -> None:
        number = self._collections[collection]
        change = Change(token.seqno, key, op, token.cas, len(value), zlib.crc32(value), number)
        self.versions[token.vbucket].append(change)

    def write(
        self, documents: int, *, prefix: str = "doc", size: int = 200, collection: str | None = None
    ) -> None:
        """Writes documents, of which some change again, some go and some come back."""
        for index in range(documents):
            key = f"{prefix}-{index}-é"
            self.upsert(key, self._value(index, size), collection)
            fate = self.random.random()
            if fate < 0.25:
                self.upsert(key, self._value(-index, size), collection)
            elif fate < 0.35:
                self.remove(key, collection)
            elif fate < 0.45:
                self.expire(key, collection)
            elif fate < 0.50:
                self.remove(key, collection)
                self.upsert(key, self._value(index, size // 2), collection)

    def _value(self, index: int, size: int) -> bytes:
        if self.random.random() < 0.2:
            return self.random.randbytes(self.random.randrange(size))
        text = "words that compress well, " * self.random.randrange(1, size // 10)
        return json.dumps({"index": index, "text": text[:size]}).encode()

    def write_to(
        self, vbucket: int, documents: int, *, prefix: str, collection: str | None = None
    ) -> None:
        """Writes documents to one vBucket, under keys that were not there before."""
        for _ in range(documents):
            self.upsert(self._fresh_key(vbucket, prefix), self._value(0, 200), collection)

    def _fresh_key(self, vbucket: int, prefix: str) -> str:
        """A key of a vBucket; those of others that are come upon are kept for them."""
        numbers, pools = self._keys.setdefault(prefix, (itertools.count(), defaultdict(deque)))
        while not pools[vbucket]:
            key = f"{prefix}-{next(numbers)}"
            pools[self.cluster.vbucket_of(key)].append(key)
        return pools[vbucket].popleft()

    def forget_lost(self) -> dict[int, int]:
        """Forgets what the cluster has lost; gives the seqnos it has now."""
        high = self.cluster.high_seqnos()
        for vbucket, versions in self.versions.items():
            self.versions[vbucket] = [v for v in versions if v.seqno <= high[vbucket]]
        return high

    def latest(self, vbucket: int, after: int = 0) -> list[Change]:
        """The newest version of each key of those above a seqno, in order."""
        above = [version for version in self.versions[vbucket] if version.seqno > after]
        newest = {(version.collection, version.key): version for version in above}
        return sorted(newest.values(), key=lambda version: version.seqno)
