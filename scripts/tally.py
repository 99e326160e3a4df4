"""Adds up what the test runs counted, and fails if one of them ran nothing or failed.

Usage: scripts/tally.py LOG...   (the output of `cargo test` and of pytest)
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
    """Counts passed, failed and skipped tests in the closing lines of `text`."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if CLOSING_LINE.match(line):
            for number, word in COUNT.findall(line):
                counts[MEANING.get(word, word)] += int(number)
    return counts


def main(paths: list[str]) -> int:
    """Prints one line per log and the closing line; returns the exit code."""
    total: Counter[str] = Counter()
    empty = []
    for path in map(Path, paths):
        counts = tally(path.read_text(encoding="utf-8", errors="replace"))
        print(
            f"{path.stem + ':':8} {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
        if not counts["passed"]:
            empty.append(path.stem)
        total += counts
    for name in empty:
        print(f"{name}: no test passed", file=sys.stderr)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if empty or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
