"""Looks at the target of a replication, and writes nothing to it."""

from __future__ import annotations

import contextlib
import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_rs._libraries import require
from dcp_rs.exceptions import DcpError
from dcp_rs.replication import open_target, replicate
from dcp_rs.replication.opening import template_of
from dcp_rs.replication.sharing import split_key, take_share
from dcp_rs.replication.target import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcp_rs.client import Client
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import State


# How many tables are named.
_SHOWN = 5


class _Found(NamedTuple):
    """What is at a target, and whether a replication makes it."""

    text: str
    is_new: bool = False


def scheme_of(url: str) -> str:
    """Returns the part of a URL before its address, which has no secret."""
    return url.partition(":")[0]


def look(client: Client, options: Mapping[str, Any]) -> str:
    """Says what is at the target of a replication, and what would be created.

    Args:
        client: Client of the bucket.
        options: Arguments of `dcp_rs.replicate` that are given.

    Raises:
        ConfigError: An option is wrong, or the target cannot do what is asked of it, or has tables
            that cannot be gone on with.
        CheckpointError: It is written by another number of shares.
        DcpError: Nothing can be written there.
        ImportError: The target's library is not installed.
    """
    given = {name: each.default for name, each in inspect.signature(replicate).parameters.items()}
    given |= options
    # Which imports PyArrow.
    from dcp_rs.replication.preparing import prepare

    tables, settings = prepare(given | {"client": client})
    share = settings.share
    address = replace(
        Address.parse(given["target"]), storage_options=given["storage_options"] or {}
    )
    kinds: Mapping[str, Callable[[Address], _Found]] = {
        "duckdb": _duckdb,
        "ducklake": _ducklake,
        "postgresql": _postgres,
    }
    # No table is opened.
    with contextlib.closing(tables):
        if address.scheme in kinds:
            found = kinds[address.scheme](address)
        elif address.host or address.storage:
            return "not looked at: only its name is known to be right"
        else:
            found = _folder(Path(address.path))
        anew = {} if found.is_new else tables.check(_states(address, given, share), client)
    parts = [found.text]
    parts += [f"{name} would be loaded anew: {why}" for name, why in [*anew.items()][:_SHOWN]]
    if len(anew) > _SHOWN:
        parts.append(f"{_tables(len(anew) - _SHOWN, 'more ')} would be loaded anew")
    if share is not None:
        own = share.vbuckets
        parts.append(f"share {share} has the vBuckets {own.start} to {own.stop - 1}")
    return "; ".join(parts)


def _states(
    address: Address, given: Mapping[str, Any], share: BucketShare | None
) -> dict[str, State]:
    """Returns the states of tables by their names."""
    url = given["target"]
    if (template_of(url, given["tables"]) or given["tables"]) is None:
        target: Any = open_target(url, given["storage_options"])
        take_share(target, share)
        state = target.stored()
        return {} if state is None else {"the table": state}
    from dcp_rs.replication.comparing import CONTENTS, contents_of

    if address.scheme not in CONTENTS:
        return {}
    with contextlib.closing(contents_of(address)) as contents:
        states = [(*split_key(key), state) for key, state in contents.states().items()]
    found = {name: state for name, _, state in states}
    # Of a table with several, that of the share.
    own = None if share is None else str(share)
    return found | {name: state for name, part, state in states if part == own}


def _duckdb(address: Address) -> _Found:
    # Which imports PyArrow.
    from dcp_rs.replication.duckdb_file import DatabaseFile, no_database

    path = Path(address.path)
    if not path.exists():
        DatabaseFile(path).check_folder()
        return _created(path)
    duckdb = require("a look at a DuckDB database", "duckdb", "duckdb")
    try:
        with duckdb.connect(path, read_only=True) as database:
            found = database.execute("SELECT count(*) FROM duckdb_tables() WHERE NOT internal")
            (count,) = found.fetchone()
    except duckdb.Error as error:
        if "in-memory database" in str(error):
            raise no_database(path) from error
        raise DcpError(f"{path} cannot be opened: {' '.join(str(error).split())}") from error
    _check_writable(path)
    return _Found(f"a database with {_tables(count)}")


def _ducklake(address: Address) -> _Found:
    # Which imports PyArrow.
    from dcp_rs.replication.ducklake_catalogs import Lake

    lake = Lake(address)
    if not lake.exists():
        is_file = address.storage == "sqlite"
        return _created(Path(address.path)) if is_file else _Found(f"{lake} is new", is_new=True)
    with lake.connect() as database:
        (count,) = database.execute(
            "SELECT count(*) FROM duckdb_tables() WHERE database_name = current_database()"
        ).fetchone()
    return _Found(f"a lake with {_tables(count)}")


def _postgres(address: Address) -> _Found:
    dbapi = require("a look at a PostgreSQL database", "adbc_driver_postgresql.dbapi", "postgres")
    try:
        with dbapi.connect(address.url) as database, database.cursor() as cursor:
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
    return _Found(f"schema {schema} with {_tables(count)}; {user} may create more")


def _folder(folder: Path) -> _Found:
    if not folder.exists():
        return _created(folder)
    if not folder.is_dir():
        raise DcpError(f"{folder} is a file: name a folder")
    _check_writable(folder)
    return _Found(f"a folder with {sum(1 for _ in folder.iterdir())} entries")


def _created(path: Path) -> _Found:
    above = next(each for each in path.parents if each.exists())
    _check_writable(above)
    return _Found(f"{path} would be created", is_new=True)


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise DcpError(f"{path} cannot be written: change its rights, or run as its owner")


def _tables(count: int, kind: str = "") -> str:
    return f"{count} {kind}table{'s' * (count != 1)}"
