"""`dcp-rs serve`: the embedded cluster, until it is told to stop."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs import _dcp_rs
from dcp_rs.cli._options import add_password, password
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.testing import EmbeddedCluster, Limits

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable
    from types import FrameType

_DEFAULTS = _dcp_rs.defaults()
_CLUSTER = _DEFAULTS["cluster"]


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "serve",
        help="run an embedded cluster",
        description="Runs a cluster that Couchbase SDKs and DCP clients take for a real one, until"
        " SIGINT or SIGTERM. Prints a line once it takes connections. Keeps nothing on disk"
        " without --data."
        " With --faults, SIGHUP reads the file again.",
    )
    parser.add_argument("--nodes", type=int, help=f"number of nodes ({_CLUSTER['nodes']})")
    parser.add_argument("--vbuckets", type=int, help=f"number of vBuckets ({_CLUSTER['vbuckets']})")
    parser.add_argument(
        "--replicas", type=int, help=f"replicas of each vBucket ({_CLUSTER['replicas']})"
    )
    parser.add_argument("--ephemeral", action="store_true", help="a bucket without a disk")
    parser.add_argument(
        "--data", metavar="FOLDER", help="keep the bucket in FOLDER, and go on with what is there"
    )
    parser.add_argument("--bucket", help=f"name of the bucket ({_CLUSTER['bucket']})")
    parser.add_argument("--username", help=f"user name ({_CLUSTER['username']})")
    add_password(parser, "`password`")
    parser.add_argument(
        "--host",
        help=f"address to listen on ({_CLUSTER['host']}); 0.0.0.0 for all, with a password of your"
        " own",
    )
    parser.add_argument(
        "--alternate-host", metavar="NAME", help="where the ports are reached from elsewhere"
    )
    parser.add_argument("--port", type=int, help="first node's port; 0 for any (0)")
    parser.add_argument("--management-port", type=int, help="first node's HTTP port; 0 for any (0)")
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="speak TLS too, and write the certificate authority for clients to trust to FILE",
    )
    parser.add_argument(
        "--faults", metavar="FILE", type=Path, help="JSON list of fault rules to follow"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_settings(parser)
    parser.set_defaults(run=run)


# More options of the cluster and its limits.
_SETTINGS: dict[str, dict[str, Any]] = {
    "tls_port": {"type": int, "help": "first node's port for TLS; 0 for any (0)"},
    "tls_certificate": {"metavar": "FILE", "help": "PEM file with the nodes' certificate"},
    "tls_key": {"metavar": "FILE", "help": "its private key"},
    "tls_client_ca": {"metavar": "FILE", "help": "who signs clients' certificates"},
    "tls_client_required": {"action": "store_true", "help": "refuse clients without one"},
    "persist_delay": {"type": float, "metavar": "SECONDS", "help": "until a change is on disk"},
    "memory_quota": {"type": int, "metavar": "BYTES", "help": "documents the bucket may hold"},
    "history_bytes": {"type": int, "metavar": "BYTES", "help": "overwritten documents kept"},
    "keeps_history": {"action": "store_true", "help": "let clients stream every version"},
    "keeps_compressed": {"action": "store_true", "help": "do not inflate what clients compressed"},
    "max_connections": {"type": int, "metavar": "N", "help": "connections of a node"},
    "max_streams": {"type": int, "metavar": "N", "help": "streams of a DCP connection"},
    "max_unacknowledged_bytes": {
        "type": int, "metavar": "BYTES", "help": "largest window a client may ask for"
    },
    "authentication_timeout": {
        "type": float, "metavar": "SECONDS", "help": "until a client has authenticated"
    },
    "idle_timeout": {
        "type": float, "metavar": "SECONDS", "help": "without a byte on a connection not for DCP"
    },
    "dcp_idle_timeout": {
        "type": float, "metavar": "SECONDS", "help": "without a byte of a DCP client with noops"
    },
    "persistence_timeout": {
        "type": float, "metavar": "SECONDS", "help": "a client waits for a change to be persisted"
    },
    "congestion_control": {"metavar": "NAME", "help": "of TCP, as reno; reno where allowed"},
}  # fmt: skip


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings of the cluster",
        "Those of dcp_rs.testing.EmbeddedCluster, which has their defaults.",
    )
    for name, how in _SETTINGS.items():
        group.add_argument("--" + name.replace("_", "-"), **how)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Gives what is on the command line: others have the defaults of the engine."""

    def given(names: Iterable[str]) -> dict[str, Any]:
        values = {name: getattr(options, name, None) for name in names}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False
        }

    # The password and TLS have options of their own kind.
    settings = given(_CLUSTER.keys() - {"password", "tls", "limits"})
    secret = password(options)
    if secret is not None:
        settings["password"] = secret
    settings["tls"] = options.tls_ca is not None or options.tls_certificate is not None
    return settings | {"limits": Limits(**given(_DEFAULTS["limits"]))}


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    settings = _settings(options)
    rules = _rules(options.faults)
    # Whether each signal that came asks for the faults again, or else to stop.
    signals: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signals.put(number == signal.SIGHUP)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if options.faults is not None:
        signal.signal(signal.SIGHUP, on_signal)
    with EmbeddedCluster(**settings) as cluster:
        cluster.set_faults(rules)
        facts = {
            "connection_string": cluster.connection_string,
            "management_url": cluster.management_urls[0],
            "bucket": cluster.bucket_name,
            "bucket_uuid": cluster.bucket_uuid,
            "username": cluster.connection_options.username,
            "vbuckets": cluster.num_vbuckets,
            "pid": os.getpid(),
        }
        if options.tls_ca is not None:
            Path(options.tls_ca).write_text(cluster.ca_pem or "")
        if settings["tls"]:
            facts["tls_connection_string"] = cluster.tls_connection_string
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        print(json.dumps(facts) if options.json else line, flush=True)
        while signals.get():
            _reload(cluster, options.faults)
        changes = sum(cluster.high_seqnos().values())
        fired = _fired(cluster)
    print(f"dcp-rs: stopped after {changes} changes{fired}", file=sys.stderr)


def _rules(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    try:
        rules = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"{path}: must be a JSON list of objects")
    return rules


def _reload(cluster: EmbeddedCluster, path: Path) -> None:
    """Reads the fault rules again; the former ones stay if that fails."""
    fired = _fired(cluster)
    try:
        cluster.set_faults(_rules(path))
    except (DcpError, OSError) as error:
        print(f"dcp-rs: kept the former faults: {error}", file=sys.stderr, flush=True)
        return
    count = len(cluster.faults())
    print(f"dcp-rs: {count} fault rules{fired}", file=sys.stderr, flush=True)


def _fired(cluster: EmbeddedCluster) -> str:
    """How often each rule that is in force has reacted, if there are any."""
    counts = ", ".join(
        f"{rule.get('name', index)}: {count}"
        for index, (rule, count) in enumerate(
            zip(cluster.faults(), cluster.fault_counts(), strict=True)
        )
    )
    return f"; faults fired: {counts}" if counts else ""
