"""Comparing tables with their bucket, and loading again what differs."""

import json
import threading

import deltalake
import duckdb
import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.cli import _program
from dcp_rs.exceptions import ConfigError
from replicas import Written

COLLECTIONS = ("_default._default", "inventory.airline", "inventory.hotel")


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=8) as running:
        running.create_scope("inventory")
        for name in COLLECTIONS[1:]:
            running.create_collection(name)
        yield running


@pytest.fixture
def written(cluster):
    found = Written(cluster)
    for number in range(40):
        for collection in COLLECTIONS:
            found.upsert(f"key_{number}", {"n": number}, collection)
    for number in range(0, 40, 8):
        cluster.remove(f"key_{number}", collection="inventory.hotel")
    return found


@pytest.fixture(params=[f"{kind}-table" for kind in replicas.TABLES])
def many(request, tmp_path):
    return replicas.make_many(request.param, request, tmp_path)


@pytest.fixture(params=[f"{kind}-table" for kind in replicas.TABLES])
def single(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture
def database(tmp_path):
    return replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")


def verify(cluster, replica, **options):
    with cluster.connect() as client:
        return dcp_rs.verify(client, replica.url, **options)


def damage(path, table="inventory__hotel"):
    """Has a table lack a document, have one too many, and an older and another version of two."""
    with duckdb.connect(path) as connection:
        connection.sql(f"UPDATE {table} SET key = 'nobody' WHERE key = 'key_1'")
        connection.sql(f"UPDATE {table} SET seqno = seqno - 1 WHERE key = 'key_2'")
        connection.sql(f"UPDATE {table} SET cas = cas + 1 WHERE key = 'key_3'")


def of_kinds(found):
    return (found.missing, found.extra, found.older, found.other)


@pytest.mark.usefixtures("written")
def test_tables_that_are_in_step_are_equal(cluster, many):
    replicas.replicate(cluster, many)
    found = verify(cluster, many)
    assert found.is_equal
    assert {name: (each.documents, each.rows) for name, each in found.tables.items()} == {
        "_default___default": (40, 40),
        "inventory__airline": (40, 40),
        "inventory__hotel": (35, 35),
    }
    assert found.tables["inventory__hotel"].collection == "inventory.hotel"
    assert found.reload == {}
    found = verify(cluster, many, collections="inventory.h*", vbuckets=[0, 1])
    assert list(found.tables) == ["inventory__hotel"]
    assert 0 < found.tables["inventory__hotel"].documents < 35


def test_an_empty_table_of_an_empty_collection_is_equal(cluster, database):
    cluster.upsert("key", {"n": 1}, collection="inventory.airline")
    replicas.replicate(cluster, database)
    found = verify(cluster, database)
    assert found.is_equal
    assert found.tables["inventory__hotel"].documents == 0


@pytest.mark.parametrize("options", [{}, {"deletes": "mark"}, {"key_type": "binary"}])
def test_one_table_of_a_whole_bucket_is_compared(cluster, written, single, options):
    written.upsert(b"\xff\x00", {"n": 1})
    replicas.replicate(cluster, single, **options)
    cluster.remove("key_1")
    replicas.replicate(cluster, single, **options)
    ((name, found),) = verify(cluster, single).tables.items()
    assert name not in {"", "."}
    assert found.is_equal
    is_rejected = options.get("key_type") != "binary"
    assert (found.documents, found.rejected) == (115, int(is_rejected))
    # A marked row is none of a document.
    marked = 6 if options.get("deletes") == "mark" else 0
    assert found.rows == 115 - is_rejected + marked


def test_what_differs_is_told_apart_and_loaded_again(cluster, written, database):
    replicas.replicate(cluster, database)
    damage(database.database.path)
    found = verify(cluster, database)
    hotel = found.tables["inventory__hotel"]
    assert of_kinds(hotel) == (1, 1, 1, 1)
    assert {each.kind: each.key for each in hotel.examples} == {
        "missing": b"key_1",
        "extra": b"nobody",
        "older": b"key_2",
        "other": b"key_3",
    }
    older = next(each for each in hotel.examples if each.kind == "older")
    assert older.seqno == older.bucket_seqno - 1
    assert {each.vbucket for each in hotel.examples} == set(hotel.vbuckets)
    assert found.reload == {"inventory.hotel": list(hotel.vbuckets)}
    assert found.tables["inventory__airline"].is_equal
    assert verify(cluster, database, examples=2).tables["inventory__hotel"].missing == 1
    assert len(verify(cluster, database, examples=2).tables["inventory__hotel"].examples) == 2
    done = replicas.replicate(cluster, database)
    assert done.changes == 0, "replicate itself does not notice"
    done = replicas.replicate(cluster, database, reload=found.reload)
    assert done.tables["inventory__airline"].changes == 0, "nothing else is read again"
    assert 0 < done.tables["inventory__hotel"].changes < 40
    assert done.generation == 1
    assert verify(cluster, database).is_equal
    assert database.documents() == written.documents()


def test_a_whole_collection_is_loaded_again_on_demand(cluster, written, many):
    replicas.replicate(cluster, many)
    done = replicas.replicate(cluster, many, reload={"inventory.hotel": None})
    assert done.tables["inventory__hotel"].changes == 40, "with what was removed"
    assert done.tables["inventory__airline"].changes == 0
    assert verify(cluster, many).is_equal
    assert many.documents() == written.documents()
    assert {row["epoch"] for row in many.rows("inventory__hotel")} == {1}


def test_a_vbucket_of_one_table_is_loaded_again(cluster, written, single):
    replicas.replicate(cluster, single)
    done = replicas.replicate(cluster, single, reload=[3])
    assert 0 < done.changes < 120 / 4
    assert {row["vbucket"] for row in single.rows() if row["epoch"] == 1} == {3}
    assert single.documents() == written.documents()


@pytest.mark.usefixtures("written")
def test_a_row_that_is_twice_in_a_table_without_a_key_is_extra(cluster, tmp_path):
    replica = replicas.make_many("delta-table", None, tmp_path)
    replicas.replicate(cluster, replica)
    folder = str(replica.database.folder / "inventory__hotel")
    table = deltalake.DeltaTable(folder)
    query = "SELECT * FROM t WHERE key = 'key_2'"
    row = pa.table(deltalake.QueryBuilder().register("t", table).execute(query))
    deltalake.write_deltalake(folder, row, mode="append")
    found = verify(cluster, replica).tables["inventory__hotel"]
    assert of_kinds(found) == (0, 1, 0, 0)
    assert found.vbuckets == (row["vbucket"][0].as_py(),)


def test_writes_meanwhile_do_not_differ(cluster, written, many):
    replicas.replicate(cluster, many)
    for number in range(10):
        written.upsert(f"key_{number}", {"n": -1}, "inventory.airline")
        written.upsert(f"new_{number}", {"n": -1}, "inventory.airline")
    cluster.remove("key_20", collection="inventory.airline")
    found = verify(cluster, many)
    assert found.is_equal
    assert found.tables["inventory__airline"].later == 21
    assert found.tables["inventory__airline"].documents == 29
    stop = threading.Event()

    def write():
        for number in range(10**6):
            if stop.is_set():
                return
            cluster.upsert(f"key_{number % 60}", {"n": number}, collection="inventory.hotel")

    writing = threading.Thread(target=write)
    writing.start()
    following = threading.Thread(
        target=replicas.replicate,
        args=(cluster, many),
        kwargs={"once": False, "stop": stop, "commit_interval": 0.05},
    )
    following.start()
    try:
        for _ in range(5):
            found = verify(cluster, many)
            assert found.is_equal, found
    finally:
        stop.set()
        writing.join()
        following.join()


@pytest.mark.usefixtures("written")
def test_a_collection_that_was_dropped_or_flushed_since_is_not_compared(cluster, database):
    replicas.replicate(cluster, database)
    cluster.flush_collection("inventory.airline")
    cluster.drop_collection("inventory.hotel")
    found = verify(cluster, database)
    assert of_kinds(found.tables["inventory__airline"]) == (0, 0, 0, 0)
    assert found.tables["inventory__hotel"].not_compared == "its collection was dropped"
    assert not found.is_equal


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("on_drop", ["empty", "keep"])
def test_the_table_of_a_dropped_collection_is_equal_once_it_is_empty(
    cluster, many, on_drop, monkeypatch, capsys
):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    replicas.replicate(cluster, many, on_drop=on_drop)
    cluster.drop_collection("inventory.hotel")
    replicas.replicate(cluster, many, on_drop=on_drop)
    found = verify(cluster, many)
    hotel = found.tables["inventory__hotel"]
    rows = 0 if on_drop == "empty" else 35
    assert (hotel.is_dropped, hotel.rows, hotel.documents) == (True, rows, 0)
    assert found.is_equal is hotel.is_equal is (rows == 0)
    assert not found.tables["inventory__airline"].is_dropped
    status = _program.run(
        ["verify", f"{cluster.connection_string}/default", many.url, "--username=Administrator"]
    )
    assert status == (3 if rows else 0)
    by_table = {
        each["table"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert by_table["inventory__hotel"]["note"] == "its collection was dropped"
    assert by_table["inventory__airline"]["note"] == ""


@pytest.mark.usefixtures("written")
def test_a_reject_of_a_dropped_collection_is_a_row_that_is_left(cluster, database):
    options = {"document_schema": "n BIGINT", "type_conflicts": "reject"}
    cluster.create_collection("inventory.bad")
    cluster.upsert("a", {"n": "text"}, collection="inventory.bad")
    replicas.replicate(cluster, database, on_drop="keep", **options)
    cluster.drop_collection("inventory.bad")
    assert not verify(cluster, database).is_equal
    replicas.replicate(cluster, database, **options)
    assert verify(cluster, database).tables["inventory__bad"].is_equal


def test_changes_that_a_failover_took_back_are_told(cluster, written, database):
    replicas.replicate(cluster, database)
    cluster.roll_back(2, cluster.high_seqnos()[2] - 3)
    written.upsert("after", {"n": 1})
    found = verify(cluster, database)
    assert found.tables["inventory__hotel"].rolled_back == (2,)
    assert of_kinds(found.tables["inventory__hotel"]) == (0, 0, 0, 0)
    replicas.replicate(cluster, database)
    assert verify(cluster, database).is_equal


@pytest.mark.usefixtures("written")
def test_many_keys_are_compared_in_parts(cluster, database, monkeypatch):
    monkeypatch.setattr("dcp_rs.replication.comparing._ROWS", 10)
    monkeypatch.setattr("dcp_rs.replication.comparing._BYTES", 2_000)
    replicas.replicate(cluster, database)
    damage(database.database.path)
    found = verify(cluster, database)
    assert of_kinds(found.tables["inventory__hotel"]) == (1, 1, 1, 1)
    assert found.tables["inventory__airline"].documents == 40


@pytest.mark.usefixtures("written")
def test_what_cannot_be_compared_is_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match="only tables are compared"):
        verify(cluster, replicas.InParquet(tmp_path))
    with pytest.raises(ConfigError, match="there is no database"):
        verify(cluster, replicas.InDuckDB(tmp_path))
    log = replicas.InDuckDB(tmp_path)
    log.mode = "log"
    replicas.replicate(cluster, log)
    with pytest.raises(ConfigError, match=r"^vbuckets: vBucket 9999 does not exist"):
        verify(cluster, log, vbuckets=[9999])
    with pytest.raises(ConfigError, match="is a log"):
        verify(cluster, log)
    with pytest.raises(ConfigError, match="a log keeps what it has") as raised:
        replicas.replicate(cluster, log, reload=[1])
    assert raised.value.option == "reload"
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path / ".."), "duckdb", "table")
    replica.url = f"duckdb://{tmp_path}/other.duckdb"
    for wrong, reason in [
        ("x", "must be vBuckets"),
        ({"no.such": None}, "no table is of no.such"),
        ([9999], "vBucket 9999 does not exist"),
        ({"no.such": [9999]}, "vBucket 9999 does not exist"),
    ]:
        with pytest.raises(ConfigError, match=reason) as raised:
            replicas.replicate(cluster, replica, reload=wrong)
        assert raised.value.option == "reload"
