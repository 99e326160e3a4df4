"""Checkpoints: positions of a reader, as a document to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dcp_rs import _checks, _dcp_rs

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, kw_only=True)
class Position:
    """A reader's position in one vBucket.

    Attributes:
        seqno: Last seqno processed.
        snapshot_start: First seqno of the snapshot that contains `seqno`, or one below it.
        snapshot_end: Last seqno of that snapshot.
        vbuuid: History branch of the position; 0 for the beginning.
        epoch: Rollbacks seen on the vBucket.
        manifest_uid: Collections manifest current at that seqno.
        purge_seqno: Seqno up to which the server had purged deletions.
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
    """Filter of the stream that made a checkpoint: the whole bucket, a scope or collections.

    Attributes:
        scope_id: ID of the scope, if the stream had one.
        collection_ids: IDs of the collections, if the stream named them.
        system_documents: Whether system documents were delivered.
        patterns: Patterns of collections, if the stream had any.
        keys: Patterns of keys, if the stream had any.
        ops: Operations, if the stream was limited to some.
        since: Time of the earliest change in seconds since 1970, if the stream had one.
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
    """A reader's positions in all vBuckets of a bucket.

    Every batch has one. Pass it to `dcp_rs.Client.stream` as `start` to resume after that batch.
    Checkpoints are immutable and can be pickled.

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
            CheckpointError: The document is damaged, truncated, or of a newer release.
        """
        if not isinstance(text, str | bytes):
            raise _checks.wrong_type("text", text, "a checkpoint as JSON text")
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return cls._of(_dcp_rs.Checkpoint.from_json(data))

    def to_json(self) -> str:
        """Returns the checkpoint as a JSON document with a checksum."""
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
        """Writes the checkpoint to a file, replacing an existing one.

        After a crash, the file has either the old or the new checkpoint, never a part of one.

        Raises:
            CheckpointError: The file cannot be written; its contents are unchanged.
        """
        _checks.path("path", path)
        self._inner.save(path)

    def _check_ahead(self, kept: Checkpoint) -> None:
        self._inner.check_ahead(kept._inner)

    def _rewound_to(self, vbucket: int, seqno: int) -> Checkpoint:
        return Checkpoint._of(self._inner.rewound_to(vbucket, seqno))

    def _begun_again(self, vbuckets: Iterable[int]) -> Checkpoint:
        return Checkpoint._of(self._inner.begun_again(list(vbuckets)))

    def _has_in_history(self, vbucket: int, other: Checkpoint) -> bool:
        return self._inner.has_in_history(vbucket, other._inner)

    def _with_positions_of(self, other: Checkpoint, vbuckets: Iterable[int]) -> Checkpoint:
        return Checkpoint._of(self._inner.with_positions_of(other._inner, list(vbuckets)))

    @property
    def bucket_uuid(self) -> str:
        """UUID of the bucket that the positions belong to."""
        return self._inner.bucket_uuid

    @property
    def filter(self) -> StoredFilter | None:
        """The filter of the stream; a stream from here may have the same or a narrower one.

        `None` in a checkpoint of an earlier release, which stored only a hash of the filter.
        """
        return self._inner.filter

    @property
    def positions(self) -> dict[int, Position]:
        """Positions by vBucket. A missing vBucket has not been read."""
        return self._inner.positions()

    @property
    def seqnos(self) -> dict[int, int]:
        """Last seqno processed, by vBucket."""
        return self._inner.seqnos()

    def restricted_to(self, vbuckets: Iterable[int]) -> Checkpoint:
        """Returns the checkpoint of only some vBuckets, for example for one of several readers.

        Raises:
            ConfigError: `vbuckets` are not vBucket numbers.
        """
        return Checkpoint._of(self._inner.restricted_to(_checks.vbuckets(vbuckets)))

    def merged_with(self, other: Checkpoint) -> Checkpoint:
        """Returns the checkpoint merged with `other`, whose positions take precedence.

        Raises:
            CheckpointError: `other` belongs to another bucket or was made with another filter.
            ConfigError: `other` is not a checkpoint.
        """
        _checks.instance("other", other, Checkpoint, "a Checkpoint")
        return Checkpoint._of(self._inner.merged_with(other._inner))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._inner == other._inner

    __hash__ = None  # type: ignore[assignment]  # equal by contents, which are many

    def __len__(self) -> int:
        """Returns the number of vBuckets that have a position."""
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
