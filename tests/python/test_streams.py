"""Reading streams to their end, in part, and as Arrow."""

import gc
import threading
import time
from pathlib import Path

import pytest

import dcp_rs
from dcp_rs.exceptions import ClosedError, ConfigError
from reading import rows_of


def keys(stream):
    return sorted(row["key"] for row in rows_of(stream))


def test_now_ends_with_what_is_there(cluster, client, fill):
    documents = fill(100)
    assert keys(client.stream(until="now")) == sorted(documents)
    cluster.upsert("later", b"1")
    assert len(rows_of(client.stream(until="now"))) == 101


def test_an_empty_bucket_has_no_batches(client):
    stream = client.stream(until="now")
    assert list(stream) == []
    assert list(stream) == []
    assert stream.read_all().num_rows == 0


def test_an_endless_stream_delivers_what_comes_later(cluster, client):
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        for n in range(3):
            token = cluster.upsert(f"key_{n}", b"1")
            (row,) = next(stream).rows()
            assert (row["key"], row["seqno"]) == (f"key_{n}", token.seqno)


def test_latest_passes_over_what_is_there(cluster, client, fill):
    fill(50)
    with client.stream(start="latest", batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        cluster.upsert("new", b"1")
        (row,) = next(stream).rows()
    assert row["key"] == "new"


def test_given_seqnos_stream_the_vbuckets_they_name(client, fill):
    fill(200)
    high = client.high_seqnos()
    rows = rows_of(client.stream(until={3: high[3], 5: high[5]}))
    assert {row["vbucket"] for row in rows} == {3, 5}
    assert max(row["seqno"] for row in rows if row["vbucket"] == 3) == high[3]


@pytest.mark.parametrize(
    "options", [{"until": {3: 1, 16: 1}}, {"until": [(16, 1)]}, {"vbuckets": [3, 16]}]
)
def test_a_vbucket_that_does_not_exist_is_refused_by_the_options_name(client, options):
    (name,) = options
    told = f"^{name}: vBucket 16 does not exist: the bucket has 16 vBuckets, from 0 to 15$"
    with pytest.raises(ConfigError, match=told) as raised:
        client.stream(**options)
    assert raised.value.vbucket == 16


def test_vbuckets_can_be_chosen(cluster, client, fill):
    documents = fill(200)
    expected = sorted(key for key in documents if cluster.vbucket_of(key) in {1, 2})
    assert keys(client.stream(until="now", vbuckets=range(1, 3))) == expected
    parts = [keys(client.stream(until="now", vbuckets=[n])) for n in range(16)]
    assert sorted(key for part in parts for key in part) == sorted(documents)


def test_batches_are_cut_by_rows(client, fill):
    fill(100)
    sizes = [
        batch.num_rows for batch in client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=9))
    ]
    assert max(sizes) <= 9
    assert sum(sizes) == 100


def test_batches_are_cut_by_bytes(client, fill):
    fill(100, size=10_000)
    batches = list(client.stream(until="now", batch=dcp_rs.BatchPolicy(max_bytes=50_000)))
    assert sum(batch.num_rows for batch in batches) == 100
    assert max(batch.nbytes for batch in batches) < 100_000


def test_both_nodes_are_read(client):
    nodes = client.vbuckets_by_node()
    assert len(nodes) == 2
    assert sorted(vb for vbuckets in nodes.values() for vb in vbuckets) == list(range(16))


def test_more_than_ten_windows_are_read_while_every_batch_is_kept(cluster, fill):
    window = 64 * 1024
    documents = fill(400, size=4000)
    total = sum(map(len, documents.values()))
    assert total > 10 * 2 * window
    with cluster.connect(buffer_size=window) as client:
        table = client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=10)).read_all()
    assert sum(len(value.as_py()) for value in table["value"]) == total
    assert sorted(table["key"].to_pylist()) == sorted(documents)


def test_one_document_larger_than_the_window_is_read(cluster):
    cluster.upsert("large", b"x" * 3_000_000)
    cluster.upsert("small", b"y")
    with cluster.connect(buffer_size=64 * 1024) as client:
        table = client.stream(until="now").read_all()
    assert sorted(len(value.as_py()) for value in table["value"]) == [1, 3_000_000]


def test_arrow_libraries_read_the_stream_as_it_is(client, fill):
    import pyarrow as pa

    documents = fill(120)
    table = pa.table(client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=10)))
    assert sorted(table["key"].to_pylist()) == sorted(documents)
    reader = pa.RecordBatchReader.from_stream(
        client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=10))
    )
    assert reader.read_all().num_rows == 120


def test_polars_reads_the_stream(client, fill):
    polars = pytest.importorskip("polars")
    documents = fill(50)
    frame = polars.DataFrame(client.stream(until="now"))
    assert sorted(frame["key"].to_list()) == sorted(documents)
    assert frame.schema["timestamp"] == polars.Datetime("us", "UTC")


def test_duckdb_reads_the_stream(client, fill):
    duckdb = pytest.importorskip("duckdb")
    import pyarrow as pa

    fill(50)
    changes = pa.RecordBatchReader.from_stream(client.stream(until="now"))  # noqa: F841
    query = "select op, count(*), count(distinct key) from changes group by op"
    assert duckdb.sql(query).fetchall() == [("mutation", 50, 50)]


def test_pandas_reads_the_stream(client, fill):
    pandas = pytest.importorskip("pandas")
    fill(20)
    with client.stream(until="now") as stream:
        with pytest.raises(TypeError, match="read_all"):
            pandas.DataFrame(stream)
        frame = stream.read_all().to_pandas()
    assert frame["op"].eq("mutation").all()
    assert str(frame["timestamp"].dt.tz) == "UTC"


def test_an_arrow_stream_is_handed_over_once(client, fill):
    import pyarrow as pa

    fill(10)
    stream = client.stream(until="now")
    assert pa.table(stream).num_rows == 10
    with pytest.raises(ClosedError, match="open another"):
        pa.table(stream)
    with pytest.raises(ClosedError, match="open another"):
        next(stream)


def test_what_an_iteration_left_can_be_handed_over(client, fill):
    import pyarrow as pa

    fill(100)
    stream = client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=10))
    first = next(stream).num_rows
    assert 0 < first <= 10
    assert pa.table(stream).num_rows == 100 - first


def test_a_library_that_stops_early_ends_the_stream(client, fill):
    import pyarrow as pa

    fill(200)
    reader = pa.RecordBatchReader.from_stream(client.stream(batch=dcp_rs.BatchPolicy(max_rows=10)))
    assert reader.read_next_batch().num_rows <= 10
    del reader
    gc.collect()
    assert sum(batch.num_rows for batch in client.stream(until="now")) == 200


def test_batches_outlive_stream_client_and_producer():
    with dcp_rs.testing.EmbeddedCluster() as cluster:
        cluster.upsert("a", b"x" * 100_000)
        with cluster.connect() as client, client.stream(until="now") as stream:
            (batch,) = list(stream)
    gc.collect()
    (row,) = batch.rows()
    assert row["value"] == b"x" * 100_000


def test_a_closed_stream_says_so(client, fill):
    fill(10)
    stream = client.stream()
    stream.close()
    stream.close()
    with pytest.raises(ClosedError):
        next(stream)


def test_a_closed_client_opens_no_stream(cluster):
    client = cluster.connect()
    client.close()
    with pytest.raises(ClosedError):
        client.stream()


def test_another_thread_can_close_a_stream_that_waits(client):
    stream = client.stream()
    threading.Timer(0.2, stream.close).start()
    begun = time.monotonic()
    with pytest.raises((StopIteration, ClosedError)):
        next(stream)
    assert time.monotonic() - begun < 2


def test_other_threads_run_while_one_waits(client):
    counted = [0]
    done = threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    stream = client.stream()
    threading.Timer(0.3, stream.close).start()
    with pytest.raises((StopIteration, ClosedError)):
        next(stream)
    done.set()
    thread.join()
    assert counted[0] > 50


def test_numbers_of_a_stream(client, fill):
    fill(100)
    stream = client.stream(until="now")
    assert sum(batch.num_rows for batch in stream) == 100
    stats = stream.stats()
    assert (stats.complete, stats.streaming, stats.failed) == (16, 0, 0)
    assert stats.rows == 100


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "start",
            "earlyest",
            "^start: must be 'earliest', 'latest', a Checkpoint or a .*'earlyest'$",
        ),
        ("start", "here.json", "not 'here.json': read on from a file with dcp_rs.FileStore"),
        (
            "start",
            Path("here"),
            r"not PosixPath: read on from a file with dcp_rs.FileStore\('here'\)",
        ),
        ("start", 3, "start: must be"),
        ("until", "never", "until: must be 'now', not 'never'$"),
        ("until", "Now", "until: must be 'now', not 'Now'; did you mean 'now'?"),
        ("keys", "\udcff", "keys: cannot be encoded as UTF-8"),
        ("collections", ["a.b", "\udcff"], "collections: cannot be encoded as UTF-8"),
        ("until", {}, "until: names no vBucket"),
        ("until", {1: -1}, "until: seqno: -1 is not from 0"),
        ("until", 5, "until: must be"),
        ("vbuckets", [], "vbuckets: names no vBucket"),
        ("vbuckets", 5, "vbuckets: must be a list of vBuckets, not int"),
        ("vbuckets", "0-3", r"vbuckets: must be .*, such as range\(64\), or a Share, not str"),
        ("vbuckets", ["1"], "vbuckets: must be a whole number, not str"),
        ("vbuckets", [70_000], "vbuckets: 70000 is not from 0"),
        (
            "columns",
            "fully",
            "'basic', 'full' or a list of column names, not 'fully'; did you mean 'full'",
        ),
        ("columns", None, "columns: must be .* a list of column names, not NoneType"),
        ("columns", ["key", 5], "columns: must be text, not int"),
        ("key_type", "bytes", "key_type: must be 'string' or 'binary', not 'bytes'$"),
        (
            "include",
            "xattr",
            "include: must be 'xattrs', 'history', .* not 'xattr'; did you mean 'xattrs'",
        ),
        ("include", True, "include: must be a word or a list of words, not bool"),
        ("include", ["history", None], "include: must be text, not NoneType"),
        ("collections", 5, "collections: must be a name or a list of names, not int"),
        ("collections", [], "collections: names no collection"),
        ("batch", 10, "batch: must be a BatchPolicy, not int"),
        ("on_rollback", "raise", "on_rollback: must be 'emit', 'fail' or 'resync', not 'raise'"),
    ],
)
def test_a_wrong_option_is_named(client, option, value, message):
    with pytest.raises(ConfigError, match=message):
        client.stream(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_rows", 0, "max_rows: 0 is not from 1"),
        ("max_rows", True, "max_rows: must be a whole number, not bool"),
        ("max_rows", 1 << 70, "max_rows: 1180591620717411303424 is not from 1 to 10000000"),
        ("max_bytes", 1 << 30, "max_bytes: 1073741824 is not from 1 to 16777216"),
        ("linger", -1, "linger: -1 is not from 0"),
        ("linger", float("nan"), "linger: nan is not from 0 to 3600 seconds"),
        ("linger", "1s", "linger: must be a number of seconds"),
    ],
)
def test_a_wrong_limit_of_a_batch_is_named(option, value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        dcp_rs.BatchPolicy(**{option: value})


def test_iterators_are_read_once(cluster, client):
    cluster.upsert("a", {})
    cluster.upsert("b", {})
    given = {
        "vbuckets": range(16), "collections": ["_default"], "keys": ["a"], "ops": ["mutation"],
        "columns": ["key", "xattrs"], "include": ["xattrs"],
    }  # fmt: skip
    options = {name: iter(values) for name, values in given.items()}
    rows = rows_of(client.stream(until="now", **options))
    assert rows == [{"key": "a", "xattrs": None}]


def test_a_vbucket_there_is_not_is_refused(client):
    with pytest.raises(ConfigError, match="vb"):
        list(client.stream(until="now", vbuckets=[16]))
