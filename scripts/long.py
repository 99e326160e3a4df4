"""Runs tests that take too long for CI, and summarizes the results.

Usage: scripts/long.py [--first-world N] [--list] [STAGE ...]

Every stage runs, even after a failure; the output of each is in .state/log/long-STAGE.log. At the
end a table with counts is printed, and `.state/log/long.json` has the same with the commit. The
exit code is 1 if any stage failed or ran nothing. Simulated worlds start at seed N (0), which also
chooses the properties' cases and the share of mutants, so that a schedule can pass a different one
each time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tally import tally

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".state" / "log"
WORLDS = 20_000
# All mutants take a day: each run tries one share of so many, the next N the next.
SHARES = 16
LOWEST = ROOT / ".state" / "lowest-venv" / "bin" / "python"
# Beside that of tests/kafka/pom.xml.
BROKERS = ("4.0.1", "4.2.0", "4.3.0", "4.4.0")
LAKES = ("ducklake", "ducklake_postgres")
OF_TARGETS = (
    "replication", "replication_targets", "replication_values", "many_tables", "marked_deletes",
    "inferred_schemas", "verify", "history_tables", "target_ducklake",
)  # fmt: skip
OF_S3 = (
    "target_stored", "target_outage", "maintenance", "replication_steps", "stores", "sharing",
)  # fmt: skip


@dataclass
class Stage:
    """A stage of the long run."""

    name: str
    # What it proves if it passes.
    proves: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    # Whether it reports tests, so that running none is a failure.
    has_tests: bool = True
    # Matches the lines of its output that say what it found; none is a failure, too.
    findings: str = ""


@dataclass
class Outcome:
    """Result of a stage."""

    name: str
    proves: str
    result: str
    passed: int
    failed: int
    skipped: int
    minutes: float
    findings: list[str]


def stages(first_world: int) -> list[Stage]:
    """Returns the stages in order."""
    pytest = [sys.executable, "-m", "pytest", "--timeout", "7200"]
    # DuckDB 1.5, whose extensions for DuckLakes are packages.
    lowest = [str(LOWEST), *pytest[1:], "-W", "ignore::DeprecationWarning", "-k", "ducklake"]
    cargo = ["cargo", "test", "--release", "--locked", "--no-fail-fast"]
    share = f"{first_world // WORLDS % SHARES}/{SHARES}"
    wheels = sorted(map(str, (ROOT / ".state" / "wheel").glob("*.whl")))
    return [
        Stage(
            "rust",
            f"50,000 cases of every property, seed {first_world}; a reader of one batch a second "
            "for 60 s; four preemptions in every model",
            [*cargo, "--workspace", "--exclude", "dcp-sim"],
            {
                "PROPTEST_CASES": "50000",
                "PROPTEST_RNG_SEED": str(first_world),
                "DCP_SLOW_SECONDS": "60",
                "LOOM_MAX_PREEMPTIONS": "4",
            },
        ),
        Stage(
            "worlds",
            f"{WORLDS:,} simulated worlds, seeds {first_world} to {first_world + WORLDS - 1}",
            [*cargo, "--package", "dcp-sim"],
            {"DCP_SIM_WORLDS": str(WORLDS), "DCP_SIM_FIRST": str(first_world)},
        ),
        Stage(
            "kills",
            "200 kills of a reader and of a cluster; 1,000 cycles without growth",
            [
                *pytest,
                "tests/python/test_kills.py",
                "tests/python/test_data_folder.py",
                "tests/python/test_scale.py",
            ],
            {"DCP_KILLS": "200", "DCP_CYCLES": "1000"},
        ),
        Stage(
            "durable",
            "1,000 runs of durable and plain writes of the SDK while nodes and links fail",
            [*pytest, "tests/python/test_durable_writes.py"],
            {"DCP_DURABLE_RUNS": "1000"},
        ),
        Stage(
            "interruptions",
            "10,000 cancellations at random moments, 1,000 forks under open streams",
            [*pytest, "tests/python/test_interruptions.py"],
            {"DCP_CANCELLATIONS": "10000", "DCP_FORKS": "1000"},
        ),
        Stage(
            "soak",
            "an hour beside a cluster that loses nodes: every document, no growth",
            [*pytest, "tests/python/test_soak.py"],
            {"DCP_SOAK_SECONDS": "3600"},
        ),
        Stage(
            "pipeline-soak",
            "two hours of dcp-rs run into PostgreSQL: rebalances, failovers, outages of ten"
            " minutes, full disks, passwords, SIGHUPs; and full disks of the other targets",
            [
                *[*pytest[:-1], "9000"],
                "tests/python/test_pipeline_soak.py",
                "tests/python/test_target_outage.py",
            ],
            {"DCP_SOAK_SECONDS": "7200", "DCP_OUTAGES": "1"},
        ),
        Stage(
            "address",
            "the Python tests on an extension built with AddressSanitizer: no report",
            ["bash", "scripts/sanitize.sh"],
        ),
        Stage(
            "replication",
            "30 kills of a replication for each target and mode, and of shares of a table",
            [*pytest, "tests/python/test_replication_kills.py"],
            {"DCP_KILLS": "30"},
        ),
        # Shares of at most an hour.
        *(
            Stage(
                f"steps-{target}",
                f"50 deaths at steps of a commit to {target}, for each mode: of the tables of a "
                "bucket whose collections come and go, and of one that people edit",
                [*pytest, "tests/python/test_replication_steps.py", "-k", f"[{target}-"],
                {"DCP_STEPS": "50"},
            )
            for target in ("duckdb", "postgres", "delta", "iceberg", "parquet", "kafka")
        ),
        *(
            Stage(
                f"steps-{target}",
                f"50 deaths at steps of a commit to {target}, likewise",
                [
                    *lowest,
                    "tests/python/test_replication_steps.py",
                    "-k",
                    "ducklake and not stored",
                ],
                {"DCP_STEPS": "50", "DCP_TARGETS": target},
            )
            for target in LAKES
        ),
        *(
            Stage(
                f"kafka-{version}",
                f"the tests of Kafka against a broker {version}",
                ["make", "test-kafka", f"BROKER={version}"],
            )
            for version in BROKERS
        ),
        Stage(
            "ducklake",
            "what the tests of all targets say, of DuckLakes in SQLite and PostgreSQL",
            [*lowest, *(f"tests/python/test_{name}.py" for name in OF_TARGETS)],
            {"DCP_TARGETS": " ".join(LAKES)},
        ),
        *(
            Stage(
                f"steps-stored-{target}",
                f"50 deaths at steps of a commit to {target} in S3, which fails one request in "
                "twenty, for each mode: equal to the bucket, and no file that no version names",
                [*pytest, "tests/python/test_replication_steps.py", "-k", f"stored_{target}-"],
                {"DCP_STEPS": "50"},
            )
            for target in ("delta", "iceberg", "parquet")
        ),
        Stage(
            "steps-stored-ducklake",
            "50 deaths at steps of a commit to a DuckLake with files in such an S3",
            [*lowest, "tests/python/test_replication_steps.py", "-k", "stored_ducklake"],
            {"DCP_STEPS": "50"},
        ),
        Stage(
            "versitygw",
            "the tests of targets and members in S3 against versitygw, which looks at signatures",
            [
                *[*pytest, *(f"tests/python/test_{name}.py" for name in OF_S3)],
                *["-k", "stored or objects"],
            ],
            {"DCP_S3": "versitygw", "DCP_STEPS": "5"},
        ),
        *(
            Stage(
                name,
                f"the tests of targets in {what}, by {by}, and five deaths of each",
                [
                    *[*pytest, *(f"tests/python/test_{each}.py" for each in OF_S3[:4])],
                    # Arrow ends the process at what Azure does not answer, and repeats for long.
                    *["-k", "stored and not ducklake and (target_stored or not iceberg)"],
                ],
                {"DCP_STORAGE": name, "DCP_STEPS": "5"},
            )
            for name, what, by in (
                ("azure", "Azure", "Azurite, which looks at signatures"),
                ("google", "Google Cloud Storage", "fake-gcs-server"),
            )
        ),
        Stage(
            "rest-catalog",
            "the tests of Iceberg logs in S3 behind a REST catalog, and 50 deaths at steps of a "
            "commit, while one request in twenty to either fails",
            [*pytest, *(f"tests/python/test_{name}.py" for name in OF_S3), "-k", "stored_iceberg"],
            {"DCP_ICEBERG": "rest", "DCP_STEPS": "50"},
        ),
        Stage(
            "dlt",
            "twenty random histories by dlt into DuckDB and Delta, kills at each step, and "
            "packages that are lost",
            [*pytest, "tests/python/test_dlt.py"],
            {"DCP_DLT_SEEDS": "20"},
        ),
        Stage(
            "tables",
            "a thousand collections, each a table of each target",
            [*pytest, "tests/python/test_hundreds_of_tables.py"],
            {"DCP_TABLES": "1000"},
        ),
        Stage(
            "differential",
            "four clients under ten faults; rewrites docs/differential.md",
            [sys.executable, "tests/interop/differential.py"],
            has_tests=False,
        ),
        Stage(
            "defects",
            "every defect of tests/defects.json is noticed",
            [sys.executable, "scripts/put_in_defects.py"],
            has_tests=False,
            findings=r"\d+ of \d+ defects found .*|.{4}  \S+: BROKEN.*",
        ),
        Stage(
            "mutants",
            f"of every sixteenth mutant of parsers and machines, share {share}, 92 % are caught",
            ["make", "mutants", f"ARGS=--shard {share}"],
            has_tests=False,
            findings=r"dcp-[\w-]+: \d+ of \d+ mutants caught.*|  missed: .*",
        ),
        Stage(
            "libraries",
            "every minor version of each library from the lowest to the pinned one",
            [sys.executable, "scripts/libraries.py", "between", *wheels],
            findings=r"\S+ [\d.]+: (works|failed)",
        ),
        Stage(
            "engines",
            "Ray on a local cluster, with a worker that is killed; Dask, Daft, DataFusion",
            [sys.executable, "tests/engines/run.py", *wheels],
        ),
        Stage(
            "deploy",
            "the Containerfile and the manifest pass their linters",
            ["make", "deploy-check"],
            has_tests=False,
        ),
        Stage(
            "spark",
            "every guarantee of the Spark guide on PySpark 4.0 to 4.3, and Delta's own Spark; "
            "rewrites docs/spark-versions.json",
            ["make", "spark-versions"],
        ),
    ]


def run(stage: Stage) -> Outcome:
    """Runs a stage."""
    log = LOG / f"long-{stage.name}.log"
    print(f"{stage.name}: {stage.proves}", flush=True)
    begun = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            stage.command,
            cwd=ROOT,
            env=os.environ | stage.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    minutes = (time.monotonic() - begun) / 60
    output = log.read_text(encoding="utf-8", errors="replace")
    counts = tally(output)
    findings = [line for line in output.splitlines() if re.fullmatch(stage.findings or "$^", line)]
    if done.returncode or counts["failed"]:
        result = f"failed with {done.returncode}: see {log.relative_to(ROOT)}"
    elif (stage.has_tests and not counts["passed"]) or (stage.findings and not findings):
        result = f"ran nothing: see {log.relative_to(ROOT)}"
    else:
        result = "passed"
    counted = counts["passed"], counts["failed"], counts["skipped"]
    return Outcome(stage.name, stage.proves, result, *counted, round(minutes, 1), findings)


def commit() -> str:
    """Returns the commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
        return done.stdout.decode().strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")


def summary(outcomes: list[Outcome], of: str) -> str:
    """Formats the results as a table."""
    lines = [f"long run of commit {of}", ""]
    for outcome in outcomes:
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        told = counts if outcome.passed or outcome.failed else ""
        lines.append(f"{outcome.name:14} {outcome.minutes:6.1f} min  {outcome.result}")
        lines += [f"{'':26} {text}" for text in (outcome.proves, told, *outcome.findings) if text]
    return "\n".join(lines)


def main(arguments: list[str], known: list[Stage] | None = None) -> int:
    """Runs the given stages, or all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="STAGE")
    parser.add_argument("--first-world", type=int, default=0, metavar="N")
    parser.add_argument("--list", action="store_true", help="list the stages without running them")
    chosen = parser.parse_args(arguments)
    known = known if known is not None else stages(chosen.first_world)
    names = [stage.name for stage in known]
    for name in chosen.names:
        if name not in names:
            parser.error(f"there is no stage {name}: choose from {', '.join(names)}")
    todo = [stage for stage in known if not chosen.names or stage.name in chosen.names]
    if chosen.list:
        print("\n".join(f"{stage.name:14} {stage.proves}" for stage in todo))
        return 0
    LOG.mkdir(parents=True, exist_ok=True)
    of = commit()
    outcomes = [run(stage) for stage in todo]
    document = {"commit": of, "stages": [vars(outcome) for outcome in outcomes]}
    (LOG / "long.json").write_text(json.dumps(document, indent=1) + "\n")
    print("\n" + summary(outcomes, of))
    return int(any(outcome.result != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
