"""`dcp-rs checkpoint`: look at checkpoint files, and change them."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser("checkpoint", help="show, reset or copy a checkpoint")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the positions in a file")
    show.add_argument("file", metavar="FILE", help="file to read")
    show.set_defaults(run=_show)
    reset = actions.add_parser(
        "reset",
        help="forget positions, so that their vBuckets are read from the beginning",
        description="Forgets positions in a file: their vBuckets are read from the beginning."
        " The file stays one of its bucket and filter.",
    )
    reset.add_argument("file", metavar="FILE", help="file to change")
    reset.set_defaults(run=_reset)
    copy = actions.add_parser(
        "copy",
        help="copy a file, or some of its positions",
        description="Copies a checkpoint that is whole, atomically, to a file which only its owner"
        " may read.",
    )
    copy.add_argument("file", metavar="FROM", help="file to read")
    copy.add_argument("to", metavar="TO", help="file to write")
    copy.add_argument("--force", action="store_true", help="write over TO if there is such a file")
    copy.set_defaults(run=_copy)
    for action in (show, reset, copy):
        action.add_argument(
            "--vbuckets",
            metavar="LIST",
            type=_vbuckets,
            help="these only, as 0-63,70 (all)",
        )
        action.add_argument("--json", action="store_true", help="print JSON")


def _show(options: argparse.Namespace) -> None:
    checkpoint = Checkpoint.load(options.file)
    wanted = options.vbuckets
    positions = {
        vbucket: position
        for vbucket, position in checkpoint.positions.items()
        if wanted is None or vbucket in wanted
    }
    if options.json:
        found = {vbucket: asdict(position) for vbucket, position in positions.items()}
        made_with = None if checkpoint.filter is None else asdict(checkpoint.filter)
        head = {"bucket_uuid": checkpoint.bucket_uuid, "filter": made_with}
        print(json.dumps(head | {"positions": found}))
        return
    rows: list[tuple[str, ...]] = [
        ("vbucket", "seqno", "snapshot", "vbuuid", "epoch", "manifest", "purged")
    ]
    for vbucket, at in positions.items():
        snapshot = f"{at.snapshot_start}-{at.snapshot_end}"
        numbers = (vbucket, at.seqno, snapshot, f"{at.vbuuid:#x}", at.epoch)
        rows.append((*map(str, numbers), f"{at.manifest_uid:#x}", str(at.purge_seqno)))
    print(f"bucket {checkpoint.bucket_uuid}, {len(positions)} vBuckets")
    print(f"made with {checkpoint.filter or 'a filter of which only a hash was stored'}")
    if positions:
        print(_table(rows))


def _reset(options: argparse.Namespace) -> None:
    checkpoint = Checkpoint.load(options.file)
    known = set(checkpoint.positions)
    forgotten = known if options.vbuckets is None else known & options.vbuckets
    if options.vbuckets is not None and not forgotten:
        raise CheckpointError(
            f"{options.file} has no position of these vBuckets: see dcp-rs checkpoint show"
        )
    checkpoint.restricted_to(sorted(known - forgotten)).save(options.file)
    if options.json:
        print(json.dumps({"file": options.file, "reset": sorted(forgotten)}))
    else:
        left = len(known) - len(forgotten)
        print(f"{options.file}: reset {len(forgotten)} vBuckets, kept {left}")


def _copy(options: argparse.Namespace) -> None:
    if os.path.lexists(options.to) and not options.force:
        raise CheckpointError(f"{options.to} is there already: add --force to write over it")
    checkpoint = Checkpoint.load(options.file)
    if options.vbuckets is not None:
        checkpoint = checkpoint.restricted_to(sorted(options.vbuckets & set(checkpoint.positions)))
    checkpoint.save(options.to)
    if options.json:
        print(json.dumps({"file": options.to, "vbuckets": sorted(checkpoint.positions)}))
    else:
        print(f"{options.to}: {len(checkpoint)} vBuckets")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _vbuckets(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not int(first) <= int(last) <= 0xFFFF:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0-63,70")
        found.update(range(int(first), int(last) + 1))
    return found
