"""dcp_rs goes through the faults of the differential runs, and the judge of those is judged."""

from __future__ import annotations

import differential
import pytest
from judge import Reading, Version, judge
from scenarios import SCENARIOS

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120, func_only=True)]

# Here dcp_rs refuses to go on: what the checkpoint stands for is no more, and the documents that
# the reader has of it are not those of its successor. It says so, and nothing is lost in silence.
REFUSED = {
    "collection recreated": "the stream also asks for collection inventory.airlines",
    "bucket recreated": "the bucket was recreated",
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_dcp_rs_loses_doubles_and_stalls_nothing(scenario):
    command = differential.command_of("dcp_rs")
    verdict = differential.play(scenario, "dcp_rs", command, noop=2.0, unknown=10.0)
    if reason := REFUSED.get(scenario.name):
        assert verdict.words == "stopped"
        assert verdict.faults["stopped"].startswith("CheckpointError: ")
        assert reason in verdict.faults["stopped"]
    else:
        assert verdict.words == "right", verdict.faults


def change(seqno, key, cas, op="mutation"):
    return {
        "line": "change", "vb": 1, "seqno": seqno, "key": key, "cas": cas, "op": op, "collection": 0
    }  # fmt: skip


FIRST = [change(1, "a", 10), change(2, "b", 20), {"line": "vbucket", "vb": 1, "seqno": 2}]
ROLLBACK = {"line": "rollback", "vb": 1, "to": 1}
TRUTH = {(0, "a"): Version(10, gone=False), (0, "b"): Version(30, gone=True)}
GONE = change(3, "b", 30, "deletion")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Reading([GONE]), "right"),
        # A deletion that did not come.
        (Reading([]), "lost"),
        # The newest version came, and an older one after it.
        (Reading([GONE, change(4, "b", 20)]), "lost"),
        # Stored as read, and yet sent again.
        (Reading([change(2, "b", 20), GONE]), "doubled"),
        # Twice in one process.
        (Reading([GONE, GONE]), "doubled"),
        # What a rollback takes back comes again.
        (Reading([ROLLBACK, change(2, "b", 20), GONE]), "right"),
        # What it takes back and what does not come again is lost.
        (Reading([{**ROLLBACK, "to": 0}, GONE]), "lost"),
        # Nobody knows what it would have read.
        (Reading([], stalled="not caught up in 1 s"), "stalled"),
        (Reading([], stopped="panic: no"), "stopped"),
        (Reading([change(1, "a", 10)], stopped="panic: no"), "stopped, doubled"),
    ],
)
def test_the_judge_gives_each_verdict(second, words):
    assert judge(TRUTH, [Reading(FIRST), second]).words == words


def test_what_a_crash_did_not_store_may_come_again():
    crashed = Reading([change(1, "a", 10), change(2, "b", 20), {**FIRST[-1], "seqno": 1}])
    assert judge(TRUTH, [crashed, Reading([change(2, "b", 20), GONE])]).words == "right"


def test_a_change_that_was_not_acknowledged_is_lost_if_it_does_not_come_again():
    held = {"line": "unacknowledged", "vb": 1, "seqno": 1}
    crashed = Reading([held, change(2, "b", 20), FIRST[-1]])
    assert judge(TRUTH, [crashed, Reading([GONE])]).words == "lost"
