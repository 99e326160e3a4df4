"""Probes of a node with the standard library: names, ports and TLS."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from dcp_rs.connection import ConnectionOptions

_PORTS = {"couchbase": 11210, "couchbases": 11207}
_STRING = re.compile(r"(?:(?P<scheme>\w+)://)?(?P<hosts>[^/?]*)(?:/(?P<bucket>[^?]*))?")
_HOST = re.compile(r"(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:=]+))(?::(?P<port>\d+))?(?:=\w+)?")


@dataclass(frozen=True)
class Seed:
    """A node in the connection string or the cluster map."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Target:
    """A parsed connection string."""

    is_tls: bool
    seeds: list[Seed]
    # Whether the single host may stand for the nodes that DNS lists as its service.
    service: str | None
    bucket: str | None


class ProbeError(Exception):
    """A step failed: what happened, and what to change."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


def read_target(connection_string: str) -> Target:
    """Parses a connection string that the client has validated."""
    found = _STRING.match(connection_string)
    scheme, hosts = (found["scheme"] or "couchbase", found["hosts"]) if found else ("", "")
    matches = [match for match in map(_HOST.fullmatch, re.split("[,;]", hosts)) if match]
    seeds = [
        Seed(match["v6"] or match["name"], int(match["port"] or _PORTS.get(scheme, 11210)))
        for match in matches
    ]
    is_service = len(matches) == 1 and matches[0]["port"] is None and matches[0]["v6"] is None
    service = f"_{scheme}._tcp.{seeds[0].host}" if is_service else None
    bucket = unquote(found["bucket"]) if found and found["bucket"] else None
    return Target(scheme == "couchbases", seeds, service, bucket)


def resolve(host: str) -> str:
    """Returns the addresses of a name, separated by commas."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ProbeError(
            f"no address: {_reason(error)}",
            "check the spelling, and that this machine's DNS knows the name (/etc/resolv.conf,"
            " VPN)",
        ) from error
    return ", ".join(dict.fromkeys(str(each[4][0]) for each in found))


def connect(seed: Seed, timeout: float) -> socket.socket:
    """Opens a connection."""
    try:
        return socket.create_connection((seed.host, seed.port), timeout)
    except ConnectionRefusedError as error:
        advice = (
            "nothing listens there: check that the node runs and that this is the data service's"
            " port (11210, with TLS 11207)"
        )
        raise ProbeError("connection refused", advice) from error
    except TimeoutError as error:
        advice = (
            "packets are dropped on the way: open the port in firewalls and security groups, or"
            " allow this machine's address (Capella: allowed IP addresses)"
        )
        raise ProbeError(f"no answer within {timeout:g} s", advice) from error
    except OSError as error:
        raise ProbeError(_reason(error), "check the route to the node (network, VPN)") from error


def shake_hands(seed: Seed, options: ConnectionOptions) -> str:
    """Does a TLS handshake; returns the version and the certificate's expiry."""
    context = _context(options)
    with connect(seed, options.connect_timeout) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=seed.host) as secure:
                certificate = secure.getpeercert() or {}
                until = certificate.get("notAfter", "?")
                return f"{secure.version()}, certificate valid until {until}"
        except ssl.SSLCertVerificationError as error:
            raise ProbeError(
                f"certificate refused: {error.verify_message}", _certificate_advice(error, seed)
            ) from error
        except (OSError, ValueError) as error:
            advice = (
                "check that the port speaks TLS (11207, not 11210); if the cluster requires"
                " client certificates, pass --tls-certificate and --tls-key"
            )
            raise ProbeError(f"no TLS: {_reason(error)}", advice) from error


def _context(options: ConnectionOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        # Python 3.13 began to refuse authorities because of extensions that are irrelevant here.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if options.tls_certificate is not None:
            # An empty passphrase, so that OpenSSL does not prompt for one.
            passphrase = options.tls_key_password or ""
            context.load_cert_chain(options.tls_certificate, options.tls_key, passphrase)
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"the PEM files cannot be used: {_reason(error)}",
            "check --tls-ca, --tls-certificate, --tls-key and --tls-key-password-env",
        ) from error
    return context


def _certificate_advice(error: ssl.SSLCertVerificationError, seed: Seed) -> str:
    # The numbers are OpenSSL's X509_V_ERR.
    if error.verify_code in {62, 64}:
        return f"connect by a name in the certificate, not by {seed.host}"
    if error.verify_code in {9, 10}:
        return "check this machine's clock; if it is right, renew the cluster's certificate"
    return (
        "pass the cluster's certificate authority with --tls-ca FILE (Couchbase Server: Security,"
        " Certificates; Capella: Connect)"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
