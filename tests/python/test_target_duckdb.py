"""What people do to a DuckDB table that is kept in step, and documents that it cannot hold."""

import threading

import duckdb
import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError, DataError
from dcp_rs.replication import rejects
from replicas import replicate

_LEGACY = b"session\xff\x01"
_HOLDING = """
import duckdb, sys
opened = duckdb.connect(sys.argv[1])
print("open", flush=True)
input()
"""
_SHOWN = """
import sys
from dcp_rs.replication.duckdb_file import DatabaseFile
connection = DatabaseFile(sys.argv[1]).connect()
print(connection.execute("SELECT current_setting('enable_progress_bar')").fetchone())
"""
_FOREIGN = """
    INSERT INTO documents (collection_id, key, vbucket, generation, epoch, seqno)
    VALUES (0, 'foreign', 0, NULL, 0, 1)
"""
_NEEDED = """
    CREATE TABLE documents (
        collection_id BIGINT, key VARCHAR, needed INTEGER NOT NULL, PRIMARY KEY (collection_id, key)
    )
"""
_GENERATED = """
    CREATE TABLE documents (
        collection_id BIGINT, key VARCHAR, a INTEGER, n BIGINT GENERATED ALWAYS AS (a + 1),
        PRIMARY KEY (collection_id, key)
    )
"""


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as running:
        yield running


@pytest.fixture(params=["table", "log"])
def replica(request, tmp_path):
    made = replicas.InDuckDB(tmp_path)
    made.mode = request.param
    return made


@pytest.fixture
def table(tmp_path):
    return replicas.InDuckDB(tmp_path)


def rejected(replica, columns="key, reason, value"):
    return replica.query(f"SELECT {columns} FROM documents_rejected ORDER BY vbucket, seqno")


# ----- changes that cannot be rows -----


def test_a_key_that_is_not_utf8_is_rejected_until_it_is_removed(cluster, replica, caplog):
    cluster.upsert("a", {"n": 1})
    cluster.upsert(_LEGACY, b"old")
    token = cluster.upsert(_LEGACY, b"cache entry")
    done = replicate(cluster, replica)
    assert done.rejected >= 1
    row = rejected(replica, "*")[-1]
    assert (row["key"], row["value"], row["reason"]) == (_LEGACY, b"cache entry", rejects.NOT_UTF8)
    assert (row["vbucket"], row["seqno"], row["op"]) == (token.vbucket, token.seqno, "mutation")
    assert [name for _, name in replica.documents()] == ["a"]
    warned = [each for each in caplog.messages if "was rejected: the key is not UTF-8" in each]
    assert len(warned) == 1, "once per reason"
    assert "session" not in caplog.text.replace("\\", "")
    cluster.remove(_LEGACY)
    replicate(cluster, replica)
    ops = [row["op"] for row in rejected(replica, "op")]
    assert ops[-1:] == (["deletion"] if replica.mode == "log" else [])


def test_without_rejects_there_is_no_table_of_them(cluster, replica):
    cluster.upsert("a", {"n": 1})
    assert replicate(cluster, replica).rejected == 0
    assert replica.query("SELECT 1 FROM duckdb_tables() WHERE table_name LIKE '%rejected'") == []


def test_a_table_with_binary_keys_holds_every_key(cluster, replica):
    cluster.upsert("a", {"n": 1})
    for n in range(2):
        cluster.upsert(_LEGACY, {"n": n})
        assert replicate(cluster, replica, key_type="binary").rejected == 0
    keys = {bytes(row["key"]) for row in replica.query("SELECT key FROM documents WHERE cas > 0")}
    assert keys == {b"a", _LEGACY}
    cluster.remove(_LEGACY)
    replicate(cluster, replica, key_type="binary")
    if replica.mode == "table":
        assert replica.query("SELECT key FROM documents") == [{"key": b"a"}]
    with pytest.raises(ConfigError, match=r"key is BLOB but must be VARCHAR") as raised:
        replicate(cluster, replica)
    assert raised.value.option == "key_type"


def test_on_error_fail_names_the_change_and_writes_nothing_of_it(cluster, replica):
    token = cluster.upsert(_LEGACY, b"x")
    message = (
        rf"vBucket {token.vbucket} seqno {token.seqno}: the key is not UTF-8: choose to reject"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=message) as caught:
            replicate(cluster, replica, on_error="fail")
        assert (caught.value.vbucket, caught.value.seqno) == (token.vbucket, token.seqno)
    replicate(cluster, replica)
    assert [row["key"] for row in rejected(replica)] == [_LEGACY]


def test_rows_that_a_constraint_refuses_are_rejected_and_the_others_written(cluster, table):
    for n in range(300):
        cluster.upsert(f"key_{n}", {"n": n, "city": f"c{n}"})
    schema = "n BIGINT, city STRING"
    replicate(cluster, table, document_schema=schema)
    table.query("ALTER TABLE documents ALTER n SET NOT NULL")
    table.query("CREATE UNIQUE INDEX one_city ON documents (city)")
    bad = {"key_7": {"city": "c7"}, "new": {"n": 1}}
    bad |= {"twin_1": {"n": 1, "city": "twin"}, "twin_2": {"n": 2, "city": "twin"}}
    for n in range(0, 300, 5):
        cluster.upsert(f"key_{n}", {"n": -n, "city": f"d{n}"})
    for key, value in bad.items():
        cluster.upsert(key, value)
    done = replicate(cluster, table, document_schema=schema)
    found = {row["key"]: row["reason"] for row in rejected(table)}
    assert found.keys() - {b"twin_1", b"twin_2"} == {b"key_7"}
    assert len(found) == 2, "one of two that contradict each other"
    assert found[b"key_7"].startswith("DuckDB refuses it: NOT NULL constraint failed")
    assert done.rejected == 2
    values = {row["key"]: row["n"] for row in table.query("SELECT key, n FROM documents")}
    assert "key_7" not in values, "an older version is not kept"
    assert values["key_5"] == -5
    cluster.upsert("key_7", {"n": 8, "city": "c8_again"})
    replicate(cluster, table, document_schema=schema)
    assert {row["key"] for row in rejected(table)} == found.keys() - {b"key_7"}
    cluster.upsert("key_9", {})
    with pytest.raises(DataError, match="NOT NULL"):
        replicate(cluster, table, document_schema=schema, on_error="fail")


def test_a_constraint_that_refuses_all_rows_ends_it_with_its_own_text(cluster, table):
    cluster.upsert("first", {"n": 1})
    replicate(cluster, table, document_schema="n BIGINT")
    table.query("ALTER TABLE documents ALTER n SET NOT NULL")
    for n in range(300):
        cluster.upsert(f"key_{n}", {})
    with pytest.raises(duckdb.ConstraintException, match="NOT NULL constraint failed"):
        replicate(cluster, table, document_schema="n BIGINT")


@pytest.mark.duckdb_2
def test_json_that_duckdb_would_crash_on_is_rejected(cluster, tmp_path):
    deep = b"[" * 30_000 + b"]" * 30_000
    brackets = b'{"text": "' + b"[" * 30_000 + b'"}'
    for key, value in {"deep": deep, "brackets": brackets, "flat": b"{}"}.items():
        cluster.upsert(key, value)
    replica = replicas.InDuckDB(tmp_path)
    replicate(cluster, replica.url + "?value_format=variant")
    assert [row["key"] for row in rejected(replica)] == [b"deep"]
    assert bytes(rejected(replica)[0]["value"]) == deep
    assert len(replica.query("SELECT key FROM documents")) == 2
    json_too = replicas.InDuckDB(tmp_path / "json")
    json_too.path.parent.mkdir()
    assert replicate(cluster, json_too).rejected == 0, "only a VARIANT is built level by level"


def test_rejects_of_a_rolled_back_vbucket_go_with_its_rows(cluster, table):
    cluster.upsert("a", {})
    vbucket = cluster.upsert(_LEGACY, b"kept").vbucket
    before = cluster.high_seqnos()[vbucket]
    replicate(cluster, table)
    other = next(
        key
        for key in (b"\xff%d" % n for n in range(99))
        if cluster.upsert(key, b"lost").vbucket == vbucket
    )
    replicate(cluster, table)
    assert other in {row["key"] for row in rejected(table)}
    cluster.roll_back(vbucket, before)
    replicate(cluster, table)
    kept = {row["key"] for row in rejected(table, "*") if row["vbucket"] == vbucket}
    assert kept == {_LEGACY}


# ----- tables that somebody moved -----


@pytest.mark.parametrize(
    "edit",
    [
        "TRUNCATE documents",
        "DELETE FROM documents WHERE key = 'key_3'",
        "DROP TABLE documents",
        "ALTER TABLE documents DROP COLUMN cas",
        "ALTER TABLE documents DROP COLUMN epoch",
        "ALTER TABLE documents DROP COLUMN seqno",
        "ALTER TABLE documents DROP COLUMN generation",
        _FOREIGN,
    ],
)
def test_a_table_that_somebody_changed_is_loaded_anew(cluster, table, edit, caplog):
    written = replicas.Written(cluster)
    for n in range(20):
        written.upsert(f"key_{n}", {"n": n})
    replicate(cluster, table)
    if "NULL" in edit:
        table.query("ALTER TABLE documents ALTER generation DROP NOT NULL")
    table.query(edit)
    cluster.remove("key_5")
    done = replicate(cluster, table)
    assert table.documents() == written.documents()
    assert done.generation == 2
    assert any("is not as it was left: it " in each for each in caplog.messages)
    assert replicate(cluster, table).commits == 0, "once"


def test_a_column_that_somebody_dropped_is_loaded_anew(cluster, replica, caplog):
    for n in range(3):
        cluster.upsert(f"key_{n}", {"n": n})
    replicate(cluster, replica, document_schema="n BIGINT")
    replica.query("ALTER TABLE documents DROP COLUMN n")
    assert replicate(cluster, replica, document_schema="n BIGINT").generation == 2
    assert sorted(
        row["n"] for row in replica.query("SELECT n FROM documents WHERE generation = 2")
    ) == [0, 1, 2]
    assert any("is not as it was left: it lacks n" in each for each in caplog.messages)
    assert replicate(cluster, replica, document_schema="n BIGINT").commits == 0, "once"


def test_a_start_that_dies_does_not_hide_a_dropped_column(cluster, replica):
    cluster.upsert("key", {"n": 1})
    replicate(cluster, replica, document_schema="n BIGINT")
    replica.query("ALTER TABLE documents DROP COLUMN n")
    end = threading.Event()
    end.set()
    assert replicate(cluster, replica, document_schema="n BIGINT", stop=end).commits == 0
    assert replicate(cluster, replica, document_schema="n BIGINT").generation == 2
    assert replica.query("SELECT n FROM documents WHERE generation = 2") == [{"n": 1}]


def test_a_log_that_somebody_emptied_is_written_anew(cluster, replica):
    cluster.upsert("a", {})
    replicate(cluster, replica)
    replica.query("DELETE FROM documents")
    replicate(cluster, replica)
    assert [name for _, name in replica.documents()] == ["a"]


def test_what_changes_no_rows_causes_no_load(cluster, replica):
    cluster.upsert("a", {"n": 1})
    schema = "n BIGINT"
    replicate(cluster, replica, document_schema=schema)
    for statement in (
        "CREATE INDEX by_n ON documents (n)",
        "CREATE VIEW recent AS SELECT key, n FROM documents",
        "COMMENT ON TABLE documents IS 'ours'",
        "ALTER TABLE documents ADD COLUMN checked_by VARCHAR DEFAULT 'nobody'",
        "CHECKPOINT",
        "VACUUM ANALYZE",
    ):
        replica.query(statement)
    replica.query("UPDATE documents SET checked_by = 'Ann'")
    cluster.upsert("a", {"n": 2})
    cluster.upsert("b", {"n": 3})
    done = replicate(cluster, replica, document_schema=schema)
    assert done.generation == 1
    found = replica.query("SELECT key, n, checked_by FROM documents WHERE cas > 0 ORDER BY seqno")
    last = {row["key"]: (row["n"], row["checked_by"]) for row in found}
    kept = "Ann" if replica.mode == "table" else "nobody"
    assert last == {"a": (2, kept), "b": (3, "nobody")}


def test_a_database_of_the_last_release_goes_on(cluster, table):
    """Its states have no number of rows."""
    cluster.upsert("a", {})
    replicate(cluster, table)
    table.query("ALTER TABLE dcp_rs_replication DROP COLUMN rows")
    cluster.upsert("b", {})
    assert replicate(cluster, table).generation == 1
    table.query("DELETE FROM documents WHERE key = 'a'")
    assert replicate(cluster, table).generation == 2


# ----- names -----


def test_one_table_has_one_state_whatever_it_is_called(cluster, tmp_path):
    path = tmp_path / "lake.duckdb"
    for n, name in enumerate(["Docs", "docs", "main.DOCS", "lake.docs", "lake.main.docs"]):
        cluster.upsert("a", {"n": n})
        done = replicate(cluster, f"duckdb://{path}?table={name}")
        assert (done.generation, done.commits) == (1, 1), name
    with duckdb.connect(str(path)) as database:
        states = database.sql("SELECT table_name FROM dcp_rs_replication").fetchall()
        assert states == [("Docs",)]
        assert database.sql("SELECT count(*) FROM docs").fetchall() == [(1,)]
        database.sql(
            "INSERT INTO dcp_rs_replication"
            " SELECT * REPLACE ('DOCS' AS table_name) FROM dcp_rs_replication"
        )
    with pytest.raises(ConfigError, match="2 states of one table, Docs, DOCS"):
        replicate(cluster, f"duckdb://{path}?table=docs")


def test_a_table_of_rejects_is_nobody_elses(cluster, table):
    cluster.upsert(_LEGACY, b"x")
    replicate(cluster, table)
    with pytest.raises(ConfigError, match="documents_REJECTED is the table of rejects of doc"):
        replicate(cluster, table.url + "?table=documents_REJECTED")
    table.query("CREATE TABLE plain_rejected (a INTEGER)")
    with pytest.raises(ConfigError, match="plain_rejected is where changes go that cannot be"):
        replicate(cluster, table.url + "?table=plain")
    assert table.query("SELECT 1 FROM duckdb_tables() WHERE table_name = 'plain'") == []


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("CREATE VIEW documents AS SELECT 1 AS one", "documents is a view"),
        (_NEEDED, "column needed .* takes no null and has no default"),
        (_GENERATED, "cannot be written to: .*generated column"),
    ],
)
def test_a_table_that_cannot_be_written_is_refused_as_it_is(cluster, table, prepare, message):
    cluster.upsert("a", {"n": 1})
    table.query(prepare)
    before = table.query("SELECT sql FROM duckdb_tables()")
    with pytest.raises(ConfigError, match=message):
        replicate(cluster, table, document_schema="n BIGINT")
    assert table.query("SELECT sql FROM duckdb_tables()") == before


def test_what_is_refused_leaves_nothing_behind(cluster, tmp_path):
    cluster.upsert("a", {})
    path = tmp_path / "lake.duckdb"
    with pytest.raises(ConfigError, match=r"document_schema: city and City are one column to Duck"):
        replicate(cluster, f"duckdb://{path}", document_schema="city STRING, City STRING")
    with pytest.raises(ConfigError, match=r"'infered' is no list of columns: did you mean infer\?"):
        replicate(cluster, f"duckdb://{path}", document_schema="infered")
    with pytest.raises(ConfigError, match="no schema lakes: create it with CREATE SCHEMA"):
        replicate(cluster, f"duckdb://{path}?table=lakes.docs")
    with pytest.raises(ConfigError, match=r"target: the folder .*/none does not exist: create it"):
        replicate(cluster, f"duckdb://{tmp_path}/none/lake.duckdb")
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("orders.csv", b"a,b\n1,2\n"), ("orders.json", b'[{"a": 1}]'), ("empty.csv", b"")],
)
def test_a_file_of_data_is_no_database(cluster, tmp_path, name, content):
    cluster.upsert("a", {"n": 1})
    path = tmp_path / name
    path.write_bytes(content)
    message = f"{name} is no DuckDB database: .* in memory only"
    with cluster.connect() as client:
        for options in ({}, {"tables": "collection"}):
            with pytest.raises(ConfigError, match=message):
                dcp_rs.replicate(client, f"duckdb://{path}", once=True, **options)
        with pytest.raises(ConfigError, match=message):
            dcp_rs.replication.verify(client, f"duckdb://{path}")
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_the_ending_of_a_file_does_not_make_it_one_of_data(cluster, tmp_path):
    cluster.upsert("a", {"n": 1})
    with cluster.connect() as client:
        for changes in (1, 0):
            done = dcp_rs.replicate(client, f"duckdb://{tmp_path}/new.csv", once=True)
            assert done.changes == changes


def test_columns_may_be_called_anything(cluster, table):
    names = ["size (`cm`)", 'say "hi"', "a.b", "a;b", "é", "e\N{COMBINING ACUTE ACCENT}", "select"]
    schema = pa.schema([pa.field(name, pa.int64()) for name in names])
    for n in range(2):
        cluster.upsert("a", dict.fromkeys(names, n))
        replicate(cluster, table, document_schema=schema)
        (row,) = table.query("SELECT * FROM documents")
        assert [row[name] for name in names] == [n] * len(names)


def test_a_slow_statement_shows_no_progress_on_the_output_of_a_program(tmp_path, start_python):
    # A program without a file, as in a notebook, for which DuckDB would.
    out, error = start_python(_SHOWN, str(tmp_path / "x.duckdb")).communicate(timeout=60)
    assert (out, error) == ("(False,)\n", "")


def test_a_file_that_another_process_has_open_is_named(cluster, table, start_python):
    cluster.upsert("a", {})
    other = start_python(_HOLDING, str(table.path))
    assert other.stdout.readline() == "open\n"
    with pytest.raises(ConcurrentWriterError, match=r"another process has .* open, and DuckDB"):
        replicate(cluster, table)


def test_tables_of_one_file_may_be_kept_in_step_by_one_process(cluster, tmp_path):
    written = replicas.Written(cluster)
    for n in range(50):
        written.upsert(f"key_{n}", {"n": n})
    path, errors = tmp_path / "lake.duckdb", []

    def run(name):
        try:
            replicate(cluster, f"duckdb://{path}?table={name}", commit_rows=10)
        except Exception as error:  # noqa: BLE001 - asserted on
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f"docs_{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with duckdb.connect(str(path)) as database:
        for n in range(4):
            assert database.sql(f"SELECT count(*) FROM docs_{n}").fetchall() == [(50,)]
