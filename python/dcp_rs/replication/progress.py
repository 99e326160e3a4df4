"""Progress of a replication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal[
    "loading", "rereading", "catching up", "following", "disconnected", "target unavailable", "done"
]


@dataclass(frozen=True, kw_only=True)
class TableProgress:
    """Progress of one of several tables since `dcp_rs.replicate` was called.

    Attributes:
        generation: Generation of the rows that are written, from 1.
        changes: Changes committed.
        commits: Commits made.
        malformed: Documents committed of which something is not in a column of its own.
        rejected: Changes committed to the table of rejects.
        uncommitted: Changes that wait for a commit of the table. Those that were read last are
            not yet known by table.
        lag_seconds: As in `Progress`, of this table.
        cas_lag_seconds: As in `Progress`, of this table.
    """

    generation: int
    changes: int
    commits: int
    malformed: int
    rejected: int
    uncommitted: int = 0
    lag_seconds: float | None = None
    cas_lag_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of `dcp_rs.replicate` since it was called.

    Attributes:
        phase: `loading` a generation, `rereading` vBuckets that were rolled back, `catching up`
            with changes from before the start, `following`, or `done` if it has returned because
            of `once`. `disconnected` if no vBucket has been streaming for three seconds, because
            its node cannot be reached: nothing is known of the bucket meanwhile.
            `target unavailable` while the target is tried again.
        generation: Generation of the rows that are written, from 1; the newest of several tables.
        changes: Changes committed: of documents for a table, all rows for a log.
        commits: Commits made.
        bytes: Bytes of the changes committed, as Arrow columns.
        rollbacks: Rollback rows seen.
        malformed: Documents committed of which something is not in a column of its own, because it
            is not JSON or does not fit the schema.
        rejected: Changes committed to the table of rejects.
        lag: Seqnos that the server has and that have not been read, an upper bound of the changes
            to come; `None` while unknown, also if only some vBuckets are disconnected. It excludes
            what is `uncommitted`.
        lag_by_vbucket: Lag of each vBucket that is behind, as far as it is known.
        lag_seconds: Age of the oldest change that is not committed, in seconds since a node first
            reported to have it, by the clock here; right to a second, or a tenth of a long time.
            0 if there is none, and `None` while `lag` is.
        lag_seconds_by_vbucket: That of each vBucket that has such a change.
        cas_lag_seconds: Seconds since the time of the CAS of the oldest change that was read and is
            not committed; `None` if there is none. A node's clock has set it: it is negative if it
            is in the future here, and large for a document that was restored from a backup.
        cas_ahead_seconds: By how much a CAS that was read in the last minute was in the future; 0
            if none was. The clocks of the nodes and the one here then differ by as much or more.
        uncommitted: Changes that have been read and not committed.
        elapsed: Seconds since the call.
        changes_per_second: Changes committed per second, averaged over about the last ten seconds.
        seconds_since_commit: Seconds since the last commit; before the first, since the call. It
            also grows while there is nothing to commit, so alert on it together with `lag` and
            `uncommitted`.
        tables: Progress of each table by its name, if there are several.
        share: The share of the vBuckets that is replicated, such as `2/5`; `None` if all are. All
            figures are about its vBuckets.
    """

    phase: Phase
    generation: int
    changes: int
    commits: int
    bytes: int
    rollbacks: int
    malformed: int
    rejected: int
    lag: int | None
    lag_by_vbucket: dict[int, int]
    uncommitted: int
    elapsed: float
    changes_per_second: float
    seconds_since_commit: float
    tables: dict[str, TableProgress] = field(default_factory=dict, repr=False)
    lag_seconds: float | None = None
    lag_seconds_by_vbucket: dict[int, float] = field(default_factory=dict, repr=False)
    cas_lag_seconds: float | None = None
    cas_ahead_seconds: float = 0.0
    share: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `lag` is 0 at this rate; `None` without progress, or if lag is unknown."""
        if self.lag is None or not self.changes_per_second:
            return None
        return self.lag / self.changes_per_second


@dataclass
class Meter:
    """Counts what is committed."""

    begun: float
    changes: int = 0
    commits: int = 0
    bytes: int = 0
    rollbacks: int = 0
    rate: float = 0.0
    committed_at: float = 0.0
    _marked_at: float = 0.0
    _marked: int = 0

    def __post_init__(self) -> None:
        self._marked_at = self.committed_at = self.begun

    def rate_at(self, now: float) -> float:
        """Returns the changes per second at a moment, averaged over the last ten seconds or so."""
        seconds = now - self._marked_at
        if seconds >= 1.0:
            recent = (self.changes - self._marked) / seconds
            weight = min(seconds / 10.0, 1.0) if self.rate else 1.0
            self.rate += (recent - self.rate) * weight
            self._marked_at, self._marked = now, self.changes
        return self.rate
