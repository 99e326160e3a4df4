"""An Iceberg log in tables of any name and kind, and commits that fail at each step."""

import dataclasses
import json
import os
import signal
from urllib.parse import quote

import pytest
from pyiceberg.io.pyarrow import PyArrowFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from sqlalchemy.orm import Session

import dcp_rs
import iceberg_tables as tables
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError
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


# ----- names -----


@pytest.mark.parametrize(
    "name", ["a b", "a'b\"c", "[x]*", "back\\slash", "é", "a;b", "a@b", "~", "a:b"]
)
def test_folders_and_tables_may_have_such_names(cluster, written, tmp_path, name):
    tables.fill(written, 5)
    cluster.upsert(tables.BAD_KEY, {})
    folder = tmp_path / name
    for _ in range(2):
        tables.replicate(cluster, f"iceberg://{quote(str(folder))}/?table=one.two.{quote(name)}")
    assert [each.name for each in tmp_path.iterdir()] == [name]
    rows = tables.rows_of(tables.catalog_of(folder).load_table(("one", "two", name)))
    assert replicas.settle(rows) == written.documents()
    assert len(tables.rejected(folder, ("one", "two", f"{name}_rejected"))) == 1


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a\nb", "a\tb"])
def test_a_folder_or_table_that_pyiceberg_would_cut_is_refused(cluster, tmp_path, name):
    with pytest.raises(ConfigError, match="at which pyiceberg would take a part"):
        tables.replicate(cluster, f"iceberg://{tmp_path}/{quote(name)}")
    if "%" not in name:
        with pytest.raises(ConfigError, match="which pyiceberg would leave out"):
            tables.replicate(cluster, f"iceberg://{tmp_path}/lake?table=a.{quote(name)}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [" a.b", "a .b", "a. b.c"])
def test_a_table_has_no_second_name(cluster, tmp_path, name):
    with pytest.raises(
        ConfigError, match="space around a namespace, which pyiceberg would leave out"
    ):
        tables.replicate(cluster, f"iceberg://{tmp_path}/lake?table={quote(name)}")


def test_a_table_is_not_put_into_the_folder_of_another(cluster, tmp_path):
    url = f"iceberg://{tmp_path}/lake"
    with pytest.raises(ConfigError, match="has a /, and would be in the folder of another table"):
        tables.replicate(cluster, f"{url}?table=default.changes/data")
    assert not list(tmp_path.iterdir()), "nor is anything left"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created: "):
        tables.replicate(cluster, f"iceberg://{tmp_path}/file/x")
    with pytest.raises(ConfigError, match="VARIANT"):
        tables.replicate(cluster, f"{url}/a/b", document_schema="v VARIANT")
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake/catalog.db").mkdir()
    with pytest.raises(ConfigError, match=r"lake/catalog.db cannot be opened: "):
        tables.replicate(cluster, url)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["catalog.db", "file", "lake"]


def test_one_table_under_two_paths_has_one_state(cluster, written, log, tmp_path):
    tables.fill(written)
    tables.replicate(cluster, log.url)
    (tmp_path / "link").symlink_to(log.folder)
    for other in ("link", "iceberg/", "x/../iceberg"):
        assert tables.replicate(cluster, f"iceberg://{tmp_path}/{other}").commits == 0
    assert log.documents() == written.documents()


# ----- tables that others made, or altered -----


@pytest.fixture
def make(log):
    """Makes the table as somebody else does, with the columns of a log and more."""

    def create(given, more=(), required=(), **options):
        log.folder.mkdir()
        catalog = tables.catalog_of(log.folder)
        catalog.create_namespace("default")
        target = IcebergTarget(catalog, "default.template")
        target.open(given.schema, "log")
        fields = [
            NestedField(each.field_id, each.name, each.field_type, required=each.name in required)
            for each in catalog.load_table("default.template").schema().fields
        ]
        catalog.drop_table("default.template")
        schema = Schema(*fields, *more, **options.pop("schema", {}))
        return catalog.create_table("default.changes", schema, **options)

    return create


_EXTRA = NestedField(90, "extra", LongType())


def spec(column, transform):
    """Gives a partition by a column of a log."""
    source = {"key": 2, "value": 3, "vbucket": 7}[column]
    return PartitionSpec(PartitionField(source, 1000, transform, f"{column}_part"))


@pytest.mark.parametrize(
    "options",
    [
        {"properties": {"format-version": "1"}},
        {"properties": {"format-version": "2"}},
        {"properties": {"write.object-storage.enabled": "true"}},
        {"properties": {"commit.manifest-merge.enabled": "true",
                        "commit.manifest.min-count-to-merge": "2"}},
        {"properties": {"write.metadata.delete-after-commit.enabled": "true",
                        "write.metadata.previous-versions-max": "1"}},
        {"properties": {"write.target-file-size-bytes": "100", "commit.retry.num-retries": "3"}},
        {"more": [_EXTRA]},
        {"required": ["op", "vbucket", "seqno"], "schema": {"identifier_field_ids": [7, 10]}},
        {"partition_spec": spec("vbucket", IdentityTransform())},
        {"partition_spec": spec("key", IdentityTransform())},
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:40],
)  # fmt: skip
def test_a_table_may_be_made_so(  # noqa: PLR0917 - fixtures
    cluster, written, log, make, given, options
):
    make(given, **options)
    tables.fill(written, 15)
    cluster.upsert("a/b=c", {})
    tables.replicate(cluster, log.url)
    log.table().update_schema().add_column("later", StringType()).commit()
    written.upsert("more", {})
    assert tables.replicate(cluster, log.url).changes == 1
    cluster.remove("a/b=c")
    tables.replicate(cluster, log.url)
    assert log.documents() == written.documents()
    assert files_of(log.table()) == referenced_by(log.table())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"properties": {"write.format.default": "orc"}},
            "write.format.default=orc, and pyiceberg",
        ),
        ({"properties": {"write.format.default": "avro"}}, "set it to parquet"),
        ({"required": ["key"]}, "requires a value for key, which not every row has"),
        ({"more": [NestedField(90, "extra", LongType(), required=True)]}, "a value for extra"),
        ({"partition_spec": spec("key", BucketTransform(4))}, r"by key_part \(bucket\[4\]\)"),
    ],
)
def test_a_table_that_cannot_be_written_is_refused_by_name(  # noqa: PLR0917 - fixtures
    cluster, written, log, make, given, options, told
):
    before = make(given, **options).metadata_location
    written.upsert("a", {})
    with pytest.raises(ConfigError, match=rf"table default\.changes .*{told}"):
        tables.replicate(cluster, log.url, document_schema="n BIGINT")
    assert log.table().metadata_location == before


def test_a_table_of_a_newer_format_is_refused(cluster, log, make, given):
    table = make(given)
    path = tables.path_of(table.metadata_location)
    metadata = json.loads(path.read_text()) | {"format-version": 3, "next-row-id": 0}
    path.write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match="has format-version 3, and pyiceberg writes 2"):
        tables.replicate(cluster, log.url)


def test_a_column_that_differs_in_case_is_refused(cluster, written, log):
    written.upsert("a", {"n": 1})
    tables.replicate(cluster, log.url, document_schema="n BIGINT")
    with pytest.raises(ConfigError, match='"N" differs only in case from "n" of table default'):
        tables.replicate(cluster, log.url, document_schema="N BIGINT")


# ----- commits that fail -----


def files_of(table):
    return {each for each in tables.path_of(table.location()).rglob("*") if each.is_file()}


def referenced_by(table):
    """Gives all files that a version of a table names; of metadata, also those of before."""
    found = {tables.path_of(table.metadata_location)}
    found |= {tables.path_of(each.metadata_file) for each in table.metadata.metadata_log}
    for snapshot in table.metadata.snapshots:
        found.add(tables.path_of(snapshot.manifest_list))
        if snapshot.summary["dcp_rs.document"]:
            found.add(tables.path_of(snapshot.summary["dcp_rs.document"]))
        for manifest in snapshot.manifests(table.io):
            found.add(tables.path_of(manifest.manifest_path))
            found |= {
                tables.path_of(e.data_file.file_path)
                for e in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
            }
    return {each for each in found if each.exists()}


# What a commit creates, in this order: rejects first, which have no document.
_REJECTS = ["data", "manifest", "manifest list", "metadata", "catalog"]
_LOG = ["document", *_REJECTS]


class Failing:
    """Fails at one step of a commit, after a file was created or before the catalog commits."""

    def __init__(self, patched, place, fail, *, is_after=False):
        self.calls, self.place, self.fail, self.is_after = 0, place, fail, is_after
        create, commit = PyArrowFile.create, Session.commit
        patched.setattr(PyArrowFile, "create", lambda *a, **b: self._create(create, *a, **b))
        patched.setattr(Session, "commit", lambda session: self._end(commit, session))

    def _create(self, original, *arguments, **options):
        self.calls += 1
        done = original(*arguments, **options)
        if self.calls == self.place:
            done.close()
            self.fail()
        return done

    def _end(self, original, session):
        self.calls += 1
        if self.calls == self.place and not self.is_after:
            self.fail()
        original(session)
        if self.calls == self.place:
            self.fail()


def no_space():
    raise OSError(28, "No space left on device")


@pytest.fixture
def begun(given, tmp_path):
    """A target that has committed once."""
    target = IcebergTarget.at(Address.parse(f"iceberg://{tmp_path}/lake"))
    target.open(given.schema, "log")
    target.commit(given.commits[0])
    yield target
    target.close()


def finish(given, target, folder):
    """Opens the table again, writes the commits that it lacks, and compares all."""
    state = target.open(given.schema, "log")
    assert not state.moved
    for commit in given.commits[state.commits :]:
        target.commit(commit)
    table = tables.catalog_of(folder).load_table("default.changes")
    expected = [row for commit in given.commits for row in commit.rows.to_pylist()]
    assert sorted(map(str, tables.rows_of(table))) == sorted(map(str, expected))
    expected = [row for commit in given.commits for row in commit.rejects.to_pylist()]
    assert sorted(map(str, tables.rejected(folder))) == sorted(map(str, expected))
    return table


_STEPS = [*enumerate(_REJECTS, 1), *enumerate(_LOG, len(_REJECTS) + 1)]
_PLACES = [pytest.param(place, id=f"{name}-{place}") for place, name in _STEPS]


@pytest.mark.parametrize("place", _PLACES)
def test_a_commit_that_fails_leaves_no_file_and_the_next_start_goes_on(
    given, begun, tmp_path, monkeypatch, place
):
    catalog = tables.catalog_of(tmp_path / "lake")
    log, beside = (catalog.load_table(f"default.changes{each}") for each in ("", "_rejected"))
    before, before_beside = files_of(log), files_of(beside)
    with monkeypatch.context() as patched:
        failing = Failing(patched, place, no_space)
        told = r"^target: table default\.changes(_rejected)? cannot be written: .*No space left"
        with pytest.raises(ConfigError, match=told):
            begun.commit(given.commits[1])
    # Older releases try to write a file of data again.
    assert failing.calls >= place
    assert files_of(log) == before
    assert place > len(_REJECTS) or files_of(beside) == before_beside
    begun.close()
    table = finish(given, begun, tmp_path / "lake")
    assert files_of(table) == referenced_by(table)


@pytest.mark.parametrize("place", [len(_REJECTS), len(_STEPS)])
def test_a_commit_whose_answer_is_lost_is_there_once(  # noqa: PLR0917 - fixtures
    given, begun, tmp_path, monkeypatch, caplog, place
):
    with monkeypatch.context() as patched:
        Failing(patched, place, no_space, is_after=True)
        begun.commit(given.commits[1])
    assert "a commit is there, although it failed: [Errno 28] No space" in caplog.text
    begun.commit(given.commits[2])
    begun.close()
    table = finish(given, begun, tmp_path / "lake")
    assert files_of(table) == referenced_by(table)


def test_a_commit_that_was_interrupted_after_it_landed_keeps_its_files(
    given, begun, tmp_path, monkeypatch
):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        Failing(patched, len(_STEPS), interrupt, is_after=True)
        with pytest.raises(KeyboardInterrupt):
            begun.commit(given.commits[1])
    begun.close()
    table = finish(given, begun, tmp_path / "lake")
    assert files_of(table) == referenced_by(table)


@pytest.mark.parametrize("place", _PLACES)
def test_a_commit_that_dies_is_there_once_or_not_at_all(given, begun, tmp_path, place):
    begun.close()
    child = os.fork()
    if not child:
        try:
            begun.open(given.schema, "log")
            Failing(pytest.MonkeyPatch(), place, lambda: os.kill(os.getpid(), signal.SIGKILL))
            begun.commit(given.commits[1])
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    finish(given, begun, tmp_path / "lake")
    begun.open(given.schema, "log")
    table = tables.catalog_of(tmp_path / "lake").load_table("default.changes")
    assert tables.documents_of(table) == tables.named_documents(table)


def test_a_commit_that_another_overtakes_leaves_no_file(given, begun, tmp_path):
    table = tables.catalog_of(tmp_path / "lake").load_table("default.changes")
    plain = dataclasses.replace(given.commits[1], rejects=given.commits[1].rejects.slice(0, 0))
    table.append(table.scan(limit=1).to_arrow())
    files = files_of(table)
    with pytest.raises(ConcurrentWriterError, match="another process"):
        begun.commit(plain)
    assert files_of(table) == files


def test_a_catalog_of_the_users_is_as_it_was(given, tmp_path):
    folder = tmp_path / "lake"
    folder.mkdir()
    catalog = tables.catalog_of(folder)
    before = set(vars(catalog))
    target = IcebergTarget(catalog, "a.b")
    target.open(given.schema, "log")
    for commit in given.commits:
        target.commit(commit)
    target.close()
    assert set(vars(catalog)) == before
    rows = sum(len(commit.rows) for commit in given.commits)
    assert len(tables.rows_of(catalog.load_table("a.b"))) == rows
