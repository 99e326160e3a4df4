"""A batch as a sequence, as a frame, in a notebook; and what reprs say."""

import html.parser
import os
import re
import sys

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dcp_rs
from dcp_rs import debug, planner, testing
from dcp_rs.exceptions import ConfigError


@pytest.fixture
def cluster():
    """One node, whose changes are one batch."""
    with testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def batch(cluster, client):
    for n in range(25):
        cluster.upsert(f"key_{n:02}", b'{"n":%d}' % n, xattrs={"n": n, "list": [n]})
    stream = client.stream(until="now", include="xattrs", batch=dcp_rs.BatchPolicy(linger=1))
    found = next(stream)
    assert len(found) == 25
    return found


def test_a_batch_is_a_sequence_of_rows(batch):
    rows = list(batch.rows())
    assert list(batch) == rows
    assert [batch[n] for n in range(25)] == rows
    assert [batch[n - 25] for n in range(25)] == rows
    assert rows[7]["xattrs"]
    for bounds in [(3, 9), (None, 4), (-4, None), (20, 99), (5, 5), (9, 3), (0, 25), (None, -5)]:
        part = batch[slice(*bounds)]
        assert list(part) == rows[slice(*bounds)] == list(part.rows())
        assert len(part) == len(rows[slice(*bounds)])
        assert (
            pa.record_batch(part).to_pylist() == pa.record_batch(batch).to_pylist()[slice(*bounds)]
        )
    assert list(batch[5:20][2:4]) == rows[7:9]
    assert batch[5:20][0] == rows[5]


def test_a_slice_has_its_own_elements_of_lists_and_maps(cluster, client):
    for n in range(8):
        cluster.upsert(f"key_{n}", {"list": [n] * n, "map": {"a": n, "b": None}})
    fields = "list ARRAY<INT>, map MAP<STRING, INT>"
    with client.stream(
        until="now", document_schema=fields, batch=dcp_rs.BatchPolicy(linger=1)
    ) as stream:
        batch = next(stream)
    rows = pa.record_batch(batch).to_pylist()
    assert len(rows) == 8
    for start in range(8):
        for found, row in zip(batch[start:], rows[start:], strict=True):
            assert (found["list"], found["map"]) == (row["list"], dict(row["map"]))


@pytest.mark.parametrize("index", [25, -26, 1 << 70])
def test_a_row_that_is_not_there_is_an_index_error(batch, index):
    with pytest.raises(IndexError, match="25 rows"):
        batch[index]


@pytest.mark.parametrize(
    "index", ["key", 1.0, None, slice("a"), slice(0, 9, 2), slice(None, None, -1)]
)
def test_what_is_no_index_is_refused(batch, index):
    with pytest.raises(ConfigError, match=r"^index: "):
        batch[index]


def test_a_slice_has_no_checkpoint_that_would_skip_rows(cluster, client):
    for n in range(5):
        cluster.upsert(f"key_{n}", b"{}")
    with client.stream(until="now", ack="manual", batch=dcp_rs.BatchPolicy(linger=1)) as stream:
        batch = next(stream)
        for part in (batch[:4], batch[1:], batch[1:][:]):
            with pytest.raises(ConfigError, match="whole batch"):
                _ = part.checkpoint
            with pytest.raises(ConfigError, match="slice of a batch"):
                stream.ack(part)
        assert len(stream.checkpoint()) == 0
        stream.ack(batch[:])
        assert stream.checkpoint() == batch[:].checkpoint == batch.checkpoint


def test_a_batch_is_a_frame_of_every_library(batch):
    rows = list(batch)
    assert batch.schema == batch.to_pyarrow().schema
    polars, pandas = batch.to_polars(), batch.to_pandas()
    assert isinstance(polars, pl.DataFrame)
    assert isinstance(pandas, pd.DataFrame)
    assert polars["key"].to_list() == pandas["key"].to_list() == [row["key"] for row in rows]
    assert polars["timestamp"].to_list() == [row["timestamp"] for row in rows]
    # The sequence does not get in the way of Arrow.
    assert pl.DataFrame(batch[3:5])["seqno"].to_list() == [row["seqno"] for row in rows[3:5]]
    table = pa.table(batch)
    assert table.num_rows == 25
    assert duckdb.from_arrow(table).aggregate("count(*)").fetchall() == [(25,)]


def test_whole_numbers_in_pandas_keep_their_digits_beside_nulls(cluster, client):
    cluster.upsert("a", {"n": 2**53 + 1, "t": 1})
    cluster.upsert("b", {})
    stream = client.stream(
        until="now",
        include="system_events",  # rows without a CAS
        columns="full",
        document_schema="n BIGINT, t TINYINT",
    )
    rows = 0
    for batch in stream:
        frame = batch.to_pandas()
        for row, expected in zip(frame.to_dict("records"), batch, strict=True):
            for name in ("cas", "rev", "n", "t"):
                assert (None if pd.isna(row[name]) else row[name]) == expected[name], name
            rows += expected["cas"] is None
        names = ("cas", "n", "t", "seqno", "epoch")
        types = [str(frame[name].dtype) for name in names]
        assert types == ["Int64", "Int64", "Int8", "int64", "int32"]
    assert rows > 0


@pytest.mark.parametrize(
    ("method", "missing", "said"),
    [
        ("to_polars", "polars", 'pip install "polars"'),
        ("to_pandas", "pandas", 'pip install "pandas"'),
        ("to_pandas", "pyarrow", "dcp-rs[arrow]"),
        ("schema", "pyarrow", "dcp-rs[arrow]"),
    ],
)
def test_a_missing_library_is_named(batch, monkeypatch, method, missing, said):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=f"ChangeBatch.{method}.*{re.escape(said)}"):
        getattr(batch, method)()


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert attrs == []
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_a_notebook_shows_some_rows_and_nothing_as_markup(cluster, client):
    evil = "<script>alert(1)</script>&<b onclick='x'>\""
    field = "<i>&amp;"
    cluster.create_collection("orders")
    for n in range(30):
        cluster.upsert(f"{evil}{n:02}", {field: evil}, xattrs={"a": evil}, collection="orders")
    cluster.upsert("large", b"x" * 5_000_000)
    for options in ({}, {"document_schema": f"`{field}` STRING"}, {"value_format": "string"}):
        stream = client.stream(
            until="now", include="xattrs", batch=dcp_rs.BatchPolicy(linger=1), **options
        )
        for batch in stream:
            page = Page()
            shown = batch._repr_html_()
            page.feed(shown)
            assert set(page.tags) <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
            assert page.tags.count("tr") == 1 + min(len(batch), 10)
            assert len(shown) < 30_000
            if len(batch) > 10:
                assert evil in "".join(page.text)
                assert f"… {len(batch) - 10} more rows" in page.text
            if "document_schema" in options:
                assert field in page.text


def test_many_columns_are_cut_short(cluster, client):
    fields = ", ".join(f"a{n} STRING" for n in range(500))
    cluster.upsert("key", {"a1": "x" * 1000})
    with client.stream(until="now", document_schema=fields) as stream:
        batch = next(stream)
        shown = [repr(batch), repr(stream), repr(dcp_rs.Schema(document_schema=fields))]
    for each in shown:
        assert len(each) < 250
        assert re.search(r"… 49\d more|… 50\d more", each)
    page = batch._repr_html_()
    assert len(page) < 5_000
    assert page.count("<td>") == page.count("<th>") - 1 == 20
    assert " more columns" in page


def test_a_repr_says_what_is_closed(cluster):
    client = cluster.connect()
    stream = client.stream()
    address = cluster.connection_string
    assert repr(client) == f"<dcp_rs.Client {address} bucket='default'>"
    assert repr(stream).startswith("<dcp_rs.ChangeStream columns=[op, key, value,")
    stream.close()
    client.close()
    assert repr(client) == f"<dcp_rs.Client closed {address} bucket='default'>"
    assert repr(stream).startswith("<dcp_rs.ChangeStream closed columns=[op, key")
    with testing.EmbeddedCluster(vbuckets=4) as other:
        shown = f"<dcp_rs.testing.EmbeddedCluster {other.connection_string} bucket='default'"
        assert repr(other) == f"{shown} vbuckets=4>"
    assert repr(other) == "<dcp_rs.testing.EmbeddedCluster closed bucket='default' vbuckets=4>"


def test_every_repr_is_short_and_survives_a_fork(cluster, client, tmp_path):
    cluster.upsert("key", {"a": "secret"})
    with client.stream(until="now") as stream:
        batch = next(stream)
        store = dcp_rs.MemoryStore()
        assert repr(store) == "<dcp_rs.MemoryStore empty>"
        store.save(batch.checkpoint)
        planned = planner.Planner(client)
        shown = [
            client, client.options, stream, batch, batch[:0], batch.checkpoint, store, cluster,
            dcp_rs.FileStore(tmp_path / "f"), dcp_rs.Schema(), debug.Decoder(), planned,
        ]  # fmt: skip
        for each in shown:
            assert len(repr(each)) < 250
            assert not re.search("0x[0-9a-f]{6}|secret", repr(each)), "no repr of its own"
        child = os.fork()
        if child == 0:
            texts = [repr(each) for each in shown]
            os._exit(sum("of another process" in text for text in texts))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
