"""Changes the parsers and machines one expression at a time, and counts what their tests notice.

Usage: scripts/mutants.py [--shard K/N] [PACKAGE ...]

Without packages: dcp-wire, dcp-proto and dcp-producer-proto, each with its own tests. With --shard
it tries every Nth mutant from the Kth on, and says how many of all would be caught at least (95 %
confidence). Mutants that cannot be noticed are listed in .cargo/mutants.toml, each with its reason.
Details are in .state/log/mutants-PACKAGE. The exit code is 1 if fewer than 92 % are caught, if
there were none, or if a line of that list matches no mutant any longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".state" / "log"
TOOL = ROOT / ".state" / "tools" / "bin" / "cargo-mutants"
CONFIG = ROOT / ".cargo" / "mutants.toml"
PACKAGES = ("dcp-wire", "dcp-proto", "dcp-producer-proto")
LEAST = 0.92
# Random cases of a property: each mutant runs all tests.
CASES = "32"


def at_least(caught: int, tried: int) -> float:
    """Returns the lower end of Wilson's 95 % interval of a share."""
    z = 1.96
    share = caught / tried
    middle = share + z * z / (2 * tried)
    spread = z * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return (middle - spread) / (1 + z * z / tried)


def outdated(excluded: list[str], mutants: list[str]) -> list[str]:
    """Returns the expressions that match none of the mutants."""
    return [line for line in excluded if not any(re.search(line, name) for name in mutants)]


def report(package: str, outcomes: list[dict[str, Any]], *, is_share: bool) -> bool:
    """Prints what was caught and each mutant that was missed; `True` if enough was caught."""
    counts = Counter(outcome["summary"] for outcome in outcomes)
    missed = [o["scenario"]["Mutant"]["name"] for o in outcomes if o["summary"] == "MissedMutant"]
    caught = counts["CaughtMutant"] + counts["Timeout"]
    tried = caught + len(missed)
    if not tried:
        print(f"{package}: no mutant was tried")
        return False
    line = f"{package}: {caught} of {tried} mutants caught ({caught / tried:.1%})"
    if counts["Timeout"]:
        line += f", {counts['Timeout']} of them by a timeout"
    if counts["Unviable"]:
        line += f"; {counts['Unviable']} more do not compile"
    if is_share:
        line += f"; at least {math.floor(100 * at_least(caught, tried))}% of all"
    print(line)
    for name in missed:
        print(f"  missed: {name}")
    return caught / tried >= LEAST


def listed(packages: list[str]) -> list[str]:
    """Returns the names of all mutants, including those of the list of exceptions."""
    command = [str(TOOL), "mutants", "--list", "--no-config", "--colors", "never"]
    for package in packages:
        command += ["--package", package]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def run(package: str, shard: str | None) -> bool:
    """Tries the mutants of a package; `True` if enough was caught."""
    folder = LOG / f"mutants-{package}"
    command = [str(TOOL), "mutants", "--package", package, "--output", str(folder)]
    command += ["--colors", "never", "--cargo-arg=--locked"]
    if shard:
        command += ["--shard", shard]
    found = folder / "mutants.out" / "outcomes.json"
    found.unlink(missing_ok=True)
    # Each run builds a new copy of the tree: artifacts of another would be taken for its own.
    environment = {key: value for key, value in os.environ.items() if key != "CARGO_TARGET_DIR"}
    environment["PROPTEST_CASES"] = CASES
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    # 2: some were missed; 3: some timed out.
    if done.returncode not in (0, 2, 3) or not found.is_file():
        print(f"{package}: cargo-mutants ended with {done.returncode}")
        return False
    outcomes = json.loads(found.read_text())["outcomes"]
    mutants = [outcome for outcome in outcomes if outcome["scenario"] != "Baseline"]
    return report(package, mutants, is_share=shard is not None)


def main(arguments: list[str]) -> int:
    """Tries the mutants of each package; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=" or ".join(PACKAGES))
    parser.add_argument("--shard", metavar="K/N")
    chosen = parser.parse_args(arguments)
    LOG.mkdir(parents=True, exist_ok=True)
    excluded = tomllib.loads(CONFIG.read_text()).get("exclude_re", [])
    unused = outdated(excluded, listed(list(PACKAGES)))
    for line in unused:
        print(f"{CONFIG.relative_to(ROOT)}: {line} matches no mutant: remove it")
    results = [run(package, chosen.shard) for package in chosen.packages or PACKAGES]
    return int(bool(unused) or not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
