"""A Delta table: the names that it may have, and what other writers do to it."""

import json
import logging
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import deltalake
import pyarrow as pa
import pytest
from deltalake.schema import Field, PrimitiveType

import dcp_rs
import replicas
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError
from dcp_rs.replication import delta_table, open_target
from delta_tables import (
    data_files,
    delete_by_vector,
    delta,
    documents,
    fill,
    replicas_at,
    replicate,
)
from replicas import Written


@pytest.fixture(scope="module")
def running():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster:
        yield cluster


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        running.create_scope("inventory")
        running.create_collection("inventory.hotel")
        yield running


@pytest.fixture
def written(cluster):
    written = Written(cluster)
    fill(written)
    return written


@pytest.fixture(params=["table", "log"])
def replica(request, tmp_path):
    replica = replicas.InDelta(tmp_path)
    replica.mode = request.param
    return replica


@pytest.fixture
def table(tmp_path):
    return replicas.InDelta(tmp_path)


class TestNames:
    ODD = (
        "a b", "a,b", "a.b", 'a"b', "a'b", "a\\b", "{};()=", "tab\t", "line\n", "\N{SNOWMAN}",
        "\xe4", "a\u0308", "s.key", "SELECT", "$a", "a/b", "%20", " ", "Capital", "_file",
        "_change_type",
    )  # fmt: skip

    def test_odd_columns_hold_what_was_written(self, cluster, table):
        inner = pa.struct([pa.field(name, pa.int32()) for name in (*self.ODD, "`", "a`b")])
        schema = pa.schema([*(pa.field(name, pa.int32()) for name in self.ODD), ("doc", inner)])
        expected = {}
        for number in range(3):
            values = {name: place + number for place, name in enumerate(inner.names)}
            for key in {"a", "b"} if number == 0 else {"a", f"new_{number}"}:
                expected[key] = values
                columns = {name: values[name] for name in self.ODD}
                cluster.upsert(key, columns | {"doc": values})
            replicate(cluster, table, document_schema=schema)
            rows = {row["key"]: row for row in table.rows()}
            assert {key: row["doc"] for key, row in rows.items()} == expected
            for key, values in expected.items():
                assert {name: rows[key][name] for name in self.ODD} == {
                    name: values[name] for name in self.ODD
                }

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (["`"], "has a backtick, .* leave it out, or write a log"),
            (["size (`cm`)"], "has a backtick"),
            (["_dcp_rs_is_deleted"], "is like the name of a column that merges add"),
            (["_DCP_RS_index"], "is like the name of a column"),
            (["__delta_rs_source"], "is like the name of a column"),
            (["n", "N"], "n and N are one column to a Delta table"),
            (["\xe4", "\xc4"], "are one column to a Delta table"),
        ],
    )
    def test_columns_that_cannot_be_merged_are_refused(self, running, table, names, told):
        plain = pa.schema([pa.field(name, pa.int32()) for name in names])
        nested = pa.schema([("doc", pa.list_(pa.struct(list(plain))))])
        for schema in (plain, nested) if "one column" in told else (plain,):
            with pytest.raises(ConfigError, match=told):
                replicate(running, table, document_schema=schema)
        assert not table.folder.exists()

    def test_a_log_may_have_backticks(self, cluster, table):
        table.mode = "log"
        schema = pa.schema([("a`b", pa.int32())])
        for n in range(2):
            cluster.upsert("a", {"a`b": n})
            replicate(cluster, table, document_schema=schema)
        found = [row["a`b"] for row in table.rows() if row["op"] == "mutation"]
        assert sorted(found) == [0, 1]

    def test_a_column_is_not_taken_for_one_in_capitals(self, cluster, table):
        replicate(cluster, table, document_schema="n INT")
        before = delta(table).version()
        with pytest.raises(ConfigError, match=r"has the column n, and .* not tell N from it"):
            replicate(cluster, table, document_schema="N INT")
        assert delta(table).version() == before


class TestFolders:
    @pytest.mark.parametrize(
        "name",
        ["a b", "a#b", "a?b", "\xe4", "a\u0308", "\N{SNOWMAN}", "a%", "100%zz", "a{b}", "a:b",
         "a*b", "a=b&c", "a`b", "a'b\"c", "a//b/", "a/../b", "~", ".a", " "],
    )  # fmt: skip
    def test_files_are_in_the_folder_that_was_named(self, running, tmp_path, name):
        for number in range(2):
            running.upsert("a", {"n": number})
            with running.connect() as client:
                dcp_rs.replicate(client, f"delta://{tmp_path}/{quote(name)}", once=True)
        folder = Path(os.path.normpath(tmp_path / name))
        assert data_files(tmp_path)
        assert {path.parent for path in tmp_path.rglob("part-*")} == {folder}
        assert delta(replicas_at(folder)).version() == 2

    @pytest.mark.parametrize(
        "name", ["a%20b", "a%2Fb", "a%25", "%41", "a[b]", "a|b", "a^b", "a\\b", "a\tb", "a\nb",
                 "a\x7f", b"a\xe9"]
    )  # fmt: skip
    def test_a_folder_that_deltalake_takes_for_another_is_refused(self, tmp_path, name):
        with pytest.raises(ConfigError, match="deltalake does not take the name of the folder"):
            open_target(f"delta://{tmp_path}/{quote(name)}")
        with pytest.raises(ConfigError, match="deltalake does not take the name of the folder"):
            delta_table.DeltaTable(f"{tmp_path}/{os.fsdecode(name)}", "app")
        assert not list(tmp_path.iterdir())

    def test_a_link_and_a_relative_path_are_the_folder_itself(self, running, tmp_path, monkeypatch):
        (tmp_path / "link").symlink_to(tmp_path / "real")
        monkeypatch.chdir(tmp_path)
        for folder in ("link", "./real/", "x/../real"):
            target = dcp_rs.replication.delta.DeltaTarget(folder)
            assert repr(target) == f"DeltaTarget('{tmp_path}/real')"
            with running.connect() as client:
                dcp_rs.replicate(client, target, once=True)
        assert {path.name for path in tmp_path.iterdir()} == {"link", "real"}

    def test_files_of_others_are_not_mixed_with_a_table(self, running, table):
        table.folder.mkdir()
        (table.folder / "report.parquet").touch()
        with pytest.raises(ConfigError, match="has files that dcp_rs did not write"):
            replicate(running, table)
        assert [path.name for path in table.folder.iterdir()] == ["report.parquet"]
        (table.folder / "report.parquet").unlink()
        replicate(running, table)
        inside = replicas_at(table.folder / "more" / "inside")
        with pytest.raises(ConfigError, match="is inside another Delta table"):
            replicate(running, inside)
        assert not (table.folder / "more").exists()


def delete(replica):
    delta(replica).delete("key = 'key_3'")


def update(replica):
    delta(replica).update({"value": "'{}'"}, predicate="key = 'key_3'")


def truncate(replica):
    delta(replica).delete()


def append(replica):
    """Rows that are there, once more."""
    rows = pa.table(
        deltalake.QueryBuilder().register("t", delta(replica)).execute("SELECT * FROM t")
    )
    deltalake.write_deltalake(str(replica.folder), rows, mode="append")


def append_other(replica):
    rows = pa.table({"key": ["of others"]})
    deltalake.write_deltalake(str(replica.folder), rows, mode="append", schema_mode="merge")


def overwrite(replica):
    rows = pa.table(
        deltalake.QueryBuilder().register("t", delta(replica)).execute("SELECT * FROM t")
    )
    deltalake.write_deltalake(str(replica.folder), rows, mode="overwrite")


def merge(replica):
    rows = pa.table({"key": ["key_3"]})
    query = delta(replica).merge(rows, "t.key = s.key", source_alias="s", target_alias="t")
    query.when_matched_delete().execute()


def restore_others(replica):
    """A version that another writer has made."""
    delete(replica)
    delta(replica).delete("key = 'key_5'")
    delta(replica).restore(delta(replica).version() - 1)


MOVES = [
    delete,
    update,
    truncate,
    append,
    append_other,
    overwrite,
    merge,
    restore_others,
    delete_by_vector,
]


def optimize(replica):
    delta(replica).optimize.compact()


def z_order(replica):
    delta(replica).optimize.z_order(["vbucket"])


def vacuum(replica):
    delta(replica).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def set_properties(replica):
    delta(replica).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})


def add_column(replica):
    delta(replica).alter.add_columns([Field("more", PrimitiveType("string"))])


def checkpoint(replica):
    delta(replica).create_checkpoint()


def clean_log(replica):
    """Removes the files of all commits but the newest, as thirty days later."""
    delta(replica).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    checkpoint(replica)
    delta(replica).cleanup_metadata()
    assert len(list((replica.folder / "_delta_log").glob("*.json"))) == 1


def as_of_0_2(replica):
    """Takes from a table what 0.2.0 did not write."""
    (replica.folder / "_dcp_rs" / "left.json").unlink()
    for file in (replica.folder / "_delta_log").glob("*.json"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line.get("commitInfo", {}).pop("dcp_rs.seen", None)
        file.write_text("\n".join(map(json.dumps, lines)))


HARMLESS = [optimize, z_order, vacuum, set_properties, add_column, checkpoint, clean_log, as_of_0_2]


class TestMoved:
    @pytest.fixture(autouse=True)
    def small(self, cluster, written, replica):  # noqa: ARG002 - documents are there
        """Several commits, each with its own files."""
        replicate(cluster, replica, commit_rows=5)

    @pytest.mark.parametrize("move", MOVES)
    def test_what_others_did_to_rows_is_undone(self, cluster, written, replica, move, caplog):
        move(replica)
        fill(written, 3, 100)
        with caplog.at_level(logging.WARNING):
            replicate(cluster, replica, commit_rows=5)
        assert "generation 2 begins: the table is not as it was left: another writer" in caplog.text
        assert documents(replica) == written.documents()
        assert replica.generations() == (2, 2)
        assert replicate(cluster, replica).commits == 0

    @pytest.mark.parametrize("tidy", HARMLESS)
    def test_what_moves_no_rows_is_no_reason_to_load(self, cluster, written, replica, tidy):
        tidy(replica)
        assert replicate(cluster, replica).commits == 0
        fill(written, 3, 100)
        tidy(replica) if tidy is not as_of_0_2 else None
        assert replicate(cluster, replica).commits == 1
        assert replica.documents() == written.documents()
        assert replica.generations() == (1, 1)

    def test_a_restored_version_of_ours_goes_on_from_its_state(self, cluster, written, replica):
        before = replica.rows()
        commits = replica.state()["commits"]
        fill(written, 10, 100)
        written.cluster.remove("key_4")
        assert replicate(cluster, replica).commits == 1
        optimize(replica)
        delta(replica).restore(delta(replica).version() - 2)
        assert sorted(map(str, replica.rows())) == sorted(map(str, before))
        for _ in range(2):
            replicate(cluster, replica)
            assert replica.documents() == written.documents()
            assert replica.generations() == (1, 1)
        assert replica.state()["commits"] == commits + 2
        assert replicate(cluster, replica).commits == 0

    def test_a_restored_version_of_which_the_state_is_gone_is_loaded_anew(
        self, cluster, written, replica
    ):
        for path in (replica.folder / "_dcp_rs").glob("*.json"):
            if path.stem != str(delta(replica).transaction_version("dcp_rs.replication")):
                path.unlink()
        delta(replica).restore(2)
        replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert replica.generations() == (2, 2)

    @pytest.mark.parametrize("is_named", [True, False])
    def test_a_version_that_was_restored_in_part_is_loaded_anew(
        self, cluster, written, replica, is_named
    ):
        """Depending on who restores, files that VACUUM has removed are named, or left out."""
        before = delta(replica).version()
        optimize(replica)
        if is_named:
            vacuum(replica)
        delta(replica).restore(before, ignore_missing_files=True)
        if not is_named:
            last = replica.folder / "_delta_log" / f"{delta(replica).version():020}.json"
            lines = last.read_text().splitlines()
            last.write_text("\n".join(line for line in lines if not line.startswith('{"add"')))
        elif replica.mode == "log":
            with pytest.raises(ConfigError, match="names files that are gone: run FSCK REPAIR"):
                replicate(cluster, replica)
            delta(replica).repair()
        replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert replica.generations() == (2, 2)

    @pytest.mark.parametrize("is_state_kept", [True, False])
    def test_a_log_from_a_copy_is_noticed(self, cluster, written, replica, is_state_kept):
        log = replica.folder / "_delta_log"
        shutil.copytree(log, replica.folder / "_copy")
        named = delta(replica).transaction_version("dcp_rs.replication")
        fill(written, 10, 100)
        replicate(cluster, replica)
        if not is_state_kept:
            (replica.folder / "_dcp_rs" / f"{named}.json").unlink()
        shutil.rmtree(log)
        (replica.folder / "_copy").rename(log)
        replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert replica.generations() == ((1, 1) if is_state_kept else (2, 2))

    def test_without_any_state_it_is_not_guessed(self, cluster, replica):
        shutil.rmtree(replica.folder / "_dcp_rs")
        with pytest.raises(CheckpointError, match=r"state that is no longer in .*: restore"):
            replicate(cluster, replica)

    def test_a_table_that_was_dropped_is_made_again(self, cluster, written, replica):
        shutil.rmtree(replica.folder / "_delta_log")
        for path in replica.folder.glob("*.parquet"):
            path.unlink()
        replicate(cluster, replica)
        assert replica.documents() == written.documents()

    @pytest.mark.parametrize("move", [delete, delete_by_vector])
    def test_rows_that_were_lost_with_the_log_of_it_are_noticed(
        self, cluster, written, replica, move
    ):
        move(replica)
        clean_log(replica)
        replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert replica.generations() == (2, 2)

    @pytest.mark.parametrize("is_late", [False, True])
    def test_a_change_during_a_run_ends_it(self, cluster, written, replica, is_late):
        """Before a commit looks at the table, or while it writes rows of its own."""
        target = open_target(replica.url)
        name = "append" if replica.mode == "log" else "merge"
        inner = target.commit, getattr(target._table, name)

        def commit(commit):
            append_other(replica)
            return inner[0](commit)

        def write(*arguments):
            append_other(replica)
            return inner[1](*arguments)

        fill(written, 10, 100)
        if is_late:
            setattr(target._table, name, write)
        else:
            target.commit = commit
        with pytest.raises(ConcurrentWriterError, match=r"is not as it was left, .* start again"):
            replicate(cluster, replica, target=target)
        replicate(cluster, replica)
        assert documents(replica) == written.documents()
        assert replica.generations() == (2, 2)
