"""Compares the conformance tables with the tests that ran, for both ends of a connection.

Usage: scripts/conformance.py LOG NOTES

`tests/conformance.json` lists the rows and, for each end, those that are exempt, each with a class;
the classes have reasons. LOG is the output of `cargo test`: a test with a row's number in its name
(`ss_01_...`, `sm_19_to_sm_24`) covers the row. NOTES is written by tests that play rows as data.
The check fails for a row that did not run and is not exempt, for an exempt row that did run, and
for an exemption without a class. Finally the table is printed, with the number of exempt rows by
class.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "tests" / "conformance.json"
ENDS = ("producer", "consumer")

# The end of a connection that a program's tests cover, by source file.
_PROGRAMS = {
    "tests/wire/": ENDS,
    "crates/dcp-wire/src/": ENDS,
    "tests/producer/": ("producer",),
    "crates/dcp-producer-proto/src/": ("producer",),
    "tests/it/": ("producer",),
    "crates/dcp-producer/src/": ("producer",),
    "tests/consumer/": ("consumer",),
    "crates/dcp-proto/src/": ("consumer",),
    "tests/integration/": ("consumer",),
    "crates/dcp-consumer/src/": ("consumer",),
}
_CRATE = re.compile(r"^ +Running (?:unittests )?(\S+) \(.*/deps/(\w+)-[0-9a-f]+\)$")
_TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. ok$")
_WEIGHT = {"Held": 0, "Departs": 1}
_ROW = re.compile(r"(?<![a-z0-9])([a-z]{2})_(\d\d)(?=_|$)")


def named(test: str, tables: dict[str, list[int]]) -> set[str]:
    """Returns the rows in a test's name: `ss_01`, or all of `ss_01_to_ss_04`."""
    found: set[str] = set()
    name, last = test.rsplit("::", 1)[-1], None
    for each in _ROW.finditer(name):
        table, number = each[1].upper(), int(each[2])
        if number not in tables.get(table, []):
            continue
        first = number
        if last is not None and last[0] == table and name[: each.start()].endswith("_to_"):
            first = last[1]
        found |= {f"{table}-{n:02}" for n in tables[table] if first <= n <= number}
        last = table, number
    return found


def ends_of(source: str, program: str) -> tuple[str, ...]:
    """Returns the ends of a connection that a program's tests cover."""
    if source == "src/lib.rs":
        source = f"crates/{program.replace('_', '-')}/src/"
    return next((ends for start, ends in _PROGRAMS.items() if source.startswith(start)), ())


def ran(log: str, notes: str, tables: dict[str, list[int]]) -> dict[str, dict[str, str]]:
    """Returns the outcome of each row at each end: `Held` or `Departs`."""
    found: dict[str, dict[str, str]] = {end: {} for end in ENDS}
    for line in notes.splitlines():
        end, row, outcome = line.split()
        # A row departs if any of its answers does.
        if _WEIGHT[outcome] > _WEIGHT.get(found[end].get(row, ""), -1):
            found[end][row] = outcome
    program = ("", "")
    for line in log.splitlines():
        if match := _CRATE.match(line):
            program = match[1], match[2]
        elif match := _TEST.match(line):
            for end in ends_of(*program):
                for row in named(match[1], tables):
                    found[end].setdefault(row, "Held")
    return found


def check(table: dict[str, dict[str, object]], found: dict[str, dict[str, str]]) -> list[str]:
    """Returns problems: rows that did not run, invalid exemptions, unknown names."""
    tables: dict[str, list[int]] = table["rows"]  # type: ignore[assignment]
    rows = {f"{name}-{n:02}" for name, numbers in tables.items() for n in numbers}
    classes: dict[str, str] = table["classes"]  # type: ignore[assignment]
    wrong = [f"class {name} has no reason" for name, why in classes.items() if len(why) < 10]
    used = {each for end in ENDS for each in table[end].values()}
    wrong += [f"no row is of class {name}" for name in classes if name not in used]
    for end in ENDS:
        exempt: dict[str, str] = table[end]  # type: ignore[assignment]
        wrong += [
            f"{name} is no row, yet exempt for the {end}" for name in exempt if name not in rows
        ]
        wrong += [
            f"{name} is exempt for the {end} for a reason of no class: {why}"
            for name, why in exempt.items()
            if why not in classes
        ]
        for row in sorted(rows):
            outcome = found[end].get(row)
            if outcome is None and row not in exempt:
                wrong.append(f"{row} did not run for the {end}, and nothing says why")
            if outcome is not None and row in exempt:
                wrong.append(f"{row} runs for the {end}, though it is exempt: {exempt[row]}")
    return wrong


def printed(table: dict[str, dict[str, object]], found: dict[str, dict[str, str]]) -> str:
    """Returns the table: the number of rows by outcome, end and group, and by class."""
    tables: dict[str, list[int]] = table["rows"]  # type: ignore[assignment]
    lines = []
    for end in ENDS:
        total: Counter[str] = Counter()
        lines.append(f"{end:<10} rows  held departs exempt")
        for name, numbers in tables.items():
            counts = Counter(found[end].get(f"{name}-{n:02}", "exempt") for n in numbers)
            total += counts
            lines.append(_line(name, len(numbers), counts))
        lines.append(_line("all", sum(map(len, tables.values())), total))
        of_class = Counter(table[end].values())
        lines += [f"  exempt, {name}: {count}" for name, count in of_class.most_common()]
    return "\n".join(lines)


def _line(name: str, rows: int, counts: Counter[str]) -> str:
    return f"  {name:<8} {rows:>4} {counts['Held']:>5} {counts['Departs']:>7} {counts['exempt']:>6}"


def main(log: str, notes: str) -> int:
    """Checks and prints the table; returns the exit code."""
    table = json.loads(TABLE.read_text())
    found = ran(Path(log).read_text(), Path(notes).read_text(), table["rows"])
    wrong = check(table, found)
    print(printed(table, found))
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
