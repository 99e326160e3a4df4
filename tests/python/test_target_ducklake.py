"""DuckLakes: read while they are written, changed by others, and opened by mistake."""

import contextlib
from types import SimpleNamespace
from urllib.parse import quote

import duckdb
import psycopg
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError
from dcp_rs.replication import ducklake_catalogs, open_database, open_target, storage
from dcp_rs.replication.ducklake import DuckLakeTarget
from dcp_rs.replication.target import Address
from postgres_server import PostgresServer
from replicas import replicate
from test_target_outage import Running

PASSWORD = "canary-8f1c2e of+the@catalog"

# Reads a lake until it has as many rows as it is told; says how many at each version that it sees.
_READING = """
import sys, time, duckdb
attach, until, *extensions = sys.argv[1:]
database = duckdb.connect()
for each in extensions:
    database.load_extension(each)
database.execute(attach)
database.execute("USE lake")
before = None
while before is None or sum(count for _, count in before) < int(until):
    database.execute("BEGIN")
    last = database.sql("SELECT table_name, rows FROM dcp_rs_replication ORDER BY 1").fetchall()
    for table, expected in last:
        found = database.sql(f"SELECT count(*), count(DISTINCT key) FROM {table}").fetchall()
        assert found == [(expected, expected)], (table, found, expected)
    database.execute("COMMIT")
    if last != before:
        print(sum(count for _, count in last), flush=True)
    before = last
    time.sleep(0.02)
"""


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def lake(tmp_path):
    return replicas.KINDS["ducklake"](None, tmp_path)


@pytest.fixture(params=["ducklake", "ducklake_postgres"])
def many(request, tmp_path):
    return replicas.make_many(f"{request.param}-table", request, tmp_path)


@pytest.fixture
def in_transaction(monkeypatch):
    """Has something done before or after the last but one of three commits is made."""

    def have(before=None, after=None):
        run, count = DuckLakeTarget._run, iter(range(99))

        def running(self, statement, values=None):
            # The first transaction opens the table.
            is_it = statement == "COMMIT" and next(count) == 2
            if is_it and before is not None:
                before()
            found = run(self, statement, values)
            if is_it and after is not None:
                after()
            return found

        monkeypatch.setattr(DuckLakeTarget, "_run", running)

    return have


def fill(cluster, count=30):
    written = replicas.Written(cluster)
    for n in range(count):
        written.upsert(f"key_{n}", {"n": n})
    return written


@pytest.mark.ducklake
def test_a_lake_is_read_by_another_process_while_it_is_written(
    cluster, many, start_python, following
):
    cluster.create_scope("inventory")
    cluster.create_collection("inventory.hotel")

    def write(step):
        for n in range(20):
            collection = (None, "inventory.hotel")[n % 2]
            cluster.upsert(f"key_{step}_{n}", {"n": n}, collection=collection)

    write(0)
    replicate(cluster, many)
    names = ("sqlite_scanner", "postgres_scanner", "ducklake")
    extensions = [replicas.extension(name) for name in names]
    reader = start_python(_READING, many.database.attach, 60, *extensions)
    assert reader.stdout.readline() == "20\n"
    following(many.url, commit_rows=5, commit_interval=0.05, **many.options)
    for step in range(1, 3):
        write(step)
        while (told := reader.stdout.readline()) and int(told) < 20 * (step + 1):
            pass
        assert told, reader.stderr.read()


@pytest.mark.ducklake
@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_commit_whose_answer_is_lost_is_made_once(cluster, lake, mode, in_transaction):
    lake.mode, written, lost = mode, fill(cluster), []

    def lose():
        lost.append(True)
        raise duckdb.TransactionException("the connection was lost")

    in_transaction(after=lose)
    done = replicate(cluster, lake, commit_rows=10)
    assert lost
    assert lake.documents() == written.documents()
    assert lake.state()["commits"] == done.commits


@pytest.mark.ducklake
def test_a_commit_is_made_again_if_others_change_the_table_and_they_are_noticed(
    cluster, lake, in_transaction, caplog
):
    written, others = fill(cluster), []
    replicate(cluster, lake)
    for n in range(4, 30):
        written.upsert(f"key_{n}", {"again": n})

    def delete():
        others.append(lake.query("DELETE FROM documents WHERE key = 'key_3'"))

    in_transaction(before=delete)
    assert replicate(cluster, lake, commit_rows=10).generation == 1
    assert others
    assert replicate(cluster, lake).generation == 2
    assert "is not as it was left: it has 29 rows, and had 30" in caplog.text
    assert lake.documents() == written.documents()
    assert replicate(cluster, lake).generation == 2, "once"


@pytest.mark.ducklake
def test_of_two_writers_that_which_starts_last_goes_on(cluster, lake):
    written = fill(cluster)
    writing = replicas.Collected()
    replicate(cluster, writing, commit_rows=10)
    first, last = open_target(lake.url), open_target(lake.url)
    for target in (first, last):
        target.open(writing.schema, "table")
    with pytest.raises(ConcurrentWriterError, match="another process writes to documents"):
        first.commit(writing.commits[0])
    for commit in writing.commits:
        last.commit(commit)
        with pytest.raises(ConcurrentWriterError, match="another process writes to documents"):
            first.commit(commit)
    first.close()
    last.close()
    assert lake.documents() == written.documents()


@pytest.mark.ducklake
def test_versions_may_be_forgotten_and_files_compacted(cluster, lake):
    fill(cluster)
    for n in range(2):
        written = fill(cluster)
        written.upsert("key_1", {"n": n})
        replicate(cluster, lake, commit_rows=5)
    files = list(lake.files())
    lake.query("SELECT * FROM ducklake_expire_snapshots('lake', older_than => now())")
    lake.query("SELECT * FROM ducklake_cleanup_old_files('lake', cleanup_all => true)")
    lake.query("CHECKPOINT")
    lake.query("SELECT * FROM ducklake_cleanup_old_files('lake', cleanup_all => true)")
    assert len(list(lake.files())) < len(files) / 4
    written.upsert("key_1", {"n": "last"})
    assert replicate(cluster, lake).generation == 1
    assert lake.documents() == written.documents()


@pytest.mark.ducklake
def test_a_type_is_widened_only_as_a_lake_can(cluster, lake):
    cluster.upsert("a", {"n": 1, "x": 1})
    replicate(cluster, lake, document_schema="infer")
    cluster.upsert("b", {"n": 0.5, "x": 2, "y": "new"})
    replicate(cluster, lake, document_schema="infer")
    found = {row["key"]: (row["n"], row["x"], row["y"]) for row in lake.rows("key, n, x, y")}
    assert found == {"a": (1, 1, None), "b": (None, 2, "new")}


@pytest.mark.ducklake
def test_what_is_refused_leaves_nothing_behind(cluster, lake, tmp_path):
    cluster.upsert("a", {})
    for schema, told in [
        ("city STRING, City STRING", "city and City are one column"),
        ("v VARIANT", "which DuckLake cannot write: declare it as STRING"),
    ]:
        with pytest.raises(ConfigError, match=told):
            replicate(cluster, lake, document_schema=schema)
    with pytest.raises(ConfigError, match="no schema lakes: create it with CREATE SCHEMA"):
        replicate(cluster, f"{lake.url}?table=lakes.docs")
    assert not [each for each in tmp_path.iterdir() if "lake" in each.name]


@pytest.mark.ducklake
def test_a_lake_that_cannot_be_opened_is_told_of(cluster, lake, tmp_path):
    cluster.upsert("a", {})
    (tmp_path / "text.db").write_text("text " * 1000)
    for url, told in [
        (f"{lake.url.rpartition('/')[0]}/none/lake.db", "/none does not exist: create it first"),
        (
            f"ducklake+sqlite://{tmp_path}/text.db",
            r"the lake ducklake\+sqlite:.* file is not a database",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            replicate(cluster, url)
    replicate(cluster, lake)
    with pytest.raises(ConfigError, match="does not match existing data path"):
        replicate(cluster, f"{lake.url}?data={tmp_path}/other")


@pytest.mark.ducklake
def test_a_catalog_in_postgresql_that_cannot_be_opened_is_told_of(cluster, postgres_database):
    with pytest.raises(ConfigError, match="is a new lake: name the folder of its files, as in &d"):
        replicate(cluster, f"ducklake+{postgres_database}&metadata_schema=none")
    with pytest.raises(ConfigError, match=r"cannot be opened: .*Connection refused") as raised:
        replicate(cluster, "ducklake+postgresql://me:canary-8f1c2e@127.0.0.1:9/db?data=/x")
    assert "canary" not in str(raised.value)


@pytest.mark.ducklake
def test_no_error_shows_the_password_of_the_catalog(cluster, tmp_path):
    fill(cluster)
    with contextlib.closing(PostgresServer()) as server:
        uri = f"postgresql:///postgres?{server.options}"
        with psycopg.connect(uri, autocommit=True) as database:
            database.execute(f"CREATE ROLE etl SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
            rules = "local all postgres trust\nlocal all etl scram-sha-256\n"
            (server.folder / "data" / "pg_hba.conf").write_text(rules)
            database.execute("SELECT pg_reload_conf()")
        address = f"host={server.folder}&user=etl&password={quote(PASSWORD)}&data={tmp_path}/data"
        url = f"ducklake+postgresql:///postgres?{address}"

        stopped = []

        def stop(progress):
            if progress.commits and not stopped:
                stopped.append(server.stop())
                cluster.upsert("late", {})

        with cluster.connect() as client:
            for _ in ("while it runs", "at a start"):
                with pytest.raises(Exception, match="Unable to connect to Postgres") as told:
                    dcp_rs.replicate(client, url, on_progress=stop)
                assert "No such file or directory" in str(told.value)
                assert PASSWORD not in str(told.value)


@pytest.mark.ducklake
@pytest.mark.parametrize("options", [{}, {"tables": "collection"}], ids=["one", "each"])
def test_a_catalog_that_goes_away_is_tried_again(cluster, tmp_path, options):
    fill(cluster, 1)
    with contextlib.closing(PostgresServer()) as server:
        url = f"ducklake+postgresql:///postgres?{server.options}&data={tmp_path}/data"
        running = Running(cluster, url, **options)
        running.has(1)
        server.stop()
        cluster.upsert("second", {})
        running.until(lambda now: now.phase == "target unavailable")
        server.start()
        running.has(2)
        running.end()
        server.stop()
        with pytest.raises(ConfigError, match=r"cannot be opened: .*No such file or directory"):
            replicate(cluster, url, target_retry_timeout=60, **options)


@pytest.mark.ducklake
@pytest.mark.parametrize(
    ("text", "is_away"),
    [
        ('Unable to connect to Postgres at "": FATAL:  the database system is starting up', True),
        ('Unable to connect to Postgres at "": FATAL:  password authentication failed', False),
        ("Failed to execute query: server closed the connection unexpectedly", True),
        ("HTTP GET error reading 'http://s3/x.parquet' (HTTP 503 Service Unavailable)", True),
        ("Could not connect to server error for HTTP PUT to 'http://s3/x.parquet'", True),
        ("HTTP GET error reading 'http://s3/x.parquet' (HTTP 403 Forbidden)", False),
        ("Table with name documents does not exist", False),
    ],
)
def test_what_passes_is_told_from_what_a_catalog_or_its_files_refuse(lake, text, is_away):
    assert open_target(lake.url).is_unavailable(duckdb.IOException(text)) == is_away


@pytest.mark.parametrize(
    ("url", "conninfo"),
    [
        ("//u@h/d", "user='u' host='h' dbname='d' connect_timeout='10'"),
        ("//u:p%40+@h:1,[::1]:2/d", "user='u' host='h,::1' port='1,2' dbname='d'"),
        ("///d?host=%2Ftmp&data=/x&password=p%40%2B", "host='/tmp' dbname='d'"),
        (r"//u%27\\@h/d?connect_timeout=3", r"user='u\'\\\\' host='h' dbname='d'"),
    ],
)
def test_a_catalogs_password_is_told_apart(url, conninfo):
    found, password = ducklake_catalogs._conninfo_of(Address.parse(f"ducklake+postgresql:{url}"))
    assert found.startswith(conninfo)
    assert password == ("p@+" if "p%40" in url else "")


def test_a_passphrase_in_a_url_is_refused(cluster):
    url = "ducklake+postgresql://u@h/d?sslpassword=x&data=/x"
    with cluster.connect() as client, pytest.raises(ConfigError, match="leave out sslpassword"):
        dcp_rs.replicate(client, url, once=True)


@pytest.mark.ducklake
def test_the_files_of_a_lake_may_be_in_s3(cluster, lake, s3_bucket):
    written = fill(cluster)
    url = f"{lake.url}?data=s3://{s3_bucket['bucket']}/lake"
    options = {
        "key_id": "test",
        "secret": "canary-8f1c2e of storage",
        "region": "us-east-1",
        "endpoint": s3_bucket["endpoint"].removeprefix("http://"),
        "url_style": "path",
        "use_ssl": "false",
    }
    for wrong, told in [
        ({"endpoint": "127.0.0.1:9"}, "cannot be used"),
        ({"cipher": "x"}, "cannot be used: .*cipher"),
        ({"x y": "x"}, "has parameters of a secret"),
    ]:
        with pytest.raises(ConfigError, match=told) as raised:
            replicate(cluster, url, storage_options=options | wrong)
        assert "canary" not in str(raised.value)
    with pytest.raises(ConfigError, match="s3://none/lake cannot be used: "):
        replicate(cluster, f"{lake.url}?data=s3://none/lake", storage_options=options)
    assert not lake.path.exists(), "nothing was made"
    for n in range(2):
        written.upsert("key_1", {"again": n})
        replicate(cluster, url, storage_options=options, commit_rows=10)
    secret = ", ".join(f"{name} '{value}'" for name, value in options.items())
    with duckdb.connect() as database:
        for name in ("sqlite_scanner", "httpfs", "ducklake"):
            database.load_extension(replicas.extension(name))
        database.execute(f"CREATE SECRET (TYPE s3, {secret})")
        database.execute(f"ATTACH 'ducklake:sqlite:{lake.path}' AS lake")
        found = database.sql("FROM lake.documents").to_arrow_table().to_pylist()
    assert replicas.as_documents(found) == written.documents()
    assert not list(lake.files())


@pytest.mark.ducklake
def test_a_start_asks_a_storage_that_throttles_again(cluster, stored, tmp_path, monkeypatch):
    lake, paused = replicas.InStoredDuckLake(stored, tmp_path), []

    def sleep(seconds):
        paused.append(seconds)
        stored.faults.set(refuse=None)

    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=sleep))
    stored.faults.set(refuse=[503, "SlowDown"])
    written = fill(cluster)
    replicate(cluster, lake)
    assert len(paused) == 1
    assert lake.documents() == written.documents()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ducklake:///x", r"in SQLite or PostgreSQL: write ducklake\+sqlite:// or"),
        ("ducklake+mysql://h/x", r"in SQLite or PostgreSQL: write ducklake\+sqlite:// or"),
        ("ducklake+sqlite://", r"name the catalog, as in ducklake\+sqlite:///"),
        ("ducklake+sqlite://data/x", r"'data' is a host here"),
        ("ducklake+sqlite:///x?schema=s", r"no option schema; it takes data, table"),
        ("ducklake+sqlite:///x?data=hdfs://h/x", "data is the .*, or begins with s3:// or gs://"),
        ("ducklake+sqlite:///x?data=lake", "data is the absolute path of a folder"),
        ("ducklake+postgresql://a:b@c@h/x", r"write @ as %40"),
    ],
)
def test_a_url_that_names_no_lake_is_refused(url, told):
    for opening in (open_target, open_database):
        with pytest.raises(ConfigError, match=told):
            opening(url)


def test_a_duckdb_without_the_extensions_says_so(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ducklake_catalogs, "find_spec", lambda _: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    told = rf"extension sqlite_scanner, and there is none for DuckDB {duckdb.__version__}: .*1\.5"
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, f"ducklake+sqlite://{tmp_path}/lake.db")
    assert not list(tmp_path.glob("lake*"))
