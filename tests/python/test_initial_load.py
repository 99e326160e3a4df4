"""The initial load: when it is complete, in which order it comes, and where it goes on."""

import itertools
import time

import duckdb
import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError
from dcp_rs.testing import EmbeddedCluster
from reading import rows_of


def ops(rows):
    return [(row["op"], row["key"]) for row in rows]


def caught_up_events(stream, count=16):
    """The vBuckets of events, which may come a moment after the changes."""
    found, deadline = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += [event.vbucket for event in stream.events() if event.kind == "caught_up"]
        time.sleep(0.01)
    return sorted(found)


def test_every_vbucket_is_caught_up_once(cluster, client, fill):
    fill(40)
    high = cluster.high_seqnos()
    for until in ("now", None):
        with client.stream(until=until, include="system_events") as stream:
            rows, told = [], {}
            for batch in stream:
                rows += batch.rows()
                told = {row["vbucket"]: row for row in rows if row["op"] == "caught_up"}
                if len(told) == 16:
                    break
            assert {vbucket: row["seqno"] for vbucket, row in told.items()} == high
            place = {vbucket: rows.index(row) for vbucket, row in told.items()}
            assert all(
                place[row["vbucket"]] > at for at, row in enumerate(rows) if row["op"] == "mutation"
            )
            assert told[0] | {"vbucket": 0, "seqno": 0} == {
                "op": "caught_up", "key": None, "value": None, "scope": None, "collection": None,
                "vbucket": 0, "seqno": 0, "epoch": 0, "cas": None, "timestamp": None,
            }  # fmt: skip
            if until is None:
                cluster.upsert("another", {})
                more = list(next(stream).rows())
                assert ops(more) == [("mutation", "another")]
            assert caught_up_events(stream) == list(range(16))


def test_an_event_tells_it_without_the_rows(client, fill):
    fill(40)
    with client.stream(until="now") as stream:
        assert {row["op"] for batch in stream for row in batch.rows()} == {"mutation"}
        assert caught_up_events(stream) == list(range(16))


def test_a_stream_from_a_checkpoint_is_caught_up_anew(cluster, client, fill):
    fill(40)
    with client.stream(until="now") as stream:
        for _ in stream:
            pass
    options = {"start": stream.checkpoint(), "until": "now", "include": "system_events"}
    assert {row["op"] for row in rows_of(client.stream(**options))} == {"caught_up"}
    cluster.upsert("another", {})
    rows = rows_of(client.stream(**options))
    place = [row["op"] for row in rows if row["vbucket"] == cluster.vbucket_of("another")]
    assert place == ["mutation", "caught_up"]


def test_a_filtered_stream_is_caught_up(cluster, client, fill):
    cluster.create_collection("small")
    cluster.upsert("one", {}, collection="small")
    # The vBuckets go on with documents that the filter does not let pass.
    fill(40)
    for persists in (False, True):
        if persists:
            cluster.persist()
        with client.stream(collections=["small"], include="system_events") as stream:
            caught_up = set()
            for row in itertools.chain.from_iterable(batch.rows() for batch in stream):
                if row["op"] == "caught_up":
                    caught_up.add(row["vbucket"])
                if len(caught_up) == 16:
                    break


@pytest.fixture
def small():
    """A vBucket in which a small collection is best looked up by its keys."""
    with EmbeddedCluster(vbuckets=1) as cluster:
        cluster.create_collection("small")
        for key in ("c", "a", "b"):
            cluster.upsert(key, {}, collection="small")
        for n in range(1000):
            cluster.upsert(f"key_{n}", {})
        cluster.persist()
        yield cluster


def test_a_first_load_may_come_in_the_order_of_keys(small):
    with small.connect() as client:
        options = {"collections": ["small"], "until": "now"}
        assert [row["key"] for row in rows_of(client.stream(**options))] == ["c", "a", "b"]
        with client.stream(**options, out_of_order=True, include="system_events") as stream:
            rows = [row for batch in stream for row in batch.rows()]
        documents = [(row["op"], row["key"]) for row in rows if row["op"] != "system_event"]
        in_order = [("mutation", key) for key in "abc"]
        assert documents == [*in_order, ("caught_up", None)]
        assert rows[-1]["epoch"] == 0
        small.upsert("d", {}, collection="small")
        checkpoint = dcp_rs.Checkpoint.from_json(stream.checkpoint().to_json())
        options["start"] = checkpoint
        assert [row["key"] for row in rows_of(client.stream(**options))] == ["d"]


def test_a_load_that_was_cut_begins_again_and_says_so(small):
    rule = {"condition": {"nth": 1, "opcode": "DCP_OSO_SNAPSHOT"}}
    small.set_faults([rule | {"reaction": {"oso_cut": {"items": 3}}}])
    with small.connect() as client:
        with client.stream(
            collections=["small"], out_of_order=True, batch=dcp_rs.BatchPolicy(linger=0)
        ) as stream:
            rows, checkpoints = [], []
            while sum(row["epoch"] for row in rows) < 4:
                batch = next(stream)
                rows += batch.rows()
                checkpoints.append(batch.checkpoint)
        seen = [(row["op"], row["key"], row["epoch"]) for row in rows]
        documents = [row for row in seen if row[0] == "mutation"]
        assert documents[-3:] == [("mutation", key, 1) for key in "abc"]
        assert ("rollback", None, 1) in seen
        assert checkpoints[0].seqnos.get(0, 0) == 0
        # Whoever ended in the middle of it begins again too.
        start = checkpoints[0]
        options = {"collections": ["small"], "until": "now", "out_of_order": True}
        again = rows_of(client.stream(start=start, **options))
        assert (again[0]["op"], again[0]["seqno"], again[0]["epoch"]) == ("rollback", 0, 1)
        assert [row["epoch"] for row in again[1:]] == [1] * (len(again) - 1)


def test_a_first_load_out_of_order_cannot_fail_on_rollbacks(client):
    with pytest.raises(ConfigError, match=r"^out_of_order, on_rollback: .* choose 'emit' or 'res"):
        client.stream(out_of_order=True, on_rollback="fail")


@pytest.mark.parametrize("option", ["out_of_order", "persisted_only"])
def test_options_are_flags(client, option):
    with pytest.raises(ConfigError, match=f"{option}: must be True or False, not int"):
        client.stream(**{option: 1})


def test_a_reader_goes_on_below_what_was_purged():
    with EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        for key in ("a", "b"):
            cluster.upsert(key, {})
        with client.stream(until="now") as stream:
            for _ in stream:
                pass
        removed = cluster.remove("a")
        cluster.upsert("c", {})
        cluster.persist()
        cluster.purge(0, removed.seqno)
        options = {"start": stream.checkpoint(), "until": "now"}
        rows = rows_of(client.stream(**options))
        assert ops(rows) == [("rollback", None), ("mutation", "b"), ("mutation", "c")]
        rows = rows_of(client.stream(**options, on_purge="ignore"))
        assert ops(rows) == [("mutation", "c")]


@pytest.mark.parametrize(("on_purge", "left"), [("resync", ["b"]), ("ignore", ["a", "b"])])
def test_a_table_keeps_rows_of_purged_deletions_only_if_it_may(tmp_path, on_purge, left):
    target = f"duckdb://{tmp_path}/bucket.duckdb?table=documents"
    with EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        cluster.upsert("a", {})
        dcp_rs.replicate(client, target, once=True)
        removed = cluster.remove("a")
        cluster.upsert("b", {})
        cluster.persist()
        cluster.purge(0, removed.seqno)
        dcp_rs.replicate(client, target, once=True, on_purge=on_purge)
    with duckdb.connect(f"{tmp_path}/bucket.duckdb") as table:
        assert [
            key for (key,) in table.sql("SELECT key FROM documents ORDER BY 1").fetchall()
        ] == left


@pytest.fixture
def persisted(cluster, fill):
    """40 documents and 8 tombstones, on disk only."""
    fill(48)
    for n in range(8):
        cluster.remove(f"key_{n}")
    cluster.persist()


@pytest.mark.usefixtures("persisted")
@pytest.mark.parametrize("choice", ["skip", "skip_if_supported"])
def test_a_first_load_leaves_out_deletions_and_what_follows_has_them(cluster, client, choice):
    with client.stream(until="now") as stream:
        found = sorted(op for op, _ in ops(rows_of(stream)))
        assert found == ["deletion"] * 8 + ["mutation"] * 40
    with client.stream(until="now", initial_deletions=choice) as stream:
        assert {op for op, _ in ops(rows_of(stream))} == {"mutation"}
        checkpoint = stream.checkpoint()
    assert checkpoint.seqnos == cluster.high_seqnos()
    cluster.remove("key_40")
    cluster.persist()
    with client.stream(start=checkpoint, until="now", initial_deletions=choice) as stream:
        assert ops(rows_of(stream)) == [("deletion", "key_40")]


def test_a_first_load_without_deletions_names_what_it_excludes(client):
    for other, value in [("start", "latest"), ("include", "history"), ("out_of_order", True)]:
        with pytest.raises(ConfigError, match=rf"^initial_deletions, {other}: "):
            client.stream(initial_deletions="skip", **{other: value})
