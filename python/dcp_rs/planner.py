"""Plan consecutive bounded reads: where each ends, and its partitions.

`dcp_rs.Client.plan` plans one read. A `Planner` is for a driver that plans many: it keeps its
connections, waits for a cluster that is unavailable, and can plan the partitions of a read again
whose end was chosen long before. For a stream in one process, use `dcp_rs.Client.stream` and its
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcp_rs import _checks, _dcp_rs, _deprecated, _keywords
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.connection import Bucket
from dcp_rs.exceptions import CheckpointError
from dcp_rs.options import Share
from dcp_rs.plan import Partition, Range, ReadPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime

    from dcp_rs.options import Include, Op

Offsets = dict[str, Any]
"""Position of each vBucket: JSON that a reader stores unchanged."""


class Task(NamedTuple):
    """Ranges of one node, from the deprecated `Planner.tasks`."""

    node: str
    """Node of the vBuckets when the task was planned, as `host:port`."""
    ranges: tuple[Range, ...]
    plan: str
    """The partition as JSON, for `dcp_rs.Partition.from_json`."""


@_deprecated.accepts(*_deprecated.OF_PLAN)
@_keywords.checked
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How batches are planned."""

    max_seqnos: int | None = None
    """Most seqnos in a batch, an upper bound of its rows."""
    until: Offsets | None = None
    """Offsets that no batch may pass."""
    on_rollback: Literal["emit", "fail", "resync"] = "emit"
    """What to do if the server's history differs from what was read."""
    persisted_only: bool = True
    """On by default, unlike in `dcp_rs.Client.stream`, because a batch ends at offsets that a
    failover could take back. Whether to read only changes that every copy of a vBucket has on
    disk."""
    on_purge: Literal["fail", "resync"] = "fail"
    """What to do if deletions may have been purged before they were read: `fail`, or `resync`: a
    rollback row, then the vBucket from its beginning."""
    is_last: bool = False
    """Whether no later read resumes from the end, which then includes unpersisted changes."""


class Planner:
    """Observes a bucket and plans batches.

    Once the nodes have answered for the first time, it waits while the cluster is unavailable, for
    up to the `retry_timeout` of its client, and reconnects with the client's options.

    >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
    ...     planner = Planner(client)
    ...     token = cluster.upsert("key", b"{}")
    ...     options = PlanOptions(persisted_only=False)
    ...     end = planner.end(planner.earliest(), options)
    ...     partitions = planner.partitions(planner.earliest(), end, options, count=4)
    ...     partitions[0].ranges[0].to_seqno == token.seqno
    True
    """

    def __init__(
        self,
        client: Bucket,
        vbuckets: Iterable[int] | Share | None = None,
        *,
        collections: str | Iterable[str] | None = None,
        keys: str | Iterable[str] | None = None,
        ops: Op | Iterable[Op] | None = None,
        since: datetime | float | None = None,
        include: Include | Iterable[Include] = (),
    ) -> None:
        """Creates a planner for a bucket, or for some of its vBuckets or collections.

        Args:
            client: A client of the bucket.
            vbuckets: vBuckets to read, as in `dcp_rs.Client.stream`.
            collections: Collections to read, as in `dcp_rs.Client.stream`.
            keys: Patterns of keys to read, as in `dcp_rs.Client.stream`.
            ops: Operations to read, as in `dcp_rs.Client.stream`.
            since: Earliest change to read, as in `dcp_rs.Client.stream`.
            include: As in `dcp_rs.Client.stream`; only `system_documents` makes a difference to a
                plan.

        Raises:
            ConfigError: A vBucket, scope or collection does not exist.
        """
        options = dict(locals())
        del options["self"], options["client"]
        _checks.instance("client", client, Bucket, "a Client")
        if isinstance(vbuckets, str):
            raise _checks.wrong_type("vbuckets", vbuckets, f"{_checks.VBUCKETS}, or a Share")
        if isinstance(vbuckets, Share):
            options["vbuckets"] = vbuckets.vbuckets(client.num_vbuckets)
        elif isinstance(vbuckets, Iterator):
            options["vbuckets"] = list(vbuckets)
        self._client = client
        self._vbuckets: Any = options["vbuckets"]
        self._inner = _dcp_rs.Planner(client._inner, options)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<dcp_rs.planner.Planner of {self._client!r}>"

    @property
    def is_ephemeral(self) -> bool:
        """Whether the bucket has no disk, so that nothing is ever persisted."""
        return self._inner.is_ephemeral

    def observe(self, *, persisted: bool = False) -> None:
        """Fetches the high seqnos of the vBuckets from the nodes.

        Args:
            persisted: Whether to also fetch what each copy has on disk.

        Raises:
            ConnectError: A node cannot be reached.
            TimeoutError: The nodes did not all answer in time.
        """
        _checks.flag("persisted", persisted)
        self._inner.observe(persisted)

    def high_seqnos(self) -> dict[int, int]:
        """Returns the high seqnos of the last `observe`, by vBucket."""
        return self._inner.high_seqnos()

    def head(self) -> Offsets | None:
        """Returns the server's offsets at the last `observe`; `None` before the first.

        They count only the collections that are read, if the server reports their seqnos. The
        difference to a read's offsets is its lag.
        """
        head = self._inner.head()
        return None if head is None else _load(head)

    def earliest(self) -> Offsets:
        """Returns the offsets of the beginning."""
        return _load(self._inner.earliest())

    def latest(self, options: PlanOptions) -> Offsets:
        """Returns the offsets up to which changes may be read now."""
        return _load(self._inner.latest(_by_name(options)))

    def fix_target(self, options: PlanOptions) -> None:
        """Limits all batches to what may be read now."""
        self._inner.fix_target(_by_name(options))

    def end(self, start: Offsets | Checkpoint, options: PlanOptions) -> Offsets:
        """Returns the end of the batch that starts at `start`; equal to `start` if it is empty.

        Raises:
            RollbackError: The server has rolled back, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: `start` is damaged, or of another bucket or filter.
        """
        return _load(self._inner.plan_end(_begin(start), _by_name(options)))

    def partitions(
        self,
        start: Offsets | Checkpoint,
        end: Offsets,
        options: PlanOptions,
        *,
        count: int | None = None,
    ) -> list[Partition]:
        """Returns the partitions of a batch.

        It may be called again, long after `end` was chosen. Then it leaves out ranges that are no
        longer in the server's history; the next batch reports their rollback.

        Args:
            start: Where the batch starts.
            end: Where it ends, from `end`.
            options: Those with which the end was planned.
            count: Most partitions, or one per node if there are more nodes; by default one per
                node, or four with `is_last`.

        Raises:
            RollbackError: `end` contains a rollback, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: The offsets are damaged, or of another bucket or filter.
        """
        if count is not None:
            _checks.integer("count", count, 1, 0xFFFF)
        begin, limits = _begin(start), _by_name(options)
        plans = self._inner.partitions(begin, _dump("end", end), count, limits)
        return [Partition(plan, self._client.options) for plan in plans]

    def plan(
        self,
        start: Literal["earliest", "latest"] | Offsets | Checkpoint = "earliest",
        options: PlanOptions | None = None,
        *,
        count: int | None = None,
    ) -> ReadPlan:
        """Plans the batch that starts at `start`: its end and its partitions.

        Args:
            start: `earliest`, `latest`, the end of an earlier plan, or a checkpoint of a stream.
            options: How to plan; by default, `PlanOptions()`.
            count: As in `partitions`.

        Raises:
            ConfigError: An option is wrong.
            RollbackError: The server has rolled back, and `on_rollback` is `fail`.
            DataError: Deletions may have been purged unread.
            CheckpointError: `start` or `until` is damaged, of another bucket or filter, or `until`
                is ahead of what may be read.
        """
        options = PlanOptions() if options is None else options
        begin = self._start(start, options)
        end = self.end(begin, options)
        self._check_reached(end, options)
        partitions = self.partitions(begin, end, options, count=count)
        return ReadPlan(tuple(partitions), None if options.is_last else end)

    def _start(self, start: object, options: PlanOptions) -> Offsets | Checkpoint:
        if isinstance(start, str):
            _checks.word("start", start, ("earliest", "latest"))
            return self.earliest() if start == "earliest" else self.latest(options)
        expected = "'earliest', 'latest', the end of a plan or a Checkpoint"
        _checks.instance("start", start, Mapping | Checkpoint, expected)
        return start  # type: ignore[return-value]  # checked above

    def _check_reached(self, end: Offsets, options: PlanOptions) -> None:
        """Refuses to read less than requested."""
        if options.until is None or options.max_seqnos is not None:
            return
        found = unreached(end, options.until, self._vbuckets)
        if found is None:
            return
        vbucket, last, wanted = found
        error = CheckpointError(
            f"until has seqno {wanted} of vBucket {vbucket}, which can be read only up to {last} "
            "now: does it belong to another cluster, or has the bucket been rolled back?"
        )
        error.code, error.vbucket = "offsets", vbucket
        raise error

    def tasks(
        self,
        start: Offsets | Checkpoint,
        end: Offsets,
        tasks: int | None,
        options: PlanOptions,
    ) -> list[Task]:
        """Returns what `partitions` returns, as tasks. Deprecated: use `partitions`.

        Raises:
            DcpError: As `partitions`.
        """
        _deprecated.warn("Planner.tasks", "Planner.partitions")
        if tasks is not None:
            _checks.integer("tasks", tasks, 1, 0xFFFF)
        planned = self.partitions(start, end, options, count=tasks)
        return [Task(each.node, each.ranges, each.to_json()) for each in planned]


def is_offsets(text: str) -> bool:
    """Whether text contains offsets, even damaged ones, rather than a checkpoint."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text.startswith("{") and '"format"' not in text
    return isinstance(document, dict) and "s" in document and "format" not in document


def unreached(
    end: Offsets, wanted: Offsets, vbuckets: Collection[int] | None
) -> tuple[int, int, int] | None:
    """Returns the first of the vBuckets whose end is below a wanted one, and both seqnos."""
    seqnos = enumerate(zip(end["s"], wanted["s"], strict=True))
    return next(
        (
            (vbucket, last, least)
            for vbucket, (last, least) in seqnos
            if last < least and (vbuckets is None or vbucket in vbuckets)
        ),
        None,
    )


def parse_offsets(text: str) -> Offsets:
    """Parses offsets; the engine validates their contents.

    Raises:
        CheckpointError: The text is not a JSON object.
    """
    return _load(text)


def _load(text: str) -> Offsets:
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
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
    except (TypeError, ValueError, RecursionError) as error:
        raise _damaged(str(error)) from error


def _by_name(options: PlanOptions) -> dict[str, object]:
    _checks.instance("options", options, PlanOptions, "PlanOptions")
    until = None if options.until is None else _dump("until", options.until)
    return vars(options) | {"until": until}
