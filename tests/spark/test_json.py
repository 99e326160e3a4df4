"""Documents as typed columns, as text and as variants, in Spark."""

import datetime as dt
import decimal
import json

import pytest
from pyspark.sql.functions import count

import dcp_rs
import dcp_rs.spark
from dcp_rs.exceptions import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SCHEMA = (
    "name STRING, geo STRUCT<lat: DOUBLE, lon: DOUBLE>, tags ARRAY<STRING>, ids MAP<STRING, INT>, "
    "price DECIMAL(10, 2), at TIMESTAMP, day DATE, local TIMESTAMP_NTZ, blob BINARY, "
    "tiny TINYINT, small SMALLINT, large BIGINT, f FLOAT, flag BOOLEAN"
)
DOCUMENT = {
    "name": "40-Mile Air",
    "geo": {"lat": 1.5, "alt": 100, "lon": -2},
    "tags": ["a", None],
    "ids": {"x": 1},
    "price": 12.345,
    "at": "2024-02-29T12:00:00+01:00",
    "day": "2024-02-29",
    "local": "2024-02-29 12:00:00.5",
    "blob": "AAE=",
    "tiny": -1,
    "small": 300,
    "large": 2**40,
    "f": 0.5,
    "flag": True,
}
READ = {
    "name": "40-Mile Air",
    "geo": {"lat": 1.5, "lon": -2.0},
    "tags": ["a", None],
    "ids": {"x": 1},
    "price": decimal.Decimal("12.35"),
    "day": dt.date(2024, 2, 29),
    "local": dt.datetime(2024, 2, 29, 12, 0, 0, 500_000),  # noqa: DTZ001 - has no zone
    "blob": bytearray(b"\x00\x01"),
    "tiny": -1,
    "small": 300,
    "large": 2**40,
    "f": 0.5,
    "flag": True,
}


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def documents(cluster):
    cluster.upsert("good", DOCUMENT)
    cluster.upsert("empty", {})
    cluster.upsert("wrong", {"name": "x", "geo": 5})
    cluster.upsert("binary", b"\x00\xff")
    cluster.upsert("removed", DOCUMENT)
    cluster.remove("removed")
    cluster.persist()


def load(reader, options, **more):
    return reader.format("couchbase.dcp").options(**options).options(**more).load()


def by_key(rows):
    return {row.key: row.asDict(recursive=True) for row in rows}


def check_documents(rows):
    good = rows["good"]
    assert {name: good[name] for name in READ} == READ
    assert good["at"].timestamp() == dt.datetime(2024, 2, 29, 11, tzinfo=dt.UTC).timestamp()
    for key in ("empty", "wrong", "binary", "removed"):
        assert {rows[key][name] for name in READ} == {None}, key
    malformed = {key: row["_malformed"] for key, row in rows.items() if row["_malformed"]}
    assert malformed == {"wrong": b'{"name":"x","geo":5}', "binary": b"\x00\xff"}


@pytest.mark.usefixtures("documents")
def test_documents_are_columns_of_a_data_frame(spark, options):
    more = {"documentSchema": SCHEMA, "onMalformed": "column"}
    frame = load(spark.read, options, **more)
    assert "value" not in frame.columns
    assert frame.schema == dcp_rs.spark.schema(options | more)
    check_documents(by_key(frame.collect()))
    row = frame.where("name IS NOT NULL").selectExpr("geo.lat", "tags[0] AS tag").first()
    assert (row.lat, row.tag) == (1.5, "a")


@pytest.mark.usefixtures("documents")
def test_documents_are_columns_in_map_in_arrow(spark, options):
    from pyspark.sql.types import StructType

    given = StructType.fromDDL(SCHEMA)
    more = options | {"documentSchema": given, "onMalformed": "column"}
    task = dcp_rs.spark.map_in_arrow(more)
    schema = dcp_rs.spark.schema(more)
    assert schema[: len(schema)][-len(given) - 1 : -1] == given
    rows = spark.range(0, len(task), 1, len(task)).mapInArrow(task, schema).collect()
    check_documents(by_key(rows))


@pytest.mark.usefixtures("documents")
def test_documents_are_columns_of_micro_batches(spark, options, cluster, tmp_path):
    changes = load(spark.readStream, options, documentSchema="name STRING, large BIGINT")

    def run():
        query = (
            changes.writeStream.format("parquet")
            .option("path", f"{tmp_path}/rows")
            .option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        return spark.read.parquet(f"{tmp_path}/rows").collect()

    rows = {row.key: (row.op, row.name, row.large) for row in run()}
    assert rows["good"] == ("mutation", "40-Mile Air", 2**40)
    assert rows["wrong"] == ("mutation", "x", None)
    assert rows["removed"] == ("deletion", None, None)
    # What a rollback row has no document for is null, whatever its type.
    vbucket = cluster.vbucket_of("good")
    cluster.roll_back(vbucket, 0)
    rows = [row for row in run() if row.op == "rollback"]
    assert [(row.vbucket, row.name, row.large) for row in rows] == [(vbucket, None, None)]


def check_fields(rows):
    """Checks rows of which only the values that do not fit are null."""
    good, wrong = rows["good"], rows["wrong"]
    assert {name: good[name] for name in READ} == READ
    assert {name: wrong[name] for name in READ if wrong[name] is not None} == {"name": "x"}
    notes = {key: row["_malformed_fields"] for key, row in rows.items()}
    notes = {key: json.loads(text) for key, text in notes.items() if text is not None}
    assert notes == {
        "wrong": [{"path": "geo", "reason": "expected an object", "text": "5"}],
        "binary": [{"path": "", "reason": "not JSON", "text": "\0…"}],
    }


@pytest.mark.usefixtures("documents")
def test_only_values_that_do_not_fit_are_null(spark, options):
    more = options | {"documentSchema": SCHEMA}
    frame = load(spark.read, options, documentSchema=SCHEMA)
    schema = dcp_rs.spark.schema(more)
    assert frame.schema == schema
    assert schema[-1].simpleString() == "_malformed_fields:string"
    check_fields(by_key(frame.collect()))
    notes = "ARRAY<STRUCT<path: STRING, reason: STRING, text: STRING>>"
    paths = frame.selectExpr(f"inline(from_json(_malformed_fields, '{notes}'))").collect()
    assert sorted(row.path for row in paths) == ["", "geo"]
    task = dcp_rs.spark.map_in_arrow(more)
    rows = spark.range(0, len(task), 1, len(task)).mapInArrow(task, schema).collect()
    check_fields(by_key(rows))


@pytest.mark.usefixtures("documents")
def test_a_stream_keeps_what_fits_and_counts_what_does_not(spark, options, tmp_path):
    frame = load(spark.readStream, options, documentSchema=SCHEMA)
    observed = frame.observe("documents", count("_malformed_fields").alias("malformed"))
    query = (
        observed.writeStream.format("parquet")
        .option("path", f"{tmp_path}/rows")
        .option("checkpointLocation", f"{tmp_path}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    check_fields(by_key(spark.read.parquet(f"{tmp_path}/rows").collect()))
    metrics = [each["observedMetrics"]["documents"] for each in query.recentProgress]
    assert sum(each["malformed"] for each in metrics) == 2


@pytest.mark.usefixtures("documents")
def test_a_users_schema_need_not_name_the_malformed(spark, options):
    for how, name in (("null", "x"), ("column", None)):
        more = {"documentSchema": SCHEMA, "onMalformed": how}
        rows = by_key(load(spark.read.schema("name STRING, key STRING"), options, **more).collect())
        assert rows["wrong"] == {"key": "wrong", "name": name}, how
    more = {"documentSchema": SCHEMA}
    frame = load(spark.read.schema("_malformed_fields STRING, key STRING"), options, **more)
    assert frame.where("_malformed_fields IS NOT NULL").count() == 2


@pytest.mark.parametrize(
    ("schema", "keys"),
    [
        ("large BIGINT, key STRING", {"good": 2**40, "empty": None, "wrong": None}),
        ("key STRING, value VARIANT, large BIGINT", {"good": 2**40, "empty": None, "wrong": None}),
    ],
)
@pytest.mark.usefixtures("documents")
def test_a_users_schema_chooses_among_documents_too(spark, options, schema, keys):
    reader = spark.read.schema(schema)
    more = {"documentSchema": SCHEMA, "valueFormat": "variant", "onMalformed": "column"}
    rows = load(reader, options, **more).collect()
    assert {row.key: row.large for row in rows if row.key in keys} == keys


@pytest.mark.usefixtures("documents")
def test_a_projection_to_changes_alone_decodes_nothing(spark, options):
    more = {"documentSchema": SCHEMA, "onMalformed": "fail"}
    frame = load(spark.read.schema("key STRING, seqno BIGINT"), options, **more)
    assert {row.key for row in frame.collect()} >= {"good", "wrong", "binary"}


# Objects, text and numbers at the bounds of the variant's types.
VARIANTS = [
    "null",
    "[]",
    "{}",
    "[true, false, null, {}]",
    '"short"',
    '"' + "long" * 20 + '"',
    '"\\u00e9\\ud83d\\ude00\\n"',
    '{"b": 1, "a": {"b": [1, 2.50]}, "\\uff5e": 1, "\\ud83d\\ude00": 2}',
    "[0, -1, 127, 128, -129, 32768, -32769, 2147483648, 9223372036854775807, -9223372036854775808]",
    "[0.0, -0.0, 1.5, 123456789.1, 0.0000000001, 1234567890123456789.5, 9223372036854775808]",
    "[1e3, 1.5E-7, 100000000000000000000000000000000000000000, 0." + "1" * 40 + "]",
    "[" + ", ".join(map(str, range(300))) + "]",
    "{" + ", ".join(f'"key{n:03}": {n}' for n in reversed(range(300))) + "}",
    '{"a": "' + "x" * 70_000 + '", "b": [[["deep"]]]}',
]


def test_variants_are_byte_for_byte_those_of_parse_json(spark, options, cluster):
    for number, text in enumerate(VARIANTS):
        cluster.upsert(f"{number:02}", text.encode())
    frame = load(spark.read, options, valueFormat="variant").select("key", "value")
    ours = {row.key: row.value for row in frame.collect()}
    given = spark.createDataFrame(
        [(f"{n:02}", text) for n, text in enumerate(VARIANTS)], "k STRING, t STRING"
    )
    for row in given.selectExpr("k", "t", "parse_json(t) AS v").collect():
        assert (bytes(ours[row.k].value), bytes(ours[row.k].metadata)) == (
            bytes(row.v.value),
            bytes(row.v.metadata),
        ), row.t[:80]


def test_a_field_may_be_a_variant(spark, options, cluster):
    for number, text in enumerate(VARIANTS[1:]):
        cluster.upsert(f"{number:02}", f'{{"v": {text}, "all": [{text}]}}'.encode())
    cluster.upsert("none", {"v": None})
    frame = load(spark.read, options, documentSchema="v VARIANT, all ARRAY<VARIANT>")
    assert frame.schema["v"].dataType.simpleString() == "variant"
    ours = frame.selectExpr("key", "v", "all[0] AS e", "to_json(v) AS t").collect()
    assert [row.t for row in ours if row.key == "none"] == [None]
    given = spark.createDataFrame(
        [(f"{n:02}", text) for n, text in enumerate(VARIANTS[1:])], "k STRING, t STRING"
    )
    wanted = {row.k: row.v for row in given.selectExpr("k", "parse_json(t) AS v").collect()}
    parts = {row.key: [row.v, row.e] for row in ours if row.key != "none"}
    for key, variants in parts.items():
        for variant in variants:
            assert (bytes(variant.value), bytes(variant.metadata)) == (
                bytes(wanted[key].value),
                bytes(wanted[key].metadata),
            ), key
    assert parts.keys() == wanted.keys()


@pytest.mark.usefixtures("documents")
def test_a_value_is_text_where_it_is_utf_8(spark, options):
    frame = load(spark.read, options, valueFormat="string", onMalformed="column")
    rows = by_key(frame.collect())
    assert rows["wrong"]["value"] == '{"name":"x","geo":5}'
    assert (rows["binary"]["value"], rows["binary"]["_malformed"]) == (None, b"\x00\xff")
    assert frame.where("get_json_object(value, '$.large') > 0").count() == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"documentSchema": "name TEXT"}, "there is no type TEXT"),
        ({"documentSchema": "a INT", "includeValue": "false"}, "documentSchema: needs documents"),
        ({"onMalformed": "ignore"}, "'null', 'fail' or 'column'"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_read(spark, options, more, said):
    options = options | {"connectionString": "couchbase://127.0.0.1:1"}
    with pytest.raises(Exception, match="COUCHBASE_DCP_CONFIG") as raised:
        load(spark.read, options, **more)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"documentSchema": "timestamp TIMESTAMP"}, "^documentSchema: .*give a prefix"),
        ({"onMalformed": "fail"}, "documents are not decoded"),
        ({"valueFormat": "json"}, "'binary', 'string' or 'variant'"),
        ({"documentShema": "a INT"}, "did you mean documentSchema"),
        ({"valueFormat": "string", "columns": "key"}, "applies to the column value"),
        ({"documentPrefix": "doc_"}, "^documentSchema: a prefix needs a schema"),
        ({"documentSchema": 5}, "^documentSchema: must be text"),
    ],
)
def test_so_it_is_without_a_session(more, said):
    options = {"connectionString": "couchbase://127.0.0.1:1/changes"}
    for read in (dcp_rs.spark.schema, dcp_rs.spark.partitions):
        with pytest.raises(ConfigError, match=said):
            read(options | more)


@pytest.mark.parametrize("wrong", [5, "bucket", ["bucket"], None, {1: 2}])
def test_options_of_a_wrong_type_are_refused(wrong):
    for read in (dcp_rs.spark.schema, dcp_rs.spark.partitions, dcp_rs.spark.map_in_arrow):
        with pytest.raises(ConfigError, match=r"^options: must be"):
            read(wrong)


@pytest.mark.usefixtures("documents")
def test_a_malformed_document_can_fail_the_read(spark, options):
    frame = load(spark.read, options, documentSchema=SCHEMA, onMalformed="fail")
    with pytest.raises(Exception, match="COUCHBASE_DCP_MALFORMED") as raised:
        frame.collect()
    assert "40-Mile" not in str(raised.value)


@pytest.mark.usefixtures("documents")
def test_masked_fields_are_in_no_row(spark, options):
    masks = {"dropFields": "name, geo.lat", "hashFields": "tags[]"}
    for more in ({}, {"documentSchema": SCHEMA}):
        rows = load(spark.read, options, **masks, **more).collect()
        assert rows
        assert "40-Mile Air" not in repr(rows)
