"""The command `dcp-rs`.

Results go to standard output: as tables on a terminal, as JSON lines elsewhere. Everything else
goes to standard error. The exit status is 0 if all went well, 1 if something failed, 2 if the
command line is wrong, and 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_REQUIRED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit status.

    Args:
        arguments: Words of the command line after the command's name; those of the process if
            not given.
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
    return _program.run(sys.argv[1:] if arguments is None else arguments)
