"""One Spark session for all tests, and an embedded cluster for each test module."""

import sys
from pathlib import Path

import pytest

import dcp_rs

sys.path.insert(0, str(Path(__file__).resolve().parent))

from query import LEAVES_SOCKETS

PASSWORD = "canary-8f1c2e pass phrase"
BUCKET = "changes"


def pytest_configure(config):
    if LEAVES_SOCKETS:
        for category in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            config.addinivalue_line("filterwarnings", f"ignore:.*<socket.socket fd:{category}")


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    from session import new_session

    # With the plan of each query. They are searched for passwords.
    events = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": tmp_path_factory.mktemp("events").as_uri(),
    }
    session = new_session(**events)
    yield session
    session.stop()


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(
        nodes=2, vbuckets=64, bucket=BUCKET, username="reader", password=PASSWORD
    ) as running:
        yield running


@pytest.fixture
def options(cluster):
    return {
        "connectionString": cluster.connection_string,
        "username": "reader",
        "password": PASSWORD,
        "bucket": BUCKET,
    }


@pytest.fixture
def load(cluster):
    """Writes `count` documents, then removes every tenth; gives what is left, by key."""

    def write(count, prefix="doc"):
        documents = {f"{prefix}_{n}": b'{"n": %d}' % n for n in range(count)}
        for key, value in documents.items():
            cluster.upsert(key.encode(), value)
        for key in list(documents)[::10]:
            cluster.remove(key.encode())
            documents[key] = None
        return documents

    return write
