"""A Delta table: the additions of its users, rejects, and commits that come to nothing."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import deltalake
import pyarrow as pa
import pytest
from deltalake.schema import Field, PrimitiveType

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError, DcpError
from dcp_rs.replication import delta_table, open_target
from delta_tables import (
    BINARY,
    block,
    column,
    commit_as_spark,
    data_files,
    delta,
    features,
    fill,
    legacy,
    named_files,
    rejects,
    replicas_at,
    replicate,
)
from replicas import Written

MAPPED = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"}


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


class TestAdditions:
    """What users add to a table."""

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"properties": {"delta.appendOnly": "true"}}, "is append-only"),
            ({"protocol": legacy(6)}, "identity columns"),
            ({"protocol": features("identityColumns")}, "has the table feature identityColumns"),
            ({"protocol": features("domainMetadata", "clustering")}, "the table feature"),
            ({"protocol": features("rowTracking", "domainMetadata")}, "the table feature"),
            ({"protocol": features("allowColumnDefaults")}, "the table feature allowColumnDef"),
            ({"protocol": features("icebergCompatV2")}, "the table feature icebergCompatV2"),
            ({"protocol": features("notYetInvented")}, "the table feature notYetInvented"),
            ({"protocol": {"minReaderVersion": 9, "minWriterVersion": 9}}, "cannot open table"),
            ({"fields": [column("x", nullable=False)]}, "column x, which is NOT NULL"),
            (
                {"protocol": legacy(4),
                 "fields": [column("x", **{"delta.generationExpression": "epoch"})]},
                "generates the column x",
            ),
            ({"fields": [column("x", **{"delta.invariants": "{}"})]}, "an invariant on column x"),
            ({"properties": {"delta.constraints.c": "no such ("}}, "constraint that deltalake can"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_written_is_refused_by_name(self, running, table, change, told):
        replicate(running, table)
        commit_as_spark(table, **change)
        before = sorted(path.name for path in table.folder.rglob("*"))
        with pytest.raises(ConfigError, match=told):
            replicate(running, table)
        assert sorted(path.name for path in table.folder.rglob("*")) == before

    def test_mapped_columns_are_refused(self, running, table):
        """Each column would need a number, so that the table is made by hand."""
        replicate(running, table)
        log = table.folder / "_delta_log" / f"{0:020}.json"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            if "metaData" in line:
                schema = json.loads(line["metaData"]["schemaString"])
                for number, field in enumerate(schema["fields"]):
                    field["metadata"] = {
                        "delta.columnMapping.id": number + 1,
                        "delta.columnMapping.physicalName": field["name"],
                    }
                line["metaData"]["schemaString"] = json.dumps(schema)
                line["metaData"]["configuration"] |= MAPPED
            if "protocol" in line:
                line["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        log.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(ConfigError, match="maps columns"):
            replicate(running, table)

    def test_a_log_may_be_append_only(self, cluster, written, table):
        table.mode = "log"
        for n in range(2):
            replicate(cluster, table)
            commit_as_spark(table, properties={"delta.appendOnly": "true"})
            fill(written, 5, n)
        replicate(cluster, table)
        assert table.documents() == written.documents()
        assert table.generations() == (1, 1)

    def test_what_is_harmless_stays(self, cluster, written, table):
        """Also the values of a column of the user's own, and the change data feed is right."""
        deltalake.DeltaTable.create(str(table.folder), pa.schema([("seqno", pa.int64())]))
        of_spark = ["deletionVectors", "timestampNtz"]
        commit_as_spark(
            table,
            protocol=features(*of_spark, "generatedColumns", "changeDataFeed", "checkConstraints")
            | {"minReaderVersion": 3, "readerFeatures": of_spark},
            properties={
                "delta.enableDeletionVectors": "true",
                "delta.enableChangeDataFeed": "true",
                "delta.constraints.positive": "seqno > 0",
            },
            fields=[column("mine")],
        )
        replicate(cluster, table)
        delta(table).update({"mine": "7"})
        # A change of the user's column alone, which moves no rows of ours.
        last = table.folder / "_delta_log" / f"{delta(table).version():020}.json"
        last.write_text(last.read_text().replace('"dataChange":true', '"dataChange":false'))
        before = delta(table).version()
        fill(written, 3, 100)
        cluster.remove("key_1", collection="inventory.hotel")
        replicate(cluster, table)
        assert table.generations() == (1, 1)
        assert table.documents() == written.documents()
        rows = {row["key"]: row for row in table.rows()}
        assert {row["mine"] for row in rows.values()} == {7}
        feed = pa.table(delta(table).load_cdf(starting_version=before + 1)).to_pylist()
        assert sorted((row["_change_type"], row["key"]) for row in feed) == [
            ("delete", "key_1"),
            *[("update_postimage", key) for key in ("key_0", "key_2")],
            *[("update_preimage", key) for key in ("key_0", "key_2")],
        ]

    @pytest.mark.parametrize("column", ["collection", "vbucket", "timestamp", "epoch"])
    def test_a_partitioned_table_stays_so(self, cluster, written, table, column):
        kinds = {"collection": pa.string(), "timestamp": pa.timestamp("us", "UTC")}
        fields = pa.schema([(column, kinds.get(column, pa.int32()))])
        deltalake.DeltaTable.create(str(table.folder), fields, partition_by=[column])
        for n in range(2):
            fill(written, 10, n)
            replicate(cluster, table)
            assert table.documents() == written.documents()
        assert delta(table).metadata().partition_columns == [column]

    @pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.float64(), pa.decimal128(5, 2)])
    def test_a_partition_that_would_change_values_is_refused(self, running, table, kind):
        deltalake.DeltaTable.create(
            str(table.folder), pa.schema([("field", kind)]), partition_by=["field"]
        )
        with pytest.raises(ConfigError, match="is partitioned by field, which is"):
            replicate(running, table, document_schema=pa.schema([("field", kind)]))
        assert delta(table).version() == 0

    def test_a_row_that_a_constraint_refuses_is_rejected(self, cluster, table):
        schema = pa.schema([("n", pa.int64())])
        deltalake.DeltaTable.create(str(table.folder), schema)
        delta(table).alter.add_constraint({"small": "n < 10"})
        for key, n in {"a": 1, "b": 20, "c": None, "d": 30}.items():
            cluster.upsert(key, {"n": n})
        assert replicate(cluster, table, document_schema=schema).rejected == 3
        small = "the constraint small of the table refuses it"
        assert rejects(table) == [(key, "mutation", small) for key in (b"b", b"c", b"d")]
        cluster.upsert("a", {"n": 99})
        cluster.upsert("b", {"n": 2})
        cluster.remove("c")
        assert replicate(cluster, table, document_schema=schema).rejected == 1
        assert [row["key"] for row in table.rows()] == ["b"]
        assert [key for key, *_ in rejects(table)] == [b"a", b"d"]
        cluster.upsert("b", {"n": 77})
        with pytest.raises(dcp_rs.exceptions.DataError, match="the constraint small of the table"):
            replicate(cluster, table, document_schema=schema, on_error="fail")
        assert [row["n"] for row in table.rows()] == [2]

    def test_a_null_in_a_column_that_has_none_is_rejected(self, cluster, replica):
        fields = [Field("n", PrimitiveType("long"), nullable=False)]
        deltalake.DeltaTable.create(str(replica.folder), deltalake.Schema(fields))
        cluster.upsert("a", {"n": 1})
        cluster.upsert("b", {})
        options = {"document_schema": "n BIGINT", "collections": "_default._default"}
        if replica.mode == "log":
            with pytest.raises(ConfigError, match="column n, which is NOT NULL, and not all event"):
                replicate(cluster, replica, **options)
            return
        assert replicate(cluster, replica, **options).rejected == 1
        assert rejects(replica) == [(b"b", "mutation", "the column n of the table is NOT NULL")]
        cluster.upsert("b", {"n": 2})
        replicate(cluster, replica, **options)
        assert sorted(row["n"] for row in replica.rows()) == [1, 2]
        assert rejects(replica) == []

    def test_a_constraint_never_takes_an_event_from_a_log(self, cluster, table):
        table.mode = "log"
        schema = pa.schema([("n", pa.int64())])
        fields = schema.append(pa.field("op", pa.string()))
        deltalake.DeltaTable.create(str(table.folder), fields)
        delta(table).alter.add_constraint({"small": "n < 10 OR op <> 'mutation'"})
        for key, n in {"a": 1, "b": 20}.items():
            cluster.upsert(key, {"n": n})
        options = {"document_schema": schema, "collections": "_default._default"}
        assert replicate(cluster, table, **options).rejected == 1
        assert [row["n"] for row in table.rows() if row["op"] == "mutation"] == [1]
        delta(table).alter.add_constraint({"kept": "op <> 'deletion'"})
        cluster.remove("a")
        with pytest.raises(ConfigError, match="without a deletion would be wrong, and the constra"):
            replicate(cluster, table, **options)


class TestRejects:
    def test_a_key_that_is_not_utf_8_is_one(self, cluster, written, replica):
        replicate(cluster, replica)
        assert not Path(f"{replica.folder}_rejected").exists(), "made when there is one"
        cluster.upsert(BINARY, {"n": 1})
        cluster.upsert(b"\xfd", {"n": 1}, collection="inventory.hotel")
        assert replicate(cluster, replica).rejected == 2
        assert [key for key, *_ in rejects(replica)] == [b"\xfd", BINARY]
        cluster.upsert(BINARY, {"n": 2})
        cluster.remove(b"\xfd", collection="inventory.hotel")
        replicate(cluster, replica)
        is_log = replica.mode == "log"
        assert [(key, op) for key, op, _ in rejects(replica)] == (
            [(b"\xfd", "deletion"), (b"\xfd", "mutation"), *[(BINARY, "mutation")] * 2]
            if is_log
            else [(BINARY, "mutation")]
        )
        before = deltalake.DeltaTable(f"{replica.folder}_rejected").version()
        fill(written, 3, 100)
        replicate(cluster, replica)
        assert deltalake.DeltaTable(f"{replica.folder}_rejected").version() == before
        assert replica.documents() == written.documents()
        cluster.remove(BINARY)
        replicate(cluster, replica)
        assert is_log or rejects(replica) == []

    def test_they_go_with_their_collection(self, cluster, table):
        cluster.upsert(BINARY, {"n": 1}, collection="inventory.hotel")
        cluster.upsert(b"\xfd", {"n": 1})
        replicate(cluster, table)
        cluster.flush_collection("inventory.hotel")
        replicate(cluster, table)
        assert [key for key, *_ in rejects(table)] == [b"\xfd"]

    def test_bytes_may_be_keys(self, cluster, replica):
        for n in range(2):
            cluster.upsert(BINARY, {"n": n})
            assert replicate(cluster, replica, key_type="binary").rejected == 0
        found = [row for row in replica.rows() if row.get("op", "mutation") == "mutation"]
        assert [row["key"] for row in found] == [BINARY] * (2 if replica.mode == "log" else 1)
        cluster.remove(BINARY)
        replicate(cluster, replica, key_type="binary")
        if replica.mode == "table":
            assert replica.rows() == []
        with pytest.raises(ConfigError, match="key is binary but must be string") as raised:
            replicate(cluster, replica)
        assert raised.value.option == "key_type"

    @pytest.mark.parametrize("is_first", [True, False])
    def test_those_of_a_commit_that_was_not_made_are_neither_doubled_nor_kept(
        self, cluster, replica, is_first
    ):
        if not is_first:
            cluster.upsert(b"\xfd", {})
            replicate(cluster, replica)
        cluster.upsert(BINARY, {})
        cluster.upsert(b"\xfc", {})
        target = open_target(replica.url)

        def die(*_):
            raise KeyboardInterrupt

        target._write = die
        with pytest.raises(KeyboardInterrupt):
            replicate(cluster, replica, target=target)
        assert {key for key, *_ in rejects(replica)} >= {BINARY, b"\xfc"}
        cluster.upsert(BINARY, {"n": 2})
        replicate(cluster, replica)
        keys = [key for key, op, _ in rejects(replica) if op == "mutation"]
        assert keys == [b"\xfc", *([] if is_first else [b"\xfd"]), BINARY]

    @pytest.mark.parametrize("kind", ["file", "folder", "table", "target"])
    def test_nothing_is_made_if_their_name_is_taken(self, running, table, kind):
        other = Path(f"{table.folder}_rejected")
        if kind == "file":
            other.touch()
        elif kind == "folder":
            other.mkdir()
            (other / "file").touch()
        elif kind == "table":
            deltalake.DeltaTable.create(str(other), pa.schema([("a", pa.int32())]))
        else:
            replicate(running, replicas_at(other))
        with pytest.raises(ConfigError, match=r"delta_rejected is where changes go .* rename it"):
            replicate(running, table)
        assert not table.folder.exists()

    def test_what_a_process_left_that_was_killed_as_it_made_their_table_is_none(
        self, cluster, table
    ):
        log = Path(f"{table.folder}_rejected") / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020}.json#1").write_text("{")
        cluster.upsert(BINARY, {})
        assert replicate(cluster, table).rejected == 1
        assert [key for key, *_ in rejects(table)] == [BINARY]

    def test_the_table_of_rejects_is_no_target(self, cluster, table):
        cluster.upsert(BINARY, {})
        replicate(cluster, table)
        with pytest.raises(ConfigError, match=r"belongs to dcp_rs.replication.rejects, not to"):
            replicate(cluster, replicas_at(Path(f"{table.folder}_rejected")))


class TestRefusals:
    """A commit that comes to nothing: the error, and what is left of it."""

    @pytest.fixture
    def ready(self, cluster, written, replica):
        cluster.upsert(b"\xfd", {})
        replicate(cluster, replica)
        fill(written, 10, 100)
        cluster.upsert(BINARY, {})
        return replica

    def check(self, cluster, replica, written):
        """Nothing is left, and the next start is complete."""
        assert data_files(replica.folder) == named_files(replica)
        named = delta(replica).transaction_version("dcp_rs.replication")
        documents = {path.stem for path in (replica.folder / "_dcp_rs").glob("[0-9]*.json")}
        assert max(documents, key=int) == str(named)
        replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert [key for key, *_ in rejects(replica)] == [b"\xfd", BINARY]
        assert data_files(replica.folder) == named_files(replica)

    def fail(self, cluster, replica, told, **options):
        with pytest.raises(DcpError, match=told) as raised:
            replicate(cluster, replica, **options)
        assert not isinstance(raised.value, ConcurrentWriterError)

    def test_the_state_cannot_be_written(self, cluster, written, ready, monkeypatch):
        def full(_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            self.fail(cluster, ready, "_dcp_rs cannot be written: No space left on device")
        self.check(cluster, ready, written)

    @pytest.mark.parametrize("suffix", ["", "_rejected"])
    def test_the_log_cannot_be_written(self, cluster, written, ready, suffix):
        folder = Path(f"{ready.folder}{suffix}")
        target, before = open_target(ready.url), data_files(folder)
        if suffix:
            inner = target.open

            def opened(*given):
                state = inner(*given)
                name = "append" if ready.mode == "log" else "merge"
                block(ready, target._rejects._table, name, suffix=suffix)
                return state

            target.open = opened
        else:
            block(ready, target, "_write")
        self.fail(cluster, ready, f"table {folder} ", target=target)
        assert data_files(folder) == before
        self.check(cluster, ready, written)

    def test_the_rows_cannot_be_written(self, cluster, written, ready):
        limit = 1 << 22
        written.upsert("large", {"text": os.urandom(limit).hex()})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            self.fail(cluster, ready, "cannot be written: .*: the next start resumes")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        self.check(cluster, ready, written)

    def test_what_follows_a_commit_may_fail(self, cluster, written, ready):
        delta(ready).alter.set_table_properties({"delta.checkpointInterval": "1"})
        version = delta(ready).version()
        blocked = ready.folder / "_delta_log" / f"{version + 1:020}.checkpoint.parquet"
        blocked.mkdir()
        try:
            replicate(cluster, ready)
        finally:
            blocked.rmdir()
        self.check(cluster, ready, written)

    def test_a_refusal_is_not_repeated(self, cluster, written, table):
        """A table that becomes append-only while it is written."""
        replicate(cluster, table)
        fill(written, 10, 100)
        target = open_target(table.url)
        commit, tries = target.commit, []

        def spoil(given):
            delta(table).alter.set_table_properties({"delta.appendOnly": "true"})
            return commit(given)

        merge = target._table.merge
        target.commit = spoil
        target._table.merge = lambda *given: tries.append(1) or merge(*given)
        with pytest.raises(ConfigError, match=r"refuses a commit: .*append-only: alter it, or use"):
            replicate(cluster, table, target=target)
        assert tries == [1]
        assert data_files(table.folder) == named_files(table)

    def test_a_constraint_that_comes_while_it_is_written_shows_no_values(
        self, cluster, written, table, monkeypatch
    ):
        replicate(cluster, table)
        fill(written, 10, 100)
        target = open_target(table.url)
        monkeypatch.setattr(target._table, "refused", lambda _: {})
        commit = target.commit

        def spoil(given):
            delta(table).alter.add_constraint({"c": "seqno >= 0 AND key <> 'new'"})
            return commit(given)

        target.commit = spoil
        written.upsert("new", {"secret": 1})
        with pytest.raises(ConfigError, match=r"refuses rows: .* failed validation") as raised:
            replicate(cluster, table, target=target)
        assert "new" not in str(raised.value)
        assert "secret" not in str(raised.value.__cause__)
        assert data_files(table.folder) == named_files(table)

    def test_files_of_a_killed_writer_are_removed_and_those_of_others_stay(
        self, cluster, written, ready, monkeypatch
    ):
        target = open_target(ready.url)
        monkeypatch.setattr(target._table, "_clean", lambda _: None)
        block(ready, target, "_write")
        self.fail(cluster, ready, f"table {ready.folder} ", target=target)
        left = data_files(ready.folder) - named_files(ready)
        assert left, "as a kill leaves it"
        rows = pa.table({"epoch": pa.array([1], pa.int32()), "key": ["of others"]})
        other = SimpleNamespace(table=delta(ready), write=deltalake.write_deltalake)
        block(ready, other, "write")
        with pytest.raises(Exception, match=r"."):
            other.write(other.table, rows, mode="append", schema_mode="merge")
        of_others = data_files(ready.folder) - named_files(ready) - left
        assert len(of_others) == 1
        delta(ready).optimize.z_order(["seqno"])
        replicate(cluster, ready)
        assert data_files(ready.folder) == named_files(ready) | of_others
        assert ready.documents() == written.documents()

    def test_conflicts_are_retried_with_growing_pauses_within_a_time(
        self, cluster, written, table, monkeypatch
    ):
        replicate(cluster, table)
        fill(written, 10, 100)
        cluster.remove("key_2")
        monkeypatch.setattr(delta_table, "_WAIT_SECONDS", 1.0)
        pauses, sleep = [], time.sleep
        monkeypatch.setattr(time, "sleep", lambda pause: pauses.append(pause) or sleep(pause))
        target = open_target(table.url)
        write, tries = target._write, []

        def late(*given):
            tries.append(given)
            deltalake.DeltaTable(str(table.folder)).optimize.z_order(["seqno"])
            write(*given)

        target._write = late
        with pytest.raises(ConcurrentWriterError, match="committed to by others for too long"):
            replicate(cluster, table, target=target)
        assert len(tries) == len(pauses) + 1
        assert pauses == [0.05 * 2**n for n in range(len(pauses))]
        assert 2 <= len(pauses) <= 4
        assert data_files(table.folder) == named_files(table)
        replicate(cluster, table)
        assert table.documents() == written.documents()

    def test_a_folder_that_cannot_be_made_leaves_nothing(self, running, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise deltalake.exceptions.DeltaError("no")

        monkeypatch.setattr(deltalake.DeltaTable, "create", refuse)
        with pytest.raises(ConfigError, match="cannot be created: no"):
            replicate(running, replicas_at(tmp_path / "a" / "b"))
        assert not list(tmp_path.iterdir())

    def test_two_processes_do_not_commit_at_once(self, cluster, written, table, monkeypatch):
        replicate(cluster, table)
        fill(written, 10, 100)
        monkeypatch.setattr(delta_table, "_WAIT_SECONDS", 0.2)
        with delta_table.locked(table.folder, 0.0) as is_locked:
            assert is_locked
            with pytest.raises(ConcurrentWriterError, match="another process writes to"):
                replicate(cluster, table)
        assert data_files(table.folder) == named_files(table)
