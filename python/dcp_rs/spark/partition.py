"""Partitions: what one Spark task reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dcp_rs
    from dcp_rs.plan import Range
    from dcp_rs.spark.options import ReadOptions


@dataclass(frozen=True)
class Partition:
    """What one task reads: a `dcp_rs.Partition` with the options of its read.

    It is plain data without a connection, and can be pickled.

    Attributes:
        options: How to connect, and how to deliver what is read; the repr shows no password.
        partition: What to read.
    """

    options: ReadOptions
    partition: dcp_rs.Partition = field(repr=False)

    @property
    def bucket_uuid(self) -> str:
        """UUID of the bucket. A task refuses to read another bucket."""
        return self.partition.bucket_uuid

    @property
    def node(self) -> str:
        """Node of the vBuckets when the partition was created, as `host:port`.

        A task follows them if they move.
        """
        return self.partition.node

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What is read of each vBucket, in ascending order."""
        return self.partition.ranges

    @property
    def vbuckets(self) -> tuple[int, ...]:
        """The vBuckets of the partition, in ascending order."""
        return self.partition.vbuckets

    @property
    def size(self) -> int:
        """Upper bound of the number of changes in the partition."""
        return self.partition.size

    def open(self) -> dcp_rs.ChangeStream:
        """Opens the stream of the partition as its options say, on a client that is kept.

        Raises:
            DcpError: As `dcp_rs.Partition.open`.
        """
        inner = self.partition
        return inner._stream(self.options.connection(), self.options.stream())  # noqa: SLF001 - the package's own


class Partitions(list[Partition]):
    """Partitions, and the offsets from which a later read resumes.

    Attributes:
        end: End offsets of the partitions as JSON, for `start` of a later
            `dcp_rs.spark.partitions`. `None` if they were created without `start`.
    """

    def __init__(self, partitions: Iterable[Partition] = (), *, end: str | None = None) -> None:
        super().__init__(partitions)
        self.end = end
