"""The choice of versions to try, which must leave none out."""

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_rs import _libraries

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import libraries

PROGRAM = Path(libraries.__file__)
RELEASED = [
    "2.1.0",
    "2.0.1",
    "2.0.0",
    "1.10.0",
    "1.9.3",
    "1.9.2",
    "1.9.0rc1",
    "1.8.1",
    "1.8.0",
    "0.9",
]


@pytest.mark.parametrize(
    ("lowest", "newest", "tried"),
    [
        ("1.8.0", "2.0.0", ["1.8.1", "1.9.3", "1.10.0"]),
        ("1.8.1", "2.0.0", ["1.9.3", "1.10.0"]),
        ("1.9.3", "1.10.0", []),
        ("0.9", "1.9.2", ["1.8.1"]),
        ("2.0.0", "2.1.0", ["2.0.1"]),
    ],
)
def test_the_last_release_of_each_minor_version_is_tried(lowest, newest, tried):
    assert libraries.between(RELEASED, lowest, newest) == tried


def test_every_library_that_has_a_floor_is_tried():
    with_duckdb = {each for each in _libraries.TESTED if each.startswith("duckdb-extension-")}
    assert set(libraries.TESTS) == set(_libraries.TESTED) - {"pyspark", "ray"} - with_duckdb


def test_the_tests_of_each_library_are_there():
    for library, chosen in libraries.TESTS.items():
        found = [each for each in libraries.arguments_for(library) if each.endswith(".py")]
        assert len(found) >= len(chosen), library
    done = subprocess.run([sys.executable, PROGRAM, "tests"], capture_output=True, text=True)
    printed = done.stdout.split()
    assert printed[:2] == ["-W", "ignore::DeprecationWarning"]
    of_duckdb = {*libraries.arguments_for("duckdb"), "tests/python/test_libraries.py"}
    left_out = {f"tests/python/{each}.py" for each in libraries.ONLY_BETWEEN}
    assert of_duckdb & left_out
    assert of_duckdb - left_out < {*printed}
    assert not left_out & {*printed}


def test_a_library_without_tests_is_named():
    done = subprocess.run(
        [sys.executable, PROGRAM, "between", "a.whl", "numpy"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "there are no tests of numpy, only of adbc-driver-postgresql" in done.stderr
    assert subprocess.run([sys.executable, PROGRAM], capture_output=True).returncode == 2
