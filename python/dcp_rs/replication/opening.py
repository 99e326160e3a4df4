"""What URLs of targets name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from dcp_rs import _checks
from dcp_rs._libraries import require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.sharing import take_share
from dcp_rs.replication.target import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.target import Database, Target


class _Scheme(NamedTuple):
    """What writes to the URLs of a scheme.

    Attributes:
        target: Module and class for one table.
        database: Module and class for several tables.
        extra: The extra that brings the library.
    """

    target: str
    database: str
    extra: str


_SCHEMES = {
    "delta": _Scheme("delta.DeltaTarget", "delta.DeltaDatabase", "delta"),
    "duckdb": _Scheme("duckdb.DuckDBTarget", "duckdb_database.DuckDBDatabase", "duckdb"),
    "ducklake": _Scheme("ducklake.DuckLakeTarget", "ducklake.DuckLakeDatabase", "ducklake"),
    "iceberg": _Scheme("iceberg.IcebergTarget", "iceberg.IcebergDatabase", "iceberg"),
    "kafka": _Scheme("kafka.KafkaTarget", "kafka.KafkaDatabase", "kafka"),
    "parquet": _Scheme("parquet.ParquetTarget", "parquet.ParquetDatabase", "arrow"),
    "postgresql": _Scheme("postgres.PostgresTarget", "postgres.PostgresDatabase", "postgres"),
}
# No URL: a path, or the name of a file.
_PATH = re.compile(r"[^:]*[/\\.][^:]*")
# Those whose tables can be in object storage or behind a catalog.
_STORED = ("delta", "parquet", "iceberg", "ducklake")


def open_target(url: str, storage_options: Mapping[str, str] | None = None) -> Target:
    """Creates the target for a URL.

    Args:
        url: `duckdb:///path?table=name`, also with `&value_format=variant`,
            `postgresql://user@host/database?table=name`,
            `ducklake+sqlite:///catalog.db?data=/folder&table=name`, also with `postgresql`;
            `delta:///folder`; for logs only `parquet:///folder` and
            `iceberg:///folder?table=namespace.name`; `kafka://broker:9092?topic=name`. In object
            storage, `delta+s3://bucket/path` and `parquet+s3://bucket/path`, also with `gs`, `az`
            and `abfss`.
        storage_options: As for `replicate`.

    Raises:
        ConfigError: The URL does not name a target, or the target's library is too old.
        ImportError: The target's library is not installed; the text names the extra to install.
    """
    address, scheme = _parse(url, storage_options)
    if "{" in address.options.get("table", ""):
        raise ConfigError(
            "the table of the URL is one table, whose name has no braces: name those of several"
            " collections by a template",
            option="target",
        )
    target: Target = _class(scheme.target).at(address)
    return target


def open_database(url: str, storage_options: Mapping[str, str] | None = None) -> Database:
    """Creates the place of several tables for a URL.

    Args:
        url: As for `open_target`, without `table`; for Delta, Iceberg and Parquet, the folder of
            the tables.
        storage_options: As for `replicate`.

    Raises:
        ConfigError: The URL does not name a place for several tables, or the library is too old.
        ImportError: The target's library is not installed; the text names the extra to install.
    """
    address, scheme = _parse(url, storage_options)
    if "table" in address.options:
        raise ConfigError(
            "names one table, and the tables of several collections are named by a template:"
            " leave out table",
            option="target",
        )
    database: Database = _class(scheme.database).at(address)
    return database


def opened(
    target: Any,
    storage_options: Mapping[str, str] | None,
    opening: Callable[[Any, Mapping[str, str] | None], Any],
    share: BucketShare | None,
) -> Any:
    """Returns the target of a URL, or one that is opened already, for a share."""
    if isinstance(target, str | os.PathLike):
        target = opening(target, storage_options)
    elif storage_options is not None:
        raise ConfigError(
            "is for the URL of a target: give it to open_target", option="storage_options"
        )
    take_share(target, share)
    return target


def template_of(target: object, tables: object) -> str | None:
    """Returns the template of the topics that a URL names; `None` if it has none."""
    if not isinstance(target, str) or not target.startswith("kafka:"):
        return None
    topic = Address.parse(target).options.get("topic", "")
    if "{" not in topic:
        return None
    if tables is not None:
        raise ConfigError(
            "the topic of the target is a template already: leave out one of them", option="tables"
        )
    return topic


def extra_of(target: object) -> str:
    """Returns the extra that brings what a target needs."""
    scheme = target.partition(":")[0].partition("+")[0] if isinstance(target, str) else ""
    return _SCHEMES[scheme].extra if scheme in _SCHEMES else "arrow"


def check_url(url: object) -> None:
    """Checks that a target is text, and no path.

    Raises:
        ConfigError: It is not; of a path, the error has the URL.
    """
    if isinstance(url, os.PathLike) or (isinstance(url, str) and _PATH.fullmatch(url)):
        path = Path(os.fsdecode(url))
        place = quote(str(path.absolute()), errors="replace")
        like = f"duckdb://{place}?table=documents"
        if path.suffix not in {".duckdb", ".db"}:
            like = f"delta://{place}"
        raise ConfigError(f"must be a URL, such as {like}", option="target")
    _checks.text("target", url)


def _parse(url: str, storage_options: Mapping[str, str] | None) -> tuple[Address, _Scheme]:
    """Returns the parts of a target's URL, and what writes to it."""
    check_url(url)
    address = replace(Address.parse(url), storage_options=_strings(storage_options))
    if address.scheme not in _SCHEMES:
        near = get_close_matches(address.scheme, _SCHEMES, 1)
        hint = f": did you mean {near[0]}://?" if near else ""
        raise ConfigError(
            f"must begin with one of {', '.join(f'{each}://' for each in _SCHEMES)}{hint}",
            option="target",
        )
    word = url.partition(":")[0]
    if not url.startswith(f"{word}://"):
        raise ConfigError(
            f"has no // after {word}: write {word}:///path, with the whole path", option="target"
        )
    if "value_format" in address.options and address.scheme not in {"duckdb", "kafka"}:
        raise ConfigError(
            "value_format is an option of duckdb only, because dcp_rs cannot write a "
            f"VARIANT to {address.scheme}: leave it out, and the column value has the JSON",
            option="target",
        )
    scheme = _SCHEMES[address.scheme]
    if address.storage and address.scheme not in _STORED:
        raise ConfigError(
            f"{address.scheme} has no tables in {address.storage}: only"
            f" {', '.join(_STORED)} have a + in their URLs",
            option="target",
        )
    if address.storage_options and not (address.storage or address.is_catalog):
        raise ConfigError(
            "is for object storage and catalogs, such as delta+s3://bucket/path: leave it out",
            option="storage_options",
        )
    require_pyarrow("a target", scheme.extra)
    return address, scheme


def _strings(options: object) -> dict[str, str]:
    """Returns options of a storage, whose values are never shown."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError("must be a mapping of names to text", option="storage_options")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"must have text for each name, and {str(name)!r} has a"
                f" {type(value).__name__}: write it as text",
                option="storage_options",
            )
    return dict(options)


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"dcp_rs.replication.{module}"), name)
