"""`dcp-rs explain-rollback`: what a server answers to a resuming client, and why."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from dataclasses import asdict
from typing import Any

import click

from dcp_rs import debug
from dcp_rs.cli._options import output_options

_MAX = (1 << 64) - 1


def _number(text: str) -> int:
    if re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]+", text) is None:
        raise click.BadParameter(f"{text!r} is not a number, decimal or 0x…")
    number = int(text, 16 if text[:2] in {"0x", "0X"} else 10)
    if number > _MAX:
        raise click.BadParameter(f"{text} has more than 64 bits")
    return number


_number_option = functools.partial(click.option, type=_number, metavar="NUMBER")


def _log(text: str) -> list[tuple[int, int]]:
    entries = []
    for entry in text.split(","):
        vbuuid, colon, seqno = entry.strip().partition(":")
        if not colon:
            raise click.BadParameter(f"{entry!r} is not VBUUID:SEQNO")
        entries.append((_number(vbuuid), _number(seqno)))
    return entries


@click.command("explain-rollback")
@click.option(
    "--failover-log",
    metavar="VBUUID:SEQNO,...",
    type=_log,
    required=True,
    help="The server's failover log, newest entry first.",
)
@_number_option("--high-seqno", required=True, help="The vBucket's highest seqno.")
@_number_option(
    "--purge-seqno", default="0", help="Seqno up to which its deletions are purged (0)."
)
@_number_option(
    "--collections-high-seqno", help="Highest seqno of the collections in the client's filter."
)
@_number_option("--vbuuid", required=True, help="The client's branch.")
@_number_option("--start-seqno", required=True, help="Last seqno that the client has.")
@_number_option("--snapshot-start", help="Start of the client's snapshot (the start seqno).")
@_number_option("--snapshot-end", help="End of the client's snapshot (the start seqno).")
@_number_option("--end-seqno", default=str(_MAX), help="Last seqno requested (all).")
@_number_option("--client-purge-seqno", default="0", help="Purge seqno in the request (0).")
@click.option("--strict-vbuuid", is_flag=True, help="The request has this flag.")
@click.option("--ignore-purged-tombstones", is_flag=True, help="The request has this flag.")
@output_options
def explain_rollback(*, as_json: bool, **arguments: Any) -> None:
    """Explain why a server makes a client roll back.

    Prints what a server answers to a stream request, and why. All seqnos belong to one vBucket.
    Numbers are decimal, or hexadecimal with 0x.
    """
    for bound in ("snapshot_start", "snapshot_end"):
        if arguments[bound] is None:
            arguments[bound] = arguments["start_seqno"]
    answer = debug.explain_rollback(**arguments)
    if as_json:
        print(json.dumps(asdict(answer)))
    else:
        print(_table(arguments, answer))


def _table(arguments: dict[str, Any], answer: debug.RollbackExplanation) -> str:
    log = arguments["failover_log"]
    # Until where each branch was the vBucket's history: where the next newer one began.
    untils = [str(arguments["high_seqno"]), *(str(seqno) for _, seqno in log[:-1])]
    rows = [("", "branch", "from", "to")]
    for (vbuuid, seqno), until in zip(log, untils, strict=True):
        mark = "*" if vbuuid == arguments["vbuuid"] else ""
        rows.append((mark, f"{vbuuid:#x}", str(seqno), until))
    mark_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for mark, branch, *seqnos in rows:
        numbers = "  ".join(
            f"{seqno:>{width}}" for seqno, width in zip(seqnos, widths[1:], strict=True)
        )
        lines.append(f"{mark:{mark_width}} {branch:{widths[0]}}  {numbers}")
    client = (
        f"client  vbuuid {arguments['vbuuid']:#x}  start {arguments['start_seqno']}"
        f"  snapshot [{arguments['snapshot_start']}, {arguments['snapshot_end']}]"
    )
    lines += ["", client]
    answered = answer.status.upper() + ("" if answer.seqno is None else f" to {answer.seqno}")
    lines.append(f"answer  {answered}")
    lines += textwrap.wrap(
        answer.reason, 92, initial_indent="reason  ", subsequent_indent="        "
    )
    return "\n".join(lines)
