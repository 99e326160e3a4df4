"""Each known defect of change consumers has a test that fails with it, or cannot occur.

`tests/defects.json` lists them: those that were found by reading other consumers, by number, and
others that their users met. A test is named by its file, from `crates/` or from here, and its name.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = json.loads((ROOT / "tests" / "defects.json").read_text())
SPEC = importlib.util.spec_from_file_location(
    "put_in_defects", ROOT / "scripts" / "put_in_defects.py"
)
# A dataclass looks its module up.
put_in_defects = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(put_in_defects)
MUTATIONS = put_in_defects.mutations(LIST)


def exists(test):
    path, name = test.split(": ")
    is_python = path.endswith(".py")
    file = ROOT / path if path.startswith("tests/") else ROOT / "crates" / path
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
    assert not exists("dcp-proto/tests/consumer/rules.rs: rule_99")
    assert not exists("dcp-proto/tests/consumer/rules.rs: inside_the_third_snapshot"), "no test"
    assert not exists("tests/python/no_such_file.py: anything")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.row)
def test_a_defect_can_still_be_put_in(mutation, capsys):
    assert put_in_defects.check_texts([mutation]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "find"), [("Cargo.toml", "no such line"), ("no/such/file", "members")]
)
def test_a_defect_whose_line_has_changed_is_told(file, find, capsys):
    edit = put_in_defects.Edit(file, find, "else")
    assert put_in_defects.check_texts([put_in_defects.Mutation("7", "one", (edit,), ())]) == 1
    told = capsys.readouterr().out
    assert file in told
    assert "1 defects" in told


def test_every_test_named_fails_with_some_form_of_its_defect():
    for name, row in put_in_defects.rows(LIST):
        found = {test for each in MUTATIONS if each.row == name for test in each.tests}
        assert found == set(row.get("tests", [])), name


@pytest.mark.parametrize("text", ["one two", "one one one two", "two"])
def test_a_text_that_is_not_there_once_is_an_error(text, tmp_path):
    (tmp_path / "file").write_text(text)
    edits = [put_in_defects.Edit("file", "two", "three"), put_in_defects.Edit("file", "one", "0")]
    if text == "one two":
        with put_in_defects.put_in(tmp_path, edits):
            assert (tmp_path / "file").read_text() == "0 three"
    else:
        with (
            pytest.raises(put_in_defects.DefectError, match="instead of once"),
            put_in_defects.put_in(tmp_path, edits),
        ):
            pytest.fail("it was put in")
    assert (tmp_path / "file").read_text() == text, "undone"


def test_a_test_is_run_where_it_lies():
    places = {
        "dcp-proto/src/plan/tests.rs: a": ("-p", "dcp-proto", "--lib"),
        "tests/sim/worlds/main.rs: b": ("--release", "-p", "dcp-sim", "--test", "worlds"),
        "dcp-arrow/tests/it/values.rs: c": ("-p", "dcp-arrow", "--test", "it"),
        "tests/python/test_rows.py: d": ("pytest", "tests/python/test_rows.py"),
    }
    for test, place in places.items():
        assert put_in_defects.place_of(test) == place


def test_worlds_are_run_for_their_own_defects_only():
    chosen = list(put_in_defects.by_worlds(MUTATIONS))
    assert 20 < len(chosen) < len(MUTATIONS)
    assert {test for each in chosen for test in each.tests} == {
        "tests/sim/worlds/main.rs: worlds_hold"
    }


@pytest.fixture
def bench(tmp_path):
    """Makes a checkout of one crate, named as the extension module's, and one Python module."""
    files = {
        "Cargo.toml": '[workspace]\nmembers = ["crates/dcp-python"]\nresolver = "2"\n',
        "crates/dcp-python/Cargo.toml": '[package]\nname = "dcp-python"\nversion = "0.1.0"\n',
        "crates/dcp-python/src/lib.rs": "pub fn sum(a: u8, b: u8) -> u8 {\n    a + b\n}\n"
        "#[test]\nfn one_and_two() {\n    assert_eq!(sum(1, 2), 3);\n}\n",
        "python/sums.py": "def sum_of(a, b):\n    return a + b\n",
        # Imported where a test fails, not where it is collected.
        "tests/python/test_sums.py": "def test_one_and_two():\n    import sums\n\n"
        "    assert sums.sum_of(1, 2) == 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    bench = put_in_defects.Bench(tmp_path, tmp_path / "target", built_with=())
    code, out = bench.run(["cargo", "generate-lockfile", "--offline"])
    assert code == 0, out
    return bench


RUST = ("crates/dcp-python/src/lib.rs", "dcp-python/src/lib.rs: one_and_two")
PYTHON = ("python/sums.py", "tests/python/test_sums.py: one_and_two")


def sum_defect(place, replacement):
    file, test = place
    edit = put_in_defects.Edit(file, "a + b", replacement)
    return put_in_defects.Mutation("7", "a wrong sum", (edit,), (test,))


def test_a_defect_that_does_not_compile_is_broken_and_not_found(bench, capsys):
    for place, lines in ((RUST, "a - b"), (PYTHON, "a - b")):
        assert put_in_defects.try_all(bench, [sum_defect(place, lines)], unchecked=False) == 0
        assert "1 of 1 defects found by every test named for them\n" in capsys.readouterr().out
        assert put_in_defects.try_all(bench, [sum_defect(place, "b + a")], unchecked=True) == 1
        told = capsys.readouterr().out
        assert "NOT FOUND by" in told
        assert "0 of 1 defects found by every test named for them\n" in told
        assert put_in_defects.try_all(bench, [sum_defect(place, "a +")], unchecked=True) == 1
        told = capsys.readouterr().out
        assert f"   7  {place[0]}: BROKEN: it does not compile:" in told.splitlines()
        assert "0 of 1 defects found by every test named for them, 1 broken\n" in told


def test_broken_defects_are_told_without_running_a_test(bench, capsys):
    sound = [sum_defect(place, "a - b") for place in (RUST, PYTHON)]
    assert put_in_defects.check_compiles(bench, sound) == 0
    assert capsys.readouterr().out == "2 of 2 defects compile\n"
    # It compiles by itself, but not the test that calls it.
    signature = put_in_defects.Edit(RUST[0], "sum(a: u8, b: u8)", "sum(a: u8, b: u8, _: u8)")
    broken = [
        put_in_defects.Mutation("8", "a wrong type", (signature,), (RUST[1],)),
        sum_defect(PYTHON, "a +"),
    ]
    assert put_in_defects.check_compiles(bench, [*sound, *broken]) == 1
    told = capsys.readouterr().out
    assert [line[:4].strip() for line in told.splitlines() if "BROKEN" in line] == ["8", "7"]
    assert told.endswith("2 of 4 defects compile\n")


def test_a_slow_compiler_says_nothing_of_a_defect(bench, capsys, monkeypatch):
    monkeypatch.setattr(put_in_defects, "PATIENCE_WITH_COMPILER", 0.001)
    assert put_in_defects.try_all(bench, [sum_defect(RUST, "a - b")], unchecked=True) == 1
    told = capsys.readouterr().out
    assert "takes longer than" in told
    assert "BROKEN" not in told
    assert "broken" not in told


def test_each_report_of_another_client_has_a_test_that_exists():
    reports = json.loads((ROOT / "docs" / "reports.json").read_text())
    assert len(reports) > 30
    assert [each["test"] for each in reports if not exists(each["test"])] == []
    page = " ".join((ROOT / "docs" / "reliability.md").read_text().replace("`", "").split())
    assert [each["reported"] for each in reports if each["reported"] not in page] == []
