"""How far targets are behind their bucket: in seqnos, and in seconds.

The age of a change counts from when a node first reported its seqno here, by the clock of this
machine alone. The time of its CAS, beside it, is that of a node's clock, or of another cluster if
the document was restored.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_right
from dataclasses import replace
from itertools import repeat
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.group import Group
    from dcp_rs.replication.progress import Progress

# Samples of seqnos that are kept: close to each other lately, and further apart before, so that an
# age of days is right to a tenth.
_SAMPLES = 128
# Seconds between them.
_PACE = 0.5
# Seconds for which a CAS from the future is told.
_TOLD = 60.0


class Lag(NamedTuple):
    """What the server has and the streams have not brought.

    Attributes:
        total: In seqnos; `None` while it is unknown.
        by_vbucket: Of each vBucket that is behind.
        high: The highest seqno that the server is known to have, of each vBucket.
        read: The last seqno that was read of each vBucket, by the number of a group.
        is_disconnected: Whether no vBucket can be read that is not complete.
    """

    total: int | None
    by_vbucket: dict[int, int]
    high: dict[int, int]
    read: dict[int, dict[int, int]]
    is_disconnected: bool = False

    @classmethod
    def of(cls, groups: list[Group]) -> Lag:
        """Returns that of groups of tables, as of now; on any thread."""
        behind: dict[int, int] = {}
        high: dict[int, int] = {}
        read: dict[int, dict[int, int]] = {}
        is_known, left, disconnected = True, 0, 0
        for group in groups:
            if group.phase in {"complete", "idle"}:
                continue
            stream = group.stream
            if stream is None:
                is_known = False
                continue
            own = read[group.number] = {}
            for each in stream.vbucket_stats():
                lag = each.lag
                # A vBucket that has reached its end need not be asked for.
                is_known &= lag is not None or each.state == "complete"
                left += each.state != "complete"
                disconnected += each.is_disconnected
                vbucket = each.vbucket
                if each.high_seqno is not None:
                    high[vbucket] = max(each.high_seqno, each.seqno, high.get(vbucket, 0))
                own[vbucket] = each.seqno
                if lag:
                    behind[vbucket] = max(lag, behind.get(vbucket, 0))
        total = sum(behind.values()) if is_known else None
        return cls(total, behind, high, read, is_disconnected=0 < left == disconnected)


class Place(NamedTuple):
    """Where tables of a group are that are at the same position.

    Attributes:
        group: Number of the group.
        tables: Names of the tables, each with the time of the CAS of its oldest change that was
            read and is not committed, in microseconds since 1970. `None` stands for a single table.
        reached: Up to where everything is committed; `None` if nothing is.
        has_all: Whether nothing of what was read has yet to be committed.
    """

    group: int
    tables: dict[str | None, int | None]
    reached: Checkpoint | None
    has_all: bool


class Ages(NamedTuple):
    """How old what is not committed is, in seconds.

    Attributes:
        oldest: Of the oldest change.
        by_vbucket: Of the oldest change of each vBucket that has any.
        by_table: Of the oldest change of each table.
        by_cas: Since the time of the CAS of the oldest change that was read; negative if that is in
            the future, and `None` if there is none.
        by_table_and_cas: That of each table that has any.
        ahead: By how much a CAS that was read lately was ahead of the clock here.
    """

    oldest: float
    by_vbucket: dict[int, float]
    by_table: dict[str, float]
    by_cas: float | None
    by_table_and_cas: dict[str, float]
    ahead: float


class Observed:
    """What nodes have reported to have, and when; and what of it is committed.

    Each method may be called on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # When, and the highest seqno of each vBucket: ascending in both.
        self._samples: list[tuple[float, array[int]]] = []
        self._places: list[Place] = []
        self._unrouted: int | None = None
        self._read: Mapping[int, Mapping[int, int]] = {}
        self._ahead = 0.0, -_TOLD

    def note(self, lag: Lag) -> None:
        """Takes what nodes report to have now."""
        now = time.monotonic()
        count = max(max(own, default=-1) for own in (lag.high, *lag.read.values())) + 1
        with self._lock:
            self._read = lag.read
            samples = self._samples
            if not lag.high:
                return
            last = samples[-1][1] if samples and len(samples[-1][1]) == count else None
            # A stream that was just opened does not know yet what its vBuckets have.
            known = lag.high if last is None else dict(enumerate(last)) | lag.high
            high = _listed(known, count)
            if samples and len(samples[-1][1]) != len(high):
                # The bucket was created again with another number of vBuckets.
                samples.clear()
            if samples and any(map(gt, samples[-1][1], high)):
                # After a rollback, the nodes have less than they had.
                samples[:] = [(at, array("Q", map(min, before, high))) for at, before in samples]
            if samples and now - samples[-1][0] < _PACE:
                return
            samples.append((now, high))
            if len(samples) > _SAMPLES:
                # The first stays, and that whose neighbours are closest for their age goes.
                times = [at for at, _ in samples]
                del samples[
                    min(
                        range(1, len(times) - 1),
                        key=lambda each: (
                            (times[each + 1] - times[each - 1]) / (now - times[each] + _PACE)
                        ),
                    )
                ]

    def settle(self, places: list[Place], unrouted: int | None) -> None:
        """Takes where the tables are.

        Args:
            places: Where.
            unrouted: Time of the CAS of the oldest change of which the table is not yet known.
        """
        with self._lock:
            self._places, self._unrouted = places, unrouted

    def note_cas(self, newest: int) -> None:
        """Takes the newest CAS of a batch, in microseconds since 1970."""
        ahead, now = newest / 1e6 - time.time(), time.monotonic()
        with self._lock:
            if ahead > self._ahead[0] or now - self._ahead[1] > _TOLD:
                self._ahead = max(ahead, 0.0), now

    def ages(self) -> Ages:
        """Returns how old what is not committed is."""
        now, wall = time.monotonic(), time.time()
        with self._lock:
            places, unrouted = self._places, self._unrouted
            reached = [self._reached(place) for place in places]
            oldest = [now - self._first_above(each, now) for each in reached]
            by_vbucket = self._by_vbucket(reached, now)
            ahead, told = self._ahead
        times = [each for place in places for each in place.tables.values()]
        first = min((each for each in (unrouted, *times) if each is not None), default=None)
        return Ages(
            oldest=max(oldest, default=0.0),
            by_vbucket=by_vbucket,
            by_table={
                name: age
                for place, age in zip(places, oldest, strict=True)
                for name in place.tables
                if name is not None
            },
            by_cas=None if first is None else wall - first / 1e6,
            by_table_and_cas={
                name: wall - each / 1e6
                for place in places
                for name, each in place.tables.items()
                if name is not None and each is not None
            },
            ahead=ahead if now - told <= _TOLD else 0.0,
        )

    def _reached(self, place: Place) -> array[int]:
        """Returns the seqnos up to which tables have everything."""
        found: Mapping[int, int] = self._read.get(place.group, {})
        # What a stream has passed without a change for the tables is not in their positions.
        if not place.has_all or not found:
            found = {} if place.reached is None else place.reached.seqnos
        return _listed(found, len(self._samples[-1][1]) if self._samples else 0)

    def _first_above(self, reached: array[int], now: float) -> float:
        """Returns when a node first reported a seqno that was not reached; `now` if none has."""
        low, high = 0, len(self._samples)
        while low < high:
            middle = (low + high) // 2
            if any(map(gt, self._samples[middle][1], reached)):
                high = middle
            else:
                low = middle + 1
        return self._samples[low][0] if low < len(self._samples) else now

    def _by_vbucket(self, reached: list[array[int]], now: float) -> dict[int, float]:
        if not self._samples or not reached:
            return {}
        least = map(min, *reached) if len(reached) > 1 else reached[0]
        begun, first = self._samples[0]
        found: dict[int, float] = {}
        rows = zip(first, self._samples[-1][1], least, strict=True)
        for vbucket, (before, high, done) in enumerate(rows):
            if high > done:
                # Most, while a bucket is loaded.
                at = begun if before > done else self._first_of(vbucket, done)
                found[vbucket] = now - at
        return found

    def _first_of(self, vbucket: int, seqno: int) -> float:
        """Returns when a node first reported more of a vBucket than a seqno, which the last has."""

        def high(sample: tuple[float, array[int]]) -> int:
            return sample[1][vbucket]

        return self._samples[bisect_right(self._samples, seqno, key=high)][0]


def aged(progress: Progress, ages: Ages) -> Progress:
    """Returns progress with the ages of what is not committed."""
    # While the target is unavailable, nothing may be read.
    is_known = progress.lag is not None or progress.phase == "target unavailable"
    return replace(
        progress,
        lag_seconds=round(ages.oldest, 3) if is_known else None,
        lag_seconds_by_vbucket={name: round(age, 3) for name, age in ages.by_vbucket.items()},
        cas_lag_seconds=ages.by_cas,
        cas_ahead_seconds=ages.ahead,
        tables={
            name: replace(
                table,
                lag_seconds=round(ages.by_table.get(name, 0.0), 3) if is_known else None,
                cas_lag_seconds=ages.by_table_and_cas.get(name),
            )
            for name, table in progress.tables.items()
        },
    )


def _listed(seqnos: Mapping[int, int], count: int) -> array[int]:
    return array("Q", map(seqnos.get, range(count), repeat(0)))
