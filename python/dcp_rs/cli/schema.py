"""`dcp-rs schema`: the schemas of a bucket's documents."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dcp_rs import replication
from dcp_rs.cli._options import (
    command,
    connection_options,
    output_options,
    reading_options,
    specified,
)
from dcp_rs.cli._output import print_records
from dcp_rs.cli._rows import clear
from dcp_rs.client import Client

if TYPE_CHECKING:
    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.replication import InferredSchema


@command()
@connection_options
@reading_options(only=("collections", "drop_fields", "hash_fields"))
@click.option("--sample", type=int, metavar="N", help="Read N documents of each collection (1000).")
@click.option(
    "--nested",
    type=click.Choice(["json", "struct"]),
    help="What becomes of objects within documents (json: a column of text).",
)
@click.option("--examples", is_flag=True, help="Show a value of each field.")
@output_options
def schema(
    connection: ConnectionOptions,
    reading: dict[str, Any],
    *,
    examples: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Show the schema of each collection's documents, as --document-schema takes it.

    Reads some documents of each, and shows how many of them have each field.
    """
    with Client(connection) as client:
        found = replication.infer_schemas(
            client, examples=examples, **reading, **specified(settings)
        )
    if as_json:
        records = ({"collection": name} | asdict(each) for name, each in found.items())
        print_records([], records, as_json=True)
        return
    columns = ["field", "type", "share", *(["example"] if examples else [])]
    for place, (name, each) in enumerate(found.items()):
        print("\n" * bool(place) + _heading(name, each))
        if each.fields:
            print_records(columns, _records(each), as_json=False)


def _heading(name: str, found: InferredSchema) -> str:
    lines = [f"{name}: {found.documents:,} document{'' if found.documents == 1 else 's'}"]
    if found.document_schema is not None:
        prefix = f" --document-prefix {found.prefix}" if found.prefix else ""
        lines.append(f"--document-schema '{_quoted(found.document_schema)}'{prefix}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # Within single quotes of a shell.
    return clear(text).replace("'", "'\\''")


def _records(found: InferredSchema) -> list[dict[str, object]]:
    return [
        {
            "field": clear(".".join(each.path)),
            "type": each.type,
            "share": f"{each.share:.0%}",
            "example": None if each.example is None else clear(each.example),
        }
        for each in found.fields
    ]
