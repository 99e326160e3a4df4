"""The programs of `examples/` do what they say."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from lag import until

pytestmark = pytest.mark.default_password

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Programs that keep a target in step: lines that follow how many changes there were.
PRINTED = {
    "whole_bucket.py": ["_default___default: 20 documents, name VARCHAR, n BIGINT"],
    "duckdb_table.py": ["_default._default: 20 documents"],
    "postgres_table.py": ["key_0: Airline 0, 0", "key_1: Airline 1, 1", "key_2: Airline 2, 2"],
    "delta_table.py": ["20 documents in version 1"],
    "iceberg_log.py": ["mutation: 20"],
    "parquet_log.py": ["20 changes in 1 files"],
}


# Programs that read, and what a test of its own looks at.
QUERIES = {"duckdb_query.py", "polars_frame.py"}
OTHERS = {
    "fill.py", "asyncio_service.py", "server_sent_events.py", "prometheus_service.py",
    "application_test.py",
}  # fmt: skip


def test_every_example_is_run_and_short():
    programs = list(EXAMPLES.glob("*.py"))
    # tests/spark runs the one that needs Spark.
    spark = {"spark_table.py"}
    assert {path.name for path in programs} == PRINTED.keys() | QUERIES | OTHERS | spark
    assert [path.name for path in programs if len(path.read_text().splitlines()) >= 60] == []
    listed = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in programs if f"]({path.name})" not in listed] == []


@pytest.mark.parametrize(
    "program",
    sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "application_test.py"),
)
def test_without_arguments_the_program_says_which_the_readme_lists(program):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / program)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (arguments,) = re.fullmatch(r"usage: \S+ (.+)\n", done.stderr).groups()
    readme = (EXAMPLES / "README.md").read_text()
    assert f"[{program}]({program}) | `{arguments}` |" in readme


def test_the_readmes_query_finds_what_was_filled_in(start):
    pytest.importorskip("couchbase")
    assert finish(start("duckdb_query.py")) == "no documents\n"
    assert finish(start("polars_frame.py")) == "no documents\n"
    assert finish(start("fill.py")) == "100 documents written\n"
    readme = (EXAMPLES / "README.md").read_text()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert finish(start("duckdb_query.py")) == shown


def test_the_metrics_are_served_as_the_guide_shows(cluster, start):
    cluster.upsert("first", {})
    service = start("prometheus_service.py", 0)
    address = service.stdout.readline().strip()
    assert service.stdout.readline() == "mutation first\n"
    guide = (EXAMPLES.parent / "docs/guides/monitor.md").read_text()
    (shown,) = re.findall(
        r"\^dcp_rs_lag'\n```\n\n```text\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE
    )

    def is_shown():
        with urllib.request.urlopen(address, timeout=20) as answer:
            lines = answer.read().decode().splitlines(keepends=True)
        return "".join(line for line in lines if line.startswith("dcp_rs_lag")) == shown

    until(is_shown)
    service.send_signal(signal.SIGINT)
    assert finish(service) == "stopped\n"


@pytest.mark.parametrize("program", PRINTED)
def test_the_program_writes_and_shows_what_it_wrote(cluster, request, tmp_path, program):
    for n in range(20):
        cluster.upsert(f"key_{n}", {"name": f"Airline {n}", "n": n})
    where = tmp_path / "replica"
    if program.startswith("postgres"):
        where = request.getfixturevalue("postgres_database")
    for again in (False, True):
        done = subprocess.run(
            [
                sys.executable, "-W", "ignore", str(EXAMPLES / program),
                f"{cluster.connection_string}/default", str(where),
            ],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        changes = "0 changes in 0 commits" if again else "20 changes in 1 commits"
        assert done.stdout.splitlines() == [changes, *PRINTED[program]]


def finish(process):
    """What a program that was told to stop prints from now on."""
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    return out


@pytest.fixture
def start(cluster):
    """Starts a program of `examples/` with the cluster's address."""
    started = []

    def begin(program, *arguments):
        command = [sys.executable, "-W", "ignore", str(EXAMPLES / program)]
        process = subprocess.Popen(
            [*command, f"{cluster.connection_string}/default", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("program", sorted(QUERIES))
def test_a_query_sees_the_newest_version_of_each_document(cluster, start, program):
    for n, country in enumerate(["France", "France", "Chile", "France", "Chile", "Oman"]):
        cluster.upsert(f"airline_{n}", {"name": f"Airline {n}", "country": country})
    cluster.upsert("airline_1", {"name": "Airline 1", "country": "Chile"})
    cluster.remove("airline_5")
    assert finish(start(program)).splitlines() == ["Chile: 3", "France: 2"]


def test_the_service_goes_on_where_it_was_stopped(cluster, start, tmp_path):
    for number, key in [(signal.SIGTERM, "first"), (signal.SIGINT, "second")]:
        cluster.upsert(key, {})
        service = start("asyncio_service.py", tmp_path / "positions.json")
        while (line := service.stdout.readline()) != f"mutation {key}\n":
            # It may have been stopped before it saved the checkpoint after this one.
            assert line == "deletion next\n"
        # Its checkpoint is there once the next batch has come.
        cluster.upsert("next", {})
        assert service.stdout.readline() == "mutation next\n"
        cluster.remove("next")
        assert service.stdout.readline() == "deletion next\n"
        service.send_signal(number)
        assert finish(service) == "stopped\n"


def test_a_browser_goes_on_after_the_last_event_that_it_saw(cluster, start):
    cluster.upsert("first", {})
    server = start("server_sent_events.py", 0)
    address = server.stdout.readline().strip()

    def event(headers, wanted):
        """Id of the first event with a key, which is all that it has."""
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            name, number = answer.readline().decode().split(": ")
            data = answer.readline().decode().removeprefix("data: ")
            assert [row["key"] for row in json.loads(data)] == [wanted]
            assert (name, answer.readline()) == ("id", b"\n")
            return number.strip()

    seen = event({}, "first")
    cluster.upsert("second", {})
    assert event({"Last-Event-ID": seen}, "second") != seen
    server.send_signal(signal.SIGINT)
    assert finish(server) == "stopped\n"


def test_the_application_is_tested(tmp_path):
    pytest.importorskip("couchbase")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path),
         "-c", "/dev/null", str(EXAMPLES / "application_test.py")],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
