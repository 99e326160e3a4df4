"""`dcp-rs replicate`: keep a table in step with a bucket."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dcp_rs import replication
from dcp_rs.cli._connecting import connect_patiently
from dcp_rs.cli._logs import LOGS, log_options
from dcp_rs.cli._options import (
    command,
    connection_options,
    reading_options,
    specified,
    vbucket_set,
    words,
)
from dcp_rs.cli._output import Reporter
from dcp_rs.cli._systemd import Systemd
from dcp_rs.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.replication import Progress, TableProgress

# Arguments of the command that are none of `dcp_rs.replicate`, or are several of them.
_OF_COMMAND = {"connection", "reading", "log_format", "log_levels", "as_json"}
# Modules whose errors are reported without a traceback, or are bugs.
_SHOWN_AS_THEY_ARE = {"builtins", "click", "dcp_rs"}
# Tables that are named in a line of progress.
_BUSIEST = 3

_TABLE_OPTIONS = (
    click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _option, given: _to_mapping(given),
        help="An option of the object storage or the catalog, such as aws_region=eu-west-1; once"
        " for each. Keep secrets in the environment, where other users do not see them.",
    ),
    click.option(
        "--tables",
        metavar="TEMPLATE",
        help="A table for each collection: `collection` for {scope}__{collection}, or another"
        " template. TARGET then names no table.",
    ),
    click.option(
        "--on-drop",
        type=click.Choice(["empty", "drop", "keep"]),
        help="What becomes of the table of a dropped collection (empty).",
    ),
    click.option(
        "--sample",
        type=int,
        metavar="N",
        help="Documents of each collection from which --document-schema infer finds columns"
        " (1000).",
    ),
    click.option(
        "--new-fields",
        type=click.Choice(["evolve", "ignore", "reject"]),
        help="What to do with a field that is no column: add a column, leave it out, or reject the"
        " document (evolve if columns are inferred, or else ignore).",
    ),
    click.option(
        "--type-conflicts",
        type=click.Choice(["evolve", "null", "reject"]),
        help="What to do with a value that its column does not hold: widen the type, make it null,"
        " or reject the document (evolve if columns are inferred, or else null).",
    ),
    click.option(
        "--extra",
        type=click.Choice(["drop", "column"]),
        help="What to do with what no column holds: column keeps it as JSON in _extra (drop).",
    ),
    click.option(
        "--nested",
        type=click.Choice(["json", "struct", "columns"]),
        help="What an inferred schema makes of objects within documents (json: a column of text).",
    ),
    click.option(
        "--deletes",
        type=click.Choice(["remove", "mark"]),
        help="What becomes of the row of a removed document (remove).",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["reject", "fail"]),
        help="What to do with a change that the target cannot hold (reject: keep it in a table"
        " beside the target's).",
    ),
)


def table_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what the tables are, which a repair has to know too."""
    for option in reversed(_TABLE_OPTIONS):
        function = option(function)
    return function


_REPLICATION_OPTIONS = (
    connection_options,
    click.argument("target", metavar="TARGET"),
    click.option("--once", is_flag=True, help="Stop after the changes that the bucket has now."),
    click.option(
        "--share",
        metavar="K/N",
        help="Replicate share K of N of the vBuckets, from 1, while other processes do the others."
        " Only to PostgreSQL.",
    ),
    click.option(
        "--reload",
        metavar="LIST",
        help="Read these vBuckets, such as 0-63,70, or these collections again from the beginning.",
    ),
    click.option(
        "--mode", type=click.Choice(["table", "log", "history"]), help="Kind of the target (table)."
    ),
    reading_options(
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
            "persisted_only",
            "on_purge",
            "priority",
            "backfill_order",
        )
    ),
    table_options,
    click.option("--commit-rows", type=int, metavar="N", help="Commit after N changes."),
    click.option("--commit-bytes", type=int, metavar="N", help="Commit after N bytes."),
    click.option(
        "--commit-interval",
        type=float,
        metavar="SECONDS",
        help="Commit after SECONDS at the latest.",
    ),
    click.option(
        "--target-retry-timeout",
        type=float,
        metavar="SECONDS",
        help="Try again for SECONDS while the target is unavailable (0).",
    ),
    click.option(
        "--compact-every",
        type=float,
        metavar="SECONDS",
        help="Merge small files of Delta or DuckLake every SECONDS; with --once, at the end.",
    ),
    click.option(
        "--keep-versions-for",
        type=float,
        metavar="SECONDS",
        help="Then remove files of versions that are older than SECONDS.",
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        help="Answer /livez, /readyz, /status and /metrics there, such as 127.0.0.1:9108.",
    ),
    click.option(
        "--hung-after",
        type=float,
        metavar="SECONDS",
        help="Let /livez fail if a commit has run for SECONDS (300).",
    ),
    log_options,
    click.option("--json", "as_json", is_flag=True, help="Print progress and logs as JSON lines."),
)


def replication_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all options of a replication, which a pipeline file has as well."""
    for option in reversed(_REPLICATION_OPTIONS):
        function = option(function)
    return function


@command(
    epilog="""\b
TARGET is one of
  duckdb:///path?table=name
  postgresql://user@host/database?table=name
  ducklake+sqlite:///catalog.db?data=/folder&table=name
  delta:///folder
  parquet:///folder                        for --mode log
  iceberg:///folder?table=namespace.name   for --mode log"""
)
@replication_options
def replicate(**given: Any) -> None:
    """Keep a table in step with a bucket.

    Writes a bucket's documents to a table, or its changes to a log, and resumes from the state in
    the target. Runs until SIGINT or SIGTERM, then commits what was read and exits with status 0.
    Progress goes to standard error, with --json or --log-format json as JSON lines, of which those
    with a "level" are logs and errors.
    """
    replicating(**given)


def replicating(
    connection: ConnectionOptions,
    target: str,
    reading: dict[str, Any],
    *,
    reload: str | None,
    log_format: str | None,
    log_levels: Sequence[tuple[str, int]],
    as_json: bool,
    stop: threading.Event | None = None,
    waits: bool = False,
    **settings: Any,
) -> None:
    """Replicates until a signal comes, and shows progress on standard error.

    With `waits`, a cluster that cannot be reached at the start is waited for.
    """
    over = threading.Event() if stop is None else stop

    systemd = Systemd(settings["listen"])

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        over.set()
        systemd.stopping()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    # Lines of both kinds in one log are no lines of JSON.
    as_json = as_json or log_format == "json"
    LOGS.begin(as_json=as_json, levels=log_levels)
    reporter = Reporter(in_place=not as_json)
    show = _as_json if as_json else Line()

    def take(progress: Progress) -> None:
        if reporter.is_due():
            systemd.take(progress)
            reporter.show(show(progress))

    try:
        if waits:
            connected = connect_patiently(connection, over, settings["listen"])
            if connected is None:
                return
        else:
            connected = Client(connection)
        with connected as client, systemd:
            LOGS.context["bucket"] = client.bucket_name
            if settings["share"] is not None:
                LOGS.context["share"] = settings["share"]
            given = arguments_of(
                {"target": target, "reload": reload, "reading": reading, **settings}
            )
            done = replication.replicate(client, stop=over, on_progress=take, **given)
        reporter.finish(show(done))
    except Exception as error:
        # A target raises its library's errors: of various classes, or a plain `Exception`.
        origin = type(error).__module__.partition(".")[0]
        if origin in _SHOWN_AS_THEY_ARE and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())
        raise click.ClickException(f"the target failed: {reason}") from error
    finally:
        reporter.close()


def arguments_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `dcp_rs.replicate` that those of the command stand for."""
    options = {name: value for name, value in given.items() if name not in _OF_COMMAND}
    found = specified(given["reading"] | options)
    if "reload" in found:
        found["reload"] = _to_reload(found["reload"])
    return found


def _to_mapping(given: tuple[str, ...]) -> dict[str, str] | None:
    """Parses options of a storage; `None` if there are none."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise click.BadParameter("write KEY=VALUE")  # The text may be a secret.
        found[name] = value
    return found or None


def _to_reload(text: str) -> set[int] | dict[str, None]:
    """Parses vBuckets, or names of collections."""
    if set(text) <= set("0123456789-, "):
        return vbucket_set(text)
    return dict.fromkeys(words(text))


class Line:
    """Shows progress as a line, which names the tables that were busiest since the line before."""

    def __init__(self) -> None:
        self._before: Mapping[str, TableProgress] = {}

    def __call__(self, progress: Progress) -> str:
        """Returns the line."""
        parts = [
            *([] if progress.share is None else [f"share {progress.share}"]),
            f"{progress.phase}: generation {progress.generation}",
            f"{_counted(progress.changes, 'change')} in {_counted(progress.commits, 'commit')}",
        ]
        if progress.uncommitted:
            parts.append(f"{progress.uncommitted:,} not yet committed")
        is_done = progress.phase == "done"
        if not is_done:
            parts += [
                f"{progress.changes_per_second:.0f}/s",
                "lag unknown" if progress.lag is None else f"{progress.lag} behind",
            ]
            if progress.lag_seconds is not None and progress.lag_seconds >= 1:
                parts.append(f"oldest {progress.lag_seconds:.0f} s")
            is_away = progress.phase == "target unavailable"
            if progress.seconds_left is not None and progress.lag and not is_away:
                parts.append(f"{progress.seconds_left:.0f} s left")
        parts += [f"{progress.malformed} malformed"] if progress.malformed else []
        parts += [f"{progress.rejected} rejected"] if progress.rejected else []
        parts += [_by_table(progress.tables, {} if is_done else self._before)] * bool(
            progress.tables
        )
        self._before = progress.tables
        return f"dcp-rs: {', '.join(parts)}"


def _by_table(tables: Mapping[str, TableProgress], before: Mapping[str, TableProgress]) -> str:
    """Returns the changes of the busiest tables, and those of the others together."""
    changes = {
        name: table.changes - (before[name].changes if name in before else 0)
        for name, table in tables.items()
    }
    busy = sorted((name for name in changes if changes[name]), key=lambda name: -changes[name])
    shown = [f"{name} +{changes[name]:,}" for name in busy[:_BUSIEST]]
    rest = len(busy) - len(shown)
    if rest:
        shown.append(f"{rest:,} more +{sum(changes[name] for name in busy[_BUSIEST:]):,}")
    told = f": {', '.join(shown)}" if shown else ""
    return f"{_counted(len(tables), 'table')}{told}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _as_json(progress: Progress) -> str:
    return json.dumps(asdict(progress) | {"seconds_left": progress.seconds_left})
