"""Checkpoints: where a reader stands, as a document to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dcp_rs import _checks, _dcp_rs

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a reader stands in one vBucket.

    Attributes:
        seqno: Last seqno processed.
        snapshot_start: First seqno of the snapshot it lies in, or one below it.
        snapshot_end: Last seqno of that snapshot.
        vbuuid: History branch a stream from here names; 0 for the beginning.
        epoch: Rollbacks seen on the vBucket.
        manifest_uid: Collections manifest current at that seqno.
        purge_seqno: Seqno up to which deletions had been forgotten by the server.
    """

    seqno: int
    snapshot_start: int
    snapshot_end: int
    vbuuid: int
    epoch: int
    manifest_uid: int
    purge_seqno: int


@dataclass(frozen=True, kw_only=True)
class StoredFilter:
    """The filter of the stream that made a checkpoint: all of the bucket, a scope or collections.

    Attributes:
        scope_id: The scope, if it was one.
        collection_ids: The collections, if they were named.
        system_documents: Whether system documents were delivered.
        patterns: Patterns of collections, if only such were delivered.
        keys: Patterns of keys, if only such were delivered.
        ops: Operations, likewise.
        since: The earliest time of changes in seconds since 1970, likewise.
    """

    scope_id: int | None
    collection_ids: tuple[int, ...] | None
    system_documents: bool
    patterns: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    since: float | None = None

    def __str__(self) -> str:
        if self.patterns is not None:
            documents = f"collections {', '.join(self.patterns)}"
        elif self.scope_id is not None:
            documents = f"scope {self.scope_id:#x}"
        elif self.collection_ids is not None:
            ids = ", ".join(f"{each:#x}" for each in self.collection_ids)
            documents = f"collection{'s'[len(self.collection_ids) == 1 :]} {ids}"
        else:
            documents = "the whole bucket"
        system = "with" if self.system_documents else "without"
        rows = [f"{documents} {system} system documents"]
        if self.keys is not None:
            rows.append(f"keys {list(self.keys)}")
        if self.ops is not None:
            rows.append(f"operations {', '.join(self.ops)}")
        if self.since is not None:
            rows.append(f"since {self.since}")
        return ", ".join(rows)


class Checkpoint:
    """Where a reader stands in every vBucket of a bucket.

    Comes with every batch and is given to `dcp_rs.Client.stream` as `start` to go
    on after that batch. Immutable; pickles.

        >>> import dcp_rs
        >>> with dcp_rs.testing.EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     _ = cluster.upsert("a", b"1")
        ...     stream = client.stream(until="now")
        ...     first = [row["key"] for batch in stream for row in batch.rows()]
        ...     text = stream.checkpoint().to_json()
        ...     _ = cluster.upsert("b", b"2")
        ...     start = dcp_rs.Checkpoint.from_json(text)
        ...     rest = client.stream(start=start, until="now")
        ...     second = [row["key"] for batch in rest for row in batch.rows()]
        >>> first, second
        (['a'], ['b'])
    """

    __slots__ = ("_inner",)
    _inner: _dcp_rs.Checkpoint

    def __init__(self) -> None:
        raise TypeError(
            "a checkpoint comes from a batch, a stream, Checkpoint.load or Checkpoint.from_json"
        )

    @classmethod
    def _of(cls, inner: _dcp_rs.Checkpoint) -> Self:
        checkpoint = cls.__new__(cls)
        checkpoint._inner = inner  # noqa: SLF001 - its own
        return checkpoint

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a document that `dcp_rs.Checkpoint.to_json` made.

        Args:
            text: The document, of this release or an older one.

        Raises:
            CheckpointError: It is damaged, cut short, or of a newer release.
        """
        if not isinstance(text, str | bytes):
            raise _checks.wrong_type("text", text, "a checkpoint as JSON text")
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return cls._of(_dcp_rs.Checkpoint.from_json(data))

    def to_json(self) -> str:
        """Gives the checkpoint as one JSON document, with a checksum in it."""
        return self._inner.to_json()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `dcp_rs.Checkpoint.save` wrote.

        Raises:
            CheckpointError: There is no such file, or it is damaged.
        """
        _checks.path("path", path)
        return cls._of(_dcp_rs.Checkpoint.load(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, in place of what is there.

        After a crash there is the old checkpoint or the new one, never half of one.

        Raises:
            CheckpointError: The file cannot be written; what was there still is.
        """
        _checks.path("path", path)
        self._inner.save(path)

    def _check_ahead(self, kept: Checkpoint) -> None:
        self._inner.check_ahead(kept._inner)

    @property
    def bucket_uuid(self) -> str:
        """Identity of the bucket the positions belong to."""
        return self._inner.bucket_uuid

    @property
    def filter(self) -> StoredFilter | None:
        """What the stream was asked for: a stream from here may ask for that or for a part of it.

        None in a checkpoint of an earlier release, which stored no more than a hash of it.
        """
        if self._inner.filter is None:
            return None
        scope, collections, system_documents, patterns, keys, ops, since = self._inner.filter
        return StoredFilter(
            scope_id=scope,
            collection_ids=None if collections is None else tuple(collections),
            system_documents=system_documents,
            patterns=None if patterns is None else tuple(patterns),
            keys=None if keys is None else tuple(keys),
            ops=None if ops is None else tuple(ops),
            since=since,
        )

    @property
    def positions(self) -> dict[int, Position]:
        """Positions by vBucket. One that is not there has not been read."""
        return {vbucket: Position(**fields) for vbucket, fields in self._inner.positions().items()}

    @property
    def seqnos(self) -> dict[int, int]:
        """Last seqno processed, by vBucket."""
        return {vbucket: fields["seqno"] for vbucket, fields in self._inner.positions().items()}

    def restricted_to(self, vbuckets: Iterable[int]) -> Checkpoint:
        """Gives the checkpoint of some vBuckets only, as for one of several readers.

        Raises:
            ConfigError: `vbuckets` are no numbers of vBuckets.
        """
        return Checkpoint._of(self._inner.restricted_to(_checks.vbuckets(vbuckets)))

    def merged_with(self, other: Checkpoint) -> Checkpoint:
        """Gives the checkpoint with the positions of `other`, which win.

        Raises:
            CheckpointError: `other` belongs to another bucket or was made with another filter.
            ConfigError: `other` is no checkpoint.
        """
        _checks.instance("other", other, Checkpoint, "a Checkpoint")
        return Checkpoint._of(self._inner.merged_with(other._inner))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._inner == other._inner

    __hash__ = None  # type: ignore[assignment]  # equal by contents, which are many

    def __len__(self) -> int:
        """Gives the number of vBuckets that have a position."""
        return len(self._inner)

    def __reduce__(self) -> tuple[Callable[[str], Checkpoint], tuple[str]]:
        """Pickles as the JSON document."""
        return Checkpoint.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        made_with = self.filter or "unknown"
        return (
            f"<dcp_rs.Checkpoint bucket_uuid={self.bucket_uuid} filter={str(made_with)!r} "
            f"vbuckets={len(self)}>"
        )
