"""Counts the instructions of the hot path under callgrind and compares them with the baseline.

Usage: scripts/bench_gate.py [--update]

Times are noisy where CI runs; instruction counts of the same program are not. Each part is run
twice, with few and with more passes, and the difference is the part's own work. A part fails if it
needs over 2 % more instructions, per change or vBucket that is rolled back, than in
`benches/instructions.json`, or over 2 % fewer, since the baseline has to keep up with improvements.

The baseline is valid for one compiler and one kind of processor. With others, or without valgrind,
nothing is compared, and a message says so.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "benches" / "instructions.json"
PARTS = (
    "decode",
    "stream machine",
    "batch building",
    "batch building, reads of 1,655 B",
    "batch building, persisted_only",
    "documents of ten fields",
    "rollback of a vBucket",
)
TOLERANCE = 0.02
# Batches have 8192 rows: both numbers result in several whole batches.
FEW, MANY = 4, 14


def build() -> str:
    """Builds the benchmark and returns its path."""
    command = ["cargo", "bench", "-p", "dcp-benches", "--locked", "--bench", "hotpath", "--no-run"]
    out = subprocess.run(
        [*command, "--message-format=json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in out.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "hotpath":
            return str(message["executable"])
    sys.exit("bench gate: cargo built no hotpath benchmark")


def count(program: str, part: str, passes: int) -> tuple[int, int]:
    """Runs one part under callgrind; returns its numbers of instructions and rows."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                f"--callgrind-out-file={folder}/out",
                program,
                "--instructions",
                part,
                str(passes),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
    instructions = re.search(r"Collected : (\d+)", ran.stderr)
    if instructions is None:
        sys.exit(f"bench gate: callgrind counted nothing:\n{ran.stderr}")
    return int(instructions[1]), int(ran.stdout)


def measure(program: str) -> dict[str, float]:
    """Returns the instructions per change of each part."""
    figures = {}
    for part in PARTS:
        (few, few_rows), (many, many_rows) = (count(program, part, n) for n in (FEW, MANY))
        figures[part] = round((many - few) / (many_rows - few_rows), 2)
    return figures


def conditions() -> dict[str, str]:
    """Returns the compiler, processor and libc that the counts depend on."""
    rustc = subprocess.run(
        ["rustc", "--version"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    libc = " ".join(platform.libc_ver())
    return {"rustc": rustc.split()[1], "processor": platform.machine(), "libc": libc}


def differences(baseline: dict[str, float], figures: dict[str, float]) -> list[str]:
    """Returns the parts that differ by more than the tolerance."""
    found = []
    for part, now in figures.items():
        before = baseline.get(part)
        if before is None:
            found.append(f"{part}: not in the baseline")
        elif abs(now - before) > TOLERANCE * before:
            found.append(f"{part}: {now} instructions instead of {before}")
    return found


def require_valgrind() -> bool:
    """Finds valgrind, or installs it as root on Debian or Ubuntu."""
    if shutil.which("valgrind"):
        return True
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-qq", "valgrind"]
        subprocess.run(install, check=False, stdout=subprocess.DEVNULL)
    return shutil.which("valgrind") is not None


def main(arguments: list[str]) -> int:
    """Compares with the baseline, or writes it with `--update`; returns the exit code."""
    if not require_valgrind():
        print("bench gate: SKIPPED, no instructions were counted: install valgrind")
        return 0
    here = conditions()
    figures = measure(build())
    for part, now in figures.items():
        print(f"{part:34} {now:8.2f} instructions")
    if arguments == ["--update"]:
        BASELINE.write_text(json.dumps({**here, "instructions": figures}, indent=2) + "\n")
        return 0
    baseline = json.loads(BASELINE.read_text())
    if here != {name: baseline[name] for name in here}:
        print(f"bench gate: SKIPPED, nothing was compared: the baseline is of {baseline}")
        return 0
    found = differences(baseline["instructions"], figures)
    for difference in found:
        print(f"bench gate: {difference}", file=sys.stderr)
    if found:
        print("bench gate: if that is meant, run scripts/bench_gate.py --update", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
