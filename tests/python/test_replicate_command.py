"""`dcp-rs replicate`, as a program."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import replicas
from dcp_rs.cli.replicate import Line
from dcp_rs.replication import Progress, TableProgress
from replicas import Written


@pytest.fixture
def replica(tmp_path):
    return replicas.InDuckDB(tmp_path)


@pytest.fixture
def start(cluster):
    started = []

    def program(*arguments, command="replicate"):
        process = subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "dcp_rs", command,
                f"{cluster.connection_string}/default", *map(str, arguments),
                "--username", "Administrator",
            ],
            env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield program
    for process in started:
        process.kill()
        process.communicate()


def test_once_writes_what_is_there_and_ends(cluster, start, replica):
    written = Written(cluster)
    for n in range(300):
        written.upsert(f"key_{n}", {"n": n})
    process = start(replica.url, "--once", "--json", "--commit-rows", 50)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output == ""
    last = json.loads(errors.splitlines()[-1])
    assert (last["changes"], last["generation"], last["lag"]) == (300, 1, 0)
    assert last["changes_per_second"] >= 0
    assert replica.documents() == written.documents()


def test_a_table_for_each_collection(cluster, start, tmp_path):
    written = Written(cluster)
    cluster.create_collection("_default.orders")
    written.upsert("one", {"n": 1})
    written.upsert("two", {"n": 2}, "_default.orders")
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    process = start(replica.url, "--once", "--json", "--tables", "collection")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    tables = json.loads(errors.splitlines()[-1])["tables"]
    assert {name: table["changes"] for name, table in tables.items()} == {
        "_default___default": 1,
        "_default__orders": 1,
    }
    assert replica.documents() == written.documents()
    process = start(f"{replica.url}?table={{collection}}", "--once")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "by a template" in errors


def of_tables(changes, phase="following"):
    """Progress of tables with so many changes each."""
    tables = {
        name: TableProgress(generation=1, changes=number, commits=1, malformed=0, rejected=0)
        for name, number in changes.items()
    }
    return Progress(
        phase=phase, generation=1, changes=sum(changes.values()), commits=2, bytes=0, rollbacks=0,
        malformed=0, rejected=0, lag=0, lag_by_vbucket={}, uncommitted=0, elapsed=1.0,
        changes_per_second=5.0, seconds_since_commit=0.0, tables=tables,
    )  # fmt: skip


def test_a_line_names_the_busiest_of_many_tables_and_sums_up_the_others():
    line = Line()
    first = {f"quiet_{number:03}": 2 for number in range(998)} | {"orders": 50, "carts": 60}
    shown = line(of_tables(first))
    assert shown.endswith("1,000 tables: carts +60, orders +50, quiet_000 +2, 997 more +1,994")
    later = first | {"orders": 1_250, "quiet_007": 3}
    assert line(of_tables(later)).endswith("0 behind, 1,000 tables: orders +1,200, quiet_007 +1")
    assert line(of_tables(later)).endswith(", 1,000 tables"), "counted from the line before"
    # At the end, since the start.
    done = line(of_tables({"a": 1, "b": 2}, phase="done"))
    assert done == "dcp-rs: done: generation 1, 3 changes in 2 commits, 2 tables: b +2, a +1"


def test_a_line_says_what_waits_for_a_commit():
    progress = dataclasses.replace(of_tables({}, phase="catching up"), uncommitted=2998)
    assert "0 changes in 2 commits, 2,998 not yet committed, 5/s, 0 behind" in Line()(progress)
    assert "committed" not in Line()(of_tables({}))


def test_a_line_does_not_say_how_long_it_takes_while_the_target_is_unavailable():
    progress = dataclasses.replace(of_tables({}), lag=21)
    assert "21 behind, 4 s left" in Line()(progress)
    assert "left" not in Line()(dataclasses.replace(progress, phase="target unavailable"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_everything_committed_that_was_read(cluster, start, replica, number):
    written = Written(cluster)
    written.upsert("first", {})
    # Nothing is committed by itself in the time of the test.
    process = start(replica.url, "--commit-interval", 3600, "--json")
    for line in process.stderr:
        if line.startswith("{") and json.loads(line)["phase"] == "following":
            break
    for n in range(300):
        written.upsert(f"key_{n}", {"n": n})
    time.sleep(1.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert json.loads(errors.splitlines()[-1])["changes"] == 301
    assert replica.documents() == written.documents()


def test_it_goes_on_when_nobody_reads_its_progress_any_more(cluster, start, tmp_path):
    replica = replicas.InDelta(tmp_path)
    process = start(replica.url, "--json", "--commit-interval", 0.02)
    assert process.stderr.readline()
    process.stderr.close()
    written = Written(cluster)
    deadline = time.monotonic() + 60
    for n in range(3):
        # It reports about once a second.
        time.sleep(1.2)
        written.upsert(f"key_{n}", {})
        while replica.documents() != written.documents():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_what_is_wrong_is_said_in_a_line(start, tmp_path):
    (tmp_path / "no.duckdb").write_bytes(b"this is not a database" * 1000)
    for arguments, message in [
        (("postgresql://loader@localhost:1/lake?table=t",), "the target failed: IO: [libpq]"),
        ((f"duckdb://{tmp_path}/no.duckdb",), "not a valid DuckDB database"),
        (("mysql://host/db",), "TARGET: must begin with one of delta://"),
        ((f"duckdb://{tmp_path}/x", "--collections", "no.such"), "there is no"),
        ((f"duckdb://{tmp_path}/x", "--document-schema", "vbucket INT"), "vbucket"),
        ((f"delta://{tmp_path}/lake", "--document-schema", "x INT, X INT"), "are one column"),
    ]:
        process = start(*arguments)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 1, errors
        assert output == ""
        (line,) = errors.splitlines()
        assert line.startswith("dcp-rs: ")
        assert message in line


def test_a_repair_keeps_the_columns_of_the_table(cluster, start, tmp_path):
    written = Written(cluster)
    written.upsert("key", {"n": 1})
    replica = replicas.InDuckDB(tmp_path)
    options = {"document_schema": "infer", "new_fields": "ignore", "extra": "column"}
    replicas.replicate(cluster, replica, **options)
    written.upsert("key", {"n": 2, "more": 3})
    replicas.replicate(cluster, replica, **options)
    replica.query("UPDATE documents SET seqno = 1")
    given = ("--document-schema", "infer", "--new-fields", "ignore", "--extra", "column")
    process = start(replica.url, "--repair", *given, command="verify")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, ""), output
    (row,) = replica.rows()
    assert (row["n"], json.loads(row["_extra"])) == (2, {"more": 3})


def test_verify_tells_what_differs_and_loads_it_again(cluster, start, tmp_path):
    written = Written(cluster)
    for number in range(20):
        written.upsert(f"key_{number}", {"n": number})
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    replicas.replicate(cluster, replica)

    def verify(*options):
        process = start(replica.url, *options, command="verify")
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    status, output, errors = verify()
    assert (status, errors) == (0, "")
    assert json.loads(output)["documents"] == 20
    replica.database.query("UPDATE _default___default SET key = '\x1b[2J' WHERE key = 'key_7'")
    status, output, _ = verify()
    found = json.loads(output)
    assert (status, found["missing"], found["extra"], found["is_equal"]) == (3, 1, 1, False)
    keys = {each["kind"]: each["key"] for each in found["examples"]}
    assert keys == {"missing": "key_7", "extra": "\\x1b[2J"}
    status, output, _ = verify("--output", "table")
    assert status == 3
    assert output.splitlines()[0].split()[:4] == ["TABLE", "DOCUMENTS", "ROWS", "REJECTED"]
    assert "\x1b" not in output
    assert "_default___default  missing  key_7" in output
    status, output, errors = verify("--repair", "--tables", "collection")
    assert (status, errors) == (0, "")
    assert json.loads(output)["is_equal"]
    assert replica.documents() == written.documents()
    status, output, errors = start(f"parquet://{tmp_path}/x", command="verify").wait(60), "", ""
    assert status == 1
