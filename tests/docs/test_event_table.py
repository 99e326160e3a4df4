"""The table of the log's events is that of the code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import event_table


def test_the_page_has_the_events_of_the_code():
    page = event_table.PAGE.read_text(encoding="utf-8")
    assert event_table.with_table(page) == page, "run `make event-table`"


def test_events_of_both_languages_are_found():
    found = {each.name: each for each in event_table.events()}
    assert found["connection_lost"].fields == ("node", "streams", "error")
    assert found["commit_slow"].level == "WARNING"
    assert found["rolled_back"].text.startswith("… vBuckets were rolled back")
    assert len(found) > 45
    assert all(each.text for each in found.values())
