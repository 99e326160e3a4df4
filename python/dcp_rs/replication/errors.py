"""What a replication raises beside what a stream does."""

from __future__ import annotations

from dcp_rs.exceptions import DcpError


class ConcurrentWriterError(DcpError):
    """Another process writes to the same table. Nothing of this commit was written."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"another process writes to {table}, since its state is not the one of this process's "
            "last commit: let one of them write, and start it again"
        )
