"""Each known defect of change consumers has a test that fails with it, or cannot occur.

`tests/defects.json` lists them: those that were found by reading other consumers, by number, and
others that their users met. A test is named by its file, from `crates/` or from here, and its name.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = json.loads((ROOT / "tests" / "defects.json").read_text())


def exists(test):
    path, name = test.split(": ")
    is_python = path.endswith(".py")
    file = ROOT / path if is_python else ROOT / "crates" / path
    # Rust's attribute may have arguments, and others may follow it.
    attributes = r"test(\(.*\))?\]\n( *#\[.*\]\n)* *(async )?"
    wanted = rf"^ *def test_{name}\(" if is_python else rf"{attributes}fn {name}\("
    return file.is_file() and re.search(wanted, file.read_text(), re.MULTILINE) is not None


def test_every_defect_has_tests_that_exist_or_says_why_not():
    assert list(LIST["numbered"]) == [str(number) for number in range(1, 45)]
    rows = [*LIST["numbered"].values(), *LIST["others"]]
    for row in rows:
        assert row["defect"]
        assert row.get("tests") or len(row["why_not"]) > 10, row
    named = {test for row in rows for test in row.get("tests", [])}
    assert sorted(test for test in named if not exists(test)) == []


def test_a_test_that_is_not_there_is_noticed():
    assert not exists("dcp-proto/src/consumer/tests/rules.rs: rule_99")
    assert not exists("dcp-proto/src/consumer/tests/rules.rs: inside_the_third_snapshot"), "no test"
    assert not exists("tests/python/no_such_file.py: anything")
