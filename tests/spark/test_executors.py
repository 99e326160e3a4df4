"""Executors in processes of their own, of which one is killed while it reads."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_rs
from sequence import documents

# Three JVMs start.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

PASSWORD = "canary-8f1c2e"
KEYS = [f"key_{n}" for n in range(3000)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs the query; gives the folder with all that it left."""
    folder = tmp_path_factory.mktemp("cluster")
    with dcp_rs.testing.EmbeddedCluster(
        nodes=2, vbuckets=64, bucket="changes", username="reader", password=PASSWORD
    ) as cluster:
        for key in KEYS:
            cluster.upsert(key, b"1")
        cluster.persist()
        options = {
            "connectionString": cluster.connection_string,
            "username": "reader",
            "password": PASSWORD,
            "bucket": "changes",
            "maxOffsetsPerTrigger": "1000",
        }
        program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("session.py"))]
        job = json.dumps(["in a cluster", options, str(folder)]) + "\n"
        with (folder / "driver.log").open("wb") as log:
            done = subprocess.run(
                program, input=job.encode(), stdout=log, stderr=log, timeout=360, check=False
            )
    said = (folder / "driver.log").read_text(errors="replace")
    assert done.returncode == 0, said[-5000:]
    return folder


def test_what_a_killed_executor_was_reading_is_read_by_another(spark, ran):
    assert int((ran / "killed").read_text()) > 1
    executors = list((ran / "home" / "work").glob("app-*/*/"))
    assert len(executors) >= 3, "two, and one in place of the one that was killed"
    rows = spark.read.parquet(str(ran / "rows")).collect()
    assert documents(rows) == dict.fromkeys(KEYS, b"1")
    assert len(rows) == len(KEYS)


def test_the_password_is_in_no_log(ran):
    left = [path for path in ran.rglob("*") if path.is_file() and "home" not in path.parts]
    left += [path for path in (ran / "home" / "work").rglob("*") if path.is_file()]
    logs = [path for path in left if path.name == "stderr"]
    assert any("Running task" in log.read_text(errors="replace") for log in logs)
    assert any(path.parent.name == "offsets" for path in left)
    assert any("events" in path.parts for path in left)
    secret = PASSWORD.encode()
    shown = [secret, secret.hex().encode()]
    # In base64 with any bytes before it, without the digits that are its neighbours' too.
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + secret)
        shown.append(encoded[(before * 8 + 5) // 6 : -4])
    told = [str(path) for path in left if any(form in path.read_bytes() for form in shown)]
    assert told == []
