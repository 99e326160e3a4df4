"""What `replicate` says of itself, and what others see of it meanwhile: gauges, queries."""

import threading
import time

import duckdb
from prometheus_client import CollectorRegistry

import dcp_rs
import replicas
from dcp_rs.metrics import PrometheusCollector
from dcp_rs.replication import core
from lag import until
from replicas import Written


def test_a_commit_that_hangs_makes_the_report_old(cluster, client, tmp_path, following):
    cluster.upsert("first", {})
    registry, collector = CollectorRegistry(), PrometheusCollector()
    registry.register(collector)

    def value(name):
        return registry.get_sample_value(f"dcp_rs_{name}", {"bucket": "default", "stream": "t"})

    target = replicas.Stuck(replicas.InDuckDB(tmp_path).url)
    following(target, on_progress=collector.add_replication(client, name="t"))
    until(lambda: value("committed_records_total") == 1)
    # Nothing to write for longer than the hang is watched: it is reported all the same.
    ages, end = [], time.monotonic() + 3
    while time.monotonic() < end:
        ages.append(value("report_age_seconds"))
        time.sleep(0.05)
    assert value("commit_age_seconds") > 3
    cluster.upsert("second", {})
    assert target.hangs.wait(20)
    time.sleep(3.5)
    assert value("report_age_seconds") > 3.0 > max(ages)
    target.go_on.set()
    until(lambda: value("committed_records_total") == 2)
    assert value("report_age_seconds") < 3.0


def test_what_is_read_and_not_committed_is_counted(cluster, tmp_path, following, monkeypatch):
    monkeypatch.setattr(core, "_REST", 1e9)
    written = Written(cluster)
    for n in range(25):
        written.upsert(f"key_{n}", {"n": n})
    seen = []
    replica = replicas.InDuckDB(tmp_path)
    following(replica.url, on_progress=seen.append, commit_interval=3600)
    until(lambda: seen and seen[-1].phase == "following")
    for n in range(25, 40):
        written.upsert(f"key_{n}", {"n": n})
    # Everything is read, so nothing is behind, and nothing of it is in the table.
    until(lambda: seen[-1].uncommitted == 15 and seen[-1].lag == 0)
    assert seen[-1].changes == 25
    with cluster.connect() as client:
        done = dcp_rs.replicate(client, f"duckdb://{tmp_path}/other.duckdb", once=True)
    assert (done.changes, done.uncommitted, done.lag) == (40, 0, 0)


def test_a_database_that_follows_commits_as_soon_as_it_is_idle(cluster, tmp_path, following):
    replica, seen = replicas.InDuckDB(tmp_path), []
    following(replica.url, on_progress=seen.append, commit_interval=3600)
    until(lambda: seen and seen[-1].phase == "following")
    for n in range(5):
        cluster.upsert(f"key_{n}", b"{}")
        until(lambda n=n: seen[-1].changes == n + 1 and seen[-1].uncommitted == 0)
    assert seen[-1].commits >= 5


def test_lag_is_none_until_nodes_have_said_how_far_they_are(cluster, fill, tmp_path):
    fill(50)
    cluster.set_faults(
        [{"condition": {"opcode": "GET_ALL_VB_SEQNOS"}, "reaction": {"delay": {"seconds": 0.5}}}]
    )
    seen, stop = [], threading.Event()

    def watch(progress):
        seen.append(progress)
        if progress.phase == "following" or progress.elapsed > 20:
            stop.set()

    with cluster.connect() as client:
        target = replicas.InDuckDB(tmp_path).url
        done = dcp_rs.replicate(client, target, stop=stop, on_progress=watch, commit_rows=1)
    assert done.changes == 50
    assert seen[0].lag is None
    assert seen[0].seconds_left is None
    assert seen[-1].lag is not None


def test_the_same_process_can_query_duckdb_meanwhile(cluster, tmp_path, following):
    replica = replicas.InDuckDB(tmp_path)
    cluster.upsert("first", {})
    following(replica.url)

    def keys():
        with duckdb.connect(str(replica.path)) as database:
            return {key for (key,) in database.sql("SELECT key FROM documents").fetchall()}

    until(lambda: replica.path.exists() and has_table(replica.path) and keys() == {"first"})
    cluster.upsert("second", {})
    until(lambda: keys() == {"first", "second"})


def has_table(path):
    with duckdb.connect(str(path)) as database:
        return ("documents",) in database.sql("SHOW TABLES").fetchall()
