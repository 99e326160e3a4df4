"""`dcp-rs explain-rollback`: what a server answers to a client that wants to go on, and why."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from dataclasses import asdict
from typing import Any

from dcp_rs.debug import RollbackExplanation, explain_rollback

_MAX = (1 << 64) - 1


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "explain-rollback",
        help="say why a server makes a client roll back",
        description="Says what a server answers to a stream request, and why. All seqnos are of"
        " one vBucket; numbers are decimal, or hexadecimal with 0x.",
    )
    required = parser.add_argument_group("the vBucket")
    required.add_argument(
        "--failover-log",
        metavar="VBUUID:SEQNO",
        type=_entry,
        nargs="+",
        required=True,
        help="the server's failover log, newest entry first",
    )
    required.add_argument("--high-seqno", type=_number, required=True, help="its highest seqno")
    required.add_argument(
        "--purge-seqno", type=_number, default=0, help="deletions are purged up to it (0)"
    )
    required.add_argument(
        "--collections-high-seqno",
        type=_number,
        help="highest seqno of the collections the client filters on",
    )
    request = parser.add_argument_group("the request")
    request.add_argument("--vbuuid", type=_number, required=True, help="the client's branch")
    request.add_argument(
        "--start-seqno", type=_number, required=True, help="last seqno the client has"
    )
    request.add_argument(
        "--snapshot-start", type=_number, help="start of its snapshot (the start seqno)"
    )
    request.add_argument(
        "--snapshot-end", type=_number, help="end of its snapshot (the start seqno)"
    )
    request.add_argument("--end-seqno", type=_number, default=_MAX, help="last seqno wanted (all)")
    request.add_argument(
        "--client-purge-seqno", type=_number, default=0, help="purge seqno it names (0)"
    )
    request.add_argument("--strict-vbuuid", action="store_true", help="has that flag")
    request.add_argument("--ignore-purged-tombstones", action="store_true", help="has that flag")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    arguments = {
        name: value for name, value in vars(options).items() if name not in {"run", "json"}
    }
    for bound in ("snapshot_start", "snapshot_end"):
        if arguments[bound] is None:
            arguments[bound] = options.start_seqno
    answer = explain_rollback(**arguments)
    if options.json:
        print(json.dumps(asdict(answer)))
    else:
        print(_table(arguments, answer))


def _table(arguments: dict[str, Any], answer: RollbackExplanation) -> str:
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


def _number(text: str) -> int:
    if re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, decimal or 0x…")
    number = int(text, 16 if text[:2] in {"0x", "0X"} else 10)
    if number > _MAX:
        raise argparse.ArgumentTypeError(f"{text} has more than 64 bits")
    return number


def _entry(text: str) -> tuple[int, int]:
    vbuuid, colon, seqno = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not VBUUID:SEQNO")
    return _number(vbuuid), _number(seqno)
