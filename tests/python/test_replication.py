"""A table that is kept in step with a bucket: compared with what the cluster itself has."""

import dataclasses
import re
import threading
import time
from pathlib import Path

import deltalake
import duckdb
import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import (
    CheckpointError,
    ClosedError,
    ConcurrentWriterError,
    ConfigError,
)
from dcp_rs.replication import core, open_target
from replicas import Written, replicate


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


@pytest.fixture(params=replicas.TABLES)
def table(request, tmp_path):
    return replicas.make(f"{request.param}-table", request, tmp_path)


@pytest.fixture(params=replicas.ALL)
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture(params=replicas.LOGS)
def log(request, tmp_path):
    return replicas.make(f"{request.param}-log", request, tmp_path)


class CrashError(Exception):
    """Ends a replication in the middle, as a kill between two commits does."""


class Watched:
    """A target of which each commit is looked at; may fail before or after one is made."""

    def __init__(self, replica, *, crash_before=None, crash_after=None, look=None):
        self.inner = open_target(replica.url)
        self.modes, self.open, self.close = self.inner.modes, self.inner.open, self.inner.close
        self.crash_before, self.crash_after, self.look = crash_before, crash_after, look
        self.seen = 0

    def commit(self, commit):
        self.seen += 1
        if self.seen == self.crash_before:
            raise CrashError
        self.inner.commit(commit)
        if self.look is not None:
            self.look(commit)
        if self.seen == self.crash_after:
            raise CrashError


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


def test_a_table_has_the_documents_after_updates_deletions_and_expirations(cluster, written, table):
    fill(written)
    written.upsert("text", "not JSON")
    written.upsert("bytes", b"\xff\x00")
    written.upsert("number", b"17")
    first = replicate(cluster, table)
    assert table.documents() == written.documents()
    assert (first.phase, first.generation) == ("done", 1)
    for n in range(0, 60, 3):
        written.upsert(f"key_{n}", {"n": -n}, ("inventory.airline", "inventory.hotel")[n % 2])
    cluster.remove("key_1", collection="inventory.hotel")
    cluster.expire("key_2", collection="inventory.airline")
    cluster.remove("text")
    written.upsert("new", {})
    second = replicate(cluster, table)
    assert second.changes == 24
    assert table.documents() == written.documents()
    assert replicate(cluster, table).commits == 0, "nothing to do"


def _with_tombstones(cluster, written):
    """Writes documents and removes some, on disk only; counts the deletions that are sent."""
    fill(written)
    for n in range(0, 60, 4):
        cluster.remove(f"key_{n}", collection="inventory.airline")
    cluster.persist()
    sends = {"opcode": "DCP_DELETION"}
    cluster.set_faults([{"condition": sends, "reaction": {"delay": {"seconds": 0}}}])


def test_a_table_is_loaded_without_deletions_and_gets_later_ones(cluster, written, table):
    _with_tombstones(cluster, written)
    # The second attempt resumes inside the load, where documents were removed meanwhile.
    with pytest.raises(CrashError):
        replicate(cluster, Watched(table, crash_after=1), commit_rows=10)
    assert cluster.fault_counts() == [0]
    for n in range(1, 60, 4):
        cluster.remove(f"key_{n}", collection="inventory.hotel")
    cluster.persist()
    replicate(cluster, table, commit_rows=10)
    assert table.documents() == written.documents()
    assert 0 < cluster.fault_counts()[0] <= 15


def test_a_log_has_the_deletions_of_its_first_load(cluster, written, log):
    _with_tombstones(cluster, written)
    replicate(cluster, log, mode="log")
    assert cluster.fault_counts() == [15]


def test_what_is_written_while_it_follows_is_there_when_it_stops(cluster, written, replica):
    fill(written)
    with Running(cluster, replica) as running:
        running.until(lambda it: it.phase == "following", "follow")
        fill(written, 30, "later")
        cluster.remove("key_4", collection="inventory.airline")
        running.until(lambda it: it.changes >= 91, "changes")
    assert replica.documents() == written.documents()


def test_a_table_takes_back_what_a_failover_lost(cluster, written, table):
    fill(written)
    failing = lose_the_tail(cluster)
    with Running(cluster, table) as running:
        running.until(lambda it: it.phase == "following", "follow")
        next(failing)
        before = written.documents()
        fill(written, 60)
        for n in range(10):
            written.upsert(f"key_{n}", {"lost": n}, "inventory.airline")
        cluster.remove("key_20", collection="inventory.airline")
        running.until(lambda _: table.documents() == written.documents(), "the tail is read")
        next(failing, None)
        running.until(lambda it: it.rollbacks > 0 and it.phase == "following", "roll back")
        written.upsert("after", {})
        running.until(lambda _: ("_default._default", "after") in table.documents(), "follow")
    assert written.documents().items() != before.items()
    assert table.documents() == written.documents()
    assert max(row["epoch"] for row in table.rows()) >= 1


def test_rows_of_smaller_epochs_go_in_the_commit_that_completes_the_reread(cluster, written, table):
    fill(written, 200)
    replicate(cluster, table)
    vbucket = cluster.vbucket_of("key_0")
    high = cluster.high_seqnos()[vbucket]
    cluster.roll_back(vbucket, high - 3)
    held = set(table.documents())
    sizes = []

    def look(commit):
        sizes.append((commit.state.rereading, set(table.documents())))

    replicate(cluster, Watched(table, look=look), commit_rows=5)
    assert len(sizes) > 3
    for rereading, keys in sizes[:-1]:
        assert rereading == {vbucket}
        assert keys == held, "until it is complete nothing goes"
    assert sizes[-1][0] == frozenset()
    assert table.documents() == written.documents()
    assert len(table.documents()) == 197


def test_a_rollback_during_the_first_load(cluster, written, replica):
    fill(written, 200)
    with pytest.raises(CrashError):
        replicate(cluster, Watched(replica, crash_after=4), mode=replica.mode, commit_rows=20)
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, high - 2)
    fill(written, 20, "after")
    done = replicate(cluster, replica, commit_rows=20)
    assert done.rollbacks > 0
    assert replica.documents() == written.documents()


def test_a_log_has_what_a_rollback_voids_and_what_takes_its_place(cluster, written, log):
    fill(written)
    replicate(cluster, log)
    before = len(log.rows())
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, max(high - 2, 0))
    fill(written, 20, "after")
    replicate(cluster, log)
    rows = log.rows()
    assert len(rows) > before
    assert {row["op"] for row in rows} >= {"mutation", "rollback", "system_event"}
    assert log.documents() == written.documents()


def test_the_guides_query_gives_the_documents_of_a_log(cluster, written, tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "logs.md"
    (statement,) = re.findall(r"```sql\n(.*?)```", guide.read_text(), re.DOTALL)
    log = replicas.InDuckDB(tmp_path)
    log.mode = "log"
    fill(written)
    with Running(cluster, log) as running:
        running.until(lambda it: it.phase == "following", "follow")
        for step in range(4):
            fill(written, 40, f"step_{step}")
            cluster.remove("step_0_1" if step else "key_1", collection="inventory.hotel")
            changes = running.progress.changes
            running.until(lambda it, changes=changes: it.changes > changes, "changes")
            for vbucket, high in cluster.high_seqnos().items():
                cluster.roll_back(vbucket, max(high - 2, 0))
            if step == 1:
                cluster.flush_collection("inventory.hotel")
            if step == 2:
                cluster.drop_collection("inventory.airline")
                cluster.create_collection("inventory.airline")
            written.upsert("step_0_1", {"again": step}, "inventory.hotel")
    replicate(cluster, log)
    assert {row["op"] for row in log.rows()} == {
        "mutation", "deletion", "rollback", "system_event"
    }  # fmt: skip
    assert replicas.as_documents(log.query(statement)) == written.documents()
    assert log.documents() == written.documents()


def test_dropped_flushed_and_recreated_collections_take_their_rows_with_them(
    cluster, written, replica
):
    fill(written)
    written.upsert("stays", {})
    replicate(cluster, replica)
    cluster.drop_collection("inventory.airline")
    replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert len(replica.documents()) == 31
    cluster.flush_collection("inventory.hotel")
    written.upsert("key_1", {"after": "flush"}, "inventory.hotel")
    cluster.create_collection("inventory.airline")
    written.upsert("key_0", {"after": "drop"}, "inventory.airline")
    replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert len(replica.documents()) == 3
    # All in one read, the collection of before and of after.
    fill(written)
    cluster.drop_collection("inventory.airline")
    cluster.create_collection("inventory.airline")
    fill(written, 10)
    cluster.flush_collection("inventory.hotel")
    fill(written, 4)
    replicate(cluster, replica)
    assert replica.documents() == written.documents()
    cluster.drop_scope("inventory")
    replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert len(replica.documents()) == 1


def test_what_one_commit_has_of_a_collection_before_it_is_dropped_is_not_kept(
    cluster, written, table, monkeypatch
):
    monkeypatch.setattr(core, "_REST", 1e9)
    with Running(cluster, table, commit_interval=2.0) as running:
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
    assert table.documents() == written.documents()
    assert len(table.documents()) == 10


def test_a_collection_that_is_chosen_and_made_again_is_loaded_anew(cluster, written, table):
    fill(written)
    options = {"collections": ["inventory.airline"]}
    replicate(cluster, table, **options)
    chosen = {key for key in written.documents() if key[0] == "inventory.airline"}
    assert set(table.documents()) == chosen
    with Running(cluster, table, **options) as running:
        running.until(lambda it: it.phase == "following", "follow")
        cluster.drop_collection("inventory.airline")
        time.sleep(0.3)
        cluster.create_collection("inventory.airline")
        written.upsert("anew", {}, "inventory.airline")
        running.until(lambda it: it.generation == 2 and it.phase == "following", "load")
    assert set(table.documents()) == {("inventory.airline", "anew")}
    replicate(cluster, table, collections=["inventory.airline", "inventory.hotel"])
    assert table.documents() == written.documents()
    replicate(cluster, table, collections=["inventory.hotel"])
    assert {name for name, _ in table.documents()} == {"inventory.hotel"}


def test_a_collection_of_a_chosen_scope_that_is_made_again_is_followed(cluster, written, table):
    fill(written)
    with Running(cluster, table, collections="inventory.*") as running:
        running.until(lambda it: it.phase == "following", "follow")
        cluster.drop_collection("inventory.airline")
        cluster.create_collection("inventory.airline")
        written.upsert("anew", {}, "inventory.airline")
        running.until(lambda _: ("inventory.airline", "anew") in table.documents(), "rows")
        assert (running.progress.generation, running.progress.phase) == (1, "following")
    assert table.documents() == written.documents()


def test_a_bucket_that_is_made_anew_takes_the_place_of_the_older_one(cluster, written, replica):
    fill(written)
    replicate(cluster, replica)
    cluster.drop_bucket()
    cluster.create_bucket()
    for n in range(0, 90, 2):
        written.upsert(f"key_{n}", {"anew": n})
    with pytest.raises(CrashError):
        replicate(cluster, Watched(replica, crash_before=3), mode=replica.mode, commit_rows=10)
    if replica.mode == "table":
        generations = [row["generation"] for row in replica.rows()]
        assert generations.count(1) == 60, "the older rows stay until the load is complete"
        assert generations.count(2) > 0
    assert replica.generations() == (2, 1)
    done = replicate(cluster, replica, commit_rows=10)
    assert done.generation == 2
    assert replica.generations() == (2, 2)
    assert replica.documents() == written.documents()


def test_a_bucket_made_anew_with_more_vbuckets_takes_the_place_of_the_older_one(
    cluster, written, replica
):
    fill(written)
    replicate(cluster, replica)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=32) as other:
        anew = Written(other)
        for n in range(0, 90, 2):
            anew.upsert(f"key_{n}", {"anew": n})
        done = replicate(other, replica, commit_rows=10)
        assert done.generation == 2
        assert replica.documents() == anew.documents()


def test_a_table_of_a_bucket_with_another_name_is_refused_as_it_is(written, cluster, replica):
    fill(written)
    replicate(cluster, replica)
    with dcp_rs.testing.EmbeddedCluster(bucket="city", vbuckets=8) as other:
        Written(other).upsert("street", {})
        message = "has rows of the bucket default, which those of city would replace: name another"
        with pytest.raises(ConfigError, match=f"target: .*{message}"):
            replicate(other, replica)
    assert replica.documents() == written.documents()
    assert replicate(cluster, replica).generation == 1


def test_a_state_without_the_name_of_its_bucket_gets_it(cluster, written, tmp_path):
    fill(written)
    table = replicas.InDuckDB(tmp_path)
    replicate(cluster, table)
    with duckdb.connect(table.path) as connection:
        connection.sql(
            "UPDATE dcp_rs_replication SET state = replace(state, ',\"bucket\":\"default\"', '')"
        )
    assert "bucket" not in table.state()
    written.upsert("key_0", {"n": 1}, "inventory.airline")
    assert replicate(cluster, table).generation == 1
    assert table.state()["bucket"] == "default"


def test_a_bucket_may_be_made_anew_while_it_is_followed(cluster, written, table):
    fill(written)
    with Running(cluster, table) as running:
        running.until(lambda it: it.phase == "following", "follow")
        cluster.drop_bucket()
        time.sleep(0.3)
        cluster.create_bucket()
        written.upsert("anew", {})
        running.until(lambda it: it.generation == 2 and it.phase == "following", "load")
    assert set(table.documents()) == {("_default._default", "anew")}


@pytest.mark.parametrize("crash", ["crash_before", "crash_after"])
def test_a_load_goes_on_where_it_was_interrupted(cluster, written, replica, crash):
    fill(written, 200)
    cluster.persist()
    with pytest.raises(CrashError):
        replicate(cluster, Watched(replica, **{crash: 5}), mode=replica.mode, commit_rows=20)
    committed = len(replica.rows())
    assert 0 < committed < 200
    # What was loaded is written again, in the snapshot that is read on.
    for n in range(0, 200, 3):
        written.upsert(f"key_{n}", {"n": -n}, ("inventory.airline", "inventory.hotel")[n % 2])
    cluster.remove("key_1", collection="inventory.hotel")
    done = replicate(cluster, replica, commit_rows=20)
    assert done.changes < 200 + 67
    assert replica.documents() == written.documents()


def test_documents_are_columns_and_a_schema_that_gains_some_fills_them(cluster, written, table):
    for n in range(50):
        written.upsert(f"key_{n}", {"n": n, "name": f"name {n}", "tags": ["a"]})
    replicate(cluster, table, document_schema="n BIGINT, tags ARRAY<STRING>")
    found = {row["key"]: (row["n"], row["tags"]) for row in table.rows()}
    assert found == {f"key_{n}": (n, ["a"]) for n in range(50)}
    done = replicate(cluster, table, document_schema="n BIGINT, tags ARRAY<STRING>, name STRING")
    assert done.generation == 2
    found = {row["key"]: (row["n"], row["name"]) for row in table.rows()}
    assert found == {f"key_{n}": (n, f"name {n}") for n in range(50)}
    assert len(table.rows()) == 50


def test_documents_may_have_columns_that_are_called_as_ours_on_the_way(cluster, written, table):
    schema = "`_is_deleted` BOOLEAN, `_index` INT, `_rows` INT"
    for n, key in enumerate("abc"):
        written.upsert(key, {"_is_deleted": True, "_index": n, "_rows": n})
    replicate(cluster, table, document_schema=schema)
    cluster.create_scope("events")
    cluster.create_collection("events.of_all_vbuckets")
    written.upsert("a", {"_is_deleted": False, "_index": 5, "_rows": 6})
    cluster.remove("b")
    replicate(cluster, table, document_schema=schema)
    found = {row["key"]: (row["_is_deleted"], row["_index"], row["_rows"]) for row in table.rows()}
    assert found == {"a": (False, 5, 6), "c": (True, 2, 2)}


def test_a_column_that_the_schema_no_longer_has_is_null_in_a_log_from_then_on(
    cluster, written, log
):
    written.upsert("a", {"n": 1, "name": "A"})
    replicate(cluster, log, document_schema="n BIGINT, name STRING")
    written.upsert("a", {"n": 2, "name": "B"})
    replicate(cluster, log, document_schema="n BIGINT")
    found = {(row["n"], row["name"]) for row in log.rows() if row["op"] == "mutation"}
    assert found == {(1, "A"), (2, None)}


def test_a_table_does_not_keep_a_column_that_is_no_longer_in_step(cluster, written, table):
    written.upsert("a", {"n": 1, "name": "A"})
    replicate(cluster, table, document_schema="n BIGINT, name STRING")
    written.upsert("a", {"n": 2, "name": "B"})
    with pytest.raises(ConfigError, match="lacks name, which the table has"):
        replicate(cluster, table, document_schema="n BIGINT, more STRING")
    (row,) = table.rows()
    assert (row["n"], row["name"]) == (1, "A")
    assert "more" not in row


def test_a_schema_that_contradicts_the_table_is_refused_before_anything_is_written(
    cluster, written, replica
):
    written.upsert("a", {"n": 1})
    replicate(cluster, replica, document_schema=pa.schema({"n": pa.int64()}))
    before = replica.rows()
    written.upsert("b", {"n": 2})
    with pytest.raises(ConfigError, match=r"has other types: n is \w+ but must be \w+"):
        replicate(cluster, replica, document_schema="n STRING, more STRING")
    assert replica.rows() == before
    assert "more" not in before[0]


def test_a_log_with_columns_keeps_its_events(cluster, written, log):
    written.upsert("a", {"n": 1})
    replicate(cluster, log, document_schema="n BIGINT")
    found = {(row["op"], row["value"] is None, row["n"]) for row in log.rows()}
    assert found == {("system_event", False, None), ("mutation", True, 1)}


def test_two_that_write_to_one_target_do_not_both_commit(cluster, written, replica):
    fill(written)
    replicate(cluster, replica)
    before = replica.documents()
    fill(written, 3, "more")

    class Overtaken(Watched):
        def commit(self, commit):
            state = dataclasses.replace(commit.state, commits=commit.state.commits + 1)
            self.inner.commit(dataclasses.replace(commit, state=state))

    with pytest.raises(ConcurrentWriterError, match="another process"):
        replicate(cluster, Overtaken(replica), mode=replica.mode)
    assert replica.documents() == before


def test_a_wait_for_a_collection_that_is_not_there_is_said(cluster, tmp_path, caplog):
    url = replicas.InDuckDB(tmp_path).url
    replicate(cluster, url, collections="inventory.hotel")
    with cluster.connect(retry_timeout=0.5) as client, pytest.raises(ConfigError) as raised:
        dcp_rs.replicate(client, url, once=True, collections="inventory.hotle")
    said = [record.message for record in caplog.records if record.name == "dcp_rs.replication"]
    assert "no collection 'inventory.hotle'" in str(raised.value)
    assert said == [f"waits up to 0.5 s, since {raised.value}"]


def test_a_client_that_is_closed_during_a_load_does_not_complete_it(cluster, written, tmp_path):
    replica = replicas.InDuckDB(tmp_path)
    for n in range(1000):
        written.upsert(f"key_{n}", {"pad": "x" * 1000})
    # A buffer that does not hold the load.
    client = cluster.connect(buffer_size=1 << 16)
    closing = Watched(replica, look=lambda _: client.close())
    with pytest.raises(ClosedError):
        dcp_rs.replicate(client, closing, once=True, commit_rows=50)
    assert replica.generations() == (1, 0)
    replicate(cluster, replica)
    assert replica.generations() == (1, 1)
    assert replica.documents() == written.documents()


def test_progress_shows_what_is_behind_and_when_it_was_committed(cluster, written, tmp_path):
    seen = []

    def publish(progress):
        seen.append(progress)
        time.sleep(0.06)

    fill(written, 20_000)
    done = replicate(cluster, replicas.InDuckDB(tmp_path), on_progress=publish, commit_rows=500)
    assert seen[-1].changes == done.changes >= 20_000
    commits = [each.commits for each in seen]
    assert commits == sorted(commits)
    assert seen[-1].lag == 0
    assert seen[-1].lag_by_vbucket == {}
    known = [each for each in seen if each.lag is not None]
    assert all(each.lag == sum(each.lag_by_vbucket.values()) for each in known)
    assert {each.seconds_left for each in seen if each.lag is None} <= {None}
    lags = {each.lag for each in seen if each.changes < done.changes}
    assert len(lags) > 1, "it is looked at while commits come often"
    assert max(lags - {None}) > 0
    stop = threading.Event()
    quiet = []

    def watch(progress):
        publish(progress)
        if progress.phase == "following" and progress.seconds_since_commit > 1.5 and not quiet:
            quiet.append(progress)
            written.upsert("later", {"n": 1})
        if (quiet and progress.commits > quiet[0].commits) or progress.elapsed > 20:
            stop.set()

    replicate(cluster, replicas.InDuckDB(tmp_path), on_progress=watch, once=False, stop=stop)
    assert quiet, "nothing is written, and the last commit gets older"
    assert seen[-1].commits > quiet[0].commits
    assert seen[-1].seconds_since_commit < 1 < seen[-1].elapsed


def test_a_table_of_another_origin_is_left_alone(cluster, table):
    table.make_another()
    before = table.rows()
    with pytest.raises(ConfigError, match="did not write"):
        replicate(cluster, table)
    assert table.rows() == before


def test_hidden_files_of_another_origin_are_left_alone(cluster, written, tmp_path):
    fill(written)
    folder = tmp_path / "lake"
    folder.mkdir()
    others = folder / ".others.parquet"
    others.write_bytes(b"theirs")
    left = folder / f".{1:012}.parquet"
    left.write_bytes(b"what a crash has left")
    replicate(cluster, f"parquet://{folder}", mode="log")
    assert others.read_bytes() == b"theirs"
    assert not left.exists()


def test_a_state_that_is_damaged_is_never_taken_for_none(cluster, written, tmp_path):
    replica = replicas.InDuckDB(tmp_path)
    fill(written)
    replicate(cluster, replica.url)
    for damage in ("state[:200]", "replace(state, '0', '1')", "'{}'"):
        with duckdb.connect(str(replica.path)) as database:
            kept = database.sql("SELECT state FROM dcp_rs_replication").fetchall()[0]
            database.execute(f"UPDATE dcp_rs_replication SET state = {damage}")
        with pytest.raises(CheckpointError, match=r"damaged|checksum"):
            replicate(cluster, replica.url)
        with duckdb.connect(str(replica.path)) as database:
            database.execute("UPDATE dcp_rs_replication SET state = ?", kept)
    replicate(cluster, replica.url)


def test_what_changes_no_row_is_not_read_again(cluster, written, replica):
    fill(written)
    replicate(cluster, replica)
    cluster.upsert("never seen", {})
    cluster.remove("never seen")
    assert replicate(cluster, replica).changes == 1
    assert replicate(cluster, replica).commits == 0
    assert replica.documents() == written.documents()


def test_a_log_that_gains_columns_has_them_from_then_on(cluster, written, log):
    written.upsert("a", {"n": 1, "name": "A"})
    replicate(cluster, log, document_schema="n BIGINT")
    written.upsert("b", {"n": 2, "name": "B"})
    done = replicate(cluster, log, document_schema="n BIGINT, name STRING")
    assert done.changes == 1
    found = {row["key"]: (row["n"], row["name"]) for row in log.rows() if row["op"] == "mutation"}
    assert found == {"a": (1, None), "b": (2, "B")}


def test_a_delta_table_may_be_compacted_while_it_is_written(cluster, written, tmp_path):
    replica = replicas.InDelta(tmp_path)
    fill(written)
    replicate(cluster, replica, commit_rows=10)

    class Compacting(Watched):
        """Has its files replaced once it has looked at the table."""

        tries = 0

        def commit(self, commit):
            write = self.inner._write

            def compacted(commit, properties):
                self.tries += 1
                if self.tries % 2:
                    deltalake.DeltaTable(str(replica.folder)).optimize.compact()
                write(commit, properties)

            self.inner._write = compacted
            super().commit(commit)
            self.inner._write = write

    fill(written, 90)
    target = Compacting(replica)
    done = replicate(cluster, target, commit_rows=10)
    assert target.tries > done.commits
    assert replica.documents() == written.documents()
    assert len(list((replica.folder / "_dcp_rs").iterdir())) <= 51
    deltalake.DeltaTable(str(replica.folder)).vacuum(
        retention_hours=0, dry_run=False, enforce_retention_duration=False
    )
    assert replicate(cluster, replica).commits == 0, "the state is no file to vacuum"


@pytest.mark.parametrize("url", ["parquet:///folder", "iceberg:///folder"])
def test_what_can_be_a_log_only_is_no_table(cluster, url):
    with (
        cluster.connect() as client,
        pytest.raises(ConfigError, match="must be log for this target, not 'table'"),
    ):
        dcp_rs.replicate(client, url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "must begin with one of delta://, duckdb://"),
        ("duckdb:x", "has no // after duckdb: write duckdb:///path"),
        ("delta:/x", "has no // after delta: write delta:///path"),
        ("duckdb://?table=x", "name the database"),
        ("delta://", "name the table's folder"),
        ("parquet:///x?table=y", "no option table; it takes none"),
        ("duckdb:///x?tabel=y", "no option tabel"),
        ("iceberg://", "name the folder, as in iceberg:///folder"),
        (Path("/a b/x.duckdb"), r"a URL, such as duckdb:///a%20b/x\.duckdb\?table=documents$"),
        ("/a/x.db", r"a URL, such as duckdb:///a/x\.db\?table=documents$"),
        (Path("/lake"), "a URL, such as delta:///lake$"),
        ("lake/t", "a URL, such as delta:///.*/lake/t$"),
    ],
)
def test_a_url_that_names_no_target_is_refused(cluster, url, message):
    with cluster.connect() as client, pytest.raises(ConfigError, match=message):
        dcp_rs.replicate(client, url, mode="log")


def test_a_path_is_no_target_of_verify_either(client):
    with pytest.raises(ConfigError, match=r"^target: must be a URL, such as delta:///lake$"):
        dcp_rs.verify(client, Path("/lake"))


def test_a_table_and_a_log_are_not_mixed_up(cluster, written, table):
    fill(written)
    replicate(cluster, table)
    before = table.rows()
    with pytest.raises(ConfigError, match="is a table, not a log: choose table, or"):
        replicate(cluster, table, mode="log")
    assert table.rows() == before, "it has not even got the columns of a log"
