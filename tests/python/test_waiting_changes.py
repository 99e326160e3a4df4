"""Which tables commit, and which have their changes wait."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError
from dcp_rs.replication import open_database, open_target
from dcp_rs.replication.waiting import Limits, Part, Waiting, due, oldest

ROWS = pa.table({"timestamp": pa.array(range(100), pa.timestamp("us", "UTC"))})


def table(rows, since=0.0):
    waiting = Waiting()
    for first in range(0, rows, 100):
        changes = ROWS.slice(0, min(rows - first, 100))
        waiting.add(Part(changes, changes.nbytes, *oldest(changes)[:1]), since)
    return SimpleNamespace(waiting=waiting)


def test_a_table_is_due_with_enough_changes_or_after_a_time():
    limits = Limits(rows=300, bytes=10**9, seconds=5.0)
    full, old, none, young = table(300), table(1, 1.0), table(0), table(299, 2.0)
    assert due([full, old, none, young], limits, 6.0) == [full, old]


def test_tables_with_the_most_changes_make_room_for_the_others():
    limits = Limits(rows=10**6, bytes=8 * 400, seconds=100.0)
    small, large, medium = table(100), table(500), table(300)
    assert due([small, large, medium], limits, 1.0) == [large]
    assert due([small, medium], limits, 1.0) == []
    few = limits._replace(bytes=8 * 399)
    assert due([small, large, medium], few, 1.0) == [large, medium]


def test_changes_are_taken_in_their_order():
    waiting = table(250).waiting
    assert (waiting.rows, waiting.bytes) == (250, 2000)
    assert waiting.written == 0
    found = waiting.take(ROWS.schema)["timestamp"].cast(pa.int64()).to_pylist()
    assert found == [*range(100), *range(100), *range(50)]
    assert (waiting.rows, waiting.bytes) == (0, 0)
    assert len(waiting.take(ROWS.schema)) == 0


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=8) as running:
        running.create_scope("s")
        for number in range(10):
            running.create_collection(f"s.quiet_{number}")
        running.create_collection("s.busy")
        yield running


@pytest.mark.parametrize("kind", ["duckdb-table", "delta-table", "parquet-log"])
def test_a_table_of_few_documents_commits_seldom_beside_a_busy_one(
    cluster, request, tmp_path, kind
):
    replica = replicas.make_many(kind, request, tmp_path)
    written = replicas.Written(cluster)
    for number in range(3_000):
        written.upsert(f"key_{number}", {"pad": "x" * 200}, "s.busy")
        if number % 100 == 0:
            written.upsert(f"key_{number}", {"n": number}, f"s.quiet_{number // 100 % 10}")
    most = []

    def watch(progress):
        most.append(sum(table.uncommitted for table in progress.tables.values()))

    done = replicas.replicate(
        cluster, replica, commit_rows=400, commit_interval=60.0, on_progress=watch
    )
    quiet = [table for name, table in done.tables.items() if "quiet" in name]
    assert done.tables["s__busy"].commits > 3
    assert max(table.commits for table in quiet) <= 2
    assert 0 < max(most) < 2_000, "they wait, in bounded memory"
    assert replica.documents() == written.documents()


def test_changes_of_a_quiet_table_wait_no_longer_than_the_interval(cluster, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    seen, stop = [], threading.Event()
    following = threading.Thread(
        target=replicas.replicate,
        args=(cluster, replica),
        kwargs={"once": False, "stop": stop, "on_progress": seen.append, "commit_interval": 0.5},
    )
    following.start()
    try:
        deadline = time.monotonic() + 30
        number, begun = 0, None
        while time.monotonic() < deadline:
            cluster.upsert(f"key_{number}", {"n": number}, collection="s.busy")
            number += 1
            if begun is None and seen and seen[-1].phase == "following":
                cluster.upsert("one", {"n": 1}, collection="s.quiet_3")
                begun = time.monotonic()
            if begun and seen[-1].tables["s__quiet_3"].changes:
                break
            time.sleep(0.001)
        assert time.monotonic() - begun < 10
    finally:
        stop.set()
        following.join()


def test_a_folder_of_logs_has_one_lock(cluster, tmp_path):
    for number in range(10):
        cluster.upsert("key", {"n": number}, collection=f"s.quiet_{number}")
    url = f"parquet://{tmp_path}/logs"
    database = open_database(url)
    opened = open_files()
    try:
        replicas.replicate(cluster, database_kept_open(database), mode="log", tables="collection")
        assert open_files() - opened <= 2
        with pytest.raises(ConcurrentWriterError):
            replicas.replicate(cluster, url, mode="log", tables="collection")
        with pytest.raises(ConcurrentWriterError):
            replicas.replicate(cluster, open_target(f"{url}/another"), mode="log")
    finally:
        database.close()
    replicas.replicate(cluster, url, mode="log", tables="collection")
    single = open_target(f"{url}/another")
    single.open(pa.schema([pa.field("key", pa.string())]), "log")
    with pytest.raises(ConcurrentWriterError):
        replicas.replicate(cluster, url, mode="log", tables="collection")
    single.close()


def open_files():
    return sum("dcp_rs" in str(each.resolve()) for each in Path("/proc/self/fd").iterdir())


def database_kept_open(database):
    """Gives a database that a replication does not close."""

    class Kept:
        modes, takes_rejects = database.modes, database.takes_rejects

        def __getattr__(self, name):
            return (lambda: None) if name == "close" else getattr(database, name)

    return Kept()
