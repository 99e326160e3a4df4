"""Clients that others wrote read all that a cluster holds, or what they lack of it."""

from __future__ import annotations

import itertools
import json

import pytest
from expectations import assert_versions, ends_of, newest_of

# The fixtures build the programs, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300, func_only=True)]


def test_a_drain_of_memory_gives_the_newest_version_of_every_key(client, open_history):
    history = open_history(client, persist_delay=3600.0)
    history.write(3000)
    seen = client.drain(history.cluster)
    assert_versions(history, seen)
    assert ends_of(seen) == history.cluster.high_seqnos()
    assert all(line["memory"] for line in seen.of("marker"))


def test_a_drain_of_disk_gives_every_key_once(client, open_history):
    history = open_history(client)
    history.write(3000)
    history.cluster.persist()
    seen = client.drain(history.cluster)
    assert_versions(history, seen)
    keys = sum(len(history.latest(vbucket)) for vbucket in history.versions)
    assert seen.count() == keys
    if client.name != "go-dcp":  # which keeps the markers to itself
        assert seen.of("marker")
        assert all(line["disk"] for line in seen.of("marker"))


def test_an_empty_bucket_ends_every_stream_at_once(client, open_history):
    history = open_history(client)
    seen = client.drain(history.cluster)
    assert seen.count() == 0
    assert set(ends_of(seen).values()) == {0}
    assert len(ends_of(seen)) == client.vbuckets


@pytest.mark.parametrize("name", ["gocbcore", "java"])
def test_a_client_without_collections_sees_the_same(name, request, open_history):
    client = request.getfixturevalue(name)
    history = open_history(client)
    history.write(1000)
    seen = client.drain(history.cluster, collections=False)
    assert_versions(history, seen)


@pytest.mark.parametrize("name", ["gocbcore", "java"])
def test_keys_come_without_values_when_asked_for(name, request, open_history):
    client = request.getfixturevalue(name)
    history = open_history(client, persist_delay=3600.0)
    history.write(1000)
    seen = client.drain(history.cluster, no_value=True)
    assert {line["size"] for line in seen.of("change")} == {0}
    for vbucket in history.versions:
        newest = {(v.key, v.seqno, v.cas) for v in history.latest(vbucket)}
        assert newest <= {(c.key, c.seqno, c.cas) for c in seen.changes(vbucket)}


def test_compressed_values_are_the_values_that_were_written(client, open_history):
    history = open_history(client)
    history.write(1000, size=3000)
    history.cluster.persist()
    seen = client.drain(history.cluster, compression="forced")
    assert_versions(history, seen)


def test_a_tiny_flow_control_buffer_holds_nothing_back_for_good(client, open_history):
    history = open_history(client, nodes=2)
    history.write(1000, size=3000)
    seen = client.drain(history.cluster, buffer=1500)
    assert_versions(history, seen)


def test_a_client_that_resumes_is_sent_what_it_lacks_and_nothing_twice(
    client, open_history, tmp_path
):
    history = open_history(client)
    state = tmp_path / "state.json"
    # From memory and from disk; the second half of what is resumed is still in memory.
    for round_, persisted in enumerate([False, True, False]):
        before = history.cluster.high_seqnos()
        history.write(400, prefix=f"round-{round_ % 2}")
        if persisted:
            history.cluster.persist()
            history.write(200, prefix="late")
        resume = {"resume": state} if round_ else {}
        seen = client.drain(history.cluster, save=state, **resume)
        assert seen.count() > 0
        assert not seen.of("rollback")
        assert_versions(history, seen, after=before)


def test_a_client_that_does_not_mind_purged_tombstones_resumes_below_them(
    java, open_history, tmp_path
):
    history = open_history(java)
    history.write_to(5, 10, prefix="doc")
    gone = history.versions[5][6]
    history.remove(gone.key)
    history.write_to(5, 3, prefix="more")
    state = tmp_path / "state.json"
    seen = java.drain(history.cluster, save=state)
    positions = json.loads(state.read_text())
    positions["5"] |= {"seqno": 8, "snapshot_start": 8, "snapshot_end": 8}
    state.write_text(json.dumps(positions))
    purged = history.versions[5][10].seqno
    history.cluster.purge(5, purged)
    history.write_to(5, 1, prefix="last")
    minding = java.drain(history.cluster, resume=state)
    assert [(line["vb"], line["to"]) for line in minding.of("rollback")] == [(5, 0)]
    assert gone.key not in {change.key for change in minding.changes(5)}
    lenient = java.drain(history.cluster, resume=state, ignore_purged=True)
    assert not lenient.of("rollback")
    kept = [change for change in seen.changes(5) if change.seqno > 8 and change.seqno != purged]
    assert lenient.changes(5)[:-1] == kept


def test_expirations_come_as_such_when_asked_for(gocbcore, open_history):
    history = open_history(gocbcore)
    history.write(1000)
    seen = gocbcore.drain(history.cluster, expirations=True)
    assert_versions(history, seen, expirations="expiration")
    assert any(line["op"] == "expiration" for line in seen.of("change"))
    assert all(line["time"] > 0 for line in seen.of("change") if line["op"] == "expiration")


def test_streams_of_one_vbucket_are_told_apart_by_their_ids(gocbcore, open_history):
    history = open_history(gocbcore)
    history.write(500)
    run = gocbcore.start(history.cluster, stream_ids=[1, 7, 65535], follow=True)
    run.await_streaming()
    history.write(500, prefix="live")
    seen = run.finish(history.cluster.high_seqnos())
    for sid in (1, 7, 65535):
        assert_versions(history, seen, sid=sid)


def test_a_client_that_knows_the_purge_seqno_resumes_below_it(gocbcore, open_history, tmp_path):
    history = open_history(gocbcore)
    history.write(2000)
    vbucket = 5
    tombstones = [v.seqno for v in history.latest(vbucket) if v.op != "mutation"]
    purged = max(tombstones)
    history.cluster.purge(vbucket, purged)
    state = tmp_path / "state.json"
    seen = gocbcore.drain(history.cluster, purge_markers=True, save=state)
    assert {line["purge_seqno"] for line in seen.of("marker", vbucket)} == {purged}
    positions = json.loads(state.read_text())
    assert positions["5"]["purge_seqno"] == purged
    below = purged - 2
    positions["5"] |= {"seqno": below, "snapshot_start": below, "snapshot_end": below}
    state.write_text(json.dumps(positions))
    again = gocbcore.drain(history.cluster, purge_markers=True, resume=state)
    assert not again.of("rollback")
    assert {change.seqno for change in again.changes(vbucket)} == {
        change.seqno for change in seen.changes(vbucket) if change.seqno > below
    }
    del positions["5"]["purge_seqno"]
    state.write_text(json.dumps(positions))
    unaware = gocbcore.drain(history.cluster, purge_markers=True, resume=state)
    assert [(line["vb"], line["to"]) for line in unaware.of("rollback")] == [(vbucket, 0)]
    assert unaware.changes(vbucket) == seen.changes(vbucket)


def test_a_client_that_takes_any_order_is_sent_the_order_of_keys(gocbcore, open_history, tmp_path):
    history = open_history(gocbcore, vbuckets=2)
    # A server does so where a collection is a small part of the vBucket.
    small = history.create_collection("inventory.small")
    history.write(16, collection="inventory.small", size=3000)
    history.write(1500)
    history.cluster.persist()
    state = tmp_path / "state.json"
    seen = gocbcore.drain(history.cluster, out_of_order=True, filter=[small], save=state)
    for vbucket in history.versions:
        assert [line["type"] for line in seen.of("out_of_order", vbucket)] == [1, 2]
        changes = seen.changes(vbucket)
        keys = [change.key.encode() for change in changes]
        assert keys == sorted(keys)
        assert newest_of(changes) == [
            v.told_as("deletion") for v in history.latest(vbucket) if v.collection == small
        ]
        assert len(changes) == len(newest_of(changes))
    assert any(
        c.seqno > d.seqno
        for vbucket in history.versions
        for c, d in itertools.pairwise(seen.changes(vbucket))
    ), "the order of keys is that of seqnos"
    before = history.cluster.high_seqnos()
    history.write(16, prefix="more", collection="inventory.small")
    rest = gocbcore.drain(history.cluster, out_of_order=True, filter=[small], resume=state)
    assert not rest.of("rollback")
    assert_versions(history, rest, after=before, collection=small)


def test_a_backfill_in_the_order_of_keys_that_is_cut_off_begins_anew(gocbcore, open_history):
    history = open_history(gocbcore, vbuckets=1)
    cluster = history.cluster
    small = history.create_collection("inventory.small")
    history.write(16, collection="inventory.small", size=3000)
    history.write(1500)
    cluster.persist()
    begins = {"opcode": "DCP_OSO_SNAPSHOT", "nth": 1}
    cluster.set_faults([{"condition": begins, "reaction": {"oso_cut": {"items": 3}}}])
    run = gocbcore.start(cluster, follow=True, out_of_order=True, filter=[small])
    run.await_streaming()
    history.write_to(0, 2, prefix="later", collection="inventory.small")
    seen = run.finish(cluster.high_seqnos())
    assert cluster.fault_counts() == [1]
    assert [line["type"] for line in seen.of("out_of_order")] == [1, 1, 2]
    changes = seen.changes(0)
    kinds = [line["line"] for line in seen.lines if line["line"] in ("change", "out_of_order")]
    again = kinds.index("out_of_order", 1)
    # The event that began the collection is the first item.
    assert 2 <= again - 1 <= 3
    cut, whole = changes[: again - 1], changes[again - 1 :]
    assert cut == whole[: len(cut)]
    latest = [v.told_as("deletion") for v in history.latest(0) if v.collection == small]
    assert newest_of(whole) == latest


def test_changes_are_read_over_tls(client, open_history):
    history = open_history(client, nodes=2, tls=True)
    history.write(500)
    seen = client.drain(history.cluster, tls=True)
    assert_versions(history, seen)
