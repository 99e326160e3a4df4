"""The command `dcp-rs`.

Results go to standard output: as tables on a terminal, as JSON lines elsewhere. Everything else
goes to standard error. The exit status is 0 on success, 1 on failure, 2 if the command line is
wrong, 130 after Ctrl-C, and 143 after SIGTERM.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_REQUIRED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
        arguments: Arguments after the command's name; by default, those of the process.
    """
    try:
        import click  # noqa: F401 - only whether it is there
        import rich  # noqa: F401

        from dcp_rs.cli import _program
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        print(
            f"dcp-rs: {error.name} is not installed, which the command line needs:"
            ' pip install "dcp-rs[cli]"',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return _program.run(sys.argv[1:] if arguments is None else arguments)
