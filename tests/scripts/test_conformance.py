"""The conformance tables are held against what ran."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("conformance", ROOT / "scripts" / "conformance.py")
conformance = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(conformance)

TABLE = {
    "rows": {"SS": [1, 2, 4], "CM": [1]},
    "classes": {"other-end": "what the other end does"},
    "producer": {"CM-01": "other-end"},
    "consumer": {},
}
LOG = """
     Running tests/producer/main.rs (target/debug/deps/producer-0123456789abcdef)
test rows::ss_01_to_ss_02_are_so ... ok
test rows::ss_04_is_not ... FAILED
     Running tests/consumer/main.rs (target/debug/deps/consumer-0123456789abcdef)
test a_name_without_a_row ... ok
"""


def wrong(notes, log=LOG, **table):
    found = conformance.ran(log, notes, TABLE["rows"])
    return conformance.check(TABLE | table, found)


def test_only_what_ran_counts():
    notes = (
        "consumer SS-01 Held\nconsumer SS-02 Held\nconsumer SS-04 Departs\nconsumer CM-01 Held\n"
    )
    assert wrong(notes) == ["SS-04 did not run for the producer, and nothing says why"]
    assert wrong(notes + "producer SS-04 Held\n") == []
    missing = wrong(notes.replace("consumer CM-01 Held\n", "producer SS-04 Held\n"))
    assert missing == ["CM-01 did not run for the consumer, and nothing says why"]


@pytest.mark.parametrize(("one", "other"), [("Departs", "Held"), ("Held", "Departs")])
def test_a_row_that_departs_anywhere_is_not_held(one, other):
    notes = f"consumer SS-01 {one}\nconsumer SS-01 {other}\n"
    assert conformance.ran("", notes, TABLE["rows"])["consumer"]["SS-01"] == "Departs"


def test_an_exemption_that_does_not_hold_is_told():
    notes = "producer SS-04 Held\n" + "".join(
        f"consumer {row} Held\n" for row in ("SS-01", "SS-02", "SS-04", "CM-01")
    )
    assert wrong(notes) == []
    hidden = wrong(notes, consumer={"SS-04": "other-end"})
    assert hidden == ["SS-04 runs for the consumer, though it is exempt: other-end"]
    for name in ["SS-03", "SS"]:
        unknown = wrong(notes, consumer={name: "other-end"})
        assert unknown == [f"{name} is no row, yet exempt for the consumer"]


def test_an_exemption_is_of_a_class_and_a_class_has_a_reason_and_rows():
    notes = "producer SS-04 Held\n" + "".join(
        f"consumer {row} Held\n" for row in ("SS-01", "SS-02", "CM-01")
    )
    none = wrong(notes, consumer={"SS-04": "there is no way to test it"})
    assert none == [
        "SS-04 is exempt for the consumer for a reason of no class: there is no way to test it"
    ]
    exempt = {"SS-04": "other-end"}
    assert wrong(notes, consumer=exempt) == []
    classes = {"other-end": "", "older-server": "about servers before 8.0"}
    assert wrong(notes, consumer=exempt, classes=classes) == [
        "class other-end has no reason",
        "no row is of class older-server",
    ]


def test_the_table_counts_rows_and_classes():
    found = conformance.ran(LOG, "consumer SS-01 Departs\n", TABLE["rows"])
    shown = conformance.printed(TABLE, found).splitlines()
    assert shown[:5] == [
        "producer   rows  held departs exempt",
        "  SS          3     2       0      1",
        "  CM          1     0       0      1",
        "  all         4     2       0      2",
        "  exempt, other-end: 1",
    ]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ss_01_a_thing", {"SS-01"}),
        ("rows::ss_01_and_ss_04_are_alike", {"SS-01", "SS-04"}),
        ("ss_01_to_ss_04", {"SS-01", "SS-02", "SS-04"}),
        ("ss_03_is_no_row", set()),
        ("a_class_01_thing", set()),
    ],
)
def test_names_have_rows(name, rows):
    assert conformance.named(name, TABLE["rows"]) == rows


def test_the_tables_exempt_no_table_that_is_not_there_and_departures_are_decided():
    table = json.loads((ROOT / "tests" / "conformance.json").read_text())
    assert sum(map(len, table["rows"].values())) == 524
    rows = json.loads((ROOT / "tests/rows/consumer.json").read_text())
    decision = (ROOT / "docs/decisions/0015-what-the-consumer-tolerates.md").read_text()
    departing = {row["row"] for row in rows if "departs" in row}
    assert set(re.findall(r"\b[A-Z]{2}-\d\d\b", decision)) == departing
