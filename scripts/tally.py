"""Adds up the results of test runs, and fails if one of them failed or ran nothing.

Usage: scripts/tally.py [--no-skips] LOG...   (the output of `cargo test` and of pytest)

With --no-skips it also fails if a test was skipped, ignored or expected to fail: tests that CI does
not run prove nothing, and a count of them goes unread.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

# `test result: ok. 12 passed; 0 failed; 1 ignored; ...` and `=== 12 passed, 1 skipped in 3s ===`
CLOSING_LINE = re.compile(r"^(test result: .*|=+ (?=.*\d (passed|failed|error)).* in [\d.]+s.*=+)$")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|ignored|skipped|xfailed)")
MEANING = {
    "error": "failed",
    "errors": "failed",
    "ignored": "skipped",
    "xfailed": "skipped",
}


def tally(text: str) -> Counter[str]:
    """Counts passed, failed and skipped tests in the summary lines of `text`."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if CLOSING_LINE.match(line):
            for number, word in COUNT.findall(line):
                counts[MEANING.get(word, word)] += int(number)
    return counts


def main(arguments: list[str]) -> int:
    """Prints one line per log and a summary; returns the exit code."""
    forbids_skips = arguments[:1] == ["--no-skips"]
    total: Counter[str] = Counter()
    empty, skipped = [], []
    for path in map(Path, arguments[forbids_skips:]):
        counts = tally(path.read_text(encoding="utf-8", errors="replace"))
        print(
            f"{path.stem + ':':8} {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
        if not counts["passed"]:
            empty.append(path.stem)
        if forbids_skips and counts["skipped"]:
            skipped.append(path.stem)
        total += counts
    for name in empty:
        print(f"{name}: no test passed", file=sys.stderr)
    for name in skipped:
        print(f"{name}: tests were skipped; CI runs them all, see its log", file=sys.stderr)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if empty or skipped or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
