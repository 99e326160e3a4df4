"""The command `dcp-rs`.

Results go to standard output: as tables on a terminal, as JSON lines elsewhere. Everything else
goes to standard error. The exit status is 0 on success, 1 on failure, 2 if the command line is
wrong, 130 after Ctrl-C, and 143 after SIGTERM.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_REQUIRED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
        arguments: Arguments after the command's name; by default, those of the process.
    """
    try:
        try:
            for library in _REQUIRED:
                require("the command line", library, "cli")
        except (ConfigError, ImportError) as error:
            print(f"dcp-rs: {error}", file=sys.stderr)
            return 1
        from dcp_rs.cli import _program
    except KeyboardInterrupt:
        return 130
    return _program.run(sys.argv[1:] if arguments is None else arguments)
