"""`dcp-rs doctor`: tries each step of a connection, and says what to change."""

from __future__ import annotations

import json
import logging
import os
import textwrap
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from dcp_rs.cli import _probes
from dcp_rs.cli._options import call_options, command, connection_options, output_options
from dcp_rs.cli._output import width, write
from dcp_rs.cli._pipeline import call_as_in
from dcp_rs.cli._probes import ProbeError, Seed
from dcp_rs.client import Client
from dcp_rs.exceptions import (
    AccessDeniedError,
    AuthenticationError,
    BucketNotFoundError,
    ConfigError,
    ConnectError,
    DcpError,
    TimeoutError,  # noqa: A004 - as the package has it
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcp_rs.connection import ConnectionOptions

_ROLE = "give the user the role Data DCP Reader on the bucket (Security, Users)"
_COLOURS = {"ok": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True)
class Finding:
    """Result of one step."""

    step: str
    target: str
    status: str
    detail: str
    advice: str | None = None


@command()
@connection_options
@output_options
@click.pass_context
def doctor(context: click.Context, connection: ConnectionOptions, *, as_json: bool) -> None:
    """Try each step of a connection, and say what to change.

    Checks the names, ports and TLS of the hosts in CONNSTR, logs in, opens the bucket, connects to
    every node of the cluster map, and opens a DCP stream of each vBucket, from now on. It changes
    nothing and reads no documents. The exit status is 1 if a step failed.
    """
    failed = 0
    for finding in findings(connection):
        failed += finding.status == "failed"
        write([shown(finding, as_json=as_json)])
    if failed:
        context.exit(1)


def shown(finding: Finding, *, as_json: bool) -> bytes:
    """Returns a finding as lines."""
    if as_json:
        return f"{json.dumps(asdict(finding))}\n".encode()
    status = f"{finding.status:<8}"
    cells = width()
    if cells is not None and not os.environ.get("NO_COLOR"):
        status = click.style(status, fg=_COLOURS[finding.status])
    lines = [f"{status}{finding.step:<8}{finding.target}  {finding.detail}"]
    if finding.advice is not None:
        before, after = f"{'':<16}-> ", f"{'':<19}"
        lines += textwrap.wrap(
            finding.advice, cells or 100, initial_indent=before, subsequent_indent=after
        )
    return "".join(f"{line}\n" for line in lines).encode()


def _attempt(step: str, target: object, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(step, str(target), "ok", attempt())
    except ProbeError as error:
        return Finding(step, str(target), "failed", str(error), error.advice)
    except DcpError as error:
        return Finding(step, str(target), "failed", str(error))


def findings(options: ConnectionOptions) -> Iterator[Finding]:
    """Tries each step of a connection."""
    target = _probes.read_target(options.connection_string)
    is_reached = False
    for seed in target.seeds:
        resolved = _attempt("dns", seed.host, partial(_probes.resolve, seed.host))
        if resolved.status == "failed" and target.service is not None:
            # The client looks up the SRV record, which the standard library cannot.
            detail = f"no address: looking up the SRV record {target.service}"
            yield replace(resolved, status="skipped", detail=detail, advice=None)
            is_reached = True
            continue
        yield resolved
        if resolved.status == "ok":
            for finding in _reaching(seed, options, is_tls=target.is_tls):
                yield finding
            is_reached = is_reached or finding.status == "ok"
    if not is_reached:
        yield _unreached(options, "skipped" if target.seeds else "failed")
        return
    yield from _with_client(options, target)


def _unreached(options: ConnectionOptions, status: str) -> Finding:
    """Says why no host was reached: the client checks the connection string first of all."""
    try:
        Client(replace(options, connect_timeout=0.001)).close()
    except ConfigError as error:
        return Finding("options", _user(options), "failed", _said(error))
    except DcpError:
        pass
    return Finding("login", _user(options), status, "no host can be reached")


def _reaching(seed: Seed, options: ConnectionOptions, *, is_tls: bool) -> Iterator[Finding]:
    def open_port() -> str:
        begun = time.monotonic()
        _probes.connect(seed, options.connect_timeout).close()
        return f"open, {(time.monotonic() - begun) * 1000:.1f} ms"

    found = _attempt("tcp", seed, open_port)
    yield found
    if is_tls and found.status == "ok":
        yield _attempt("tls", seed, lambda: _probes.shake_hands(seed, options))


def _user(options: ConnectionOptions) -> str:
    if options.token_file is not None:
        return "token"
    return options.username or "client certificate"


def _with_client(options: ConnectionOptions, target: _probes.Target) -> Iterator[Finding]:
    no_nodes = _Watch("DNS lists no nodes")
    try:
        with no_nodes:
            client = Client(replace(options, retry_timeout=options.connect_timeout))
    except DcpError as error:
        yield from _not_connected(error, options, target, is_listed=not no_nodes.has_seen)
        return
    with client:
        yield Finding("login", _user(options), "ok", "accepted")
        detail = f"UUID {client.bucket_uuid}, {client.num_vbuckets} vBuckets"
        yield Finding("bucket", client.bucket_name, "ok", detail)
        reached: list[str] = []
        nodes = sorted(client.vbuckets_by_node().items())
        for node, vbuckets in nodes:
            for finding in _node(node, len(vbuckets), options, is_tls=target.is_tls):
                reached += [node] if finding.status == "ok" else []
                yield finding
        if len(reached) == len(nodes):
            yield _attempt("seqnos", client.bucket_name, lambda: _seqnos(client))
        else:
            detail = f"{len(nodes) - len(reached)} of {len(nodes)} nodes cannot be reached"
            yield Finding("seqnos", client.bucket_name, "skipped", detail)
        if reached:
            yield from _streams(client, options, reached)
        for node, vbuckets in nodes:
            if node not in reached:
                detail = f"{len(vbuckets)} vBuckets: the node cannot be reached"
                yield Finding("dcp", node, "skipped", detail)


def _not_connected(
    error: DcpError, options: ConnectionOptions, target: _probes.Target, *, is_listed: bool
) -> Iterator[Finding]:
    user, bucket = _user(options), options.bucket or target.bucket or "(none)"
    if isinstance(error, BucketNotFoundError | AccessDeniedError):
        yield Finding("login", user, "ok", "accepted")
        advice = (
            f"check the bucket's name, in the connection string or {_called('bucket')}; {_ROLE}"
        )
        yield Finding("bucket", bucket, "failed", str(error), advice)
        return
    if isinstance(error, AuthenticationError):
        if options.token_file is not None:
            advice = (
                "put a token that has not expired into the file, and check that the cluster trusts"
                " its issuer and has its user"
            )
        elif options.username is not None:
            advice = "check the user name and password; LDAP and PAM users need couchbases://"
        else:
            advice = (
                f"set {_called('username')}, or check that the cluster accepts this client"
                " certificate"
            )
        yield Finding("login", user, "failed", str(error), advice)
        return
    if isinstance(error, ConnectError | TimeoutError) and not is_listed:
        seed = target.seeds[0]
        advice = (
            f"the name has neither an address nor an SRV record {target.service}: check the"
            " spelling, and that this machine's DNS knows it"
        )
        yield Finding("dns", seed.host, "failed", "no address", advice)
        return
    step = "options" if isinstance(error, ConfigError) else "login"
    yield Finding(step, user, "failed", _said(error))


def _said(error: DcpError) -> str:
    if isinstance(error, ConfigError):
        context = click.get_current_context()
        call_as_in(context, error)
        call_options(error, [context.command])
    return str(error)


def _called(option: str) -> str:
    """Returns what an option is called where its user wrote it, or would."""
    return _said(ConfigError(option=option)).rstrip(": ")


class _Watch(logging.Handler):
    """Whether the client logs a text meanwhile that no error contains."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.DEBUG)
        self._logger = logging.getLogger("dcp_rs")
        self._text = text
        self.has_seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_seen = self.has_seen or self._text in record.getMessage()

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def _node(
    node: str, vbuckets: int, options: ConnectionOptions, *, is_tls: bool
) -> Iterator[Finding]:
    """Reaches a node of the cluster map, which need not be a seed."""
    host, _, port = node.rpartition(":")
    seed = Seed(host.strip("[]"), int(port))
    # The last step is enough: TLS comes after the port.
    *_, finding = _reaching(seed, options, is_tls=is_tls)
    if finding.status == "ok":
        yield replace(finding, step="node", detail=f"{finding.detail}; {vbuckets} vBuckets")
    else:
        advice = (
            "the cluster map names this address: start the node, open its port to this machine, or"
            " pass --network external if nodes have alternate addresses"
        )
        yield replace(finding, step="node", advice=advice)


def _seqnos(client: Client) -> str:
    try:
        return f"{sum(client.high_seqnos().values())} in total, from every node"
    except AccessDeniedError as error:
        raise ProbeError(str(error), _ROLE) from error


def _streams(client: Client, options: ConnectionOptions, reached: list[str]) -> Iterator[Finding]:
    """Opens a stream of each vBucket of these nodes from now on, and waits until all are open."""
    wanted = [
        vb for node, vbs in client.vbuckets_by_node().items() if node in reached for vb in vbs
    ]
    limit = options.connect_timeout
    bucket = client.bucket_name
    try:
        with client.stream(start="latest", vbuckets=wanted, columns=["seqno"]) as stream:
            deadline = time.monotonic() + limit
            states: dict[int, str] = {}
            while time.monotonic() < deadline:
                states = {each.vbucket: each.state for each in stream.vbucket_stats()}
                counts = Counter(states.values())
                if counts["streaming"] == len(wanted) or counts["failed"]:
                    break
                time.sleep(0.05)
            if counts["failed"]:
                # Raises the error of the failed streams.
                next(iter(stream))
            messages = {
                each.vbucket: each.message for each in stream.events() if each.kind == "backing_off"
            }
    except AccessDeniedError as error:
        yield Finding("dcp", bucket, "failed", str(error), _ROLE)
        return
    except DcpError as error:
        yield Finding("dcp", bucket, "failed", str(error))
        return
    for node, vbuckets in sorted(client.vbuckets_by_node().items()):
        if node not in reached:
            continue
        closed = [vb for vb in vbuckets if states.get(vb) != "streaming"]
        if not closed:
            yield Finding("dcp", node, "ok", f"{len(vbuckets)} vBuckets stream")
            continue
        why = next((messages[vb] for vb in closed if vb in messages), "no answer")
        detail = f"{len(closed)} of {len(vbuckets)} vBuckets do not stream: {why}"
        advice = "check the node's data service in the cluster's UI; it may still be starting"
        yield Finding("dcp", node, "failed", detail, advice)
