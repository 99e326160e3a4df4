"""`merge_into`: a Delta table that is equal to the cluster's documents."""

import re
import runpy
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

import dcp_rs.spark
from dcp_rs.exceptions import ConfigError
from merged import PASSWORD, CrashError, Kept, keep

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def kept(spark, tmp_path):
    kept = Kept(spark, tmp_path)
    yield kept
    kept.close()


def test_a_table_is_the_documents_whatever_happens(spark):
    keep(spark)


def test_a_batch_that_is_in_the_table_is_not_even_read(kept):
    kept.write(0, 60, 1)
    kept.run()
    before = kept.delta().version()
    kept.forget_commit()
    (again,) = kept.run()
    assert (again["batchId"], again["numInputRows"]) == (0, 0)
    assert kept.delta().version() == before
    kept.forget_commit()
    kept.write(20, 40, 2)
    skipped, new = kept.run()
    assert (skipped["batchId"], skipped["numInputRows"]) == (0, 0)
    assert (new["batchId"], new["numInputRows"] > 0) == (1, True)
    assert kept.table() == kept.truth()


@pytest.mark.parametrize("after", [False, True])
def test_a_driver_that_dies_about_the_commit_loses_and_doubles_nothing(kept, after):
    def crash(batch, batch_id):
        if after:
            kept.sink(batch, batch_id)
        raise CrashError

    kept.write(0, 60, 1)
    with pytest.raises(Exception, match="CrashError"):
        kept.run(crash)
    assert kept.location.exists() == after
    if after:
        kept.lose()
    kept.write(30, 36, 2)
    kept.run()
    assert kept.table() == kept.truth()
    assert kept.delta().transaction_version(transaction(kept)) == 1


def transaction(kept):
    """The name of the transactions, by Spark's own record of the query."""
    (query,) = re.findall(r'"id":"([^"]+)"', (kept.checkpoint / "metadata").read_text())
    return f"dcp_rs.spark.{query}"


def test_two_drivers_of_one_query_do_not_both_commit_a_batch(kept):
    class Late:
        """A batch that another driver commits while this one collects it."""

        def __init__(self, batch, batch_id):
            self.batch, self.batch_id = batch, batch_id

        def __getattr__(self, name):
            return getattr(self.batch, name)

        def toArrow(self):  # noqa: N802
            dcp_rs.spark.merge_into(kept.location)(self.batch, self.batch_id)
            return self.batch.toArrow()

    kept.write(0, 60, 1)
    kept.run(lambda batch, batch_id: kept.sink(Late(batch, batch_id), batch_id))
    assert kept.delta().version() == 1, "one to make it, one batch"
    assert kept.table() == kept.truth()


def test_the_newest_change_of_a_batch_counts_wherever_it_stands(kept):
    def shuffle(batch, batch_id):
        older = batch.selectExpr(
            *[name for name in batch.columns if name not in {"op", "seqno", "n"}],
            "'mutation' AS op", "0L AS seqno", "-1 AS n",
        )  # fmt: skip
        kept.sink(batch.unionByName(older), batch_id)

    kept.write(0, 60, 1)
    kept.run(shuffle)
    assert kept.table() == kept.truth()


class TestLostTail:
    @pytest.fixture
    def before(self, kept):
        kept.write(0, 60, 1)
        kept.run()
        before = kept.table()
        kept.lose()
        kept.write(10, 14, 2)
        return before

    def test_resync_takes_back_what_was_lost(self, kept, before):
        kept.run()
        assert kept.table() == kept.truth() != before
        assert {row["epoch"] for row in kept.rows()} == {1}

    def test_emit_is_refused_and_the_checkpoint_goes_on_with_resync(self, kept, before):
        with pytest.raises(Exception, match=r"onRollback: vBucket . was rolled back .* resync"):
            kept.run(onRollback="emit")
        assert kept.table() == before
        kept.run()
        assert kept.table() == kept.truth()


def test_a_table_is_kept_by_one_query(kept, tmp_path):
    kept.write(0, 1, 1)
    kept.run()
    assert kept.rows() == [], "a table that has a transaction and no row"
    kept.checkpoint = tmp_path / "another"
    with pytest.raises(Exception, match=r"belongs to dcp_rs.spark.*go on with the checkpoint of"):
        kept.run()
    kept.sink = dcp_rs.spark.merge_into(tmp_path / "of replicate")
    with kept.cluster.connect() as client:
        dcp_rs.replicate(client, f"delta://{tmp_path}/of replicate", once=True)
    with pytest.raises(Exception, match=r"belongs to dcp_rs.replication, not to"):
        kept.run()


def test_a_table_of_another_origin_is_left_alone(kept):
    deltalake.write_deltalake(str(kept.location), pa.table({"key": ["a"]}))
    with pytest.raises(Exception, match="has rows that dcp_rs did not write"):
        kept.run()
    assert kept.rows() == [{"key": "a"}]


def test_an_empty_table_of_the_users_own_is_taken_and_partitioned_as_it_is(kept):
    fields = [("collection", pa.string()), ("n", pa.int32())]
    deltalake.DeltaTable.create(str(kept.location), pa.schema(fields), partition_by=["collection"])
    kept.write(0, 60, 1)
    kept.run()
    assert kept.table() == kept.truth()
    assert kept.delta().metadata().partition_columns == ["collection"]


def test_a_table_that_lacks_earlier_batches_is_refused(kept, tmp_path):
    kept.write(0, 60, 1)
    kept.run()
    kept.write(0, 60, 2)
    kept.sink = dcp_rs.spark.merge_into(tmp_path / "new")
    with pytest.raises(Exception, match="lacks the batches of this query before 1"):
        kept.run()
    assert not (tmp_path / "new").exists()


def test_a_schema_may_gain_columns_and_not_contradict_or_lose_one(kept):
    kept.write(0, 60, 1)
    kept.run()
    before = kept.rows()
    kept.write(20, 40, 2)
    for schema, message in {
        "n STRING, at TIMESTAMP, more INT": "documentSchema: .* has other types: n is integer but",
        "n INT": "documentSchema: lacks at, which",
        "n INT, at TIMESTAMP, v VARIANT": "v is a VARIANT, which deltalake cannot write",
    }.items():
        with pytest.raises(Exception, match=message):
            kept.run(documentSchema=schema)
        assert kept.rows() == before
    kept.spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        kept.run(documentSchema="n INT, at TIMESTAMP, name STRING")
    finally:
        kept.spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert kept.table() == kept.truth()
    names = {key: name for key, name in kept.truth("name").items() if name.endswith(" 2")}
    assert names == {key: name for key, name in kept.table("name").items() if name is not None}
    assert {f"{row['at']:%H:%M %Z}" for row in kept.rows()} == {"12:00 UTC"}


def test_a_table_of_before_malformed_fields_were_noted_goes_on(kept):
    kept.write(0, 60, 1)
    kept.run(lambda batch, batch_id: kept.sink(batch.drop("_malformed_fields"), batch_id))
    assert "_malformed_fields" not in kept.rows()[0]
    kept.write(20, 40, 2)
    kept.run()
    assert kept.table() == kept.truth()
    assert {row["_malformed_fields"] for row in kept.rows()} == {None}
    before = kept.rows()
    kept.write(20, 40, 3)
    with pytest.raises(Exception, match="onMalformed: lacks _malformed_fields, which table"):
        kept.run(onMalformed="column")
    assert kept.rows() == before


def test_the_example_takes_over_what_is_new(kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COUCHBASE_PASSWORD", PASSWORD)
    example = Path(__file__).parents[2] / "examples" / "spark_table.py"
    main = runpy.run_path(str(example))["main"]
    where = f"{kept.cluster.connection_string}/merged"
    printed = []
    for last in (20, 30):
        kept.write(10, last, 1)
        kept.cluster.persist()
        main(where, str(tmp_path))
        printed.append(f"1 batches, {len(kept.truth())} documents")
    assert capsys.readouterr().out.splitlines() == printed


@pytest.mark.parametrize("move", ["delete", "restore", "append"])
def test_a_table_that_others_changed_is_refused_before_anything_is_written(kept, move):
    kept.write(0, 60, 1)
    kept.run()
    kept.write(0, 60, 2)
    kept.run()
    if move == "delete":
        kept.delta().delete("n = 2")
    elif move == "restore":
        kept.delta().restore(1)
    else:
        deltalake.write_deltalake(str(kept.location), pa.table({"key": ["a"]}), mode="append",
                                  schema_mode="merge")  # fmt: skip
    before = kept.delta().version()
    kept.write(0, 60, 3)
    told = r"not as this query left it, since another writer made version 3 .*: start a new table"
    with pytest.raises(Exception, match=told):
        kept.run()
    assert kept.delta().version() == before


def test_a_table_is_maintained_beside_the_query(kept):
    kept.write(0, 60, 1)
    kept.run()
    kept.delta().alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    kept.delta().optimize.compact()
    kept.delta().create_checkpoint()
    kept.delta().cleanup_metadata()
    kept.delta().vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    kept.write(30, 60, 2)
    kept.run()
    assert kept.table() == kept.truth()


def test_a_refusal_of_the_table_ends_the_query_at_once(kept):
    kept.write(0, 60, 1)
    kept.run()
    files = set(kept.location.glob("*.parquet"))
    kept.write(0, 60, 2)
    kept.delta().alter.add_constraint({"old": "n < 2"})
    with pytest.raises(Exception, match=r"refuses rows: .*: drop its constraint"):
        kept.run()
    kept.delta().alter.drop_constraint("old")
    kept.delta().alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(Exception, match="is append-only"):
        kept.run()
    assert set(kept.location.glob("*.parquet")) == files
    kept.delta().alter.set_table_properties({"delta.appendOnly": "false"})
    kept.run()
    assert kept.table() == kept.truth()


def test_rows_that_cannot_be_merged_are_refused(kept, tmp_path):
    kept.write(0, 60, 1)
    for column, told in {
        "NULL::string AS key": "merge_into: key is null in a row",
        "1 AS key": "merge_into: key must have the types of the source",
        "'x' AS vbucket": "merge_into: vbucket must have the types",
        "'upsert' AS op": "merge_into: op must be one of mutation, deletion",
        "n AS `a``b`": "has a backtick",
        "n AS N, n AS m": "are one column to a Delta table",
    }.items():

        def change(batch, batch_id, column=column):
            name = column.split()[-1]
            kept.sink(
                batch.selectExpr(
                    *[f"`{each}`" for each in batch.columns if each != name], *column.split(", ")
                ),
                batch_id,
            )

        with pytest.raises(Exception, match=told):
            kept.run(change)
        assert not kept.location.exists()
    with pytest.raises(ConfigError, match="deltalake does not take the name of the folder"):
        dcp_rs.spark.merge_into(tmp_path / "a%20b")


def test_what_it_needs_is_asked_for(kept, spark):
    with pytest.raises(Exception, match="columns: merge_into needs scope, epoch as well"):
        kept.run(columns="op,key,collection,vbucket,seqno,n", documentSchema="n INT")
    columns = "op STRING, key STRING, scope STRING, collection STRING, vbucket INT, epoch INT"
    batch = spark.createDataFrame([], f"{columns}, seqno BIGINT")
    with pytest.raises(ConfigError, match="works only in foreachBatch"):
        kept.sink(batch, 0)
