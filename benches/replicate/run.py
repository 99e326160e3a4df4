"""Measures the first load of a bucket into each target of `dcp_rs.replicate`.

For each target: documents per second from the call to its return, compared with writing the same
rows from in-memory Arrow data with the target's own bulk load. The embedded cluster runs in the
same process, so its work is included.

With `--tables N`, instead: the first load and an update of N tables, each of a collection, compared
with one table of the same documents, in changes per second of processor time.

Usage: benches/replicate/run.py [--documents N] [--tables N] [--postgres URI] [TARGET ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dcp_rs

sys.path.insert(0, str(Path(__file__).parent))
import many

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa


def main() -> None:
    """Prints a line for each target and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="such as duckdb-table (default: all)"
    )
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--tables", type=int, metavar="N", help="compare so many tables with one")
    parser.add_argument("--runs", type=int, default=3, help="runs of --tables")
    parser.add_argument("--postgres", metavar="URI", help="database to write to")
    options = parser.parse_args()
    cases = _cases(options.postgres)
    chosen = options.targets or list(cases)
    if options.tables is not None:
        urls = {name: _of_many(name, cases[name][0], options.postgres) for name in chosen}
        with dcp_rs.testing.EmbeddedCluster(password=many.PASSWORD) as cluster:
            many.measure(cluster, options.tables, options.documents, urls, options.runs)
        return
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=64) as cluster:
        _fill(cluster, options.documents)
        rows = _rows(cluster)
        print(f"{options.documents} documents of 256 B, {os.cpu_count()} processors")
        print(f"{'target':16} {'replicate':>12} {'bulk load':>12} {'ratio':>6}")
        for name in chosen:
            url, bulk = cases[name]
            folder = Path(tempfile.mkdtemp(prefix="dcp_rs-bench-"))
            try:
                seconds = _replicated(cluster, url.format(folder=folder), name.split("-")[1])
                own = _timed(lambda bulk=bulk, folder=folder: bulk(rows, folder))
            finally:
                shutil.rmtree(folder)
            each, bulk_each = options.documents / seconds, options.documents / own
            print(f"{name:16} {each:10.0f}/s {bulk_each:10.0f}/s {each / bulk_each:6.2f}")


def _fill(cluster: dcp_rs.testing.EmbeddedCluster, count: int) -> None:
    chance = random.Random(1)  # noqa: S311 - values to write, not secrets
    for n in range(count):
        text = f"{chance.getrandbits(460):0115x}" * 2
        document = json.dumps({"n": n, "text": text}, separators=(",", ":"))
        cluster.upsert(f"key_{n:09}", document[:-2] + "x" * (256 - len(document)) + '"}')
    cluster.persist()


def _rows(cluster: dcp_rs.testing.EmbeddedCluster) -> pa.Table:
    """Returns the rows of a table as passed to a target."""
    from dcp_rs.replication.changes import Layout

    layout = Layout.of("table", None)
    with cluster.connect() as client:
        stream = client.stream(until="now", **layout.options)
        return layout.rows(stream.read_all(), 1)


def _replicated(cluster: dcp_rs.testing.EmbeddedCluster, url: str, mode: Any) -> float:
    with cluster.connect() as client:
        return _timed(lambda: dcp_rs.replicate(client, url, mode=mode, once=True))


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _cases(postgres: str | None) -> dict[str, tuple[str, Callable[[pa.Table, Path], object]]]:
    """Returns the URL and the bulk load of each target."""
    cases: dict[str, tuple[str, Callable[[pa.Table, Path], object]]] = {
        "duckdb-table": ("duckdb://{folder}/replica.duckdb", _into_duckdb),
        "duckdb-log": ("duckdb://{folder}/replica.duckdb", _into_duckdb),
        "delta-table": ("delta://{folder}/replica", _into_delta),
        "delta-log": ("delta://{folder}/replica", _into_delta),
        "parquet-log": ("parquet://{folder}/replica", _into_parquet),
        "iceberg-log": ("iceberg://{folder}/replica", _into_iceberg),
    }
    if postgres is not None:
        mark = "&" if "?" in postgres else "?"
        for mode in ("table", "log"):
            url = f"{postgres}{mark}table=bench_{mode}_{os.getpid()}"
            cases[f"postgres-{mode}"] = (url, lambda rows, _: _into_postgres(rows, postgres))
    return cases


def _of_many(name: str, url: str, postgres: str | None) -> str:
    """Returns the URL of a database or folder of tables."""
    return postgres if postgres is not None and name.startswith("postgres") else url


def _into_duckdb(rows: pa.Table, folder: Path) -> None:
    import duckdb

    with duckdb.connect(str(folder / "bulk.duckdb")) as database:
        database.register("rows", rows)
        database.execute("CREATE TABLE bulk AS SELECT * FROM rows")


def _into_postgres(rows: pa.Table, uri: str) -> None:
    import adbc_driver_postgresql.dbapi as adbc

    with adbc.connect(uri) as connection:
        with connection.cursor() as cursor:
            cursor.adbc_ingest(f"bulk_{os.getpid()}", rows, mode="replace")
        connection.commit()


def _into_delta(rows: pa.Table, folder: Path) -> None:
    import deltalake

    deltalake.write_deltalake(str(folder / "bulk"), rows)


def _into_parquet(rows: pa.Table, folder: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(rows, folder / "bulk.parquet", compression="zstd")


def _into_iceberg(rows: pa.Table, folder: Path) -> None:
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("bulk", uri=f"sqlite:///{folder}/bulk.db", warehouse=f"file://{folder}")
    catalog.create_namespace("bulk")
    nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
    catalog.create_table("bulk.rows", nullable).append(rows.cast(nullable))


if __name__ == "__main__":
    main()
