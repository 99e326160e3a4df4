"""The loop that keeps targets in step.

A *catch-up* reads up to what the bucket has now, and ends. By then, everything that had to be read
again from its beginning has been read: a whole generation, or a vBucket that was rolled back. The
commit that ends the catch-up removes the older rows. Then changes are *followed* as they come,
until the next rollback or collection that has to be read again.

Several tables are read by one stream. One that is new, or far behind, has a stream of its own until
it has caught up; then one stream reads all of them from the earliest of their positions, and each
leaves out what it has.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs._logging import about
from dcp_rs.client import Client, connect
from dcp_rs.exceptions import (
    BucketNotFoundError,
    ConfigError,
    StreamEndedError,
    UnsupportedError,
)
from dcp_rs.options import BatchPolicy
from dcp_rs.replication import changes as reducing
from dcp_rs.replication.controls import Controls, check_commits
from dcp_rs.replication.group import Buffer, Group
from dcp_rs.replication.heap import release_memory
from dcp_rs.replication.lag import Lag
from dcp_rs.replication.maintenance import Maintenance
from dcp_rs.replication.names import is_pattern
from dcp_rs.replication.outage import Outage, Unreachable
from dcp_rs.replication.reports import Reports
from dcp_rs.replication.table import LostPosition
from dcp_rs.replication.waiting import Limits, due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.options import BackfillOrder, Priority
    from dcp_rs.replication.health import Health
    from dcp_rs.replication.maintenance import Policy
    from dcp_rs.replication.progress import Progress
    from dcp_rs.replication.reader import Read
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.table import OnDrop, Step, Table
    from dcp_rs.replication.tables import Tables
    from dcp_rs.replication.target import OnError
    from dcp_rs.stream import ChangeStream

_log = logging.getLogger("dcp_rs.replication")

# Seconds between checks whether to stop.
_TICK = 0.1
# Seconds between looks for collections that no stream would notice.
_LOOK = 5.0
# Seconds after which the position of a table without changes is committed; of more tables than
# these, one after the other, in as many seconds. And how many at once.
_QUIET = 120.0
_QUIET_AT_ONCE = 10
# Share of `commit_bytes` that several tables may have read before it is known which has what.
_SHARE_READ = 4
# How many times `commit_interval` tables wait while changes come faster than they are committed: a
# commit of few rows costs a table as much as one of many.
_PATIENCE = 10
# How many times as long as its last commit a database rests before it commits what there is, though
# nothing is due: a tenth of the time at most is spent so.
_REST = 9
# Seconds after which memory that was freed is returned to the system again.
_RELEASE = 60.0
# Tables in a commit, of which all are in memory, in a transaction if the target has one for them.
_TOGETHER = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a replication is asked to do."""

    bucket: str
    num_vbuckets: int
    mode: Mode
    once: bool
    share: BucketShare | None
    collections: list[str] | None
    persisted_only: bool
    on_purge: Literal["resync", "ignore"]
    priority: Priority | None
    backfill_order: BackfillOrder | None
    on_drop: OnDrop
    on_error: OnError | None
    commit_rows: int
    commit_bytes: int
    commit_interval: float
    target_retry_timeout: float
    maintenance: Policy | None
    stop: threading.Event
    on_progress: Callable[[Progress], None] | None

    @property
    def batch(self) -> BatchPolicy:
        """How the streams deliver changes."""
        return BatchPolicy(
            max_rows=min(self.commit_rows, BatchPolicy.max_rows),
            linger=min(self.commit_interval, BatchPolicy.linger),
        )


class Replication:
    """Keeps tables in step with one bucket."""

    def __init__(self, client: Client, tables: Tables, settings: Settings, health: Health) -> None:
        self._client = client
        self._health = health
        self._owns_client = False
        self._client_is_outdated = False
        self._tables = tables
        self._settings = settings
        self._groups: list[Group] = []
        self._news = threading.Event()
        self._reports = Reports(tables, health, settings.share, settings.on_progress)
        health.look = lambda: Lag.of(list(self._groups))
        self._looked = time.monotonic()
        # Until when what is not due is not committed.
        self._rests_until = 0.0
        self._releases_at = time.monotonic() + _RELEASE
        self._has_ended = False
        # Whether to ask for every version, until a server says that it keeps none.
        self._has_history = True
        self._outage: Outage | None = None
        policy = settings.maintenance
        self._maintenance = None if policy is None else Maintenance(policy, health)
        # After which what was read and not committed is lost, until the tables are opened again.
        self._commit_error: Exception | None = None

    def run(self) -> Progress:
        """Runs until it is stopped; with `once`, until it has caught up."""
        try:
            while True:
                try:
                    return self._run()
                except Exception as error:
                    if not self._waits_for_target(error):
                        raise
                    if self._settings.stop.is_set():
                        # What was not committed is read again by the next start.
                        return self._reports.report_outage(self._groups)
        finally:
            for group in self._groups:
                self._close(group)
            if self._owns_client:
                self._client.close()

    def _run(self) -> Progress:
        """Runs until it is stopped, or until the target fails."""
        stop = self._settings.stop
        self._open_tables()
        while not (stop.is_set() or self._has_ended):
            self._news.clear()
            self._health.turned()
            if isinstance(stop, Controls):
                stop.turn(self._change)
                if self._commit_error is not None:
                    raise self._commit_error
            has_moved = [self._step(group) for group in list(self._groups)]
            if all(group.phase == "complete" for group in self._groups):
                break
            self._reports.watch(self._groups)
            self._look(time.monotonic())
            if self._maintenance is not None:
                self._maintenance.turn(self._in_step)
            if not any(has_moved):
                self._news.wait(max(min(self._seconds_left(), _TICK), 0.001))
        for group in self._groups:
            self._commit_all(group, is_due=True)
        if self._settings.once and not stop.is_set():
            self._reports.phase = "done"
            if self._maintenance is not None:
                self._maintenance.end(self._in_step())
        return self._reports.report(self._groups)

    def _open_tables(self) -> None:
        """Opens the tables, also again: each goes on from the state that it has in the target."""
        if self._reports.phase == "following":
            self._tables.forget_reload()
        with self._health.waiting():
            opened = self._tables.groups(self._client, self._new_buffer)
        before, self._groups = self._groups, opened
        for group in before:
            self._close(group)
        self._commit_error = None
        if self._maintenance is not None:
            self._maintenance.forget()

    def _in_step(self) -> list[Table]:
        """Returns the tables that nothing is read again for."""
        done = [group for group in self._groups if group.phase == "complete" or not group.until_now]
        return [table for group in done for table in group.tables.values()]

    def _waits_for_target(self, error: Exception) -> bool:
        """Waits until a target that failed is to be tried again, or until it is stopped.

        Returns:
            Whether it is either of them.
        """
        stop, timeout = self._settings.stop, self._settings.target_retry_timeout
        if error is self._reports.error_of_caller or not self._tables.is_unavailable(error):
            return False
        if isinstance(error, Unreachable) and not self._groups:
            return False  # It has never been reached.
        if self._outage is None:
            self._outage = Outage(self._health, timeout)
        again = self._outage.failed(error)
        if again is None:
            return False
        # Its sessions may be broken. Streams stay open, and tell how far behind it is.
        with suppress(Exception):
            self._tables.close()
        while not stop.is_set() and time.monotonic() < again:
            self._reports.watch_outage(self._groups)
            stop.wait(_TICK)
        return True

    def _new_buffer(self) -> Buffer:
        return Buffer(*self._limits(), splits=not self._tables.are_one)

    def _limits(self) -> tuple[int, int, float]:
        settings = self._settings
        share = 1 if self._tables.are_one else _SHARE_READ
        return settings.commit_rows, settings.commit_bytes // share, settings.commit_interval

    def _change(self, options: Mapping[str, Any]) -> None:
        """Changes options, as `Controls.turn` says."""
        given = dict(options)
        hung_after = given.pop("hung_after", self._health.hung_after)
        settings = replace(self._settings, **given)
        check_commits(
            rows=settings.commit_rows,
            size=settings.commit_bytes,
            interval=settings.commit_interval,
            hung_after=hung_after,
        )
        if settings.collections != self._settings.collections:
            self._choose(settings.collections)
        is_delivered_alike = settings.batch == self._settings.batch
        self._settings, self._health.hung_after = settings, hung_after
        for group in list(self._groups):
            group.buffer.limit(*self._limits())
            if not is_delivered_alike:
                self._commit_all(group, is_due=True)
                self._catch_up(group)

    def _choose(self, collections: list[str] | None) -> None:
        """Reads other collections as well."""
        first = self._groups[0]
        # Its next stream begins before whatever is created from now on.
        self._commit_all(first, is_due=True)
        self._catch_up(first)
        with self._health.waiting():
            added = self._tables.choose(collections, self._client, self._groups)
        first.collections = collections
        if added:
            self._part(added)

    def _seconds_left(self) -> float:
        found = [group.buffer.seconds_left() for group in self._groups]
        ends = time.monotonic() - self._settings.commit_interval
        found += [each.waits_since - ends for each in self._groups if each.waits_since is not None]
        found += [self._rest_left() for each in self._groups if self._may_commit_early(each)]
        return min(found)

    def _rest_left(self) -> float:
        return self._rests_until - time.monotonic()

    def _may_commit_early(self, group: Group) -> bool:
        """Whether to commit what there is as soon as the stream brings nothing.

        Not while a table catches up: more comes at once, and a commit of many rows costs less.
        """
        return self._tables.commits_when_idle and not group.until_now and group.has_uncommitted

    # ----- opening -----

    def _open(self, group: Group) -> None:
        """Opens the stream of a group."""
        retry_timeout = self._client.options.retry_timeout
        deadline, has_warned = time.monotonic() + retry_timeout, False
        while True:
            try:
                if self._client_is_outdated:
                    self._reconnect()
                loaded_apart = self._tables.to_load(self._client, group)
                if loaded_apart:
                    self._part(loaded_apart)
                opening = partial(self._stream, until_now=group.until_now)
                stream = self._tables.stream(group, self._client, opening)
                break
            except (BucketNotFoundError, ConfigError) as error:
                # A dropped collection may be created again. At the very beginning, a name is wrong.
                self._client_is_outdated = isinstance(error, BucketNotFoundError)
                is_new = any(table.state is None for table in group.tables.values())
                if is_new or self._settings.stop.is_set() or time.monotonic() > deadline:
                    raise
                if not has_warned:
                    _log.warning(
                        "waits up to %g s, since %s",
                        retry_timeout,
                        error,
                        extra=about("stream_waits", seconds=retry_timeout, error=str(error)),
                    )
                    has_warned = True
                with self._health.waiting():
                    self._settings.stop.wait(_TICK)
        if stream is None and group is self._groups[0]:
            group.phase = "complete" if self._settings.once else "idle"
            return
        if stream is None:
            self._groups.remove(group)
            return
        self._health.streams.opened(stream)
        group.read(stream, self._news)
        self._reports.note_phase(self._groups)

    def _stream(
        self,
        start: Checkpoint | Literal["earliest"],
        collections: list[str] | None,
        *,
        fills: bool = True,
        until_now: bool,
    ) -> ChangeStream:
        """Opens a stream.

        Args:
            start: Where it begins.
            collections: Collections that it reads.
            fills: Whether the tables have no rows of a vBucket that it reads from the beginning, or
                only such as are removed when it has been read.
            until_now: Whether it ends with what the bucket has now.
        """
        settings = self._settings
        share = settings.share
        if share is not None:
            share.check_bucket(self._client.num_vbuckets)
        skips = settings.mode == "table" and fills
        opening = partial(
            self._client.stream,
            start=start,
            until="now" if until_now else None,
            vbuckets=None if share is None else share.member,
            collections=collections,
            persisted_only=settings.persisted_only,
            on_purge=settings.on_purge,
            # What was removed before is not among the rows that it fills a table with.
            initial_deletions="skip_if_supported" if skips else "deliver",
            priority=settings.priority,
            backfill_order=settings.backfill_order,
            on_rollback="emit" if settings.mode == "log" else "resync",
            batch=settings.batch,
            **self._tables.layout.options,
        )
        with self._health.waiting():
            if settings.mode != "history" or not self._has_history:
                return opening(include="system_events")
            try:
                return opening(include=["system_events", "history"])
            except UnsupportedError as error:
                _log.info(
                    "of several versions that a document had, the newest is read: %s",
                    error,
                    extra=about("no_history", error=str(error)),
                )
            self._has_history = False
            return opening(include="system_events")

    def _close(self, group: Group) -> None:
        """Closes the stream of a group."""
        stream = group.stream
        group.close()
        if stream is not None:
            self._health.streams.closed(stream)

    def _reconnect(self) -> None:
        """Connects to the bucket that replaced a dropped one."""
        with self._health.waiting():
            client = connect(self._client.options)
        if self._owns_client:
            self._client.close()
        self._client, self._owns_client, self._client_is_outdated = client, True, False

    # ----- reading -----

    def _step(self, group: Group) -> bool:
        """Takes what a group's stream has brought, and returns whether there was something."""
        if group.phase == "opening":
            self._open(group)
            return True
        try:
            read = group.take()
        except (BucketNotFoundError, StreamEndedError) as error:
            self._begin_again(group, error)
            return True
        if read is not None:
            self._take(group, read)
        elif group.buffer.is_due() or self._waits_long(group):
            self._commit(group)
        elif self._may_commit_early(group) and self._rest_left() <= 0:
            self._commit_all(group)
        return read is not None

    def _waits_long(self, group: Group) -> bool:
        since = group.waits_since
        return since is not None and time.monotonic() - since >= self._settings.commit_interval

    def _begin_again(self, group: Group, error: BucketNotFoundError | StreamEndedError) -> None:
        """Opens streams of another bucket, or of the collections that are left, again."""
        self._client_is_outdated = isinstance(error, BucketNotFoundError)
        for each in self._groups if self._client_is_outdated else [group]:
            self._commit_all(each)
            self._catch_up(each)
        _log.warning(
            "the stream is opened again: %s",
            error,
            extra=about("stream_reopened", error=str(error)),
        )

    def _catch_up(self, group: Group) -> None:
        self._close(group)
        group.until_now = True

    def _take(self, group: Group, read: Read) -> None:
        if read.batch is None:
            self._reports.look_at_lag(self._groups)
            group.buffer.checkpoint = read.checkpoint
            self._end(group)
            return
        group.buffer.add(read.batch, read.checkpoint)
        if read.batch.newest is not None:
            self._health.observed.note_cas(read.batch.newest)
        if not group.until_now and self._needs_catch_up(group, read.batch.changes):
            self._commit_all(group)
            self._catch_up(group)
        elif group.buffer.is_due():
            self._commit(group)

    def _end(self, group: Group) -> None:
        """Goes on from the end of a group's stream."""
        once = self._settings.once
        self._commit_all(group, is_caught_up=group.until_now, is_due=once or len(self._groups) > 1)
        self._close(group)
        if group.until_now and self._settings.on_drop == "drop":
            self._tables.drop(group)
        if not group.until_now:
            self._has_ended = True
        elif once:
            group.phase = "complete"
        elif group is self._groups[0]:
            group.until_now = False
        else:
            self._join(group)
        if self._groups and not any(each.until_now for each in self._groups):
            release_memory()

    def _join(self, group: Group) -> None:
        """Has the first group's stream read the tables of another one, which has caught up."""
        first = self._groups[0]
        self._commit_all(first, is_due=True)
        # Its end tells whether the server still has what tables have beyond the stream's beginning.
        self._catch_up(first)
        first.tables |= group.tables
        self._groups.remove(group)

    def _part(self, tables: dict[str | None, Table]) -> None:
        """Has tables read by a stream of their own until they have caught up."""
        for group in self._groups:
            for name in tables:
                group.tables.pop(name, None)
        for table in tables.values():
            # Its own stream brings them.
            table.waiting.forget()
        names = [str(name) for name in tables]
        _log.info(
            "%s read by a stream of their own", ", ".join(names), extra=about("tables_parted")
        )
        self._groups.append(Group(tables, names, self._new_buffer()))

    def _needs_catch_up(self, group: Group, batch: pa.RecordBatch) -> bool:
        """Whether a batch contains something that must be read again from its beginning."""
        if self._settings.mode != "log" and reducing.rolled_back(batch):
            return True
        if self._settings.on_drop == "drop" and reducing.has_end_of_collection(batch):
            return True
        # Of a collection without wildcards, the stream does not have the one that replaces it.
        names = group.collections or []
        has_plain_name = not all(map(is_pattern, names))
        return has_plain_name and reducing.has_end_of_collection(batch)

    def _look(self, now: float) -> None:
        """Looks for collections that no stream would notice."""
        if now - self._looked < _LOOK or self._settings.once:
            return
        self._looked = now
        added = self._tables.added(self._client, self._groups)
        if added:
            self._part(added)

    # ----- committing -----

    def _commit(self, group: Group) -> None:
        """Commits what is due of what was read."""
        settings, now = self._settings, time.monotonic()
        # Otherwise it is the interval that has passed.
        is_busy = group.buffer.is_full()
        self._route(group)
        if group.position is None:
            return
        tables = list(group.tables.values())
        if self._tables.are_one:
            self._commit_tables(group, tables, is_due=tables)
            return
        limits = Limits(
            settings.commit_rows,
            settings.commit_bytes - settings.commit_bytes // _SHARE_READ,
            settings.commit_interval * (_PATIENCE if is_busy else 1),
        )
        idle = [table for table in tables if not table.waiting.rows]
        quiet = max(_QUIET, len(tables))
        late = [table for table in idle if now - table.committed_at > quiet]
        late.sort(key=lambda table: table.committed_at)
        # Those that have nothing move on in memory.
        chosen = due(tables, limits, now) + idle
        self._commit_tables(group, chosen, is_due=late[:_QUIET_AT_ONCE])

    def _commit_all(
        self, group: Group, *, is_caught_up: bool = False, is_due: bool = False
    ) -> None:
        """Commits everything that was read.

        Args:
            group: The stream.
            is_caught_up: Whether it ends a catch-up, which may change only the state.
            is_due: Whether to commit the positions of tables without changes.
        """
        self._route(group)
        tables = list(group.tables.values())
        is_due |= self._tables.are_one
        self._commit_tables(
            group, tables, is_caught_up=is_caught_up, is_due=tables if is_due else ()
        )

    def _route(self, group: Group) -> None:
        """Gives what was read to the tables."""
        since = group.buffer.since
        read = group.buffer.take(self._tables.layout.read)
        if read is None:
            return
        parts, group.position = read
        meter = self._reports.meter
        meter.bytes += sum(part.bytes for part in parts.values())
        meter.rollbacks += len(reducing.rolled_back(parts[None].changes))
        for table, part in self._tables.route(parts, group, self._groups):
            if len(part.changes):
                table.waiting.add(part, since)

    def _commit_tables(
        self,
        group: Group,
        tables: Sequence[Table],
        *,
        is_caught_up: bool = False,
        is_due: Sequence[Table],
    ) -> None:
        """Commits what tables of a group have, and the positions of those that are due."""
        begun = time.monotonic()
        meter = self._reports.meter
        self._reports.begin_commit(self._groups)
        due_ones = set(is_due)
        lost: dict[str | None, Table] = {}
        for first in range(0, len(tables), _TOGETHER):
            steps: list[tuple[Table, Step]] = []
            for table in tables[first : first + _TOGETHER]:
                # Without a stream, that up to which the table was read.
                position = group.position or table.position
                if position is None:
                    continue
                try:
                    step = table.commit_of(
                        table.waiting.take(self._tables.layout.read),
                        position,
                        is_caught_up=is_caught_up,
                        is_due=table in due_ones,
                        collection_id=self._tables.collection_id(table),
                    )
                except LostPosition:
                    lost[table.collection] = table
                    continue
                if step is not None:
                    steps.append((table, step))
            if steps:
                self._apply(steps)
                meter.commits += 1
                meter.committed_at = time.monotonic()
            meter.changes += sum(step.changes for _, step in steps)
        if self._outage is not None and (is_caught_up or meter.committed_at >= begun):
            self._outage.over()
            self._outage = None
            self._releases_at = 0.0
        group.note_waiting()
        now = time.monotonic()
        if now >= self._releases_at:
            release_memory()
            self._releases_at = now + _RELEASE
        self._rests_until = now + _REST * (now - begun)
        if lost:
            self._part(lost)
        self._reports.report(self._groups)

    def _apply(self, steps: list[tuple[Table, Step]]) -> None:
        with self._health.committing():
            try:
                self._tables.commit(steps)
            except Exception as error:
                self._commit_error = error
                raise
