"""What goes wrong while Spark runs a batch."""

import json
import threading
import time

import pytest

import dcp_rs.spark
from query import FORMAT, PATIENCE, Query
from sequence import documents

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def start_cluster(spark, tmp_path):
    """Three nodes that hold every vBucket each, and a query of them."""
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, replicas=2, vbuckets=24, bucket="changes"
    ) as cluster:
        options = {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "canary-8f1c2e",
            "bucket": "changes",
        }
        yield cluster, Query(spark, options, tmp_path, cluster)


def write(cluster, keys, value):
    for key in keys:
        cluster.upsert(key, value)


def settled(cluster, query, keys, **more):
    """Reads until the sink has what the bucket has: replicas and disks take a moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = {key: cluster.get(key) for key in keys}
        wanted = {key: each.value for key, each in found.items() if each is not None}
        rows = query.rows()
        if {key: value for key, value in documents(rows).items() if value is not None} == wanted:
            return rows
        assert time.monotonic() < deadline, "sink and bucket differ"
        query.run(**more)


def is_once(rows):
    """Whether no change came twice."""
    seen = [(row.vbucket, row.epoch, row.seqno) for row in rows if row.op != "rollback"]
    return len(seen) == len(set(seen))


def stall(cluster, node, seconds):
    """Holds the connection that sends the 50th change of a node."""
    condition = {"opcode": "DCP_MUTATION", "node": node, "nth": 50}
    cluster.set_faults([{"condition": condition, "reaction": {"delay": {"seconds": seconds}}}])


def wait_until_stalled(cluster, running):
    deadline = time.monotonic() + PATIENCE
    while cluster.fault_counts() != [1]:
        assert running.exception() is None
        assert time.monotonic() < deadline, "no batch is read"
        time.sleep(0.02)


KEYS = [f"key_{n}" for n in range(3000)]


def offered(cluster, query):
    """Waits until everything may be read in one batch."""
    deadline = time.monotonic() + PATIENCE
    while True:
        cluster.persist()
        end = dcp_rs.spark.partitions(query.options, start="earliest").end
        if sum(json.loads(end)["s"]) == sum(cluster.high_seqnos().values()):
            return
        assert time.monotonic() < deadline, "not everything is persisted"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_task_that_fails_is_run_again(start_cluster, tmp_path, how):
    cluster, query = start_cluster
    write(cluster, KEYS, b"1")
    folder = str(tmp_path)

    def fail_once(batches):
        import os
        import signal
        from pathlib import Path

        from pyspark import TaskContext

        task = TaskContext.get()
        for batch in batches:
            yield batch
            if task.attemptNumber() == 0 and task.partitionId() == 0:
                Path(folder, f"failed_{task.taskAttemptId()}").touch()
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the first attempt fails")

    offered(cluster, query)
    query.run(through=fail_once)
    assert len(list(tmp_path.glob("failed_*"))) >= 1
    rows = settled(cluster, query, KEYS)
    assert len(rows) == len(KEYS)
    assert is_once(rows)


def test_a_failover_inside_a_batch_loses_nothing(start_cluster):
    cluster, query = start_cluster
    write(cluster, KEYS, b"1")
    offered(cluster, query)
    # Longer than the test may take: it is the failover that ends the connection.
    stall(cluster, 0, 600)
    running = query.run(wait=False)
    wait_until_stalled(cluster, running)
    cluster.failover(0)
    cluster.set_faults([])
    write(cluster, KEYS[::3], b"2")
    deadline = time.monotonic() + PATIENCE
    while not running.recentProgress:
        assert running.exception() is None
        assert time.monotonic() < deadline, "the batch does not end"
        time.sleep(0.1)
    running.stop()
    rows = settled(cluster, query, KEYS)
    assert {row.key for row in rows if row.op == "mutation"} == set(KEYS)
    assert is_once(rows)


def test_a_rebalance_inside_a_batch_loses_nothing(start_cluster):
    cluster, query = start_cluster
    write(cluster, KEYS, b"1")
    offered(cluster, query)
    cluster.add_node()
    stall(cluster, 0, 2)
    running = query.run(wait=False)
    wait_until_stalled(cluster, running)
    cluster.rebalance()
    cluster.set_faults([])
    write(cluster, KEYS[::3], b"2")
    deadline = time.monotonic() + PATIENCE
    while not running.recentProgress:
        assert running.exception() is None
        assert time.monotonic() < deadline, "the batch does not end"
        time.sleep(0.1)
    running.stop()
    rows = settled(cluster, query, KEYS)
    assert not [row for row in rows if row.op == "rollback"]
    assert is_once(rows)


@pytest.mark.parametrize("mode", ["emit", "resync"])
def test_a_failover_inside_a_batch_that_lost_the_tail_is_told(start_cluster, mode):
    cluster, query = start_cluster
    write(cluster, KEYS[:1500], b"1")
    query.run(persistedOnly="false", onRollback=mode)
    for vbucket in range(24):
        for replica in range(1, len(cluster.copies_of(vbucket))):
            cluster.set_replica_lag(vbucket, replica, None)
    write(cluster, KEYS, b"lost on some")
    stall(cluster, 0, 600)
    running = query.run(wait=False, persistedOnly="false", onRollback=mode)
    wait_until_stalled(cluster, running)
    cluster.failover(0)
    cluster.set_faults([])
    write(cluster, KEYS[::3], b"2")
    deadline = time.monotonic() + PATIENCE
    while running.isActive and len(running.recentProgress) < 2:
        assert time.monotonic() < deadline, "the batch does not end"
        time.sleep(0.1)
    if (error := running.exception()) is not None:
        assert "[COUCHBASE_DCP_ROLLBACK]" in str(error)
    running.stop()
    rows = settled(cluster, query, KEYS, persistedOnly="false", onRollback=mode)
    assert [row for row in rows if row.op == "rollback"]
    assert is_once(rows)


def test_a_slow_sink_slows_the_reader(spark, start_cluster, tmp_path, request):
    cluster, query = start_cluster
    # The sink takes Spark's own batches: a task's rows are not to fit into one of them.
    rows_of_batch = "spark.sql.execution.arrow.maxRecordsPerBatch"
    request.addfinalizer(lambda: spark.conf.unset(rows_of_batch))
    spark.conf.set(rows_of_batch, 20)
    write(cluster, KEYS, b"x" * 40_000)
    offered(cluster, query)
    # Counts what the nodes send.
    sending = {"opcode": "DCP_MUTATION", "direction": "to_client"}
    cluster.set_faults([{"condition": sending, "reaction": {"delay": {"seconds": 0}}}])
    taken = tmp_path / "taken"
    taken.touch()

    def slowly(batches):
        import time

        for batch in batches:
            time.sleep(0.1)
            with taken.open("ab") as file:
                file.write(b"." * batch.num_rows)
            yield batch

    small = {"flowControlBufferBytes": "64k", "batchRows": "50"}
    running = query.run(wait=False, through=slowly, **small)
    deadline = time.monotonic() + PATIENCE
    ahead = []
    while (sunk := taken.stat().st_size) < len(KEYS):
        assert running.exception() is None
        assert time.monotonic() < deadline, "no progress"
        if sunk:
            ahead.append(cluster.fault_counts()[0] - sunk)
        time.sleep(0.05)
    running.processAllAvailable()
    running.stop()
    # What lies between: windows, batches and the sockets between Spark's processes, which the
    # system lets grow to some megabytes each.
    assert max(ahead) < len(KEYS) / 2, ahead
    assert is_once(settled(cluster, query, KEYS))


def test_a_query_of_nothing_ends_and_goes_on(start_cluster):
    cluster, query = start_cluster
    query.run()
    query.run()
    write(cluster, KEYS[:10], b"1")
    rows = settled(cluster, query, KEYS[:10])
    query.run()
    assert len(query.rows()) == len(rows) == 10


def test_a_read_misses_no_key_while_all_are_rewritten(spark, start_cluster):
    cluster, query = start_cluster
    write(cluster, KEYS, b"0")
    stop = threading.Event()

    def rewrite():
        n = 0
        while not stop.is_set():
            n += 1
            write(cluster, KEYS, b"%d" % n)
            time.sleep(0.01)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(3):
            frame = spark.read.format(FORMAT).options(**query.options).load()
            seen = {row.key for row in frame.where("op = 'mutation'").select("key").collect()}
            assert seen == set(KEYS)
    finally:
        stop.set()
        writer.join()
