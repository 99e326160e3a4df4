"""Options of the commands that read from a bucket."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dcp_rs.cli._options import PASSWORD_VARIABLE, add_password, password
from dcp_rs.client import Client, ConnectionOptions, connect
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_CONNECTION = (
    "bucket",
    "username",
    "tls_ca",
    "tls_certificate",
    "tls_key",
    "network",
    "connect_timeout",
)


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the connection string and the options of a connection."""
    parser.add_argument("connection_string", metavar="CONNSTR", help="couchbase://host[/bucket]")
    parser.add_argument("--bucket", help="bucket, where CONNSTR names none")
    parser.add_argument("--username", help="user name")
    add_password(parser, PASSWORD_VARIABLE)
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file with the authorities to trust (the system's)"
    )
    parser.add_argument(
        "--tls-certificate", metavar="FILE", help="PEM chain of a client, in place of a user"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key")
    parser.add_argument(
        "--network",
        choices=["auto", "default", "external"],
        help=f"which of the nodes' addresses to use ({ConnectionOptions.network})",
    )
    parser.add_argument(
        "--connect-timeout",
        metavar="SECONDS",
        type=float,
        help=f"longest time for a connection to be made ({ConnectionOptions.connect_timeout:g})",
    )


def connected(options: argparse.Namespace) -> Client:
    """Connects as the options say.

    Raises:
        ConfigError: There is no password for the user.
        DcpError: The connection cannot be made.
    """
    secret = _password(options)
    connection = given(options, _CONNECTION)
    if secret is not None and options.password_file is not None:
        # Read again for each connection: the password in it may change.
        connection["password_file"] = options.password_file
    else:
        connection["password"] = secret
    return connect(options.connection_string, **connection)


def _password(options: argparse.Namespace) -> str | None:
    found = password(options)
    if found is None and options.username is not None:
        found = os.environ.get(PASSWORD_VARIABLE)
        if found is None:
            raise ConfigError(
                f"there is no password for the user: set {PASSWORD_VARIABLE} to it, name another"
                " variable with --password-env, or a file with --password-file"
            )
    return found if options.username is not None else None


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Gives the options that are on the command line: others have the defaults of the package."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def words(text: str) -> list[str]:
    """Takes apart what has commas between."""
    return [word.strip() for word in text.split(",")]
