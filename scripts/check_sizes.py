"""Warns of long source files, and fails for files that are too long.

Files are split by responsibility, so the limit leaves room for a large one.

Usage: scripts/check_sizes.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WARN_ABOVE = 600
FAIL_ABOVE = 1000
ENDINGS = (".rs", ".py", ".pyi", ".go", ".java", ".sh")


def long_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns warnings and failures for the long files among tracked and new ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    sources = [folder / name for name in listed if name.endswith(ENDINGS)]
    warnings, failures = [], []
    for path in sources:
        # Git lists a deleted file until the deletion is committed.
        lines = len(path.read_text().splitlines()) if path.is_file() else 0
        if lines > FAIL_ABOVE:
            failures.append(f"{path.relative_to(folder)}: {lines} lines, at most {FAIL_ABOVE}")
        elif lines > WARN_ABOVE:
            warnings.append(f"{path.relative_to(folder)}: {lines} lines; does it do one thing?")
    if not sources:
        failures.append(f"{folder} has no source file: nothing was checked")
    return warnings, failures


def main(arguments: list[str]) -> int:
    """Prints the long files; returns the exit code."""
    warnings, failures = long_files(Path(arguments[0]) if arguments else ROOT)
    for line in warnings:
        print(f"warning: {line}")
    for line in failures:
        print(line)
    if failures:
        print("move what belongs together into a module that is named after it")
    return min(len(failures), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
