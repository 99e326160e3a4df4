"""Plans the tasks of a read, once, in Spark's driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dcp_rs
from dcp_rs import _deprecated
from dcp_rs.exceptions import ConfigError
from dcp_rs.planner import unreached
from dcp_rs.spark.driver import Driver
from dcp_rs.spark.errors import SparkReadError
from dcp_rs.spark.options import ReadOptions, options_as_written, start_of_partitions
from dcp_rs.spark.partition import Partitions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_rs.planner import Offsets

# What `start` is by default, as `None` is no answer to where to resume.
_EVERYTHING: Any = ...


@_deprecated.accepts(_deprecated.OF_PARTITIONS)
def partitions(
    options: Mapping[str, object] | ReadOptions, *, start: str = _EVERYTHING
) -> Partitions:
    """Plans a read of everything up to now, or of the changes since an earlier read.

    A job that runs repeatedly passes `start`: `"earliest"` the first time, then the `end` that it
    stored with the results of the previous run. With `persistedOnly`, the default, such a read ends
    at what every copy has on disk: what was just written comes with the next.

        partitions = dcp_rs.spark.partitions(options, start=stored or "earliest")
        task = dcp_rs.spark.map_in_arrow(options, partitions)
        ...  # write the rows, then store partitions.end

    It connects, fetches the high seqnos from every node once, and divides the vBuckets by node, so
    that a task needs one connection, and then by size. All partitions share these bounds, however
    late Spark runs them. vBuckets without changes to read are left out, unless they were rolled
    back.

    Args:
        options: See `dcp_rs.spark.ReadOptions`.
        start: End offsets of an earlier read, a checkpoint as JSON, or `earliest`. Without it,
            everything is read, persisted or not, and no other read resumes from the end.

    Returns:
        The partitions, none of which is empty; an empty list if there is nothing to read.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached, or the checkpoint is not of this bucket.
    """
    if start is None:
        raise ConfigError(
            'start is None, as the end is of a read without start: pass "earliest" the first time,'
            " and then the end of that read"
        )
    # Not as an option, whose name would be written as Spark's.
    return _planned(options, start if start is _EVERYTHING else start_of_partitions(start))


@options_as_written()
def _planned(options: Mapping[str, object] | ReadOptions, start: str) -> Partitions:
    parsed = options if isinstance(options, ReadOptions) else ReadOptions.parse(options)
    if start is _EVERYTHING:
        return _last(parsed)
    with Driver(parsed) as driver:
        begin = _start(driver, start)
        end = driver.end(begin, parsed.max_offsets_per_trigger)
        return Partitions(driver.partitions(begin, end), end=driver.dump(end))


@options_as_written()
def batch_partitions(options: ReadOptions) -> Partitions:
    """Plans a `spark.read`, from `startingOffsets` to `endingOffsets`.

    Raises:
        ConfigError: An option is wrong.
        SparkReadError: The bucket cannot be reached, or the offsets are not of this bucket.
    """
    if options.ending_offsets == "latest":
        return _last(options)
    # Another read begins at a requested end; a default end only means "now".
    _check_start(options)
    with Driver(options) as driver:
        start, until = (
            _start(driver, options.starting_offsets),
            driver.parse(options.ending_offsets),
        )
        if isinstance(until, dcp_rs.Checkpoint):
            raise ConfigError("takes offsets, not a checkpoint", option="endingOffsets")
        end = driver.end(start, None, until)
        _check_end(options, end, until)
        return Partitions(driver.partitions(start, end))


def _last(options: ReadOptions) -> Partitions:
    """Plans a read of everything up to now, from which no other read resumes."""
    _check_start(options)
    with Driver(options) as driver:
        start = _start(driver, options.starting_offsets)
        end = driver.end(start, is_last=True)
        return Partitions(driver.partitions(start, end, is_last=True))


def _check_start(options: ReadOptions) -> None:
    if options.starting_offsets == "latest":
        raise ConfigError("a read up to now cannot start at latest", option="startingOffsets")


def _start(driver: Driver, where: str) -> Offsets | dcp_rs.Checkpoint:
    return driver.earliest() if where == "earliest" else driver.parse(where)


def _check_end(options: ReadOptions, end: Offsets, until: Offsets) -> None:
    """Refuses to read less than requested."""
    found = unreached(end, until, options.vbuckets)
    if found is not None:
        vbucket, last, wanted = found
        raise SparkReadError(
            "COUCHBASE_DCP_OFFSETS",
            f"endingOffsets has seqno {wanted} of vBucket {vbucket} of bucket "
            f"{options.bucket}, which can be read only up to {last} now: do they belong to "
            "another cluster, or has the bucket been rolled back?",
        )
