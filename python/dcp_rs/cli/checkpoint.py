"""`dcp-rs checkpoint`: what a checkpoint says."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dcp_rs.checkpoint import Checkpoint

if TYPE_CHECKING:
    import argparse


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser("checkpoint", help="show a checkpoint")
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the positions in a file")
    show.add_argument("file", metavar="FILE", help="file to read")
    show.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    checkpoint = Checkpoint.load(options.file)
    positions = checkpoint.positions
    if options.json:
        found = {vbucket: asdict(position) for vbucket, position in positions.items()}
        print(json.dumps({"bucket_uuid": checkpoint.bucket_uuid, "positions": found}))
        return
    print(f"bucket_uuid={checkpoint.bucket_uuid} vbuckets={len(positions)}")
    for vbucket, position in positions.items():
        print(
            f"vb={vbucket} seqno={position.seqno} "
            f"snapshot=[{position.snapshot_start},{position.snapshot_end}] "
            f"vbuuid={position.vbuuid:#x} epoch={position.epoch}"
        )
