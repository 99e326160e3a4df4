"""Several processes that replicate one bucket to the same tables, each a share of the vBuckets."""

import contextlib
import threading
import time

import duckdb
import psycopg
import pytest

import dcp_rs
import replicas
from dcp_rs.cli.replicate import Line
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication import open_target
from dcp_rs.replication.changes import Layout
from dcp_rs.replication.postgres import target as postgres
from dcp_rs.replication.postgres.table import Table
from dcp_rs.replication.sharing import BucketShare
from replicas import Written, replicate

SHARES = ("1/3", "2/3", "3/3")
COLLECTIONS = ("_default._default", "inventory.airline")
_LEGACY = b"session\xff_%d"


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=8) as running:
        running.create_scope("inventory")
        for name in ("inventory.airline", "inventory.hotel"):
            running.create_collection(name)
        yield running


@pytest.fixture
def written(cluster):
    found = Written(cluster)
    for n in range(60):
        found.upsert(f"key_{n}", {"n": n}, COLLECTIONS[n % 2])
    return found


@pytest.fixture(params=["one", "many"])
def replica(request, tmp_path):
    """One table, and one for each collection."""
    if request.param == "many":
        return replicas.make_many("postgres-table", request, tmp_path)
    return replicas.make("postgres-table", request, tmp_path)


@pytest.fixture
def table(postgres_database):
    return replicas.InPostgres(postgres_database)


def each(cluster, target, **options):
    """Replicates all shares once, one after the other."""
    return [replicate(cluster, target, share=share, **options) for share in SHARES]


class Running:
    """Replicates shares at the same time, until the block ends or one fails."""

    def __init__(self, cluster, target, shares=SHARES, **options):
        self.progress, self.errors, self._stop = {}, [], threading.Event()
        self._given = {"once": False, "stop": self._stop} | options
        self._threads = [
            threading.Thread(target=self._run, args=(cluster, target, share)) for share in shares
        ]

    def _run(self, cluster, target, share):
        def take(progress):
            self.progress[share] = progress

        try:
            replicate(cluster, target, share=share, on_progress=take, **self._given)
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self.errors.append(error)
            self._stop.set()

    def follow(self):
        found = list(self.progress.values())
        return len(found) == len(self._threads) and all(p.phase == "following" for p in found)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)


def states(table):
    found = table.query("SELECT table_name, commits FROM dcp_rs_replication ORDER BY 1")
    return {row["table_name"]: row["commits"] for row in found}


def generations(done):
    return [progress.generation for progress in done]


# ----- what a share is -----


@pytest.mark.parametrize("of", [1, 2, 3, 5, 8])
def test_shares_have_each_vbucket_and_each_row_once(of):
    shares = [BucketShare.parse(f"{number}/{of}", 8) for number in range(1, of + 1)]
    assert [vbucket for share in shares for vbucket in share.vbuckets] == list(range(8))
    # Rows that somebody else has added may be of any vBucket, or of none.
    conditions = " UNION ALL ".join(
        f"SELECT {place} AS share, vbucket FROM rows WHERE {share.condition}"
        for place, share in enumerate(shares)
    )
    found = duckdb.sql(
        f"WITH rows AS (SELECT unnest([NULL, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 900]) AS vbucket)"
        f" {conditions}"
    ).fetchall()
    assert len(found) == 12
    own = [(place, vbucket) for place, vbucket in found if vbucket in range(8)]
    assert all(vbucket in shares[place].vbuckets for place, vbucket in own)


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        ({"share": "0/3"}, "share", "shares are numbered from 1/3 to 3/3"),
        ({"share": "4/3"}, "share", "shares are numbered from 1/3 to 3/3"),
        ({"share": "2 of 3"}, "share", "such as 2/5, not '2 of 3'"),
        ({"share": "1/0"}, "share", "such as 2/5, not '1/0'"),
        ({"share": "1/9"}, "share", "9 shares are too many: the bucket has only 8 vBuckets"),
        ({"share": 2}, "share", "must be text"),
        ({"mode": "log"}, "mode", "a log is read by the newest generation of all its rows"),
        ({"on_drop": "drop", "tables": "collection"}, "on_drop", "drops no table"),
        ({"document_schema": "infer"}, "document_schema", "each share would decide the columns"),
        ({"new_fields": "evolve"}, "new_fields", "each share would decide the columns"),
        ({"type_conflicts": "evolve"}, "type_conflicts", "each share would decide the columns"),
        (
            {"tables": {"*.*": {"table": "{collection}", "new_fields": "evolve"}}},
            "tables",
            r"new_fields of '\*\.\*': each share would decide the columns",
        ),
    ],
)
def test_options_that_no_share_has_are_refused(cluster, table, options, option, message):
    if option in {"new_fields", "type_conflicts", "tables"}:
        options = {"document_schema": "n BIGINT"} | options
    with pytest.raises(ConfigError, match=message) as error:
        replicate(cluster, table, **({"share": "1/3"} | options))
    assert error.value.option == option
    assert table.query("SELECT to_regclass('dcp_rs_replication') AS it") == [{"it": None}]


@pytest.mark.parametrize("kind", ["duckdb", "delta", "parquet", "iceberg"])
def test_other_targets_are_refused_and_the_right_one_named(cluster, request, tmp_path, kind):
    replica = replicas.make(f"{kind}-table", request, tmp_path)
    with pytest.raises(ConfigError, match=r"share: \w+ has one writer: take postgresql://"):
        replicate(cluster, replica, share="1/3")
    assert not list(tmp_path.iterdir())


# ----- tables of several shares -----


def test_shares_together_make_the_bucket(cluster, written, replica):
    done = each(cluster, replica)
    assert [progress.share for progress in done] == list(SHARES)
    assert Line()(done[0]).startswith("dcp-rs: share 1/3, done: generation 1, ")
    assert sum(progress.changes for progress in done) == 60
    assert replica.documents() == written.documents()
    written.upsert("key_0", {"n": "new"})
    cluster.remove("key_2")
    assert sum(progress.changes for progress in each(cluster, replica)) == 2
    assert replica.documents() == written.documents()
    done = each(cluster, replica)
    assert [progress.commits for progress in done] == [0, 0, 0], "nothing is left to do"
    assert generations(done) == [1, 1, 1]


def test_shares_that_run_together_make_tables_and_rejects_once(
    cluster, written, replica, monkeypatch
):
    meeting, has_rejects = threading.Barrier(2), Table._has_rejects

    def has_rejects_of_another(table):
        found = has_rejects(table)
        if not found:
            # Another share is to look before this one makes it, which it cannot.
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.3)
        return found

    with Running(cluster, replica) as running:
        until(running.follow)
        monkeypatch.setattr(Table, "_has_rejects", has_rejects_of_another)
        for n in range(24):
            written.upsert(_LEGACY % n, b"x", COLLECTIONS[n % 2])
        until(lambda: sum(each.rejected for each in running.progress.values()) == 24)
        for n in range(0, 24, 3):
            cluster.remove(_LEGACY % n, collection=COLLECTIONS[n % 2])
        until(lambda: replica.rejects() == written.rejects())
    assert replica.documents() == written.documents()
    assert len(written.rejects()) == 16


def test_collections_that_come_and_go_are_followed(cluster, written, replica):
    written.upsert("a", {"n": 1}, "inventory.hotel")
    with Running(cluster, replica) as running:
        until(running.follow)
        cluster.drop_collection("inventory.airline")
        until(lambda: replica.documents() == written.documents())
        cluster.create_collection("inventory.airline")
        for n in range(20):
            written.upsert(f"new_{n}", {"n": n}, "inventory.airline")
        until(lambda: replica.documents() == written.documents())
    cluster.drop_collection("inventory.airline")
    cluster.drop_collection("inventory.hotel")
    replicate(cluster, replica, share="2/3")
    lost = {key for key in written.keys if key[0].startswith("inventory")}
    assert lost & replica.documents().keys(), "the rows of other shares stay until they are there"
    each(cluster, replica)
    assert replica.documents() == written.documents()


def test_a_lost_tail_is_taken_back_by_its_share_alone(cluster, written, replica):
    each(cluster, replica)
    high = cluster.high_seqnos()
    cluster.roll_back(3, high[3] - 1)
    done = each(cluster, replica)
    assert [progress.rollbacks for progress in done] == [0, 1, 0]
    assert replica.documents() == written.documents()


def test_a_bucket_that_was_created_again_is_loaded_by_each_share(cluster, written, table):
    for n in range(12):
        written.upsert(_LEGACY % n, b"x")
    each(cluster, table)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=8) as other:
        again = Written(other)
        for n in range(30, 90):
            again.upsert(f"key_{n}", {"n": -n})
        assert replicate(other, table, share="1/3").generation == 2
        old = written.documents().keys() - again.documents().keys()
        assert old & table.documents().keys(), "the other shares have their rows"
        assert table.rejects(), "and their rejects"
        assert generations(each(other, table)) == [2, 2, 2]
        assert table.documents() == again.documents()
        assert not table.rejects()


def test_a_bucket_with_another_number_of_vbuckets_is_refused(cluster, written, table, monkeypatch):
    """Rows would be of other shares: while it runs, and at a start."""
    with Running(cluster, table, ["2/3"]) as running:
        until(running.follow)
        # An embedded cluster has the same number again.
        with monkeypatch.context() as patch:
            patch.setattr(dcp_rs.Client, "num_vbuckets", 16)
            cluster.drop_bucket()
            cluster.create_bucket()
            until(lambda: running.errors)
        error = running.errors.pop()
    assert isinstance(error, CheckpointError)
    before = table.documents()
    with dcp_rs.testing.EmbeddedCluster(vbuckets=16) as other:
        reason = "one of 8 vBuckets, and the bucket has 16 now, .*: replicate to a new table"
        with pytest.raises(CheckpointError, match=reason) as another:
            replicate(other, table, share="2/3")
    assert str(error) == str(another.value)
    assert table.documents() == before
    assert before.keys() < written.keys


def test_rows_that_others_change_are_noticed_by_their_share(cluster, written, table):
    each(cluster, table)
    table.query("DELETE FROM documents WHERE vbucket = 4")
    assert generations(each(cluster, table)) == [1, 2, 1]
    assert table.documents() == written.documents()
    for vbucket, place in (("NULL", 0), ("900", 2)):
        table.query(
            "INSERT INTO documents (key, collection_id, vbucket, generation, epoch)"
            f" VALUES ('mine', 0, {vbucket}, 9, 0)"
        )
        before = generations(each(cluster, table))
        found = [0, 0, 0]
        found[place] = 1
        assert before[place] > 1, f"the row of vBucket {vbucket} is noticed"
        assert table.documents() == written.documents()


def test_a_column_that_somebody_dropped_is_noticed_by_every_share(cluster, written, table):
    each(cluster, table)
    table.query("ALTER TABLE documents DROP COLUMN cas")
    # It dies before its first commit.
    with opened(table, "2/3"):
        pass
    assert generations(each(cluster, table)) == [2, 2, 2]
    assert table.documents() == written.documents()
    assert table.query("SELECT key FROM documents WHERE cas IS NULL") == []
    assert [progress.commits for progress in each(cluster, table)] == [0, 0, 0], "once"


def test_a_share_that_runs_learns_of_a_dropped_column_with_its_next_commit(cluster, written, table):
    each(cluster, table)
    with Running(cluster, table, ["2/3"]) as running:
        until(running.follow)
        table.query("ALTER TABLE documents DROP COLUMN cas")
        assert replicate(cluster, table, share="1/3").generation == 2
        for n in range(60):
            written.upsert(f"key_{n}", {"n": "new"}, COLLECTIONS[n % 2])
        until(lambda: running.errors)
        error = running.errors.pop()
    assert isinstance(error, ConfigError)
    assert "columns of share 2/3 of documents were dropped while" in str(error)
    assert generations(each(cluster, table)) == [2, 2, 2]
    assert table.documents() == written.documents()
    assert table.query("SELECT key FROM documents WHERE cas IS NULL") == []


def test_a_repair_reads_vbuckets_again_in_their_shares(cluster, written, table):
    each(cluster, table)
    table.query("UPDATE documents SET value = '{}' WHERE vbucket IN (1, 4)")
    done = each(cluster, table, reload=range(5))
    assert [progress.changes > 0 for progress in done] == [True, True, False]
    assert table.documents() == written.documents()


# ----- who may write -----


def test_another_number_of_shares_is_refused_and_it_is_said_what_to_do(
    cluster, written, table, monkeypatch
):
    monkeypatch.setattr(postgres, "_WAIT_SECONDS", 0.1)
    replicate(cluster, table, share="2/3")
    for share, named in ((None, "one process"), ("2/4", "4 shares"), ("1/1", "1 shares")):
        with pytest.raises(
            CheckpointError,
            match=rf"that of 3 shares, and cannot become that of {named}: start it with the shares"
            r" 1/3 to 3/3; or replicate to a new table; or stop all that write to it, drop it, and"
            r" delete \S+\.\.2/3 from ",
        ):
            replicate(cluster, table, share=share)
    each(cluster, table)
    assert table.documents() == written.documents()


def test_a_table_of_one_process_has_no_shares(cluster, written, table):
    replicate(cluster, table)
    with pytest.raises(
        CheckpointError,
        match="that of one process, and cannot become that of 3 shares: leave out share; or",
    ):
        replicate(cluster, table, share="1/3")
    assert table.documents() == written.documents()


def test_the_way_to_another_number_of_shares_works(cluster, written, table):
    written.upsert(_LEGACY % 1, b"x")
    each(cluster, table)
    table.query("DROP TABLE documents")
    table.query("DELETE FROM dcp_rs_replication WHERE table_name LIKE 'documents..%'")
    for share in ("1/2", "2/2"):
        replicate(cluster, table, share=share)
    assert table.documents() == written.documents()
    assert table.rejects() == written.rejects()
    table.query("DELETE FROM dcp_rs_replication")
    with pytest.raises(ConfigError, match="has rows that dcp_rs did not write"):
        replicate(cluster, table, share="1/2")


@contextlib.contextmanager
def opened(table, share, name="documents"):
    """Opens a share, and commits nothing."""
    with contextlib.closing(open_target(f"{table.url}&table={name}")) as target:
        target.take_share(None if share is None else BucketShare.parse(share, 8))
        target.open(Layout.of("table", None).schema, "table")
        yield


def test_shares_are_fenced_before_their_first_commit(table, monkeypatch):
    monkeypatch.setattr(postgres, "_WAIT_SECONDS", 0.1)
    schema = table.query("SELECT current_schema()")[0]["current_schema"]
    with opened(table, "1/3"), opened(table, "2/3", f"{schema}.documents"):
        assert states(table) == {"documents..1/3": 0, f"{schema}.documents..2/3": 0}
        for name in ("documents", f"{schema}.documents"):
            with pytest.raises(ConcurrentWriterError, match=r"writes to share 2/3 of documents"):
                opened(table, "2/3", name).__enter__()
            for share in (None, "1/2"):
                with pytest.raises(CheckpointError, match="that of 3 shares"):
                    opened(table, share, name).__enter__()
    with psycopg.connect(table.url) as older:
        older.execute(
            "SELECT pg_advisory_lock(hashtext('dcp_rs'), hashtext(current_schema() || 'documents'))"
        )
        with pytest.raises(ConcurrentWriterError, match="writes to documents"):
            opened(table, "3/3").__enter__()


def test_a_share_that_was_overtaken_writes_nothing_more(cluster, written, table):
    """As when its connection, and with it the lock, was lost while another began."""
    with Running(cluster, table, ["2/3"]) as running:
        until(running.follow)
        before = table.documents()
        table.query("UPDATE dcp_rs_replication SET commits = commits + 1")
        for n in range(60):
            written.upsert(f"key_{n}", {"n": "new"}, COLLECTIONS[n % 2])
        until(lambda: running.errors)
        error = running.errors.pop()
    assert isinstance(error, ConcurrentWriterError)
    assert "another process writes to share 2/3 of documents" in str(error)
    assert table.documents() == before


# ----- what is said of a share -----


@pytest.mark.usefixtures("written")
def test_verify_compares_all_shares_as_one_table(cluster, table):
    replicate(cluster, table, share="1/3")
    # Which share 2 has opened, and not committed to.
    with opened(table, "2/3"):
        pass
    found = verified(cluster, table)
    assert {each.not_compared for each in found.values()} == {
        "share 2/3, 3/3 has committed nothing"
    }
    each(cluster, table)
    found = verified(cluster, table)
    assert not any(each.not_compared or each.vbuckets for each in found.values())
    assert sum(each.documents for each in found.values()) == 60
    table.query("DELETE FROM documents WHERE vbucket = 4")
    table.query("UPDATE documents SET seqno = seqno - 1 WHERE vbucket = 7")
    assert verified(cluster, table)["documents"].vbuckets == (4, 7)
    assert verified(cluster, table, vbuckets=range(4))["documents"].is_equal


def verified(cluster, table, **options):
    with cluster.connect() as client:
        return dcp_rs.replication.verify(client, table.url, **options).tables
