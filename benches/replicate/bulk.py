"""What each target does by itself with the rows of a replication: a bulk load, and a MERGE."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from many import connected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa

    Bulk = Callable[[pa.Table, str, Path, str | None], float]
    Merge = Callable[[pa.Table], float]

# A document is told by its collection and key, by which tables of a database are unique.
_KEY = "collection_id, key"


def rows_of(job: dict[str, Any]) -> pa.Table:
    """Returns the rows of a table as passed to a target."""
    from dcp_rs.replication.changes import Layout

    layout = Layout.of("table", None)
    with connected(job) as client:
        stream = client.stream(until="now", **layout.options)
        return layout.rows(stream.read_all(), 1).combine_chunks()


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _into_duckdb(rows: pa.Table, mode: str, folder: Path, _: str | None) -> float:
    import duckdb

    def load() -> None:
        with duckdb.connect(str(folder / "bulk.duckdb")) as database:
            database.register("rows", rows)
            query = "SELECT * REPLACE (value::JSON AS value) FROM rows"
            database.execute(f"CREATE TABLE bulk AS {query} LIMIT 0")
            if mode == "table":
                database.execute(f"ALTER TABLE bulk ADD PRIMARY KEY ({_KEY})")
            database.execute(f"INSERT INTO bulk {query}")

    return _timed(load)


def _lake(folder: Path, name: str) -> Any:
    """Opens a DuckLake of its own."""
    from dcp_rs.replication.ducklake_catalogs import Lake
    from dcp_rs.replication.target import Address

    return Lake(Address.parse(f"ducklake+sqlite:///{folder}/{name}.db")).connect()


def _into_ducklake(rows: pa.Table, _mode: str, folder: Path, _: str | None) -> float:
    def load() -> None:
        with _lake(folder, "bulk") as lake:
            lake.register("rows", rows)
            lake.execute("CREATE TABLE bulk AS SELECT * FROM rows")

    return _timed(load)


def _into_postgres(rows: pa.Table, mode: str, folder: Path, uri: str | None) -> float:
    import adbc_driver_postgresql.dbapi as adbc

    def load() -> None:
        with adbc.connect(str(uri)) as connection:
            with connection.cursor() as cursor:
                name = f"bulk_{folder.name[-8:].lower()}"
                cursor.adbc_ingest(name, rows.slice(0, 0), mode="replace")
                if mode == "table":
                    cursor.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({_KEY})")
                cursor.adbc_ingest(name, rows, mode="append")
            connection.commit()

    return _timed(load)


def _into_delta(rows: pa.Table, _mode: str, folder: Path, _: str | None) -> float:
    import deltalake

    return _timed(lambda: deltalake.write_deltalake(str(folder / "bulk"), rows))


def _into_parquet(rows: pa.Table, _mode: str, folder: Path, _: str | None) -> float:
    import pyarrow.parquet as pq

    return _timed(lambda: pq.write_table(rows, folder / "bulk.parquet", compression="zstd"))


def _into_iceberg(rows: pa.Table, _mode: str, folder: Path, _: str | None) -> float:
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    def load() -> None:
        uri = f"sqlite:///{folder}/bulk.db"
        catalog = SqlCatalog("bulk", uri=uri, warehouse=f"file://{folder}")
        catalog.create_namespace("bulk")
        nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
        catalog.create_table("bulk.rows", nullable).append(rows.cast(nullable))

    return _timed(load)


BULK: dict[str, Bulk] = {
    "duckdb": _into_duckdb,
    "ducklake": _into_ducklake,
    "delta": _into_delta,
    "parquet": _into_parquet,
    "iceberg": _into_iceberg,
    "postgres": _into_postgres,
}

_SAME = "old.collection_id = new.collection_id AND old.key = new.key"


def _merging_duckdb(rows: pa.Table, folder: Path, _: str | None) -> Merge:
    import duckdb

    return _merging_by_duckdb(rows, lambda: duckdb.connect(str(folder / "merged.duckdb")))


def _merging_ducklake(rows: pa.Table, folder: Path, _: str | None) -> Merge:
    return _merging_by_duckdb(rows, lambda: _lake(folder, "merged"))


def _merging_by_duckdb(rows: pa.Table, connect: Callable[[], Any]) -> Merge:
    with connect() as database:
        database.register("rows", rows)
        database.execute("CREATE TABLE merged AS SELECT * FROM rows")

    def merge(part: pa.Table) -> None:
        with connect() as database:
            database.register("part", part)
            database.execute(
                f"MERGE INTO merged AS old USING part AS new ON {_SAME}"
                " WHEN MATCHED THEN UPDATE WHEN NOT MATCHED THEN INSERT"
            )

    return lambda part: _timed(lambda: merge(part))


def _merging_postgres(rows: pa.Table, _: Path, uri: str | None) -> Merge:
    import adbc_driver_postgresql.dbapi as adbc

    name = f"merged_{uuid.uuid4().hex[:8]}"
    with adbc.connect(str(uri)) as connection:
        with connection.cursor() as cursor:
            cursor.adbc_ingest(name, rows, mode="create")
            cursor.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({_KEY})")
        connection.commit()
    others = [each for each in rows.column_names if each not in {"collection_id", "key"}]
    sets = ", ".join(f'"{each}" = new."{each}"' for each in others)
    names = ", ".join(f'"{each}"' for each in rows.column_names)
    values = ", ".join(f'new."{each}"' for each in rows.column_names)

    def merge(part: pa.Table) -> None:
        with adbc.connect(str(uri)) as connection:
            with connection.cursor() as cursor:
                cursor.adbc_ingest(f"{name}_part", part, mode="create", temporary=True)
                cursor.execute(
                    f"MERGE INTO {name} AS old USING {name}_part AS new ON {_SAME}"  # noqa: S608 - its own names
                    f" WHEN MATCHED THEN UPDATE SET {sets}"
                    f" WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({values})"
                )
            connection.commit()

    return lambda part: _timed(lambda: merge(part))


def _merging_delta(rows: pa.Table, folder: Path, _: str | None) -> Merge:
    import deltalake

    path = str(folder / "merged")
    deltalake.write_deltalake(path, rows)

    def merge(part: pa.Table) -> None:
        table = deltalake.DeltaTable(path)
        merger = table.merge(part, _SAME, source_alias="new", target_alias="old")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    return lambda part: _timed(lambda: merge(part))


MERGES: dict[str, Callable[[pa.Table, Path, str | None], Merge]] = {
    "duckdb": _merging_duckdb,
    "ducklake": _merging_ducklake,
    "delta": _merging_delta,
    "postgres": _merging_postgres,
}
