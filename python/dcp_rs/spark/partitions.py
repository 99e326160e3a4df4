"""Splits: what one Spark task reads, planned once in the driver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dcp_rs
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.planner import Offsets, is_offsets
from dcp_rs.spark.driver import Driver
from dcp_rs.spark.errors import SparkReadError, coded, options_as_written
from dcp_rs.spark.options import ReadOptions
from dcp_rs.spark.schema import table_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

# Tasks of a backfill: enough that an uneven bucket still fills the cores, few enough that the
# 50 ms which a Python task costs Spark do not count.
_SPLITS_PER_NODE = 4


@dataclass(frozen=True)
class VBucketRange:
    """The changes of one vBucket above `from_seqno`, up to and including `to_seqno`."""

    vbucket: int
    from_seqno: int
    to_seqno: int
    vbuuid: int = 0
    """Branch of history that reading goes on from, where reads follow each other."""
    epoch: int = 0
    """Rollbacks of the vBucket that were seen before."""
    rolled_back: bool = False
    """Whether a rollback to `from_seqno` is to be told before the changes."""

    @property
    def size(self) -> int:
        """Most changes that it can hold; de-duplication leaves fewer."""
        return self.to_seqno - self.from_seqno


@dataclass(frozen=True)
class Split:
    """What one task reads. Plain data: it pickles, and holds no connection.

    Attributes:
        options: What to read and how; the repr shows no password.
        bucket_uuid: The bucket that was planned for. A task refuses to read another.
        node: Where the vBuckets were when the split was made: `host:port`. A task follows them.
        ranges: vBuckets and seqnos to read, by vBucket.
        is_planned: Whether the ranges carry the positions to begin at, and rollbacks to tell;
            otherwise the options do.
        is_followed: Whether another read will go on from the end: then this one stops there
            exactly. Otherwise it stops with the snapshot that holds the end, so that a key which
            moved above it meanwhile is not missing.
    """

    options: ReadOptions
    bucket_uuid: str
    node: str
    ranges: tuple[VBucketRange, ...]
    is_planned: bool = False
    is_followed: bool = False

    @property
    def vbuckets(self) -> tuple[int, ...]:
        """The vBuckets of the split, ascending."""
        return tuple(each.vbucket for each in self.ranges)

    @property
    def size(self) -> int:
        """Most changes that the split can hold."""
        return sum(each.size for each in self.ranges)


class Splits(list[Split]):
    """Splits, and the offsets that a later read goes on from.

    Attributes:
        end: Offsets after what the splits read, as JSON: for `since` of a later
            [`splits`][dcp_rs.spark.splits]. `None` if the splits do not follow any.
    """

    end: str | None = None


@options_as_written()
def splits(options: Mapping[str, object] | ReadOptions, *, since: str | None = None) -> Splits:
    """Plans a read of everything up to now, or of what came since an earlier read.

    A job that runs again and again gives `since`: `"earliest"` the first time, then the `end` that
    it stored with what the last run wrote.

        splits = dcp_rs.spark.splits(options, since=stored or "earliest")
        task = dcp_rs.spark.map_in_arrow(options, splits)
        ...  # write what it reads, then store splits.end

    Connects, asks every node for its high seqnos once, and deals the vBuckets out: by node, so
    that a task needs one connection, and then by size. All splits share that one bound, however
    late Spark runs them. vBuckets without a change to read are left out.

    Args:
        options: See [`ReadOptions`][dcp_rs.spark.ReadOptions].
        since: Offsets that an earlier read ended with, or `earliest`.

    Returns:
        The splits, none of them empty; an empty list if there is nothing to read.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached, or the checkpoint is not of this bucket.
    """
    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    if since is not None:
        return _following(parsed, since)
    if parsed.starting_offsets == "latest":
        raise ConfigError("option startingOffsets: a read up to now cannot start at latest")
    table_schema(parsed)
    try:
        with dcp_rs.connect(parsed.connection()) as client:
            bucket_uuid = client.bucket_uuid
            start = _starting_point(parsed, bucket_uuid)
            seqnos = {} if start is None else start.positions
            wanted = _wanted(parsed, client.num_vbuckets)
            high = client.high_seqnos()
            by_node = {
                node: [
                    VBucketRange(vbucket, _seqno(seqnos, vbucket), high[vbucket])
                    for vbucket in sorted(vbuckets)
                    if vbucket in wanted and high.get(vbucket, 0) > _seqno(seqnos, vbucket)
                ]
                for node, vbuckets in client.vbuckets_by_node().items()
            }
    except ConfigError:
        raise
    except DcpError as error:
        raise coded(error, f"planning a read of bucket {parsed.bucket}") from error
    by_node = {node: ranges for node, ranges in by_node.items() if ranges}
    return Splits(
        _split(parsed, start, bucket_uuid, node, ranges)
        for node, count in _shares(by_node, parsed.num_partitions).items()
        for ranges in deal(by_node[node], count)
    )


def _following(options: ReadOptions, since: str) -> Splits:
    """Plans a read that goes on from another."""
    table_schema(options)
    with Driver(options) as driver:
        start = driver.earliest() if since == "earliest" else driver.parse(since)
        end = driver.end(start, options.max_rows_per_trigger)
        found = Splits(driver.splits(start, end, is_followed=True))
        found.end = driver.dump(end)
        return found


@options_as_written()
def batch_splits(options: ReadOptions) -> Splits:
    """Plans what `spark.read` reads: from `startingOffsets` to `endingOffsets`, once.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached, or the offsets are not of this bucket.
    """
    begins_at_offsets = is_offsets(options.starting_offsets)
    if options.ending_offsets == "latest" and not begins_at_offsets:
        return splits(options)
    if options.starting_offsets != "earliest" and not begins_at_offsets:
        raise ConfigError(
            "option startingOffsets: with endingOffsets it is earliest or offsets, not "
            f"{'latest' if options.starting_offsets == 'latest' else 'a checkpoint'}"
        )
    table_schema(options)
    with Driver(options) as driver:
        start = driver.parse(options.starting_offsets) if begins_at_offsets else driver.earliest()
        until = None
        if options.ending_offsets != "latest":
            until = driver.parse(options.ending_offsets)
        end = driver.end(start, None, until)
        if until is not None:
            _check_end(options, end, until)
        # An end that was asked for is where another read begins; one that was not is only "now".
        return Splits(driver.splits(start, end, is_followed=until is not None))


def _check_end(options: ReadOptions, end: Offsets, until: Offsets) -> None:
    """Refuses to read less than was asked for."""
    for vbucket, (last, wanted) in enumerate(zip(end["s"], until["s"], strict=True)):
        if last < wanted and (options.vbuckets is None or vbucket in options.vbuckets):
            raise SparkReadError(
                "COUCHBASE_DCP_OFFSETS",
                f"endingOffsets has seqno {wanted} of vBucket {vbucket} of bucket "
                f"{options.bucket}, of which no more than {last} can be read now: are they of "
                "another cluster, or was the bucket rolled back since?",
            )


def _seqno(positions: Mapping[int, dcp_rs.Position], vbucket: int) -> int:
    position = positions.get(vbucket)
    return 0 if position is None else position.seqno


def _wanted(options: ReadOptions, num_vbuckets: int) -> frozenset[int]:
    everything = frozenset(range(num_vbuckets))
    if options.vbuckets is None:
        return everything
    wanted = frozenset(options.vbuckets)
    if not wanted <= everything:
        raise ConfigError(
            f"option vbuckets: there is no vBucket {max(wanted)}, the bucket has {num_vbuckets}"
        )
    return wanted


def _starting_point(options: ReadOptions, bucket_uuid: str) -> dcp_rs.Checkpoint | None:
    """Reads the checkpoint to start from; none for the beginning."""
    if options.starting_offsets == "earliest":
        return None
    checkpoint = dcp_rs.Checkpoint.from_json(options.starting_offsets)
    if checkpoint.bucket_uuid != bucket_uuid:
        raise SparkReadError(
            "COUCHBASE_DCP_BUCKET_CHANGED",
            f"the checkpoint in startingOffsets is of bucket {checkpoint.bucket_uuid}, "
            f"{options.bucket} is {bucket_uuid}: the bucket was deleted and made again, or it is "
            "another cluster",
        )
    return checkpoint


def _split(
    options: ReadOptions,
    start: dcp_rs.Checkpoint | None,
    bucket_uuid: str,
    node: str,
    ranges: list[VBucketRange],
) -> Split:
    """Makes a split, which carries the positions of its own vBuckets only."""
    if start is not None:
        own = start.restricted_to(each.vbucket for each in ranges)
        options = replace(options, starting_offsets=own.to_json())
    return Split(options, bucket_uuid, node, tuple(ranges))


def _shares(by_node: Mapping[str, list[VBucketRange]], total: int | None) -> dict[str, int]:
    """Decides how many splits each node gets: at least one, and in proportion to its changes."""
    if total is None:
        return {node: min(_SPLITS_PER_NODE, len(ranges)) for node, ranges in by_node.items()}
    shares = dict.fromkeys(by_node, 1)
    sizes = {node: sum(each.size for each in ranges) for node, ranges in by_node.items()}
    for _ in range(total - len(shares)):
        # The node whose splits are the fattest and can still be cut.
        divisible = [node for node in shares if shares[node] < len(by_node[node])]
        if not divisible:
            break
        shares[max(divisible, key=lambda node: sizes[node] / shares[node])] += 1
    return shares


def deal(ranges: list[VBucketRange], count: int) -> list[list[VBucketRange]]:
    """Deals vBuckets into `count` hands of about the same size, largest first.

    Each hand is in vBucket order. `count` must not exceed the number of ranges.
    """
    hands: list[list[VBucketRange]] = [[] for _ in range(count)]
    sizes = [0] * count
    for each in sorted(ranges, key=lambda one: (-one.size, one.vbucket)):
        # The emptiest hand; among equals the one with the fewest vBuckets.
        smallest = min(range(count), key=lambda hand: (sizes[hand], len(hands[hand])))
        hands[smallest].append(each)
        sizes[smallest] += each.size
    return [sorted(hand, key=lambda one: one.vbucket) for hand in hands]
