"""Files of tables that are merged, and those of old versions that are removed."""

import contextlib
import logging
import sqlite3
import time

import deltalake
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import open_target
from delta_tables import data_files
from replicas import Written

LAKES = [
    pytest.param(f"{kind}-{mode}", marks=pytest.mark.ducklake)
    for kind, mode in [
        ("ducklake", "table"),
        ("ducklake", "log"),
        ("ducklake", "history"),
        ("ducklake_postgres", "table"),
        ("stored_ducklake", "table"),
    ]
]
KINDS = ["delta-table", "delta-log", "delta-history", "stored_delta-table", *LAKES]


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def written(cluster):
    return Written(cluster)


@pytest.fixture(params=KINDS)
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


def events(caplog, name):
    return [vars(each) for each in caplog.records if vars(each).get("event") == name]


def write(written, number):
    # A merge rewrites the files of documents that change, so these are new.
    for key in range(10):
        written.upsert(f"key_{number}_{key}", {"n": number})


def in_pieces(cluster, written, replica, commits=4):
    """Makes a table of several files."""
    for number in range(commits):
        write(written, number)
        replicas.replicate(cluster, replica)


def files(replica, table="documents"):
    """Gives the data files of the newest version."""
    if isinstance(replica, replicas.InDuckLake):
        found = replica.query(f"SELECT data_file FROM ducklake_list_files('lake', '{table}')")
        return {row["data_file"] for row in found}
    options = replica.storage_options
    table = deltalake.DeltaTable(str(replica.folder), storage_options=options)
    return set(table.file_uris())


def check(replica, written):
    assert replica.documents() == written.documents()


def test_small_files_become_few_at_the_end_of_a_run(cluster, written, replica, caplog):
    in_pieces(cluster, written, replica)
    before = len(files(replica))
    caplog.set_level(logging.INFO, "dcp_rs.replication")
    state = replicas.replicate(cluster, replica, compact_every=3600)
    after = len(files(replica))
    assert before > after == 1
    (told,) = events(caplog, "compacted")
    assert told["fields"] | {"seconds": 0} == {
        "collection": None,
        "files": before,
        "made": 1,
        "removed": 0,
        "seconds": 0,
    }
    check(replica, written)
    # The state is as it was, and the next start finds nothing that others did.
    write(written, 9)
    again = replicas.replicate(cluster, replica, compact_every=3600)
    assert again.generation == state.generation == 1
    check(replica, written)


@pytest.mark.parametrize("kind", ["delta", pytest.param("ducklake", marks=pytest.mark.ducklake)])
def test_a_table_is_compacted_while_changes_come(written, tmp_path, following, caplog, kind):
    caplog.set_level(logging.INFO, "dcp_rs.replication")
    replica = replicas.make(f"{kind}-table", None, tmp_path)
    following(replica.url, compact_every=1.0, commit_interval=0.05)
    end = time.monotonic() + 60
    number = 0
    while len(events(caplog, "compacted")) < 3:
        assert time.monotonic() < end, "it was not compacted"
        write(written, number)
        number += 1
        time.sleep(0.05)
    while replica.documents() != written.documents():
        assert time.monotonic() < end, "it is not in step"
        time.sleep(0.1)
    assert not events(caplog, "generation_begun")


def test_each_table_of_many_is_compacted(cluster, written, tmp_path):
    folder, options = tmp_path / "lake", {"tables": "collection", "collections": "shop.*"}
    cluster.create_scope("shop")
    for name in ("shop.a", "shop.b"):
        cluster.create_collection(name)
    for number in range(3):
        for name in ("shop.a", "shop.b"):
            written.upsert(f"key_{number}", {"n": number}, name)
        replicas.replicate(cluster, f"delta://{folder}", **options)
    replicas.replicate(cluster, f"delta://{folder}", compact_every=60, **options)
    for name in ("shop__a", "shop__b"):
        table = deltalake.DeltaTable(str(folder / name))
        assert len(table.file_uris()) == 1
        assert table.to_pyarrow_table().num_rows == 3


@pytest.mark.ducklake
def test_each_table_of_a_lake_is_compacted_and_none_of_others(cluster, written, tmp_path):
    lake, options = replicas.InDuckLake.in_sqlite(tmp_path), {"tables": "collection"}
    cluster.create_scope("shop")
    for name in ("shop.a", "shop.b"):
        cluster.create_collection(name)
    for number in range(3):
        for name in ("shop.a", "shop.b"):
            written.upsert(f"key_{number}", {"n": number}, name)
        replicas.replicate(cluster, lake.url, **options)
        lake.query("CREATE TABLE IF NOT EXISTS mine AS FROM range(100)")
        lake.query("INSERT INTO mine FROM range(100)")
    mine = files(lake, "mine")
    replicas.replicate(cluster, lake.url, compact_every=60, **options)
    for name in ("shop__a", "shop__b"):
        assert len(files(lake, name)) == 1
        assert lake.query(f"SELECT count(*) AS n FROM {name}") == [{"n": 3}]
    assert files(lake, "mine") == mine
    assert len(mine) > 1


@pytest.fixture
def lake(tmp_path):
    return replicas.InDuckLake.in_sqlite(tmp_path)


def opened(cluster, lake):
    """Gives a target that goes on with a table."""
    rows, target = replicas.Collected(takes_rejects=True), open_target(lake.url)
    replicas.replicate(cluster, rows)
    target.open(rows.schema, "table")
    return target


@pytest.mark.ducklake
def test_versions_of_a_lake_are_forgotten_unless_they_are_of_others(cluster, written, lake):
    in_pieces(cluster, written, lake)
    lake.query("CREATE TABLE mine AS SELECT 1 AS n")
    lake.query("UPDATE mine SET n = 2")
    in_pieces(cluster, written, lake)

    (mine,) = lake.query(
        "SELECT table_id FROM ducklake_table_info('lake') WHERE table_name = 'mine'"
    )

    def is_of_others(changes):
        names = {name for _, some in changes for name in some}
        return names <= {"main", "main.mine", str(mine["table_id"])}

    def versions():
        return {row["snapshot_id"]: row["changes"] for row in lake.query(
            "SELECT snapshot_id, changes FROM ducklake_snapshots('lake')"
        )}  # fmt: skip

    def state():
        return lake.query("FROM dcp_rs_replication")[0]["state"]

    before, last = versions(), state()
    with contextlib.closing(opened(cluster, lake)) as target:
        # An hour is not over, and then nothing is kept.
        kept = target.maintain(3600)
        assert kept.made == 1
        assert versions().keys() >= before.keys()
        there = set(lake.files())
        assert target.maintain(0) == (0, 0, 0)
        # What made the lake, what made and changed the table of others, and the newest.
        others = {number for number, changes in before.items() if is_of_others(changes)}
        assert len(others) == 3
        assert versions().keys() == {*others, max(versions())}
        assert lake.query(f"FROM mine AT (VERSION => {max(others) - 1})") == [{"n": 1}]
        # A query may still read files that no version names.
        assert set(lake.files()) == there
        with contextlib.closing(sqlite3.connect(lake.path, isolation_level=None)) as catalog:
            catalog.execute(
                "UPDATE ducklake_files_scheduled_for_deletion SET schedule_start ="
                " strftime('%Y-%m-%d %H:%M:%f+00', 'now', '-50 hours')"
            )
        gone = target.maintain(0)
        assert gone == (0, 0, len(there) - len(set(lake.files())))
        assert gone.removed
    assert state() == last
    assert lake.unnamed() == set()
    check(lake, written)
    assert replicas.replicate(cluster, lake).generation == 1


@pytest.mark.ducklake
def test_many_small_files_of_a_lake_with_deleted_rows_become_one(cluster, written, lake):
    def write_and_delete(numbers):
        for number in numbers:
            for key in range(20):
                written.upsert(f"key_{number}_{key}", {"n": number})
            replicas.replicate(cluster, lake)
        # One of twenty rows in each.
        for number in numbers:
            written.upsert(f"key_{number}_0", {"n": "again"})
        replicas.replicate(cluster, lake, compact_every=60)
        check(lake, written)

    write_and_delete(range(2))
    assert len(files(lake)) == 3, "they are few"
    write_and_delete(range(2, 12))
    assert len(files(lake)) == 1


@pytest.mark.ducklake
@pytest.mark.parametrize("who", ["somebody", "another process"])
def test_a_table_of_a_lake_that_others_have_changed_is_left_alone(cluster, written, lake, who):
    in_pieces(cluster, written, lake)
    with contextlib.closing(opened(cluster, lake)) as target:
        if who == "somebody":
            lake.query("DELETE FROM documents WHERE key = 'key_0_1'")
        else:
            opened(cluster, lake).close()
        before = files(lake)
        assert target.maintain(0) is None
    assert files(lake) == before


def test_files_of_old_versions_go_and_nothing_else(cluster, written, tmp_path):
    replica = replicas.InDelta(tmp_path)
    in_pieces(cluster, written, replica)
    folder, states = replica.folder, sorted((replica.folder / "_dcp_rs").iterdir())
    many = data_files(folder)
    (folder / "part-of-somebody.parquet").write_bytes(b"not in any version")
    target = open_target(replica.url)
    with_columns = deltalake.DeltaTable(str(folder)).to_pyarrow_table().schema
    target.open(with_columns.remove_metadata(), "table")
    # An hour is not over.
    kept = target.maintain(3600)
    assert (kept.made, kept.removed) == (1, 0)
    assert data_files(folder) > many
    gone = target.maintain(0)
    assert (gone.compacted, gone.made, gone.removed) == (0, 0, len(many))
    assert len(data_files(folder)) == 2
    assert (folder / "part-of-somebody.parquet").exists()
    assert sorted((folder / "_dcp_rs").iterdir()) == states
    (folder / "part-of-somebody.parquet").unlink()
    check(replica, written)
    write(written, 9)
    assert replicas.replicate(cluster, replica).generation == 1
    check(replica, written)


def test_a_table_that_others_have_changed_is_left_alone(cluster, written, tmp_path):
    replica = replicas.InDelta(tmp_path)
    in_pieces(cluster, written, replica)
    target = open_target(replica.url)
    table = deltalake.DeltaTable(str(replica.folder))
    target.open(table.to_pyarrow_table().schema.remove_metadata(), "table")
    table.delete("key = 'key_0_1'")
    before = deltalake.DeltaTable(str(replica.folder)).version()
    assert target.maintain(0) is None
    assert deltalake.DeltaTable(str(replica.folder)).version() == before


def test_a_compaction_that_fails_ends_nothing(cluster, written, tmp_path, caplog, monkeypatch):
    replica = replicas.InDelta(tmp_path)
    in_pieces(cluster, written, replica)

    def fail(*_args, **_options):
        raise deltalake.exceptions.DeltaError("out of luck")

    monkeypatch.setattr("deltalake.table.TableOptimizer.compact", fail)
    assert replicas.replicate(cluster, replica, compact_every=60).phase == "done"
    (told,) = events(caplog, "compaction_failed")
    assert "out of luck" in told["message"]
    assert told["levelname"] == "WARNING"
    check(replica, written)


@pytest.mark.parametrize(
    ("url", "options", "option"),
    [
        ("duckdb:///{}/x.duckdb", {"compact_every": 60}, "compact_every"),
        ("parquet:///{}/x", {"compact_every": 60, "mode": "log"}, "compact_every"),
        (
            "parquet:///{}/x",
            {"compact_every": 60, "tables": "collection", "mode": "log"},
            "compact_every",
        ),
        ("delta:///{}/x", {"compact_every": 0}, "compact_every"),
        ("delta:///{}/x", {"keep_versions_for": 86_400}, "keep_versions_for"),
        ("delta:///{}/x", {"compact_every": 60, "keep_versions_for": 60}, "keep_versions_for"),
    ],
)
def test_what_cannot_be_kept_up_is_refused(cluster, tmp_path, url, options, option):
    with pytest.raises(ConfigError) as refused:
        replicas.replicate(cluster, url.format(str(tmp_path)[1:]), **options)
    assert refused.value.option == option
    assert not list(tmp_path.glob("x*"))
