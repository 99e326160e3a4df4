"""`dcp-rs show`: print one change, by its vBucket and seqno."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from dcp_rs import _checks
from dcp_rs.cli._options import (
    command,
    connection_options,
    output_options,
    reading_options,
    whole_number,
)
from dcp_rs.cli._output import write
from dcp_rs.cli._rows import FieldLines, JsonLines
from dcp_rs.client import Client
from dcp_rs.exceptions import DataError

if TYPE_CHECKING:
    from dcp_rs.connection import ConnectionOptions

    Row = tuple[object, ...]

_GONE = 3
"""Exit status if no change has the seqno any more."""


@command()
@connection_options
@click.option("--vbucket", type=whole_number(0), metavar="N", required=True, help="The vBucket.")
@click.option("--seqno", type=whole_number(1), metavar="N", required=True, help="The seqno.")
@reading_options(only=("collections",))
@output_options
@click.pass_context
def show(
    context: click.Context,
    connection: ConnectionOptions,
    vbucket: int,
    seqno: int,
    reading: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print one change, by its vBucket and seqno.

    Errors and logs name a change so, without its key. A document that was written again or removed
    has another seqno: then nothing is printed, and the exit status is 3.
    """
    reading |= {
        "vbuckets": [vbucket],
        "columns": "full",
        "key_type": "binary",
        "include": ["xattrs", "system_events", "system_documents"],
    }
    with Client(connection) as client:
        _checks.existing("vbucket", [vbucket], client.num_vbuckets)
        high = client.high_seqnos()[vbucket]
        if seqno > high:
            raise DataError(f"vBucket {vbucket} has no seqno {seqno} yet: its highest is {high}")
        names, row = _read(client, vbucket, seqno, reading)
    if row is None:
        print(
            f"dcp-rs: rewritten or removed since: no change of vBucket {vbucket} has seqno {seqno}"
            " any more",
            file=sys.stderr,
        )
        context.exit(_GONE)
    lines = JsonLines(names) if as_json else FieldLines(names)
    write(lines.of([row]))


def _read(
    client: Client, vbucket: int, seqno: int, reading: dict[str, Any]
) -> tuple[list[str], Row | None]:
    """Returns the names of the columns, and the change with a seqno, if there is one."""
    # Only a stream knows the history branches of the vBucket, which a start needs.
    with client.stream(start="latest", **reading) as stream:
        latest = stream.checkpoint()
    start = latest._rewound_to(vbucket, seqno - 1)  # noqa: SLF001 - of this package
    with client.stream(
        start=start,
        until={vbucket: seqno},
        # What was purged is not looked for, and must not make the server start over.
        on_purge="ignore",
        **reading,
    ) as stream:
        names = list(stream.column_names)
        seqno_at, op_at = names.index("seqno"), names.index("op")
        for batch in stream:
            for row in batch.tuples():
                if row[seqno_at] == seqno and row[op_at] != "rollback":
                    return names, row
    return names, None
