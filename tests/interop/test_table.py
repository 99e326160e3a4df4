"""The table of clients and scenarios is true."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_table_names_tests_that_are_there():
    defined = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    rows = [
        [cell.strip(" `") for cell in line.strip("|\n").split("|")]
        for line in (HERE / "README.md").read_text().splitlines()
        if "`test_" in line and line.startswith("|") and line.count("|") == 6
    ]
    named = {cell for row in rows for cell in row[1:] if cell != "-"}
    assert named
    assert named <= defined
    # Of what the clients are tried with, each has its cell.
    scenarios = {row[0]: row[1:] for row in rows}
    for scenario in ("resume", "rollback after a failover", "rebalance", "collections", "noop"):
        assert "-" not in scenarios[scenario], scenario
