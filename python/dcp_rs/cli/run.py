"""`dcp-rs run` and `dcp-rs check`: a replication that a file describes."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import click

from dcp_rs._listener import check_address, check_listen
from dcp_rs.cli._output import write
from dcp_rs.cli._pipeline import called_as_in, file_command, merged, schema
from dcp_rs.cli._reload import Reload
from dcp_rs.cli._targets import look, scheme_of
from dcp_rs.cli.doctor import Finding, findings, shown
from dcp_rs.cli.replicate import arguments_of, replicating
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.replication.heap import share_heap

if TYPE_CHECKING:
    from collections.abc import Iterator

# Collections that are named.
_SHOWN = 10

_EPILOG = """\b
FILE is TOML with the options of `dcp-rs replicate`, whose names have _ for -:
  target = "duckdb:///data/lake.duckdb"
  tables = "collection"
  [connection]
  connection_string = "couchbases://cb.example.org/travel"
  username = "reader"
  password = "${PASSWORD}"

Options win over variables such as DCP_RS_COMMIT_INTERVAL, and those over FILE."""


@file_command(epilog=_EPILOG)
def run(context: click.Context, **_: Any) -> None:
    """Keep tables in step with a bucket, as a file says.

    As `dcp-rs replicate`, with the options of FILE. It waits up to --retry-timeout for a cluster
    that is away when it starts. On SIGHUP it reads FILE again: collections that are added, the
    options --commit-..., --hung-after and --log-level change, and others with the next start.
    """
    share_heap()
    given = merged(context)
    reload = Reload(context)
    before = signal.signal(signal.SIGHUP, reload.ask)
    try:
        with called_as_in(context):
            replicating(**given, stop=reload, waits=True)
    finally:
        signal.signal(signal.SIGHUP, before)


def _print_schema(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001 - click's
    if is_asked:
        print(json.dumps(schema(), indent=2))
        context.exit()


@file_command(epilog="Exit status: 0 everything is well, 1 something is wrong.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON Schema of such files, for editors.",
)
def check(context: click.Context, **_: Any) -> None:
    """Check a pipeline file, the cluster and the target, and write nothing.

    Says what `dcp-rs run` would create. With --json, prints a JSON line for each step.
    """
    given = merged(context)
    failed = 0
    with called_as_in(context):
        for finding in examine(given):
            failed += finding.status == "failed"
            write([shown(finding, as_json=given["as_json"])])
    if failed:
        context.exit(1)


def examine(given: dict[str, Any]) -> Iterator[Finding]:
    """Tries what a replication needs, and writes nothing."""
    for finding in findings(given["connection"]):
        yield finding
        if finding.status == "failed":
            return
    with Client(given["connection"]) as client:
        names = list(client.collections(given["reading"].get("collections")))
        yield Finding("read", "collections", "ok", _listed(names))
        target, listen = scheme_of(given["target"]), given["listen"]
        if listen is not None:
            try:
                check_listen(listen)
            except ImportError as error:
                yield Finding("listen", listen, "failed", str(error))
                return
        try:
            found = look(client, arguments_of(given))
        except ConfigError:
            raise
        except (DcpError, ImportError) as error:
            yield Finding("target", target, "failed", str(error))
            return
        yield Finding("target", target, "ok", found)
        if listen is not None:
            check_address(listen)
            yield Finding("listen", listen, "ok", "is free")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    text = ", ".join(sorted(names)[:_SHOWN])
    return f"{text} and {more} more" if more > 0 else text or "none yet"
