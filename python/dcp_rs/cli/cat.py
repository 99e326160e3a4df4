"""`dcp-rs cat` and `dcp-rs tail`: print a bucket's changes as lines."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import click

from dcp_rs.cli._options import (
    command,
    connection_options,
    file_name,
    output_options,
    reading_options,
    resume_from,
    whole_number,
)
from dcp_rs.cli._output import sync, width, write
from dcp_rs.cli._rows import FormattedLines, JsonLines, Lines, TableLines
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import BatchPolicy
from dcp_rs.stores import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.stream import ChangeStream

_FOR_EYES = ["vbucket", "seqno", "op", "scope", "collection", "key", "value"]
_MOST_ROWS = 10_000


def _lines_of_changes(function: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        output_options,
        # Keys are bytes here; the formatters decide how to show them.
        reading_options(but=("key_type", "value_format")),
        click.option(
            "--checkpoint",
            metavar="FILE",
            type=file_name,
            help="Resume from the checkpoint in FILE, if it exists, and keep it up to date.",
        ),
        click.option(
            "-f", "--format", "form", metavar="FORMAT", type=FormattedLines,
            help="What to print for a change: %k key, %s value, %o seqno, %p vBucket,"
            " %c collection, %C scope, %O op, %T milliseconds since 1970, %K and %S lengths of key"
            " and value,"
            r" %{column}; \n, \t, \xFF.",
        ),
        click.option(
            "-n", "--limit", type=whole_number(0), metavar="N",
            help="Stop after N changes.",
        ),
        connection_options,
    ):  # fmt: skip
        function = decorate(function)
    return function


@command()
@_lines_of_changes
def cat(**options: Any) -> None:
    """Print a bucket's changes up to now.

    On a terminal, prints a table, cut to its width; elsewhere, JSON lines with complete changes.
    Saves a checkpoint after its changes are written, and synced if standard output is a file.
    """
    _print(until="now", default="earliest", **options)


@command()
@_lines_of_changes
def tail(**options: Any) -> None:
    """Print a bucket's changes as they come, from now on.

    Like cat, but starts at the latest change, unless --start or --checkpoint say otherwise, and
    does not end.
    """
    _print(until=None, default="latest", **options)


def _print(
    *,
    connection: ConnectionOptions,
    reading: dict[str, Any],
    form: FormattedLines | None,
    limit: int | None,
    checkpoint: str | None,
    as_json: bool,
    until: str | None,
    default: str,
) -> None:
    if form is not None and "columns" in reading:
        raise click.UsageError("--format and --columns: give one of them, --format names columns")
    if form is not None:
        # Even without columns there are rows.
        reading["columns"] = form.columns or ["seqno"]
    elif not as_json and "document_schema" not in reading:
        reading.setdefault("columns", _FOR_EYES)
    store = None if checkpoint is None else FileStore(checkpoint)
    reading.setdefault("start", default)
    if store is not None:
        resume_from(store, reading)
    if limit is not None:
        # A checkpoint never includes a part of a batch.
        rows = 1 if store is not None else max(1, min(limit, _MOST_ROWS))
        reading["batch"] = BatchPolicy(max_rows=rows)
    with Client(connection) as client, _opened(client, until, reading, form) as stream:
        lines = form or (
            JsonLines(stream.column_names) if as_json else TableLines(stream.column_names, width())
        )
        _copy(stream, lines, store, limit)


def _opened(
    client: Client, until: str | None, reading: dict[str, Any], form: FormattedLines | None
) -> ChangeStream:
    try:
        return client.stream(until=until, key_type="binary", **reading)  # type: ignore[arg-type]
    except ConfigError as error:
        if form is not None:
            # The format named the columns.
            error._rename({"columns": "format"})  # noqa: SLF001
        raise


def _copy(stream: ChangeStream, lines: Lines, store: FileStore | None, limit: int | None) -> None:
    is_kept_at_end = store is not None and limit is not None
    left = limit
    written = None
    try:
        for batch in stream if left != 0 else ():
            rows = itertools.islice(batch.tuples(), left)
            write(lines.of(rows), durably=store is not None and not is_kept_at_end)
            written = batch
            if store is not None and not is_kept_at_end:
                store.save(batch.checkpoint)
            if left is not None:
                left -= len(batch)
                if left <= 0:
                    break
    except BaseException:
        # What was written before Ctrl-C counts.
        if store is not None and is_kept_at_end and written is not None:
            sync()
            store.save(written.checkpoint)
        raise
    if store is not None and limit != 0:
        # Also past filtered-out changes after the last row.
        write((), durably=True)
        store.save(stream.checkpoint())
    if written is None and limit != 0 and sys.stderr.isatty():
        print("dcp-rs: 0 changes", file=sys.stderr)
