"""Readers of targets: those of the target's library, and those that others wrote."""

from importlib.util import find_spec

import duckdb
import polars as pl
import psycopg
from psycopg.rows import dict_row

import replicas


def newest(rows, mode):
    """Gives the rows of the documents that there are, by key."""
    if mode == "table":
        found = {row["key"]: row for row in rows}
        assert len(found) == len(rows), "a key is doubled"
        return found
    changes = [row for row in rows if row["key"] is not None]
    last = {row["key"]: row for row in sorted(changes, key=lambda row: row["seqno"])}
    return {key: row for key, row in last.items() if row["op"] == "mutation"}


def _in_duckdb(statement, path=":memory:", extensions=()):
    """Gives rows as DuckDB's client makes them, in UTC."""
    with duckdb.connect(path) as database:
        for extension in extensions:
            database.load_extension(replicas.extension(extension))
        database.sql("SET TimeZone = 'UTC'")
        cursor = database.execute(statement)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _arrow_of_duckdb(replica):
    return replica.query("SELECT * FROM documents")


def _postgres(replica, *, binary):
    with psycopg.connect(replica.url, row_factory=dict_row) as database:
        database.execute("SET TIME ZONE 'UTC'")
        return database.cursor(binary=binary).execute("SELECT * FROM documents").fetchall()


def _parquet_files(replica):
    return sorted(replica.folder.glob("[!.]*.parquet"))


def _iceberg_files(replica):
    return [
        task.file.file_path.removeprefix("file://") for task in replica.table().scan().plan_files()
    ]


def _duckdb_on(files):
    return _in_duckdb(f"FROM read_parquet({[*map(str, files)]}, union_by_name = true)")


def _polars_on(files):
    return pl.read_parquet([*files], missing_columns="insert").to_dicts()


def of(replica):
    """Gives the readers for a replica, by name."""
    if isinstance(replica, replicas.InDuckDB):
        return {
            "DuckDB's rows": lambda it: _in_duckdb("FROM documents", str(it.path)),
            "DuckDB's Arrow data": _arrow_of_duckdb,
        }
    if isinstance(replica, replicas.InDuckLake):
        return {"DuckDB's Arrow data": _arrow_of_duckdb}
    if isinstance(replica, replicas.InPostgres):
        return {
            "psycopg, from text": lambda it: _postgres(it, binary=False),
            "psycopg, from binary": lambda it: _postgres(it, binary=True),
        }
    if isinstance(replica, replicas.InDelta):
        found = {
            "deltalake": lambda it: it.rows(),
            "polars": lambda it: pl.read_delta(str(it.folder)).to_dicts(),
        }
        if find_spec("duckdb_extension_delta"):
            found["DuckDB's Delta"] = lambda it: _in_duckdb(
                f"FROM delta_scan('{it.folder}')", extensions=["delta"]
            )
        return found
    files = _parquet_files if isinstance(replica, replicas.InParquet) else _iceberg_files
    found = {
        "its library": lambda it: it.rows(),
        "DuckDB's Parquet": lambda it: _duckdb_on(files(it)),
        "polars's Parquet": lambda it: _polars_on(files(it)),
    }
    if isinstance(replica, replicas.InIceberg) and find_spec("duckdb_extension_iceberg"):
        found["DuckDB's Iceberg"] = lambda it: _in_duckdb(
            f"FROM iceberg_scan('{it.table().metadata_location}')", extensions=["avro", "iceberg"]
        )
    return found
