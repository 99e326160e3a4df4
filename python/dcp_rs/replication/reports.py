"""What a replication says of itself while it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_rs.replication.lag import Lag, Place, aged
from dcp_rs.replication.progress import Meter, Phase, Progress
from dcp_rs.replication.waiting import earlier

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.replication.group import Group
    from dcp_rs.replication.health import Health
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.tables import Tables

# Seconds between reports while nothing is committed, and between looks at a lag that is unknown.
_REPORT = 1.0
_AWAITED = 0.1
# What a replication is doing, if its streams do different things.
_BY_WEIGHT: tuple[Phase, ...] = ("loading", "rereading", "catching up", "following", "done")


class Reports:
    """Follows what streams have read and tables have committed, and tells of it.

    Args:
        tables: The tables.
        health: What answers questions about the replication.
        share: The share of the bucket that it replicates.
        on_progress: The caller's function.
    """

    def __init__(
        self,
        tables: Tables,
        health: Health,
        share: BucketShare | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.meter = Meter(time.monotonic())
        self.phase: Phase = "loading"
        # What `on_progress` has raised.
        self.error_of_caller: Exception | None = None
        self._tables = tables
        self._health = health
        self._share = None if share is None else str(share)
        self._on_progress = on_progress
        self._lag = Lag(None, {}, {}, {})
        self._reported = self._looked = 0.0
        self._last: Progress | None = None
        # Changes that were not committed when a commit began.
        self._uncommitted = 0

    def note_phase(self, groups: list[Group]) -> None:
        """Notes what the streams do now."""
        phases = {_phase_of(group) for group in groups if group.phase == "reading"}
        self.phase = next((each for each in _BY_WEIGHT if each in phases), self.phase)

    def watch(self, groups: list[Group]) -> None:
        """Looks at the lag and reports, if it is time to."""
        now = time.monotonic()
        # Commits report as well, and may be more frequent.
        is_awaited = self._lag.total is None and not self._lag.is_disconnected
        if now - self._looked >= (_AWAITED if is_awaited else _REPORT):
            self.look_at_lag(groups)
        if now - self._reported >= _REPORT:
            self.report(groups)

    def watch_outage(self, groups: list[Group]) -> None:
        """The same while the target is unavailable."""
        if time.monotonic() - self._reported >= _REPORT:
            self.look_at_lag(groups)
            self.report_outage(groups)

    def begin_commit(self, groups: list[Group]) -> None:
        """Notes what is not committed before a commit, which may take long."""
        self._uncommitted = sum(each.uncommitted for each in groups)
        if time.monotonic() - self._looked >= _REPORT / 2:
            # The age of what comes now counts from now.
            self.look_at_lag(groups)
        self._settle(groups)

    def look_at_lag(self, groups: list[Group]) -> None:
        """Asks the streams what the nodes have."""
        self._looked = time.monotonic()
        self._lag = Lag.of(groups)
        self._health.note_events()
        self._health.observed.note(self._lag)

    def report(self, groups: list[Group]) -> Progress:
        """Tells how far the tables are now."""
        now = time.monotonic()
        self._reported = now
        meter = self.meter
        tables = [table for group in groups for table in group.tables.values()]
        states = [table.state for table in tables if table.state is not None]
        by_name = self._tables.by_name(groups)
        self._settle(groups)
        is_cut_off = self._lag.is_disconnected and self.phase != "done"
        progress = Progress(
            phase="disconnected" if is_cut_off else self.phase,
            generation=max((state.generation for state in states), default=0),
            changes=meter.changes,
            commits=meter.commits,
            bytes=meter.bytes,
            rollbacks=meter.rollbacks,
            malformed=sum(table.malformed for table in tables),
            rejected=sum(table.rejected for table in tables),
            lag=self._lag.total,
            lag_by_vbucket=self._lag.by_vbucket,
            uncommitted=sum(group.uncommitted for group in groups),
            elapsed=now - meter.begun,
            changes_per_second=meter.rate_at(now),
            seconds_since_commit=now - meter.committed_at,
            tables={name: table.progress() for name, table in by_name.items()},
            share=self._share,
        )
        progress = aged(progress, self._health.observed.ages())
        self._tell(progress)
        return progress

    def report_outage(self, groups: list[Group]) -> Progress:
        """Tells, while the target is unavailable, how far the tables were before."""
        before, now = self._last, time.monotonic()
        if before is None:
            # Nothing is known of the tables yet.
            before = self.report(groups)
        self._reported = now
        # What was read again up to what the bucket had then is not followed.
        is_followed = bool(groups) and not any(each.until_now for each in groups)
        progress = replace(
            before,
            phase="target unavailable",
            lag=self._lag.total if is_followed else None,
            lag_by_vbucket=self._lag.by_vbucket if is_followed else {},
            uncommitted=self._uncommitted,
            elapsed=now - self.meter.begun,
            changes_per_second=self.meter.rate_at(now),
            seconds_since_commit=now - self.meter.committed_at,
        )
        progress = aged(progress, self._health.observed.ages())
        self._tell(progress)
        return progress

    def _settle(self, groups: list[Group]) -> None:
        """Notes which positions the tables have reached."""
        names = {table: name for name, table in self._tables.by_name(groups).items()}
        places: list[Place] = []
        unrouted: int | None = None
        for group in groups:
            has_all = not group.uncommitted
            unrouted = earlier(unrouted, group.buffer.written)
            # Those that were committed together have the same position.
            at: dict[int, Place] = {}
            for table in group.tables.values():
                place = Place(group.number, {}, table.reached, has_all)
                place = at.setdefault(id(table.reached), place)
                place.tables[names.get(table)] = table.waiting.written
            places += at.values()
        self._health.observed.settle(places, unrouted)

    def _tell(self, progress: Progress) -> None:
        self._last = progress
        self._health.report(progress)
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception as error:
                self.error_of_caller = error
                raise


def _phase_of(group: Group) -> Phase:
    if not group.until_now:
        return "following"
    states = [table.known for table in group.tables.values()]
    if any(state.is_loading for state in states):
        return "loading"
    return "rereading" if any(state.rereading for state in states) else "catching up"
