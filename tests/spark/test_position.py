"""Where a query stands, by the order in which PySpark 4.0 and 4.1 call a source."""

import logging

import pytest

from dcp_rs.spark import SparkReadError
from dcp_rs.spark.position import Position, log_remaining

FIRST, SECOND, THIRD = ({"s": [seqno]} for seqno in (0, 5, 9))


@pytest.fixture
def position():
    return Position()


def never():
    raise AssertionError("the start is known")


def test_a_new_query_starts_at_its_initial_offsets(position):
    assert position.start(lambda: FIRST) == FIRST
    position.ends_at(SECOND)
    position.is_new()
    assert not position.is_planned(FIRST, SECOND)
    assert position.start(never) == SECOND


def test_a_restart_starts_at_the_end_of_the_newest_batch(position):
    assert not position.is_planned(SECOND, SECOND)
    assert position.start(never) == SECOND


def test_a_batch_that_was_planned_before_a_restart_comes_again(position):
    assert not position.is_planned(THIRD, THIRD)
    assert position.is_planned(SECOND, THIRD)
    assert position.start(never) == THIRD
    position.ends_at({"s": [12]})
    assert not position.is_planned(THIRD, {"s": [12]})


def test_a_first_batch_that_was_planned_comes_again(position):
    assert not position.is_planned(SECOND, SECOND)
    position.is_new()
    assert position.is_planned(FIRST, SECOND)
    assert position.start(never) == SECOND


@pytest.mark.parametrize("bounds", [(SECOND, SECOND), (SECOND, THIRD)])
def test_an_end_that_was_chosen_before_the_start_was_known_is_refused(position, bounds):
    position.start(lambda: FIRST)
    position.ends_at(THIRD)
    with pytest.raises(SparkReadError, match="triggerAvailableNowWrapper") as refused:
        position.is_planned(*bounds)
    assert refused.value.code == "COUCHBASE_DCP_SPARK_VERSION"


def test_what_a_batch_leaves_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "dcp_rs.spark"):
        log_remaining(SECOND, SECOND, "why")
        assert caplog.text == ""
        log_remaining(SECOND, THIRD, "why")
    assert "leaves 4 seqnos" in caplog.text
