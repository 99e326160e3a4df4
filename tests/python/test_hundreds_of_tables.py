"""Buckets of hundreds of collections, each a table: memory, files and commits.

DCP_TABLES sets how many; `make long` tries a thousand.
"""

import json
import os
from pathlib import Path

import pytest

import dcp_rs
import replicas

TABLES = int(os.environ.get("DCP_TABLES", "100"))
# Bytes for each table, beside what a process with few of them needs.
_PER_TABLE = 1024 * 1024
_FEW = 400 * 1024 * 1024

_PROGRAM = """
import json, os, re, sys
import dcp_rs

def most_bytes():
    # Not `ru_maxrss`, which begins with that of the process that started this one.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]) * 1024

with dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e"
) as client:
    files = [0]
    done = dcp_rs.replicate(
        client, sys.argv[2], mode=sys.argv[3], tables="collection", collections="s.*", once=True,
        on_progress=lambda _: files.append(len(os.listdir("/proc/self/fd"))),
    )
print(json.dumps({
    "changes": done.changes,
    "commits": sum(table.commits for table in done.tables.values()),
    "most_bytes": most_bytes(),
    "open_files": max(files),
    "seconds": done.elapsed,
}))
"""


@pytest.fixture(scope="module")
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=16) as running:
        running.create_scope("s")
        for number in range(TABLES):
            running.create_collection(f"s.c{number:04}")
        yield running


def written_to(cluster, documents):
    written = replicas.Written(cluster)
    for number in range(documents):
        for table in range(TABLES):
            written.upsert(f"key_{number}", {"n": number}, f"s.c{table:04}")
    return written


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["duckdb-table", "postgres-table", "delta-table", "parquet-log"])
def test_a_process_keeps_hundreds_of_tables_in_bounded_memory_and_few_files(
    cluster, request, tmp_path, start_python, kind
):
    replica = replicas.make_many(kind, request, tmp_path)
    written = written_to(cluster, 5)

    def run():
        process = start_python(_PROGRAM, cluster.connection_string, replica.url, replica.mode)
        out, error = process.communicate(timeout=3600)
        assert process.returncode == 0, error
        found = json.loads(out) | {"kind": kind, "tables": TABLES}
        if "DCP_FIGURES" in os.environ:
            with Path(os.environ["DCP_FIGURES"]).open("a") as file:
                file.write(json.dumps(found) + "\n")
        return found

    loaded = run()
    assert loaded["changes"] >= 5 * TABLES
    assert loaded["commits"] <= 2 * TABLES
    assert loaded["most_bytes"] < _FEW + TABLES * _PER_TABLE
    assert loaded["open_files"] < 100
    for table in range(3):
        written.upsert("later", {"n": 1}, f"s.c{table:04}")
    later = run()
    assert later["changes"] == 3
    assert replica.documents() == written.documents()
