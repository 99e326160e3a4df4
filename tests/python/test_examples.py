"""The programs of `examples/` do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Lines that follow how many changes there were.
PRINTED = {
    "duckdb_table.py": ["_default._default: 20 documents"],
    "postgres_table.py": ["key_0: Airline 0, 0", "key_1: Airline 1, 1", "key_2: Airline 2, 2"],
    "delta_table.py": ["20 documents in version 1"],
    "iceberg_log.py": ["mutation: 20"],
    "parquet_log.py": ["20 changes in 1 files"],
}


def test_every_example_is_run():
    # tests/spark runs the one that needs Spark.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED, "spark_table.py"}


@pytest.mark.parametrize("program", PRINTED)
def test_the_program_writes_and_shows_what_it_wrote(cluster, request, tmp_path, program):
    for n in range(20):
        cluster.upsert(f"key_{n}", {"name": f"Airline {n}", "n": n})
    where = tmp_path / "replica"
    if program.startswith("postgres"):
        where = request.getfixturevalue("postgres_database")
    for again in (False, True):
        done = subprocess.run(
            [
                sys.executable, "-W", "ignore", str(EXAMPLES / program),
                f"{cluster.connection_string}/default", str(where),
            ],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        changes = "0 changes in 0 commits" if again else "20 changes in 1 commits"
        assert done.stdout.splitlines() == [changes, *PRINTED[program]]
