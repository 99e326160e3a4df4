"""What a stream tells about itself."""

import time

import dcp_rs


def events_until(stream, is_enough):
    """Takes events until there are enough: they may come a moment after the changes."""
    events = []
    deadline = time.monotonic() + 20
    while not is_enough(events):
        assert time.monotonic() < deadline, events
        time.sleep(0.01)
        events += stream.events()
    return events


def test_events_tell_what_happened_once(cluster, client, fill):
    fill(50)
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        rows = 0
        while rows < 50:
            rows += next(stream).num_rows
        events = events_until(stream, lambda events: len(events) >= 32)
        assert sum(event.kind == "caught_up" for event in events) == 16
        opened = [event for event in events if event.kind != "caught_up"]
        assert {event.vbucket for event in opened} == set(range(16))
        nodes = client.vbuckets_by_node()
        for event in opened:
            assert event.kind == "opened"
            assert event.vbucket in nodes[event.node]
        assert stream.events() == []
        high = cluster.high_seqnos()
        vbucket = max(high, key=high.get)
        cluster.roll_back(vbucket, high[vbucket] - 1)
        batch = next(stream)
        assert next(iter(batch.rows()))["op"] == "rollback"
        events = events_until(
            stream, lambda events: any(event.kind == "rolled_back" for event in events)
        )
        assert {event.vbucket for event in events} == {vbucket}
        kinds = [event.kind for event in events]
        assert kinds.index("ended") < kinds.index("backing_off") < kinds.index("rolled_back")


def test_a_node_that_is_down_for_seconds_is_one_outage(cluster, client, fill):
    fill(50)
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        rows = 0
        while rows < 50:
            rows += next(stream).num_rows
        stream.events()
        cluster.persist()
        cluster.kill(1)
        events = events_until(
            stream, lambda events: any(event.kind == "connection_lost" for event in events)
        )
        # Meanwhile it is tried again and again.
        time.sleep(3)
        assert stream.stats().reconnects == 1
        cluster.restart(1)
        events += events_until(
            stream, lambda events: sum(event.kind == "opened" for event in events) >= 8
        )
        assert stream.stats().reconnects == 1
        (lost,) = [event for event in events if event.kind == "connection_lost"]
        assert (lost.cause, lost.vbucket) == ("connection_lost", None)
        assert lost.node in client.vbuckets_by_node()


def test_events_name_their_causes(cluster, client, fill):
    fill(50)
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        rows = 0
        # A vBucket that has not been read has nothing to roll back.
        while rows < 50:
            rows += next(stream).num_rows
        vbucket = cluster.vbucket_of("key_1")
        cluster.roll_back(vbucket, 0)
        events = events_until(
            stream, lambda events: any(event.kind == "rolled_back" for event in events)
        )
        causes = {event.kind: event.cause for event in events}
        assert causes.pop("opened") is None
        causes.pop("caught_up", None)
        assert causes == {
            "ended": "state_changed",
            "backing_off": "state_changed",
            "rolled_back": "rollback",
        }


def test_vbuckets_say_how_far_behind_they_are(client, fill):
    fill(200)
    high = client.high_seqnos()
    with client.stream(
        until="now", batch=dcp_rs.BatchPolicy(max_rows=1), vbuckets=[3, 5]
    ) as stream:
        next(stream)
        stats = stream.vbucket_stats()
        assert [one.vbucket for one in stats] == [3, 5]
        (begun,) = [one for one in stats if one.seqno]
        assert begun.lag == high[begun.vbucket] - begun.seqno > 0
        for _ in stream:
            pass
        assert [(one.state, one.lag) for one in stream.vbucket_stats()] == [("complete", 0)] * 2
        time.sleep(0.01)
        numbers = stream.stats()
        assert isinstance(numbers, dcp_rs.StreamStats)
        assert 0 < numbers.rows_per_second <= numbers.rows / 0.01
