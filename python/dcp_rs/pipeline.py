"""A replication that a file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dcp_rs._libraries import require
from dcp_rs.client import Client

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable

    from dcp_rs.replication import Progress


class Pipeline:
    """A replication that a file describes, as `dcp-rs run` runs it.

    The file is TOML with the options of `dcp_rs.replicate`, and in the table `connection` those of
    `dcp_rs.ConnectionOptions`. Make one with `from_file`; it needs `pip install "dcp-rs[cli]"`.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a pipeline file.

        Variables such as `DCP_RS_COMMIT_INTERVAL` win over what it has.

        Args:
            path: The file.

        Raises:
            ConfigError: It cannot be read, a key or a value is wrong, or a variable is not set.
            ImportError: The libraries of the command line are not installed.
        """
        for library in ("click", "rich"):
            require("a pipeline file", library, "cli")
        from dcp_rs.cli._pipeline import given_in

        return cls(given_in(Path(path)))

    def run(
        self,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Progress:
        """Keeps the tables in step until it is stopped, as `dcp_rs.replicate` does.

        Args:
            stop: Event that stops it.
            on_progress: Function that is called with the progress.

        Raises:
            DcpError: As `dcp_rs.replicate`.
        """
        from dcp_rs.cli.replicate import arguments_of
        from dcp_rs.replication import replicate

        with Client(self._given["connection"]) as client:
            return replicate(
                client, stop=stop, on_progress=on_progress, **arguments_of(self._given)
            )

    def __repr__(self) -> str:
        """Returns the pipeline without its target, which may have a password."""
        return f"Pipeline(bucket={self._given['connection'].bucket!r})"
