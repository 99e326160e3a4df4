"""Optional libraries: the versions that are tested, and how they are imported."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

TESTED = {
    "adbc-driver-postgresql": ("1.13", "1.13"),
    "click": ("8.2", "8.5"),
    "confluent-kafka": ("2.6", "2.16"),
    "deltalake": ("1.6.1", "1.6"),
    "dlt": ("1.31", "1.31"),
    "duckdb": ("1.5.2", "2.0"),
    "duckdb-extension-ducklake": ("1.5.2", "1.5"),
    "duckdb-extension-httpfs": ("1.5.2", "1.5"),
    "duckdb-extension-postgres-scanner": ("1.5.2", "1.5"),
    "duckdb-extension-sqlite-scanner": ("1.5.2", "1.5"),
    "obstore": ("0.8", "0.12"),
    "opentelemetry-api": ("1.30", "1.45"),
    "pandas": ("2.2", "2.3"),
    "polars": ("2.1", "2.1"),
    "prometheus-client": ("0.21", "0.26"),
    "pyarrow": ("18", "26.0"),
    "pyiceberg": ("0.11", "0.12"),
    "pyspark": ("4.0", "4.3"),
    "ray": ("2.60", "2.60"),
    "rich": ("13.7", "15.0"),
}
"""The lowest version of each library, which an older one is refused for, and the newest minor
version that the tests run with."""

# By the first part of a module's name, if it is another.
_LIBRARIES = {
    "adbc_driver_postgresql": "adbc-driver-postgresql",
    "confluent_kafka": "confluent-kafka",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
}

_log = logging.getLogger("dcp_rs")


def require(what: str, module: str, extra: str | None = None) -> ModuleType | Any:
    """Imports a module of a library that `what` needs.

    Args:
        what: What needs it, for the error.
        module: Name of the module.
        extra: The extra that installs the library; by default it is installed by its name.

    Raises:
        ConfigError: The library is older than the versions that are tested.
        ImportError: It is not installed; the text says what to install.
    """
    top = module.partition(".")[0]
    library = _LIBRARIES.get(top, top)
    check_version(what, library, extra)
    try:
        return import_module(module)
    except ImportError as error:
        package = library if extra is None else f"dcp-rs[{extra}]"
        raise ImportError(
            f'{what} needs {library}: install it with pip install "{package}"'
        ) from error


def require_pyarrow(what: str, extra: str = "arrow") -> ModuleType | Any:
    """Imports PyArrow for `what`, as `require` does."""
    return require(what, "pyarrow", extra)


def require_spark(what: str) -> None:
    """Imports PySpark for `what`, as `require` does, and checks what it needs for Arrow data."""
    check_version(what, "pandas", "spark")
    require(what, "pyspark", "spark")
    require_pyarrow(what, "spark")


def check_version(what: str, library: str, extra: str | None = None) -> None:
    """Checks the version of a library, without importing it.

    A version above those that are tested is logged, once. One that is not known passes, as does a
    library that is not installed.

    Raises:
        ConfigError: It is below the lowest version; the text says what to install.
    """
    old = _too_old(library)
    if old is not None:
        floor, _ = TESTED[library]
        package = f"{library}>={floor}" if extra is None else f"dcp-rs[{extra}]"
        raise ConfigError(
            f"{what} needs {library} {floor} or newer, and {old} is installed: "
            f'pip install "{package}"'
        )


@cache
def _too_old(library: str) -> str | None:
    """Returns the installed version if it is too old; logs one that is too new."""
    # Takes as long to import as dcp_rs.
    from importlib.metadata import PackageNotFoundError, version

    if library not in TESTED:
        return None
    try:
        installed: str | None = version(library)
    except (PackageNotFoundError, KeyError):  # KeyError: of a folder of metadata that is empty
        return None
    have = _numbers(installed or "")
    floor, newest = TESTED[library]
    if [0, 0, 0] < have < _numbers(floor):
        return installed
    if have[:2] > _numbers(newest)[:2]:
        _log.warning(
            "%s %s is newer than the versions that dcp_rs is tested with, %s to %s",
            library, installed, floor, newest,
            extra=about("library_untested", library=library, version=installed),
        )  # fmt: skip
    return None


def _numbers(version: str) -> list[int]:
    """Returns the three numbers that a version begins with, which are zeros if it has none."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return [int(each or 0) for each in found.groups()] if found else [0, 0, 0]
