"""What a server answers to a client that wants to go on."""

import json
import subprocess
import sys

import pytest

from dcp_rs import debug
from dcp_rs.exceptions import ConfigError
from reading import TRACES

ROWS = TRACES.parent / "rows"
DECISIONS, REQUESTS = (
    json.loads((ROWS / f"rollback_{name}.json").read_text()) for name in ("decisions", "requests")
)


def branch(name):
    """Gives the vbuuid a row calls by a letter; some are of none of the failover log."""
    return 0 if name == "0" else int.from_bytes(b"\x07" + name.encode())


def explain(row):
    start, end = row["snapshot"]
    return debug.explain_rollback(
        failover_log=[(branch(name), seqno) for name, seqno in row["table"]],
        high_seqno=row["high"],
        vbuuid=branch(row["uuid"]),
        start_seqno=row["start"],
        snapshot_start=start,
        snapshot_end=end,
        end_seqno=row.get("end", 2**64 - 1),
        purge_seqno=row.get("purge", 0),
        client_purge_seqno=row.get("client_purge", 0),
        collections_high_seqno=row.get("collection_high"),
        strict_vbuuid=row.get("strict", False),
        ignore_purged_tombstones=row.get("ignore_purged", False),
    )


def expected(row):
    """The row's outcome. Some rows call the decision with a start outside its snapshot, which no
    request gets as far as."""
    start, end = row["snapshot"]
    if not start <= row["start"] <= end:
        return "erange", None
    if row["expect"] == "continue" and row["start"] > row["high"]:
        return "erange", None
    return {"continue": "ok"}.get(row["expect"], row["expect"]), row.get("to")


def test_the_rows_are_there():
    assert len(DECISIONS) >= 20
    assert len(REQUESTS) >= 60
    assert {expected(row)[0] for row in REQUESTS} == {"ok", "rollback", "erange"}


@pytest.mark.parametrize("row", DECISIONS + REQUESTS, ids=lambda row: row["row"])
def test_the_answer_is_that_of_row(row):
    answer = explain(row)
    assert (answer.status, answer.seqno) == expected(row)
    # The numbers that decided are in the sentence.
    if answer.seqno is not None:
        assert f"seqno {answer.seqno}" in answer.reason
    if answer.status != "ok":
        assert str(row["start"]) in answer.reason or hex(branch(row["uuid"])) in answer.reason


BASE = {
    "failover_log": [(0xB, 60), (0xA, 0)],
    "high_seqno": 100,
    "vbuuid": 0xB,
    "start_seqno": 80,
    "snapshot_start": 80,
    "snapshot_end": 80,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["0xb", "newest", "high seqno 100", "start seqno 80"]),
        ({"start_seqno": 0, "snapshot_start": 0}, ["starts from seqno 0"]),
        ({"vbuuid": 0xA}, ["0xa", "up to seqno 60", "0xb begins", "stands at seqno 80"]),
        (
            {"vbuuid": 0xA, "snapshot_start": 50, "start_seqno": 70},
            ["up to seqno 60", "inside snapshot [50, 80]", "seqno 50"],
        ),
        ({"vbuuid": 0xC}, ["vbuuid 0xc", "not among the 2", "newest of which is 0xb"]),
        ({"purge_seqno": 90}, ["start seqno 80", "below the purge seqno 90", "missed"]),
        ({"snapshot_start": 81, "snapshot_end": 90}, ["80 is not within snapshot [81, 90]"]),
        ({"end_seqno": 79}, ["start seqno 80 is greater than end seqno 79"]),
        (
            {"failover_log": [(0xB, 90), (0xA, 0)], "high_seqno": 70, "vbuuid": 0xA},
            ["start seqno 80 is greater than", "high seqno 70"],
        ),
    ],
)
def test_the_reason_names_the_rule_and_the_numbers(change, words):
    reason = debug.explain_rollback(**BASE | change).reason
    assert [word for word in words if word not in reason] == [], reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failover_log": []}, "at least one entry"),
        ({"failover_log": [(1, 0)] * 26}, "at most 25 entries, not 26"),
        ({"failover_log": [(1, 0), (2, 5)]}, "entry 1 begins at seqno 5.*newest first"),
        ({"failover_log": [(0, 0)]}, "entry 0 has vbuuid 0"),
        ({"failover_log": [1, 2]}, "failover_log: must be pairs"),
        ({"failover_log": [(1, -1)]}, "failover_log: seqno: -1 is not from 0"),
        ({"high_seqno": 2**64}, "high_seqno: 18446744073709551616 is not from 0"),
        ({"start_seqno": "1"}, "start_seqno: must be a whole number, not str"),
        ({"strict_vbuuid": 1}, "strict_vbuuid: must be True or False, not int"),
    ],
)
def test_arguments_that_are_no_seqnos_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        debug.explain_rollback(**BASE | change)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dcp_rs", "explain-rollback", *arguments],
        capture_output=True, timeout=60, text=True,
    )  # fmt: skip


REQUEST = (
    "--failover-log", "0xbeef:900,0xcafe:0", "--high-seqno", "950",
    "--vbuuid", "0xcafe", "--start-seqno", "1000",
)  # fmt: skip


def test_the_command_shows_a_table():
    done = command(*REQUEST, "--output", "table")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[:3] == [
        "  branch  from   to",
        "  0xbeef   900  950",
        "* 0xcafe     0  900",
    ]
    assert "answer  ROLLBACK to 900" in shown
    assert any(line.startswith("reason  branch 0xcafe is shared up to seqno 900") for line in shown)
    assert max(map(len, shown)) <= 100


def test_the_command_prints_json():
    answer = json.loads(command(*REQUEST, "--json").stdout)
    assert (answer["status"], answer["seqno"]) == ("rollback", 900)
    assert "0xbeef begins" in answer["reason"]
    ok = json.loads(command(*REQUEST, "--start-seqno", "900", "--json").stdout)
    assert (ok["status"], ok["seqno"]) == ("ok", None)


@pytest.mark.parametrize("wrong", ["12", "x:1", "1:0x1_0", "1:99999999999999999999"])
def test_a_failover_log_that_is_none_is_a_wrong_command_line(wrong):
    done = command("--failover-log", wrong, *REQUEST[2:])
    assert done.returncode == 2
    assert "--failover-log" in done.stderr
