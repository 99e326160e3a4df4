"""Clients that others wrote read from our producer, and see what it holds."""

from __future__ import annotations

import json
import time

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


def assert_versions(history, seen, sid=0, after=None, expirations="deletion"):
    """Every change seen is a version that was written, and each key's newest one was seen."""
    for vbucket, versions in history.versions.items():
        start = (after or {}).get(vbucket, 0)
        known = {v.seqno: told(v, expirations) for v in versions}
        changes = seen.changes(vbucket, sid)
        for change in changes:
            assert change == known.get(change.seqno), f"vBucket {vbucket}"
        newest = {v.key: told(v, expirations) for v in versions if v.seqno > start}
        assert {change.key: change for change in changes} == newest, f"vBucket {vbucket}"
        assert [c.seqno for c in changes] == sorted({c.seqno for c in changes})
        assert all(change.seqno > start for change in changes)


def told(version, expirations):
    """A version as a client is told of it: most take an expiration for a deletion."""
    if version.op == "expiration":
        return type(version)(**{**vars(version), "op": expirations})
    return version


def ends_of(seen):
    """Where each vBucket's stream ended."""
    return {line["vb"]: line["seqno"] for line in seen.of("vbucket")}


def test_a_drain_of_memory_gives_the_newest_version_of_every_key(client, open_history):
    history = open_history(client, persist_delay=3600.0)
    history.write(3000)
    seen = client.drain(history.producer)
    assert_versions(history, seen)
    assert ends_of(seen) == history.producer.high_seqnos()
    assert all(line["memory"] for line in seen.of("marker"))


def test_a_drain_of_disk_gives_every_key_once(client, open_history):
    history = open_history(client)
    history.write(3000)
    history.producer.persist()
    seen = client.drain(history.producer)
    assert_versions(history, seen)
    keys = sum(len(history.latest(vbucket)) for vbucket in history.versions)
    assert seen.count() == keys
    assert seen.of("marker")
    assert all(line["disk"] for line in seen.of("marker"))


def test_an_empty_bucket_ends_every_stream_at_once(client, open_history):
    history = open_history(client)
    seen = client.drain(history.producer)
    assert seen.count() == 0
    assert set(ends_of(seen).values()) == {0}
    assert len(ends_of(seen)) == client.vbuckets


def test_a_client_without_collections_sees_the_same(client, open_history):
    history = open_history(client)
    history.write(1000)
    seen = client.drain(history.producer, collections=False)
    assert_versions(history, seen)


def test_a_filter_for_the_default_collection_lets_all_pass(client, open_history):
    history = open_history(client)
    history.write(1000)
    history.producer.persist()
    history.write(500, prefix="more")
    seen = client.drain(history.producer, filter=[0])
    assert_versions(history, seen)
    assert {line["collection"] for line in seen.of("change")} == {0}


def test_keys_come_without_values_when_asked_for(client, open_history):
    history = open_history(client, persist_delay=3600.0)
    history.write(1000)
    seen = client.drain(history.producer, no_value=True)
    assert {line["size"] for line in seen.of("change")} == {0}
    for vbucket in history.versions:
        newest = {(v.key, v.seqno, v.cas) for v in history.latest(vbucket).values()}
        assert newest <= {(c.key, c.seqno, c.cas) for c in seen.changes(vbucket)}


def test_compressed_values_are_the_values_that_were_written(client, open_history):
    history = open_history(client)
    history.write(1000, size=3000)
    history.producer.persist()
    seen = client.drain(history.producer, compression="forced")
    assert_versions(history, seen)


def test_a_tiny_flow_control_buffer_holds_nothing_back_for_good(client, open_history):
    history = open_history(client, nodes=2)
    history.write(1000, size=3000)
    seen = client.drain(history.producer, buffer=1500)
    assert_versions(history, seen)


def test_a_client_that_resumes_is_sent_what_it_lacks_and_nothing_twice(
    client, open_history, tmp_path
):
    history = open_history(client)
    state = tmp_path / "state.json"
    # From memory and from disk; the second half of what is resumed is still in memory.
    for round_, persisted in enumerate([False, True, False]):
        before = history.producer.high_seqnos()
        history.write(400, prefix=f"round-{round_ % 2}")
        if persisted:
            history.producer.persist()
            history.write(200, prefix="late")
        resume = {"resume": state} if round_ else {}
        seen = client.drain(history.producer, save=state, **resume)
        assert seen.count() > 0
        assert not seen.of("rollback")
        assert_versions(history, seen, after=before)


def test_changes_lost_in_a_failover_are_rolled_back_on_resuming(client, open_history, tmp_path):
    history = open_history(client, nodes=2)
    state = tmp_path / "state.json"
    history.write(1000)
    kept = history.producer.high_seqnos()
    lossy = range(0, client.vbuckets, 7)
    for vbucket in lossy:
        history.write_to(vbucket, 3, prefix="lost")
    first = client.drain(history.producer, save=state)
    assert_versions(history, first)
    for vbucket in lossy:
        history.roll_back(vbucket, kept[vbucket])
        # The lost seqnos are used again, and more: the client is behind on the new branch.
        history.write_to(vbucket, 5, prefix="found")
    run = client.start(history.producer, resume=state, follow=True)
    run.await_streaming()
    second = run.finish(history.producer.high_seqnos())
    rollbacks = {line["vb"]: line["to"] for line in reversed(second.of("rollback"))}
    assert rollbacks == {vbucket: kept[vbucket] for vbucket in lossy}
    again = {line["vb"]: line["to"] for line in second.of("rollback")}
    if client.name == "java-dcp-client":
        # It goes on with no branch at all after a rollback, so it is sent back to the beginning.
        assert set(again.values()) == {0}
    else:
        assert again == rollbacks
    for vbucket in history.versions:
        to = again.get(vbucket, kept[vbucket])
        rows = [c for c in first.changes(vbucket) if c.seqno <= to] + second.changes(vbucket)
        newest = {v.key: told(v, "deletion") for v in history.versions[vbucket]}
        assert {change.key: change for change in rows} == newest, f"vBucket {vbucket}"


def test_a_failover_and_a_rebalance_are_lived_through_while_streaming(client, open_history):
    history = open_history(client, nodes=2)
    producer = history.producer
    history.write(500)
    run = client.start(producer, follow=True)
    run.await_streaming()
    moved = range(0, client.vbuckets, 16)
    owner = dict.fromkeys(moved, 0)
    for round_ in range(3):
        history.write(200, prefix=f"live-{round_}")
        for vbucket in moved:
            owner[vbucket] = 1 - owner[vbucket]
            producer.move_vbucket(vbucket, owner[vbucket])
            history.write_to(vbucket, 2, prefix=f"moved-{round_}")
    failed = moved[1]
    kept = producer.high_seqnos()[failed]
    history.write_to(failed, 2, prefix="lost")
    history.roll_back(failed, kept)
    history.write_to(failed, 4, prefix="found")
    seen = run.finish(producer.high_seqnos())
    # Of the lost tail some may have been sent before it was lost.
    found = [c for c in seen.changes(failed) if not c.key.startswith("lost-")]
    newest = {v.key: told(v, "deletion") for v in history.versions.pop(failed)}
    assert {change.key: change for change in found} == newest
    assert_versions(history, seen)
    assert seen.of("end"), "no stream was moved"


def test_writes_go_on_while_a_slow_client_reads(client, open_history):
    history = open_history(client, nodes=3, persist_delay=0.001)
    history.write(1500)
    history.producer.persist()
    run = client.start(history.producer, follow=True, buffer=2000)
    for round_ in range(6):
        # The same keys over and over: they change while their older versions are on their way.
        history.write(1000, prefix="hot")
        if round_ == 2:
            run.await_streaming()
        if round_ % 2:
            history.producer.persist()
    seen = run.finish(history.producer.high_seqnos())
    assert_versions(history, seen)


def test_idle_streams_stay_open_by_noops(java, open_history):
    history = open_history(java)
    run = java.start(history.producer, follow=True, noop_seconds=1)
    run.await_streaming()
    # The client gives up after two intervals of silence.
    time.sleep(4)
    history.write(100)
    seen = run.finish(history.producer.high_seqnos())
    assert_versions(history, seen)
    assert len(seen.of("opened")) == java.vbuckets, "streams were opened again"


def test_changes_are_withheld_until_persisted_by_a_client_that_mitigates_rollbacks(
    java, open_history
):
    history = open_history(java, persist_delay=3600.0)
    history.write(300)
    run = java.start(history.producer, follow=True, mitigate_rollbacks=20)
    run.await_streaming()
    time.sleep(1)
    assert not [line for line in run.lines if line["line"] == "change"]
    history.producer.persist()
    assert_versions(history, run.finish(history.producer.high_seqnos()))


def test_a_client_that_does_not_mind_purged_tombstones_resumes_below_them(
    java, open_history, tmp_path
):
    history = open_history(java)
    history.write_to(5, 10, prefix="doc")
    gone = history.versions[5][6]
    history.remove(gone.key)
    history.write_to(5, 3, prefix="more")
    state = tmp_path / "state.json"
    seen = java.drain(history.producer, save=state)
    positions = json.loads(state.read_text())
    positions["5"] |= {"seqno": 8, "snapshot_start": 8, "snapshot_end": 8}
    state.write_text(json.dumps(positions))
    purged = history.versions[5][10].seqno
    history.producer.purge(5, purged)
    history.write_to(5, 1, prefix="last")
    minding = java.drain(history.producer, resume=state)
    assert [(line["vb"], line["to"]) for line in minding.of("rollback")] == [(5, 0)]
    assert gone.key not in {change.key for change in minding.changes(5)}
    lenient = java.drain(history.producer, resume=state, ignore_purged=True)
    assert not lenient.of("rollback")
    kept = [change for change in seen.changes(5) if change.seqno > 8 and change.seqno != purged]
    assert lenient.changes(5)[:-1] == kept


def test_expirations_come_as_such_when_asked_for(gocbcore, open_history):
    history = open_history(gocbcore)
    history.write(1000)
    seen = gocbcore.drain(history.producer, expirations=True)
    assert_versions(history, seen, expirations="expiration")
    assert any(line["op"] == "expiration" for line in seen.of("change"))
    assert all(line["time"] > 0 for line in seen.of("change") if line["op"] == "expiration")


def test_streams_of_one_vbucket_are_told_apart_by_their_ids(gocbcore, open_history):
    history = open_history(gocbcore)
    history.write(500)
    run = gocbcore.start(history.producer, stream_ids=[1, 7, 65535], follow=True)
    run.await_streaming()
    history.write(500, prefix="live")
    seen = run.finish(history.producer.high_seqnos())
    for sid in (1, 7, 65535):
        assert_versions(history, seen, sid=sid)


def test_a_client_that_takes_any_order_may_be_sent_the_order_of_seqnos(gocbcore, open_history):
    history = open_history(gocbcore)
    history.write(1000)
    history.producer.persist()
    seen = gocbcore.drain(history.producer, out_of_order=True, filter=[0])
    assert_versions(history, seen)
    assert not seen.of("out_of_order"), "now that it is used, the order has to be checked"


def test_a_client_that_knows_the_purge_seqno_resumes_below_it(gocbcore, open_history, tmp_path):
    history = open_history(gocbcore)
    history.write(2000)
    vbucket = 5
    tombstones = [v.seqno for v in history.latest(vbucket).values() if v.op != "mutation"]
    purged = max(tombstones)
    history.producer.purge(vbucket, purged)
    state = tmp_path / "state.json"
    seen = gocbcore.drain(history.producer, purge_markers=True, save=state)
    assert {line["purge_seqno"] for line in seen.of("marker", vbucket)} == {purged}
    positions = json.loads(state.read_text())
    assert positions["5"]["purge_seqno"] == purged
    below = purged - 2
    positions["5"] |= {"seqno": below, "snapshot_start": below, "snapshot_end": below}
    state.write_text(json.dumps(positions))
    again = gocbcore.drain(history.producer, purge_markers=True, resume=state)
    assert not again.of("rollback")
    assert {change.seqno for change in again.changes(vbucket)} == {
        change.seqno for change in seen.changes(vbucket) if change.seqno > below
    }
    del positions["5"]["purge_seqno"]
    state.write_text(json.dumps(positions))
    unaware = gocbcore.drain(history.producer, purge_markers=True, resume=state)
    assert [(line["vb"], line["to"]) for line in unaware.of("rollback")] == [(vbucket, 0)]
    assert unaware.changes(vbucket) == seen.changes(vbucket)
