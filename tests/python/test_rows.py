"""What rows say about changes."""

import datetime as dt
import json
import time

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError, DataError
from reading import rows_of


def row_of(client, **options):
    (row,) = rows_of(client.stream(until="now", **options))
    return row


def test_a_mutation_shows_its_document(cluster, client):
    before = dt.datetime.now(dt.UTC)
    token = cluster.upsert("airline_10", {"name": "40-Mile Air"}, flags=0x0200_0006)
    row = row_of(client, columns="full")
    timestamp = row.pop("timestamp")
    assert before - dt.timedelta(seconds=1) < timestamp < dt.datetime.now(dt.UTC)
    snapshot = (row.pop("snapshot_start"), row.pop("snapshot_end"))
    assert snapshot[0] <= token.seqno == snapshot[1]
    assert row == {
        "op": "mutation",
        "key": "airline_10",
        "value": b'{"name":"40-Mile Air"}',
        "scope": "_default",
        "collection": "_default",
        "vbucket": cluster.vbucket_of("airline_10"),
        "seqno": token.seqno,
        "epoch": 0,
        "cas": token.cas,
        "rev": 1,
        "expiry": None,
        "deleted_at": None,
        "flags": 0x0200_0006,
        "datatype": "json",
        "vbuuid": token.vbuuid,
    }


def test_tuples_hold_the_values_of_the_rows(cluster, client):
    for number in range(3):
        cluster.upsert(f"k{number}", {"n": number}, expiry=4_000_000_000 + number)
    cluster.remove("k0")
    count = 0
    for batch in client.stream(until="now", columns="full"):
        rows = list(batch.rows())
        assert list(batch.tuples()) == [tuple(row.values()) for row in rows]
        assert [list(row) for row in rows] == [batch.column_names] * batch.num_rows
        count += len(rows)
    assert count == 3


def test_timestamps_are_those_of_the_columns(cluster, client):
    for number in range(100):
        cluster.upsert(f"k{number}", {"n": number}, expiry=2**32 - 1 - number)
    count = 0
    for batch in client.stream(until="now", columns=["timestamp", "expiry"]):
        columns = batch.to_pyarrow()
        rows = list(batch.rows())
        for name in ("timestamp", "expiry"):
            assert [row[name] for row in rows] == columns.column(name).to_pylist()
        count += len(rows)
    assert count == 100


def test_what_is_not_json_is_called_binary(cluster, client):
    cluster.upsert("blob", b"\x00\xff")
    row = row_of(client, columns="full")
    assert (row["datatype"], row["value"]) == ("binary", b"\x00\xff")


def test_a_deletion_has_a_time_and_no_value(cluster, client):
    cluster.upsert("a", b"1")
    token = cluster.remove("a")
    row = row_of(client, columns="full")
    assert (row["op"], row["key"], row["value"]) == ("deletion", "a", None)
    assert (row["seqno"], row["cas"], row["rev"]) == (token.seqno, token.cas, 2)
    assert abs((dt.datetime.now(dt.UTC) - row["deleted_at"]).total_seconds()) < 5


def test_an_expiration_is_told_from_a_deletion(cluster, client):
    cluster.upsert("a", b"1")
    cluster.expire("a")
    assert row_of(client)["op"] == "expiration"


def test_a_document_shows_when_it_expires(cluster, client):
    expiry = int(time.time()) + 1000 * 86_400
    cluster.upsert("a", b"1", expiry=expiry)
    assert row_of(client, columns="full")["expiry"] == dt.datetime.fromtimestamp(expiry, dt.UTC)


def test_rows_of_a_vbucket_come_in_the_order_of_their_seqnos(client, fill):
    fill(500)
    rows = rows_of(client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=7)))
    assert len(rows) == 500
    for vbucket in range(16):
        seqnos = [row["seqno"] for row in rows if row["vbucket"] == vbucket]
        assert seqnos == sorted(seqnos)
        assert len(set(seqnos)) == len(seqnos)


def test_values_arrive_as_they_were_written(client, fill):
    documents = fill(300, size=2000)
    rows = rows_of(client.stream(until="now", columns=["value", "key"]))
    assert {row["key"]: row["value"] for row in rows} == documents
    assert list(rows[0]) == ["value", "key"]


def test_without_values_everything_else_is_there(cluster, client):
    cluster.upsert("a", {"x": 1})
    with_values = row_of(client, columns="full")
    names = [name for name in with_values if name != "value"]
    without = row_of(client, columns=names)
    assert with_values.pop("value") == b'{"x":1}'
    assert without == with_values


def test_documents_that_come_compressed_are_as_they_were_written(cluster, client):
    cluster.upsert("a", {"x": "1" * 1000})
    plain = row_of(client, columns="full")
    settings = {"opcode": "DCP_CONTROL", "direction": "to_server"}
    cluster.set_faults([{"condition": settings, "reaction": {"delay": {"seconds": 0}}}])
    assert row_of(client, columns="full") == plain
    (without,) = cluster.fault_counts()
    with cluster.connect(compressed=True) as compressing:
        assert row_of(compressing, columns="full") == plain
    (both,) = cluster.fault_counts()
    # One setting more for each node.
    assert both - without == without + cluster.num_nodes
    assert plain["datatype"] == "json"


def test_every_column_can_be_asked_for_alone(cluster, client):
    cluster.upsert("a", {"x": 1})
    names = [column.name for column in dcp_rs.columns()]
    assert len(names) == 21
    everything = row_of(client, columns=names)
    for name in names:
        assert row_of(client, columns=[name]) == {name: everything[name]}


def test_xattrs_are_a_column_when_asked_for(cluster, client):
    cluster.upsert("a", {"x": 1})
    assert row_of(client, include="xattrs")["xattrs"] is None


def test_keys_that_are_not_text_need_binary_keys(cluster, client):
    token = cluster.upsert(b"\xff\x00", b"1")
    stream = client.stream(until="now")
    with pytest.raises(DataError, match="keys as binary") as raised:
        rows_of(stream)
    assert (raised.value.vbucket, raised.value.seqno) == (token.vbucket, token.seqno)
    assert "\xff" not in str(raised.value)
    # The row that could not be shown is not passed over.
    assert stream.checkpoint().seqnos.get(token.vbucket, 0) < token.seqno
    assert row_of(client, key_type="binary")["key"] == b"\xff\x00"


def test_a_wrong_column_names_the_nearest(client):
    with pytest.raises(ConfigError, match=r'"seq_no"; did you mean "seqno"\?'):
        client.stream(columns=["seq_no"])
    with pytest.raises(ConfigError, match=r"must be .* or a list of column names, not 'seqno'"):
        client.stream(columns="seqno")
    with pytest.raises(ConfigError, match=r"columns, on_malformed: ._malformed. needs 'column'"):
        client.stream(columns=["_malformed"])


def test_columns_and_rows_agree_with_pyarrow(client, fill):
    fill(50)
    for batch in client.stream(until="now", columns="full", include="xattrs"):
        record_batch = batch.to_pyarrow()
        assert batch.num_rows == len(batch) == record_batch.num_rows
        assert batch.column_names == record_batch.schema.names
        assert batch.nbytes > 0
        assert list(batch.rows()) == record_batch.to_pylist()


def test_types_are_exact(client, cluster):
    import pyarrow as pa

    expected = pa.schema(
        [
            pa.field("op", pa.string(), nullable=False),
            pa.field("key", pa.string()),
            pa.field("value", pa.binary()),
            pa.field("scope", pa.string()),
            pa.field("collection", pa.string()),
            pa.field("vbucket", pa.int32(), nullable=False),
            pa.field("seqno", pa.int64(), nullable=False),
            pa.field("epoch", pa.int32(), nullable=False),
            pa.field("cas", pa.int64()),
            pa.field("timestamp", pa.timestamp("us", tz="UTC")),
            pa.field("rev", pa.int64()),
            pa.field("expiry", pa.timestamp("us", tz="UTC")),
            pa.field("deleted_at", pa.timestamp("us", tz="UTC")),
            pa.field("flags", pa.int64()),
            pa.field("datatype", pa.string()),
            pa.field("vbuuid", pa.int64()),
            pa.field("snapshot_start", pa.int64()),
            pa.field("snapshot_end", pa.int64()),
            pa.field("xattrs", pa.map_(pa.string(), pa.string())),
        ]
    )
    cluster.upsert("a", b"1")
    stream = client.stream(until="now", columns="full", include="xattrs")
    assert stream.schema.equals(expected)
    assert stream.column_names == expected.names
    table = stream.read_all()
    assert table.schema.equals(expected)
    assert table.validate(full=True) is None
    assert dcp_rs.Schema(columns="full", include="xattrs").to_pyarrow().equals(expected)


def test_the_documentation_has_every_column():
    page = (dcp_rs_docs() / "change-table.md").read_text()
    for column in dcp_rs.columns():
        assert f"| `{column.name}` |" in page


def dcp_rs_docs():
    from pathlib import Path

    return Path(__file__).resolve().parents[2] / "docs"


def test_json_survives(cluster, client):
    document = {"text": "ünïcödé \N{SNOWMAN}", "list": [1, None, {"deep": True}]}
    cluster.upsert("schlüssel", document)
    row = row_of(client)
    assert row["key"] == "schlüssel"
    assert json.loads(row["value"]) == document
