"""Clients that others wrote live through what happens to a cluster."""

from __future__ import annotations

import time

import pytest
from expectations import assert_lived_through_loss, assert_versions, newest_of
from relay import Relay

# The fixtures build the programs, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300, func_only=True)]


def active_on(cluster, node):
    """The vBuckets whose active copy a node has."""
    return [vb for vb in range(cluster.num_vbuckets) if cluster.copies_of(vb)[0] == node]


def test_changes_lost_in_a_failover_are_rolled_back_on_resuming(client, open_history, tmp_path):
    history = open_history(client, nodes=2, replicas=1)
    cluster = history.cluster
    state = tmp_path / "state.json"
    history.write(1000)
    kept = cluster.high_seqnos()
    lossy = active_on(cluster, 0)[::7]
    for vbucket in lossy:
        cluster.set_replica_lag(vbucket, 1, None)
        history.write_to(vbucket, 3, prefix="lost")
    first = client.drain(cluster, save=state)
    assert_versions(history, first)
    read = cluster.high_seqnos()
    cluster.failover(0)
    assert history.forget_lost() == kept
    for vbucket in lossy:
        # The lost seqnos are used again, and more: the client is behind on the new branch.
        history.write_to(vbucket, 5, prefix="found")
    run = client.start(cluster, resume=state, follow=True)
    run.await_streaming()
    second = run.finish(cluster.high_seqnos())
    rollbacks = {line["vb"]: line["to"] for line in reversed(second.of("rollback"))}
    assert rollbacks == {vbucket: kept[vbucket] for vbucket in lossy}
    again = {line["vb"]: line["to"] for line in second.of("rollback")}
    if client.after_rollback == "begin again":
        # It goes on with no branch at all after a rollback, so it is sent back to the beginning.
        assert set(again.values()) == {0}
    else:
        assert again == rollbacks
    for vbucket in history.versions:
        to = again.get(vbucket, kept[vbucket])
        if client.after_rollback == "skip":
            # What it was at seqnos on the lost branch, it takes for known on the new one.
            missed = [
                v for v in history.latest(vbucket) if kept[vbucket] < v.seqno <= read[vbucket]
            ]
            assert len(missed) == (3 if vbucket in lossy else 0)
            rest = [v for v in history.latest(vbucket) if v.seqno > read[vbucket]]
            assert second.changes(vbucket) == rest
            continue
        rows = [c for c in first.changes(vbucket) if c.seqno <= to] + second.changes(vbucket)
        newest = [v.told_as("deletion") for v in history.latest(vbucket)]
        assert newest_of(rows) == newest, f"vBucket {vbucket}"


@pytest.mark.parametrize("event", ["failover", "unsafe failover", "crash"])
def test_a_loss_while_streaming_is_lived_through(client, event, open_history):
    history = open_history(client, nodes=2, replicas=1, persist_delay=3600.0)
    cluster = history.cluster
    history.write(500)
    cluster.persist()
    run = client.start(cluster, follow=True)
    run.await_streaming()
    lossy = active_on(cluster, 1)[::16]
    for vbucket in lossy:
        cluster.set_replica_lag(vbucket, 1, None)
        history.write_to(vbucket, 2, prefix="lost")
    read = cluster.high_seqnos()
    if event == "failover":
        cluster.failover(1)
    elif event == "unsafe failover":
        # The map's revision begins again; its epoch says that it is newer.
        epoch, _ = cluster.map_version
        cluster.failover_unsafely([1])
        assert cluster.map_version == (epoch + 1, 1)
    else:
        cluster.kill(1)
        cluster.restart(1)
    kept = history.forget_lost()
    assert {vbucket: read[vbucket] - kept[vbucket] for vbucket in lossy} == dict.fromkeys(lossy, 2)
    for vbucket in active_on(cluster, 1)[1::16]:
        history.write_to(vbucket, 1, prefix="more")
    for vbucket in lossy:
        history.write_to(vbucket, 4, prefix="found")
    seen = run.finish(cluster.high_seqnos())
    for vbucket in lossy:
        assert_lived_through_loss(client, history, seen, vbucket, read[vbucket])
        del history.versions[vbucket]
    assert_versions(history, seen)
    assert len(seen.of("opened")) > client.opened_at_first, "no stream was cut off"


@pytest.mark.parametrize("feature", ["stream ids and purge seqnos", "out of order"])
def test_what_only_gocbcore_has_goes_through_loss_and_rebalance(
    feature, gocbcore, open_history, tmp_path
):
    history = open_history(gocbcore, nodes=2, replicas=1, vbuckets=4)
    cluster = history.cluster
    number, path, sids = None, None, [0]
    options = {"purge_markers": True, "stream_ids": [1, 65535], "expirations": True}
    if feature == "out of order":
        # A server does so where a collection is a small part of the vBucket.
        path = "inventory.small"
        number = history.create_collection(path)
        history.write(32, collection=path, size=3000)
        options = {"out_of_order": True, "filter": [number], "expirations": True}
    else:
        sids = options["stream_ids"]
    history.write(1500)
    cluster.persist()
    kept = cluster.high_seqnos()
    lossy = active_on(cluster, 0)
    state = tmp_path / "state.json"
    options |= {"save": state, "buffer": 5000}
    wanted = {"collection": number, "expirations": "expiration"}
    first = gocbcore.drain(cluster, **options)
    for vbucket in history.versions:
        newest = [v.told_as("expiration") for v in history.latest(vbucket)]
        for sid in sids:
            # Not in order, if out of order.
            assert newest_of(first.changes(vbucket, sid)) == [
                v for v in newest if number in (None, v.collection)
            ]
    assert bool(first.of("out_of_order")) == (path is not None)
    for vbucket in lossy:
        cluster.set_replica_lag(vbucket, 1, None)
        history.write_to(vbucket, 3, prefix="lost", collection=path)
    second = gocbcore.drain(cluster, resume=state, **options)
    assert second.count() == 3 * len(lossy) * len(sids)
    cluster.failover(0)
    assert history.forget_lost() == kept
    for vbucket in lossy:
        history.write_to(vbucket, 5, prefix="found", collection=path)
    run = gocbcore.start(cluster, resume=state, follow=True, **options)
    run.await_streaming()
    cluster.add_node()
    cluster.rebalance()
    for vbucket in history.versions:
        history.write_to(vbucket, 4, prefix="spread", collection=path)
    third = run.finish(cluster.high_seqnos())
    assert {(line["vb"], line["to"]) for line in third.of("rollback")} == {
        (vbucket, kept[vbucket]) for vbucket in lossy
    }
    for sid in sids:
        assert_versions(history, third, sid=sid, after=kept, **wanted)
    assert len(third.of("opened")) > len(history.versions) * len(sids), "no stream was moved"


def test_a_clean_restart_loses_nothing_and_sends_nothing_twice(client, open_history):
    history = open_history(client, nodes=2)
    cluster = history.cluster
    history.write(500)
    run = client.start(cluster, follow=True)
    run.await_streaming()
    cluster.restart(0)
    history.write(300, prefix="late")
    seen = run.finish(cluster.high_seqnos())
    assert_versions(history, seen)
    assert not seen.of("rollback")
    assert len(seen.of("opened")) > client.opened_at_first, "no stream was cut off"


def test_a_rebalance_is_lived_through_while_streaming(client, open_history):
    history = open_history(client, nodes=2)
    cluster = history.cluster
    history.write(500)
    run = client.start(cluster, follow=True)
    run.await_streaming()
    moved = range(0, client.vbuckets, 16)
    for round_ in range(3):
        history.write(200, prefix=f"live-{round_}")
        for vbucket in moved:
            cluster.move_vbucket(vbucket, 1 - cluster.copies_of(vbucket)[0])
            history.write_to(vbucket, 2, prefix=f"moved-{round_}")
    # A node that the client has not seen yet takes its part.
    added = cluster.add_node()
    cluster.rebalance()
    assert active_on(cluster, added)
    history.write(300, prefix="spread")
    seen = run.finish(cluster.high_seqnos())
    assert_versions(history, seen)
    assert not seen.of("rollback")
    assert len(seen.of("opened")) > client.opened_at_first, "no stream was moved"


def test_writes_go_on_while_a_slow_client_reads(client, open_history):
    history = open_history(client, nodes=3, persist_delay=0.001)
    history.write(1500)
    history.cluster.persist()
    run = client.start(history.cluster, follow=True, buffer=2000)
    for round_ in range(6):
        # The same keys over and over: they change while their older versions are on their way.
        history.write(1000, prefix="hot")
        if round_ == 2:
            run.await_streaming()
        if round_ % 2:
            history.cluster.persist()
    seen = run.finish(history.cluster.high_seqnos())
    assert_versions(history, seen)


def test_idle_streams_stay_open_by_noops(java, open_history):
    history = open_history(java)
    run = java.start(history.cluster, follow=True, noop_seconds=2)
    run.await_streaming()
    # The client gives up after two intervals of silence.
    time.sleep(6)
    history.write(100)
    seen = run.finish(history.cluster.high_seqnos())
    assert_versions(history, seen)
    assert len(seen.of("opened")) == java.vbuckets, "streams were opened again"


@pytest.mark.parametrize("name", ["gocbcore", "godcp"])
def test_a_client_answers_every_noop(name, request, open_history):
    client = request.getfixturevalue(name)
    history = open_history(client)
    history.write(100)
    cluster = history.cluster
    addresses = (cluster.connection_string, cluster.management_urls[0])
    relay = Relay(*(int(address.rpartition(":")[2]) for address in addresses))
    try:
        run = client.start(
            cluster, nodes=[relay.address], management=[relay.management_url], follow=True
        )
        run.await_streaming()
        assert relay.answered_twice.wait(60), "no noop came, or no answer"
        history.write(100, prefix="more")
        seen = run.finish(cluster.high_seqnos())
    finally:
        relay.close()
    assert_versions(history, seen)
    assert set(relay.answers) <= set(relay.noops)
    assert set(relay.noops.values()) == set(relay.answers.values()) == {1}
    assert len(seen.of("opened")) == client.opened_at_first, "streams were opened again"


@pytest.mark.parametrize("name", ["java", "godcp"])
def test_changes_are_withheld_until_persisted_by_a_client_that_mitigates_rollbacks(
    name, request, open_history
):
    client = request.getfixturevalue(name)
    history = open_history(client, nodes=2, replicas=1, persist_delay=3600.0)
    history.write(300)
    run = client.start(history.cluster, follow=True, mitigate_rollbacks=20)
    run.await_streaming()
    time.sleep(1)
    assert not [line for line in run.lines if line["line"] == "change"]
    history.cluster.persist()
    seen = run.finish(history.cluster.high_seqnos())
    assert_versions(history, seen)
