"""The command `dcp-rs`.

Results go to standard output, a line each; with `--json` each line is a JSON document. Everything
else goes to standard error. The exit status is 0 if all went well, 1 if something failed, 2 if the
command line is wrong, and 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dcp_rs import __version__
from dcp_rs.cli import cat, checkpoint, decode, explain_rollback, replicate, serve
from dcp_rs.cli._options import Parser
from dcp_rs.exceptions import DcpError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parser() -> Parser:
    parser = Parser(
        prog="dcp-rs", description="Read Couchbase changes, and run an embedded cluster."
    )
    parser.add_argument("--version", action="version", version=f"dcp-rs {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (cat, checkpoint, decode, explain_rollback, replicate, serve):
        command.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit status.

    Args:
        arguments: Words of the command line after the command's name; those of the process if
            not given.
    """
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DcpError, ImportError, OSError) as error:
        print(f"dcp-rs: {error}", file=sys.stderr)
        return 1
    return 0
