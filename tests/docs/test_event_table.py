"""The table of the log's events is that of the code."""

import ast
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


def test_each_record_from_info_up_has_an_event():
    for path in (event_table.ROOT / "python/dcp_rs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = getattr(node.func.value, "id", "")
                is_told = node.func.attr in {"info", "warning", "error", "exception"}
                has_event = any(each.arg == "extra" for each in node.keywords)
                assert has_event or not (of == "_log" and is_told), f"{path.name}:{node.lineno}"
