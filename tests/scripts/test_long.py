"""The long run, which must say what it proved, and never more."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import long
from long import Stage

PASSES = Stage("one", "that one holds", ["echo", "=== 7 passed, 2 skipped in 0.51s ==="])
FAILS = Stage("two", "that two holds", ["sh", "-c", "echo '=== 1 failed in 1.0s ==='; exit 1"])
SILENT = Stage("three", "that three holds", ["true"])
QUIET = Stage("four", "that four holds", ["true"], has_tests=False)


@pytest.fixture(autouse=True)
def _logs(tmp_path, monkeypatch):
    monkeypatch.setattr(long, "LOG", tmp_path)
    monkeypatch.setattr(long, "ROOT", tmp_path)


def test_every_stage_runs_and_the_table_says_what_each_proved(tmp_path, capsys):
    assert long.main([], [FAILS, PASSES, QUIET]) == 1
    table = capsys.readouterr().out.split("long run of commit ")[1].splitlines()
    assert [line.split()[0] for line in table[2:]] == [
        "two", "that", "0", "one", "that", "7", "four", "that"
    ]  # fmt: skip
    assert "7 passed, 0 failed, 2 skipped" in table[7]
    told = json.loads((tmp_path / "long.json").read_text())
    results = [stage["result"].split(":")[0] for stage in told["stages"]]
    assert results == ["failed with 1", "passed", "passed"]


def test_tests_that_did_not_run_prove_nothing():
    assert long.main([], [SILENT]) == 1
    assert long.main([], [QUIET]) == 0


def test_the_table_has_what_a_stage_without_tests_found(tmp_path, capsys):
    said = ["echo", "building\n3 of 4 defects found\n  one missed"]
    finds = Stage("five", "that five holds", said, has_tests=False, findings=r"\d of .*|  one .*")
    assert long.main([], [finds]) == 0
    table = capsys.readouterr().out
    assert "3 of 4 defects found\n" in table
    assert "one missed\n" in table
    assert "building" not in table
    (stage,) = json.loads((tmp_path / "long.json").read_text())["stages"]
    assert stage["findings"] == ["3 of 4 defects found", "  one missed"]
    finds.command = ["true"]
    assert long.main([], [finds]) == 1, "it found nothing"


def test_stages_are_chosen_by_name(tmp_path):
    assert long.main(["one"], [FAILS, PASSES]) == 0
    assert [path.name for path in tmp_path.glob("*.log")] == ["long-one.log"]
    with pytest.raises(SystemExit):
        long.main(["five"], [PASSES])


def test_the_stages_name_files_that_are_there_and_the_seeds():
    root = Path(__file__).parents[2]
    stages = long.stages(40_000)
    files = [part for stage in stages for part in stage.command if part.endswith(".py")]
    assert files
    assert all((root / file).is_file() for file in files)
    worlds = next(stage for stage in stages if stage.name == "worlds")
    assert worlds.environment["DCP_SIM_FIRST"] == "40000"
    assert "seeds 40000 to 59999" in worlds.proves
    assert "ARGS=--shard 2/16" in next(stage for stage in stages if stage.name == "mutants").command
