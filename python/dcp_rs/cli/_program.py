"""The command line as a whole: its commands, its errors and its exit status."""

from __future__ import annotations

import difflib
import io
import os
import sys
from typing import TYPE_CHECKING

import click
from click import shell_completion

from dcp_rs import __version__
from dcp_rs.cli._examples import add_examples
from dcp_rs.cli._logs import LOGS
from dcp_rs.cli._options import PASSWORD_VARIABLE, call_options
from dcp_rs.cli.cat import cat, tail
from dcp_rs.cli.checkpoint import checkpoint
from dcp_rs.cli.decode import decode
from dcp_rs.cli.doctor import doctor
from dcp_rs.cli.explain_rollback import explain_rollback
from dcp_rs.cli.export import export
from dcp_rs.cli.replicate import replicate
from dcp_rs.cli.run import check
from dcp_rs.cli.run import run as run_file
from dcp_rs.cli.schema import schema
from dcp_rs.cli.seqnos import lag, seqnos
from dcp_rs.cli.serve import serve
from dcp_rs.cli.show import show
from dcp_rs.cli.top import top
from dcp_rs.cli.verify import verify
from dcp_rs.exceptions import ConfigError, DcpError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = "dcp-rs"
_COMPLETION = "_DCP_RS_COMPLETE"


class _Program(click.Group):
    """Suggests commands, and never repeats arguments, which may be secrets."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            close = difflib.get_close_matches(args[0], self.commands, 1)
            hint = f"did you mean {close[0]}?" if close else f"see {_NAME} --help"
            raise click.UsageError(f"no such command: {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 3 not found or not equal, 130 Ctrl-C,"
    " 143 SIGTERM.",
)
@click.version_option(__version__, prog_name=_NAME, message="%(prog)s %(version)s")
def _program() -> None:
    """Read Couchbase changes, and run an embedded cluster."""


@_program.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script.

    For bash: source <(dcp-rs completion bash)
    """
    found = shell_completion.get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"there is no completion for {shell}")
    print(found(_program, {}, _NAME, _COMPLETION).source())


_COMMANDS = (
    cat, tail, show, export, replicate, run_file, check, verify, schema, seqnos, lag, top, doctor,
    decode, explain_rollback, checkpoint, serve,
)  # fmt: skip
for _command in _COMMANDS:
    _program.add_command(_command)
add_examples(_NAME, _program.commands)


def run(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    instruction = os.environ.get(_COMPLETION)
    if instruction:
        return shell_completion.shell_complete(_program, {}, _NAME, _COMPLETION, instruction)
    _stand_in()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In any locale: tables are as readable as JSON, and never end in an encoding error.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        # Not with `Command.main`, which prints its own messages after Ctrl-C and a closed pipe.
        with _program.make_context(_NAME, list(arguments)) as context:
            _program.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except BaseException as error:  # noqa: BLE001 - what is not ours is raised again
        return _failed(error)
    finally:
        LOGS.end()
    return 0


def _stand_in() -> None:
    """Opens standard streams that the caller has closed, as with `2>&-`.

    What is printed to standard error is dropped; to standard output, it is an error: a checkpoint
    must not count rows that went nowhere.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _failed(error: BaseException) -> int:
    """Prints the error and returns the exit status."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return 130
    if isinstance(error, OSError):
        try:
            sys.stdout.flush()
        except OSError:
            # Python would report it again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # The reader closed the pipe.
        return 0
    if isinstance(error, click.UsageError):
        _refuse(error)
        return 2
    if isinstance(error, ConfigError):
        call_options(error, _COMMANDS)
    if isinstance(error, DcpError | ImportError | OSError | click.ClickException):
        LOGS.complain(str(error))
        return 1
    raise error


def _refuse(error: click.UsageError) -> None:
    """Reports an error in the command line, without arguments that may be secrets."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return
    if isinstance(error, click.BadParameter) and error.ctx is not None and error.param is not None:
        source = error.ctx.get_parameter_source(str(error.param.name))
        if source is click.core.ParameterSource.ENVIRONMENT:
            error.param_hint = f"{error.ctx.auto_envvar_prefix}_{str(error.param.name).upper()}"
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = _no_such_option(error)
    elif message.startswith("Got unexpected extra argument"):
        message = "too many arguments"
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
    print(f"{_NAME}: {message}", file=sys.stderr)


def _no_such_option(error: click.NoSuchOption) -> str:
    name = error.option_name.partition("=")[0]
    if name.startswith(("--pass", "-p")):
        return (
            "passwords are not accepted on the command line, which others can see: set"
            f" {PASSWORD_VARIABLE}, or use --password-env or --password-file"
        )
    # What click finds near may be only because both begin with dashes.
    near = {each.lstrip("-"): each for each in error.possibilities or ()}
    found = difflib.get_close_matches(name.lstrip("-"), near, 1)
    close = f"; did you mean {near[found[0]]}?" if found else ""
    return f"no such option: {name if name.startswith('--') else name[:2]}{close}"
