"""The demo as a program, and that its equality check fails when it should."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_rs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[2] / "demo" / "airports.py"
DOCUMENTS = 1500


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("airports_demo", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    return subprocess.run(
        [sys.executable, PROGRAM, "--documents", str(DOCUMENTS), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_the_demo_compares_every_document():
    finished = run()
    assert finished.returncode == 0, finished.stdout + finished.stderr
    removed = DOCUMENTS // 50
    expected = (
        f"{DOCUMENTS - removed:,} documents equal, {removed} removed on both sides, 0 different"
    )
    assert expected in finished.stdout
    assert finished.stdout.count(" 0 different") == 2, "the streaming query's table too"
    assert "documents replaced or removed while no query runs" in finished.stdout


def test_the_demo_fails_when_one_document_is_altered_behind_its_back():
    finished = run("--alter-one")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "1 different" in finished.stdout
    assert finished.stdout.count("the table's document is not what the SDK reads") == 1


def test_the_check_notices_each_kind_of_difference(spark, demo):
    """Alters, removes and adds documents after the table was made, and drops a row from it."""
    with (
        dcp_rs.testing.EmbeddedCluster(
            nodes=2, vbuckets=64, bucket=demo.BUCKET, username=demo.USERNAME, password="p"
        ) as cluster,
        demo.sdk_collection(cluster.connection_string, "p") as collection,
    ):
        airports = {f"A{n}": {"elevation": float(n), "country": "XX"} for n in range(100)}
        loaded = demo.load(collection, airports)
        options = {
            "connectionString": cluster.connection_string,
            "username": demo.USERNAME,
            "password": "p",
            "bucket": demo.BUCKET,
        }
        task = demo.dcp_rs.spark.map_in_arrow(options)
        n = len(task)
        schema = demo.dcp_rs.spark.schema(options)
        changes = spark.range(0, n, 1, n).mapInArrow(task, schema).cache()

        same = demo.compare(changes, collection, loaded.keys)
        assert (same.documents, same.absent, same.differences) == (98, 2, [])

        collection.upsert("airport_A1", {"elevation": 1.5})
        collection.remove("airport_A2")
        collection.upsert("airport_A7", {"country": "removed, and back again"})
        changed = demo.compare(
            changes.where("key <> 'airport_A5'"), collection, [*loaded.keys, "airport_unknown"]
        )
        assert {line.partition(":")[0] for line in changed.differences} == {
            "airport_A1",
            "airport_A2",
            "airport_A5",
            "airport_A7",
            "airport_unknown",
        }
        assert changed.documents == 95
        changes.unpersist()
