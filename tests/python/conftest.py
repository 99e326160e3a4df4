"""An embedded cluster and a client of it, for each test."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

import dcp_rs
from dcp_rs import _libraries

# The modules of this folder are imported by name from its tests.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_report_header():
    """Says which versions of libraries the tests run with."""
    found = []
    for library in _libraries.TESTED:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{library} {version(library)}")
    return f"libraries: {', '.join(found)}"


def pytest_collection_modifyitems(config, items):
    """Leaves out what needs another DuckDB, DuckLake, or an administrator of the machine."""
    import duckdb

    from small_disk import can_mount

    absent = {"duckdb_2"} if duckdb.__version__.startswith("1.") else set()
    if find_spec("duckdb_extension_ducklake") is None:
        absent.add("ducklake")
    if any(each.get_closest_marker("mounts") for each in items) and not can_mount():
        absent.add("mounts")
    left_out = [each for each in items if any(map(each.get_closest_marker, absent))]
    if left_out:
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)


# Has the role that a reader should have.
_READER = dcp_rs.testing.User(username="reader", password="canary-8f1c2e of a reader")


@pytest.fixture(autouse=True)
def _least_rights(request, monkeypatch):
    """Clients of embedded clusters have the rights of *Data DCP Reader*, and no more.

    Unless a test names a user of its own, or has the mark `administrator`.
    """
    if request.node.get_closest_marker("administrator") is not None:
        return
    kind = dcp_rs.testing.EmbeddedCluster
    start, options = kind.__init__, kind.connection_options

    @functools.wraps(start)
    def start_with_reader(self, **given):
        has_users = not {"users", "username", "password"}.isdisjoint(given)
        start(self, **given if has_users else given | {"users": [_READER]})

    def options_of_reader(self):
        given = options.fget(self)
        if self._options["users"] != [vars(_READER)]:
            return given
        return replace(given, username=_READER.username, password=_READER.password)

    monkeypatch.setattr(kind, "__init__", start_with_reader)
    monkeypatch.setattr(
        kind, "connection_options", property(options_of_reader, doc=options.__doc__)
    )


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16) as running:
        yield running


@pytest.fixture
def client(cluster):
    with cluster.connect() as connected:
        yield connected


@pytest.fixture
def fill(cluster):
    """Writes `count` documents; gives their values by key."""

    def write(count, prefix="key", size=0):
        documents = {
            f"{prefix}_{n}": b'{"n":%d,"pad":"%s"}' % (n, b"x" * size) for n in range(count)
        }
        for key, value in documents.items():
            cluster.upsert(key, value)
        return documents

    return write


@pytest.fixture
def following(cluster):
    """Starts a replication on a thread of its own, and stops it in the end."""
    stop, threads = threading.Event(), []

    def begin(target, *, connection=None, **options):
        def run():
            with cluster.connect(**connection or {}) as client:
                dcp_rs.replicate(client, target, stop=stop, **options)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield begin
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


# A shell's background job, as CI can be, hands on that SIGINT is ignored.
_TAKES_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.fixture
def start_python():
    """Starts Python programs, given as text, and ends those that still run."""
    started = []

    def start(program, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", _TAKES_CTRL_C + program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore::RuntimeWarning"},
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL server on a socket of its own; gives what a connection string ends with."""
    from postgres_server import PostgresServer

    with contextlib.closing(PostgresServer()) as server:
        yield server.options


_schemas = itertools.count()


@pytest.fixture
def postgres_database(postgres_server):
    """An empty schema of a database; gives its connection string."""
    import psycopg

    name = f"test_{next(_schemas)}"
    with psycopg.connect(f"postgresql:///postgres?{postgres_server}") as server:
        server.execute(f"CREATE SCHEMA {name}")
    return f"postgresql:///postgres?{postgres_server}&options=-csearch_path%3D{name}"


@pytest.fixture(scope="session")
def kafka_broker():
    """A Kafka broker for all tests, each of which has topics of its own."""
    from kafka_broker import Broker

    # Not among what is searched for passwords: it comes and goes.
    folder = Path(tempfile.mkdtemp(prefix="dcp_rs-"))
    broker = Broker(folder)
    yield broker
    broker.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server for all tests, each of which has a bucket of its own; gives its address."""
    from s3_server import S3Server

    with contextlib.closing(S3Server()) as server:
        yield server.address


_buckets = itertools.count()


@pytest.fixture
def s3_bucket(s3_server):
    """An empty bucket; gives where it is."""
    import stores

    place = {"endpoint": s3_server, "bucket": f"test-{next(_buckets)}"}
    stores.make_bucket(place)
    return place


@pytest.fixture(scope="session")
def storage_server(request):
    """A server of the storage that is chosen for lakes; gives its address."""
    import storages

    if storages.CHOSEN is storages.Stored:
        yield request.getfixturevalue("s3_server")
        return
    with contextlib.closing(storages.CHOSEN.Server()) as server:
        yield server.address


@pytest.fixture
def stored(storage_server):
    """An empty bucket behind a proxy that fails requests once it is told to."""
    import storages
    from faulty_proxy import Faults

    # fake-gcs-server does not decode names of buckets.
    place = {"endpoint": storage_server, "bucket": f"test{next(_buckets)}"}
    storages.CHOSEN.make(place)
    with contextlib.closing(Faults(storage_server)) as faults:
        yield storages.CHOSEN(place, faults)


@pytest.fixture
def rest_catalog(s3_bucket):
    """A REST catalog of Iceberg tables in the bucket."""
    from rest_catalog import RestCatalog

    with contextlib.closing(RestCatalog(s3_bucket)) as catalog:
        yield catalog
