"""A table that is kept in step with a bucket: compared with what the cluster itself has."""

import threading
import time

import duckdb
import pyarrow as pa
import pytest

import dcp_rs
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication import ConcurrentWriterError
from dcp_rs.replication.duckdb import DuckDBTarget
from replicas import Written, in_duckdb, settle


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=3, replicas=1, vbuckets=8) as running:
        running.create_scope("inventory")
        for name in ("airline", "hotel"):
            running.create_collection(f"inventory.{name}")
        yield running


@pytest.fixture
def written(cluster):
    return Written(cluster)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "replica.duckdb"


class CrashError(Exception):
    """Ends a replication in the middle, as a kill between two commits does."""


class CrashingTarget(DuckDBTarget):
    """Fails at a commit, before or after it is made."""

    def __init__(self, path, *, at, after=False):
        super().__init__(path, "documents")
        self.at, self.after, self.seen = at, after, 0

    def commit(self, commit):
        self.seen += 1
        if self.seen == self.at and not self.after:
            raise CrashError
        super().commit(commit)
        if self.seen == self.at:
            raise CrashError


def replicate(cluster, target, **options):
    url = target if hasattr(target, "commit") else f"duckdb://{target}"
    with cluster.connect() as client:
        return dcp_rs.replicate(client, url, **({"once": True} | options))


class Running:
    """A replication that follows, on a thread of its own."""

    def __init__(self, cluster, target, **options):
        self.stop, self.error, self.progress = threading.Event(), None, None
        self._thread = threading.Thread(target=self._run, args=(cluster, target, options))
        self._thread.start()

    def _run(self, cluster, target, options):
        try:
            following = {"once": False, "stop": self.stop, "on_progress": self._note}
            replicate(cluster, target, **({"commit_interval": 0.02} | following | options))
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self.error = error

    def _note(self, progress):
        self.progress = progress

    def until(self, is_so, what):
        deadline = time.monotonic() + 30
        while not (self.progress and is_so(self.progress)):
            assert self.error is None, self.error
            assert time.monotonic() < deadline, f"{what}: {self.progress}"
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def fill(written, count=60, prefix="key"):
    for n in range(count):
        written.upsert(f"{prefix}_{n}", {"n": n}, ("inventory.airline", "inventory.hotel")[n % 2])


def lose_the_tail(cluster, *, vbucket=0):
    """Lets a failover take back what a reader has read."""
    cluster.rebalance()
    for each in range(cluster.num_vbuckets):
        cluster.set_replica_lag(each, 1, None)
    yield
    node = cluster.copies_of(vbucket)[0]
    cluster.failover(node)
    cluster.restart(node)
    cluster.rebalance()


def query(path, statement):
    with duckdb.connect(str(path), read_only=True) as database:
        return database.execute(statement).fetchall()


def log_of(path):
    with duckdb.connect(str(path), read_only=True) as database:
        return database.sql("SELECT * FROM documents").to_arrow_table().to_pylist()


def test_a_table_has_the_documents_after_updates_deletions_and_expirations(cluster, written, path):
    fill(written)
    written.upsert("text", "not JSON")
    written.upsert("bytes", b"\xff\x00")
    written.upsert("number", b"17")
    first = replicate(cluster, path)
    assert in_duckdb(path) == written.documents()
    assert (first.phase, first.generation) == ("loading", 1)
    for n in range(0, 60, 3):
        written.upsert(f"key_{n}", {"n": -n}, ("inventory.airline", "inventory.hotel")[n % 2])
    cluster.remove("key_1", collection="inventory.hotel")
    cluster.expire("key_2", collection="inventory.airline")
    cluster.remove("text")
    written.upsert("new", {})
    second = replicate(cluster, path)
    assert second.changes == 24
    assert in_duckdb(path) == written.documents()
    assert replicate(cluster, path).commits == 0, "nothing to do"


@pytest.mark.parametrize("mode", ["table", "log"])
def test_what_is_written_while_it_follows_is_there_when_it_stops(cluster, written, path, mode):
    fill(written)
    with Running(cluster, path, mode=mode) as running:
        running.until(lambda it: it.phase == "following", "follow")
        fill(written, 30, "later")
        cluster.remove("key_4", collection="inventory.airline")
        running.until(lambda it: it.changes >= 91, "changes")
    found = in_duckdb(path) if mode == "table" else settle(log_of(path))
    assert found == written.documents()


def test_a_table_takes_back_what_a_failover_lost(cluster, written, path):
    fill(written)
    failing = lose_the_tail(cluster)
    with Running(cluster, path) as running:
        running.until(lambda it: it.phase == "following", "follow")
        next(failing)
        before = written.documents()
        fill(written, 60)
        for n in range(10):
            written.upsert(f"key_{n}", {"lost": n}, "inventory.airline")
        cluster.remove("key_20", collection="inventory.airline")
        running.until(lambda it: it.changes >= 131, "the tail is read")
        next(failing, None)
        running.until(lambda it: it.rollbacks > 0 and it.phase == "following", "roll back")
        written.upsert("after", {})
        running.until(lambda _: ("_default._default", "after") in in_target(path), "follow")
    assert written.documents().items() != before.items()
    assert in_duckdb(path) == written.documents()
    assert query(path, "SELECT max(epoch) FROM documents")[0][0] >= 1


def in_target(path):
    """Looks at a database that another thread writes to."""
    with duckdb.connect(str(path)) as database:
        rows = database.execute("SELECT scope, collection, key FROM documents").fetchall()
    return {(f"{scope}.{collection}", key) for scope, collection, key in rows}


def test_rows_of_smaller_epochs_go_in_the_commit_that_completes_the_reread(cluster, written, path):
    fill(written, 200)
    replicate(cluster, path)
    vbucket = cluster.vbucket_of("key_0")
    high = cluster.high_seqnos()[vbucket]
    cluster.roll_back(vbucket, high - 3)
    held = set(in_duckdb(path))
    sizes = []

    class Counting(DuckDBTarget):
        def commit(self, commit):
            super().commit(commit)
            rows = self._run("SELECT scope || '.' || collection, key FROM documents")
            sizes.append((commit.state.rereading, set(rows)))

    replicate(cluster, Counting(path, "documents"), commit_rows=5)
    assert len(sizes) > 3
    for rereading, keys in sizes[:-1]:
        assert rereading == {vbucket}
        assert keys == held, "until it is complete nothing goes"
    assert sizes[-1][0] == frozenset()
    assert in_duckdb(path) == written.documents()
    assert len(in_duckdb(path)) == 197


@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_rollback_during_the_first_load(cluster, written, path, mode):
    fill(written, 200)
    with pytest.raises(CrashError):
        replicate(cluster, CrashingTarget(path, at=4, after=True), commit_rows=20, mode=mode)
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, high - 2)
    fill(written, 20, "after")
    done = replicate(cluster, path, commit_rows=20, mode=mode)
    assert done.rollbacks > 0
    found = in_duckdb(path) if mode == "table" else settle(log_of(path))
    assert found == written.documents()


def test_a_log_has_what_a_rollback_voids_and_what_takes_its_place(cluster, written, path):
    fill(written)
    replicate(cluster, path, mode="log")
    before = len(log_of(path))
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, max(high - 2, 0))
    fill(written, 20, "after")
    replicate(cluster, path, mode="log")
    log = log_of(path)
    assert len(log) > before
    assert {row["op"] for row in log} >= {"mutation", "rollback", "system_event"}
    assert settle(log) == written.documents()


@pytest.mark.parametrize("mode", ["table", "log"])
def test_dropped_flushed_and_recreated_collections_take_their_rows_with_them(
    cluster, written, path, mode
):
    fill(written)
    written.upsert("stays", {})
    read = in_duckdb if mode == "table" else lambda path: settle(log_of(path))
    replicate(cluster, path, mode=mode)
    cluster.drop_collection("inventory.airline")
    replicate(cluster, path, mode=mode)
    assert read(path) == written.documents()
    assert len(read(path)) == 31
    cluster.flush_collection("inventory.hotel")
    written.upsert("key_1", {"after": "flush"}, "inventory.hotel")
    cluster.create_collection("inventory.airline")
    written.upsert("key_0", {"after": "drop"}, "inventory.airline")
    replicate(cluster, path, mode=mode)
    assert read(path) == written.documents()
    assert len(read(path)) == 3
    # All in one read, the collection of before and of after.
    fill(written)
    cluster.drop_collection("inventory.airline")
    cluster.create_collection("inventory.airline")
    fill(written, 10)
    cluster.flush_collection("inventory.hotel")
    fill(written, 4)
    replicate(cluster, path, mode=mode)
    assert read(path) == written.documents()
    cluster.drop_scope("inventory")
    replicate(cluster, path, mode=mode)
    assert read(path) == written.documents()
    assert len(read(path)) == 1


def test_what_one_commit_has_of_a_collection_before_it_is_dropped_is_not_kept(
    cluster, written, path
):
    with Running(cluster, path, commit_interval=2.0) as running:
        running.until(lambda it: it.phase == "following", "follow")
        before = running.progress.commits
        for count in (60, 40, 20):
            fill(written, count)
            time.sleep(0.2)
            cluster.drop_collection("inventory.airline")
            cluster.create_collection("inventory.airline")
            cluster.flush_collection("inventory.hotel")
        fill(written, 10)
        running.until(lambda it: it.changes >= 130, "changes")
        assert running.progress.commits == before + 1
    assert in_duckdb(path) == written.documents()
    assert len(in_duckdb(path)) == 10


def test_a_collection_that_is_chosen_and_made_again_is_loaded_anew(cluster, written, path):
    fill(written)
    options = {"collections": ["inventory.airline"]}
    replicate(cluster, path, **options)
    chosen = {key for key in written.documents() if key[0] == "inventory.airline"}
    assert set(in_duckdb(path)) == chosen
    with Running(cluster, path, **options) as running:
        running.until(lambda it: it.phase == "following", "follow")
        cluster.drop_collection("inventory.airline")
        time.sleep(0.3)
        cluster.create_collection("inventory.airline")
        written.upsert("anew", {}, "inventory.airline")
        running.until(lambda it: it.generation == 2 and it.phase == "following", "load")
    assert set(in_duckdb(path)) == {("inventory.airline", "anew")}
    replicate(cluster, path, collections=["inventory.airline", "inventory.hotel"])
    assert in_duckdb(path) == written.documents()
    replicate(cluster, path, collections=["inventory.hotel"])
    assert {name for name, _ in in_duckdb(path)} == {"inventory.hotel"}


@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_bucket_that_is_made_anew_takes_the_place_of_the_older_one(cluster, written, path, mode):
    fill(written)
    replicate(cluster, path, mode=mode)
    cluster.drop_bucket()
    cluster.create_bucket()
    for n in range(0, 90, 2):
        written.upsert(f"key_{n}", {"anew": n})
    with pytest.raises(CrashError):
        replicate(cluster, CrashingTarget(path, at=3), commit_rows=10, mode=mode)
    if mode == "table":
        generations = query(
            path, "SELECT generation, count(*) FROM documents GROUP BY 1 ORDER BY 1"
        )
        assert generations[0] == (1, 60), "the older rows stay until the load is complete"
        assert len(generations) == 2
    state = "SELECT generation, complete_generation FROM dcp_rs_replication"
    assert query(path, state) == [(2, 1)]
    done = replicate(cluster, path, commit_rows=10, mode=mode)
    assert done.generation == 2
    assert query(path, state) == [(2, 2)]
    found = in_duckdb(path) if mode == "table" else settle(log_of(path))
    assert found == written.documents()


def test_a_bucket_may_be_made_anew_while_it_is_followed(cluster, written, path):
    fill(written)
    with Running(cluster, path) as running:
        running.until(lambda it: it.phase == "following", "follow")
        cluster.drop_bucket()
        time.sleep(0.3)
        cluster.create_bucket()
        written.upsert("anew", {})
        running.until(lambda it: it.generation == 2 and it.phase == "following", "load")
    assert set(in_duckdb(path)) == {("_default._default", "anew")}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_load_goes_on_where_it_was_interrupted(cluster, written, path, mode, after):
    fill(written, 200)
    cluster.persist()
    with pytest.raises(CrashError):
        replicate(cluster, CrashingTarget(path, at=5, after=after), commit_rows=20, mode=mode)
    committed = query(path, "SELECT count(*) FROM documents")[0][0]
    assert 0 < committed < 200
    # What was loaded is written again, in the snapshot that is read on.
    for n in range(0, 200, 3):
        written.upsert(f"key_{n}", {"n": -n}, ("inventory.airline", "inventory.hotel")[n % 2])
    cluster.remove("key_1", collection="inventory.hotel")
    done = replicate(cluster, path, commit_rows=20, mode=mode)
    assert done.changes < 200 + 67
    found = in_duckdb(path) if mode == "table" else settle(log_of(path))
    assert found == written.documents()


def test_documents_are_columns_and_a_schema_that_gains_some_fills_them(cluster, written, path):
    for n in range(50):
        written.upsert(f"key_{n}", {"n": n, "name": f"name {n}", "tags": ["a"]})
    replicate(cluster, path, document_schema="n BIGINT, tags ARRAY<STRING>")
    rows = query(path, "SELECT key, n, tags FROM documents ORDER BY n")
    assert rows == [(f"key_{n}", n, ["a"]) for n in range(50)]
    done = replicate(cluster, path, document_schema="n BIGINT, tags ARRAY<STRING>, name STRING")
    assert done.generation == 2
    rows = query(path, "SELECT key, n, name FROM documents ORDER BY n")
    assert rows == [(f"key_{n}", n, f"name {n}") for n in range(50)]


def test_a_schema_that_contradicts_the_table_is_refused_before_anything_is_written(
    cluster, written, path
):
    written.upsert("a", {"n": 1})
    replicate(cluster, path, document_schema=pa.schema({"n": pa.int64()}))
    written.upsert("b", {"n": 2})
    with pytest.raises(ConfigError, match="n is BIGINT and would have to be VARCHAR"):
        replicate(cluster, path, document_schema="n STRING, more STRING")
    assert query(path, "SELECT key FROM documents") == [("a",)]
    names = [row[0] for row in query(path, "DESCRIBE documents")]
    assert "more" not in names


def test_a_log_with_columns_keeps_its_events(cluster, written, path):
    written.upsert("a", {"n": 1})
    replicate(cluster, path, mode="log", document_schema="n BIGINT")
    rows = query(path, "SELECT op, value, n FROM documents WHERE vbucket = 0 OR op = 'mutation'")
    assert {(op, value is None, n) for op, value, n in rows} == {
        ("system_event", False, None),
        ("mutation", True, 1),
    }


def test_two_that_write_to_one_table_do_not_both_commit(cluster, written, path):
    fill(written)

    class Overtaken(DuckDBTarget):
        def commit(self, commit):
            self._run("UPDATE dcp_rs_replication SET commits = commits + 1")
            super().commit(commit)

    replicate(cluster, path)
    before = in_duckdb(path)
    fill(written, 3, "more")
    with pytest.raises(ConcurrentWriterError, match="another process"):
        replicate(cluster, Overtaken(path, "documents"))
    assert in_duckdb(path) == before


def test_a_table_of_another_origin_is_left_alone(cluster, path):
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE documents (a INTEGER)")
        database.execute("INSERT INTO documents VALUES (1)")
    with pytest.raises(ConfigError, match="did not write"):
        replicate(cluster, path)
    assert query(path, "SELECT * FROM documents") == [(1,)]


def test_a_state_that_is_damaged_is_never_taken_for_none(cluster, written, path):
    fill(written)
    replicate(cluster, path)
    for damage in ("state[:200]", "replace(state, '0', '1')", "'{}'"):
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        with duckdb.connect(str(copy)) as database:
            database.execute(f"UPDATE dcp_rs_replication SET state = {damage}")
        with pytest.raises(CheckpointError, match=r"damaged|checksum"):
            replicate(cluster, copy)
        copy.unlink()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "begins with none of duckdb"),
        ("duckdb://?table=x", "name the database"),
        ("duckdb:///x?tabel=y", "no option tabel"),
    ],
)
def test_a_url_that_names_no_target_is_refused(cluster, url, message):
    with cluster.connect() as client, pytest.raises(ConfigError, match=message):
        dcp_rs.replicate(client, url)


def test_a_table_and_a_log_are_not_mixed_up(cluster, written, path):
    fill(written)
    replicate(cluster, path)
    with pytest.raises(ConfigError, match="the target is a table, not a log"):
        replicate(cluster, path, mode="log")
