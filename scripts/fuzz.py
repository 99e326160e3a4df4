"""Builds the fuzz targets with the project's toolchain, and runs them.

Usage: scripts/fuzz.py short                    what CI runs: a few seconds of each target
       scripts/fuzz.py run [SECONDS] [TARGET..] long; adds to docs/fuzzing.json
       scripts/fuzz.py grow                     makes the committed corpora anew
       scripts/fuzz.py unpack                   into fuzz/corpus, where cargo-fuzz looks for them
       scripts/fuzz.py pack                     what is in fuzz/corpus becomes the committed corpora

libFuzzer is linked as a library and its coverage is an LLVM pass of every rustc, so neither nightly
Rust nor cargo-fuzz is needed. With DCP_SANITIZER=address a target also runs under AddressSanitizer,
for which rustc needs an unstable option.

The committed corpora are one archive, `fuzz/corpus.zip`. `run` keeps what it finds in
.state/fuzz/corpus, where the next run continues; failing inputs are in .state/fuzz/findings.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "fuzz"
ARCHIVE = PROGRAMS / "corpus.zip"
UNPACKED = PROGRAMS / "corpus"
STATE = ROOT / ".state" / "fuzz"
PAGE = ROOT / "docs" / "fuzzing.md"
RUNS = PAGE.with_suffix(".json")

SHORT_SECONDS = 5
LONG_SECONDS = 600
# Limit of a corpus, so that all of them take a few hundred KB.
CORPUS_BYTES = 32 * 1024
CORPUS_FILES = 150

COVERAGE = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "--cfg",
    "fuzzing",
    "-Ccodegen-units=1",
)

# Maximum input length of a target: longer inputs are slower and find nothing new.
MAX_LEN = {
    "framing": 512,
    "messages": 256,
    "system_events": 128,
    "xattrs": 512,
    "snappy": 256,
    "sasl": 256,
    "cluster_config": 1024,
    "manifest": 512,
    "checkpoint": 1024,
    "connection_string": 256,
    "documents": 512,
    "setup": 512,
    "client": 1024,
    "cluster": 1024,
}

# The head of the table of sums.
SUMS = """| target | executions |
|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a target."""

    target: str
    executions: int
    seconds: int
    failed: bool
    log: str


def sanitizer() -> str:
    """Returns the requested sanitizer."""
    name = os.environ.get("DCP_SANITIZER", "none")
    if name not in {"none", "address"}:
        sys.exit(f"fuzz: DCP_SANITIZER={name} is neither none nor address")
    return name


def build() -> Path:
    """Builds every target; returns the folder of the programs."""
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host: str = re.findall(r"^host: (.*)$", version, re.MULTILINE)[0]
    flags, environment, folder = list(COVERAGE), dict(os.environ), PROGRAMS / "target"
    if sanitizer() == "address":
        flags.append("-Zsanitizer=address")
        environment["RUSTC_BOOTSTRAP"] = "1"
        folder = PROGRAMS / "target" / "address"
    environment["RUSTFLAGS"] = " ".join(flags)
    environment["CARGO_TARGET_DIR"] = str(folder)
    environment["RUSTC_WRAPPER"] = str(PROGRAMS / "rustc.sh")
    # With --target, build scripts and macros are built without the flags.
    command = ["cargo", "build", "--release", "--bins", "--locked", "--quiet", "--target", host]
    subprocess.run(command, cwd=PROGRAMS, env=environment, check=True)
    return folder / host / "release"


def play(programs: Path, target: str, seconds: int, folders: list[Path]) -> Outcome:
    """Runs one target; new inputs are written to the first of the folders."""
    findings = STATE / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(
        [
            str(programs / target),
            *map(str, folders),
            f"-max_total_time={seconds}",
            f"-max_len={MAX_LEN[target]}",
            f"-artifact_prefix={findings}/{target}-",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
        ],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "RUST_BACKTRACE": "1"},
    )
    log = ran.stderr
    executed = re.findall(r"^stat::number_of_executed_units: *(\d+)", log, re.MULTILINE)
    took = re.findall(r"^Done \d+ runs in (\d+) second", log, re.MULTILINE)
    return Outcome(
        target,
        int(executed[-1]) if executed else 0,
        int(took[-1]) if took else 0,
        ran.returncode != 0,
        log,
    )


def report(outcome: Outcome) -> None:
    """Prints the result of one run."""
    verdict = "FAILED" if outcome.failed else "ok"
    print(f"fuzz: {outcome.target:17} {outcome.executions:>12,} executions, {verdict}", flush=True)
    if outcome.failed:
        print(outcome.log[-6000:], file=sys.stderr)


def short(programs: Path) -> list[Outcome]:
    """Runs each target for a few seconds, one per processor at a time."""
    with tempfile.TemporaryDirectory() as scratch:
        found, corpora = Path(scratch) / "found", Path(scratch) / "corpora"
        unpack(ARCHIVE, corpora)

        def one(target: str) -> Outcome:
            (found / target).mkdir(parents=True)
            return play(programs, target, SHORT_SECONDS, [found / target, corpora / target])

        outcomes = []
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            for outcome in pool.map(one, MAX_LEN):
                report(outcome)
                outcomes.append(outcome)
    return outcomes


def run(programs: Path, seconds: int, targets: list[str]) -> list[Outcome]:
    """Runs targets one after the other, and adds each to the runs."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        corpora = Path(scratch)
        unpack(ARCHIVE, corpora)
        for target in targets:
            found = STATE / "corpus" / target
            found.mkdir(parents=True, exist_ok=True)
            outcome = play(programs, target, seconds, [found, corpora / target])
            report(outcome)
            outcomes.append(outcome)
            runs = [*kept_runs(), run_of(outcome, commit, sanitizer())]
            lines = ",\n".join(" " + json.dumps(each) for each in runs)
            RUNS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(with_sums(page, runs), encoding="utf-8")
    return outcomes


def kept_runs() -> list[dict[str, Any]]:
    """Returns the runs so far."""
    runs: list[dict[str, Any]] = json.loads(RUNS.read_text(encoding="utf-8"))
    return runs


def run_of(outcome: Outcome, commit: str, with_sanitizer: str) -> dict[str, Any]:
    """Returns what is kept of a run."""
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "target": outcome.target,
        "executions": outcome.executions,
        "seconds": outcome.seconds,
        "commit": commit,
        "sanitizer": with_sanitizer,
        "findings": int(outcome.failed),
    }


def with_sums(page: str, runs: list[dict[str, Any]]) -> str:
    """Returns the page with the sums of the runs, each target in one line."""
    executions: Counter[tuple[str, str]] = Counter()
    for each in runs:
        executions[each["target"], each["sanitizer"]] += each["executions"]
    lines = []
    for target in MAX_LEN:
        plain, address = executions[target, "none"], executions[target, "address"]
        part = f", {address:,} of them under AddressSanitizer" if address else ""
        lines.append(f"| {target} | {plain + address:,}{part} |\n")
    head, _, rest = page.partition(SUMS)
    return head + SUMS + "".join(lines) + re.sub(r"\A(\|.*\n)*", "", rest)


def grow(programs: Path) -> None:
    """Rebuilds the committed corpora from the recordings and from the findings of runs."""
    with tempfile.TemporaryDirectory() as scratch:
        seeds, corpora, kept = (Path(scratch) / name for name in ("seeds", "corpora", "kept"))
        unpack(ARCHIVE, corpora)
        command = ["cargo", "run", "--quiet", "--locked", "-p", "dcp-fuzz", "--example", "seed"]
        subprocess.run([*command, "--", str(seeds)], cwd=ROOT, check=True)
        for target, longest in MAX_LEN.items():
            merged = Path(scratch) / "merged" / target
            merged.mkdir(parents=True)
            sources = [seeds / target, corpora / target, STATE / "corpus" / target]
            there = [str(folder) for folder in sources if folder.is_dir()]
            subprocess.run(
                [str(programs / target), "-merge=1", f"-max_len={longest}", str(merged), *there],
                check=True,
                capture_output=True,
            )
            keep(merged, kept / target)
        pack(kept, ARCHIVE)


def keep(merged: Path, corpus: Path) -> None:
    """Selects inputs of all lengths, up to the limit of a corpus."""
    corpus.mkdir(parents=True)
    inputs = sorted(merged.iterdir(), key=lambda path: (path.stat().st_size, path.name))
    every = -(-len(inputs) // CORPUS_FILES)
    while sum(path.stat().st_size for path in inputs[::every]) > CORPUS_BYTES:
        every += 1
    for path in inputs[::every]:
        (corpus / path.name).write_bytes(path.read_bytes())
    print(f"fuzz: {corpus.name}: {len(inputs[::every])} of {len(inputs)} inputs")


def unpack(archive: Path, folder: Path) -> None:
    """Writes each target's inputs to a folder of its own."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)


def pack(folder: Path, archive: Path) -> None:
    """Writes an archive of folders of inputs: the same inputs always give the same bytes."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.glob("*/*")):
            # Not compressed, so that the tests in Rust can read it, and git stores what changed.
            info = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            info.create_system, info.external_attr = 3, 0o100644 << 16
            file.writestr(info, path.read_bytes())


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    if not arguments or arguments[0] not in {"short", "run", "grow", "unpack", "pack"}:
        print(__doc__)
        return 2
    if arguments[0] == "unpack":
        shutil.rmtree(UNPACKED, ignore_errors=True)
        unpack(ARCHIVE, UNPACKED)
        return 0
    if arguments[0] == "pack":
        pack(UNPACKED, ARCHIVE)
        return 0
    unknown = [name for name in arguments[2:] if name not in MAX_LEN]
    if unknown:
        sys.exit(f"fuzz: no such target: {', '.join(unknown)}; there are {', '.join(MAX_LEN)}")
    programs = build()
    if arguments[0] == "grow":
        grow(programs)
        return 0
    if arguments[0] == "short":
        outcomes = short(programs)
    else:
        seconds = int(arguments[1]) if len(arguments) > 1 else LONG_SECONDS
        outcomes = run(programs, seconds, arguments[2:] or list(MAX_LEN))
    failed = [outcome.target for outcome in outcomes if outcome.failed]
    if failed:
        print(f"fuzz: failed: {', '.join(failed)}; inputs in {STATE / 'findings'}", file=sys.stderr)
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
