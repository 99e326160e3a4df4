"""Documents as typed columns, as text and as variants."""

import asyncio
import datetime as dt
import decimal
import json
import os
import random
import subprocess
import sys

import pyarrow as pa
import pytest

import dcp_rs
from dcp_rs import DocumentSchema
from dcp_rs.exceptions import ConfigError, DataError
from reading import rows_of

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
    "price": "12.345",
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
    "at": dt.datetime(2024, 2, 29, 11, tzinfo=dt.UTC),
    "day": dt.date(2024, 2, 29),
    "local": dt.datetime(2024, 2, 29, 12, 0, 0, 500_000),  # noqa: DTZ001 - has no zone
    "blob": b"\x00\x01",
    "tiny": -1,
    "small": 300,
    "large": 2**40,
    "f": 0.5,
    "flag": True,
}


@pytest.fixture
def documents(cluster):
    """Documents that fit and others, by key."""
    written = {
        "good": DOCUMENT,
        "empty": {},
        "wrong": {"name": "x", "geo": 5},
        "binary": b"\x00\xff",
        "removed": {},
    }
    for key, value in written.items():
        cluster.upsert(key, value)
    cluster.remove("removed")
    return written


def by_key(client, **options):
    return {row["key"]: row for row in rows_of(client.stream(until="now", **options))}


def test_moments_are_those_of_the_calendar(client, cluster):
    """From year 1 to 9999, as `datetime` itself adds seconds to 1970."""
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    first, last = -62_135_596_800, 253_402_300_799
    seed = random.randrange(2**32)
    seconds = [first, -1, 0, 951_782_399, 951_782_400, 951_868_800, last]
    seconds += random.Random(seed).choices(range(first, last), k=200)
    for second in seconds:
        cluster.upsert(str(second), {"at": second})
    rows = by_key(client, document_schema="at TIMESTAMP")
    read = {second: rows[str(second)]["at"] for second in seconds}
    expected = {second: epoch + dt.timedelta(seconds=second) for second in seconds}
    assert read == expected, f"seed {seed}"


def test_times_beyond_the_calendar_are_malformed(client, cluster):
    """Nothing that `datetime` cannot hold: it would fail for the whole batch."""
    documents = {
        "milliseconds": b'{"at":1700000000000}',
        "year 0": b'{"day":"0000-12-31"}',
        "before year 1": b'{"at":"0001-01-01T00:30:00+01:00"}',
        "after year 9999": b'{"at":"9999-12-31T23:30:00-01:00"}',
        "local": b'{"local":"0000-12-31T00:00:00"}',
    }
    for key, value in documents.items():
        cluster.upsert(key, value)
    cluster.upsert("last", {"day": "9999-12-31", "local": "9999-12-31T23:59:59.999999"})
    schema = DocumentSchema("at TIMESTAMP, day DATE, local TIMESTAMP_NTZ", on_malformed="column")
    rows = by_key(client, document_schema=schema)
    assert {key: row["_malformed"] for key, row in rows.items()} == documents | {"last": None}
    assert rows["last"]["day"] == dt.date.max
    assert f"{rows['last']['local']}" == "9999-12-31 23:59:59.999999"


def test_documents_are_decoded_to_columns(client, documents):
    rows = by_key(client, document_schema=DocumentSchema(SCHEMA, on_malformed="column"))
    assert {name: rows["good"][name] for name in READ} == READ
    for key in documents.keys() - {"good"}:
        assert {rows[key][name] for name in READ} == {None}, key
    malformed = {key: row["_malformed"] for key, row in rows.items()}
    assert malformed == dict.fromkeys(documents) | {
        "wrong": b'{"name":"x","geo":5}',
        "binary": b"\x00\xff",
    }
    assert all("value" not in row for row in rows.values())


@pytest.mark.usefixtures("documents")
def test_an_arrow_schema_says_the_same_as_its_text(client):
    pa = pytest.importorskip("pyarrow")
    by_text = dcp_rs.Schema(document_schema=SCHEMA).to_pyarrow()
    names = set(READ)
    given = pa.schema([field for field in by_text if field.name in names])
    assert dcp_rs.Schema(document_schema=given).to_pyarrow() == by_text
    table = client.stream(until="now", document_schema=given).read_all()
    assert table.schema == by_text
    (good,) = (row for row in table.to_pylist() if row["key"] == "good")
    assert good["geo"] == READ["geo"]
    quoted = pa.schema([pa.field("a`b c", pa.list_(pa.struct([("ü", pa.int8())])))])
    assert dcp_rs.Schema(document_schema=quoted).names[-2] == "a`b c"
    variants = dcp_rs.Schema(document_schema="v VARIANT, a ARRAY<VARIANT>").to_pyarrow()
    given = pa.schema([variants.field("v"), variants.field("a")])
    assert dcp_rs.Schema(document_schema=given).to_pyarrow() == variants


def test_an_arrow_schema_that_documents_cannot_have_is_refused():
    pa = pytest.importorskip("pyarrow")
    inner = pa.field("x", pa.int32(), nullable=False)
    for schema, said in [
        (pa.schema([("a", pa.uint8())]), "a is uint8"),
        (pa.schema([("a", pa.list_(pa.large_string()))]), r"a\[\] is large_string"),
        (pa.schema([("a", pa.timestamp("ms"))]), "timestamp"),
        (pa.schema([("a", pa.struct([inner]))]), "a.x must be nullable"),
        (pa.schema([("a\0b", pa.int32())]), "a name has a NUL"),
        (pa.schema([("a", pa.map_(pa.int32(), pa.int32()))]), "MAP<STRING, type>"),
        (pa.schema([]), "expected a name"),
        (5, "must be text or a pyarrow.Schema"),
    ]:
        with pytest.raises(ConfigError, match=f"document_schema: .*{said}"):
            dcp_rs.Schema(document_schema=schema)


def test_a_malformed_document_can_end_the_stream(cluster, client):
    token = cluster.upsert("secret key", {"n": "secret"})
    with pytest.raises(DataError, match="expected an INT") as raised:
        by_key(client, document_schema=DocumentSchema("n INT", on_malformed="fail"))
    assert (raised.value.vbucket, raised.value.seqno) == (token.vbucket, token.seqno)
    assert raised.value.code == "malformed"
    assert "secret" not in str(raised.value)


def unmatched(caplog):
    """Gives what was logged of columns that no document has, and forgets it."""
    events = [each for each in caplog.records if getattr(each, "event", None) == "column_unmatched"]
    assert {each.levelname for each in events} <= {"WARNING"}
    found = sorted(tuple(each.fields.values()) for each in events)
    caplog.clear()
    return found


def test_column_that_no_document_has_is_warned_of_once(cluster, client, caplog):
    for number in range(3):
        cluster.upsert(f"k{number}", {"name": "a", "gone": None, "wrong": "x", "dropped": 1})
    schema = "name STRING, gone STRING, wrong INT, dropped INT, nmae INT"
    options = {"until": "now", "drop_fields": "dropped"}
    for prefix, expected in (("", [("nmae", 3)]), ("doc_", [])):
        documents = DocumentSchema(schema, prefix=prefix)
        assert sum(map(len, client.stream(document_schema=documents, **options))) == 3
        assert unmatched(caplog) == expected
    list(client.stream(until="now", document_schema="name STRING, gone INT"))
    assert unmatched(caplog) == []


@pytest.mark.parametrize("own", [{}, {"extra": "column"}, {"new_fields": "evolve"}])
def test_column_of_a_table_that_no_document_has_is_warned_of_once(
    cluster, client, tmp_path, caplog, own
):
    options = {"document_schema": "nmae STRING, gone INT, dropped INT", "drop_fields": "dropped"}
    options |= {"target": f"duckdb://{tmp_path}/d.duckdb?table=t", "once": True, **own}
    for number in range(5):
        cluster.upsert(f"k{number}", {"name": "a", "gone": None})
    dcp_rs.replicate(client, **options)
    assert unmatched(caplog) == [("nmae", 5)]
    cluster.upsert("k", {"name": "b"})
    with cluster.connect() as another:
        dcp_rs.replicate(another, **options)
    assert unmatched(caplog) == []


def test_column_of_a_table_that_follows_is_warned_of(
    cluster, client, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("dcp_rs.replication.schemas._ENOUGH", 3)
    options = {"target": f"duckdb://{tmp_path}/d.duckdb?table=t", "once": True}
    options |= {"document_schema": "nmae STRING, name STRING", "extra": "column"}
    cluster.upsert("k", b"[]")
    dcp_rs.replicate(client, **options)
    for count, expected in ((2, []), (3, [("nmae", 3)])):
        for number in range(count):
            cluster.upsert(f"k{number}", {"name": str(number)})
        dcp_rs.replicate(client, **options)
        assert unmatched(caplog) == expected


def test_only_values_that_do_not_fit_are_null(cluster, client, caplog):
    cluster.upsert("o1", {"total": 10, "country": "NO", "items": [{"price": 1}]})
    cluster.upsert("o2", {"total": 10.5, "country": "secret", "items": [{}, {"price": "secret"}]})
    cluster.upsert("o3", {"total": "secret", "country": "SE"})
    cluster.upsert("o4", b"secret")
    token = cluster.upsert("o5", b"[1]")
    schema = "total BIGINT, country STRING, items ARRAY<STRUCT<price: INT>>"
    with client.stream(until="now", document_schema=schema) as stream:
        rows = {row["key"]: row for row in rows_of(stream)}
        stats = stream.stats()
    values = {key: (row["total"], row["country"], row["items"]) for key, row in rows.items()}
    assert values == {
        "o1": (10, "NO", [{"price": 1}]),
        "o2": (None, "secret", [{"price": None}, {"price": None}]),
        "o3": (None, "SE", None),
        "o4": (None, None, None),
        "o5": (None, None, None),
    }
    notes = {key: row["_malformed_fields"] for key, row in rows.items()}
    whole = "expected a whole number that fits a BIGINT"
    assert {key: text and json.loads(text) for key, text in notes.items()} == {
        "o1": None,
        "o2": [
            {"path": "total", "reason": whole, "text": "10.5"},
            {"path": "items[1].price", "reason": "expected an INT", "text": '"secret"'},
        ],
        "o3": [{"path": "total", "reason": whole, "text": '"secret"'}],
        "o4": [{"path": "", "reason": "not JSON", "text": "secret"}],
        "o5": [{"path": "", "reason": "expected an object at byte 0", "text": "[1]"}],
    }
    assert (stats.malformed, stats.partly_malformed, stats.rows) == (2, 2, 5)
    logged = [record for record in caplog.records if record.name == "dcp_rs.documents"]
    texts = [record.getMessage() for record in logged]
    assert {record.levelname for record in logged} == {"WARNING"}
    assert len(texts) == 4, texts
    fields = [record.fields | {"event": record.event} for record in logged]
    assert [each["event"] for each in fields if each.get("field") == "items[].price"] == [
        "field_malformed"
    ]
    assert {
        "event": "document_malformed",
        "vbucket": token.vbucket,
        "seqno": token.seqno,
        "reason": "expected an object",
    } in fields
    assert not any("secret" in text or '"o' in text for text in texts)


def test_values_that_do_not_fit_are_found_in_every_reader(cluster, client):
    cluster.upsert("k", {"a": 1, "b": "x"})
    notes = '[{"path":"b","reason":"expected an INT","text":"\\"x\\""}]'
    documents = DocumentSchema("a INT, b INT", prefix="d_")
    options = {"until": "now", "document_schema": documents}
    names = ["key", "d_a", "d_b", "_malformed_fields"]
    assert dcp_rs.Schema(columns=["key"], document_schema=documents).names == names

    async def read():
        async with (
            dcp_rs.connect_async(cluster.connection_options) as each,
            each.stream(**options) as stream,
        ):
            return [row async for batch in stream for row in batch], stream.stats()

    rows, stats = asyncio.run(read())
    expected = {"d_a": 1, "d_b": None, "_malformed_fields": notes}
    assert {name: rows[0][name] for name in expected} == expected
    assert (stats.malformed, stats.partly_malformed) == (0, 1)
    table = pa.table(client.stream(columns=names, **options))
    assert table.to_pylist() == [{"key": "k"} | expected]
    (row,) = rows_of(client.stream(columns=["key", "d_a"], **options))
    assert row == {"key": "k", "d_a": 1}
    command = [sys.executable, "-m", "dcp_rs", "cat", f"{cluster.connection_string}/default"]
    command += ["--json", "--document-schema", "a INT, b INT", "--document-prefix", "d_"]
    command += ["--username", cluster.connection_options.username]
    password = {"DCP_RS_PASSWORD": cluster.connection_options.password}
    ran = subprocess.run(
        command, env=os.environ | password, capture_output=True, text=True, check=True, timeout=60
    )
    row = json.loads(ran.stdout)
    assert (row["d_a"], row["d_b"]) == (1, None)
    assert row["_malformed_fields"] == json.loads(notes), "JSON, not text"
    assert 'field="b" reason=expected an INT' in ran.stderr


def test_fields_called_as_columns_get_a_prefix(cluster, client):
    cluster.upsert("k", {"key": 1, "timestamp": 2})
    schema = "key INT, timestamp BIGINT"
    with pytest.raises(ConfigError, match="give a prefix"):
        client.stream(document_schema=schema)
    (row,) = by_key(client, document_schema=DocumentSchema(schema, prefix="doc_")).values()
    assert (row["key"], row["doc_key"], row["doc_timestamp"]) == ("k", 1, 2)


@pytest.mark.usefixtures("documents")
def test_a_value_is_bytes_text_or_a_variant(client):
    of = {
        form: {key: row["value"] for key, row in by_key(client, value_format=form).items()}
        for form in ("binary", "string", "variant")
    }
    assert of["binary"]["wrong"] == b'{"name":"x","geo":5}'
    assert of["string"]["wrong"] == '{"name":"x","geo":5}'
    assert of["variant"]["wrong"] == {
        "value": b"\x02\x02\x01\x00\x02\x00\x04\x05x\x0c\x05",
        "metadata": b"\x01\x02\x00\x04\x07namegeo",
    }
    assert of["binary"]["binary"] == b"\x00\xff"
    assert of["string"]["binary"] is of["variant"]["binary"] is None
    assert {form: of[form]["removed"] for form in of} == dict.fromkeys(of)


@pytest.mark.usefixtures("documents")
def test_malformed_text_can_have_a_column_without_a_schema(client):
    documents = DocumentSchema(on_malformed="column")
    rows = by_key(client, value_format="string", document_schema=documents)
    assert (rows["binary"]["value"], rows["binary"]["_malformed"]) == (None, b"\x00\xff")


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (DocumentSchema("a INT", prefix=5), "prefix: must be text, not int"),
        (DocumentSchema("a INT", on_malformed="ignore"), "on_malformed: must be 'null', 'fail'"),
        (DocumentSchema(prefix="doc_"), "document_schema: a prefix needs a schema"),
        (DocumentSchema(on_malformed="fail"), "on_malformed: documents are not decoded"),
        (DocumentSchema(DocumentSchema("a INT")), "document_schema: must be text or a pyarrow"),
        (DocumentSchema("infer"), "document_schema: is inferred by dcp_rs.replicate alone"),
        (
            DocumentSchema({"a": "INT"}),
            r"a pyarrow.Schema, not dict: write 'name STRING, n BIGINT'",
        ),
    ],
)
def test_a_wrong_document_schema_is_refused_by_name(documents, said):
    with pytest.raises(ConfigError, match=said):
        dcp_rs.Schema(document_schema=documents)
