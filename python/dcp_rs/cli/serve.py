"""`dcp-rs serve`: run an embedded cluster."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_rs import _dcp_rs
from dcp_rs.cli._options import (
    file_name,
    output_options,
    password,
    password_options,
    secret_in,
    specified,
)
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.testing import EmbeddedCluster, Limits, User

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_DEFAULTS = _dcp_rs.defaults()
_CLUSTER = _DEFAULTS["cluster"]


# Options of `EmbeddedCluster` and `Limits`, by their names there.
_SETTINGS: dict[str, dict[str, Any]] = {
    "nodes": {"type": int, "help": f"Number of nodes ({_CLUSTER['nodes']})."},
    "vbuckets": {"type": int, "help": f"Number of vBuckets ({_CLUSTER['vbuckets']})."},
    "replicas": {"type": int, "help": f"Replicas of each vBucket ({_CLUSTER['replicas']})."},
    "ephemeral": {"is_flag": True, "help": "A bucket without a disk."},
    "data": {
        "metavar": "FOLDER", "help": "Keep the buckets in FOLDER, and load what is there."
    },
    "bucket": {"help": f"Name of the first bucket ({_CLUSTER['bucket']})."},
    "username": {"help": f"User name ({_CLUSTER['username']})."},
    "host": {
        "help": f"Address to listen on ({_CLUSTER['host']}); 0.0.0.0 for all, with your own"
        " password."
    },
    "alternate_host": {"metavar": "NAME", "help": "Address for clients on other machines."},
    "port": {"type": int, "help": "Port of the first node; 0 for any (0)."},
    "management_port": {"type": int, "help": "HTTP port of the first node; 0 for any (0)."},
    "tls_port": {"type": int, "help": "TLS port of the first node; 0 for any (0)."},
    "tls_certificate": {"metavar": "FILE", "help": "PEM file with the nodes' certificate."},
    "tls_key": {"metavar": "FILE", "help": "Private key of --tls-certificate."},
    "tls_client_ca": {"metavar": "FILE", "help": "PEM file with client authorities."},
    "tls_client_required": {"is_flag": True, "help": "Refuse clients without a certificate."},
    "persist_delay": {"type": float, "metavar": "SECONDS", "help": "Persistence delay."},
    "memory_quota": {"type": int, "metavar": "BYTES", "help": "Most bytes of documents."},
    "history_bytes": {"type": int, "metavar": "BYTES", "help": "Overwritten documents to keep."},
    "keeps_history": {"is_flag": True, "help": "Let clients stream every version."},
    "keeps_compressed": {"is_flag": True, "help": "Keep compressed values compressed."},
    "max_connections": {"type": int, "metavar": "N", "help": "Most connections of a node."},
    "max_streams": {"type": int, "metavar": "N", "help": "Most streams of a DCP connection."},
    "max_unacknowledged_bytes": {
        "type": int, "metavar": "BYTES", "help": "Largest flow-control buffer of a client."
    },
    "authentication_timeout": {
        "type": float, "metavar": "SECONDS", "help": "Time limit for a client to authenticate."
    },
    "idle_timeout": {
        "type": float, "metavar": "SECONDS", "help": "Time limit of an idle connection, except DCP."
    },
    "dcp_idle_timeout": {
        "type": float, "metavar": "SECONDS", "help": "Time limit of a silent DCP client with noops."
    },
    "persistence_timeout": {
        "type": float, "metavar": "SECONDS", "help": "Time limit for waiting clients."
    },
    "congestion_control": {"metavar": "NAME", "help": "TCP congestion control (reno, if allowed)."},
}  # fmt: skip


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in reversed(
        [
            *(
                click.option(f"--{name.replace('_', '-')}", **how)
                for name, how in _SETTINGS.items()
            ),
            *password_options("`password`"),
        ]
    ):
        command = decorate(command)
    return command


@click.command()
@_with_settings
@click.option(
    "--tls-ca",
    metavar="FILE",
    help="Serve TLS too, and write the certificate authority for clients to FILE.",
)
@click.option(
    "--users",
    type=file_name,
    metavar="FILE",
    help='Users who may only read: [{"username": "reader", "password": "...", "reads": null}].',
)
@click.option(
    "--token-key-file",
    type=Path,
    metavar="FILE",
    help="File with the key of tokens (JWT) that clients may authenticate with over TLS.",
)
@click.option("--faults", type=file_name, metavar="FILE", help="JSON list of fault rules.")
@output_options
def serve(
    *,
    tls_ca: str | None,
    users: str | None,
    token_key_file: Path | None,
    faults: str | None,
    password_env: str | None,
    password_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run an embedded cluster.

    Couchbase SDKs and DCP clients can use it like a real cluster. It runs until SIGINT or SIGTERM,
    prints a line once it accepts connections, and keeps nothing on disk without --data. With
    --faults, SIGHUP reads the file again. The options and their defaults are those of
    dcp_rs.testing.EmbeddedCluster.
    """
    if tls_ca is not None and options["tls_certificate"] is not None:
        raise click.UsageError(
            "--tls-ca and --tls-certificate: give one of them, --tls-ca writes the authority that"
            " signed a certificate made for the cluster"
        )
    settings = specified(options)
    limits = {name: settings.pop(name) for name in _DEFAULTS["limits"] if name in settings}
    secret = password(password_env, password_file)
    if secret is not None:
        settings["password"] = secret
    settings["tls"] = tls_ca is not None or "tls_certificate" in settings
    settings["users"] = _users(users)
    if token_key_file is not None:
        settings["token_key"] = secret_in(token_key_file, "--token-key-file")
    rules = _rules("--faults", faults)
    signals = _signals(with_hangup=faults is not None)
    with EmbeddedCluster(**settings, limits=Limits(**limits)) as cluster:
        cluster.set_faults(rules)
        if tls_ca is not None:
            Path(tls_ca).write_text(cluster.ca_pem or "")
        facts = _facts(cluster)
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        print(json.dumps(facts) if as_json else line, flush=True)
        while signals.get() and faults is not None:
            _reload(cluster, faults)
        changes = sum(cluster.high_seqnos().values())
        fired = _fired(cluster)
    print(f"dcp-rs: stopped after {changes} changes{fired}", file=sys.stderr)


def _signals(*, with_hangup: bool) -> queue.SimpleQueue[bool]:
    """Returns a queue of signals: whether to reload the faults, or else to stop."""
    signals: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signals.put(number == signal.SIGHUP)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if with_hangup:
        signal.signal(signal.SIGHUP, on_signal)
    return signals


def _facts(cluster: EmbeddedCluster) -> dict[str, object]:
    facts: dict[str, object] = {
        "connection_string": cluster.connection_string,
        "management_url": cluster.management_urls[0],
        "bucket": cluster.bucket_name,
        "bucket_uuid": cluster.bucket_uuid,
        "username": cluster.connection_options.username,
        "vbuckets": cluster.num_vbuckets,
        "pid": os.getpid(),
    }
    if cluster.tls_connection_string is not None:
        facts["tls_connection_string"] = cluster.tls_connection_string
    return facts


def _users(path: str | None) -> list[User]:
    try:
        return [User(**user) for user in _rules("--users", path)]
    except TypeError as error:
        raise ConfigError(f"{path}: {error}", option="--users") from None


def _rules(option: str, path: str | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    try:
        rules = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", option=option) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", option=option) from error
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"{path}: must be a JSON list of objects", option=option)
    return rules


def _reload(cluster: EmbeddedCluster, path: str) -> None:
    """Reads the fault rules again; the previous ones stay if that fails."""
    fired = _fired(cluster)
    try:
        cluster.set_faults(_rules("--faults", path))
    except (DcpError, OSError) as error:
        print(f"dcp-rs: kept the former faults: {error}", file=sys.stderr, flush=True)
        return
    count = len(cluster.faults())
    print(f"dcp-rs: {count} fault rules{fired}", file=sys.stderr, flush=True)


def _fired(cluster: EmbeddedCluster) -> str:
    """How often each rule in force has reacted, if there are any."""
    counts = ", ".join(
        f"{rule.get('name', index)}: {count}"
        for index, (rule, count) in enumerate(
            zip(cluster.faults(), cluster.fault_counts(), strict=True)
        )
    )
    return f"; faults fired: {counts}" if counts else ""
