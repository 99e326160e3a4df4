"""Checks that no source file has grown too long to be read in one go.

Usage: scripts/check_sizes.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST_LINES = 500
ENDINGS = (".rs", ".py", ".pyi", ".go", ".java", ".sh")


def too_long(folder: Path) -> list[str]:
    """Tells which of the files that git knows, or would, have more lines than they may."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    sources = [folder / name for name in listed if name.endswith(ENDINGS)]
    found = []
    for path in sources:
        # One that was deleted is still known until that is committed.
        lines = len(path.read_text().splitlines()) if path.is_file() else 0
        if lines > MOST_LINES:
            found.append(f"{path.relative_to(folder)}: {lines} lines, at most {MOST_LINES}")
    if not sources:
        found.append(f"{folder} has no source file: nothing was checked")
    return found


def main(arguments: list[str]) -> int:
    """Prints what is too long; returns the exit code."""
    found = too_long(Path(arguments[0]) if arguments else ROOT)
    for line in found:
        print(line)
    if found:
        print("move what belongs together into a module that is named after it")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
