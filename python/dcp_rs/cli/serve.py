"""`dcp-rs serve`: the embedded cluster, until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs.producer import Producer

if TYPE_CHECKING:
    import argparse
    from types import FrameType


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command's options."""
    parser = commands.add_parser(
        "serve",
        help="run an embedded cluster",
        description="Runs a cluster that Couchbase SDKs and DCP clients take for a real one, until"
        " SIGINT or SIGTERM. Prints a line once it takes connections. Keeps nothing on disk.",
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (1)")
    parser.add_argument("--vbuckets", type=int, default=64, help="number of vBuckets (64)")
    parser.add_argument("--bucket", default="default", help="name of the bucket (default)")
    parser.add_argument("--username", default="Administrator", help="user name (Administrator)")
    parser.add_argument(
        "--password-env",
        metavar="NAME",
        help="environment variable with the password; `password` if not given",
    )
    parser.add_argument("--host", default="127.0.0.1", help="loopback address (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="first node's port; 0 for any (0)")
    parser.add_argument(
        "--management-port", type=int, default=0, help="first node's HTTP port; 0 for any (0)"
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="speak TLS too, and write the certificate authority for clients to trust to FILE",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    password = "password"  # noqa: S105 - what a fresh server is usually given
    if options.password_env is not None:
        password = os.environ.get(options.password_env, "")
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    with Producer(
        nodes=options.nodes,
        vbuckets=options.vbuckets,
        bucket=options.bucket,
        username=options.username,
        password=password,
        host=options.host,
        port=options.port,
        management_port=options.management_port,
        tls=options.tls_ca is not None,
    ) as producer:
        facts = {
            "connection_string": producer.connection_string,
            "management_url": producer.management_urls[0],
            "bucket": producer.bucket_name,
            "bucket_uuid": producer.bucket_uuid,
            "username": options.username,
            "vbuckets": producer.num_vbuckets,
            "pid": os.getpid(),
        }
        if options.tls_ca is not None:
            Path(options.tls_ca).write_text(producer.ca_pem or "")
            facts["tls_connection_string"] = producer.tls_connection_string
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        print(json.dumps(facts) if options.json else line, flush=True)
        stop.wait()
        changes = sum(producer.high_seqnos().values())
    print(f"dcp-rs: stopped after {changes} changes", file=sys.stderr)
