"""Catalogs of Iceberg tables, as the URL of a target or pyiceberg's configuration names them."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.outage import Unreachable, is_passing
from dcp_rs.replication.storage import SCHEMES, Storage, trying
from dcp_rs.replication.target import NO_HISTORY

if TYPE_CHECKING:
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address

CUT = re.compile(r"[#?\x00-\x1f\x7f]")
"""At the first two, pyiceberg takes a part of a location for all; the others it leaves out."""
NO_TABLES: dict[Mode, str] = {
    "table": "pyiceberg writes no delete files, and would rewrite the files of all changed rows:"
    " write a log with mode=log, or keep a table of documents with Spark, see"
    " docs/guides/spark-tables.md",
    **NO_HISTORY,
}
"""Why Iceberg has no tables of documents here."""

# Seconds in which a catalog must accept a connection.
_CONNECT_SECONDS = 5.0
# Address of the storage, which Arrow tries for a quarter of an hour.
_GOOGLE = "gcs.service.host"
# Types of catalogs by the scheme of their URI, as pyiceberg tells them.
_TYPES = {"http": "rest", "https": "rest", "thrift": "hive", "glue": "glue"}
_OF_SQL = ("sqlite", "postgresql")
# pyiceberg's own name for a catalog that has none.
_NAME = "default"


def catalog_of(address: Address) -> tuple[Any, Path | None, Storage | None]:
    """Returns the catalog of a URL, or the folder of one that is opened later; and its place.

    Raises:
        ConfigError: There is none, or it does not answer.
        ImportError: pyiceberg is not installed.
    """
    require("an Iceberg target", "pyiceberg.catalog.sql", "iceberg")
    if address.storage:
        return (*_by_uri(address),)
    if address.host:
        place = Storage(f"iceberg://{address.host}", address.storage_options)
        return _load(address.host, dict(address.storage_options), place), None, place
    example = "iceberg:///folder?table=namespace.name"
    folder = Path(os.path.realpath(address.local_path("the folder", example)))
    if CUT.search(str(folder)) or "%" in str(folder):
        raise ConfigError(
            f"{str(folder)!r} has a #, ?, % or control character, at which"
            " pyiceberg would take a part of it for the folder: use another",
            option="target",
        )
    return None, folder, None


def _by_uri(address: Address) -> tuple[Any, None, Storage]:
    scheme = address.storage
    if scheme in SCHEMES:
        raise ConfigError(
            f"Iceberg tables in {scheme} have a catalog: name it, as in iceberg+https://host/path"
            f" or iceberg://name, and set its option warehouse to {scheme}://bucket/path",
            option="target",
        )
    kind = _TYPES.get(scheme) or ("sql" if scheme.partition("+")[0] in _OF_SQL else None)
    if kind is None:
        raise ConfigError(
            f"pyiceberg knows no catalog {scheme}: write iceberg+ before the URI of one that"
            f" begins with {', '.join([*_TYPES, *_OF_SQL])}",
            option="target",
        )
    properties = {"type": kind, **address.storage_options}
    uri = address.url.partition("?")[0].partition("+")[2]
    if kind != "glue":
        properties["uri"] = uri
    host = address.host.rpartition("@")[2]
    place = Storage(f"iceberg+{scheme}://{host}{address.path}", address.storage_options)
    if kind in {"rest", "hive"}:
        _connect(uri, f"the catalog {place.url}", "host and port")
    name = address.options.get("catalog", _NAME)
    return _load(name, properties, place), None, place


def _connect(uri: str, what: str, told: str) -> None:
    """Checks that a catalog or a storage accepts connections: pyiceberg waits for minutes.

    Args:
        uri: Its address.
        what: What it is, for the error.
        told: What to check, for the error.
    """
    parts = urlsplit(uri)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 9083)
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be reached: {error.strerror or error}: check {told}", option="target"
        ) from None


def _load(name: str, properties: dict[str, str], place: Storage) -> Any:
    from pyiceberg.catalog import load_catalog

    if _GOOGLE in properties:
        _connect(properties[_GOOGLE], f"the storage of {place.url}", _GOOGLE)

    def load() -> Any:
        try:
            return load_catalog(name, **properties)
        except Exception as error:  # noqa: BLE001 - those of each catalog's client
            raise (Unreachable if is_passing(error) else ConfigError)(
                f"pyiceberg cannot load the catalog {name}: {place.shown(error)}"
                f" (options given: {', '.join(sorted(place.options)) or 'none'})",
                option="target",
            ) from None

    return trying(None, load)
