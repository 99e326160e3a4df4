"""`merge_into(table=...)` as far as a Spark without a table format goes.

`keeping_tables.py` has the rest, with each format, for `versions.py`.
"""

import pyspark
import pytest
from py4j.protocol import Py4JJavaError

import dcp_rs.spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark import merge_formats, merge_sql, merge_table, merge_target
from dcp_rs.spark.merge_sql import Removals

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("t", ("t",)),
        ("lake.travel.t", ("lake", "travel", "t")),
        ("lake.`a.b`.`c``d`", ("lake", "a.b", "c`d")),
        ("lake.travel.cb_{scope}_{collection}", ("lake", "travel", "cb_{scope}_{collection}")),
    ],
)
def test_a_name_has_parts_that_are_quoted_again(name, parts):
    assert merge_sql.parts_of(name) == parts
    assert merge_sql.parts_of(merge_sql.quoted(*parts)) == parts


@pytest.mark.parametrize("name", ["", "a..b", "a.b.", "/lake/t; DROP", "a`b", "`a", "a b"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match="is no name of a table"):
        dcp_rs.spark.merge_into(table=name)


def test_one_place_is_given():
    for given in ({}, {"path": "a", "table": "b"}, {"table": "a", "tables": {"*.*": "b"}}):
        with pytest.raises(ConfigError, match="give one of them"):
            dcp_rs.spark.merge_into(**given)
    with pytest.raises(ConfigError, match="is for a path"):
        dcp_rs.spark.merge_into(table="a", storage_options={})
    with pytest.raises(ConfigError, match="is the same for every collection"):
        dcp_rs.spark.merge_into(tables={"s.*": "lake.one"})
    with pytest.raises(ConfigError, match="has deletes, which merge_into has not"):
        dcp_rs.spark.merge_into(tables={"s.*": {"table": "{collection}", "deletes": "mark"}})
    with pytest.raises(ConfigError, match="document_schema"):
        dcp_rs.spark.merge_into(tables={"s.*": {"table": "{collection}", "document_schema": "n"}})


def test_the_newest_change_that_is_not_removed_counts(spark):
    kinds = "op STRING, scope STRING, collection STRING, collection_id BIGINT, key STRING,"
    rows = [
        ("mutation", "s", "c", 8, "a", 0, 0, 5, 1),
        ("deletion", "s", "c", 8, "a", 0, 1, 2, None),  # another epoch, a smaller seqno
        ("mutation", None, None, None, "a", 0, 0, 5, 2),
        ("mutation", None, None, None, "a", 0, 0, 4, 3),
        ("mutation", "s", "d", 9, "a", 1, 0, 5, 4),  # before its collection ends
        ("mutation", "s", "d", 9, "b", 1, 0, 8, 5),
        ("mutation", "s", "d", 9, "c", 0, 0, 1, 6),  # it ends in another vBucket
        ("mutation", "s", "d", 10, "d", 1, 0, 1, 7),
        ("mutation", "s", "c", 8, "e", 3, 1, 9, 8),  # of a lost epoch
        ("rollback", None, None, None, None, 3, 2, 0, None),
    ]
    changes = spark.createDataFrame(rows, f"{kinds} vbucket INT, epoch INT, seqno BIGINT, n INT")
    changes.createOrReplaceTempView("changes")
    removals = Removals({2: [3, 4]}, {9: {1: (0, 7)}})
    found = spark.sql(merge_sql.newest("changes", ["key", "n"], removals)).collect()
    assert {(row.op, row.key, row.n) for row in found} == {
        ("deletion", "a", None), ("mutation", "a", 2), ("mutation", "b", 5),
        ("mutation", "c", 6), ("mutation", "d", 7),
    }  # fmt: skip


@pytest.mark.parametrize("lost", [1, 3, 4])
def test_a_batch_is_read_again_if_an_executor_with_some_of_it_is_gone(spark, lost):
    rows = []

    def merge():
        with merge_target.materialised(spark.range(3)) as changes:
            if len(rows) < lost:
                rows.append(None)
                merge_target._release(changes)
            rows.extend(changes.collect())

    if lost < 4:
        merge_target.again_if_lost(merge)
        assert [each and each.id for each in rows] == [*[None] * lost, 0, 1, 2]
        return
    with pytest.raises(Py4JJavaError, match="CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND"):
        merge_target.again_if_lost(merge)


def test_another_failure_is_not_tried_again():
    tried = []

    def merge():
        tried.append(None)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        merge_target.again_if_lost(merge)
    assert len(tried) == 1


@pytest.fixture
def batch(spark):
    """A batch, as `foreachBatch` of a query has it."""
    kinds = "op STRING, key STRING, scope STRING, collection STRING, vbucket INT, epoch INT"
    context = spark.sparkContext
    context.setLocalProperty("sql.streaming.queryId", "a query")
    rows = [("mutation", "a", None, None, 0, 0, 1)]
    yield spark.createDataFrame(rows, f"{kinds}, seqno BIGINT")
    context.setLocalProperty("sql.streaming.queryId", None)


def test_a_spark_without_a_runtime_says_which_one_it_needs(spark, batch):
    version = pyspark.__version__.rpartition(".")[0]
    told = {
        "4.0": r"needs io.delta:delta-spark_4.0_2.13 4.1.0 to 4.4.0 on Spark 4.0",
        "4.1": r"needs io.delta:delta-spark_4.1_2.13 4.1.0 to 4.4.0 on Spark 4.1",
        "4.2": r"needs io.delta:delta-spark_4.2_2.13 4.4.0 on Spark 4.2",
    }.get(version, r"needs a runtime of delta for Spark .* use Spark 4.0 or 4.1 or 4.2")
    with pytest.raises(ConfigError, match=told):
        dcp_rs.spark.merge_into(table="default.kept")(batch, 0)
    with pytest.raises(ConfigError, match=r"table nowhere.travel.kept needs .*iceberg"):
        dcp_rs.spark.merge_into(table="nowhere.travel.kept")(batch, 0)
    assert not spark.catalog.tableExists("default.kept")


@pytest.mark.parametrize(
    "reason",
    [
        "java.io.FileNotFoundException: /t/_delta_log/.00.json.tmp (Permission denied)",
        "[DELTA_CANNOT_CREATE_LOG_PATH] Cannot create file:/lake/t/_delta_log",
        "java.io.IOException: Mkdirs failed to create file:/lake/t",
        "org.apache.iceberg.exceptions.ForbiddenException: Forbidden: the user may only read",
    ],
)
def test_a_missing_right_is_told(reason):
    told = "table lake.t cannot be read and changed by this user: grant SELECT and MODIFY"
    with pytest.raises(ConfigError, match=told), merge_formats.told(None, "lake.t"):
        raise RuntimeError(reason)


def test_a_table_of_another_format_is_refused(spark, batch):
    spark.sql("CREATE TABLE other (key STRING) USING parquet")
    try:
        with pytest.raises(ConfigError, match=r"table other is of the format parquet, not delta"):
            dcp_rs.spark.merge_into(table="other")(batch, 0)
    finally:
        spark.sql("DROP TABLE other")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"drop": "epoch"}, "merge_into needs epoch as well"),
        ({"vbucket": "'x'"}, "vbucket must have the types of the source"),
        ({"KEY2": "1", "key2": "2"}, "KEY2 and key2 are one column to a table"),
        ({"op": "'upsert'"}, "op must be one of mutation, deletion, expiration, rollback"),
        ({"key": "NULL"}, "key is null in a row"),
        ({"op": "'rollback'"}, "vBucket 0 was rolled back to seqno 1"),
        ({"op": "'system_event'"}, "include=system_events needs value and collection_id"),
    ],
)
def test_rows_that_cannot_be_merged_are_refused(spark, batch, change, told):
    def check(rows):
        merge_table.check_columns(rows.schema)
        merge_table.kept_columns(rows.schema)
        merge_table.removals_of(rows)

    changed = change.pop("drop", "")
    names = [name for name in batch.columns if name != changed and name not in change]
    kinds = {"op": "STRING", "key": "STRING"}
    more = [f"CAST({each} AS {kinds.get(n, 'STRING')}) AS {n}" for n, each in change.items()]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        rows = batch.selectExpr(*names, *more)
        with pytest.raises(ConfigError, match=told):
            check(rows)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
