"""Options that can change while a replication runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.names import is_pattern, matches, qualified

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CHANGEABLE = ("collections", "commit_rows", "commit_bytes", "commit_interval", "hung_after")
"""Options of `dcp_rs.replicate` that can change."""

# In seconds.
_DAY = 86_400.0


class Controls(threading.Event):
    """Stops a replication, as the argument `stop`, and may change its options while it runs."""

    def turn(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        """Is called by the thread that replicates, whenever nothing is half done.

        Args:
            change: Changes some of the options `CHANGEABLE`. Raises a `ConfigError` if one is
                wrong, and another `DcpError` if the cluster cannot be asked; nothing has changed
                then.
        """


def check_commits(*, rows: int, size: int, interval: float, hung_after: float) -> None:
    """Checks the options that say when to commit, and for how long.

    Raises:
        ConfigError: One is wrong.
    """
    _checks.integer("commit_rows", rows, 1, 10_000_000)
    _checks.integer("commit_bytes", size, 1 << 16, 1 << 30)
    _checks.seconds("commit_interval", interval, 0.001, _DAY)
    _checks.seconds("hung_after", hung_after, 1, _DAY)


def check_adds(before: Sequence[str] | None, after: Sequence[str] | None) -> None:
    """Checks that a choice of collections has all that another has.

    Raises:
        ConfigError: It lacks one.
    """
    if after is None:
        return
    # All of them is no pattern: those of the scope `_system` are not among them.
    lacking = ["all collections"] if before is None else _lacking(before, after)
    if lacking:
        raise ConfigError(
            f"can only be added to while it runs, and lacks {', '.join(lacking)}: start it again",
            option="collections",
        )


def _lacking(before: Sequence[str], after: Sequence[str]) -> list[str]:
    patterns = [qualified(each) for each in after]
    return [
        name
        for name in before
        if qualified(name) not in patterns
        and (is_pattern(name) or not any(matches(each, qualified(name)) for each in patterns))
    ]
