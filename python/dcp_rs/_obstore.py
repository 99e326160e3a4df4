"""What all users of obstore in a process have in common."""

from __future__ import annotations

import os

from dcp_rs.exceptions import ForkedProcessError

# The process that has called obstore, whose threads a fork does not copy.
_used_in: int | None = None


def use() -> None:
    """Notes that this process uses obstore.

    Raises:
        ForkedProcessError: It was used before a fork, and would hang.
    """
    global _used_in  # noqa: PLW0603 - the state of the process is what it is about
    if _used_in is not None and _used_in != os.getpid():
        raise ForkedProcessError(
            f"process {_used_in} used obstore before the fork, after which it never answers: "
            "start children with the method spawn of multiprocessing"
        )
    _used_in = os.getpid()
