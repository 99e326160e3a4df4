"""The counting of tests, which must not take a run that did nothing for a good one."""

import subprocess
import sys
from pathlib import Path

import pytest

TALLY = Path(__file__).parents[2] / "scripts" / "tally.py"

CARGO = """
running 3 tests
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s
test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
"""
PYTEST = "collected 9 items\n=================== 7 passed, 2 skipped in 0.51s ===================\n"
LONG = "=================== 7 passed, 2 skipped in 61.51s (0:01:01) ===================\n"
FAILED = "========== 1 failed, 6 passed, 1 error in 2.5s ==========\n"


def tally(tmp_path, *options, **logs):
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    paths = [tmp_path / f"{name}.log" for name in logs]
    return subprocess.run([sys.executable, TALLY, *options, *paths], capture_output=True, text=True)


@pytest.mark.parametrize("python", [PYTEST, LONG])
def test_counts_are_added(tmp_path, python):
    finished = tally(tmp_path, rust=CARGO, python=python)
    assert finished.stdout.splitlines()[-1] == "14 passed, 0 failed, 3 skipped"
    assert finished.returncode == 0


def test_a_failure_fails(tmp_path):
    finished = tally(tmp_path, rust=CARGO, python=FAILED)
    assert finished.stdout.splitlines()[-1] == "13 passed, 2 failed, 1 skipped"
    assert finished.returncode == 1


def test_a_run_without_a_passed_test_fails(tmp_path):
    finished = tally(tmp_path, rust=CARGO, spark="=== no tests ran in 0.01s ===\n")
    assert finished.returncode == 1
    assert "spark: no test passed" in finished.stderr


def test_a_skip_fails_where_none_may_be(tmp_path):
    passed = "=================== 7 passed in 0.51s ===================\n"
    whole = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n"
    finished = tally(tmp_path, "--no-skips", rust=whole, python=passed)
    assert finished.returncode == 0
    assert finished.stdout.splitlines()[-1] == "10 passed, 0 failed, 0 skipped"
    for logs in [{"rust": CARGO, "python": passed}, {"rust": whole, "python": PYTEST}]:
        finished = tally(tmp_path, "--no-skips", **logs)
        assert finished.returncode == 1
        assert "tests were skipped" in finished.stderr
        assert tally(tmp_path, **logs).returncode == 0
