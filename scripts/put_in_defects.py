"""Injects known defects into a copy of the checkout, one at a time, and runs the tests of each.

Usage: scripts/put_in_defects.py [--only ROW,...] [--worlds] [--unchecked]
           [--list | --check | --compile] [--folder FOLDER]

`tests/defects.json` describes how to inject each defect: a file, a text that occurs in it exactly
once, its replacement, and the tests that then fail. The run fails, with exit code 1, if such a test
passes, since it did not detect the defect, or if the defect is broken: what does not compile fails
for another reason. First, all tests run without any defect and must pass. `--compile` only looks
for broken defects, with the compiler's checks, which takes seconds for each.

The copy is kept in `.state/defects` (or FOLDER) with its own build, so that the next run compiles
only what has changed. Simulated worlds (`dcp-sim`) run up to the first failure, whose number is
printed. Rows are referred to by number, `12`, or by position among the unnumbered ones, `o3`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]

# Time limit for the tests of one place, in seconds: a test that hangs has not detected a defect.
PATIENCE = 900

# The crate of simulated worlds, and the environment to search for one defect world by world until
# the first failure.
WORLDS = "dcp-sim"
ENVIRONMENT_OF_WORLDS = {
    "DCP_SIM_WORLDS": "2000",
    "DCP_SIM_FAILURES": "1",
    "DCP_SIM_BRIEF": "1",
}
# Worlds are optimized, but without link-time optimization: it takes longer for every defect than
# most of them take to be found.
PROFILE_OF_WORLDS = {
    "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    "CARGO_PROFILE_RELEASE_INCREMENTAL": "true",
    "CARGO_PROFILE_RELEASE_LTO": "off",
}
PATIENCE_WITH_WORLDS = 3600
# The first compilation includes every dependency.
PATIENCE_WITH_COMPILER = 3600

EXTENSION = "python/dcp_rs/_dcp_rs.abi3.so"
EXTENSION_CRATE = ("-p", "dcp-python", "--lib")


class DefectError(Exception):
    """A defect cannot be injected, or its tests cannot be run."""


class BrokenError(DefectError):
    """The code with the defect does not compile, so that no test can detect it."""

    def __init__(self, output: str) -> None:
        super().__init__("BROKEN: it does not compile:\n" + output[-3000:])


@dataclass(frozen=True)
class Edit:
    """A text in a file, and its replacement."""

    file: str
    find: str
    replace: str

    def applied(self, text: str) -> str:
        """Returns the file's text with the defect."""
        if text.count(self.find) != 1:
            count = text.count(self.find)
            raise DefectError(f"{self.file}: {count} times instead of once: {self.find!r}")
        if self.find == self.replace:
            raise DefectError(f"{self.file}: nothing is changed: {self.find!r}")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Mutation:
    """One way to inject a defect, and the tests that detect it."""

    row: str
    defect: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def rows(defects: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns every row with its name."""
    yield from defects["numbered"].items()
    for place, row in enumerate(defects["others"], 1):
        yield f"o{place}", row


def mutations(defects: dict[str, Any]) -> list[Mutation]:
    """Reads the list; a mutation without tests is detected by those of its row."""
    found = []
    for name, row in rows(defects):
        for each in row.get("mutations", []):
            edits = [Edit(one["file"], one["find"], one["replace"]) for one in edits_of(each)]
            tests = tuple(each.get("tests", row.get("tests", [])))
            found.append(Mutation(name, row["defect"], tuple(edits), tests))
    return found


def by_worlds(chosen: Iterable[Mutation]) -> Iterator[Mutation]:
    """Returns the mutations that simulated worlds detect, without other tests."""
    for each in chosen:
        if tests := tuple(test for test in each.tests if test.endswith(": worlds_hold")):
            yield replace(each, tests=tests)


def edits_of(mutation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Returns the edits of a mutation: usually one, the mutation itself."""
    yield mutation
    yield from mutation.get("also", [])


@contextlib.contextmanager
def put_in(folder: Path, edits: Iterable[Edit]) -> Iterator[None]:
    """Applies the edits in a folder, and undoes them."""
    originals: dict[Path, str] = {}
    try:
        for edit in edits:
            path = folder / edit.file
            text = path.read_text()
            changed = edit.applied(text)
            originals.setdefault(path, text)
            path.write_text(changed)
        yield
    finally:
        for path, text in originals.items():
            path.write_text(text)


def copy_checkout(folder: Path) -> None:
    """Updates a copy of the checkout; identical files are not written again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    wanted = {name for name in listed if name and (ROOT / name).is_file()}
    for name in wanted:
        source, target = ROOT / name, folder / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for path in (*(folder / "crates").rglob("*.rs"), *(folder / "tests").rglob("*.rs")):
        if str(path.relative_to(folder)) not in wanted:
            path.unlink()


def place_of(test: str) -> tuple[str, ...]:
    """Returns how to run a test: arguments for cargo, or pytest and the file."""
    path, _, _ = test.partition(": ")
    if path.endswith(".py"):
        return ("pytest", path)
    if path.startswith("tests/sim/"):
        return ("--release", "-p", WORLDS, "--test", "worlds")
    crate, kind, *rest = Path(path).parts
    if kind == "src":
        return ("-p", crate, "--lib")
    return ("-p", crate, "--test", Path(rest[0]).stem)


@dataclass
class Bench:
    """The copy, and how to run programs in it."""

    folder: Path
    target: Path
    # Edits in the extension module installed in the copy; `None` if unknown.
    built_with: tuple[Edit, ...] | None = None
    # The first world that failed in the last run.
    world: int | None = None

    def environment(self) -> dict[str, str]:
        """Returns the environment of every program: its own build, without debug info."""
        more = {
            "CARGO_TARGET_DIR": str(self.target),
            "CARGO_PROFILE_DEV_DEBUG": "0",
            "CARGO_PROFILE_DEV_INCREMENTAL": "true",
            "PYTHONPATH": str(self.folder / "python"),
            **PROFILE_OF_WORLDS,
        }
        return dict(os.environ) | more

    def run(
        self,
        command: list[str],
        *,
        patience: float = PATIENCE,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int | None, str]:
        """Runs a program; returns no exit code if it exceeds the time limit."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment() | dict(more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            # Kill its children too: a test's program would outlive it otherwise.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            out, _ = process.communicate()
            return None, out
        return process.returncode, out

    def cargo(self, *arguments: str) -> None:
        """Compiles something; a compiler that is slow says nothing of a defect."""
        command, *rest = arguments
        code, out = self.run(
            ["cargo", command, "--locked", "--quiet", *rest], patience=PATIENCE_WITH_COMPILER
        )
        if code is None:
            raise DefectError(f"cargo {command} takes longer than {PATIENCE_WITH_COMPILER} s")
        if code != 0:
            raise BrokenError(out)

    def outcomes(self, tests: Iterable[str]) -> dict[str, str]:
        """Runs tests; returns `passed`, `failed` or another outcome for each."""
        by_place = defaultdict(list)
        for test in tests:
            by_place[place_of(test)].append(test)
        found: dict[str, str] = {}
        for place, here in by_place.items():
            run = self._pytest if place[0] == "pytest" else self._cargo_test
            found |= run(place, here)
        return found

    def _cargo_test(self, place: tuple[str, ...], tests: list[str]) -> dict[str, str]:
        self.cargo("test", "--no-run", *place)
        names = {test: test.split(": ")[1] for test in tests}
        # Not quiet: one line for each test.
        command = ["cargo", "test", "--locked", *place, "--", *sorted(names.values())]
        if WORLDS in place:
            code, out = self.run(command, patience=PATIENCE_WITH_WORLDS, more=ENVIRONMENT_OF_WORLDS)
            world = re.search(r"^world (\d+)", out, re.MULTILINE)
            self.world = int(world[1]) if world else None
            if code and world is None and "worlds_hold" in names.values():
                # For example if a fault did not occur in any world: this does not concern the
                # defect.
                return dict.fromkeys(tests, "failed without a world: " + out[-500:])
        else:
            code, out = self.run(command)
        if code is None:
            return dict.fromkeys(tests, "hung")
        told = {
            # Without its module path.
            name.rsplit("::", 1)[-1]: "passed" if outcome == "ok" else "failed"
            for name, outcome in re.findall(
                r"^test ([\w:]+)(?: - should panic)? \.\.\. (ok|FAILED)$",
                out,
                re.MULTILINE,
            )
        }
        # A process that ended early has no result for its current test.
        ended = "failed" if code else "not run"
        return {test: told.get(name, ended) for test, name in names.items()}

    def _pytest(self, place: tuple[str, ...], tests: list[str]) -> dict[str, str]:
        found = {}
        for test in tests:
            name = test.split(": ")[1]
            # The extension warns that it was built without optimizations.
            command = [sys.executable, "-W", "ignore", "-m", "pytest", "-W", "ignore", "-x", "-q"]
            command += ["-p", "no:cacheprovider"]
            code, out = self.run([*command, place[1], "-k", f"test_{name}"])
            known = {0: "passed", 1: "failed", None: "hung"}
            found[test] = known.get(code, "not run: " + out[-2000:])
        return found

    def build_extension(self, edits: tuple[Edit, ...] = ()) -> None:
        """Builds the extension module for the Python tests, unless it already has the edits."""
        edits = tuple(edit for edit in edits if edit.file.startswith("crates/"))
        if self.built_with == edits:
            return
        self.built_with = None
        self.cargo("build", *EXTENSION_CRATE)
        shutil.copy(self.target / "debug" / "lib_dcp_rs.so", self.folder / EXTENSION)
        self.built_with = edits

    def compile_python(self, edits: Iterable[Edit]) -> None:
        """Compiles edited Python files: a test that imports one fails if that raises an error."""
        for file in {edit.file for edit in edits if edit.file.endswith(".py")}:
            try:
                compile((self.folder / file).read_text(), file, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise BrokenError(f"{file}, line {error.lineno}: {error.msg}") from error

    def check_compiles(self, mutation: Mutation) -> None:
        """Injects a defect and checks that everything its tests need still compiles."""
        places = {place_of(test) for test in mutation.tests}
        crates = {EXTENSION_CRATE if place[0] == "pytest" else place for place in places}
        with put_in(self.folder, mutation.edits):
            self.compile_python(mutation.edits)
            for crate in sorted(crates):
                arguments = [argument for argument in crate if argument != "--release"]
                self.cargo("check", "--profile", "test", *arguments)

    def try_out(self, mutation: Mutation) -> dict[str, str]:
        """Injects a defect and runs its tests."""
        self.world = None
        with put_in(self.folder, mutation.edits):
            self.compile_python(mutation.edits)
            if any(place_of(test)[0] == "pytest" for test in mutation.tests):
                self.build_extension(mutation.edits)
            return self.outcomes(mutation.tests)


def check_sound(bench: Bench, tests: list[str]) -> None:
    """Runs all tests without a defect."""
    if any(place_of(test)[0] == "pytest" for test in tests):
        bench.build_extension()
    outcomes = bench.outcomes(tests)
    wrong = [f"{test}: {outcome}" for test, outcome in outcomes.items() if outcome != "passed"]
    if wrong:
        raise DefectError("without a defect:\n  " + "\n  ".join(wrong))


def check_texts(chosen: Iterable[Mutation]) -> int:
    """Returns the defects that cannot be injected, because their lines have changed."""
    wrong = 0
    for each in chosen:
        try:
            texts = {edit.file: (ROOT / edit.file).read_text() for edit in each.edits}
            for edit in each.edits:
                texts[edit.file] = edit.applied(texts[edit.file])
        except (DefectError, OSError) as error:
            print(f"{each.row:>4}  {error}")
            wrong += 1
    if wrong:
        print(f"{wrong} defects cannot be put in: tests/defects.json has to say how they are now")
    return min(wrong, 1)


def check_compiles(bench: Bench, chosen: Iterable[Mutation]) -> int:
    """Returns 1 if a defect is broken."""
    sound, broken = 0, 0
    for each in sorted(chosen, key=order):
        try:
            bench.check_compiles(each)
            sound += 1
        except DefectError as error:
            print(f"{each.row:>4}  {each.edits[0].file}: {error}", flush=True)
            broken += 1
    print(f"{sound} of {sound + broken} defects compile")
    return min(broken, 1)


def order(mutation: Mutation) -> tuple[object, ...]:
    """Sorts to minimize recompilation."""
    return (sorted({place_of(test) for test in mutation.tests}), mutation.edits[0].file)


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="rows to run, such as 3,17,o2 (default: all)")
    parser.add_argument("--list", action="store_true", help="list the defects without running them")
    parser.add_argument("--check", action="store_true", help="only check that each can be injected")
    parser.add_argument("--compile", action="store_true", help="only check that each compiles")
    parser.add_argument(
        "--unchecked", action="store_true", help="skip the first run without any defect"
    )
    parser.add_argument(
        "--worlds", action="store_true", help="only run simulated worlds, for their defects"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".state" / "defects")
    options = parser.parse_args(arguments)
    chosen = mutations(json.loads((ROOT / "tests" / "defects.json").read_text()))
    if options.only:
        wanted = set(options.only.split(","))
        if unknown := wanted - {each.row for each in chosen}:
            parser.error(f"no such row: {', '.join(sorted(unknown))}")
        chosen = [each for each in chosen if each.row in wanted]
    if options.worlds:
        chosen = list(by_worlds(chosen))
    if options.list:
        for each in chosen:
            print(f"{each.row:>4}  {each.edits[0].file}: {each.defect}")
        return 0
    if options.check:
        return check_texts(chosen)
    folder = options.folder.resolve()
    bench = Bench(folder / "checkout", folder / "target")
    copy_checkout(bench.folder)
    if options.compile:
        return check_compiles(bench, chosen)
    return try_all(bench, chosen, unchecked=options.unchecked)


def try_all(bench: Bench, chosen: list[Mutation], *, unchecked: bool) -> int:
    """Injects each defect and runs its tests; returns the exit code."""
    begin = time.monotonic()
    tests = list(dict.fromkeys(test for each in chosen for test in each.tests))
    print(f"{len(chosen)} defects, {len(tests)} tests", flush=True)
    if not unchecked:
        check_sound(bench, tests)
        print(f"[{time.monotonic() - begin:.0f} s] all pass without a defect", flush=True)
    lines, unfound, broken = [], 0, 0
    for count, each in enumerate(sorted(chosen, key=order), 1):
        try:
            outcomes = bench.try_out(each)
            missed = [test for test, outcome in outcomes.items() if outcome != "failed"]
            found = "found" if bench.world is None else f"found after {bench.world + 1} worlds"
            told = f"NOT FOUND by {', '.join(missed)}: {outcomes}"
            verdict = told if missed else found
        except DefectError as error:
            missed, verdict = ["all"], str(error)
            broken += isinstance(error, BrokenError)
        unfound += bool(missed)
        line = f"{each.row:>4}  {each.edits[0].file}: {verdict} ({len(each.tests)} tests)"
        lines.append((each.row, line))
        passed = time.monotonic() - begin
        print(f"[{count}/{len(chosen)}, {passed:.0f} s] {line}", flush=True)
    print("\n" + "\n".join(line for _, line in sorted(lines, key=lambda one: _place(one[0]))))
    told = f"{len(chosen) - unfound} of {len(chosen)} defects found by every test named for them"
    print(told + (f", {broken} broken" if broken else ""))
    return 1 if unfound else 0


def _place(row: str) -> tuple[bool, int]:
    return row.startswith("o"), int(row.removeprefix("o"))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DefectError as error:
        sys.exit(str(error))
