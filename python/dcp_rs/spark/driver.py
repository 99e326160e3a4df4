"""The driver's requests to the cluster between two consecutive reads."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Self, TypeVar

import dcp_rs
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.planner import Offsets, Planner, PlanOptions, is_offsets, parse_offsets
from dcp_rs.spark.errors import SparkReadError, coded
from dcp_rs.spark.options import options_as_written
from dcp_rs.spark.partition import Partition

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.spark.options import ReadOptions

_Answer = TypeVar("_Answer")


class Driver:
    """Plans reads of one bucket over connections that it keeps. A context manager.

    It connects at the first request, which fails after the connect timeout. After that, it waits
    for an unavailable cluster for up to `retryTimeout`. Every error that it raises is a
    `dcp_rs.spark.SparkReadError` or a `dcp_rs.exceptions.ConfigError`.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._client: dcp_rs.Client | None = None
        self._planner: Planner | None = None

    def earliest(self) -> Offsets:
        """Returns offsets before every first change."""
        return self._ask("planning a read", lambda planner: planner.earliest())

    def latest(self) -> Offsets:
        """Returns offsets after what may be read now."""
        doing = "asking for the newest seqnos"
        return self._ask(doing, lambda planner: planner.latest(self._plan()))

    def fix_target(self) -> None:
        """Ends every later read at what may be read now."""
        doing = "asking for the newest seqnos"
        self._ask(doing, lambda planner: planner.fix_target(self._plan()))

    def head(self) -> Offsets | None:
        """Returns the server's offsets when the last end was chosen. Makes no request."""
        return None if self._planner is None else self._planner.head()

    def parse(self, text: str) -> Offsets | dcp_rs.Checkpoint:
        """Parses the start of a read: the offsets at which an earlier one ended, or a checkpoint.

        Raises:
            SparkReadError: It is neither.
        """
        try:
            return parse_offsets(text) if is_offsets(text) else dcp_rs.Checkpoint.from_json(text)
        except DcpError as error:
            raise coded(error, "reading the offsets") from error

    @staticmethod
    def dump(offsets: Offsets) -> str:
        """Returns offsets as JSON."""
        return json.dumps(offsets, separators=(",", ":"))

    def end(
        self,
        start: Offsets | dcp_rs.Checkpoint,
        max_seqnos: int | None = None,
        until: Offsets | None = None,
        *,
        is_last: bool = False,
    ) -> Offsets:
        """Returns where to end the read that begins at `start`.

        Args:
            start: Where it begins.
            max_seqnos: Most seqnos to read.
            until: Offsets not to pass.
            is_last: Whether no other read goes on from the end.

        Raises:
            SparkReadError: The bucket is another one, was rolled back and `onRollback` is `fail`,
                has lost deletions, or cannot be reached.
        """
        options = self._plan(max_seqnos, until, is_last=is_last)
        return self._ask("planning a read", lambda planner: planner.end(start, options))

    def partitions(
        self, start: Offsets | dcp_rs.Checkpoint, end: Offsets, *, is_last: bool = False
    ) -> list[Partition]:
        """Returns the partitions of a read, one for each task.

        Raises:
            SparkReadError: As `dcp_rs.spark.driver.Driver.end`.
        """
        if start == end:
            return []
        count, options = self._options.num_partitions, self._plan(is_last=is_last)
        planned = self._ask(
            "planning a read",
            lambda planner: planner.partitions(start, end, options, count=count),
        )
        return [Partition(self._options, partition) for partition in planned]

    def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        client, self._client, self._planner = self._client, None, None
        if client is not None:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(
        self, max_seqnos: int | None = None, until: Offsets | None = None, *, is_last: bool = False
    ) -> PlanOptions:
        return PlanOptions(
            max_seqnos=max_seqnos,
            until=until,
            on_rollback=self._options.on_rollback,
            persisted_only=self._options.persisted_only,
            on_purge=self._options.on_purge,
            is_last=is_last,
        )

    def _ready(self) -> Planner:
        if self._planner is None:
            options = self._options
            self._client = dcp_rs.connect(options.connection())
            self._planner = Planner(
                self._client,
                options.vbuckets,
                collections=options.collections,
                keys=options.keys,
                ops=options.ops,
                since=options.since,
            )
            if options.persisted_only and self._planner.is_ephemeral:
                warnings.warn(
                    f"bucket {options.bucket} has no disk: persistedOnly is off, and a "
                    "failover can take back rows that were read",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._planner

    @options_as_written()
    def _ask(self, doing: str, ask: Callable[[Planner], _Answer]) -> _Answer:
        try:
            return ask(self._ready())
        except (ConfigError, SparkReadError):
            raise
        except DcpError as error:
            raise coded(error, f"{doing} of bucket {self._options.bucket}") from error
