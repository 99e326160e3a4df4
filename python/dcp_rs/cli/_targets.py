"""Looks at the target of a replication, and writes nothing to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require
from dcp_rs.exceptions import DcpError
from dcp_rs.replication import open_database, open_target
from dcp_rs.replication.target import Address

if TYPE_CHECKING:
    from collections.abc import Mapping


def scheme_of(url: str) -> str:
    """Returns the part of a URL before its address, which has no secret."""
    return url.partition(":")[0]


def look(url: str, *, has_tables: bool) -> str:
    """Says what is there, and what would be created.

    Raises:
        ConfigError: The URL is wrong.
        DcpError: Nothing can be written there.
        ImportError: The target's library is not installed.
    """
    # Neither opens anything.
    (open_database if has_tables else open_target)(url)
    address = Address.parse(url)
    kinds: Mapping[str, Any] = {"duckdb": _duckdb, "postgresql": _postgres}
    if address.scheme in kinds:
        return str(kinds[address.scheme](address, url))
    if address.host:
        return "not looked at: only its name is known to be right"
    return _folder(Path(address.path))


def _duckdb(address: Address, _url: str) -> str:
    path = Path(address.path)
    if not path.exists():
        if not path.parent.is_dir():
            raise DcpError(f"there is no folder {path.parent}: create it")
        return _created(path)
    duckdb = require("a look at a DuckDB database", "duckdb", "duckdb")
    try:
        with duckdb.connect(path, read_only=True) as database:
            found = database.execute("SELECT count(*) FROM duckdb_tables() WHERE NOT internal")
            (count,) = found.fetchone()
    except duckdb.Error as error:
        raise DcpError(f"{path} cannot be opened: {' '.join(str(error).split())}") from error
    _check_writable(path)
    return f"a database with {_tables(count)}"


def _postgres(_address: Address, url: str) -> str:
    dbapi = require("a look at a PostgreSQL database", "adbc_driver_postgresql.dbapi", "postgres")
    uri = url.partition("table=")[0].rstrip("?&") if "table=" in url else url
    try:
        with dbapi.connect(uri) as database, database.cursor() as cursor:
            cursor.execute(
                "SELECT current_user::text, current_schema()::text,"
                " has_schema_privilege(current_schema(), 'CREATE'), count(*)::int4"
                " FROM pg_tables WHERE schemaname = current_schema()"
            )
            user, schema, may_create, count = cursor.fetchone()
    except dbapi.Error as error:
        raise DcpError(f"cannot be used: {str(error).splitlines()[0]}") from error
    if not may_create:
        raise DcpError(
            f"{user} may create no tables in the schema {schema}: grant CREATE on it, or name"
            " another in search_path"
        )
    return f"schema {schema} with {_tables(count)}; {user} may create more"


def _folder(folder: Path) -> str:
    if not folder.exists():
        return _created(folder)
    if not folder.is_dir():
        raise DcpError(f"{folder} is a file: name a folder")
    _check_writable(folder)
    return f"a folder with {sum(1 for _ in folder.iterdir())} entries"


def _created(path: Path) -> str:
    above = next(each for each in path.parents if each.exists())
    _check_writable(above)
    return f"{path} would be created"


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise DcpError(f"{path} cannot be written: change its rights, or run as its owner")


def _tables(count: int) -> str:
    return f"{count} table{'s' * (count != 1)}"
