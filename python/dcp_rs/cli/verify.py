"""`dcp-rs verify`: compare tables with their bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dcp_rs import replication
from dcp_rs.cli._options import (
    command,
    connection_options,
    output_options,
    reading_options,
    specified,
    vbuckets_option,
)
from dcp_rs.cli._output import print_records
from dcp_rs.cli._rows import clear
from dcp_rs.cli.replicate import table_options
from dcp_rs.client import Client
from dcp_rs.replication.verification import DROPPED

if TYPE_CHECKING:
    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.replication import Difference, Verification

# Exit status if something differs, or could not be compared.
_DIFFERS = 3
_COUNTS = ("documents", "rows", "rejected", "missing", "extra", "older", "other", "later")
_EXAMPLE = ("kind", "key", "vbucket", "seqno", "bucket_seqno")


@command(
    epilog="""\b
TARGET is one of
  duckdb:///path?table=name
  postgresql://user@host/database?table=name
  ducklake+sqlite:///catalog.db?table=name
  delta:///folder
Without a table, all tables of the database or the folder are compared.
Exit status: 0 nothing differs, 3 something does or was not compared."""
)
@connection_options
@click.argument("target", metavar="TARGET")
@vbuckets_option
@click.option("--examples", type=int, metavar="N", help="Differences to show of each table (10).")
@click.option(
    "--repair",
    is_flag=True,
    help="Read the vBuckets that differ again, and compare once more. Pass the options that the"
    " table is replicated with.",
)
@reading_options(
    only=(
        "collections",
        "document_schema",
        "document_prefix",
        "on_malformed",
        "drop_fields",
        "hash_fields",
        "hash_key_env",
        "hash_key_file",
        "key_type",
    )
)
@table_options
@output_options
@click.pass_context
def verify(
    context: click.Context,
    /,
    connection: ConnectionOptions,
    target: str,
    reading: dict[str, Any],
    *,
    vbuckets: set[int] | None,
    examples: int | None,
    repair: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare tables with their bucket.

    Compares keys, versions and counts with what the bucket had at the table's position, while
    writes go on. In a pipe, prints a JSON document for each table, with examples of what differs.
    """
    chosen: dict[str, Any] = {"collections": reading.get("collections"), "vbuckets": vbuckets}
    chosen |= specified({"examples": examples})
    with Client(connection) as client:
        found = replication.verify(client, target, **chosen)
        if repair and found.reload:
            replication.replicate(
                client, target, once=True, reload=found.reload, **reading, **specified(settings)
            )
            found = replication.verify(client, target, **chosen)
    _print(found, as_json=as_json)
    if not found.is_equal:
        context.exit(_DIFFERS)


def _print(found: Verification, *, as_json: bool) -> None:
    records: list[dict[str, object]] = []
    examples: list[dict[str, object]] = []
    for name, table in found.tables.items():
        record: dict[str, object] = {"table": name, "collection": table.collection}
        record |= {count: getattr(table, count) for count in _COUNTS}
        record |= {"note": table.not_compared or (DROPPED if table.is_dropped else "")}
        if table.rolled_back and not table.not_compared:
            record["note"] = f"{len(table.rolled_back)} vBuckets are rolled back"
        own = [_example(each) for each in table.examples]
        examples += [{"table": name} | each for each in own]
        if as_json:
            record |= {
                "is_equal": table.is_equal,
                "vbuckets": list(table.vbuckets),
                "rolled_back": list(table.rolled_back),
                "examples": own,
            }
        records.append(record)
    print_records(["table", *_COUNTS, "note"], records, as_json=as_json)
    if examples and not as_json:
        print()
        print_records(["table", *_EXAMPLE], examples, as_json=False)


def _example(difference: Difference) -> dict[str, object]:
    found: dict[str, object] = {name: getattr(difference, name) for name in _EXAMPLE}
    return found | {"key": clear(difference.key)}
