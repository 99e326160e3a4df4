"""Metrics: their names, and how each is read from a stream or from a report of a replication.

Prometheus, OpenTelemetry and the listener of `dcp_rs.replicate` export the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcp_rs.replication.progress import Progress, TableProgress
    from dcp_rs.stream import StreamStats, VbucketStats

    Points = Iterator[tuple[tuple[str, ...], float]]

_STATES = ("opening", "streaming", "backing_off", "complete", "failed")
_PHASES = (
    "loading", "rereading", "catching up", "following", "disconnected", "target unavailable",
    "done",
)  # fmt: skip


class Streaming(Protocol):
    """A stream, or the streams of a replication."""

    @property
    def bucket_name(self) -> str:
        """Name of the bucket."""

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""

    def stats(self) -> StreamStats:
        """Returns statistics."""

    def vbucket_stats(self) -> list[VbucketStats]:
        """Returns the state of each vBucket."""

    def collection_lag(self) -> dict[str, int | None]:
        """Returns the lag of each collection."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a replication last reported, as of now.

    Attributes:
        progress: The report. What depends on the time counts on.
        age: Seconds since it was made.
        committing: Seconds for which a commit has been running; `None` if that is not known.
        failing: Seconds for which the target has been unavailable; `None` if that is not known.
    """

    progress: Progress
    age: float
    committing: float | None = None
    failing: float | None = None

    @classmethod
    def of(cls, progress: Progress, age: float) -> Report:
        """Returns a report that was made `age` seconds ago."""
        since = progress.seconds_since_commit + age
        now = replace(progress, elapsed=progress.elapsed + age, seconds_since_commit=since)
        return cls(progress=now, age=age)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stream or a replication that is watched.

    Attributes:
        bucket: Name of the bucket.
        name: Name of the stream or replication.
        stream: The stream, or the streams of the replication, if they are known.
        report: Returns the last report of the replication; `None` before the first.
        collections: Whether to export its lag by collection.
        vbuckets: Whether to export its lag and seqnos by vBucket.
    """

    bucket: str
    name: str
    stream: Streaming | None = None
    report: Callable[[], Report | None] | None = None
    collections: bool = False
    vbuckets: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        """Values of the labels that every series has."""
        return (self.bucket, self.name)

    @property
    def is_closed(self) -> bool:
        """Whether the stream has been closed."""
        return self.stream is not None and self.stream.is_closed


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric: its names, and how to read it.

    Attributes:
        prometheus: Its name in Prometheus.
        opentelemetry: Its name in OpenTelemetry.
        kind: Whether it only grows.
        unit: Its unit.
        description: What it means.
        stream: Reads it from a stream.
        report: Reads it from a report of a replication, if there is one.
        label: Name of a label that tells its series apart.
    """

    prometheus: str
    opentelemetry: str
    kind: Literal["counter", "gauge"]
    unit: str
    description: str
    stream: Callable[[Source], Points] | None = None
    report: Callable[[Report], Points] | None = None
    label: str | None = None

    @property
    def labels(self) -> list[str]:
        """Names of its labels."""
        return ["bucket", "stream", *([self.label] if self.label else [])]

    def points(self, source: Source) -> Points:
        """Reads the values of its own label, and its value for each."""
        if self.label == "vbucket" and not source.vbuckets:
            return
        if source.report is not None and self.report is not None:
            report = source.report()
            if report is not None:
                yield from self.report(report)
        elif source.stream is not None and self.stream is not None:
            yield from self.stream(source)


def _of_stats(value: Callable[[StreamStats], float | None]) -> Callable[[Source], Points]:
    def read(source: Source) -> Points:
        # Unknown values are left out, instead of 0.
        if source.stream is not None and (known := value(source.stream.stats())) is not None:
            yield (), known

    return read


def _states(source: Source) -> Points:
    if source.stream is not None:
        stats = source.stream.stats()
        for state in _STATES:
            yield (state,), getattr(stats, state)


def _collections(source: Source) -> Points:
    if source.stream is not None and source.collections:
        for name, lag in source.stream.collection_lag().items():
            if lag is not None:
                yield (name,), lag


def _vbuckets(attribute: str) -> Callable[[Source], Points]:
    def read(source: Source) -> Points:
        if source.stream is not None:
            for each in source.stream.vbucket_stats():
                if (value := getattr(each, attribute)) is not None:
                    yield (str(each.vbucket),), value

    return read


def _of_report(value: Callable[[Report], float | None]) -> Callable[[Report], Points]:
    def read(report: Report) -> Points:
        if (known := value(report)) is not None:
            yield (), known

    return read


def _of_tables(value: Callable[[TableProgress], float | None]) -> Callable[[Report], Points]:
    def read(report: Report) -> Points:
        for name, table in report.progress.tables.items():
            if (known := value(table)) is not None:
                yield (name,), known

    return read


def _by_vbucket(report: Report) -> Points:
    for vbucket, age in report.progress.lag_seconds_by_vbucket.items():
        yield (str(vbucket),), age


def _phases(report: Report) -> Points:
    for phase in _PHASES:
        yield (phase,), phase == report.progress.phase


def _share(report: Report) -> Points:
    if report.progress.share is not None:
        yield (report.progress.share,), 1


_OF_STREAMS = (
    Figure(
        prometheus="dcp_rs_records",
        opentelemetry="dcp_rs.records",
        kind="counter",
        unit="{record}",
        description="Changes taken by the application",
        stream=_of_stats(lambda stats: stats.rows),
    ),
    Figure(
        prometheus="dcp_rs_batches",
        opentelemetry="dcp_rs.batches",
        kind="counter",
        unit="{batch}",
        description="Batches taken by the application",
        stream=_of_stats(lambda stats: stats.batches),
    ),
    Figure(
        prometheus="dcp_rs_malformed_documents",
        opentelemetry="dcp_rs.documents.malformed",
        kind="counter",
        unit="{document}",
        description="Malformed documents, of which all columns are null",
        stream=_of_stats(lambda stats: stats.malformed),
    ),
    Figure(
        prometheus="dcp_rs_partly_malformed_documents",
        opentelemetry="dcp_rs.documents.partly_malformed",
        kind="counter",
        unit="{document}",
        description="Documents of which some values do not fit their columns and are null",
        stream=_of_stats(lambda stats: stats.partly_malformed),
    ),
    Figure(
        prometheus="dcp_rs_lag",
        opentelemetry="dcp_rs.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server, all vBuckets together",
        stream=_of_stats(lambda stats: stats.lag),
        report=_of_report(lambda report: report.progress.lag),
    ),
    Figure(
        prometheus="dcp_rs_lag_max",
        opentelemetry="dcp_rs.lag.max",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server in the vBucket that is furthest behind",
        stream=_of_stats(lambda stats: stats.max_lag),
    ),
    Figure(
        prometheus="dcp_rs_collection_lag",
        opentelemetry="dcp_rs.collection.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the newest change of a collection",
        stream=_collections,
        label="collection",
    ),
    Figure(
        prometheus="dcp_rs_buffered_bytes",
        opentelemetry="dcp_rs.buffered",
        kind="gauge",
        unit="By",
        description="Bytes received and not yet taken by the application",
        stream=_of_stats(lambda stats: stats.buffered_bytes),
    ),
    Figure(
        prometheus="dcp_rs_connections",
        opentelemetry="dcp_rs.connections",
        kind="gauge",
        unit="{connection}",
        description="Connections in use",
        stream=_of_stats(lambda stats: stats.connections),
    ),
    Figure(
        prometheus="dcp_rs_reconnects",
        opentelemetry="dcp_rs.reconnects",
        kind="counter",
        unit="{outage}",
        description="Connections lost, and nodes that could not be reached",
        stream=_of_stats(lambda stats: stats.reconnects),
    ),
    Figure(
        prometheus="dcp_rs_vbuckets",
        opentelemetry="dcp_rs.vbuckets",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets by what they are doing",
        stream=_states,
        label="state",
    ),
    Figure(
        prometheus="dcp_rs_disconnected_vbuckets",
        opentelemetry="dcp_rs.vbuckets.disconnected",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets that have not been streaming for three seconds",
        stream=_of_stats(lambda stats: stats.disconnected),
    ),
    Figure(
        prometheus="dcp_rs_diverged_vbuckets",
        opentelemetry="dcp_rs.vbuckets.diverged",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets whose changes wait because copies are on different branches",
        stream=_of_stats(lambda stats: stats.diverged),
    ),
    Figure(
        prometheus="dcp_rs_unpersisted_records",
        opentelemetry="dcp_rs.unpersisted.records",
        kind="gauge",
        unit="{record}",
        description="Changes that wait for the disks of all copies",
        stream=_of_stats(lambda stats: stats.unpersisted_rows),
    ),
    Figure(
        prometheus="dcp_rs_unpersisted_seconds",
        opentelemetry="dcp_rs.unpersisted.age",
        kind="gauge",
        unit="s",
        description="Time for which the oldest of them has waited",
        stream=_of_stats(lambda stats: stats.unpersisted_seconds),
    ),
    Figure(
        prometheus="dcp_rs_vbucket_lag",
        opentelemetry="dcp_rs.vbucket.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server",
        stream=_vbuckets("lag"),
        label="vbucket",
    ),
    Figure(
        prometheus="dcp_rs_vbucket_seqno",
        opentelemetry="dcp_rs.vbucket.seqno",
        kind="gauge",
        unit="{seqno}",
        description="Last seqno taken by the application",
        stream=_vbuckets("seqno"),
        label="vbucket",
    ),
    Figure(
        prometheus="dcp_rs_vbucket_high_seqno",
        opentelemetry="dcp_rs.vbucket.high_seqno",
        kind="gauge",
        unit="{seqno}",
        description="Highest seqno of the server",
        stream=_vbuckets("high_seqno"),
        label="vbucket",
    ),
)

_OF_REPLICATIONS = (
    Figure(
        prometheus="dcp_rs_phase",
        opentelemetry="dcp_rs.phase",
        kind="gauge",
        unit="1",
        description="1 for what the replication is doing, 0 for the others",
        report=_phases,
        label="phase",
    ),
    Figure(
        prometheus="dcp_rs_share",
        opentelemetry="dcp_rs.share",
        kind="gauge",
        unit="1",
        description="1 for the share of the vBuckets that is replicated",
        report=_share,
        label="share",
    ),
    Figure(
        prometheus="dcp_rs_generation",
        opentelemetry="dcp_rs.generation",
        kind="gauge",
        unit="{generation}",
        description="Generation of the rows that are written",
        report=_of_report(lambda report: report.progress.generation),
    ),
    Figure(
        prometheus="dcp_rs_committed_records",
        opentelemetry="dcp_rs.committed.records",
        kind="counter",
        unit="{record}",
        description="Changes committed",
        report=_of_report(lambda report: report.progress.changes),
    ),
    Figure(
        prometheus="dcp_rs_committed_bytes",
        opentelemetry="dcp_rs.committed.bytes",
        kind="counter",
        unit="By",
        description="Bytes of the changes committed, as Arrow columns",
        report=_of_report(lambda report: report.progress.bytes),
    ),
    Figure(
        prometheus="dcp_rs_committed_malformed_documents",
        opentelemetry="dcp_rs.committed.documents.malformed",
        kind="counter",
        unit="{document}",
        description="Documents committed of which something is in no column of its own",
        report=_of_report(lambda report: report.progress.malformed),
    ),
    Figure(
        prometheus="dcp_rs_rejected_records",
        opentelemetry="dcp_rs.rejected.records",
        kind="counter",
        unit="{record}",
        description="Changes committed to the table of rejects",
        report=_of_report(lambda report: report.progress.rejected),
    ),
    Figure(
        prometheus="dcp_rs_uncommitted_records",
        opentelemetry="dcp_rs.uncommitted.records",
        kind="gauge",
        unit="{record}",
        description="Changes read and not committed",
        report=_of_report(lambda report: report.progress.uncommitted),
    ),
    Figure(
        prometheus="dcp_rs_lag_seconds",
        opentelemetry="dcp_rs.lag.age",
        kind="gauge",
        unit="s",
        description="Age of the oldest change that is not committed, since a node reported it",
        report=_of_report(lambda report: report.progress.lag_seconds),
    ),
    Figure(
        prometheus="dcp_rs_cas_lag_seconds",
        opentelemetry="dcp_rs.cas.lag",
        kind="gauge",
        unit="s",
        description="Time since the CAS of the oldest change read and not committed",
        report=_of_report(lambda report: report.progress.cas_lag_seconds),
    ),
    Figure(
        prometheus="dcp_rs_cas_ahead_seconds",
        opentelemetry="dcp_rs.cas.ahead",
        kind="gauge",
        unit="s",
        description="By how much a CAS of the last minute was ahead of the clock here",
        report=_of_report(lambda report: report.progress.cas_ahead_seconds),
    ),
    Figure(
        prometheus="dcp_rs_vbucket_lag_seconds",
        opentelemetry="dcp_rs.vbucket.lag.age",
        kind="gauge",
        unit="s",
        description="Age of its oldest change that is not committed",
        report=_by_vbucket,
        label="vbucket",
    ),
    Figure(
        prometheus="dcp_rs_table_lag_seconds",
        opentelemetry="dcp_rs.table.lag.age",
        kind="gauge",
        unit="s",
        description="Age of its oldest change that is not committed",
        report=_of_tables(lambda table: table.lag_seconds),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_cas_lag_seconds",
        opentelemetry="dcp_rs.table.cas.lag",
        kind="gauge",
        unit="s",
        description="Time since the CAS of its oldest change read and not committed",
        report=_of_tables(lambda table: table.cas_lag_seconds),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_commits",
        opentelemetry="dcp_rs.commits",
        kind="counter",
        unit="{commit}",
        description="Commits made",
        report=_of_report(lambda report: report.progress.commits),
    ),
    Figure(
        prometheus="dcp_rs_commit_age_seconds",
        opentelemetry="dcp_rs.commit.age",
        kind="gauge",
        unit="s",
        description="Time since the last commit",
        report=_of_report(lambda report: report.progress.seconds_since_commit),
    ),
    Figure(
        prometheus="dcp_rs_commit_running_seconds",
        opentelemetry="dcp_rs.commit.running",
        kind="gauge",
        unit="s",
        description="Time for which a commit has been running",
        report=_of_report(lambda report: report.committing),
    ),
    Figure(
        prometheus="dcp_rs_target_unavailable_seconds",
        opentelemetry="dcp_rs.target.unavailable",
        kind="gauge",
        unit="s",
        description="Time for which the target has been unavailable, 0 if it is not",
        report=_of_report(lambda report: report.failing),
    ),
    Figure(
        prometheus="dcp_rs_report_age_seconds",
        opentelemetry="dcp_rs.report.age",
        kind="gauge",
        unit="s",
        description="Time since the replication last reported, which it does once a second",
        report=_of_report(lambda report: report.age),
    ),
    Figure(
        prometheus="dcp_rs_rollbacks",
        opentelemetry="dcp_rs.rollbacks",
        kind="counter",
        unit="{rollback}",
        description="Rollback rows seen",
        report=_of_report(lambda report: report.progress.rollbacks),
    ),
    Figure(
        prometheus="dcp_rs_table_committed_records",
        opentelemetry="dcp_rs.table.committed.records",
        kind="counter",
        unit="{record}",
        description="Changes committed, of one of several tables",
        report=_of_tables(lambda table: table.changes),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_commits",
        opentelemetry="dcp_rs.table.commits",
        kind="counter",
        unit="{commit}",
        description="Commits made",
        report=_of_tables(lambda table: table.commits),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_generation",
        opentelemetry="dcp_rs.table.generation",
        kind="gauge",
        unit="{generation}",
        description="Generation of its rows",
        report=_of_tables(lambda table: table.generation),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_malformed_documents",
        opentelemetry="dcp_rs.table.documents.malformed",
        kind="counter",
        unit="{document}",
        description="Documents committed of which something is in no column of its own",
        report=_of_tables(lambda table: table.malformed),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_rejected_records",
        opentelemetry="dcp_rs.table.rejected.records",
        kind="counter",
        unit="{record}",
        description="Changes committed to its table of rejects",
        report=_of_tables(lambda table: table.rejected),
        label="table",
    ),
    Figure(
        prometheus="dcp_rs_table_uncommitted_records",
        opentelemetry="dcp_rs.table.uncommitted.records",
        kind="gauge",
        unit="{record}",
        description="Changes read and not committed",
        report=_of_tables(lambda table: table.uncommitted),
        label="table",
    ),
)

FIGURES = (*_OF_STREAMS, *_OF_REPLICATIONS)
