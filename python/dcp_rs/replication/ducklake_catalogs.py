"""DuckLakes: where their catalogs are, and the extensions of DuckDB that open them."""

from __future__ import annotations

import contextlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dcp_rs._libraries import check_version, require
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.duckdb_file import DatabaseFile, quiet
from dcp_rs.replication.outage import Unreachable, is_passing
from dcp_rs.replication.postgres.target import check_host
from dcp_rs.replication.storage import Storage, refusing, trying

if TYPE_CHECKING:
    from dcp_rs.replication.target import Address

OPTIONS = ("data", "table")
"""Options of a URL that are not those of a PostgreSQL connection."""

_EXAMPLE = "ducklake+sqlite:///folder/catalog.db?data=/folder&table=name"
# Extensions that read the catalog, by what follows the + in the URL.
_SCANNERS = {"sqlite": "sqlite_scanner", "postgresql": "postgres_scanner"}
# Types of DuckDB's secrets, by scheme.
_STORAGES = {"s3": "s3", "gs": "gcs"}
_OWN_OF_POSTGRES = "metadata_schema"
# Milliseconds for which SQLite waits for another process.
_BUSY = 5_000
_CONNECT_SECONDS = 10
_MISSING = "does not exist - and creating"
# What DuckDB says of a PostgreSQL that cannot be reached or shuts down, unless that refuses it.
_AWAY = re.compile(
    r"Unable to connect to Postgres|server closed the connection|no connection to the server"
    r"|terminating connection|could not (send|receive) data|the database system is"
)
_REFUSES = re.compile(
    r"FATAL: +(?! |the database system is|sorry, too many|remaining connection|terminating)"
)
# A host, which may be an address in brackets, and a port.
_PLACE = re.compile(r"(\[[^\]]*\]|[^:]*)(?::([0-9]*))?")


class Lake(DatabaseFile):
    """A DuckLake, whose catalog is a SQLite file or a PostgreSQL database.

    Args:
        address: `ducklake+sqlite:///catalog.db` or `ducklake+postgresql://user@host/database`.

    Raises:
        ConfigError: The URL names no catalog, or has an option that there is not.
        ImportError: duckdb is not installed.
    """

    def __init__(self, address: Address) -> None:
        self._duckdb = require("a DuckLake target", "duckdb", "ducklake")
        kind = address.storage
        if kind not in _SCANNERS:
            raise ConfigError(
                "a DuckLake has its catalog in SQLite or PostgreSQL: write ducklake+sqlite:// or"
                f" ducklake+postgresql://, as in {_EXAMPLE}",
                option="target",
            )
        self._data, self._password = address.options.get("data", ""), ""
        self._secret = self._secret_of(address)
        self._extensions = [_SCANNERS[kind], "ducklake", *(["httpfs"] if self._secret else [])]
        for name in self._extensions:
            package = f"duckdb-extension-{name.replace('_', '-')}"
            check_version("a DuckLake target", package, "ducklake")
        # No rows in the catalog: states would stay there for good.
        self._parameters: dict[str, object] = {"DATA_INLINING_ROW_LIMIT": 0}
        if kind == "sqlite":
            address.allow(*OPTIONS)
            path = address.local_path("the catalog", _EXAMPLE)
            super().__init__(path)
            self._catalog, self._is_file, name = f"sqlite:{path}", True, path
            # So that it is read while it is written.
            self._parameters |= {"META_JOURNAL_MODE": "WAL", "META_BUSY_TIMEOUT": _BUSY}
        else:
            check_host(address)
            if _OWN_OF_POSTGRES in address.options:
                self._parameters["METADATA_SCHEMA"] = address.options[_OWN_OF_POSTGRES]
            conninfo, self._password = _conninfo_of(address)
            self._catalog, self._is_file = f"postgres:{conninfo}", False
            name = f"//{address.host.rpartition('@')[2]}{address.path}"
        self._storage = Storage(f"ducklake+{kind}:{name}", address.storage_options)

    def _secret_of(self, address: Address) -> str:
        """Returns what DuckDB needs to know of the storage of the files; empty for a folder."""
        scheme, separator, _ = self._data.partition("://")
        kind = _STORAGES.get(scheme) if separator else None
        if self._data and kind is None and (separator or not Path(self._data).is_absolute()):
            known = " or ".join(f"{each}://" for each in _STORAGES)
            raise ConfigError(
                f"data is the absolute path of a folder, or begins with {known}", option="target"
            )
        for name in address.storage_options:
            if kind is None or not name.isidentifier():
                raise ConfigError(
                    "has parameters of a secret of DuckDB, such as key_id and region, and is for a"
                    " lake with files in object storage, as in &data=s3://bucket/path",
                    option="storage_options",
                )
        given = "".join(
            f", {key} {_literal(each)}" for key, each in address.storage_options.items()
        )
        return f"TYPE {kind}{given}" if kind else ""

    def is_unavailable(self, error: BaseException) -> bool:
        """See `dcp_rs.replication.outage.is_unavailable`."""
        text = str(error)
        is_away = _AWAY.search(text) is not None and _REFUSES.search(text) is None
        return is_passing(error) or (is_away and isinstance(error, self._duckdb.Error))

    def exists(self) -> bool:
        """See `DatabaseFile.exists`."""
        if self._is_file:
            return super().exists()
        connection = self._attached(may_create=False)
        if connection is not None:
            connection.close()
        return connection is not None

    def connect(self) -> Any:
        """Opens the lake as the current database, and creates it if it does not exist.

        Raises:
            ConfigError: An extension is missing, or the catalog cannot be opened.
        """
        if self._is_file:
            self.check_folder()
        was_there = self._is_file and super().exists()
        connection = self._attached(may_create=False) if not self._is_file or was_there else None
        if connection is None:
            try:
                connection = self._attached(may_create=True)
            except BaseException:
                if self._is_file and not was_there:
                    self.remove()
                raise
        return connection

    def remove(self) -> None:
        """Removes a catalog that was made and has nothing; one in PostgreSQL stays."""
        if self._is_file:
            for ending in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + ending).unlink(missing_ok=True)

    def _attached(self, *, may_create: bool) -> Any:
        """Returns a connection; `None` if there is no lake and none may be created."""
        data = self._data or (f"{self._path}.files/" if may_create and self._is_file else "")
        if may_create and not data:
            raise ConfigError(
                f"{self} is a new lake: name the folder of its files, as in &data=/folder",
                option="target",
            )
        parameters = self._parameters | ({"DATA_PATH": data} if data else {})
        if not may_create:
            parameters["CREATE_IF_NOT_EXISTS"] = False
        given = ", ".join(f"{name} {_literal(value)}" for name, value in parameters.items())
        connection = quiet(self._duckdb.connect(":memory:"))
        try:
            # DuckDB would fetch what it lacks.
            connection.execute("SET autoinstall_known_extensions = false")
            for name in self._extensions:
                _load(self._duckdb, connection, name)
            if self._secret:
                self._reach(connection)
            if self._password:
                secret = _literal(self._password)
                connection.execute(f"CREATE SECRET (TYPE postgres, PASSWORD {secret})")
            target = _literal(f"ducklake:{self._catalog}")
            connection.execute(f"ATTACH {target} AS lake ({given})")
            connection.execute("USE lake")
        except BaseException as error:
            connection.close()
            if not isinstance(error, self._duckdb.Error):
                raise
            if not may_create and _MISSING in str(error):
                return None
            # It is there twice, and what is wrong comes last.
            text = str(error).replace(self._catalog.partition(":")[2], str(self))
            told = self._storage.shown(self._duckdb.Error(text))
            raise (Unreachable if self.is_unavailable(error) else ConfigError)(
                f"the lake {self} cannot be opened: {told}", option="target"
            ) from None
        return connection

    def _reach(self, connection: Any) -> None:
        """Looks into the storage of the files, before there is a catalog that names it.

        Raises:
            ConfigError: It cannot be used.
        """
        place, look = Storage(self._data, self._storage.options), "SELECT 1 FROM glob(?) LIMIT 1"
        with refusing(place):
            if self._storage.options:
                connection.execute(f"CREATE SECRET ({self._secret})")
        # DuckDB repeats other requests, but not one that lists.
        trying(place, lambda: connection.execute(look, [f"{self._data}/*"]))

    def __str__(self) -> str:
        return self._storage.url


def _conninfo_of(address: Address) -> tuple[str, str]:
    """Returns a connection string of libpq without the password, and the password.

    DuckDB shows the string in its errors, also long after it was opened.

    Raises:
        ConfigError: The URL has another secret.
    """
    user, _, places = address.host.rpartition("@")
    name, _, password = user.partition(":")
    found = [_PLACE.fullmatch(each) for each in places.split(",")]
    given = {
        "user": unquote(name),
        "host": ",".join(unquote(each[1].strip("[]")) for each in found if each),
        "port": ",".join(each[2] or "" for each in found if each).strip(","),
        "dbname": address.path.removeprefix("/"),
        "password": unquote(password),
        "connect_timeout": str(_CONNECT_SECONDS),
    }
    for each in filter(None, address.url.partition("?")[2].split("&")):
        key, _, value = each.partition("=")
        given[unquote(key)] = unquote(value)
    for each in (*OPTIONS, _OWN_OF_POSTGRES):
        given.pop(each, None)
    if "sslpassword" in given:
        raise ConfigError(
            "leave out sslpassword, which errors of DuckDB would show: use a key without one",
            option="target",
        )
    secret = given.pop("password")
    quoted = {key: re.sub(r"([\\'])", r"\\\1", value) for key, value in given.items() if value}
    return " ".join(f"{key}='{value}'" for key, value in quoted.items()), secret


def _load(duckdb: Any, connection: Any, name: str) -> None:
    """Loads an extension: of a package, or one that DuckDB has installed.

    Raises:
        ConfigError: There is none for this DuckDB.
    """
    found = find_spec(f"duckdb_extension_{name}")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        if file.exists():
            connection.execute(f"LOAD {_literal(file)}")
            return
    with contextlib.suppress(duckdb.Error):
        connection.execute(f"LOAD {name}")
        return
    raise ConfigError(
        f"a DuckLake target needs DuckDB's extension {name}, and there is none for DuckDB"
        f" {duckdb.__version__}: install DuckDB 1.5 with those that fit it, by pip install"
        ' "dcp-rs[ducklake]"',
        option="target",
    )


def _literal(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
