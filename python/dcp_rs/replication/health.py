"""What a replication is doing, for threads other than its own.

The thread that replicates notes what it begins and what it reports. Others read that, and the
streams, at any time: also while a commit hangs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_rs._figures import Report
from dcp_rs._logging import about
from dcp_rs.replication.lag import Observed, aged
from dcp_rs.stream import StreamEvent, StreamStats, VbucketStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcp_rs.replication.lag import Lag
    from dcp_rs.replication.progress import Progress
    from dcp_rs.stream import ChangeStream

_log = logging.getLogger("dcp_rs.replication")

# Seconds for which a look at the streams is good, and after which a report is late.
_FRESH = 0.2
_LATE = 1.5
# Seconds after which a commit is said to be slow, and between looks.
_SLOW = 15.0
_WATCH = 1.0
_LOOK_FOR = "look for locks, a full disk or a long transaction in the target"
# What happens to vBuckets that is logged, by the kind of its event.
TOLD = {
    "moved": (logging.INFO, "are on another node: streams go on there"),
    "rolled_back": (
        logging.WARNING,
        "were rolled back: the server has lost changes that were read",
    ),
}
# Figures of streams that add up, also over those that are closed.
_TOTALS = ("batches", "rows", "malformed", "partly_malformed", "reconnects")
_SUMS = (
    "opening", "streaming", "backing_off", "complete", "failed", "connections", "buffered_bytes",
    "unpersisted_rows", "unpersisted_bytes", "diverged", "disconnected",
)  # fmt: skip
# From the worst to the best.
_STATES = ("failed", "backing_off", "opening", "streaming", "complete")


class Streams:
    """The streams of a replication as one, which goes on as they are closed and opened again.

    A vBucket that two of them read counts once, as that which is further behind.
    """

    is_closed = False

    def __init__(self, bucket_name: str) -> None:
        self.bucket_name = bucket_name
        self._lock = threading.Lock()
        self._open: list[ChangeStream] = []
        self._past = dict.fromkeys(_TOTALS, 0)
        self._events: list[StreamEvent] = []
        self._begun = time.monotonic()

    def opened(self, stream: ChangeStream) -> None:
        """Adds a stream."""
        with self._lock:
            self._open.append(stream)

    def closed(self, stream: ChangeStream) -> None:
        """Leaves out a stream that has been closed, but for what it has counted."""
        with self._lock:
            self._open.remove(stream)
            self._events += stream.events()
            stats = stream.stats()
            for name in _TOTALS:
                self._past[name] += getattr(stats, name)

    def take_events(self) -> list[StreamEvent]:
        """Returns what has happened to them since the last call."""
        with self._lock:
            found, self._events = self._events, []
            for each in self._open:
                found += each.events()
        return found

    @property
    def are_open(self) -> bool:
        """Whether there are any."""
        return bool(self._open)

    def stats(self) -> StreamStats:
        """Returns the statistics of all together."""
        with self._lock:
            found, past = [each.stats() for each in self._open], dict(self._past)
            vbuckets = self._vbuckets() if len(found) > 1 else None
        if vbuckets is None:
            lag, highest = (found[0].lag, found[0].max_lag) if found else (None, None)
        else:
            lags = [each.lag for each in vbuckets if each.state != "complete"]
            known = [each for each in lags if each is not None]
            lag = sum(known) if len(known) == len(lags) else None
            highest = max(known, default=0) if lag is not None else None
        counted = {name: sum(getattr(each, name) for each in found) for name in _SUMS}
        totals = {name: past[name] + sum(getattr(s, name) for s in found) for name in _TOTALS}
        if vbuckets is not None:
            counted |= {state: sum(v.state == state for v in vbuckets) for state in _STATES}
            for name in ("disconnected", "diverged"):
                counted[name] = sum(getattr(each, f"is_{name}") for each in vbuckets)
        return StreamStats(
            **counted,
            **totals,
            unpersisted_seconds=max((each.unpersisted_seconds for each in found), default=0.0),
            lag=lag,
            max_lag=highest,
            elapsed=time.monotonic() - self._begun,
        )

    def vbucket_stats(self) -> list[VbucketStats]:
        """Returns the state and position of every vBucket, in ascending order."""
        with self._lock:
            return self._vbuckets()

    def _vbuckets(self) -> list[VbucketStats]:
        if len(self._open) == 1:
            return self._open[0].vbucket_stats()
        found: dict[int, VbucketStats] = {}
        for stream in self._open:
            for each in stream.vbucket_stats():
                other = found.get(each.vbucket)
                found[each.vbucket] = each if other is None else _worse(each, other)
        return [found[vbucket] for vbucket in sorted(found)]

    def collection_lag(self) -> dict[str, int | None]:
        """Returns the lag of each collection."""
        with self._lock:
            streams = list(self._open)
        found: dict[str, int | None] = {}
        for stream in streams:
            for name, lag in stream.collection_lag().items():
                other = found.get(name, 0)
                found[name] = None if lag is None or other is None else max(lag, other)
        return found


def _worse(one: VbucketStats, other: VbucketStats) -> VbucketStats:
    highs = [each.high_seqno for each in (one, other) if each.high_seqno is not None]
    return replace(
        one if one.seqno <= other.seqno else other,
        state=min(one.state, other.state, key=_STATES.index),
        high_seqno=max(highs, default=None),
        is_diverged=one.is_diverged or other.is_diverged,
        is_disconnected=one.is_disconnected or other.is_disconnected,
    )


class Watch:
    """Logs that a commit hangs, from a thread of its own."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dcp_rs-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        told = None
        while not self._over.wait(_WATCH):
            since = self._health.committing_since
            if since is None:
                continue
            # What comes meanwhile is as old as it is, also if nobody asks.
            self._health.last()
            if since == told:
                continue
            seconds = time.monotonic() - since
            if seconds >= min(_SLOW, self._health.hung_after / 4):
                told = since
                _log.warning(
                    "a commit has been running for %.0f s: %s",
                    seconds,
                    _LOOK_FOR,
                    extra=about("commit_slow", seconds=seconds),
                )


def _kind_of(event: StreamEvent) -> str:
    # Which of both it is depends on whether the node or the cluster map tells first.
    return "moved" if (event.kind, event.cause) == ("ended", "state_changed") else event.kind


class Health:
    """What a replication is doing.

    Args:
        bucket: Name of the bucket.
        name: Name of the replication.
        hung_after: Seconds after which its loop counts as hung; it may change.
    """

    def __init__(self, bucket: str, name: str, hung_after: float) -> None:
        self.bucket, self.name = bucket, name
        self.streams = Streams(bucket)
        self.hung_after = hung_after
        # Replaced as a whole, so that other threads need no lock.
        self._reported: tuple[Progress, float] | None = None
        self._turned = time.monotonic()
        self._committing: float | None = None
        # Since when, and why the target cannot be written to.
        self._failing: tuple[float, str] | None = None
        self._waiting = 0
        self._has_caught_up = False
        # Why it has no report yet, if there is a reason.
        self.why_not_started: str | None = None
        self.observed = Observed()
        # What has happened to the streams, and how often.
        self.events: Counter[str] = Counter()
        # Asks the streams, on any thread.
        self.look: Callable[[], Lag] | None = None
        self._looked: tuple[float, Report] | None = None

    # ----- for the thread that replicates -----

    def turned(self) -> None:
        """Notes that the loop goes on."""
        self._turned = time.monotonic()

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Notes that a commit runs meanwhile."""
        self._committing = self._turned = time.monotonic()
        try:
            yield
        finally:
            self._committing = None
            self.turned()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Notes that it does meanwhile what may take long, such as to wait for Couchbase."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self.turned()

    def note_events(self) -> None:
        """Takes what has happened to the streams, and logs what a reader need not act on."""
        found = Counter(map(_kind_of, self.streams.take_events()))
        self.events.update(found)
        for kind, (level, text) in TOLD.items():
            if found[kind]:
                extra = about(kind, vbuckets=found[kind])
                _log.log(level, "%d vBuckets %s", found[kind], text, extra=extra)

    def target_failed(self, since: float, why: str) -> None:
        """Notes that the target cannot be written to."""
        self._failing, self._looked = (since, why), None

    def target_is_back(self) -> None:
        """Notes that it can."""
        self._failing, self._looked = None, None

    def report(self, progress: Progress) -> None:
        """Takes a report."""
        self._reported, self._looked = (progress, time.monotonic()), None
        self._has_caught_up |= progress.phase in {"following", "done"}
        self.turned()

    # ----- for others -----

    @property
    def committing_since(self) -> float | None:
        """When the commit that runs has begun, by the monotonic clock."""
        return self._committing

    def last(self) -> Report | None:
        """Returns the last report, with what has changed since; `None` before the first."""
        if self._reported is None:
            return None
        now, looked = time.monotonic(), self._looked
        if looked is not None and now - looked[0] < _FRESH:
            # The figures of a scrape are of one moment.
            return looked[1]
        progress, at = self._reported
        since, failing = self._committing, self._failing
        report = Report.of(progress, now - at)
        if self.look is not None and now - at > _LATE and progress.phase != "done":
            found, lag = report.progress, self.look()
            self.observed.note(lag)
            if progress.phase != "target unavailable":
                found = replace(found, lag=lag.total, lag_by_vbucket=lag.by_vbucket)
                if lag.is_disconnected:
                    found = replace(found, phase="disconnected")
            report = replace(report, progress=aged(found, self.observed.ages()))
        if failing is not None and progress.phase != "done":
            # The next attempt may run for long before the loop reports.
            found = replace(report.progress, phase="target unavailable")
            report = replace(report, progress=found)
        report = replace(
            report,
            committing=0.0 if since is None else now - since,
            failing=0.0 if failing is None else now - failing[0],
        )
        self._looked = now, report
        return report

    def why_not_alive(self) -> str | None:
        """Says why its loop counts as hung; `None` if it does not."""
        still = time.monotonic() - self._turned
        if self._waiting or still <= self.hung_after:
            return None
        if self._committing is None:
            return f"the loop has not turned for {still:.0f} s: does on_progress hang?"
        return f"a commit has been running for {still:.0f} s: {_LOOK_FOR}"

    def why_not_ready(self) -> str | None:
        """Says what it has yet to do before it is connected and has caught up once."""
        failing, report = self._failing, self.last()
        if failing is not None:
            seconds = time.monotonic() - failing[0]
            return f"the target has been unavailable for {seconds:.0f} s: {failing[1]}"
        if report is None:
            return self.why_not_started or "it starts"
        phase = report.progress.phase
        if not self._has_caught_up:
            return f"it has not caught up yet: {phase}"
        if phase == "disconnected":
            return "disconnected: no node can be reached"
        disconnected = self.streams.stats().disconnected
        if disconnected:
            count = f"{disconnected} {'vBucket is' if disconnected == 1 else 'vBuckets are'}"
            return f"{count} not streamed: see the warnings of /status"
        return "no stream is open" if self._waiting and not self.streams.are_open else None
