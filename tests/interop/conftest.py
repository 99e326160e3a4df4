"""Clients that others wrote, built on demand, and a history for them to read.

Every client is a small program that takes a job (a JSON file), drains all vBuckets and prints what
it is sent as JSON lines; see `Job` in go/job.go.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcp_rs import Producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
STATE = HERE.parents[1] / ".state" / "interop"

# How long a client may take for a job.
PATIENCE = 100


def find_tool(name: str, consequence: str) -> str:
    """Finds a program; skips for want of it, except in CI, which must have it."""
    if path := shutil.which(name):
        return path
    reason = f"{consequence}: there is no {name} on the path"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def run_tool(*command: str, cwd: Path) -> str:
    """Runs a build; its output is shown when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Change:
    """A version of a document, as it was written or as a client was sent it."""

    seqno: int
    key: str
    op: str
    cas: int
    size: int
    crc: int


@dataclass
class History:
    """Everything that was ever written to a producer, by vBucket."""

    producer: Producer
    seed: int = 1
    versions: dict[int, list[Change]] = field(default_factory=dict)
    vbuuids: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.versions = {vbucket: [] for vbucket in range(self.producer.num_vbuckets)}

    def upsert(self, key: str, value: bytes) -> None:
        self._note(self.producer.upsert(key, value), key, "mutation", value)

    def remove(self, key: str) -> None:
        self._note(self.producer.remove(key), key, "deletion")

    def expire(self, key: str) -> None:
        self._note(self.producer.expire(key), key, "expiration")

    def _note(self, token, key: str, op: str, value: bytes = b"") -> None:
        change = Change(token.seqno, key, op, token.cas, len(value), zlib.crc32(value))
        self.versions[token.vbucket].append(change)
        self.vbuuids[token.vbucket] = token.vbuuid

    def write(self, documents: int, *, prefix: str = "doc", size: int = 200) -> None:
        """Writes documents, of which some change again, some go and some come back."""
        for index in range(documents):
            key = f"{prefix}-{index}-é"
            self.upsert(key, self._value(index, size))
            fate = self.random.random()
            if fate < 0.25:
                self.upsert(key, self._value(-index, size))
            elif fate < 0.35:
                self.remove(key)
            elif fate < 0.45:
                self.expire(key)
            elif fate < 0.50:
                self.remove(key)
                self.upsert(key, self._value(index, size // 2))

    def _value(self, index: int, size: int) -> bytes:
        if self.random.random() < 0.2:
            return self.random.randbytes(self.random.randrange(size))
        text = "words that compress well, " * self.random.randrange(1, size // 10)
        return json.dumps({"index": index, "text": text[:size]}).encode()

    def write_to(self, vbucket: int, documents: int, *, prefix: str) -> None:
        """Writes documents to one vBucket, under keys that were not there before."""
        keys = (f"{prefix}-{vbucket}-{index}" for index in itertools.count())
        mine = (key for key in keys if self.producer.vbucket_of(key) == vbucket)
        for key in itertools.islice(mine, documents):
            self.upsert(key, self._value(0, 200))

    def roll_back(self, vbucket: int, to: int) -> None:
        """Loses what came after `to`, as in a failover."""
        self.producer.roll_back(vbucket, to)
        self.versions[vbucket] = [v for v in self.versions[vbucket] if v.seqno <= to]

    def latest(self, vbucket: int) -> dict[str, Change]:
        """The newest version of each key."""
        return {version.key: version for version in self.versions[vbucket]}


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
            change = Change(
                line["seqno"], line["key"], line["op"], line["cas"], line["size"], line["crc"]
            )
            self.by_stream.setdefault((line["vb"], line.get("sid", 0)), []).append(change)

    def count(self) -> int:
        return len(self.of("change"))


class Run:
    """A client at work."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.process = process
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self.streaming = threading.Event()
        self._threads = [
            threading.Thread(target=self._read),
            threading.Thread(target=self._read_errors),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for text in lines:
                line = json.loads(text)
                self.lines.append(line)
                if line["line"] == "streaming":
                    self.streaming.set()
        self.streaming.set()

    def _read_errors(self) -> None:
        with self.process.stderr as errors:
            self.errors = errors.read()

    def await_streaming(self) -> None:
        """Waits until all streams are open."""
        assert self.streaming.wait(PATIENCE)
        assert self.process.poll() is None, self._say()

    def finish(self, ends: dict[int, int] | None = None) -> Seen:
        """Waits for the end of the job, which one that follows must be told."""
        if ends is not None:
            self.process.stdin.write(json.dumps(ends))
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.stop()
        assert self.process.returncode == 0, self._say()
        return Seen(self.lines)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for thread in self._threads:
            thread.join()

    def _say(self) -> str:
        surprises = [line for line in self.lines if line["line"] == "surprise"][:10]
        return f"{self.name}: {surprises}\n{self.errors[-4000:]}"


@dataclass
class ForeignClient:
    """A client's program."""

    name: str
    command: list[str]
    # How many vBuckets it insists on.
    vbuckets: int
    folder: Path
    runs: list[Run] = field(default_factory=list)
    jobs: int = 0

    def start(self, producer: Producer, **options: object) -> Run:
        seeds = producer.connection_string.removeprefix("couchbase://").split(",")
        job = {
            "nodes": seeds,
            "bucket": producer.bucket_name,
            "username": "Administrator",
            "password": "password",
            "collections": True,
            "buffer": 1 << 20,
            "compression": "off",
            **{name: str(v) if isinstance(v, Path) else v for name, v in options.items()},
        }
        self.jobs += 1
        path = self.folder / f"job-{self.jobs}.json"
        path.write_text(json.dumps(job))
        process = subprocess.Popen(
            [*self.command, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.runs.append(Run(process, self.name))
        return self.runs[-1]

    def drain(self, producer: Producer, **options: object) -> Seen:
        """Reads from the beginning, or from where it was, to now."""
        return self.start(producer, **options).finish()


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str, str], str]:
    """Finds a program, given its name and what is left out without it."""
    return find_tool


@pytest.fixture(scope="session")
def gocbcore_program() -> list[str]:
    """The program on gocbcore, built."""
    find_tool("go", "gocbcore is not tried")
    program = STATE / "go" / "drain"
    run_tool("go", "build", "-o", str(program), ".", cwd=HERE / "go")
    run_tool("go", "test", ".", cwd=HERE / "go")
    return [str(program)]


@pytest.fixture(scope="session")
def java_program() -> list[str]:
    """The program on java-dcp-client, built."""
    for tool in ("mvn", "javac", "java"):
        find_tool(tool, "java-dcp-client is not tried")
    build = STATE / "java"
    sources = [path for path in (HERE / "java").rglob("*") if path.is_file()]
    stamp = build / "built"
    # Maven takes seconds to find that there is nothing to do.
    if not stamp.exists() or any(path.stat().st_mtime > stamp.stat().st_mtime for path in sources):
        goals = ["compile", "dependency:copy-dependencies"]
        run_tool("mvn", "-B", "-q", f"-Dinterop.build={build}", *goals, cwd=HERE / "java")
        stamp.touch()
    classes = f"{build}/classes:{build}/dependency/*"
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", classes, "Drain"]


@pytest.fixture
def gocbcore(gocbcore_program, tmp_path) -> Iterator[ForeignClient]:
    yield from open_client(ForeignClient("gocbcore", gocbcore_program, 64, tmp_path))


@pytest.fixture
def java(java_program, tmp_path) -> Iterator[ForeignClient]:
    yield from open_client(ForeignClient("java-dcp-client", java_program, 1024, tmp_path))


def open_client(client: ForeignClient) -> Iterator[ForeignClient]:
    yield client
    for run in client.runs:
        run.stop()


@pytest.fixture(params=["gocbcore", "java"])
def client(request) -> ForeignClient:
    """Each of the clients in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def open_history() -> Iterator[Callable[..., History]]:
    """Starts producers and stops them."""
    with contextlib.ExitStack() as stack:

        def open_one(client: ForeignClient, **options: object) -> History:
            options = {"vbuckets": client.vbuckets, **options}
            return History(stack.enter_context(Producer(**options)))

        yield open_one
