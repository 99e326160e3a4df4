"""When the files of tables are compacted, and those of old versions removed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from dcp_rs import _checks
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dcp_rs.replication.health import Health
    from dcp_rs.replication.table import Table
    from dcp_rs.replication.target import Database, Maintained, Target

_log = logging.getLogger("dcp_rs.replication")

_HOUR = 3600.0
_YEAR = 365 * 86_400.0
# Characters of an error's text that are logged.
_LENGTH = 300


class Policy(NamedTuple):
    """What is asked for.

    Attributes:
        every: Seconds between compactions of a table.
        keep: Seconds for which old versions stay readable; `None` to remove nothing.
    """

    every: float
    keep: float | None

    @classmethod
    def of(cls, compact_every: float | None, keep_versions_for: float | None) -> Policy | None:
        """Checks the options of `dcp_rs.replicate`.

        Raises:
            ConfigError: One is out of range, or lacks the other.
        """
        if keep_versions_for is not None:
            _checks.seconds("keep_versions_for", keep_versions_for, _HOUR, 100 * _YEAR)
            if compact_every is None:
                raise ConfigError(
                    "old versions are removed after files were compacted: set compact_every",
                    option="keep_versions_for",
                )
        if compact_every is None:
            return None
        _checks.seconds("compact_every", compact_every, 1.0, _YEAR)
        return cls(compact_every, keep_versions_for)

    def check(self, target: Target | Database) -> None:
        """Checks that a target's files can be compacted.

        Raises:
            ConfigError: They cannot.
        """
        if not getattr(target, "compacts", False):
            raise ConfigError(
                "only Delta tables and DuckLakes are compacted by dcp_rs: leave it out, and use the"
                " tools of the target",
                option="compact_every",
            )


class Maintenance:
    """Compacts tables, each in turn, between commits.

    Args:
        policy: What is asked for.
        health: What is told that it takes long.
    """

    def __init__(self, policy: Policy, health: Health) -> None:
        self._policy = policy
        self._health = health
        self._next = time.monotonic() + policy.every
        self._left: list[Table] = []

    def turn(self, tables: Callable[[], list[Table]]) -> None:
        """Compacts one table, if it is time to: the others are read meanwhile, but not committed.

        Args:
            tables: Returns those that are in step, of which each gets its turn.
        """
        if not self._left and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._policy.every
            self._left = tables()
        if self._left:
            self._maintain(self._left.pop())

    def forget(self) -> None:
        """Forgets whose turn it is, as tables were opened again."""
        self._left = []

    def end(self, tables: Iterable[Table]) -> None:
        """Compacts tables that nothing is written to any more."""
        for table in tables:
            self._maintain(table)

    def _maintain(self, table: Table) -> None:
        begun, name = time.monotonic(), table.collection
        called = "the table" if name is None else f"the table of {name}"
        try:
            with self._health.waiting():
                done: Maintained | None = table.target.maintain(self._policy.keep)  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - rows are as they were, and it is tried again
            text = " ".join(str(error).split())[:_LENGTH]
            _log.warning(
                "%s was not compacted, and is tried again in %.0f s: %s",
                called,
                self._policy.every,
                text,
                extra=about("compaction_failed", collection=name, error=text),
            )
            return
        if done is not None and any(done):
            _log.info(
                "%s: %d files became %d, and %d of old versions were removed",
                called,
                done.compacted,
                done.made,
                done.removed,
                extra=about(
                    "compacted",
                    collection=name,
                    files=done.compacted,
                    made=done.made,
                    removed=done.removed,
                    seconds=time.monotonic() - begun,
                ),
            )
