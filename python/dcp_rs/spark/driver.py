"""What the driver asks the cluster between two reads that follow each other."""

from __future__ import annotations

import json
import time
import warnings
from typing import TYPE_CHECKING, Self, TypeVar

import dcp_rs
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.planner import Offsets, Planner, PlanOptions, parse_offsets
from dcp_rs.spark.errors import SparkReadError, coded, options_as_written

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.spark.options import ReadOptions
    from dcp_rs.spark.partitions import Split

# Spark ends a query at the first error of its driver, so passing troubles are sat out here.
_PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 0.2

# A batch whose end was chosen this long ago at most is planned without looking again: its tasks
# notice what happens after any look.
_FRESH_SECONDS = 2.0

_Answer = TypeVar("_Answer")


class Driver:
    """Plans reads of one bucket over connections that it keeps. A context manager.

    Opens nothing before it is asked. Every error that it raises is a
    [`SparkReadError`][dcp_rs.spark.SparkReadError] or a
    [`ConfigError`][dcp_rs.exceptions.ConfigError].
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._client: dcp_rs.Client | None = None
        self._planner: Planner | None = None
        self._planned: tuple[float, Offsets, Offsets] | None = None

    def earliest(self) -> Offsets:
        """Gives offsets before every first change."""
        return self._ask("connecting", lambda planner: planner.earliest())

    def latest(self) -> Offsets:
        """Gives offsets after what may be read now."""

        def ask(planner: Planner) -> Offsets:
            self._observe(planner)
            return planner.latest(self._plan(planner))

        return self._ask("asking for the newest seqnos", ask)

    def parse(self, text: str) -> Offsets:
        """Reads offsets that an earlier read ended with; checks them when they are used.

        Raises:
            SparkReadError: They are no offsets.
        """
        try:
            return parse_offsets(text)
        except DcpError as error:
            raise coded(error, "reading the offsets") from error

    @staticmethod
    def dump(offsets: Offsets) -> str:
        """Gives offsets as JSON."""
        return json.dumps(offsets, separators=(",", ":"))

    def end(
        self, start: Offsets, max_rows: int | None = None, until: Offsets | None = None
    ) -> Offsets:
        """Gives where to end the read that begins at `start`.

        Raises:
            SparkReadError: The bucket is another one, was rolled back and `onRollback` is `fail`,
                has lost deletions, or cannot be reached.
        """

        def ask(planner: Planner) -> Offsets:
            self._observe(planner)
            return planner.end(start, self._plan(planner, max_rows, until))

        end = self._ask("planning a read", ask)
        self._planned = (time.monotonic(), start, end)
        return end

    def splits(self, start: Offsets, end: Offsets, *, is_followed: bool) -> list[Split]:
        """Gives what the tasks of a read are.

        Raises:
            SparkReadError: As [`end`][dcp_rs.spark.driver.Driver.end].
        """
        from dcp_rs.spark.partitions import Split, VBucketRange

        if start == end:
            return []

        def ask(planner: Planner) -> list[Split]:
            if not self._is_fresh(start, end):
                # Again: a read that was planned long ago may have been rolled back since.
                self._observe(planner)
            client = self._connected()
            tasks = planner.tasks(start, end, self._tasks(client), self._plan(planner))
            return [
                Split(
                    self._options,
                    client.bucket_uuid,
                    task.node,
                    tuple(
                        VBucketRange(
                            each.vbucket,
                            each.from_seqno,
                            each.to_seqno,
                            each.vbuuid,
                            each.epoch,
                            each.rolled_back,
                        )
                        for each in task.ranges
                    ),
                    is_planned=True,
                    is_followed=is_followed,
                )
                for task in tasks
            ]

        return self._ask("planning a read", ask)

    def close(self) -> None:
        """Closes the connections; they are made again when needed."""
        client, self._client, self._planner = self._client, None, None
        self._planned = None
        if client is not None:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tasks(self, client: dcp_rs.Client) -> int:
        """Decides how many tasks a read has at most: each costs Spark 50 ms."""
        return self._options.num_partitions or max(1, len(client.vbuckets_by_node()))

    def _observe(self, planner: Planner) -> None:
        planner.observe(persisted=self._is_persisted_only(planner))

    def _is_fresh(self, start: Offsets, end: Offsets) -> bool:
        """Whether the last look was for this read, a moment ago."""
        if self._planned is None:
            return False
        at, *planned = self._planned
        return planned == [start, end] and time.monotonic() - at < _FRESH_SECONDS

    def _is_persisted_only(self, planner: Planner) -> bool:
        return self._options.persisted_only and not planner.is_ephemeral

    def _plan(
        self, planner: Planner, max_rows: int | None = None, until: Offsets | None = None
    ) -> PlanOptions:
        return PlanOptions(
            max_rows=max_rows,
            until=until,
            on_rollback=self._options.on_rollback,
            persisted_only=self._is_persisted_only(planner),
            allow_data_loss=not self._options.fail_on_data_loss,
        )

    def _connected(self) -> dcp_rs.Client:
        if self._client is None:
            self._client = dcp_rs.connect(self._options.connection())
        return self._client

    def _ready(self) -> Planner:
        if self._planner is None:
            client = self._connected()
            wanted = self._options.vbuckets
            if wanted is not None and max(wanted) >= client.num_vbuckets:
                raise ConfigError(
                    f"option vbuckets: there is no vBucket {max(wanted)}, the bucket has "
                    f"{client.num_vbuckets}"
                )
            self._planner = Planner(
                client,
                wanted,
                scope=self._options.scope,
                collections=self._options.collections,
            )
            if self._options.persisted_only and self._planner.is_ephemeral:
                warnings.warn(
                    f"bucket {self._options.bucket} has no disk: persistedOnly is off, and a "
                    "failover can take back rows that were read",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._planner

    @options_as_written()
    def _ask(self, doing: str, ask: Callable[[Planner], _Answer]) -> _Answer:
        """Asks until there is an answer, or an error that will not pass."""
        doing = f"{doing} of bucket {self._options.bucket}"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            is_kept = self._client is not None
            try:
                return ask(self._ready())
            except (ConfigError, SparkReadError):
                raise
            except DcpError as error:
                self.close()
                if is_kept and error.code == "bucket_not_found":
                    # A new connection tells whether another has its name now.
                    continue
                if not error.is_retryable or time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise coded(error, doing) from error
            time.sleep(_PAUSE_SECONDS)
