"""Examples of each command, which its help shows last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click

_CLUSTER = "couchbase://cb/travel"
# By the name of a command.
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "cat": (
        _CLUSTER,
        f"{_CLUSTER} --username reader --keys 'order::*' --json",
    ),
    "tail": (
        f"{_CLUSTER} --format '%k %s\\n'",
        f"{_CLUSTER} --checkpoint positions.json",
    ),
    "show": (
        f"{_CLUSTER} --vbucket 49 --seqno 685",
        f"{_CLUSTER} --vbucket 49 --seqno 685 --json",
    ),
    "export": (
        f"{_CLUSTER} travel.parquet --username reader",
        f"{_CLUSTER} out.csv --document-schema 'name STRING'",
    ),
    "replicate": (
        f"{_CLUSTER} duckdb:///t.db --tables collection",
        f"{_CLUSTER} 'postgresql://db/lake?table=t' --once",
    ),
    "run": (
        "pipeline.toml",
        "pipeline.toml --once --json",
    ),
    "check": (
        "pipeline.toml",
        "--schema > pipeline.schema.json",
    ),
    "verify": (
        f"{_CLUSTER} duckdb:///data/travel.duckdb",
        f"{_CLUSTER} delta:///lake/hotels --repair",
    ),
    "schema": (
        _CLUSTER,
        f"{_CLUSTER} --collections 'inventory.*' --examples",
    ),
    "seqnos": (
        _CLUSTER,
        f"{_CLUSTER} --vbuckets 0-63 --json",
    ),
    "lag": (
        f"{_CLUSTER} --checkpoint positions.json",
        f"{_CLUSTER} --metrics http://localhost:9108/metrics",
    ),
    "top": (
        _CLUSTER,
        f"{_CLUSTER} --checkpoint positions.json --once",
    ),
    "doctor": (
        _CLUSTER,
        f"{_CLUSTER} --network external --json",
    ),
    "decode": (
        "packets.hex",
        "packets.bin --json",
    ),
    "explain-rollback": (
        "--failover-log 2:9,1:0 --vbuuid 1 \\\n      --start-seqno 10 --high-seqno 12",
        "--failover-log 1:0 --vbuuid 1 \\\n      --start-seqno 7 --high-seqno 9",
    ),
    "checkpoint show": (
        "positions.json",
        "positions.json --vbuckets 0-63 --json",
    ),
    "checkpoint reset": (
        "positions.json --vbuckets 0-63",
        "positions.json",
    ),
    "checkpoint copy": (
        "positions.json backup.json",
        "positions.json part.json --vbuckets 0-63",
    ),
    "checkpoint import": (
        "--from go-dcp checkpoints.json positions.json",
        (
            "--from kafka-connect offsets.json out.json \\\n"
            "      --bucket-uuid 897ccfc617e5749754487a62f738e285"
        ),
    ),
    "serve": (
        "--port 11210",
        "--bucket travel --nodes 2 --json",
    ),
    "completion": (
        "bash",
        "zsh",
    ),
}


def add_examples(program: str, commands: Mapping[str, click.Command]) -> None:
    """Adds its examples to the help of each command."""
    for name, command in commands.items():
        if name in _EXAMPLES:
            lines = [f"  {program} {name} {arguments}" for arguments in _EXAMPLES[name]]
            shown = "\n".join(["\b", "Examples:", *lines])
            command.epilog = f"{command.epilog}\n\n{shown}" if command.epilog else shown
        of_group = getattr(command, "commands", {})
        add_examples(program, {f"{name} {each}": found for each, found in of_group.items()})
