"""What people do to a PostgreSQL table that is kept in step, and documents that it cannot hold."""

import threading
import time
import traceback
from pathlib import Path

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError, DataError
from dcp_rs.replication import open_target, rejects
from dcp_rs.replication.postgres import target as postgres
from dcp_rs.replication.postgres.session import Session
from replicas import replicate

_LEGACY = b"session\xff\x01"
_SCHEMA = "n BIGINT, city STRING"


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as running:
        yield running


@pytest.fixture(params=["table", "log"])
def replica(request, postgres_database):
    made = replicas.InPostgres(postgres_database)
    made.mode = request.param
    return made


@pytest.fixture
def table(postgres_database):
    return replicas.InPostgres(postgres_database)


def rejected(replica, columns="key, reason, value"):
    return replica.query(f"SELECT {columns} FROM documents_rejected ORDER BY vbucket, seqno")


def has_rejects(replica):
    return replica.query("SELECT to_regclass('documents_rejected') AS it") != [{"it": None}]


def values(replica, column="n"):
    return {
        row["key"]: row[column] for row in replica.query(f"SELECT key, {column} FROM documents")
    }


def in_step(cluster, replica, **options):
    """Whether nothing is left to do, and no load is due."""
    done = replicate(cluster, replica, **options)
    return (done.generation, done.commits) == (1, 0)


# ----- changes that cannot be rows -----


def test_a_key_that_is_not_utf8_is_rejected_until_it_is_removed(cluster, replica, caplog):
    cluster.upsert("a", {"n": 1})
    assert replicate(cluster, replica).rejected == 0
    assert not has_rejects(replica)
    cluster.upsert(_LEGACY, b"old")
    token = cluster.upsert(_LEGACY, b"cache entry")
    assert replicate(cluster, replica).rejected >= 1
    row = rejected(replica, "*")[-1]
    assert (row["key"], row["value"], row["reason"]) == (_LEGACY, b"cache entry", rejects.NOT_UTF8)
    assert (row["vbucket"], row["seqno"], row["op"]) == (token.vbucket, token.seqno, "mutation")
    assert [name for _, name in replica.documents()] == ["a"]
    assert "session" not in caplog.text
    cluster.remove(_LEGACY)
    replicate(cluster, replica)
    ops = [row["op"] for row in rejected(replica, "op")]
    assert ops[-1:] == (["deletion"] if replica.mode == "log" else [])
    assert in_step(cluster, replica)


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
    with pytest.raises(ConfigError, match=r"key is bytea but must be text") as raised:
        replicate(cluster, replica)
    assert raised.value.option == "key_type"


def test_text_with_nul_is_rejected_until_a_version_without_it(cluster, table):
    schema = "n BIGINT, city STRING, tags ARRAY<STRING>"
    documents = {
        "field": {"n": 1, "city": "a\0b"},
        "list": {"n": 2, "tags": ["x", None, "\0"]},
        "key\0": {"n": 3},
        "good": {"n": 4, "tags": ["x"]},
    }
    for key in documents:
        cluster.upsert(key, {"n": 0})
    for key, value in documents.items():
        cluster.upsert(key, value)
    assert replicate(cluster, table, document_schema=schema).rejected == 3
    assert values(table) == {"good": 4}
    assert {bytes(row["key"]).decode() for row in rejected(table)} == documents.keys() - {"good"}
    assert {row["reason"] for row in rejected(table)} == {
        "text has the character NUL, which PostgreSQL does not store"
    }
    cluster.upsert("good", documents["list"])
    cluster.upsert("field", {"n": 5})
    cluster.remove("key\0")
    replicate(cluster, table, document_schema=schema)
    assert values(table) == {"field": 5}, "no older version is kept"
    assert [bytes(row["key"]) for row in rejected(table)] in (
        [b"good", b"list"],
        [b"list", b"good"],
    )
    assert in_step(cluster, table, document_schema=schema)


def test_an_escaped_nul_in_json_is_kept_as_it_was_written(cluster, replica):
    cluster.upsert("a", b'{"a":"\\u0000\\ud83d"}')
    assert replicate(cluster, replica).rejected == 0
    assert replica.documents() == {("_default._default", "a"): b'{"a":"\\u0000\\ud83d"}'}


def test_json_that_is_nested_too_deep_for_the_server_is_rejected(cluster, replica):
    deep, brackets = b"[" * 20_000 + b"]" * 20_000, b'"' + b"[" * 20_000 + b'"'
    for n in range(100):
        cluster.upsert(f"key_{n}", {"n": n})
    for key in ("deep", "deeper"):
        cluster.upsert(key, {})
    replicate(cluster, replica)
    for key, value in {"deep": deep, "deeper": deep, "wide": brackets, "key_1": b"[]"}.items():
        cluster.upsert(key, value)
    assert replicate(cluster, replica).rejected == 2
    assert {bytes(row["value"]) for row in rejected(replica)} == {deep}
    assert rejected(replica)[0]["reason"].startswith(
        "JSON is nested deeper than PostgreSQL's max_s"
    )
    if replica.mode == "table":
        found = replica.documents()
        assert len(found) == 101, "no older version is kept"
        assert found["_default._default", "wide"] == brackets
        cluster.upsert("deep", {"n": 1})
        cluster.remove("deeper")
        replicate(cluster, replica)
        assert rejected(replica) == []
    assert in_step(cluster, replica)


def test_a_document_that_a_rule_of_the_table_refuses_is_rejected_and_the_others_written(
    cluster, table, caplog
):
    for n in range(300):
        cluster.upsert(f"key_{n}", {"n": n, "city": f"c{n}"})
    replicate(cluster, table, document_schema=_SCHEMA)
    for statement in (
        "ALTER TABLE documents ALTER n SET NOT NULL",
        "ALTER TABLE documents ADD CONSTRAINT small CHECK (n < 1000)",
        "CREATE UNIQUE INDEX one_city ON documents (city)",
        "ALTER TABLE documents ADD half bigint GENERATED ALWAYS AS (100 / (n - 555)) STORED",
        "CREATE INDEX by_city ON documents (city, n)",
        (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF new.n = 13 THEN RAISE 'canary: %', new.city; END IF; RETURN new; END $$"
        ),
        "CREATE TRIGGER refusing BEFORE INSERT ON documents FOR EACH ROW EXECUTE FUNCTION refuse()",
    ):
        table.query(statement)
    reasons = {
        "key_7": ({"city": "canary"}, "the column n takes no NULL"),
        "key_8": ({"n": 5000, "city": "canary"}, "the constraint small refuses it"),
        "key_9": ({"n": 9, "city": "c4"}, "the constraint one_city refuses it"),
        "key_10": ({"n": 555, "city": "canary"}, "PostgreSQL refuses it with SQLSTATE 22012"),
        "key_11": ({"n": 13, "city": "canary"}, "a trigger refuses it"),
        "key_12": (
            {"n": 1, "city": "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))},
            "PostgreSQL refuses it with SQLSTATE 54000",
        ),
    }
    for n in range(0, 300, 5):
        cluster.upsert(f"key_{n}", {"n": -n, "city": f"d{n}"})
    for key, (value, _) in reasons.items():
        cluster.upsert(key, value)
    done = replicate(cluster, table, document_schema=_SCHEMA)
    found = {bytes(row["key"]).decode(): row["reason"] for row in rejected(table)}
    assert found == {key: reason for key, (_, reason) in reasons.items()}
    assert done.rejected == len(reasons)
    assert "canary" not in caplog.text
    assert values(table).keys().isdisjoint(reasons), "no older version is kept"
    assert values(table)["key_5"] == -5
    cluster.upsert("key_7", {"n": 8, "city": "c8_again"})
    replicate(cluster, table, document_schema=_SCHEMA)
    assert len(rejected(table)) == len(reasons) - 1
    assert in_step(cluster, table, document_schema=_SCHEMA)
    cluster.upsert("key_9", {"city": "canary"})
    with pytest.raises(DataError, match=r"seqno \d+: the column n takes no NULL: choose to reject"):
        replicate(cluster, table, document_schema=_SCHEMA, on_error="fail")


@pytest.mark.parametrize("deferrable", ["", "DEFERRABLE INITIALLY DEFERRED"])
def test_documents_may_take_over_unique_values_from_each_other(cluster, table, deferrable):
    for key, city in {"a": "x", "b": "y", "c": "z"}.items():
        cluster.upsert(key, {"city": city})
    replicate(cluster, table, document_schema=_SCHEMA)
    table.query(f"ALTER TABLE documents ADD CONSTRAINT one UNIQUE (city) {deferrable}")
    cluster.remove("c")
    for key, city in {"b": "x", "a": "y", "d": "z", "twin": "x"}.items():
        cluster.upsert(key, {"city": city})
    assert replicate(cluster, table, document_schema=_SCHEMA).rejected == 1
    found = values(table, "city")
    assert sorted(found.values()) == ["x", "y", "z"], "one of two that have the same"
    assert found["a"] == "y"
    assert rejected(table, "reason") == [{"reason": "the constraint one refuses it"}]
    assert in_step(cluster, table, document_schema=_SCHEMA)


def test_a_rule_that_refuses_most_rows_ends_it_before_anything_is_written(cluster, table):
    cluster.upsert("first", {"n": 1})
    replicate(cluster, table, document_schema=_SCHEMA)
    table.query("ALTER TABLE documents ALTER n SET NOT NULL")
    for n in range(300):
        cluster.upsert(f"key_{n}", {"city": "canary"})
    told = (
        r"^target: PostgreSQL refuses to write table documents: the column n takes no NULL: remove"
    )
    with pytest.raises(ConfigError, match=told) as caught:
        replicate(cluster, table, document_schema=_SCHEMA)
    assert "canary" not in "".join(traceback.format_exception(caught.value))
    assert values(table) == {"first": 1}
    assert not has_rejects(table)


def test_rejects_of_a_rolled_back_vbucket_go_with_its_rows(cluster, table):
    vbucket = cluster.upsert(_LEGACY, b"kept").vbucket
    before = cluster.high_seqnos()[vbucket]
    replicate(cluster, table)
    lost = (b"\xff%d" % n for n in range(99))
    other = next(key for key in lost if cluster.upsert(key, b"lost").vbucket == vbucket)
    replicate(cluster, table)
    assert other in {row["key"] for row in rejected(table)}
    cluster.roll_back(vbucket, before)
    replicate(cluster, table)
    kept = {row["key"] for row in rejected(table, "*") if row["vbucket"] == vbucket}
    assert kept == {_LEGACY}


def test_text_is_the_same_in_a_database_of_another_encoding(cluster, postgres_server):
    name = "latin1_documents"
    with psycopg.connect(f"postgresql:///postgres?{postgres_server}", autocommit=True) as server:
        server.execute(
            f"CREATE DATABASE {name} ENCODING latin1 TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    table = replicas.InPostgres(f"postgresql:///{name}?{postgres_server}")
    cluster.upsert("Malmö", {"city": "Malmö"})
    # More than a rule of the table may refuse.
    for n in range(220):
        cluster.upsert(f"key_{n}", {"city": "\N{SNOWMAN}"})
    assert replicate(cluster, table, document_schema=_SCHEMA).rejected == 220
    assert values(table, "city") == {"Malmö": "Malmö"}
    assert rejected(table)[0]["reason"].startswith("text has a character that the database's enc")


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
        "ALTER TABLE documents DROP COLUMN value",
        "INSERT INTO documents (collection_id, key) VALUES (0, 'foreign')",
    ],
)
def test_a_table_that_somebody_changed_is_loaded_anew(cluster, table, edit, caplog):
    written = replicas.Written(cluster)
    for n in range(20):
        written.upsert(f"key_{n}", {"n": n})
    cluster.upsert(_LEGACY, b"x")
    replicate(cluster, table)
    table.query(edit)
    cluster.remove("key_5")
    cluster.remove(_LEGACY)
    end = threading.Event()
    end.set()
    assert replicate(cluster, table, stop=end).commits == 0, "it ends before its first commit"
    assert replicate(cluster, table).generation == 2
    assert table.documents() == written.documents()
    assert rejected(table) == []
    assert any("the table is not as it was left: it " in each for each in caplog.messages)
    assert replicate(cluster, table).commits == 0, "once"


def test_a_log_that_somebody_emptied_is_written_anew(cluster, replica):
    cluster.upsert("a", {})
    replicate(cluster, replica)
    replica.query("DELETE FROM documents")
    replicate(cluster, replica)
    assert [name for _, name in replica.documents()] == ["a"]


def test_what_changes_no_rows_causes_no_load(cluster, replica):
    cluster.upsert("a", {"n": 1})
    replicate(cluster, replica, document_schema=_SCHEMA)
    for statement in (
        "CREATE INDEX by_n ON documents (n)",
        "CREATE VIEW recent AS SELECT key, n FROM documents",
        "COMMENT ON TABLE documents IS 'ours'",
        (
            "ALTER TABLE documents ADD checked_by text NOT NULL DEFAULT 'nobody', ADD note text,"
            " ADD id bigint GENERATED ALWAYS AS IDENTITY,"
            " ADD twice bigint GENERATED ALWAYS AS (n * 2) STORED"
        ),
        "UPDATE documents SET checked_by = 'Ann'",
        "ALTER TABLE documents SET UNLOGGED, SET (fillfactor = 70)",
        "CLUSTER documents USING by_n",
        "ANALYZE documents",
        "REINDEX TABLE documents",
    ):
        replica.query(statement)
    assert in_step(cluster, replica, document_schema=_SCHEMA)
    cluster.upsert("a", {"n": 2})
    cluster.upsert("b", {"n": 3})
    assert replicate(cluster, replica, document_schema=_SCHEMA).generation == 1
    found = replica.query("SELECT * FROM documents WHERE cas > 0 ORDER BY seqno")
    last = {row["key"]: (row["n"], row["twice"], row["checked_by"]) for row in found}
    kept = "Ann" if replica.mode == "table" else "nobody"
    assert last == {"a": (2, 4, kept), "b": (3, 6, "nobody")}
    assert in_step(cluster, replica, document_schema=_SCHEMA)


@pytest.mark.parametrize(
    "body",
    [
        "IF new.n % 2 = 0 THEN RETURN NULL; END IF; RETURN new;",
        "new.n := -new.n; RETURN new;",
        "INSERT INTO audit VALUES (new.key); RETURN new;",
    ],
)
@pytest.mark.parametrize("when", ["BEFORE INSERT OR UPDATE", "AFTER INSERT OR UPDATE"])
def test_a_trigger_does_what_it_does_and_causes_no_load(cluster, replica, body, when):
    replica.query("CREATE TABLE audit (key text)")
    cluster.upsert("first", {"n": 0})
    replicate(cluster, replica, document_schema=_SCHEMA)
    replica.query(
        f"CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
    )
    replica.query(f"CREATE TRIGGER acting {when} ON documents FOR EACH ROW EXECUTE FUNCTION act()")
    for n in range(6):
        cluster.upsert(f"key_{n}", {"n": n})
    cluster.upsert("first", {"n": 2})
    replicate(cluster, replica, document_schema=_SCHEMA)
    assert in_step(cluster, replica, document_schema=_SCHEMA)
    skips, negates = "RETURN NULL" in body, ":=" in body
    if when.startswith("BEFORE") and (skips or negates):
        expected = {"key_1": 1, "key_3": 3, "key_5": 5}
        if negates:
            expected = {f"key_{n}": -n for n in range(6)}
        found = values(replica)
        assert {key: found[key] for key in expected} == expected
        assert ("key_2" in found) == negates
    assert bool(replica.query("SELECT 1 FROM audit")) == ("audit" in body)


def test_a_partitioned_table_stays_in_step(cluster, table):
    cluster.upsert("probe", {})
    replicate(cluster, table, document_schema=_SCHEMA)
    for statement in (
        "CREATE TABLE parted (LIKE documents INCLUDING ALL) PARTITION BY HASH (key)",
        "CREATE TABLE part_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE part_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "DROP TABLE documents",
        "ALTER TABLE parted RENAME TO documents",
        "DELETE FROM dcp_rs_replication",
    ):
        table.query(statement)
    for round_ in range(3):
        for n in range(round_ * 5, round_ * 5 + 10):
            cluster.upsert(f"key_{n}", {"n": n * round_})
        cluster.remove(f"key_{round_}")
        replicate(cluster, table, document_schema=_SCHEMA)
        assert in_step(cluster, table, document_schema=_SCHEMA)
    assert len(values(table)) == 21 - 3
    assert values(table)["key_12"] == 24


def test_a_foreign_key_that_follows_deletions_is_harmless(cluster, table):
    cluster.upsert("a", {})
    replicate(cluster, table)
    table.query(
        "CREATE TABLE notes (collection_id bigint, key text, FOREIGN KEY (collection_id, key)"
        " REFERENCES documents ON DELETE CASCADE)"
    )
    table.query("INSERT INTO notes SELECT collection_id, key FROM documents")
    cluster.upsert("a", {"n": 1})
    replicate(cluster, table)
    assert table.query("SELECT key FROM notes") == [{"key": "a"}]
    cluster.remove("a")
    replicate(cluster, table)
    assert table.query("SELECT key FROM notes") == []


# ----- failures -----


@pytest.mark.parametrize("lasts", [False, True])
def test_a_lock_of_others_is_waited_for(cluster, table, monkeypatch, lasts):
    cluster.upsert("a", {})
    replicate(cluster, table)
    cluster.upsert("b", {})
    if lasts:
        monkeypatch.setattr(postgres, "_WAIT_SECONDS", 0.3)
    target = open_target(table.url + "%20-clock_timeout%3D20")
    commits = []
    commit = target.commit

    def locked(given):
        with psycopg.connect(table.url) as other:
            other.execute("LOCK TABLE documents IN SHARE MODE")
            ended = threading.Timer(3.0 if lasts else 0.2, other.rollback)
            ended.start()
            try:
                commits.append(commit(given))
            finally:
                ended.cancel()
                ended.join()
        return commits[-1]

    target.commit = locked
    begun = time.monotonic()
    if lasts:
        with pytest.raises(adbc.Error, match="lock timeout"):
            replicate(cluster, target)
        assert time.monotonic() - begun < 2.5
    else:
        replicate(cluster, target)
    assert len(table.query("SELECT key FROM documents")) == (1 if lasts else 2)


class Failing(Session):
    """A session that fails before a statement, by its number from a commit on, or after COMMIT."""

    at, seen, ends, is_committed = 0, 0, False, False

    def _fail(self):
        if not self.ends:
            raise KeyboardInterrupt
        super().run("SELECT pg_terminate_backend(pg_backend_pid())")

    def _step(self, work, *given):
        Failing.seen += 1
        if Failing.seen == Failing.at:
            self._fail()
        return work(*given)

    def run(self, *given):
        done = self._step(super().run, *given)
        if Failing.at and given == ("COMMIT",):
            Failing.at, Failing.is_committed = 0, True
            self._fail()
        return done

    def change(self, *given):
        return self._step(super().change, *given)

    def copy(self, *given):
        return self._step(super().copy, *given)


@pytest.mark.parametrize("ends", [False, True])
def test_a_commit_that_fails_at_any_step_is_there_wholly_or_not_at_all(
    cluster, table, monkeypatch, ends
):
    """The process is interrupted, or the connection ends."""
    monkeypatch.setattr(postgres, "Session", Failing)
    monkeypatch.setattr(Failing, "ends", ends)
    for n in range(4):
        cluster.upsert(f"key_{n}", {"n": n})
    cluster.upsert(_LEGACY, {})
    replicate(cluster, table, document_schema=_SCHEMA)
    table.query("ALTER TABLE documents ADD CHECK (n < 100)")
    cluster.upsert("key_0", {"n": 10})
    cluster.upsert("key_1", {"n": 1000})
    for key in ("key_2", _LEGACY):
        cluster.remove(key)
    cluster.upsert("nul", {"city": "\0"})
    target, kept = open_target(table.url), []
    monkeypatch.setattr(target, "commit", kept.append)
    replicate(cluster, target, document_schema=_SCHEMA)
    before, at = observed(table), 0
    monkeypatch.setattr(Failing, "is_committed", False)
    while not Failing.is_committed:
        at += 1
        monkeypatch.setattr(Failing, "at", 0)
        if ends or at == 1:
            target = open_target(table.url)
            target.open(kept[0].rows.schema, "table")
        monkeypatch.setattr(Failing, "seen", 0)
        monkeypatch.setattr(Failing, "at", at)
        with pytest.raises((adbc.Error, KeyboardInterrupt)):
            target.commit(kept[0])
        if ends or Failing.is_committed:
            target.close()
        assert (observed(table) != before) == Failing.is_committed
    assert at > 20
    monkeypatch.setattr(postgres, "Session", Session)
    assert values(table) == {"key_0": 10, "key_3": 3}
    assert {bytes(row["key"]) for row in rejected(table)} == {b"key_1", b"nul"}
    assert in_step(cluster, table, document_schema=_SCHEMA)


def observed(table):
    state = table.query("SELECT commits, rows, state FROM dcp_rs_replication")
    return values(table), [bytes(row["key"]) for row in rejected(table)], state


def test_attempts_to_connect_leave_no_memory():
    def held():
        status = Path("/proc/self/smaps_rollup").read_text()
        return int(status.partition("Private_Dirty:")[2].split()[0])

    def attempt(times):
        for _ in range(times):
            with pytest.raises(adbc.OperationalError, match="No such file"):
                Session(adbc, "postgresql:///postgres?host=/nowhere&user=postgres")

    attempt(200)
    before = held()
    attempt(1000)
    # What the driver would keep is 14 MB.
    assert held() - before < 4096
