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
    """Branch of history that reading goes on from; 0 from the beginning."""
    epoch: int = 0
    """Rollbacks of the vBucket that were seen before."""
    rolled_back: bool = False
    """Whether a rollback row to `from_seqno` comes before the changes."""

    @property
    def size(self) -> int:
        """Most changes that it can hold; de-duplication leaves fewer."""
        return self.to_seqno - self.from_seqno


@dataclass(frozen=True)
class Partition:
    """What one task reads. Plain data: it pickles, and holds no connection.

    Attributes:
        options: What to read and how; the repr shows no password.
        bucket_uuid: The bucket that was planned for. A task refuses to read another.
        node: Where the vBuckets were when the partition was made: `host:port`. A task follows them.
        ranges: vBuckets and seqnos to read, by vBucket.
        plan: The same for the engine, with everything else that the task's stream needs.
    """

    options: ReadOptions
    bucket_uuid: str
    node: str
    ranges: tuple[VBucketRange, ...]
    plan: str = field(repr=False)

    @property
    def vbuckets(self) -> tuple[int, ...]:
        """The vBuckets of the partition, ascending."""
        return tuple(each.vbucket for each in self.ranges)

    @property
    def size(self) -> int:
        """Most changes that the partition can hold."""
        return sum(each.size for each in self.ranges)


class Partitions(list[Partition]):
    """Partitions, and the offsets that a later read goes on from.

    Attributes:
        end: Offsets after what the partitions read, as JSON: for `since` of a later
            `dcp_rs.spark.partitions`. `None` if the partitions do not follow any.
    """

    def __init__(self, partitions: Iterable[Partition] = (), *, end: str | None = None) -> None:
        super().__init__(partitions)
        self.end = end
