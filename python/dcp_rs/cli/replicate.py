"""`dcp-rs replicate`: a table that is kept in step with a bucket."""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dcp_rs.cli._connection import add_connection, connected, given, words
from dcp_rs.documents import DocumentSchema
from dcp_rs.replication import replicate

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from dcp_rs.replication import Progress

_SETTINGS = (
    "mode",
    "scope",
    "collections",
    "commit_rows",
    "commit_bytes",
    "commit_interval",
    "retry_timeout",
)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "replicate",
        help="keep a table in step with a bucket",
        description="Writes a bucket's documents to a table, or its changes to a log, and goes on"
        " from what is there. Runs until SIGINT or SIGTERM, and then commits what was read and"
        " exits with status 0. Prints its progress to standard error.",
    )
    add_connection(parser)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="duckdb:///path?table=name, postgresql://user@host/database?table=name,"
        " delta:///folder; for logs only parquet:///folder, iceberg:///folder?table=namespace.name",
    )
    parser.add_argument("--once", action="store_true", help="stop with the changes there are now")
    parser.add_argument("--mode", choices=["table", "log"], help="what the target is (table)")
    parser.add_argument("--scope", help="scope to read")
    parser.add_argument(
        "--collections", type=words, help="collections to read, with commas between"
    )
    parser.add_argument(
        "--document-schema",
        metavar="COLUMNS",
        help='columns to decode documents to, as "name STRING, n BIGINT"',
    )
    parser.add_argument("--document-prefix", metavar="TEXT", help="what their names begin with")
    parser.add_argument(
        "--persisted-only", action="store_true", help="write only what every copy has on disk"
    )
    parser.add_argument("--commit-rows", metavar="N", type=int, help="commit after N changes")
    parser.add_argument("--commit-bytes", metavar="N", type=int, help="commit after N bytes")
    parser.add_argument(
        "--commit-interval", metavar="SECONDS", type=float, help="commit after SECONDS"
    )
    parser.add_argument(
        "--retry-timeout",
        metavar="SECONDS",
        type=float,
        help="longest time for which the cluster may be away",
    )
    parser.add_argument("--json", action="store_true", help="print progress as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    schema = options.document_schema
    if schema is not None:
        schema = DocumentSchema(schema, prefix=options.document_prefix or "")
    report = _Report(as_json=options.json)
    with connected(options) as client:
        done = replicate(
            client,
            options.target,
            once=options.once,
            document_schema=schema,
            persisted_only=options.persisted_only,
            stop=stop,
            on_progress=report.take,
            **given(options, _SETTINGS),
        )
    report.finish(done)


class _Report:
    """Prints progress, about once a second."""

    def __init__(self, *, as_json: bool) -> None:
        self._show = _as_json if as_json else _as_line
        self._last = 0.0

    def take(self, progress: Progress) -> None:
        """Prints what there is, if it is time."""
        if progress.elapsed - self._last >= 1.0:
            self.finish(progress)

    def finish(self, progress: Progress) -> None:
        """Prints what there is."""
        self._last = progress.elapsed
        print(self._show(progress), file=sys.stderr, flush=True)


def _as_line(progress: Progress) -> str:
    parts = [
        f"{progress.phase} generation {progress.generation}",
        f"{progress.changes} changes in {progress.commits} commits",
        f"{progress.changes_per_second:.0f}/s",
        f"{progress.lag} behind",
    ]
    if progress.seconds_left is not None and progress.lag:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return f"dcp-rs: {', '.join(parts)}"


def _as_json(progress: Progress) -> str:
    return json.dumps(asdict(progress) | {"seconds_left": progress.seconds_left})
