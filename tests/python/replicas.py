"""What the tests of `replicate` compare: the cluster's own documents and what a target holds.

Nothing here reads a stream, or uses `dcp_rs.replication` but for `Stuck`.
"""

import functools
import gzip
import io
import itertools
import json
import os
import threading
from importlib.util import find_spec
from pathlib import Path

import deltalake
import duckdb
import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog

import dcp_rs
import stores
from dcp_rs.replication import open_target
from kafka_broker import headers

ROOT = Path(__file__).parents[2]


class Stuck:
    """A target of which one commit hangs until it is let go."""

    modes = frozenset({"table"})

    def __init__(self, url, commit=2):
        self.inner, self.which = open_target(url), commit
        self.open, self.close = self.inner.open, self.inner.close
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def commit(self, commit):
        if commit.state.commits == self.which:
            self.hangs.set()
            assert self.go_on.wait(30)
        self.inner.commit(commit)


class Collected:
    """A target that only collects its commits."""

    modes = frozenset({"table", "log"})

    def __init__(self, *, takes_rejects=False):
        self.commits, self.takes_rejects = [], takes_rejects

    def open(self, schema, _):
        self.schema = schema

    def commit(self, commit):
        self.commits.append(commit)

    def close(self):
        pass


class Written:
    """Writes documents, and knows every key that was ever written."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.keys = set()

    def upsert(self, key, value, collection=None):
        self.keys.add((collection or "_default._default", key))
        return self.cluster.upsert(key, value, collection=collection)

    def in_order(self):
        return sorted(self.keys, key=lambda name: (name[0], str(name[1])))

    def documents(self):
        """Gives what the cluster has, by collection and key."""
        return {name: value for name, value in self._there().items() if isinstance(name[1], str)}

    def rejects(self):
        """Gives what the cluster has under keys that are not UTF-8."""
        return {name: value for name, value in self._there().items() if isinstance(name[1], bytes)}

    def _there(self):
        there = {
            f"{scope}.{name}"
            for scope, names in self.cluster.collections().items()
            for name in names
        }
        found = {}
        for collection, key in self.keys:
            if collection not in there:
                continue
            document = self.cluster.get(key, collection=collection)
            if document is not None:
                found[collection, key] = document.value
        return found


def as_documents(rows):
    """Gives the documents of rows, which are dicts of a target's columns."""
    found = {}
    for row in rows:
        name = f"{row['scope']}.{row['collection']}", row["key"]
        if row["scope"] is None:
            # Dropped before it was read: nothing but its ID is known until its end is read, too.
            name = f"#{row['collection_id']}", row["key"]
        assert name not in found, f"{name} is doubled"
        text = row["value"]
        found[name] = bytes(row["_malformed"]) if text is None else text.encode()
    return found


class Replica:
    """A target of a test, and what is in it."""

    mode = "table"
    storage_options = None

    def rows(self, columns="*"):
        return self.query(f"SELECT {columns} FROM documents")

    def documents(self):
        return as_documents(of_now(self.mode, self.rows()))

    def rejects(self):
        """Gives the documents of the rejects, by collection and key."""
        rows = self.reject_rows()
        return as_rejects(settle_rejects(self.rows(), rows) if self.mode == "log" else rows)

    def reject_rows(self):
        (there,) = self.query(
            "SELECT count(*) AS n FROM information_schema.tables"
            " WHERE table_name = 'documents_rejected' AND table_schema = current_schema()"
        )
        return self.query("SELECT * FROM documents_rejected") if there["n"] else []

    def unnamed(self):
        """Gives the files that no version names, after the target's own clean-up if it has one."""
        return set()

    def state(self):
        (found,) = self.query("SELECT state FROM dcp_rs_replication")
        return json.loads(found["state"])

    def generations(self):
        (state,) = self.query("SELECT generation, complete_generation FROM dcp_rs_replication")
        return state["generation"], state["complete_generation"]

    def make_another(self):
        """Makes a table that `replicate` knows nothing of."""
        self.query("CREATE TABLE documents (value INTEGER)")
        self.query("INSERT INTO documents VALUES (1)")


class InDuckDB(Replica):
    def __init__(self, folder):
        self.path = folder / "replica.duckdb"
        self.url = f"duckdb://{self.path}"

    def query(self, statement):
        with duckdb.connect(str(self.path)) as database:
            found = database.sql(statement)
            return None if found is None else found.to_arrow_table().to_pylist()


class InDuckLake(Replica):
    """A lake, as a process sees it that has nothing but DuckDB and its extensions.

    Args:
        catalog: The catalog, as DuckDB attaches it.
        url: URL of the target.
        folder: Folder of its files.
        options: Further options to attach it with, after a comma.
    """

    def __init__(self, catalog, url, folder, options=""):
        self.url, self.folder = url, folder
        options = f"DATA_PATH '{folder}'{options}"
        self.attach = f"ATTACH 'ducklake:{catalog}' AS lake ({options})"

    @classmethod
    def in_sqlite(cls, folder):
        path = folder / "lake.db"
        return cls(f"sqlite:{path}", f"ducklake+sqlite://{path}", Path(f"{path}.files"))

    @classmethod
    def in_postgres(cls, uri, folder):
        schema = uri.rpartition("%3D")[2]
        own = f"metadata_schema={schema}&data={folder / 'lake'}"
        options = f", METADATA_SCHEMA '{schema}'"
        return cls(f"postgres:{uri}", f"ducklake+{uri}&{own}", folder / "lake", options)

    @property
    def path(self):
        """The catalog in SQLite."""
        return Path(self.url.partition("//")[2])

    def files(self):
        """Gives the files of the lake."""
        return self.folder.rglob("*.parquet")

    def unnamed(self):
        self.clean_up()
        tables = self.query(
            "SELECT table_name AS name FROM information_schema.tables WHERE table_catalog = 'lake'"
        )
        named = {
            name
            for table in tables
            for row in self.query(f"FROM ducklake_list_files('lake', '{table['name']}')")
            for name in (row["data_file"], row["delete_file"])
        }
        return {str(each) for each in self.files()} - named

    def clean_up(self):
        """Compacts files, forgets versions, and removes files that nothing names."""
        self.query("CHECKPOINT")
        self.query("SELECT * FROM ducklake_expire_snapshots('lake', older_than => now())")
        for what in ("cleanup_old", "delete_orphaned"):
            self.query(f"SELECT * FROM ducklake_{what}_files('lake', cleanup_all => true)")

    def query(self, statement):
        database = _lakes()
        self._reach(database)
        database.execute(self.attach)
        try:
            database.execute("USE lake")
            found = database.sql(statement)
            return None if found is None else found.to_arrow_table().to_pylist()
        finally:
            database.execute("USE memory")
            database.execute("DETACH lake")

    def _reach(self, database):
        """Does what has to be done before its files can be read."""


@functools.cache
def _lakes():
    """Gives a DuckDB that can attach DuckLakes: it takes half a second to make it one."""
    database = duckdb.connect()
    for name in ("sqlite_scanner", "postgres_scanner", "ducklake"):
        database.load_extension(extension(name))
    return database


def extension(name):
    """Gives the file of an extension of DuckDB that is installed as a package."""
    (folder,) = find_spec(f"duckdb_extension_{name}").submodule_search_locations
    (found,) = Path(folder).rglob(f"{name}.duckdb_extension")
    return str(found)


class InPostgres(Replica):
    def __init__(self, uri):
        self.url = uri

    def query(self, statement):
        with psycopg.connect(self.url, row_factory=dict_row) as database:
            # JSON as the text that was written.
            database.adapters.register_loader("json", TextLoader)
            cursor = database.execute(statement)
            return cursor.fetchall() if cursor.description else None


class InDelta(Replica):
    def __init__(self, folder):
        self.folder = folder / "delta"
        self.url = f"delta://{self.folder}"

    def rows(self):
        return self._rows_of(self.folder)

    def reject_rows(self):
        folder = self.folder.with_name("delta_rejected")
        return self._rows_of(folder) if folder.exists() else []

    def _rows_of(self, folder):
        if not deltalake.DeltaTable.is_deltatable(str(folder), self.storage_options):
            return []  # A process that was killed as it made the table has left a log without one.
        table = deltalake.DeltaTable(str(folder), storage_options=self.storage_options)
        if not table.file_uris():
            return []
        query = deltalake.QueryBuilder().register("replica", table)
        return pa.table(query.execute("SELECT * FROM replica")).to_pylist()

    def unnamed(self):
        found = set()
        for folder in (self.folder, self.folder.with_name("delta_rejected")):
            # What a death leaves is removed by the next start, unless somebody has restored another
            # version in between.
            if deltalake.DeltaTable.is_deltatable(str(folder)):
                table = deltalake.DeltaTable(str(folder))
                table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
            named = "".join(each.read_text() for each in folder.glob("_delta_log/*.json"))
            found |= {each.name for each in folder.glob("*.parquet") if each.name not in named}
        return found

    def state(self):
        version = deltalake.DeltaTable(str(self.folder)).transaction_version("dcp_rs.replication")
        return json.loads((self.folder / "_dcp_rs" / f"{version}.json").read_text())

    def generations(self):
        return self.state()["generation"], self.state()["complete_generation"]

    def make_another(self):
        deltalake.write_deltalake(str(self.folder), pa.table({"value": [1]}))


class OfObjects:
    """A replica whose options are those of the storage."""

    def _by_duckdb(self, files):
        """Gives DuckDB as a reader of files, if it has the extension for S3."""
        has_one = find_spec("duckdb_extension_httpfs") and self.stored.scheme == "s3"
        return {"duckdb": lambda: self._in_duckdb(files())} if has_one else {}

    def _in_duckdb(self, files):
        """Gives the rows that DuckDB reads of Parquet files in S3."""
        place, keys = self.stored.place, self.stored.to_read
        with duckdb.connect() as database:
            database.load_extension(extension("httpfs"))
            database.execute(
                "CREATE SECRET (TYPE s3, URL_STYLE path, USE_SSL false, REGION 'us-east-1',"
                f" ENDPOINT '{place['endpoint'].removeprefix('http://')}', KEY_ID 'test',"
                f" SECRET '{keys['aws_secret_access_key']}')"
            )
            read = f"FROM read_parquet({files}, union_by_name = true)"
            return database.sql(read).to_arrow_table().to_pylist()

    @property
    def to_write(self):
        return self.stored.to_write


class InStoredDelta(OfObjects, InDelta):
    def __init__(self, stored):
        self.stored, self.storage_options = stored, stored.to_read
        self.folder = f"{stored.url}/lake/delta"
        self.url = f"delta+{self.folder}"

    def delta(self):
        return deltalake.DeltaTable(self.folder, storage_options=self.storage_options)

    def reject_rows(self):
        there = self.stored.objects("lake/delta_rejected/_delta_log")
        return self._rows_of(f"{self.folder}_rejected") if there else []

    def state(self):
        version = self.delta().transaction_version("dcp_rs.replication")
        path = f"lake/delta/_dcp_rs/{version}.json"
        return json.loads(self.stored.get(path))

    def readers(self):
        return {
            "deltalake": self.rows,
            "polars": lambda: pl.read_delta(
                self.folder, storage_options=self.storage_options
            ).to_dicts(),
            "duckdb": lambda: (
                duckdb.arrow(self.delta().to_pyarrow_dataset()).to_arrow_table().to_pylist()
            ),
        }

    def leave_unfinished(self):
        """Leaves a file as a process that was killed before its commit."""
        names = self.stored.objects("lake/delta")
        name = next(each for each in names if each.endswith(".parquet"))
        self.stored.copy(name, "lake/delta/part-00000-left.parquet")

    def unnamed(self):
        """Gives the files that no version names."""
        found = set()
        for folder in ("lake/delta", "lake/delta_rejected"):
            log = [each for each in self.stored.objects(f"{folder}/_delta_log") if "json" in each]
            named = "".join(self.stored.get(each).decode() for each in log)
            files = [each for each in self.stored.objects(folder) if each.endswith(".parquet")]
            # The log has checkpoints after each hundred commits.
            files = [each for each in files if "/_delta_log/" not in each]
            found |= {each for each in files if each.rpartition("/")[2] not in named}
        return found


class InStoredDuckLake(OfObjects, InDuckLake):
    """A lake with its catalog in SQLite and its files in S3."""

    def __init__(self, stored, folder):
        data = f"s3://{stored.place['bucket']}/lake"
        path = folder / "lake.db"
        super().__init__(f"sqlite:{path}", f"ducklake+sqlite://{path}?data={data}", data)
        self.stored, self.storage_options = stored, self.secret(stored.place["endpoint"])

    @staticmethod
    def secret(endpoint):
        return {
            "key_id": "test",
            "secret": stores.SECRET,
            "region": "us-east-1",
            "endpoint": endpoint.removeprefix("http://"),
            "url_style": "path",
            "use_ssl": "false",
        }

    @property
    def to_write(self):
        return self.secret(self.stored.faults.url)

    def _reach(self, database):
        database.load_extension(extension("httpfs"))
        given = ", ".join(f"{name} '{value}'" for name, value in self.storage_options.items())
        database.execute(f"CREATE OR REPLACE SECRET lake (TYPE s3, {given})")

    def files(self):
        return [f"s3://{self.stored.place['bucket']}/{each}" for each in self.stored.objects("")]


class InParquet(Replica):
    def __init__(self, folder):
        self.folder = folder / "parquet"
        self.url = f"parquet://{self.folder}"

    def rows(self):
        return self._rows_of(self.folder)

    def reject_rows(self):
        folder = self.folder.with_name("parquet_rejected")
        return self._rows_of(folder) if any(folder.glob("[!.]*.parquet")) else []

    def _rows_of(self, folder):
        files = sorted(folder.glob("[!.]*.parquet"))
        return pa.concat_tables(map(pq.read_table, files), promote_options="default").to_pylist()

    def unnamed(self):
        log = {each.name for each in self.folder.glob("*.parquet")}
        rejects = {
            each.name for each in self.folder.with_name("parquet_rejected").glob("*.parquet")
        }
        # Those of files that somebody has removed since stay.
        newest = max(log, default="")
        left = {name for name in rejects - log if name > newest}
        return left | {name for name in log if name.startswith(".")}

    def state(self):
        last = max(self.folder.glob("[!.]*.parquet"))
        return json.loads(pq.read_metadata(last).metadata[b"dcp_rs.state"])

    def generations(self):
        return self.state()["generation"], self.state()["complete_generation"]


class InStoredParquet(OfObjects, InParquet):
    def __init__(self, stored):
        self.stored, self.storage_options = stored, stored.to_read
        self.folder = f"{stored.url}/lake/parquet"
        self.url = f"parquet+{self.folder}"

    def rows(self):
        return self._rows_below("lake/parquet")

    def reject_rows(self):
        return self._rows_below("lake/parquet_rejected")

    def _files(self, folder):
        names = sorted(self.stored.objects(folder))
        return {name: io.BytesIO(self.stored.get(name)) for name in names}

    def _rows_below(self, folder):
        tables = [pq.read_table(file) for file in self._files(folder).values()]
        return pa.concat_tables(tables, promote_options="default").to_pylist() if tables else []

    def state(self):
        *_, last = self._files("lake/parquet").values()
        return json.loads(pq.read_metadata(last).metadata[b"dcp_rs.state"])

    def readers(self):
        return {
            "pyarrow": self.rows,
            "polars": lambda: pl.read_parquet(
                f"{self.folder}/*.parquet",
                storage_options=self.storage_options,
                missing_columns="insert",
            ).to_dicts(),
        } | self._by_duckdb(lambda: [f"{self.folder}/*.parquet"])

    def leave_unfinished(self):
        """Leaves rejects as a process that was killed before its commit."""
        for number in (1, 3):
            name = f"lake/parquet_rejected/{number:012}-00000000000000ff.parquet"
            self.stored.copy("lake/parquet/000000000001.parquet", name)

    def unnamed(self):
        """Gives the files of rejects whose attempt is not in the log."""
        log = {
            pq.read_metadata(file).metadata[b"dcp_rs.attempt"].decode()
            for file in self._files("lake/parquet").values()
        }
        rejects = self.stored.objects("lake/parquet_rejected")
        return {name for name in rejects if name.partition("-")[2].partition(".")[0] not in log}


class InIceberg(Replica):
    def __init__(self, folder):
        self.folder = folder / "iceberg"
        self.url = f"iceberg://{self.folder}"

    def catalog(self):
        return SqlCatalog(
            "dcp_rs", uri=f"sqlite:///{self.folder}/catalog.db", warehouse=f"file://{self.folder}"
        )

    def table(self):
        return self.catalog().load_table("default.changes")

    def reject_rows(self):
        if not self.catalog().table_exists("default.changes_rejected"):
            return []
        return self.catalog().load_table("default.changes_rejected").scan().to_arrow().to_pylist()

    def rows(self):
        return self.table().scan().to_arrow().to_pylist()

    def state(self):
        document = self.table().current_snapshot().summary["dcp_rs.document"]
        return json.loads(gzip.decompress(Path(document.removeprefix("file://")).read_bytes()))

    def generations(self):
        return self.state()["generation"], self.state()["complete_generation"]


class InKafka(Replica):
    """Topics of a name that no other test has."""

    numbers = itertools.count()

    def __init__(self, broker):
        self.broker, self.name = broker, f"t{next(self.numbers)}"
        self.port = int(broker.address.rpartition(":")[2])
        own = f"state={self.name}_states&name={self.name}&partitions=3"
        self.url = f"kafka://{broker.address}?{own}"
        self.url_of_many = self.url
        # Several collections have the same keys.
        self.url += f"&topic={self.name}&key_format=path"

    def rows(self):
        return self.rows_of(self.name)

    def rows_of(self, topic):
        if self.mode == "table":
            return [self._row(each) for each in self.broker.table(topic).values()]
        found, about_vbuckets = [], {}
        for record in self.broker.records(topic):
            row = self._row(record)
            if row["op"] in {"rollback", "system_event"}:
                # In each partition.
                about_vbuckets[row["vbucket"], row["epoch"], row["op"], row["seqno"]] = row
            else:
                found.append(row)
        return found + list(about_vbuckets.values())

    def _row(self, record):
        row = headers(record)
        row["scope"], _, row["collection"] = row.get("collection", "").partition(".")
        value = record.value()
        key = (record.key() or b"").removeprefix(f"{row['scope']}.{row['collection']}.".encode())
        return row | {
            "key": key.decode(),
            "value": None if value is None else value.decode("utf-8", "replace"),
            # All of it is in no column.
            "_extra": (value or b"").decode("utf-8", "replace"),
        }

    def reject_rows(self):
        return self.reject_rows_of(self.name)

    def reject_rows_of(self, topic):
        name = f"{topic}_rejected"
        if self.mode == "table":
            found = self.broker.table(name).values()
        else:
            found = self.broker.records(name)
        rows = [headers(each) | {"key": each.key(), "value": each.value()} for each in found]
        for row in rows:
            # The name of one that is gone may not be known.
            row["scope"], _, row["collection"] = row.get("collection", "").partition(".")
            row["key"] = row["key"].removeprefix(b"%d." % row["collection_id"])
        return rows


class InStoredIceberg(OfObjects, InIceberg):
    """A log in S3.

    Args:
        stored: Where.
        catalog: URL of its catalog for `replicate`.
        to_read: URL of the catalog for others.
    """

    def __init__(self, stored, catalog, to_read=None):
        self.stored, self.storage_options = stored, stored.to_read
        self.uri = to_read or catalog
        self.url = f"iceberg+{catalog}"

    @property
    def to_write(self):
        return self.stored.of_iceberg(self.stored.faults.url)

    def catalog(self):
        own = self.stored.of_iceberg(self.stored.place["endpoint"])
        return load_catalog("default", uri=self.uri, **own)

    def state(self):
        document = self.table().current_snapshot().summary["dcp_rs.document"]
        with self.table().io.new_input(document).open() as file:
            return json.loads(gzip.decompress(file.read()))

    def files(self):
        """Gives the files of the newest snapshot."""
        return [task.file.file_path for task in self.table().scan().plan_files()]

    def readers(self):
        return {
            "pyiceberg": self.rows,
            "polars": lambda: pl.read_parquet(
                self.files(), storage_options=self.stored.to_read, missing_columns="insert"
            ).to_dicts(),
        } | self._by_duckdb(self.files)

    def unnamed(self):
        return set()  # remove_orphan_files of other engines removes what a death has left.


_DATABASES = {"duckdb", "postgres", "ducklake", "ducklake_postgres"}


class OfMany:
    """The tables of a target that has one for each collection.

    Args:
        database: The replica of the target as a whole.
        kind: Kind of the target.
        mode: Mode of the tables.
    """

    storage_options = None

    def __init__(self, database, kind, mode):
        self.options = {"tables": "collection"}
        self.database, self.kind, self.mode = database, kind, mode
        self.url = database.url
        database.mode = mode
        # What the names of its tables begin with.
        self.prefix = ""
        if kind == "kafka":
            self.url, self.prefix = database.url_of_many, f"{database.name}."
            self.options = {"tables": f"{self.prefix}{{scope}}__{{collection}}"}

    def names(self):
        """Gives the names of the tables, without those of rejects and of states."""
        if self.kind in _DATABASES:
            found = self.database.query(
                "SELECT table_name::text AS name FROM information_schema.tables WHERE table_type"
                " = 'BASE TABLE' AND (table_catalog, table_schema)"
                " = (current_database(), current_schema())"
            )
            names = {row["name"] for row in found} - {"dcp_rs_replication"}
        elif self.kind == "kafka":
            topics = self.database.broker.topics()
            names = {each.removeprefix(self.prefix) for each in topics if self.prefix in each}
        elif self.kind == "iceberg":
            catalog = self.database.catalog()
            names = {name for _, name in catalog.list_tables("default")}
        else:
            folders = {each.name for each in self.database.folder.iterdir() if each.is_dir()}
            # A death may leave a hidden one that was being removed.
            names = {name for name in folders if name[0] != "."}
        return {name for name in names if not name.endswith(("_rejected", ".db"))}

    def rows(self, name):
        if self.kind == "kafka":
            return self.database.rows_of(self.prefix + name)
        if self.kind in _DATABASES:
            return self.database.query(f'SELECT * FROM "{name}"')
        if self.kind == "iceberg":
            return (
                self.database.catalog().load_table(f"default.{name}").scan().to_arrow().to_pylist()
            )
        folder = self.database.folder / name
        if self.kind == "parquet" and not any(folder.glob("[!.]*.parquet")):
            return []
        return self.database._rows_of(folder)

    def reject_rows(self, name):
        rejected = f"{name}_rejected"
        if self.kind == "kafka":
            return self.database.reject_rows_of(self.prefix + name)
        if self.kind in _DATABASES:
            there = self.database.query(
                "SELECT 1 AS n FROM information_schema.tables"
                f" WHERE table_name = '{rejected}' AND table_schema = current_schema()"
            )
            return self.database.query(f'SELECT * FROM "{rejected}"') if there else []
        if self.kind == "iceberg":
            catalog = self.database.catalog()
            if not catalog.table_exists(f"default.{rejected}"):
                return []
            return catalog.load_table(f"default.{rejected}").scan().to_arrow().to_pylist()
        folder = self.database.folder / rejected
        has_files = folder.exists() and (self.kind == "delta" or any(folder.glob("[!.]*.parquet")))
        return self.database._rows_of(folder) if has_files else []

    def documents(self):
        """Gives the documents of all tables, each of which is in that of its collection."""
        found = {}
        for name in self.names():
            rows = self.rows(name)
            own = as_documents(of_now(self.mode, rows))
            assert {called(collection) for collection, _ in own} <= {name}
            found |= own
        return found

    def rejects(self):
        found = {}
        for name in self.names():
            rows = self.reject_rows(name)
            if self.mode == "log":
                rows = settle_rejects(self.rows(name), rows)
            found |= as_rejects(rows)
        return found


def called(collection):
    """Gives the name of a collection's table."""
    return collection.replace(".", "__")


def make_many(name, request, folder):
    """Makes a replica with a table for each collection."""
    kind, mode = name.split("-")
    return OfMany(KINDS[kind](request, folder), kind, mode)


def replicate(cluster, target, **options):
    """Replicates once, to a replica or to what `dcp_rs.replicate` takes as a target."""
    if isinstance(target, OfMany):
        options = target.options | options
    if isinstance(target, Replica | OfMany):
        if isinstance(target, Replica) and target.storage_options is not None:
            options = {"storage_options": target.to_write} | options
        options, target = {"mode": target.mode} | options, target.url
    with cluster.connect() as client:
        return dcp_rs.replicate(client, target, **({"once": True} | options))


def _in_catalog(request, folder):
    """Makes a log behind an SQL catalog, or a REST one if `make long` says so."""
    stored = request.getfixturevalue("stored")
    if os.environ.get("DCP_ICEBERG") != "rest":
        return InStoredIceberg(stored, f"sqlite:///{folder}/catalog.db")
    catalog = request.getfixturevalue("rest_catalog")
    # Its requests fail like those of the storage.
    stored.faults.set(catalog=catalog.url)
    return InStoredIceberg(stored, stored.faults.url, catalog.url)


KINDS = {
    "delta": lambda _, folder: InDelta(folder),
    "parquet": lambda _, folder: InParquet(folder),
    "iceberg": lambda _, folder: InIceberg(folder),
    "duckdb": lambda _, folder: InDuckDB(folder),
    "ducklake": lambda _, folder: InDuckLake.in_sqlite(folder),
    "ducklake_postgres": lambda request, folder: InDuckLake.in_postgres(
        request.getfixturevalue("postgres_database"), folder
    ),
    "kafka": lambda request, _: InKafka(request.getfixturevalue("kafka_broker")),
    "postgres": lambda request, _: InPostgres(request.getfixturevalue("postgres_database")),
    "stored_iceberg": _in_catalog,
    "stored_ducklake": lambda request, folder: InStoredDuckLake(
        request.getfixturevalue("stored"), folder
    ),
    "stored_parquet": lambda request, _: InStoredParquet(request.getfixturevalue("stored")),
    "stored_delta": lambda request, _: InStoredDelta(request.getfixturevalue("stored")),
}


# What `make long` tries in place of the others.
CHOSEN = os.environ.get("DCP_TARGETS", "").split()
TABLES = CHOSEN or ["duckdb", "postgres", "delta"]
LOGS = CHOSEN or [*TABLES, "parquet", "iceberg"]
ALL = [f"{kind}-table" for kind in TABLES] + [f"{kind}-log" for kind in LOGS]
HISTORIES = [f"{kind}-history" for kind in TABLES]
# DuckDB 2.0 has no extensions for them; with the lowest one, one dies.
HAS_LAKES = find_spec("duckdb_extension_ducklake") is not None
LAKES = ["ducklake-table"] if HAS_LAKES and not CHOSEN else []
STORED = ["stored_delta-table", "stored_delta-log", "stored_parquet-log", "stored_iceberg-log"]
STORED_LAKES = ["stored_ducklake-table", "stored_ducklake-log"] if HAS_LAKES else []
# Which die like the others, and are tried for the rest in files of their own.
KAFKA = ["kafka-table", "kafka-log"]


def make(name, request, folder):
    """Makes a replica by the name of its kind and mode."""
    kind, mode = name.split("-")
    replica = KINDS[kind](request, folder)
    replica.mode = mode
    return replica


def of_now(mode, rows):
    """Gives the rows that are the documents, of dicts with a target's columns in any order."""
    if mode == "log":
        return settled(rows)
    return [row for row in rows if row["is_current"]] if mode == "history" else rows


def settle(log):
    """Gives the documents that a log comes to, by its rule."""
    return as_documents(settled(log))


def settle_rejects(log, rejects):
    """Gives the rejects that hold of those of a log."""
    about_vbuckets = [row for row in log if row["op"] in {"rollback", "system_event"}]
    newest = max((row["generation"] for row in log), default=0)
    rejects = [row for row in rejects if row["generation"] == newest]
    return settled(about_vbuckets + rejects)


def as_rejects(rows):
    """Gives the documents of rejects, by collection and key."""
    found = {}
    for row in rows:
        name = f"{row['scope']}.{row['collection']}", bytes(row["key"])
        assert name not in found, "a reject is doubled"
        found[name] = bytes(row["value"])
    return found


def settled(log):
    newest = max((row["generation"] for row in log), default=0)
    by_vbucket = {}
    for row in log:
        if row["generation"] == newest:
            by_vbucket.setdefault(row["vbucket"], []).append(row)
    return [row for rows in by_vbucket.values() for row in _settle_vbucket(rows)]


def _settle_vbucket(rows):
    # A rollback comes before the changes of its epoch.
    places = [(row["epoch"], row["op"] != "rollback", row["seqno"]) for row in rows]
    assert len(set(places)) == len(places), "a row is doubled"
    rollbacks = [(row["epoch"], row["seqno"]) for row in rows if row["op"] == "rollback"]
    documents = {}
    for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0]):
        if any(row["epoch"] < epoch and row["seqno"] > seqno for epoch, seqno in rollbacks):
            continue
        if row["op"] == "mutation":
            documents[row["collection_id"], row["key"]] = row
        elif row["op"] == "system_event":
            event = json.loads(row["value"])
            if event["event"] in {"BeginCollection", "EndCollection"}:
                gone = int(event["collection_id"], 16)
                documents = {name: row for name, row in documents.items() if name[0] != gone}
        elif row["op"] != "rollback":
            documents.pop((row["collection_id"], row["key"]), None)
    return documents.values()
