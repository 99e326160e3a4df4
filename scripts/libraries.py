"""Runs the tests that use optional libraries on other versions of these than the pinned ones.

Usage: scripts/libraries.py tests   (prints the tests; `make test-lowest` runs them on the floors)
       scripts/libraries.py between WHEEL [LIBRARY ...]

`between` tries the newest patch release of every minor version from the floor to the pinned
version, one library at a time and the others as pinned, each in an environment of its own. It
prints a line for each, and the output of the tests. PySpark's versions are those of
tests/spark/versions.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = ROOT / ".state" / "build-venv" / "bin" / "uv"

_READING = ("test_batches", "test_documents", "test_rows", "test_command_export")
_TARGETS = (
    "test_replication", "test_replication_targets", "test_replication_values", "test_target_*",
    "test_many_tables", "test_marked_deletes", "test_slow_targets", "test_verify",
    "test_waiting_changes", "test_masks",
)  # fmt: skip
_COMMANDS = ("test_command_rows", "test_command_terminal")
TESTS = {
    "adbc-driver-postgresql": (*_TARGETS, "test_replication_shares"),
    "click": _COMMANDS,
    "confluent-kafka": ("test_target_kafka",),
    "deltalake": (*_TARGETS, "test_dlt", "test_maintenance"),
    "dlt": ("test_dlt",),
    "duckdb": (*_TARGETS, "test_batches", "test_dlt", "test_maintenance"),
    "obstore": ("test_stores",),
    "opentelemetry-api": ("test_metrics",),
    "pandas": ("test_batches",),
    "polars": ("test_polars", "test_masks"),
    "prometheus-client": (
        "test_metrics",
        "test_command_doctor",
        "test_disconnected",
        "test_health",
        "test_replication_progress",
    ),
    "pyarrow": (*_READING, *_TARGETS),
    "pyiceberg": _TARGETS,
    "rich": _COMMANDS,
}
"""Files of tests/python that use each library, as patterns."""

# One of a file that takes long.
DEATH = (
    "tests/python/test_replication_steps.py::"
    "test_a_target_equals_the_bucket_whichever_step_its_writer_dies_at[ducklake-table]"
)
# What waits more than it works, and rules that are the same with every library.
ONLY_BETWEEN = {
    "test_command_terminal", "test_disconnected", "test_health", "test_replication",
    "test_replication_progress", "test_replication_shares", "test_slow_targets",
}  # fmt: skip
# A library that is older than what it uses may call what has a new name there.
OPTIONS = ("-W", "ignore::DeprecationWarning")
# Half a gigabyte, and has tests of its own.
NO_SPARK = "pyspark\n"
# The first DuckDB for which no package has its extensions.
_NO_EXTENSIONS = (2,)


def arguments_for(library: str | None) -> list[str]:
    """Returns the arguments of pytest for a library, or those of CI for all."""
    if library is None:
        chosen = {"test_libraries", *chain(*TESTS.values())} - ONLY_BETWEEN
        return [*arguments_of(chosen), DEATH]
    return arguments_of(set(TESTS[library]))


def arguments_of(chosen: set[str]) -> list[str]:
    """Returns the arguments of pytest for files of tests, as patterns."""
    found = {path for each in chosen for path in ROOT.glob(f"tests/python/{each}.py")}
    return [*OPTIONS, *sorted(str(path.relative_to(ROOT)) for path in found)]


def pins(name: str) -> dict[str, str]:
    """Returns the versions of a file of requirements, by library."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([\w.]+)", text, re.MULTILINE))


def numbers(version: str) -> tuple[int, ...]:
    """Returns a version's numbers."""
    return tuple(map(int, version.split(".")))


def between(released: list[str], lowest: str, newest: str) -> list[str]:
    """Returns the newest release of each minor version from the lowest to before the newest.

    The lowest itself is left out, since `make test-lowest` runs on it.
    """
    stable = [each for each in released if re.fullmatch(r"\d+(\.\d+)*", each)]
    last = {numbers(each)[:2]: each for each in sorted(stable, key=numbers)}
    return [
        each
        for minor, each in last.items()
        if numbers(lowest) < numbers(each) and minor < numbers(newest)[:2]
    ]


def _released(library: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", library],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{library}: pip does not say which versions there are")
    return found[1].split(", ")


def _uv(*arguments: object) -> None:
    subprocess.run([UV, *map(str, arguments)], check=True, cwd=ROOT)


def _install(folder: Path, library: str, version: str, wheel: Path) -> Path:
    """Makes an environment, with the pinned versions of all that goes with this one."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{library}=={version}\n")
    (folder / "left-out.txt").write_text(NO_SPARK)
    chosen = folder / "chosen.txt"
    # uv keeps to what is in its output file already.
    chosen.write_text("".join(f"{name}=={pin}\n" for name, pin in pins("test").items()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [f"--extra={each}" for each in project["optional-dependencies"]]
    if library != "duckdb" or numbers(version) >= _NO_EXTENSIONS:
        extras.remove("--extra=ducklake")
    _uv(
        "pip", "compile", "pyproject.toml", wanted, *extras, "--group", "lowest", "--quiet",
        "--python-version", "3.11", "--excludes", folder / "left-out.txt", "--output-file", chosen,
    )  # fmt: skip
    changed = {
        name: pin
        for name, pin in re.findall(r"^([a-z0-9-]+)==([\w.]+)", chosen.read_text(), re.MULTILINE)
        if pins("test").get(name, pin) != pin
    }
    print(f"{library} {version}: {changed}", flush=True)
    _uv("venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = ("pip", "install", "--quiet", "--python", python, "--no-deps")
    _uv(*install, "-r", chosen, wheel)
    return python


def _try(library: str, version: str, wheel: Path) -> bool:
    with tempfile.TemporaryDirectory() as name:
        python = _install(Path(name), library, version, wheel)
        done = subprocess.run(
            [python, "-m", "pytest", *arguments_for(library)], cwd=ROOT, check=False
        )
    print(f"{library} {version}: {'failed' if done.returncode else 'works'}", flush=True)
    return not done.returncode


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    if arguments == ["tests"]:
        print(" ".join(arguments_for(None)))
        return 0
    if len(arguments) < 2 or arguments[0] != "between":
        print(__doc__, file=sys.stderr)
        return 2
    wheel = Path(arguments[1]).resolve()
    lowest, newest = pins("lowest"), pins("test")
    failed = 0
    for library in arguments[2:] or TESTS:
        if library not in TESTS:
            raise SystemExit(f"there are no tests of {library}, only of {', '.join(TESTS)}")
        for version in between(_released(library), lowest[library], newest[library]):
            failed += not _try(library, version, wheel)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
