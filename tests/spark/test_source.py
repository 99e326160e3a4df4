"""`spark.read.format("couchbase.dcp")`: a bucket as a data frame."""

import json
import pickle

import pytest

import dcp_rs
import dcp_rs.spark

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

FORMAT = "couchbase.dcp"


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


def as_documents(rows):
    """Latest document per key; None for a removed one."""
    latest = {}
    for row in sorted(rows, key=lambda row: (row.vbucket, row.epoch, row.seqno)):
        if row.op != "rollback":
            latest[row.key] = bytes(row.value) if row.op == "mutation" else None
    return latest


def read(spark, options, **more):
    return spark.read.format(FORMAT).options(**options).options(**more).load()


def test_a_bucket_is_a_data_frame(spark, options, load):
    expected = load(2000)
    rows = read(spark, options).collect()
    assert as_documents(rows) == expected


def test_an_empty_bucket_is_an_empty_data_frame(spark, options):
    frame = read(spark, options)
    assert frame.count() == 0
    assert frame.schema == dcp_rs.spark.schema(options)


def test_the_bound_is_taken_once_per_load(spark, options, cluster, load):
    load(20)
    # A vBucket without changes is not read at all; one with some to the end of a snapshot.
    empty = {vbucket for vbucket, seqno in cluster.high_seqnos().items() if seqno == 0}
    key = next(key for n in range(10_000) if cluster.vbucket_of(key := b"later_%d" % n) in empty)
    frame = read(spark, options)
    assert frame.count() == 20
    cluster.upsert(key, b"{}")
    assert frame.count() == 20
    assert read(spark, options).count() == 21


def test_a_users_schema_chooses_the_columns(spark, options, load):
    load(50)
    frame = (
        spark.read.format(FORMAT)
        .options(**options)
        .schema("seqno BIGINT, rev BIGINT, key STRING")
        .load()
    )
    rows = frame.collect()
    assert frame.columns == ["seqno", "rev", "key"]
    assert len(rows) == 50
    assert all(row.seqno > 0 and row.rev >= 1 and row.key for row in rows)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("seqno STRING", "column seqno is bigint, not string"),
        ("sequence BIGINT", "sequence"),
        ("key STRING NOT NULL", "column key may be null"),
    ],
)
def test_a_schema_the_table_does_not_have_is_refused(spark, options, schema, said):
    with pytest.raises(Exception, match="COUCHBASE_DCP_CONFIG") as raised:
        spark.read.format(FORMAT).options(**options).schema(schema).load().collect()
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger"),
        ({"password": "wrong"}, "COUCHBASE_DCP_AUTHENTICATION"),
        ({"startingOffsets": '{"v":1}'}, "is neither the end of an earlier read"),
        ({"startingOffsets": '{"format":"x"}'}, "COUCHBASE_DCP_CHECKPOINT"),
        ({"startingOffsets": "yesterday"}, "earliest, latest or offsets as JSON"),
        ({"vbuckets": "64"}, "there is no vBucket 64"),
    ],
    ids=lambda more: "" if isinstance(more, str) else next(iter(more)),
)
def test_a_wrong_option_is_told_before_anything_is_read(spark, options, more, said):
    with pytest.raises(Exception, match=r"COUCHBASE_DCP|option") as raised:
        read(spark, options, **more).collect()
    *before, last = str(raised.value).partition(" SQLSTATE")[0].splitlines()
    assert said in last
    assert len(before) < 12, "the traceback is that of the last step alone"
    assert options["password"] not in str(raised.value)


def test_offsets_bound_a_read_on_both_sides(spark, options, cluster):
    for n in range(100):
        cluster.upsert(b"first_%d" % n, b"{}")
    cluster.persist()
    first = dcp_rs.spark.partitions(options, start="earliest")
    for n in range(100):
        cluster.upsert(b"second_%d" % n, b"{}")
    cluster.persist()
    second = dcp_rs.spark.partitions(options, start=first.end)
    for n in range(100):
        cluster.upsert(b"third_%d" % n, b"{}")
    cluster.persist()

    def keys(**more):
        return {row.key.partition("_")[0] for row in read(spark, options, **more).collect()}

    assert keys(endingOffsets=first.end) == {"first"}
    assert keys(startingOffsets=first.end) == {"second", "third"}
    assert keys(startingOffsets=first.end, endingOffsets=second.end) == {"second"}
    assert keys(startingOffsets=second.end, endingOffsets=second.end) == set()


def test_an_incremental_job_reads_each_change_once(spark, options, cluster):
    seen, since = [], "earliest"
    for run in range(4):
        for n in range(50):
            cluster.upsert(b"%d_%d" % (run, n), b"{}")
        cluster.persist()
        partitions = dcp_rs.spark.partitions(options, start=since)
        task = dcp_rs.spark.map_in_arrow(options, partitions)
        n = len(task)
        schema = dcp_rs.spark.schema(options)
        rows = spark.range(0, n, 1, n).mapInArrow(task, schema).collect()
        assert {row.key.partition("_")[0] for row in rows} == {str(run)}
        seen += [row.key for row in rows]
        since = partitions.end
    assert len(seen) == len(set(seen)) == 200
    assert dcp_rs.spark.partitions(options, start=since) == []


def test_a_sql_view_reads_the_bucket(spark, options, load):
    load(30)
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW changes USING `{FORMAT}` OPTIONS ({given})")
    assert spark.sql("SELECT count(*) AS n FROM changes").first().n == 30
    spark.catalog.dropTempView("changes")


def test_no_plan_shows_the_password(spark, options, load, capsys):
    load(10)
    read(spark, options).explain("extended")
    assert options["password"] not in capsys.readouterr().out
    assert options["password"] not in repr(dcp_rs.spark.partitions(options, start="earliest"))


def test_spark_finds_the_source_by_itself():
    import pyspark_couchbase_dcp

    source = pyspark_couchbase_dcp.DefaultSource
    assert source.name() == FORMAT
    assert pickle.loads(pickle.dumps(source)) is source


def test_offsets_are_json_in_one_line(options, cluster, load):
    load(10)
    cluster.persist()
    end = dcp_rs.spark.partitions(options, start="earliest").end
    assert "\n" not in end
    document = json.loads(end)
    assert document["v"] == 2
    assert sum(document["s"]) == 11
