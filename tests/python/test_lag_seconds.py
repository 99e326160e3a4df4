"""How old what is not committed is."""

import time

import pytest

from dcp_rs.replication import core, lag
from dcp_rs.replication.lag import Lag, Observed, Place
from lag import until

HOUR = 3600.0


class Clock:
    """A clock that is set, and one that is off."""

    def __init__(self):
        self.now, self.off = 1000.0, None

    def monotonic(self):
        return self.now

    def time(self):
        return time.time() + self.off


class Position:
    """The seqnos of a checkpoint."""

    def __init__(self, *seqnos):
        self.seqnos = dict(enumerate(seqnos))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.off = 0.0
    monkeypatch.setattr(lag, "time", clock)
    return clock


@pytest.fixture
def observed():
    return Observed()


def note(observed, *high, read=()):
    observed.note(Lag(0, {}, dict(enumerate(high)), {1: dict(enumerate(read))}))


def settle(observed, *places):
    """Has tables, by name, reached positions."""
    observed.settle([Place(1, {name: None}, at, has_all=False) for name, at in places], None)


def test_age_counts_from_when_a_node_first_reported_the_oldest_seqno_that_is_missing(
    clock, observed
):
    settle(observed, (None, Position(0, 0)))
    assert observed.ages().oldest == 0, "nothing is known yet"
    for high in ((0, 0), (5, 0), (5, 3), (9, 3)):
        note(observed, *high)
        clock.now += 10
    assert observed.ages().by_vbucket == {0: 30, 1: 20}
    # What was missing since the beginning is there, and what came last is not.
    settle(observed, (None, Position(7, 0)))
    assert observed.ages().by_vbucket == {0: 10, 1: 20}
    assert observed.ages().oldest == 20
    settle(observed, (None, Position(9, 3)))
    assert observed.ages() == (0, {}, {}, None, {}, 0)


def test_a_stream_that_does_not_know_yet_what_the_server_has_changes_nothing(clock, observed):
    note(observed, 5, 5)
    settle(observed, (None, Position(4, 4)))
    clock.now += 10
    # As after it was opened: nothing is known of one vBucket, and then of both.
    for known in ({1: 5}, {}):
        observed.note(Lag(None, {}, known, {2: {0: 4, 1: 4}}))
    clock.now += 10
    note(observed, 6, 6)
    assert observed.ages().by_vbucket == {0: 20, 1: 20}


def test_each_table_has_an_age_of_its_own(clock, observed):
    note(observed, 1)
    clock.now += 10
    note(observed, 2)
    clock.now += 10
    settle(observed, ("late", Position(0)), ("early", Position(1)), ("there", Position(2)))
    ages = observed.ages()
    assert ages.by_table == {"late": 20, "early": 10, "there": 0}
    assert (ages.oldest, ages.by_vbucket) == (20, {0: 20})


def test_a_seqno_without_a_change_is_not_missing(clock, observed):
    place = Place(1, {None: None}, Position(5), has_all=True)
    observed.settle([place], None)
    note(observed, 9, read=(9,))
    clock.now += 10
    assert observed.ages().oldest == 0, "the stream has passed it, and nothing waits"
    observed.settle([place._replace(has_all=False)], None)
    assert observed.ages().oldest == 10


def test_what_a_failover_has_lost_is_not_missing(clock, observed):
    settle(observed, (None, Position(80)))
    for high in (100, 100, 80):
        note(observed, high)
        clock.now += 10
    assert observed.ages().oldest == 0
    note(observed, 90)
    clock.now += 5
    assert observed.ages().oldest == 5


def test_a_long_time_is_kept_in_few_samples(clock, observed):
    settle(observed, (None, Position(0)))
    begun = clock.now
    for second in range(20_000):
        note(observed, second + 1)
        clock.now += 1
    assert len(observed._samples) <= lag._SAMPLES
    assert observed.ages().oldest == 20_000
    for reached in (1_000, 10_000, 19_000, 19_990):
        settle(observed, (None, Position(reached)))
        true = clock.now - begun - reached
        assert true * 0.9 - 1 <= observed.ages().oldest <= true


def test_lag_in_seconds_while_changes_wait_for_their_commit(
    cluster, tmp_path, following, monkeypatch, clock
):
    monkeypatch.setattr(core, "_REST", 1e9)
    clock.monotonic = time.monotonic
    cluster.create_collection("_default.orders")
    cluster.upsert("first", {})
    found = []
    following(
        f"duckdb://{tmp_path}/d.duckdb",
        on_progress=found.append, tables="collection", commit_interval=3600,
    )  # fmt: skip
    until(lambda: found and (found[-1].phase, found[-1].lag_seconds) == ("following", 0))
    # To the clock here, a node's is an hour ahead.
    clock.off = -HOUR
    token = cluster.upsert("second", {}, collection="orders")
    until(lambda: (found[-1].lag_seconds or 0) > 1)
    last = found[-1]
    assert list(last.lag_seconds_by_vbucket) == [token.vbucket]
    assert last.lag_seconds_by_vbucket[token.vbucket] == last.lag_seconds < 20
    assert last.uncommitted == 1
    assert -HOUR < last.cas_lag_seconds < 20 - HOUR
    assert HOUR - 20 < last.cas_ahead_seconds <= HOUR
    # As if the document were from an old backup.
    clock.off = HOUR
    until(lambda: found[-1].cas_lag_seconds > HOUR)
    assert found[-1].lag_seconds < 20
