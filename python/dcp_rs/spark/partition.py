"""Partitions: what one Spark task reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_rs.spark.options import ReadOptions


@dataclass(frozen=True)
class VBucketRange:
    """The changes of one vBucket above `from_seqno`, up to and including `to_seqno`."""

    vbucket: int
    from_seqno: int
    to_seqno: int
    vbuuid: int = 0
    """History branch to resume from; 0 for the beginning."""
    epoch: int = 0
    """Rollbacks seen on the vBucket before."""
    rolled_back: bool = False
    """Whether a rollback row to `from_seqno` comes before the changes."""

    @property
    def size(self) -> int:
        """Upper bound of the number of changes, before de-duplication."""
        return self.to_seqno - self.from_seqno


@dataclass(frozen=True)
class Partition:
    """What one task reads. It is plain data without a connection, and can be pickled.

    Attributes:
        options: What to read and how; the repr shows no password.
        bucket_uuid: UUID of the bucket. A task refuses to read another bucket.
        node: Node of the vBuckets when the partition was created, as `host:port`. A task follows
            them if they move.
        ranges: vBuckets and seqnos to read, by vBucket.
        plan: The ranges and everything else that the task's stream needs, for the engine.
    """

    options: ReadOptions
    bucket_uuid: str
    node: str
    ranges: tuple[VBucketRange, ...]
    plan: str = field(repr=False)

    @property
    def vbuckets(self) -> tuple[int, ...]:
        """The vBuckets of the partition, in ascending order."""
        return tuple(each.vbucket for each in self.ranges)

    @property
    def size(self) -> int:
        """Upper bound of the number of changes in the partition."""
        return sum(each.size for each in self.ranges)


class Partitions(list[Partition]):
    """Partitions, and the offsets from which a later read resumes.

    Attributes:
        end: End offsets of the partitions as JSON, for `since` of a later
            `dcp_rs.spark.partitions`. `None` if they were created without `since`.
    """

    def __init__(self, partitions: Iterable[Partition] = (), *, end: str | None = None) -> None:
        super().__init__(partitions)
        self.end = end
