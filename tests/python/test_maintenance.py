"""Files of tables that are merged, and those of old versions that are removed."""

import logging
import time

import deltalake
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import open_target
from delta_tables import data_files
from replicas import Written

KINDS = ["delta-table", "delta-log", "delta-history", "stored_delta-table"]


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


def opened(replica):
    return deltalake.DeltaTable(str(replica.folder), storage_options=replica.storage_options)


def check(replica, written):
    assert replica.documents() == written.documents()


def test_small_files_become_few_at_the_end_of_a_run(cluster, written, replica, caplog):
    in_pieces(cluster, written, replica)
    before = len(opened(replica).file_uris())
    caplog.set_level(logging.INFO, "dcp_rs.replication")
    state = replicas.replicate(cluster, replica, compact_every=3600)
    after = len(opened(replica).file_uris())
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


def test_a_table_is_compacted_while_changes_come(written, tmp_path, following, caplog):
    caplog.set_level(logging.INFO, "dcp_rs.replication")
    replica = replicas.InDelta(tmp_path)
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
