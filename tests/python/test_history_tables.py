"""Histories: tables with a row for each version of a document."""

import datetime as dt
import json
import threading
import time

import pyarrow as pa
import pytest

import dcp_rs
import replicas
import versions
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import history
from dcp_rs.replication.changes import Layout
from dcp_rs.testing import EmbeddedCluster


@pytest.fixture
def cluster():
    with EmbeddedCluster(vbuckets=4, keeps_history=True) as running:
        running.create_collection("_default.other")
        yield running


@pytest.fixture(params=replicas.HISTORIES)
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture
def duck(request, tmp_path):
    return replicas.make("duckdb-history", request, tmp_path)


def rows_of(replica, key):
    """Gives the rows of a document in the order of their seqnos."""
    return sorted(
        (row for row in replica.rows() if row["key"] == key), key=lambda row: row["seqno"]
    )


def values(rows):
    return [json.loads(row["value"])["n"] for row in rows]


def current(replica):
    return {
        row["key"]: json.loads(row["value"])["n"] for row in replica.rows() if row["is_current"]
    }


def test_a_version_ends_with_the_next_or_with_its_document(cluster, replica):
    ledger = versions.Ledger(cluster, keeps_history=True)
    for n in range(3):
        ledger.upsert("a", {"n": n})
    replicas.replicate(cluster, replica)
    ledger.upsert("a", {"n": 3})
    ledger.remove("a", None)
    ledger.upsert("a", {"n": 4})
    ledger.upsert("gone", {"n": 0})
    token = cluster.expire("gone")
    ledger._note(token, "gone", None, None)
    replicas.replicate(cluster, replica)
    ledger.check(replica.rows())
    assert values(rows_of(replica, "a")) == [0, 1, 2, 3, 4]
    assert [row["is_current"] for row in rows_of(replica, "a")] == [False] * 4 + [True]
    assert current(replica) == {"a": 4}
    assert all(row["history"] for row in replica.rows())


def test_without_change_history_the_newest_of_several_versions_is_a_row(replica):
    with EmbeddedCluster(vbuckets=1) as cluster:
        for n in range(3):
            cluster.upsert("a", {"n": n})
        replicas.replicate(cluster, replica)
        cluster.upsert("a", {"n": 3})
        replicas.replicate(cluster, replica)
        first, second = rows_of(replica, "a")
        assert values([first, second]) == [2, 3]
        assert first["valid_to"] == second["valid_from"]
        assert not first["history"]


def test_the_version_before_one_that_was_lost_is_open_again_at_once(replica):
    """Not only when it is read again, which may be many commits later."""
    with EmbeddedCluster(vbuckets=1, keeps_history=True) as cluster:
        ledger = versions.Ledger(cluster, keeps_history=True)
        for n in range(2):
            for key in range(6):
                ledger.upsert(f"key_{key}", {"n": n})
        replicas.replicate(cluster, replica)
        cluster.roll_back(0, 6)
        ledger.lose(0, 6)
        seen = []

        def look(_progress):
            seen.append(sorted(row["key"] for row in replica.rows() if row["is_current"]))

        # The first has the rollback only, and the failover log of now is not known.
        replicas.replicate(cluster, replica, commit_rows=1, on_progress=look)
        assert len(seen) > 6
        assert seen == [sorted(f"key_{key}" for key in range(6))] * len(seen)
        ledger.check(replica.rows())


def test_what_a_vbucket_lost_that_has_nothing_left_ends_and_goes_with_its_next_change(replica):
    with EmbeddedCluster(vbuckets=1, keeps_history=True) as cluster:
        for n in range(2):
            cluster.upsert("a", {"n": n})
        replicas.replicate(cluster, replica)
        cluster.roll_back(0, 0)
        replicas.replicate(cluster, replica)
        # Whether its branch was lost, or deletions were purged of all that it had, is not known.
        assert [row["is_current"] for row in replica.rows()] == [False, False]
        cluster.upsert("b", {"n": 3})
        assert replicas.replicate(cluster, replica).generation == 1
        assert [row["key"] for row in replica.rows()] == ["b"]


def test_what_a_rollback_takes_back_before_it_is_committed_is_no_row(request, tmp_path):
    # Which commits only once it is due, unlike a database.
    replica = replicas.make("delta-history", request, tmp_path)
    with EmbeddedCluster(vbuckets=1, keeps_history=True) as cluster:
        ledger = versions.Ledger(cluster, keeps_history=True)
        stop = threading.Event()

        def follow():
            replicas.replicate(cluster, replica, once=False, stop=stop, commit_interval=60.0)

        thread = threading.Thread(target=follow)
        ledger.upsert("a", {"n": 0})
        replicas.replicate(cluster, replica)
        thread.start()
        try:
            for n in range(1, 3):
                seqno = ledger.upsert("a", {"n": n}).seqno
                ledger.upsert("b", {"n": n})
                time.sleep(0.3)
                cluster.roll_back(0, seqno)
                ledger.lose(0, seqno)
                ledger.upsert("c", {"n": n})
                time.sleep(0.3)
        finally:
            stop.set()
            thread.join()
        replicas.replicate(cluster, replica)
        ledger.check(replica.rows())


def test_versions_that_are_read_again_are_no_rows_again(cluster, replica):
    """As after a purge, of which a server tells by a rollback to 0."""
    ledger = versions.Ledger(cluster, keeps_history=True)
    for n in range(4):
        for key in ("a", "b", "c", "d"):
            ledger.upsert(key, {"n": n})
    replicas.replicate(cluster, replica)
    before = {(row["key"], row["seqno"]): row for row in replica.rows()}
    for key in ("a", "b"):
        ledger.remove(key, None)
        ledger.upsert(f"{key}_after", {"n": 9})
    cluster.persist()
    for vbucket, high in cluster.high_seqnos().items():
        if high:
            cluster.purge(vbucket, high - 1)
    begun = dt.datetime.now(dt.UTC)
    done = replicas.replicate(cluster, replica)
    assert done.rollbacks > 0
    assert done.generation == 1
    rows = {(row["key"], row["seqno"]): row for row in replica.rows()}
    assert before.keys() <= rows.keys(), "what was before a purge stays"
    assert current(replica).keys() == {"c", "d", "a_after", "b_after"}
    # When it was removed is not known any more.
    swept = [row for row in rows.values() if row["valid_to"] and row["valid_to_seqno"] is None]
    assert all(row["valid_to"] >= begun for row in swept)
    for place in before:
        assert rows[place]["valid_from"] == before[place]["valid_from"]


def test_what_a_dropped_collection_had_ends_and_stays(cluster, replica):
    ledger = versions.Ledger(cluster, keeps_history=True)
    for n in range(2):
        ledger.upsert("a", {"n": n}, "_default.other")
        ledger.upsert("b", {"n": n})
    replicas.replicate(cluster, replica)
    ledger.end("_default.other", cluster.drop_collection)
    replicas.replicate(cluster, replica)
    ledger.check(replica.rows())
    assert values(rows_of(replica, "a")) == [0, 1]
    assert current(replica) == {"b": 1}


@pytest.mark.parametrize("on_drop", ["empty", "drop", "keep"])
def test_a_dropped_collection_has_its_own_table_as_on_drop_says(
    cluster, request, tmp_path, on_drop
):
    replica = replicas.make_many("duckdb-history", request, tmp_path)
    name = "_default__other"
    cluster.upsert("a", {"n": 1}, collection="_default.other")
    replicas.replicate(cluster, replica, on_drop=on_drop)
    cluster.drop_collection("_default.other")
    replicas.replicate(cluster, replica, on_drop=on_drop)
    assert (name in replica.names()) == (on_drop != "drop")
    rows = [] if on_drop == "drop" else replica.rows(name)
    assert [row["is_current"] for row in rows] == {"empty": [False], "drop": [], "keep": [True]}[
        on_drop
    ]
    cluster.create_collection("_default.other")
    cluster.upsert("b", {"n": 2}, collection="_default.other")
    replicas.replicate(cluster, replica, on_drop=on_drop)
    assert [row["key"] for row in replica.rows(name) if row["is_current"]] == ["b"]


def test_a_generation_keeps_the_versions_of_the_one_before(cluster, replica):
    """As after other collections were chosen."""
    for n in range(2):
        for key in ("same", "other", "gone"):
            cluster.upsert(key, {"n": n})
    replicas.replicate(cluster, replica, collections="_default._default")
    cluster.upsert("other", {"n": 2})
    cluster.upsert("new", {"n": 0}, collection="_default.other")
    done = replicas.replicate(cluster, replica, collections=["_default.*"])
    assert done.generation == 2
    assert values(rows_of(replica, "same")) == [0, 1]
    assert values(rows_of(replica, "other"))[-1] == 2
    assert current(replica) == {"same": 1, "other": 2, "gone": 1, "new": 0}
    cluster.drop_bucket()
    cluster.create_bucket()
    cluster.upsert("same", {"n": 5})
    done = replicas.replicate(cluster, replica, collections=["_default.*"])
    assert done.generation == 3
    assert current(replica) == {"same": 5}
    assert {row["key"] for row in replica.rows()} == {"same", "other", "gone", "new"}


def test_columns_of_documents_grow_with_the_versions(cluster, replica):
    cluster.upsert("a", {"n": 1, "valid_from": "Monday"})
    replicas.replicate(cluster, replica, document_schema="infer")
    cluster.upsert("a", {"n": 2, "more": "x"})
    replicas.replicate(cluster, replica, document_schema="infer")
    rows = [(row["n"], row["doc_valid_from"], row["more"]) for row in rows_of(replica, "a")]
    assert rows == [(1, "Monday", None), (2, None, "x")]
    assert isinstance(rows_of(replica, "a")[0]["valid_from"], dt.datetime)


def test_columns_of_a_history_are_none_of_documents(cluster, duck):
    for name in ("valid_from", "Valid_To", "is_current", "valid_to_seqno"):
        with pytest.raises(ConfigError, match=f'the column "{name}" would appear twice'):
            replicas.replicate(cluster, duck, document_schema=f"{name} STRING")


def test_a_version_that_was_rejected_is_so_again_and_is_a_gap(cluster, duck):
    schema = {"document_schema": "n BIGINT", "type_conflicts": "reject"}
    seqnos = [cluster.upsert("a", {"n": value}).seqno for value in (1, "one", 3)]
    replicas.replicate(cluster, duck, **schema)
    rejected = cluster.upsert("a", {"n": "four"})
    replicas.replicate(cluster, duck, **schema)
    first, second = rows_of(duck, "a")
    # The CAS of the next one may be of the same microsecond.
    assert first["valid_to"] <= second["valid_from"]
    assert (first["valid_to_seqno"], second["seqno"]) == tuple(seqnos[1:])
    assert (second["is_current"], second["valid_to_seqno"]) == (False, rejected.seqno)
    # That of the earlier one went as the document changed again.
    assert [row["seqno"] for row in duck.reject_rows()] == [rejected.seqno]
    other = next(key for key in map(str, range(99)) if cluster.vbucket_of(key) == rejected.vbucket)
    cluster.upsert(other, {"n": 5})
    replicas.replicate(cluster, duck, **schema)
    cluster.roll_back(rejected.vbucket, rejected.seqno)
    replicas.replicate(cluster, duck, **schema)
    assert [row["seqno"] for row in duck.reject_rows()].count(rejected.seqno) == 1
    assert rows_of(duck, "a")[1] == second


def test_a_reject_is_settled_once_by_several_changes_of_its_document(cluster, replica):
    key = b"session_\xff"
    cluster.upsert(key, {"n": 0})
    replicas.replicate(cluster, replica)
    for n in range(1, 4):
        cluster.upsert(key, {"n": n})
    replicas.replicate(cluster, replica)
    assert replica.rejects() == {("_default._default", key): b'{"n":3}'}
    cluster.upsert(key, {"n": 4})
    cluster.remove(key)
    replicas.replicate(cluster, replica)
    assert replica.rejects() == {}
    assert list(replica.rows()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deletes": "mark"}, "the last version of a removed document stays"),
        ({"reload": [0]}, "a history keeps what it has, and cannot be read again"),
    ],
)
def test_what_a_history_is_not_is_refused(cluster, duck, options, message):
    with pytest.raises(ConfigError, match=message):
        replicas.replicate(cluster, duck, **options)
    assert not duck.path.exists()


def test_targets_without_histories_say_where_they_are(cluster, tmp_path):
    for url in (f"parquet://{tmp_path}/log", f"iceberg://{tmp_path}/lake"):
        with pytest.raises(ConfigError, match="ducklake, postgresql and delta have histories"):
            replicas.replicate(cluster, url, mode="history")


def test_a_target_of_histories_has_to_find_the_newest_rows(cluster):
    class Half:
        modes = frozenset({"history"})
        open = commit = close = None

    with pytest.raises(
        ConfigError, match=r"target: Half lacks newest of dcp_rs\.replication\.Hist"
    ):
        replicas.replicate(cluster, Half(), mode="history")


def test_another_mode_and_other_masks_are_refused(cluster, duck):
    cluster.upsert("a", {"n": 1})
    replicas.replicate(cluster, duck)
    with pytest.raises(ConfigError, match="the target is a history, not a table"):
        replicas.replicate(cluster, duck, mode="table")
    with pytest.raises(ConfigError, match="the history was written with other fields masked"):
        replicas.replicate(cluster, duck, drop_fields=["n"])
    with cluster.connect() as client, pytest.raises(ConfigError, match="is a history, which keeps"):
        dcp_rs.verify(client, duck.url)


def test_rows_that_somebody_removed_are_loaded_and_the_others_stay(cluster, replica):
    for n in range(3):
        cluster.upsert("a", {"n": n})
        cluster.upsert("b", {"n": n})
    replicas.replicate(cluster, replica)
    if isinstance(replica, replicas.InDelta):
        import deltalake

        deltalake.DeltaTable(str(replica.folder)).delete("key = 'a' AND is_current")
    else:
        replica.query("DELETE FROM documents WHERE key = 'a' AND is_current")
    assert replicas.replicate(cluster, replica).generation == 2
    assert current(replica) == {"a": 2, "b": 2}
    assert values(rows_of(replica, "b")) == [0, 1, 2]


# ----- what is worked out -----

LAYOUT = Layout.of("history", None, more=("history",))


def at(seconds):
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)


def change(key, seqno, seconds, op="mutation", **others):
    given = {"op": op, "key": key, "seqno": seqno, "timestamp": at(seconds), "vbucket": 0}
    return given | {"collection_id": 8, "cas": seqno * 10, "epoch": 0, "datatype": "json"} | others


def work_out(changes, known=(), lost=None, generation=1):
    table = pa.Table.from_pylist(changes, LAYOUT.read)
    table = table.set_column(
        table.schema.get_field_index("key"), "key", table["key"].cast("string")
    )
    schema = history.KNOWN.set(1, pa.field("key", pa.string()))
    found = history.versions(
        history.documents(table),
        pa.Table.from_pylist(list(known), schema),
        history.Ends(table, keeps_dropped=False),
        lost or {},
        generation=generation,
        at=at(1000),
    )
    kept = ["key", "seqno", "valid_from", "valid_to", "is_current", "valid_to_seqno"]
    return found.rows.select(kept).to_pylist(), found.changed.to_pylist()


def intervals(rows):
    def seconds(time):
        return None if time is None else (time - at(0)).total_seconds()

    return [(row["seqno"], seconds(row["valid_from"]), seconds(row["valid_to"])) for row in rows]


def row(key, seqno, begins, ends=None, ended_by=None, **others):
    given = {"collection_id": 8, "key": key, "generation": 1, "epoch": 0, "vbucket": 0}
    given |= {
        "seqno": seqno,
        "cas": seqno * 10,
        "valid_from": at(begins),
        "is_current": ends is None,
    }
    given |= {"valid_to": None if ends is None else at(ends), "valid_to_seqno": ended_by}
    return given | others


def test_a_cas_that_goes_backwards_makes_an_interval_empty_not_one_that_overlaps():
    # A document that was restored has an old CAS; of many versions, each may.
    rows, _ = work_out(
        [
            change("a", seqno, seconds)
            for seqno, seconds in [(1, 50), (2, 90), (3, 10), (4, 20), (5, 95), (6, 60)]
        ]
    )
    assert intervals(rows) == [
        (1, 50, 90),
        (2, 90, 90),
        (3, 90, 90),
        (4, 90, 95),
        (5, 95, 95),
        (6, 95, None),
    ]
    rows, changed = work_out([change("a", 2, 10)], [row("a", 1, 50)])
    assert intervals(rows) == [(2, 50, None)]
    assert changed[0]["valid_to"] == at(50)
    rows, _ = work_out([change("a", 3, 10)], [row("a", 1, 50, 70, 2)])
    assert intervals(rows) == [(3, 70, None)], "not before the deletion"


def test_a_change_without_a_cas_is_as_old_as_can_be():
    rows, _ = work_out([change("a", 1, 0, timestamp=None), change("a", 2, 5)])
    assert rows[0]["valid_from"] == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert intervals(rows)[1] == (2, 5, None)


def test_an_end_of_which_no_time_is_known_is_not_after_the_next_version():
    event = json.dumps({"event": "BeginCollection", "collection_id": "8", "flush_uid": "3"})
    flush = change(b"", 2, 0, "system_event", value=event, timestamp=None)
    rows, _ = work_out([change("a", 1, 10), flush])
    assert intervals(rows) == [(1, 10, 1000)]
    rows, _ = work_out([change("a", 1, 10), flush, change("a", 3, 30)])
    assert intervals(rows) == [(1, 10, 30), (3, 30, None)]
    assert rows[0]["valid_to_seqno"] is None
    rows, changed = work_out([change("a", 3, 30)], [row("a", 1, 10, 900)])
    assert intervals(rows) == [(3, 30, None)]
    assert (changed[0]["valid_to"], changed[0]["is_current"]) == (at(30), False)


def test_what_is_known_is_left_out_and_what_was_lost_is_open_again():
    known = [row("a", 5, 10)]
    assert work_out([change("a", 4, 9), change("a", 5, 10)], known) == ([], [])
    rows, changed = work_out([change("a", 5, 10, epoch=2)], known)
    assert (rows, changed[0]["epoch"], changed[0]["is_current"]) == ([], 2, True)
    # The version 8 was lost: 5 is open again, and ends by another one.
    rows, changed = work_out([change("a", 7, 30)], [row("a", 5, 10, 20, 8)], {0: 6})
    assert intervals(rows) == [(7, 30, None)]
    assert (changed[0]["valid_to"], changed[0]["valid_to_seqno"]) == (at(30), 7)


def left_of(work, changes):
    table = pa.Table.from_pylist(changes, LAYOUT.read)
    return [(row["op"][0], row["seqno"], row["epoch"]) for row in work(table).to_pylist()]


def test_of_changes_before_a_rollback_those_that_it_takes_back_are_left_out():
    def rollback(epoch, vbucket=0):
        return change(b"", 0, 0, "rollback", epoch=epoch, vbucket=vbucket)

    before = [change(b"a", 5, 0), change(b"b", 8, 0), change(b"c", 9, 0, vbucket=1)]
    again = [change(b"a", 5, 0, epoch=1), change(b"b", 7, 0, epoch=1)]
    changes = [*before, rollback(1), *again]
    kept = [("m", 5, 0), ("m", 9, 0), ("r", 0, 1), ("m", 5, 1), ("m", 7, 1)]
    assert left_of(lambda table: history.without_lost(table, {0: 6}), changes) == kept
    assert left_of(lambda table: history.without_lost(table, {}), changes)[1] == ("m", 8, 0)
    # Whether a change between two is on the branch of now is not known, and it comes again.
    twice = [*changes, rollback(2), change(b"a", 5, 0, epoch=2)]
    kept = [("m", 5, 0), ("m", 8, 0), ("m", 9, 0), ("r", 0, 2), ("m", 5, 2)]
    assert left_of(lambda table: history.of_one_branch(table, ()), twice) == kept
    assert left_of(lambda table: history.of_one_branch(table, {0}), twice) == kept[2:]


@pytest.mark.parametrize(
    ("old", "new", "seqno"),
    [
        ([("a", 0)], [("a", 0)], None),
        ([("a", 0)], [("b", 7), ("a", 0)], 7),
        ([("b", 5), ("a", 0)], [("c", 8), ("a", 0)], 5),
        ([("b", 9), ("a", 0)], [("c", 8), ("a", 0)], 8),
        ([("b", 5), ("a", 0)], [("c", 9), ("b", 5), ("a", 0)], 9),
        ([("a", 0)], [("z", 0)], 0),
    ],
)
def test_branches_are_shared_up_to_where_the_first_of_them_ends(old, new, seqno):
    assert history.shared_until(old, new) == seqno
