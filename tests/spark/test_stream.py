"""`spark.readStream.format("couchbase.dcp")`: a bucket in micro-batches."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dcp_rs.spark
from query import ENDS_AFTER_ONE_BATCH, PATIENCE, Query, read_available
from sequence import documents

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def query(spark, options, tmp_path, cluster):
    return Query(spark, options, tmp_path, cluster)


def test_available_now_reads_everything_in_limited_batches(query, load):
    expected = load(1000)
    query.run(maxOffsetsPerTrigger="300")
    sizes = [progress["numInputRows"] for progress in query.progress]
    assert max(sizes) <= 300
    assert sum(sizes) == 1000
    assert documents(query.rows()) == expected


def test_available_now_leaves_nothing_or_says_what_it_leaves(options, cluster, tmp_path):
    for n in range(1000):
        cluster.upsert(b"key_%d" % n, b"{}")
    cluster.persist()
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("session.py"))]
    job = json.dumps(["available now", options, str(tmp_path)]) + "\n"
    done = subprocess.run(program, input=job, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-5000:]
    said = re.findall(r"^-- (\w+)\n(.*?)^-- rows: (\d+)$", done.stderr, re.MULTILINE | re.DOTALL)
    rows = {name: int(count) for name, _, count in said}
    left = {
        name: re.findall(r"(\w+): this batch leaves (\d+) seqnos", log) for name, log, _ in said
    }
    if ENDS_AFTER_ONE_BATCH:
        assert rows == {"limited": 100, "crashed": 0, "restarted": 100, "helped": 800}
        assert left["limited"] == [("batch", "900")]
        assert left["restarted"] == [("first", "800")]
        assert "run the query again, as dcp_rs.spark.run_available_now does" in done.stderr
    else:
        assert rows == {"limited": 1000, "crashed": 0, "restarted": 0, "helped": 0}
        assert not any(left.values())


def test_a_wrapper_of_available_now_that_hides_the_start_is_refused_by_name(spark, query, cluster):
    name = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
    spark.conf.set(name, "true")
    try:
        cluster.upsert(b"first", b"{}")
        query.run()
        cluster.upsert(b"second", b"{}")
        if ENDS_AFTER_ONE_BATCH:
            refused = rf"COUCHBASE_DCP_SPARK_VERSION\] {re.escape(name)}"
            with pytest.raises(Exception, match=refused):
                query.run()
            spark.conf.unset(name)
        query.run()
    finally:
        spark.conf.unset(name)
    assert sorted(row.key for row in query.rows()) == ["first", "second"]


def test_a_restart_goes_on_where_it_was(query, cluster):
    for run in range(2):
        for n in range(100):
            cluster.upsert(b"%d_%d" % (run, n), b"{}")
        query.run()
    assert len(query.rows()) == 200
    assert len(documents(query.rows())) == 200


def test_with_a_writer_running_nothing_is_lost_or_doubled(query, cluster):
    stop = threading.Event()
    written = {}

    def write():
        n = 0
        while not stop.is_set():
            key, value = b"key_%d" % (n % 500), b'{"n": %d}' % n
            cluster.upsert(key, value)
            written[key.decode()] = value
            n += 1
            if n % 200 == 0:
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        running = query.run(wait=False, maxOffsetsPerTrigger="5000")
        deadline = time.monotonic() + PATIENCE
        while len(running.recentProgress) < 3:
            assert time.monotonic() < deadline, "no progress"
            assert running.exception() is None
            time.sleep(0.1)
        running.stop()
        query.run()
    finally:
        stop.set()
        writer.join()
    query.run()
    rows = query.rows()
    assert documents(rows) == written
    seen = [(row.vbucket, row.epoch, row.seqno) for row in rows]
    assert len(seen) == len(set(seen))


def test_a_killed_driver_goes_on_where_it_was(query, options, cluster, tmp_path):
    keys = [f"key_{n}" for n in range(4000)]
    for key in keys:
        cluster.upsert(key, b"1")
    cluster.persist()
    limited = {**options, "maxOffsetsPerTrigger": "100"}
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("session.py"))]
    # A session of its own, so that the JVM is killed with it.
    with subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True) as driver:
        try:
            driver.stdin.write(json.dumps(["for ever", limited, str(tmp_path)]).encode() + b"\n")
            driver.stdin.flush()
            deadline = time.monotonic() + PATIENCE
            while not (tmp_path / "checkpoint" / "commits" / "2").exists():
                assert driver.poll() is None, "the query ended"
                assert time.monotonic() < deadline, "the query does nothing"
                time.sleep(0.02)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
    assert 0 < len(query.rows()) < len(keys), "killed on its way"
    for key in keys[::2]:
        cluster.upsert(key, b"2")
    query.run()
    rows = query.rows()
    assert documents(rows) == dict.fromkeys(keys, b"1") | dict.fromkeys(keys[::2], b"2")
    seen = [(row.vbucket, row.epoch, row.seqno) for row in rows]
    assert len(seen) == len(set(seen))


def test_the_password_is_nowhere(query, options, load, tmp_path, caplog):
    load(50)
    query.run()
    told = [json.dumps(progress, default=str) for progress in query.progress]
    told += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert any(re.search(r'"bucket\\*" ?:', text) for text in told), "the offsets are among it"
    with pytest.raises(Exception, match="COUCHBASE_DCP_") as raised:
        query.run(bucket="another")
    told += [str(raised.value), caplog.text]
    assert len(told) > 5
    assert not [text for text in told if options["password"] in text]


def test_a_query_that_starts_at_latest_skips_what_was_there(query, cluster):
    cluster.upsert(b"before", b"{}")
    query.run(startingOffsets="latest")
    cluster.upsert(b"after", b"{}")
    query.run(startingOffsets="latest")
    assert [row.key for row in query.rows()] == ["after"]


def test_a_first_batch_that_failed_starts_again_at_what_was_latest(
    spark, options, cluster, tmp_path
):
    cluster.upsert(b"before", b"{}")
    batches = []

    read = options | {"startingOffsets": "latest", "persistedOnly": "false"}

    def writer(sink):
        changes = spark.readStream.format("couchbase.dcp").options(**read).load()
        return changes.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path))

    def collect(batch, _):
        batches.append([row.key for row in batch.collect()])

    def fail(batch, number):
        collect(batch, number)
        raise RuntimeError("the first batch fails")

    # Holds back what the first node last answers about `latest`, until there is a change above it.
    own = [vbucket for vbucket in range(64) if cluster.copies_of(vbucket)[0] == 0]
    condition = {"opcode": "OBSERVE_SEQNO", "node": 0, "nth": len(own)}
    cluster.set_faults([{"condition": condition, "reaction": {"delay": {"seconds": 2}}}])
    running = writer(fail).trigger(processingTime="0 seconds").start()
    try:
        deadline = time.monotonic() + PATIENCE
        while cluster.fault_counts() != [1]:
            assert running.exception() is None
            assert time.monotonic() < deadline, "the query does not start"
            time.sleep(0.01)
        keys = (b"first_%d" % n for n in range(10_000))
        first = next(key for key in keys if cluster.vbucket_of(key) in own)
        cluster.upsert(first, b"{}")
        with pytest.raises(Exception, match="the first batch fails"):
            running.awaitTermination(PATIENCE)
    finally:
        running.stop()
    cluster.upsert(b"meanwhile", b"{}")
    assert batches == [[first.decode()]]
    read_available(writer(collect), read)
    assert batches[1:] == [[first.decode()], ["meanwhile"]]


class TestRollback:
    """A failover that lost the tail between two batches."""

    VBUCKET = 7

    @pytest.fixture
    def lost(self, query, cluster):
        """Reads 40 changes of one vBucket, of which the server then loses the last 15."""
        keys = (b"k%d" % n for n in range(10_000))
        own = [key for key in keys if cluster.vbucket_of(key) == self.VBUCKET]
        for key in own[:40]:
            cluster.upsert(key, b'"old"')
        query.run()
        cluster.roll_back(self.VBUCKET, 25)
        for key in own[30:50]:
            cluster.upsert(key, b'"new"')
        return {key.decode(): b'"old"' for key in own[:25]} | {
            key.decode(): b'"new"' for key in own[30:50]
        }

    def test_emit_tells_and_goes_on(self, query, lost):
        query.run()
        rows = query.rows()
        (marker,) = [row for row in rows if row.op == "rollback"]
        assert (marker.vbucket, marker.seqno, marker.epoch) == (self.VBUCKET, 25, 1)
        assert documents(rows) == lost
        assert len(rows) == 40 + 1 + 20

    def test_resync_reads_the_vbucket_again(self, query, lost):
        query.run(onRollback="resync")
        rows = query.rows()
        (marker,) = [row for row in rows if row.op == "rollback"]
        assert (marker.seqno, marker.epoch) == (0, 1)
        assert documents(rows) == lost

    def test_fail_stops_and_leaves_the_checkpoint_usable(self, query, lost):
        with pytest.raises(Exception, match="COUCHBASE_DCP_ROLLBACK"):
            query.run(onRollback="fail")
        query.run()
        assert documents(query.rows()) == lost


def test_persisted_only_waits_for_the_disk(query, cluster):
    keys = [b"key_%d" % n for n in range(100)]
    for key in keys:
        cluster.upsert(key, b"{}")
    vbucket = cluster.vbucket_of(keys[0])
    held = [key.decode() for key in keys if cluster.vbucket_of(key) == vbucket]
    cluster.persist()
    cluster.hold_persistence(vbucket)
    for key in keys:
        cluster.upsert(key, b'"again"')
    query.run()
    again = {row.key for row in query.rows() if bytes(row.value) == b'"again"'}
    assert again == {key.decode() for key in keys} - set(held)
    cluster.hold_persistence(vbucket, hold=False)
    query.run()
    again = {row.key for row in query.rows() if bytes(row.value) == b'"again"'}
    assert again == {key.decode() for key in keys}


def test_another_bucket_of_the_same_name_is_refused(query, cluster, load):
    load(50)
    query.run()
    cluster.drop_bucket()
    cluster.create_bucket()
    with pytest.raises(Exception, match="COUCHBASE_DCP_BUCKET_CHANGED"):
        query.run()


def test_vbuckets_that_move_are_followed(query, cluster, load):
    load(500)
    query.run()
    for vbucket in range(0, 64, 2):
        for node in (0, 1):
            cluster.move_vbucket(vbucket, node)
    expected = load(500)
    query.run()
    assert documents(query.rows()) == expected
