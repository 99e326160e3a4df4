"""The Parquet target: a folder that others change, and commits that fail at each step."""

import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from urllib.parse import quote

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication import State, open_target, rejects
from dcp_rs.replication.parquet import ParquetTarget

_BAD_KEY = b"session\xff"


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def written(cluster):
    return replicas.Written(cluster)


@pytest.fixture
def log(tmp_path):
    replica = replicas.InParquet(tmp_path)
    replica.mode = "log"
    return replica


def replicate(cluster, target, **options):
    with cluster.connect() as client:
        return dcp_rs.replicate(
            client, target, **({"mode": "log", "once": True, "commit_rows": 5} | options)
        )


def fill(written, count=40, name="key"):
    for n in range(count):
        written.upsert(f"{name}_{n}", {"n": n})


def files(folder):
    return sorted(each.name for each in Path(folder).iterdir() if each.name.endswith(".parquet"))


def rejected(folder):
    """Gives the rejects as others read them."""
    rows = [
        row
        for each in sorted(Path(folder).glob("*.parquet"))
        for row in pq.read_table(each).to_pylist()
    ]
    places = [(row["vbucket"], row["generation"], row["epoch"], row["seqno"]) for row in rows]
    assert len(set(places)) == len(places), "a reject is doubled"
    return rows


@pytest.fixture(scope="module")
def given():
    """The commits of a replication, all of which have a reject."""
    found = replicas.Collected(takes_rejects=True)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster:
        fill(replicas.Written(cluster))
        replicate(cluster, found)
    found.commits = [commit for commit in found.commits if len(commit.rows)]
    key = pa.array([_BAD_KEY], pa.binary())
    for number, commit in enumerate(found.commits):
        row = commit.rows.slice(0, 1)
        row = row.set_column(row.schema.get_field_index("key"), "key", key)
        bad = rejects.as_rejects(
            row, pa.chunked_array([["x"]], pa.string()).cast(pa.binary()), ["why"]
        )
        found.commits[number] = dataclasses.replace(commit, rejects=bad)
    assert len(found.commits) > 6
    return found


# ----- files that others change -----


@pytest.mark.parametrize("kept", [1, 5])
def test_without_its_newest_files_a_log_goes_on_from_the_state_of_the_newest(
    cluster, written, log, caplog, kept
):
    fill(written)
    replicate(cluster, log.url)
    names = files(log.folder)
    for name in names[kept:]:
        (log.folder / name).unlink()
    fill(written, 10, "more")
    done = replicate(cluster, log.url)
    assert done.generation == 1
    assert "is not as it was left" not in caplog.text
    assert files(log.folder)[: len(names)] == names, "the numbers go on"
    assert len(files(log.folder)) > kept
    assert log.documents() == written.documents()
    assert log.state()["commits"] == len(files(log.folder))


@pytest.mark.parametrize("gone", [1, 4])
def test_the_oldest_files_may_be_removed(cluster, written, log, gone):
    fill(written)
    replicate(cluster, log.url)
    for name in files(log.folder)[:gone]:
        (log.folder / name).unlink()
    written.upsert("more", {})
    done = replicate(cluster, log.url)
    assert (done.generation, done.changes) == (1, 1)


def remove(folder, name):
    (folder / name).unlink()


def replace(folder, name):
    table = pq.read_table(folder / name)
    pq.write_table(table.slice(1), folder / name)


def damage(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-20])


def copy(folder, name):
    shutil.copy(folder / "000000000002.parquet", folder / name)


_CHANGES = {
    remove: "between the oldest and the newest were removed",
    replace: "files were replaced",
    damage: "files were replaced",
}


@pytest.mark.parametrize("place", [2, 4])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_in_the_middle_is_noticed_and_loads_anew_once(  # noqa: PLR0917 - fixtures
    cluster, written, log, caplog, change, place
):
    fill(written)
    replicate(cluster, log.url)
    names = files(log.folder)
    change(log.folder, names[place])
    written.upsert("more", {})
    assert replicate(cluster, log.url).generation == 2
    assert _CHANGES[change] in caplog.text
    assert set(files(log.folder)) - set(names) > {f"{len(names) + 1:012}.parquet"}
    if change is not damage:
        assert log.documents() == written.documents()
    assert replicate(cluster, log.url).commits == 0, "what is left of the older one does not matter"
    (log.folder / files(log.folder)[-3]).unlink()
    assert replicate(cluster, log.url).generation == 3, "the newer one is checked too"


def test_the_oldest_file_is_checked_even_if_those_before_it_are_gone(cluster, written, log):
    fill(written)
    replicate(cluster, log.url)
    for name in files(log.folder)[:2]:
        (log.folder / name).unlink()
    damage(log.folder, files(log.folder)[0])
    assert replicate(cluster, log.url).generation == 2


def test_a_newest_file_with_other_rows_or_another_number_is_noticed(cluster, written, log, caplog):
    fill(written)
    replicate(cluster, log.url)
    newest = log.folder / files(log.folder)[-1]
    copy(log.folder, newest.name)
    assert replicate(cluster, log.url).generation == 2
    assert f"{newest.name} is a copy of another file" in caplog.text
    assert log.documents() == written.documents()
    newest = log.folder / files(log.folder)[-1]
    notes = pq.read_metadata(newest).metadata
    others = pq.read_table(log.folder / files(log.folder)[0])
    with pq.ParquetWriter(newest, others.schema) as writer:
        writer.write_table(others)
        writer.add_key_value_metadata(
            {key: notes[key] for key in (b"dcp_rs.state", b"dcp_rs.files")}
        )
    assert replicate(cluster, log.url).generation == 3
    assert "no longer has the rows" in caplog.text


def test_a_damaged_newest_file_is_named_and_may_be_removed(cluster, written, log):
    fill(written)
    replicate(cluster, log.url)
    newest = log.folder / files(log.folder)[-1]
    for size in (0, 3, newest.stat().st_size - 1):
        os.truncate(newest, size)
        with pytest.raises(CheckpointError, match=rf"{newest} is damaged: .* or remove it"):
            replicate(cluster, log.url)
    newest.unlink()
    assert replicate(cluster, log.url).generation == 1
    assert log.documents() == written.documents()


def test_files_of_others_are_named_and_refused(cluster, written, log):
    fill(written)
    replicate(cluster, log.url)
    before = files(log.folder)
    merged = log.folder / "0-merged.parquet"
    pq.write_table(pq.read_table(log.folder / before[0]), merged)
    with pytest.raises(ConfigError, match=r"did not write, such as 0-merged.parquet: move them"):
        replicate(cluster, log.url)
    merged.unlink()
    pq.write_table(pa.table({"a": [1]}), log.folder / "000000000999.parquet")
    with pytest.raises(ConfigError, match=r"did not write, such as 000000000999.parquet"):
        replicate(cluster, log.url)
    (log.folder / "000000000999.parquet").unlink()
    (log.folder / "_common_metadata").write_bytes(b"")
    assert replicate(cluster, log.url).commits == 0
    assert files(log.folder) == before


def test_a_folder_that_was_emptied_begins_anew(cluster, written, log):
    fill(written)
    cluster.upsert(_BAD_KEY, b"x")
    replicate(cluster, log.url)
    for name in files(log.folder):
        (log.folder / name).unlink()
    assert replicate(cluster, log.url).generation == 1
    assert log.documents() == written.documents()
    assert len(rejected(f"{log.folder}_rejected")) == 1


def test_a_folder_that_is_emptied_while_it_is_written_is_noticed(given, tmp_path):
    target = ParquetTarget(tmp_path / "log")
    target.open(given.schema, "log")
    target.commit(given.commits[0])
    (tmp_path / "log" / "000000000001.parquet").unlink()
    with pytest.raises(ConcurrentWriterError, match="another process"):
        target.commit(given.commits[1])
    target.close()


def test_a_log_of_0_2_0_goes_on_and_is_tied_from_then_on(cluster, written, log):
    fill(written)
    replicate(cluster, log.url)
    # As it wrote them.
    for name in files(log.folder):
        table, notes = (
            pq.read_table(log.folder / name),
            pq.read_metadata(log.folder / name).metadata,
        )
        state = {b"dcp_rs.state": notes[b"dcp_rs.state"]}
        pq.write_table(table.replace_schema_metadata(state), log.folder / name, compression="zstd")
    before = len(files(log.folder))
    fill(written, 20, "more")
    assert replicate(cluster, log.url).generation == 1
    assert log.documents() == written.documents()
    (log.folder / files(log.folder)[before + 1]).unlink()
    assert replicate(cluster, log.url).generation == 2


# ----- rejects -----


def test_changes_that_cannot_be_rows_are_beside_the_log_once(cluster, written, log):
    fill(written, 20)
    cluster.upsert(_BAD_KEY, b"one")
    done = replicate(cluster, log.url)
    assert done.rejected == 1
    folder = Path(f"{log.folder}_rejected")
    assert len(files(folder)) == 1, "only a commit with rejects has a file"
    cluster.remove(_BAD_KEY)
    replicate(cluster, log.url)
    first, second = rejected(folder)
    assert (first["key"], first["value"], first["op"]) == (_BAD_KEY, b"one", "mutation")
    assert (second["key"], second["value"], second["op"]) == (_BAD_KEY, None, "deletion")
    assert pq.read_schema(folder / files(folder)[0]).equals(rejects.SCHEMA)
    for name in files(log.folder)[2:]:
        (log.folder / name).unlink()
    cluster.upsert(_BAD_KEY, b"two")
    replicate(cluster, log.url, commit_rows=1)
    assert [row["value"] for row in rejected(folder)] == [b"two"], "in a later commit than before"
    assert log.documents() == written.documents()


def test_keys_may_be_bytes(cluster, log):
    cluster.upsert(_BAD_KEY, {"n": 1})
    assert replicate(cluster, log.url, key_type="binary").rejected == 0
    assert [row["key"] for row in log.rows() if row["op"] == "mutation"] == [_BAD_KEY]
    assert not Path(f"{log.folder}_rejected").exists()


def test_another_folder_in_the_place_of_the_rejects_is_refused(cluster, written, log):
    written.upsert("a", {})
    place = Path(f"{log.folder}_rejected")
    told = f"{place} is where changes go that cannot be written"

    place.touch()
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, log.url)
    place.unlink()
    place.mkdir()
    pq.write_table(pa.table({"a": [1]}), place / "000000000001.parquet")
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, log.url)
    (place / "000000000001.parquet").rename(place / "mine.parquet")
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, log.url)
    (place / "mine.parquet").unlink()
    assert not log.folder.exists()

    other = ParquetTarget(place)
    other.open(rejects.SCHEMA, "log")
    other.close()
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, log.url)
    shutil.rmtree(place)
    replicate(cluster, log.url)
    with pytest.raises(ConfigError, match="is where the rejects of parquet go"):
        replicate(cluster, f"parquet://{place}")
    place.mkdir()
    (place / "mine.parquet").touch()
    cluster.upsert(_BAD_KEY, {})
    with pytest.raises(ConfigError, match=told):
        replicate(cluster, log.url)
    assert files(place) == ["mine.parquet"]


def test_a_folder_that_is_made_in_the_place_of_the_rejects_meanwhile_is_left_alone(given, tmp_path):
    target = ParquetTarget(tmp_path / "log")
    target.open(given.schema, "log")
    (tmp_path / "log_rejected").mkdir()
    (tmp_path / "log_rejected" / "mine.parquet").touch()
    with pytest.raises(ConfigError, match="is where changes go that cannot be written"):
        target.commit(given.commits[0])
    target.close()
    assert files(tmp_path / "log") == []
    assert files(tmp_path / "log_rejected") == ["mine.parquet"]


# ----- names -----


@pytest.mark.parametrize(
    "name",
    [
        "a%20b", "[a-z]*?", "new\nline", "back\\slash", "quo'te\"", " space ", "a#b", "{x}", "~",
        "é", "e\N{COMBINING ACUTE ACCENT}", "s3:", "-rf", "a" * 200,
    ],
)  # fmt: skip
def test_a_folder_may_have_any_name(cluster, written, tmp_path, name):
    fill(written, 12)
    cluster.upsert(_BAD_KEY, {})
    folder = tmp_path / name
    for _ in range(2):
        replicate(cluster, f"parquet://{quote(str(folder))}/")
    assert sorted(each.name for each in tmp_path.iterdir()) == [name, f"{name}_rejected"]
    assert len(files(folder)) > 1
    rows = [row for each in files(folder) for row in pq.read_table(str(folder / each)).to_pylist()]
    assert replicas.settle(rows) == written.documents()


def test_one_folder_under_two_names_has_one_writer(given, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "log")
    first = ParquetTarget(tmp_path / "log")
    first.open(given.schema, "log")
    first.commit(given.commits[0])
    for other in ("link", "link/", "x/../log", "./log/."):
        second = ParquetTarget(f"{tmp_path}/{other}")
        with pytest.raises(ConcurrentWriterError, match="another process"):
            second.open(given.schema, "log")
        second.close()
    first.close()
    second = ParquetTarget(tmp_path / "link")
    assert second.open(given.schema, "log").commits == 1
    second.commit(given.commits[1])
    second.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "log", "log_rejected"]


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(cluster, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (
        tmp_path / "file",
        tmp_path / "loop",
        tmp_path / "new" / ("a" * 300),
        "/sys/kernel",
    ):
        with pytest.raises(ConfigError, match=rf"^target: the folder {folder} cannot be "):
            replicate(cluster, f"parquet://{folder}")
    with pytest.raises(ConfigError, match="/ is no folder for files"):
        replicate(cluster, "parquet:///")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "loop"]


def test_a_refused_folder_is_as_it_was(cluster, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    pq.write_table(pa.table({"a": [1]}), theirs / "a.parquet")
    with pytest.raises(ConfigError, match="did not write"):
        replicate(cluster, f"parquet://{theirs}")
    with pytest.raises(ConfigError, match="VARIANT"):
        replicate(cluster, f"parquet://{tmp_path}/a/b", document_schema="v VARIANT")
    assert [each.name for each in tmp_path.rglob("*")] == ["theirs", "a.parquet"]


# ----- columns -----


def test_others_read_the_folder_and_see_columns_that_were_added(cluster, written, log):
    written.upsert("a", {"n": 1, "name": "A"})
    replicate(cluster, log.url, document_schema="n BIGINT")
    written.upsert("b", {"n": 2, "name": "B"})
    replicate(cluster, log.url, document_schema="n BIGINT, name STRING")
    expected = [("a", 1, None), ("b", 2, "B")]
    schema = pq.read_schema(log.folder / files(log.folder)[-1])
    with_pyarrow = pa.dataset.dataset(log.folder, schema=schema).to_table().to_pylist()
    with_duckdb = (
        duckdb.sql(f"FROM read_parquet('{log.folder}/*.parquet', union_by_name = true)")
        .to_arrow_table()
        .to_pylist()
    )
    oldest = [log.folder / name for name in files(log.folder)]
    with_polars = pl_rows(oldest)
    for rows in (with_pyarrow, with_duckdb, with_polars):
        found = [(row["key"], row["n"], row["name"]) for row in rows if row["op"] == "mutation"]
        assert sorted(found) == expected


def pl_rows(paths):
    frames = [pl.scan_parquet(path) for path in paths]
    return pl.concat(frames, how="diagonal").collect().to_dicts()


def test_a_column_that_comes_back_has_the_type_that_it_had(cluster, written, log):
    written.upsert("a", {"n": 1, "name": "A"})
    replicate(cluster, log.url, document_schema="n BIGINT, name STRING")
    written.upsert("a", {"n": 2, "name": "B"})
    replicate(cluster, log.url, document_schema="n BIGINT")
    newest = pq.read_schema(log.folder / files(log.folder)[-1])
    assert newest.field("name").type == pa.string()
    with pytest.raises(ConfigError, match="name is string but must be int64"):
        replicate(cluster, log.url, document_schema="n BIGINT, name BIGINT")
    with pytest.raises(ConfigError, match='"Name" differs only in case from "name"'):
        replicate(cluster, log.url, document_schema="n BIGINT, Name STRING")
    written.upsert("a", {"n": 3, "name": "C"})
    replicate(cluster, log.url, document_schema="n BIGINT, name STRING")
    found = {(row["n"], row["name"]) for row in log.rows() if row["op"] == "mutation"}
    assert found == {(1, "A"), (2, None), (3, "C")}


# ----- commits that fail -----

# Calls of a commit, in their order, by what is replaced: those of the file of rejects come first.
_STEPS = ["pathlib.Path.open", "pyarrow.parquet.ParquetWriter.write_table", "os.fsync",
          "pathlib.Path.rename", "dcp_rs.replication.parquet_folder.sync_folder"]  # fmt: skip


@pytest.mark.parametrize("is_of_rejects", [True, False])
@pytest.mark.parametrize("step", _STEPS)
def test_a_commit_that_fails_leaves_no_file_and_the_next_start_goes_on(
    given, tmp_path, monkeypatch, step, is_of_rejects
):
    folder, beside = tmp_path / "log", tmp_path / "log_rejected"
    target = ParquetTarget(folder)
    target.open(given.schema, "log")
    target.commit(given.commits[0])
    calls = 0
    with monkeypatch.context() as patched:
        original = _resolve(step)

        def fail(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == place(step, is_of_rejects):
                raise OSError(28, "No space left on device")
            return original(*arguments, **options)

        patched.setattr(step, fail)
        with pytest.raises(
            ConfigError, match=rf"{folder} cannot .*: No space left on device: mend"
        ):
            target.commit(given.commits[1])
    target.close()
    assert calls == place(step, is_of_rejects)
    is_there = step.endswith("sync_folder") and not is_of_rejects
    expected = [f"{number:012}.parquet" for number in range(1, 3 if is_there else 2)]
    assert files(folder) == expected
    assert files(beside) == expected
    finish(given, folder)


def place(step, is_of_rejects):
    """Gives which call of a step it is: folders are synced by it as well."""
    return 1 if is_of_rejects else 3 if step == "os.fsync" else 2


def _resolve(path):
    module, found = path.split("."), None
    for end in range(len(module), 0, -1):
        found = sys.modules.get(".".join(module[:end]))
        if found is not None:
            for name in module[end:]:
                found = getattr(found, name)
            return found
    raise AssertionError(path)


def finish(given, folder):
    """Opens the folder again, writes the commits that it lacks, and compares all."""
    target = ParquetTarget(folder)
    state = target.open(given.schema, "log")
    assert not state.moved
    assert [each.name for each in folder.parent.rglob(".*")] == [".dcp_rs.lock"]
    for commit in given.commits[state.commits :]:
        target.commit(commit)
    target.close()
    names = [f"{number:012}.parquet" for number in range(1, len(given.commits) + 1)]
    rows = [row for name in files(folder) for row in pq.read_table(folder / name).to_pylist()]
    assert files(folder) == names
    assert rows == [row for commit in given.commits for row in commit.rows.to_pylist()]
    beside = Path(f"{folder}_rejected")
    assert files(beside) == names
    expected = [row for commit in given.commits for row in commit.rejects.to_pylist()]
    assert rejected(beside) == expected
    assert State.from_json(pq.read_metadata(folder / names[-1]).metadata[b"dcp_rs.state"].decode())


@pytest.mark.parametrize("is_of_rejects", [True, False])
@pytest.mark.parametrize("step", _STEPS)
def test_a_commit_that_dies_is_there_once_or_not_at_all(given, tmp_path, step, is_of_rejects):
    """Dies before each step, as the process of a kill does."""
    folder = tmp_path / "log"
    target = ParquetTarget(folder)
    target.open(given.schema, "log")
    target.commit(given.commits[0])
    target.close()
    child = os.fork()
    if not child:
        original, calls = _resolve(step), 0

        def die(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == place(step, is_of_rejects):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        try:
            target.open(given.schema, "log")
            pytest.MonkeyPatch().setattr(step, die)
            target.commit(given.commits[1])
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    finish(given, folder)


def test_the_state_is_stored_once_in_a_footer(cluster, written, log):
    fill(written)
    replicate(cluster, log.url)
    newest = pq.read_metadata(log.folder / files(log.folder)[-1])
    assert json.loads(newest.metadata[b"dcp_rs.state"]) == log.state()
    assert newest.serialized_size < 2 * len(newest.metadata[b"dcp_rs.state"]) + 5000
    assert open_target(log.url).takes_rejects
