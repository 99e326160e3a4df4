"""The programs on libraries that others wrote: built, given jobs, and listened to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from history import Change

if TYPE_CHECKING:
    from dcp_rs.testing import EmbeddedCluster

HERE = Path(__file__).parent
STATE = HERE.parents[1] / ".state" / "interop"

# How long a client may take for a job.
PATIENCE = 100


def find_tool(name: str, consequence: str) -> str:
    """Finds a program; skips for want of it, except in CI, which must have it."""
    path = shutil.which(name)
    if path is None:
        skip(f"{consequence}: there is no {name} on the path")
    return path


def skip(reason: str) -> NoReturn:
    """Skips a test, except in CI, where nothing may be left out."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def run_tool(*command: str, cwd: Path) -> str:
    """Runs a build; its output is shown when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def build_go() -> Path:
    """Builds the Go programs; gives their folder."""
    find_tool("go", "gocbcore, go-dcp and the Go SDK are not tried")
    programs = STATE / "go"
    programs.mkdir(parents=True, exist_ok=True)
    run_tool("go", "build", "-o", f"{programs}{os.sep}", "./...", cwd=HERE / "go")
    run_tool("go", "test", "./gocbcore", cwd=HERE / "go")
    return programs


def build_java(program: str = "Drain") -> list[str]:
    """Builds the Java programs; gives the command of one."""
    for tool in ("mvn", "javac", "java"):
        find_tool(tool, "java-dcp-client and the Java SDK are not tried")
    build = STATE / "java"
    sources = [path for path in (HERE / "java").rglob("*") if path.is_file()]
    stamp = build / "built"
    # Maven takes seconds to find that there is nothing to do.
    if not stamp.exists() or any(path.stat().st_mtime > stamp.stat().st_mtime for path in sources):
        goals = ["compile", "dependency:copy-dependencies"]
        run_tool("mvn", "-B", "-q", "-C", f"-Dinterop.build={build}", *goals, cwd=HERE / "java")
        stamp.touch()
    classes = f"{build}/classes:{build}/dependency/*"
    return ["java", "-XX:TieredStopAtLevel=1", "-Xmx512m", "-cp", classes, program]


@dataclass
class Seen:
    """What a client was sent."""

    lines: list[dict[str, Any]]

    def of(self, kind: str, vbucket: int | None = None) -> list[dict[str, Any]]:
        """The lines of a kind, in order."""
        return [
            line
            for line in self.lines
            if line["line"] == kind and vbucket in (None, line.get("vb"))
        ]

    def changes(self, vbucket: int, sid: int = 0) -> list[Change]:
        return self.by_stream.get((vbucket, sid), [])

    def __post_init__(self) -> None:
        self.by_stream: dict[tuple[int, int], list[Change]] = {}
        for line in self.of("change"):
            names = ("seqno", "key", "op", "cas", "size", "crc", "collection")
            change = Change(*(line[name] for name in names))
            self.by_stream.setdefault((line["vb"], line.get("sid", 0)), []).append(change)

    def count(self) -> int:
        return len(self.of("change"))


class Run:
    """A job that a program does."""

    def __init__(self, program: Program, job: dict[str, Any]) -> None:
        self._program = program
        self.lines: list[dict[str, Any]] = []
        self._streaming = threading.Event()
        self._done = threading.Event()
        program.give(job, self)

    def take(self, line: dict[str, Any] | None) -> None:
        """Takes a line; `None` when there will be no more."""
        if line is not None:
            self.lines.append(line)
        if line is None or line["line"] == "done":
            self._done.set()
        if self._done.is_set() or line["line"] == "streaming":
            self._streaming.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def await_streaming(self) -> None:
        """Waits until all streams are open."""
        assert self._streaming.wait(PATIENCE), self._say()
        assert not self.is_done, self._say()

    def is_streaming(self, limit: float) -> bool:
        """Waits until all streams are open, or for as long as is given."""
        return self._streaming.wait(limit) and not self.is_done

    def listen(
        self, limit: float, ends: dict[int, int] | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        """Listens to the end of the job, for so many seconds at most, and ends the program.

        Gives what it printed, and how it ended: nothing if well, "late", or its error.
        """
        if ends is not None:
            self._program.say(ends)
        late = not self._done.wait(max(limit, 0))
        self._program.kill()
        lines = list(self.lines)
        if late:
            return lines, "late"
        if lines and lines[-1]["line"] == "done":
            error = lines[-1]["error"]
            # Surprises are the producer's business.
            return lines, "" if "surprises, see" in error else error
        return lines, self._last_words()

    def _last_words(self) -> str:
        """The first line of the error with which a program died."""
        errors = self._program.errors().splitlines()
        panics = [line for line in errors if line.startswith("panic:")]
        return (panics or errors[-1:] or ["it died without a word"])[0]

    def finish(self, ends: dict[int, int] | None = None) -> Seen:
        """Waits for the end of the job, which one that follows must be told."""
        if ends is not None:
            self._program.say(ends)
        if not self._done.wait(PATIENCE):
            self._program.kill()
            pytest.fail(f"it takes too long: {self._say()}")
        self._program.end_of_job()
        error = self.lines[-1].get("error", "it died") if self.lines else "it did not start"
        assert not error, self._say()
        return Seen(self.lines)

    def _say(self) -> str:
        kinds = ("surprise", "done")
        told = [line for line in self.lines if line["line"] in kinds]
        return f"{self._program.name}: {told[:5]} {told[-1:]}\n{self._program.errors()[-4000:]}"


class Program:
    """A program that does one job after another, or one alone."""

    def __init__(self, name: str, command: list[str], *, does_many: bool) -> None:
        self.name = name
        self._command = command
        self._does_many = does_many
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._run: Run | None = None
        self._errors: list[str] = []

    def give(self, job: dict[str, Any], run: Run) -> None:
        """Begins a job, of which the run is told."""
        idle = self._run is None and self._process is not None and self._process.poll() is None
        if not idle:
            self.kill()
            self._start()
        self._run = run
        self.say(job)

    def say(self, what: object) -> None:
        """Writes a line to the program; one that has died is found out elsewhere."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def end_of_job(self) -> None:
        self._run = None
        if not self._does_many:
            self.kill()

    def kill(self) -> None:
        """Ends the program at once; the next job starts it again."""
        self._run = None
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for thread in self._threads:
            thread.join()
        self._process = None

    def errors(self) -> str:
        """What it wrote to standard error."""
        return "".join(self._errors)

    def _start(self) -> None:
        self._errors = []
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        # Handed in: they outlive neither, and the attributes change when it is started again.
        self._threads = [
            threading.Thread(target=self._listen, args=(self._process.stdout,)),
            threading.Thread(target=self._hear, args=(self._process.stderr, self._errors)),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, output) -> None:
        with output:
            for text in output:
                if run := self._run:
                    run.take(json.loads(text))
        if run := self._run:
            run.take(None)

    @staticmethod
    def _hear(output, errors: list[str]) -> None:
        with output:
            errors.extend(output)


@dataclass
class ForeignClient:
    """A client's program, and what is to be known of it."""

    program: Program
    # How many vBuckets it insists on.
    vbuckets: int
    # What it does when it is told to roll back: "resume" where it was told to, "begin again", or
    # "skip" what is not past the place it was at.
    after_rollback: str = "resume"

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def opened_at_first(self) -> int:
        """How many streams it tells of opening; go-dcp tells only of those opened again."""
        return 0 if self.name == "go-dcp" else self.vbuckets

    def start(self, cluster: EmbeddedCluster, *, tls: bool = False, **options: object) -> Run:
        address = cluster.tls_connection_string if tls else cluster.connection_string
        job = {
            "nodes": address.partition("://")[2].split(","),
            "management": cluster.tls_management_urls if tls else cluster.management_urls,
            "ca": str(cluster.ca_file) if tls else None,
            "bucket": cluster.bucket_name,
            "username": "Administrator",
            "password": "password",
            "collections": True,
            "buffer": 1 << 20,
            "compression": "off",
            **{name: str(v) if isinstance(v, Path) else v for name, v in options.items()},
        }
        return Run(self.program, job)

    def drain(self, cluster: EmbeddedCluster, **options: object) -> Seen:
        """Reads from the beginning, or from where it was, to now."""
        return self.start(cluster, **options).finish()
