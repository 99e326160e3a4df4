"""The pytest plugin, as another project's tests use it."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

TESTS = """
import pytest


def test_an_empty_cluster(couchbase_cluster):
    assert couchbase_cluster.num_vbuckets == 64
    couchbase_cluster.upsert("a", "1")
    with couchbase_cluster.connect() as client:
        rows = [row for batch in client.stream(until="now") for row in batch.rows()]
    assert [row["key"] for row in rows] == ["a"]


@pytest.mark.couchbase(nodes=2, vbuckets=8)
def test_another_one(couchbase_cluster):
    assert couchbase_cluster.num_vbuckets == 8
    assert sum(couchbase_cluster.high_seqnos().values()) == 0
"""
HEAVY = """
import sys


def test_nothing_is_imported_yet():
    assert "dcp_rs.pytest_plugin" in sys.modules
    assert not {"pyarrow", "pandas", "polars", "numpy", "pyspark"} & sys.modules.keys()
"""


def is_installed():
    """Whether pytest can know the plugin by itself; not so in a mere source tree."""
    try:
        return bool(distribution("dcp-rs"))
    except PackageNotFoundError:
        return False


def run(tmp_path, text):
    (tmp_path / "test_it.py").write_text(text)
    plugin = [] if is_installed() else ["-p", "dcp_rs.pytest_plugin"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--strict-markers", *plugin, "."],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
    )  # fmt: skip


def test_the_fixture_gives_each_test_a_cluster_with_its_options(tmp_path):
    done = run(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


SHARED = """
import pytest


@pytest.mark.couchbase(nodes=2)
def test_a_mark_that_would_do_nothing(couchbase_session_cluster):
    pass
"""


def test_the_mark_is_refused_where_the_cluster_is_shared(tmp_path):
    done = run(tmp_path, SHARED)
    assert done.returncode == 4, done.stdout
    assert "test_a_mark_that_would_do_nothing: the mark couchbase is for couchbase_cluster" in (
        done.stdout + done.stderr
    )


UNNAMED = """
import pytest


@pytest.mark.couchbase("travel")
def test_another_bucket(couchbase_cluster):
    pass
"""


def test_an_option_of_the_mark_without_its_name_is_refused(tmp_path):
    done = run(tmp_path, UNNAMED)
    assert done.returncode == 1
    assert "takes 1 positional argument but 2 were given" in done.stdout


SESSION = """
import pytest


@pytest.fixture(scope="session")
def couchbase_session_options():
    return {"vbuckets": 8}


def test_one_writes(couchbase_session_cluster):
    assert couchbase_session_cluster.num_vbuckets == 8
    couchbase_session_cluster.upsert("a", "1")


def test_another_reads(couchbase_session_cluster):
    assert couchbase_session_cluster.get("a").value == b"1"
"""


def test_the_cluster_of_the_session_is_one_for_all_tests(tmp_path):
    done = run(tmp_path, SESSION)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_plugin_imports_nothing_heavy_at_the_start(tmp_path):
    done = run(tmp_path, HEAVY)
    assert done.returncode == 0, done.stdout
