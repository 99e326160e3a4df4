"""An Iceberg log that others change: rolled back, compacted, edited; and its rejects."""

import gzip
import json

import pyarrow as pa
import pytest
import requests
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ServiceUnavailableError

import dcp_rs
import iceberg_tables as tables
import replicas
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication import iceberg, iceberg_attempt, storage
from dcp_rs.replication.iceberg import IcebergTarget
from dcp_rs.replication.target import Address


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def written(cluster):
    return replicas.Written(cluster)


@pytest.fixture
def log(tmp_path):
    replica = replicas.InIceberg(tmp_path)
    replica.mode = "log"
    return replica


@pytest.fixture(scope="module")
def given():
    return tables.collect()


# ----- where the state is -----


def test_each_snapshot_names_a_document_that_has_its_state(cluster, written, log):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    table = log.table()
    assert len(table.metadata.snapshots) > 3
    assert tables.documents_of(table) == tables.named_documents(table)
    for number, snapshot in enumerate(table.metadata.snapshots, 1):
        summary = snapshot.summary
        assert summary["dcp_rs.commit"] == str(number)
        document = tables.path_of(summary["dcp_rs.document"])
        assert document.parent == tables.path_of(table.location()) / "_dcp_rs"
        assert json.loads(gzip.decompress(document.read_bytes()))["commits"] == number
        assert len(json.dumps(dict(summary.additional_properties))) < 700
    assert summary["dcp_rs.complete-generation"] == "1"
    assert set(table.properties) == {"dcp_rs.newest"}


def test_a_state_that_is_gone_or_damaged_is_never_taken_for_none(cluster, written, log):
    tables.fill(written, 5)
    tables.replicate(cluster, log.url)
    document = tables.path_of(log.table().current_snapshot().summary["dcp_rs.document"])
    kept = document.read_bytes()
    for damage in (b"", b"no gzip", kept[:-5], gzip.compress(b"{}"), None):
        document.unlink() if damage is None else document.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"cannot be read: file://.*: restore|damaged"):
            tables.replicate(cluster, log.url)


def test_a_table_of_0_2_0_goes_on_and_loses_the_property(cluster, written, log, given):
    log.folder.mkdir()
    catalog = tables.catalog_of(log.folder)
    catalog.create_namespace("default")
    target = IcebergTarget(catalog, "default.changes")
    target.open(given.schema, "log")
    # As it wrote them.
    tables.fill(written)
    found = replicas.Collected(takes_rejects=True)
    tables.replicate(cluster, found)
    target.close()
    table = log.table()
    for commit in found.commits:
        with table.transaction() as transaction:
            transaction.append(commit.rows)
            transaction.set_properties({"dcp_rs.state": commit.state.to_json()})
    tables.compact(table)
    written.upsert("more", {})
    done = tables.replicate(cluster, log.url)
    assert (done.generation, done.changes) == (1, 1)
    table = log.table()
    assert set(table.properties) == {"dcp_rs.newest"}
    assert table.current_snapshot().summary["dcp_rs.commit"] == str(len(found.commits) + 1)
    assert log.documents() == written.documents()
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[1].snapshot_id).commit()
    assert tables.replicate(cluster, log.url).generation == 2, "of those there is no state"


# ----- a table that others change -----


@pytest.mark.parametrize("place", [0, 2])
def test_a_rollback_goes_on_from_the_state_of_the_snapshot(cluster, written, log, caplog, place):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    table = log.table()
    before = tables.documents_of(table)
    old = table.metadata.snapshots[place]
    table.manage_snapshots().rollback_to_snapshot(old.snapshot_id).commit()
    tables.fill(written, 10, "more")
    done = tables.replicate(cluster, log.url)
    assert done.generation == 1
    assert "not as it was left" not in caplog.text
    assert log.documents() == written.documents(), "and each row is there once"
    table = log.table()
    commits = [each.summary["dcp_rs.commit"] for each in table.metadata.snapshots]
    assert commits[len(before)] == str(place + 2), "numbers go on from there"
    assert set(before) < set(tables.documents_of(table)), "what the others need is kept"


def test_a_branch_may_take_the_place_of_another_and_back(cluster, written, log):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    table = log.table()
    head = table.current_snapshot().snapshot_id
    old = table.metadata.snapshots[1].snapshot_id
    table.manage_snapshots().create_branch(old, "old").commit()
    table.refresh().manage_snapshots().set_current_snapshot(ref_name="old").commit()
    tables.fill(written, 10, "more")
    assert tables.replicate(cluster, log.url).generation == 1
    assert log.documents() == written.documents()
    log.table().manage_snapshots().set_current_snapshot(snapshot_id=head).commit()
    assert tables.replicate(cluster, log.url).changes == 10
    assert log.documents() == written.documents()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("is_expired", [False, True])
def test_a_compaction_loads_nothing_anew(cluster, written, log, times, is_expired):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    table = log.table()
    for _ in range(times):
        tables.compact(table)
    if is_expired:
        tables.expire(table)
    for _ in range(2):
        assert tables.replicate(cluster, log.url).commits == 0
    written.upsert("more", {})
    done = tables.replicate(cluster, log.url)
    assert (done.generation, done.changes) == (1, 1)
    assert log.documents() == written.documents()
    assert tables.replicate(cluster, log.url).commits == 0
    documents = tables.documents_of(log.table())
    assert documents == tables.named_documents(log.table()), "what was expired is removed"
    assert len(documents) == (1 if is_expired else len(table.metadata.snapshots) - times + 1)


def test_expired_snapshots_lose_their_documents_while_it_is_written(given, tmp_path):
    target = IcebergTarget.at(Address.parse(f"iceberg://{tmp_path}/lake"))
    target.open(given.schema, "log")
    for commit in given.commits[:2]:
        target.commit(commit)
    table = tables.catalog_of(tmp_path / "lake").load_table("default.changes")
    assert len(tables.documents_of(table)) == 2
    tables.expire(table)
    target.commit(given.commits[2])
    assert tables.documents_of(table) == tables.named_documents(table.refresh())
    assert len(tables.documents_of(table)) == 2
    target.close()


def test_a_document_that_another_process_may_be_about_to_name_is_kept(cluster, written, log):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    folder = tables.path_of(log.table().location()) / "_dcp_rs"
    number = log.state()["commits"]
    for each in (number, number + 1):
        (folder / f"{each:012}-00000000.json.gzip").touch()
    (folder / "mine.json.gzip").touch()
    assert tables.replicate(cluster, log.url).commits == 0
    left = set(tables.documents_of(log.table())) - set(tables.named_documents(log.table()))
    assert left == {f"{number + 1:012}-00000000.json.gzip", "mine.json.gzip"}


def append(table):
    table.append(table.scan(limit=1).to_arrow())


def delete(table):
    table.delete("op = 'mutation' AND seqno > 3")


def clear(table):
    table.delete("seqno >= 0")


def overwrite(table):
    table.overwrite(table.scan(limit=1).to_arrow())


@pytest.mark.parametrize("has_compaction", [False, True])
@pytest.mark.parametrize("change", [append, delete, clear, overwrite])
def test_rows_that_others_changed_are_noticed_once(  # noqa: PLR0917 - fixtures
    cluster, written, log, caplog, change, has_compaction
):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    commits = log.state()["commits"]
    table = log.table()
    change(table)
    if has_compaction:
        tables.compact(table)
    assert tables.replicate(cluster, log.url).generation == 2
    assert "others have added, changed or removed rows" in caplog.text
    assert log.documents() == written.documents()
    assert log.state()["commits"] > commits
    assert tables.replicate(cluster, log.url).commits == 0


def test_a_compaction_of_an_older_version_is_not_taken_for_the_newest(
    cluster, written, log, caplog
):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    table = log.table()
    old = table.metadata.snapshots[1].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(old).commit()
    tables.expire(tables.compact(table.refresh()))
    assert tables.replicate(cluster, log.url).generation == 2
    assert "has not the rows that were written last" in caplog.text
    assert log.documents() == written.documents()


def test_a_table_that_was_dropped_begins_anew(cluster, written, log):
    tables.fill(written)
    cluster.upsert(tables.BAD_KEY, {})
    tables.replicate(cluster, log.url)
    tables.catalog_of(log.folder).drop_table("default.changes")
    assert tables.replicate(cluster, log.url).generation == 1
    assert log.documents() == written.documents()
    assert len(tables.rejected(log.folder)) == 1


def test_a_table_of_another_origin_is_left_alone(cluster, written, log):
    written.upsert("a", {})
    log.folder.mkdir()
    catalog = tables.catalog_of(log.folder)
    catalog.create_namespace("default")
    table = catalog.create_table("default.changes", pa.schema({"n": pa.int64()}))
    table.append(pa.table({"n": [1]}))
    before = table.metadata_location
    with pytest.raises(ConfigError, match=r"default\.changes has rows that dcp_rs did not write"):
        tables.replicate(cluster, log.url)
    assert catalog.load_table("default.changes").metadata_location == before


# ----- rejects -----


def test_changes_that_cannot_be_rows_are_beside_the_log_once(cluster, written, log):
    tables.fill(written)
    cluster.upsert(tables.BAD_KEY, b"one")
    assert tables.replicate(cluster, log.url).rejected == 1
    cluster.remove(tables.BAD_KEY)
    tables.replicate(cluster, log.url)
    first, second = tables.rejected(log.folder)
    assert {(row["key"], row["value"], row["op"]) for row in (first, second)} == {
        (tables.BAD_KEY, b"one", "mutation"), (tables.BAD_KEY, None, "deletion"),
    }  # fmt: skip
    table = log.table()
    # What was rejected after it is taken back as well.
    old = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(old).commit()
    cluster.upsert(tables.BAD_KEY, b"two")
    tables.replicate(cluster, log.url, commit_rows=3)
    assert [row["value"] for row in tables.rejected(log.folder)] == [b"two"]
    assert log.documents() == written.documents()


def test_older_rejects_stay_when_newer_ones_are_taken_back(given, tmp_path):
    address = Address.parse(f"iceberg://{tmp_path}/lake")
    target = IcebergTarget.at(address)
    target.open(given.schema, "log")
    for commit in given.commits:
        target.commit(commit)
    target.close()
    table = tables.catalog_of(tmp_path / "lake").load_table("default.changes")
    old = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(old).commit()
    tables.compact(tables.catalog_of(tmp_path / "lake").load_table("default.changes_rejected"))
    target.open(given.schema, "log")
    expected = [row for commit in given.commits[:1] for row in commit.rejects.to_pylist()]
    assert sorted(tables.rejected(tmp_path / "lake"), key=str) == sorted(expected, key=str)
    # What was taken back is an older version, which has all of its files.
    rejects = tables.catalog_of(tmp_path / "lake").load_table("default.changes_rejected")
    for snapshot in rejects.metadata.snapshots:
        rejects.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
    target.close()


def test_keys_may_be_bytes(cluster, log):
    cluster.upsert(tables.BAD_KEY, {"n": 1})
    for _ in range(2):
        assert tables.replicate(cluster, log.url, key_type="binary").rejected == 0
    assert [row["key"] for row in log.rows() if row["op"] == "mutation"] == [tables.BAD_KEY]
    assert not tables.catalog_of(log.folder).table_exists("default.changes_rejected")


def test_another_table_in_the_place_of_the_rejects_is_refused(cluster, log):
    told = r"table default\.changes_rejected is where the rejects of default\.changes go"
    taken = r"default\.changes_rejected is where changes go that cannot be written"
    tables.replicate(cluster, f"{log.url}?table=default.changes_rejected")
    with pytest.raises(ConfigError, match=taken):
        tables.replicate(cluster, log.url)
    assert not tables.catalog_of(log.folder).table_exists("default.changes")
    tables.catalog_of(log.folder).drop_table("default.changes_rejected")
    tables.replicate(cluster, log.url)
    with pytest.raises(ConfigError, match=told):
        tables.replicate(cluster, f"{log.url}?table=default.changes_rejected")
    cluster.upsert(tables.BAD_KEY, {})
    tables.replicate(cluster, log.url)
    tables.catalog_of(log.folder).drop_table("default.changes")
    with pytest.raises(ConfigError, match=r"changes_rejected is one of rejects: use another"):
        tables.replicate(cluster, f"{log.url}?table=default.changes_rejected")


def test_a_writer_that_was_overtaken_writes_no_rejects(given, tmp_path):
    address = Address.parse(f"iceberg://{tmp_path}/lake")
    fast, slow = IcebergTarget.at(address), IcebergTarget.at(address)
    for target in (fast, slow):
        target.open(given.schema, "log")
    fast.commit(given.commits[0])
    with pytest.raises(ConcurrentWriterError, match="another process"):
        slow.commit(given.commits[0])
    for target in (fast, slow):
        target.close()
    assert len(tables.rejected(tmp_path / "lake")) == 1


# ----- a catalog that does not answer -----


class Failing:
    """Requests to catalogs that fail: how many of each kind.

    Attributes:
        commits: Of commits, after some that do not.
        loads: Of those for tables.
        loses: Whether it is the answers to commits that are lost, and how many requests for tables
            fail after each.
        error: What is raised for them.
    """

    def __init__(self, monkeypatch):
        self.commits, self.passing, self.loads, self.loses = 0, 0, 0, None
        load, commit = SqlCatalog.load_table, SqlCatalog.commit_table
        unavailable = ServiceUnavailableError("RestError: Service Unavailable")
        self.error = requests.ConnectionError("('Connection aborted.', RemoteDisconnected())")

        def loading(*arguments, **named):
            if self.loads:
                self.loads -= 1
                raise unavailable
            return load(*arguments, **named)

        def committing(*arguments, **named):
            if not self.commits or self.passing:
                self.passing = max(self.passing - 1, 0)
                return commit(*arguments, **named)
            self.commits -= 1
            if self.loses is not None:
                commit(*arguments, **named)
                self.loads = self.loses
            raise self.error

        monkeypatch.setattr(iceberg, "_PAUSES", (0.01, 0.01, 0.01, 0.0))
        monkeypatch.setattr(iceberg_attempt, "_PAUSES", (0.0, 0.01, 0.01))
        monkeypatch.setattr(storage, "_PAUSES", (0.01, 0.01))
        monkeypatch.setattr(SqlCatalog, "load_table", loading)
        monkeypatch.setattr(SqlCatalog, "commit_table", committing)


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


@pytest.fixture
def behind(tmp_path):
    """A log behind a catalog that is not that of a folder."""
    (tmp_path / "iceberg").mkdir()
    replica = replicas.InIceberg(tmp_path)
    replica.mode, replica.url = (
        "log",
        f"iceberg+sqlite:///{replica.folder}/catalog.db?catalog=dcp_rs",
    )
    replica.storage_options = replica.to_write = {"warehouse": f"file://{replica.folder}"}
    return replica


def test_a_start_repeats_requests_that_a_catalog_does_not_answer(cluster, written, behind, failing):
    tables.fill(written)
    failing.loads = 2
    replicas.replicate(cluster, behind)
    assert behind.documents() == written.documents()
    failing.loads = 3
    with pytest.raises(ConfigError, match="Service Unavailable"):
        replicas.replicate(cluster, behind)


@pytest.mark.parametrize("loses", [None, 0, 2])
def test_a_commit_that_a_catalog_does_not_answer_is_made_once(
    cluster, behind, failing, loses, caplog
):
    written = replicas.Written(cluster)
    for step in range(2):
        tables.fill(written, name=f"key_{step}")
        written.upsert(tables.BAD_KEY, b"%d" % step)
        # Of the rejects and of the log.
        failing.commits, failing.loses = 2, loses
        replicas.replicate(cluster, behind)
        assert behind.documents() == written.documents()
        assert behind.rejects() == written.rejects()
    told = [vars(each).get("event") for each in caplog.records]
    assert told.count("commit_answer_lost" if loses is not None else "commit_retried") == 4
    assert len(behind.table().metadata.snapshots) == 2


def test_a_commit_whose_request_comes_twice_keeps_its_files(cluster, written, behind, failing):
    tables.fill(written)
    written.upsert(tables.BAD_KEY, b"1")
    failing.commits, failing.loses = 2, 0
    failing.error = CommitFailedException("Requirement failed: branch main has changed")
    replicas.replicate(cluster, behind)
    assert not failing.commits
    assert behind.documents() == written.documents()
    assert behind.rejects() == written.rejects()


@pytest.mark.parametrize("which", [0, 1], ids=["rejects", "log"])
def test_a_commit_of_which_a_catalog_says_nothing_is_not_made_again(
    cluster, written, behind, failing, which
):
    tables.fill(written)
    written.upsert(tables.BAD_KEY, b"1")
    failing.commits, failing.passing, failing.loses = 1, which, 3
    with pytest.raises(ConfigError, match="does not say whether it is there"):
        replicas.replicate(cluster, behind)
    assert not failing.commits
    # One that removes rejects again, if any are to go.
    failing.commits, failing.loses = 1, None
    replicas.replicate(cluster, behind)
    assert failing.commits == which
    assert behind.documents() == written.documents()
    assert behind.rejects() == written.rejects()
