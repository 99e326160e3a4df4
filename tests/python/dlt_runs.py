"""A run of dlt in a process of its own, which ends itself by SIGKILL where a test says."""

import json
import os
import signal
import sys
from pathlib import Path

import dlt

import dcp_rs
import dcp_rs.dlt


def pipeline_of(folder, kind):
    folder = Path(folder)
    to = {
        "duckdb": lambda: dlt.destinations.duckdb(str(folder / "lake.duckdb")),
        "delta": lambda: dlt.destinations.filesystem(str(folder / "lake")),
        "files": lambda: dlt.destinations.filesystem(str(folder / "lake")),
    }
    return dlt.pipeline(
        "bucket",
        pipelines_dir=str(folder / "pipelines"),
        destination=to[kind](),
        dataset_name="travel",
    )


def source_of(client, kind, **options):
    return dcp_rs.dlt.source(client, table_format="delta" if kind == "delta" else None, **options)


def table_of(pipeline, kind, name="_default___default", columns=("key", "value")):
    """Returns the rows of a table, as somebody without our code finds them."""
    if kind == "delta":
        from dlt.common.libs.deltalake import get_delta_tables

        rows = get_delta_tables(pipeline, name)[name].to_pyarrow_table().to_pylist()
        return [tuple(row[each] for each in columns) for row in rows]
    with pipeline.sql_client() as client:
        names = ", ".join(f'"{each}"' for each in columns)
        return client.execute_sql(f'SELECT {names} FROM "{name}"')


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder, kind, address, step):
    pipeline = pipeline_of(folder, kind)
    with dcp_rs.connect(
        address,
        bucket=os.environ["DCP_RS_BUCKET"],
        username=os.environ["DCP_RS_USERNAME"],
        password=os.environ["DCP_RS_PASSWORD"],
    ) as client:
        source = source_of(client, kind)
        if step == "in extract":
            for resource in source.resources.values():
                resource.add_map(lambda _: die())
        pipeline.extract(source)
    if step == "after extract":
        die()
    pipeline.normalize()
    if step == "after normalize":
        die()
    if step in ("before commit", "in load"):
        from dlt.load.load import Load

        name = "complete_package" if step == "before commit" else "complete_jobs"
        setattr(Load, name, lambda *_, **__: die())
    pipeline.load()
    if step == "after load":
        die()


if __name__ == "__main__":
    run(*json.loads(sys.argv[1]))
