"""The loop that keeps a target in step.

A *catch-up* reads up to what the bucket has now, and ends. By then, everything that had to be read
again from its beginning has been read: a whole generation, or a vBucket that was rolled back. The
commit that ends the catch-up removes the older rows. Then changes are *followed* as they come,
until the next rollback or collection that has to be read again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow as pa

from dcp_rs.client import Client, connect
from dcp_rs.exceptions import (
    BucketNotFoundError,
    CheckpointError,
    ConfigError,
    StreamEndedError,
)
from dcp_rs.options import BatchPolicy
from dcp_rs.replication import changes as reducing
from dcp_rs.replication.progress import Meter, Phase, Progress
from dcp_rs.replication.reader import Reader
from dcp_rs.replication.rejects import refuse
from dcp_rs.replication.state import State
from dcp_rs.replication.target import IDENTITY, Commit, check_use

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.changes import Layout
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import OnError, Target
    from dcp_rs.stream import ChangeStream

_log = logging.getLogger("dcp_rs.replication")

# Seconds between checks whether to stop, and between reports while nothing is committed.
_TICK = 0.1
_REPORT = 1.0
# Reasons of rejects that are logged.
_REASONS = 100

Ending = Literal["complete", "stopped", "begin again"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a replication is asked to do."""

    mode: Mode
    once: bool
    collections: list[str] | None
    persisted_only: bool
    on_purge: Literal["resync", "ignore"]
    commit_rows: int
    commit_bytes: int
    commit_interval: float
    on_error: OnError
    stop: threading.Event
    on_progress: Callable[[Progress], None] | None


class Replication:
    """Keeps one target in step with one bucket."""

    def __init__(self, client: Client, target: Target, layout: Layout, settings: Settings) -> None:
        self._client = client
        self._owns_client = False
        self._client_is_outdated = False
        self._target = target
        self._layout = layout
        self._settings = settings
        self._state: State | None = None
        self._meter = Meter(time.monotonic())
        self._phase: Phase = "loading"
        self._lag = _Lag(None, {})
        self._reader: Reader | None = None
        self._reported = 0.0
        self._looked = 0.0
        self._buffer = _Buffer()
        self._first = reducing.FirstSnapshots(is_possible=False)
        self._reasons: set[str] = set()

    def run(self) -> Progress:
        """Runs until it is stopped; with `once`, until it has caught up."""
        try:
            self._state = self._restore()
            while not self._settings.stop.is_set():
                ending = self._read(until_now=True)
                if ending == "stopped" or (ending == "complete" and self._settings.once):
                    break
                if ending == "complete" and self._read(until_now=False) == "stopped":
                    break
            if self._settings.once and not self._settings.stop.is_set():
                self._phase = "done"
            return self._report()
        finally:
            if self._owns_client:
                self._client.close()

    def _restore(self) -> State | None:
        """Returns the state to resume from; `None` to begin a generation."""
        mode, schema = self._settings.mode, self._layout.schema
        found = self._target.open(schema, mode)
        # Those of this package have checked it before they changed anything.
        check_use(found, schema, mode)
        if found is not None and found.is_loading and found.generation == 1:
            seen = found.checkpoint.seqnos
            self._first = reducing.FirstSnapshots(is_possible=True, seen=seen)
        return found

    # ----- opening -----

    def _open(self, *, until_now: bool) -> ChangeStream:
        """Opens the stream from the target's position, or for a new generation."""
        retry_timeout = self._client.options.retry_timeout
        deadline, has_warned = time.monotonic() + retry_timeout, False
        while True:
            try:
                if self._client_is_outdated:
                    self._reconnect()
                return self._open_once(until_now=until_now)
            except (BucketNotFoundError, ConfigError) as error:
                # A dropped collection may be created again. At the very beginning, a name is wrong.
                self._client_is_outdated = isinstance(error, BucketNotFoundError)
                is_new = self._state is None
                if is_new or self._settings.stop.is_set() or time.monotonic() > deadline:
                    raise
                if not has_warned:
                    _log.warning("waits up to %g s, since %s", retry_timeout, error)
                    has_warned = True
                self._settings.stop.wait(_TICK)

    def _open_once(self, *, until_now: bool) -> ChangeStream:
        state = self._state
        if state is not None:
            why = self._why_anew(state)
            if why is None:
                try:
                    stream = self._stream(state.checkpoint, until_now=until_now)
                except CheckpointError as error:
                    if error.code != "filter_changed":
                        raise
                    why = str(error)
                else:
                    if stream.checkpoint().filter == state.checkpoint.filter:
                        return stream
                    stream.close()
                    why = "fewer collections are asked for"
            _log.warning("generation %d begins: %s", state.generation + 1, why)
        stream = self._stream("earliest", until_now=until_now)
        self._state = self._begin(stream.checkpoint())
        return stream

    def _why_anew(self, state: State) -> str | None:
        if state.moved:
            return f"the table is not as it was left: {state.moved}"
        if state.checkpoint.bucket_uuid != self._client.bucket_uuid:
            return "the bucket is another one"
        missing = set(self._layout.documents) - set(state.documents)
        if missing and self._settings.mode == "table":
            return f"documents have new columns: {', '.join(sorted(missing))}"
        return None

    def _begin(self, checkpoint: Checkpoint) -> State:
        """Returns the state of a new generation."""
        state = self._state
        self._first = reducing.FirstSnapshots(is_possible=state is None)
        return State(
            mode=self._settings.mode,
            commits=0 if state is None else state.commits,
            generation=1 if state is None else state.generation + 1,
            complete_generation=0 if state is None else state.complete_generation,
            documents=self._layout.documents,
            checkpoint=checkpoint,
        )

    def _stream(self, start: Checkpoint | Literal["earliest"], *, until_now: bool) -> ChangeStream:
        settings = self._settings
        return self._client.stream(
            start=start,
            until="now" if until_now else None,
            collections=settings.collections,
            persisted_only=settings.persisted_only,
            on_purge=settings.on_purge,
            include="system_events",
            on_rollback="resync" if settings.mode == "table" else "emit",
            batch=BatchPolicy(
                max_rows=min(settings.commit_rows, BatchPolicy.max_rows),
                linger=min(settings.commit_interval, BatchPolicy.linger),
            ),
            **self._layout.options,
        )

    def _reconnect(self) -> None:
        """Connects to the bucket that replaced a dropped one."""
        client = connect(self._client.options)
        if self._owns_client:
            self._client.close()
        self._client, self._owns_client, self._client_is_outdated = client, True, False

    # ----- reading -----

    def _read(self, *, until_now: bool) -> Ending:
        stream = self._open(until_now=until_now)
        self._phase = self._phase_of(until_now=until_now)
        with Reader(stream) as reader:
            self._reader = reader
            while True:
                if self._settings.stop.is_set():
                    self._commit()
                    return "stopped"
                try:
                    read = reader.take(min(self._buffer.seconds_left(self._settings), _TICK))
                except (BucketNotFoundError, StreamEndedError) as error:
                    # It belongs to another bucket, or to dropped collections.
                    self._client_is_outdated = isinstance(error, BucketNotFoundError)
                    self._commit()
                    _log.warning("the stream is opened again: %s", error)
                    return "begin again"
                self._watch(stream)
                if read is not None:
                    if read.batch is None:
                        self._lag = _Lag.of(stream)
                        self._buffer.checkpoint = read.checkpoint
                        self._commit(is_caught_up=until_now)
                        return "complete" if until_now else "stopped"
                    self._buffer.add(read.batch, read.checkpoint)
                    if not until_now and self._needs_catch_up(read.batch):
                        self._commit()
                        return "begin again"
                if self._buffer.is_full(self._settings):
                    self._commit()

    def _needs_catch_up(self, batch: pa.RecordBatch) -> bool:
        """Whether a batch contains something that must be read again from its beginning."""
        if self._settings.mode == "table" and reducing.rolled_back(batch):
            return True
        # Of a collection without wildcards, the stream does not have the one that replaces it.
        names = self._settings.collections or []
        has_plain_name = any(not {"*", "?"} & set(name) for name in names)
        return has_plain_name and reducing.has_end_of_collection(batch)

    def _phase_of(self, *, until_now: bool) -> Phase:
        state = self._known()
        if not until_now:
            return "following"
        if state.is_loading:
            return "loading"
        return "rereading" if state.rereading else "catching up"

    def _known(self) -> State:
        if self._state is None:
            raise AssertionError("a state is there once a stream was opened")
        return self._state

    # ----- committing -----

    def _commit(self, *, is_caught_up: bool = False) -> None:
        """Commits what was read; the end of a catch-up also if it only changes the state."""
        state, buffer = self._known(), self._buffer
        if buffer.checkpoint is None:
            return
        self._buffer = _Buffer()
        changes = buffer.changes(self._layout.read)
        rollbacks = reducing.rolled_back(changes)
        rereading = state.rereading | rollbacks if state.mode == "table" else frozenset()
        after = replace(
            state,
            commits=state.commits + 1,
            rereading=frozenset() if is_caught_up else rereading,
            complete_generation=state.generation if is_caught_up else state.complete_generation,
            checkpoint=buffer.checkpoint,
        )
        is_news = len(changes) or replace(after, commits=state.commits) != state
        if is_news:
            commit = self._as_commit(changes, state, after, rereading)
            refuse(commit.rejects, commit.on_error)
            commit = self._target.commit(commit) or commit
            self._state = after
            self._meter.commits += 1
            self._meter.committed_at = time.monotonic()
            self._note_rejects(commit.rejects)
            self._meter.malformed += self._layout.malformed(commit.rows)
        self._meter.changes += reducing.count(changes, state.mode)
        self._meter.bytes += changes.nbytes
        self._meter.rollbacks += len(rollbacks)
        self._report()

    def _as_commit(
        self, changes: pa.Table, state: State, after: State, rereading: frozenset[int]
    ) -> Commit:
        if state.mode == "log":
            return self._of(changes, state, after)
        are_first = self._first.hold(changes)
        reduced = reducing.reduce(changes, each_once=are_first)
        deletes = reduced.deletes
        commit = self._of(reduced.written, state, after)
        if self._layout.has_text_keys:
            deletes, _ = reducing.with_text_keys(deletes)
            deletes = deletes.set_column(1, "key", deletes["key"].cast(pa.string()))
        return replace(
            commit,
            deletes=deletes.slice(0, 0) if are_first else deletes,
            settled=pa.concat_tables([reduced.written.select(IDENTITY), reduced.deletes]),
            removals=[*reduced.removals(state.generation), *_outdated(state, after, rereading)],
            has_new_rows_only=are_first,
        )

    def _of(self, changes: pa.Table, state: State, after: State) -> Commit:
        """Returns a commit that appends changes, or rejects them."""
        rejected = changes.slice(0, 0)
        if self._layout.has_text_keys:
            changes, rejected = reducing.with_text_keys(changes)
        rows = self._layout.rows(changes, state.generation)
        return Commit(
            rows=rows,
            deletes=rows.select(IDENTITY).slice(0, 0),
            removals=(),
            has_new_rows_only=True,
            state=after,
            rejects=self._layout.rejects(rejected, state.generation),
            settled=rejected.select(IDENTITY).slice(0, 0),
            documents=self._layout.bytes_of(changes),
            on_error=self._settings.on_error,
        )

    def _note_rejects(self, rejects: pa.Table) -> None:
        """Counts changes that were rejected, and warns of the first for each reason."""
        self._meter.rejected += len(rejects)
        for row in rejects.select(["reason", "vbucket", "seqno"]).to_pylist():
            # A reason may name a position in a document, so the number of them is bounded.
            if row["reason"] in self._reasons or len(self._reasons) >= _REASONS:
                continue
            self._reasons.add(row["reason"])
            _log.warning(
                "vBucket %d seqno %d was rejected: %s. More of this kind are only counted",
                row["vbucket"],
                row["seqno"],
                row["reason"],
            )

    # ----- reporting -----

    def _watch(self, stream: ChangeStream) -> None:
        now = time.monotonic()
        # Commits report as well, and may be more frequent.
        if now - self._looked >= (_TICK if self._lag.total is None else _REPORT):
            self._looked, self._lag = now, _Lag.of(stream)
        if now - self._reported >= _REPORT:
            self._report()

    def _report(self) -> Progress:
        now = time.monotonic()
        self._reported = now
        meter = self._meter
        progress = Progress(
            phase=self._phase,
            generation=0 if self._state is None else self._state.generation,
            changes=meter.changes,
            commits=meter.commits,
            bytes=meter.bytes,
            rollbacks=meter.rollbacks,
            malformed=meter.malformed,
            rejected=meter.rejected,
            lag=self._lag.total,
            lag_by_vbucket=self._lag.by_vbucket,
            uncommitted=self._buffer.rows + (self._reader.waiting if self._reader else 0),
            elapsed=now - meter.begun,
            changes_per_second=meter.rate_at(now),
            seconds_since_commit=now - meter.committed_at,
        )
        if self._settings.on_progress is not None:
            self._settings.on_progress(progress)
        return progress


class _Lag(NamedTuple):
    """What the server has and the stream has not brought."""

    total: int | None
    by_vbucket: dict[int, int]

    @classmethod
    def of(cls, stream: ChangeStream) -> _Lag:
        vbuckets = stream.vbucket_stats()
        behind = {each.vbucket: each.lag for each in vbuckets if each.lag}
        # A vBucket that has reached its end need not be asked for.
        is_known = all(each.lag is not None or each.state == "complete" for each in vbuckets)
        return cls(sum(behind.values()) if is_known else None, behind)


def _outdated(state: State, after: State, rereading: frozenset[int]) -> list[str]:
    """Returns the conditions that select the rows that a complete catch-up has replaced."""
    if after.is_loading or after.rereading:
        return []
    is_replacing = state.is_loading and state.generation > 1
    # Rows of others, in a table that is loaded anew for them, may have any generation or none.
    others = f"generation <> {state.generation} OR generation IS NULL"
    found = [others] if is_replacing else []
    by_epoch: dict[int, set[int]] = {}
    positions = after.checkpoint.positions if rereading else {}
    for vbucket in rereading:
        by_epoch.setdefault(positions[vbucket].epoch, set()).add(vbucket)
    return found + [
        f"epoch < {epoch} AND {reducing.vbuckets_in(vbuckets)}"
        for epoch, vbuckets in sorted(by_epoch.items())
    ]


class _Buffer:
    """Changes that were read but not committed."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self._batches: list[pa.RecordBatch] = []
        self.rows = 0
        self._bytes = 0
        self._since = 0.0

    def add(self, batch: pa.RecordBatch, checkpoint: Checkpoint) -> None:
        """Adds a batch."""
        if not self._batches:
            self._since = time.monotonic()
        self._batches.append(batch)
        self.rows += batch.num_rows
        self._bytes += batch.nbytes
        self.checkpoint = checkpoint

    def is_full(self, settings: Settings) -> bool:
        """Whether to commit now."""
        return (
            self.rows >= settings.commit_rows
            or self._bytes >= settings.commit_bytes
            or self.seconds_left(settings) <= 0
        )

    def seconds_left(self, settings: Settings) -> float:
        """Returns the seconds until the next commit."""
        if not self._batches:
            return settings.commit_interval
        return self._since + settings.commit_interval - time.monotonic()

    def changes(self, schema: pa.Schema) -> pa.Table:
        """Returns the changes as one table."""
        return pa.Table.from_batches(self._batches, schema)
