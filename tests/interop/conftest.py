"""Clients that others wrote, built on demand, and clusters for them to read from.

Every client is a small program that takes jobs (JSON on standard input), drains all vBuckets and
prints what it is sent as JSON lines; see `Job` in go/session/job.go.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcp_rs.testing import EmbeddedCluster

# The modules of this folder are imported by name from its tests.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from history import History
from programs import ForeignClient, Program, build_go, build_java, find_tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str, str], str]:
    """Finds a program, given its name and what is left out without it."""
    return find_tool


@pytest.fixture(scope="session")
def go_programs() -> Path:
    """The folder of the Go programs, built."""
    return build_go()


@pytest.fixture(scope="session")
def java_program() -> Iterator[Program]:
    """The program on java-dcp-client, which does the jobs of all tests: a JVM starts slowly."""
    program = Program("java-dcp-client", build_java(), does_many=True)
    yield program
    program.kill()


@pytest.fixture
def gocbcore(go_programs) -> Iterator[ForeignClient]:
    program = Program("gocbcore", [str(go_programs / "gocbcore")], does_many=False)
    yield ForeignClient(program, vbuckets=64)
    program.kill()


@pytest.fixture
def godcp(go_programs) -> Iterator[ForeignClient]:
    program = Program("go-dcp", [str(go_programs / "godcp")], does_many=False)
    yield ForeignClient(program, vbuckets=64, after_rollback="skip")
    program.kill()


@pytest.fixture
def java(java_program) -> ForeignClient:
    return ForeignClient(java_program, vbuckets=1024, after_rollback="begin again")


@pytest.fixture(params=["gocbcore", "java", "godcp"])
def client(request) -> ForeignClient:
    """Each of the clients in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def open_history() -> Iterator[Callable[..., History]]:
    """Starts clusters and stops them."""
    with contextlib.ExitStack() as stack:

        def open_one(client: ForeignClient, **options: object) -> History:
            options = {"vbuckets": client.vbuckets, **options}
            return History(stack.enter_context(EmbeddedCluster(**options)))

        yield open_one


def pytest_terminal_summary(terminalreporter) -> None:
    """Says at the end which clients were not tried."""
    reports = terminalreporter.stats.get("skipped", [])
    left_out = [report for report in reports if "interop" in report.keywords]
    if left_out:
        terminalreporter.section("NOT TRIED", sep="!", red=True)
        reasons = Counter(str(report.longrepr[2]) for report in left_out)
        for reason, count in reasons.items():
            terminalreporter.line(f"{count} tests of foreign clients: {reason}")
