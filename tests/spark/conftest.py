"""One Spark session for all tests, and an embedded cluster for each test module."""

import os
import sys
from pathlib import Path

import pytest

import dcp_rs

sys.path.insert(0, str(Path(__file__).resolve().parent))

PASSWORD = "pass phrase"
BUCKET = "changes"


@pytest.fixture(scope="session")
def spark():
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dcp_rs tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def producer():
    with dcp_rs.Producer(
        nodes=2, vbuckets=64, bucket=BUCKET, username="reader", password=PASSWORD
    ) as running:
        yield running


@pytest.fixture
def options(producer):
    return {
        "connectionString": producer.connection_string,
        "username": "reader",
        "password": PASSWORD,
        "bucket": BUCKET,
    }


@pytest.fixture
def load(producer):
    """Writes `count` documents, then removes every tenth; gives what is left, by key."""

    def write(count, prefix="doc"):
        documents = {f"{prefix}_{n}": b'{"n": %d}' % n for n in range(count)}
        for key, value in documents.items():
            producer.upsert(key.encode(), value)
        for key in list(documents)[::10]:
            producer.remove(key.encode())
            documents[key] = None
        return documents

    return write
