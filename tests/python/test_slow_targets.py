"""Targets that are slow or away for long: bounded memory, and no place lost."""

import json
import os
import time

import psycopg
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import DcpError

# Bytes that a locked target may cost: what is read ahead, the commit, and what Arrow keeps.
_BOUND = 48 * 1024 * 1024

_PROGRAM = """
import json, os, sys, threading
import dcp_rs

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

stop, asked = threading.Event(), threading.Event()

def listen():
    for line in sys.stdin:
        if line.strip() == "stop":
            stop.set()
        print(json.dumps({"resident": resident()}), flush=True)

with dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e",
    buffer_size=1024 * 1024,
) as client:
    threading.Thread(target=listen, daemon=True).start()
    done = dcp_rs.replicate(
        client, sys.argv[2], tables="collection", stop=stop, commit_interval=0.1,
        commit_bytes=1 << 20,
    )
print(json.dumps({"changes": done.changes}), flush=True)
"""


@pytest.fixture
def replica(postgres_database):
    return replicas.OfMany(replicas.InPostgres(postgres_database), "postgres", "table")


def until(holds, patience=60):
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_locked_table_costs_bounded_memory_and_no_change(cluster, replica, start_python):
    written = replicas.Written(cluster)
    cluster.create_scope("shop")
    cluster.create_collection("shop.orders")

    def fill(count):
        for number in range(count):
            written.upsert(f"key_{number}", {"pad": os.urandom(1000).hex()}, "shop.orders")

    def there():
        with psycopg.connect(replica.url) as database:
            (found,) = database.execute("SELECT count(*) FROM shop__orders").fetchone()
            return found

    fill(2_000)
    process = start_python(_PROGRAM, cluster.connection_string, replica.url)

    def ask(what="resident"):
        print(what, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())["resident"]

    until(lambda: "shop__orders" in replica.names() and there() == 2_000)
    before = ask()
    with psycopg.connect(replica.url) as locking:
        # Readers and writers wait for it, as for one that is being repaired.
        locking.execute("LOCK TABLE shop__orders IN ACCESS EXCLUSIVE MODE")
        # 80 MB: many times what it may hold.
        for _ in range(5):
            fill(8_000)
        time.sleep(2.0)
        held = [ask() for _ in range(3)]
        assert max(held) - before < _BOUND
        assert process.poll() is None
    until(lambda: there() == 8_000)
    ask("stop")
    assert process.wait(60) == 0, process.stderr.read()
    # It stopped when the table had all keys, not all of their versions.
    replicas.replicate(cluster, replica)
    is_equal = replica.documents() == written.documents()
    assert is_equal, "80 MB are not to be shown"


def test_a_database_that_goes_away_ends_it_and_it_goes_on_from_its_last_commit(cluster, replica):
    written = replicas.Written(cluster)
    for number in range(100):
        written.upsert(f"key_{number}", {"n": number})
    replicas.replicate(cluster, replica)
    seen = []

    def end_session(progress):
        seen.append(progress)
        if progress.phase == "following" and len(seen) < 10_000:
            seen.extend([None] * 10_000)
            with psycopg.connect(replica.url, autocommit=True) as database:
                database.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND datname = current_database()"
                )
            written.upsert("after", {"n": 1})

    with pytest.raises(Exception, match=r"terminat|connection|closed") as raised:
        replicas.replicate(
            cluster, replica, once=False, on_progress=end_session, commit_interval=0.1
        )
    assert not isinstance(raised.value, DcpError), "that of the library"
    done = replicas.replicate(cluster, replica)
    assert done.changes == 1
    assert replica.documents() == written.documents()
    with cluster.connect() as client:
        assert dcp_rs.verify(client, replica.url).is_equal
