"""Bounded reads that follow each other: how far each goes, and what its tasks read.

For a driver that hands ranges of seqnos to tasks in other processes, as Spark's does. What a stream
in one process needs is `dcp_rs.Client.stream` and its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcp_rs import _checks, _dcp_rs
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.client import Client
from dcp_rs.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

Offsets = dict[str, Any]
"""How far each vBucket has been read: JSON that a reader keeps and does not change."""


class Range(NamedTuple):
    """What is to be read of one vBucket."""

    vbucket: int
    vbuuid: int
    """Branch of history that reading goes on from; 0 from the beginning."""
    from_seqno: int
    """Reading begins above it."""
    to_seqno: int
    """Last seqno to read."""
    epoch: int
    """Rollbacks of the vBucket that were seen."""
    rolled_back: bool
    """Whether a rollback row to `from_seqno` comes before the changes."""


class Task(NamedTuple):
    """Ranges of one node."""

    node: str
    """Where the vBuckets were when it was planned, as `host:port`."""
    ranges: tuple[Range, ...]
    plan: str
    """The same with everything that its stream needs, for the engine: text to send to the task."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How batches are planned."""

    max_rows: int | None = None
    """Most seqnos of a batch, an upper bound of its rows."""
    until: Offsets | None = None
    """Offsets not to pass."""
    on_rollback: Literal["emit", "fail", "resync"] = "emit"
    """What to do where the server's history is no longer the one that was read."""
    persisted_only: bool = True
    """On by default, unlike in `dcp_rs.Client.stream`. Whether to take only what
    every copy of a vBucket has on disk."""
    allow_data_loss: bool = False
    """Whether to go on where deletions may have been purged unread."""
    is_last: bool = False
    """Whether nothing goes on from the end: it is then all there is, persisted or not."""


class Planner:
    """Looks at a bucket and plans batches; see the module.

    Once the nodes have answered for the first time, it waits for a cluster that is away, and
    connects anew with what its client was connected with.

    >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
    ...     planner = Planner(client)
    ...     token = cluster.upsert("key", b"{}")
    ...     options = PlanOptions(persisted_only=False)
    ...     end = planner.end(planner.earliest(), options)
    ...     tasks = planner.tasks(planner.earliest(), end, 4, options)
    ...     tasks[0].ranges[0].to_seqno == token.seqno
    True
    """

    def __init__(
        self,
        client: Client,
        vbuckets: Iterable[int] | None = None,
        *,
        scope: str | None = None,
        collections: Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Iterable[Literal["mutation", "deletion", "expiration"]] | None = None,
        since: datetime | float | None = None,
        system_documents: bool = False,
        retry_timeout: float = 300.0,
    ) -> None:
        """Makes a planner of a bucket, or of some of its vBuckets or collections.

        Args:
            client: A client of the bucket.
            vbuckets: vBuckets to read, all if not given.
            scope: Scope to read, as in `dcp_rs.Client.stream`.
            collections: Collections to read, likewise.
            keys: Patterns of the keys to read, likewise.
            ops: Operations to read, likewise.
            since: Earliest change to read, likewise.
            system_documents: Whether documents of scope `_system` are read, likewise.
            retry_timeout: Longest time in seconds that the cluster may be away, once it has
                answered.

        Raises:
            ConfigError: There is no such vBucket, scope or collection.
        """
        options = dict(locals())
        del options["self"], options["client"]
        _checks.instance("client", client, Client, "a Client")
        self._client = client
        self._inner = _dcp_rs.Planner(client._inner, options)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<dcp_rs.planner.Planner of {self._client!r}>"

    @property
    def is_ephemeral(self) -> bool:
        """Whether the bucket has no disk, so that nothing of it is ever persisted."""
        return self._inner.is_ephemeral

    def observe(self, *, persisted: bool = False) -> None:
        """Asks the nodes where the vBuckets are, for `dcp_rs.planner.Planner`.

        Args:
            persisted: Whether to ask what each copy has on disk, too.

        Raises:
            ConnectError: A node cannot be reached.
            TimeoutError: The nodes did not all answer in time.
        """
        _checks.flag("persisted", persisted)
        self._inner.observe(persisted)

    def high_seqnos(self) -> dict[int, int]:
        """Returns the highest seqnos of the last look, by vBucket."""
        return self._inner.high_seqnos()

    def head(self) -> Offsets | None:
        """Returns offsets after what the server had at the last look; `None` before the first.

        Of the collections that are read, where the server tells. How far a read lags behind them
        is how much is left to read.
        """
        head = self._inner.head()
        return None if head is None else _load(head)

    def earliest(self) -> Offsets:
        """Returns offsets before every first change."""
        return _load(self._inner.earliest())

    def latest(self, options: PlanOptions) -> Offsets:
        """Returns offsets after what may be read now."""
        return _load(self._inner.latest(_by_name(options)))

    def fix_target(self, options: PlanOptions) -> None:
        """Lets no batch go beyond what may be read now."""
        self._inner.fix_target(_by_name(options))

    def end(self, start: Offsets | Checkpoint, options: PlanOptions) -> Offsets:
        """Returns where to end the batch that begins at `start`; there if there is nothing to do.

        Raises:
            RollbackError: The server's history is another one, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: `start` is damaged, or of another bucket or filter.
        """
        return _load(self._inner.plan_end(_begin(start), _by_name(options)))

    def tasks(
        self,
        start: Offsets | Checkpoint,
        end: Offsets,
        tasks: int | None,
        options: PlanOptions,
    ) -> list[Task]:
        """Returns what is to be read for a batch, in at most `tasks` parts or one per node.

        What is no longer the server's history is left out; planning the next batch tells of it.

        Raises:
            RollbackError: `end` tells of a rollback, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: The offsets are damaged, or of another bucket or filter.
        """
        if tasks is not None:
            _checks.integer("tasks", tasks, 1, 0xFFFF)
        planned = self._inner.plan_tasks(_begin(start), _dump("end", end), tasks, _by_name(options))
        return [
            Task(node, tuple(Range(*each) for each in ranges), plan)
            for node, plan, ranges in planned
        ]


def is_offsets(text: str) -> bool:
    """Whether text is offsets, or damaged ones, and not, say, a checkpoint."""
    try:
        document = json.loads(text)
    except ValueError:
        return text.startswith("{") and '"format"' not in text
    return isinstance(document, dict) and "s" in document and "format" not in document


def parse_offsets(text: str) -> Offsets:
    """Reads offsets; the engine checks what is in them.

    Raises:
        CheckpointError: It is no JSON object.
    """
    return _load(text)


def _load(text: str) -> Offsets:
    try:
        document = json.loads(text)
    except (TypeError, ValueError) as error:
        raise _damaged(str(error)) from error
    if not isinstance(document, dict):
        raise _damaged("no JSON object")
    return document


def _damaged(what: str) -> CheckpointError:
    error = CheckpointError(f"the offsets are damaged: {what}")
    error.code = "offsets"
    return error


def _begin(start: Offsets | Checkpoint) -> str | _dcp_rs.Checkpoint:
    return start._inner if isinstance(start, Checkpoint) else _dump("start", start)  # noqa: SLF001


def _dump(option: str, offsets: Mapping[str, Any]) -> str:
    _checks.instance(option, offsets, Mapping, "offsets")
    try:
        return json.dumps(offsets, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise _damaged(str(error)) from error


def _by_name(options: PlanOptions) -> dict[str, object]:
    _checks.instance("options", options, PlanOptions, "PlanOptions")
    until = None if options.until is None else _dump("until", options.until)
    return vars(options) | {"until": until}
