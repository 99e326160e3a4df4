"""What release 0.2.0 left behind goes on: tables, logs, states and checkpoints.

`kept/0.2.0.tar.xz` has a bucket (`data`, four vBuckets, one of them rolled back) and what that
release made of it: for each target and mode a table of JSON and one of `n BIGINT, city STRING`,
and checkpoints. Iceberg's metadata names files by whole paths, so all is unpacked where it was.
`kept/spark_offsets-0.2.0.json` has the offsets that a Spark query of that bucket had stored.
"""

import itertools
import json
import shutil
import tarfile
from pathlib import Path

import psycopg
import pytest

import dcp_rs
import replicas
from dcp_rs.spark import ReadOptions, read_partition
from dcp_rs.spark.driver import Driver

_PLACE = Path("/tmp/dcp_rs-kept-0.2.0")
_ARCHIVE = Path(__file__).parent / "kept" / "0.2.0.tar.xz"
_OFFSETS = _ARCHIVE.with_name("spark_offsets-0.2.0.json")
_COLUMNS = {"json": None, "columns": "n BIGINT, city STRING"}


@pytest.fixture
def kept():
    shutil.rmtree(_PLACE, ignore_errors=True)
    with tarfile.open(_ARCHIVE) as archive:
        archive.extractall(_PLACE.parent, filter="data")
    yield _PLACE
    shutil.rmtree(_PLACE)


@pytest.fixture
def cluster(kept):
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, data=kept / "data") as running:
        yield running


class At:
    """A kept table or log."""

    def __init__(self, kind, name, kept, request):
        self.name = name
        if kind == "postgres":
            uri = request.getfixturevalue("postgres_database")
            with psycopg.connect(uri, autocommit=True) as database:
                (schema,) = database.execute("SELECT current_schema()").fetchone()
                script = (kept / "postgres.sql").read_text().replace("public.", f"{schema}.")
                for line in ("\\restrict", "\\unrestrict", "SELECT pg_catalog.set_config"):
                    script = "\n".join(
                        each for each in script.splitlines() if not each.startswith(line)
                    )
                database.execute(script)
            self.inside = replicas.InPostgres(uri)
            self.url = f"{uri}&table={name}"
        elif kind == "duckdb":
            self.inside = replicas.InDuckDB(kept)
            self.inside.path = kept / "lake.duckdb"
            self.url = f"duckdb://{self.inside.path}?table={name}"
        elif kind == "iceberg":
            self.inside = replicas.InIceberg(kept)
            self.url = f"iceberg://{kept}/iceberg?table=default.{name}"
        else:
            self.inside = {"delta": replicas.InDelta, "parquet": replicas.InParquet}[kind](kept)
            self.inside.folder = kept / f"{kind}_{name}"
            self.url = f"{kind}://{self.inside.folder}"

    def rows(self):
        if hasattr(self.inside, "query"):
            return self.inside.query(f"SELECT * FROM {self.name}")
        if hasattr(self.inside, "catalog"):
            table = self.inside.catalog().load_table(f"default.{self.name}")
            return table.scan().to_arrow().to_pylist()
        return self.inside.rows()


def versions(cluster):
    """Gives the CAS of each document of the bucket, by collection and key."""
    keys = [f"key_{n}" for n in range(60)] + ["text", "misfit"]
    found = {}
    for collection, key in itertools.product(("_default._default", "inventory.hotel"), keys):
        document = cluster.get(key, collection=collection)
        if document is not None:
            found[collection, key] = document.cas
    return found


def newest(rows):
    """Gives the CAS of each document that rows of a table or log come to."""
    documents = rows
    if rows and "op" in rows[0]:
        documents = replicas.settled(rows)
    return {(f"{row['scope']}.{row['collection']}", row["key"]): row["cas"] for row in documents}


@pytest.mark.parametrize("schema", _COLUMNS)
@pytest.mark.parametrize("kind", replicas.ALL)
def test_a_table_of_the_release_before_is_neither_refused_nor_loaded_again(
    cluster, kept, request, kind, schema
):
    target, mode = kind.split("-")
    table = At(target, f"{mode}_{schema}", kept, request)
    before = versions(cluster)
    assert newest(table.rows()) == before
    for n in (3, 50, 51):
        cluster.upsert(f"key_{n}", {"n": 1.5 if n == 51 else n, "city": "new"})
    cluster.remove("key_5", collection="inventory.hotel")
    with cluster.connect() as client:
        for changes in (4, 0):
            done = dcp_rs.replicate(
                client, table.url, mode=mode, document_schema=_COLUMNS[schema], once=True
            )
            assert (done.generation, done.changes) == (1, changes)
    rows = table.rows()
    assert newest(rows) == versions(cluster) != before
    if schema == "columns":
        last = max((row for row in rows if row["key"] == "key_51"), key=lambda row: row["cas"])
        assert (last["n"], last["city"]) == (None, "new")


@pytest.mark.parametrize("name", ["reader.checkpoint", "checkpoint.json", "checkpoint-hotel.json"])
def test_a_checkpoint_of_the_release_before_resumes_where_it_was(cluster, kept, name):
    for collection in (None, "inventory.hotel"):
        cluster.upsert("later", {"n": 1}, collection=collection)
    store = dcp_rs.FileStore(kept / name)
    start = store if name == "reader.checkpoint" else dcp_rs.Checkpoint.from_json(
        (kept / name).read_text()
    )  # fmt: skip
    hotels_only = {"collections": ["inventory.hotel"]} if "hotel" in name else {}
    with (
        cluster.connect() as client,
        client.stream(start=start, until="now", **hotels_only) as stream,
    ):
        rows = [row for batch in stream for row in batch.rows()]
    assert [row["key"] for row in rows] == ["later"] * (1 if hotels_only else 2)


def connecting(cluster):
    options = cluster.connection_options
    return {
        "connectionString": options.connection_string,
        "username": options.username,
        "password": options.password,
        "bucket": options.bucket,
        "persistedOnly": "false",
    }


@pytest.mark.parametrize(
    ("name", "more", "others"),
    [
        ("bucket", {}, 20),
        ("hotels", {"collections": "inventory.hotel"}, 0),
        ("keys", {"keys": "key_*,later", "ops": "mutation"}, 0),
        ("rolled_back", {}, 20),
    ],
)
def test_spark_offsets_of_the_release_before_resume_where_they_were(cluster, name, more, others):
    start = json.loads(_OFFSETS.read_text())[name]
    with Driver(ReadOptions.parse(connecting(cluster) | more)) as driver:
        assert driver.end(start) == start, "another text would be another batch"
        cluster.upsert("later", {"n": 1}, collection="inventory.hotel")
        for n in range(20):
            cluster.upsert(f"other_{n}", {"n": n})
        end = driver.end(start)
        tables = [each for task in driver.partitions(start, end) for each in read_partition(task)]
    rows = [row for table in tables for row in table.to_pylist()]
    assert {row["key"] for row in rows} == {"later", *(f"other_{n}" for n in range(others))}
    assert {row["op"] for row in rows} == {"mutation"}
    rolled_back = {row["vbucket"] for row in rows if row["epoch"]}
    assert rolled_back == ({1} if name == "rolled_back" else set())
