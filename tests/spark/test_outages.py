"""Real queries with `persistedOnly`, on copies that lag, fail, purge and come back."""

import json
import threading
import time

import pytest

import dcp_rs
import dcp_rs.spark
from query import FORMAT, PATIENCE, Query
from sequence import documents

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

VBUCKET = 1


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def cluster(spark, tmp_path):
    """Starts clusters; gives a producer and a query of it."""
    running = []

    def start(**more):
        producer = dcp_rs.Producer(bucket="changes", vbuckets=4, **more)
        running.append(producer)
        options = {
            "connectionString": producer.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "changes",
        }
        return producer, Query(spark, options, tmp_path, producer)

    yield start
    for producer in running:
        producer.close()


def own_keys(producer, count):
    """Keys of one vBucket."""
    keys = (f"k{n}" for n in range(10_000))
    return [key for key in keys if producer.vbucket_of(key) == VBUCKET][:count]


def write(producer, keys, value, **more):
    for key in keys:
        producer.upsert(key, value, **more)


def live(found):
    return {key: value for key, value in found.items() if value is not None}


def truth(producer, keys, **more):
    found = {key: producer.get(key, **more) for key in keys}
    return {key: each.value for key, each in found.items() if each is not None}


def settled(producer, query, keys, **more):
    """Reads until the sink has what the bucket has: replicas and disks take a moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        query.run(**more)
        rows = query.rows()
        if live(documents(rows)) == truth(producer, keys):
            return rows
        assert time.monotonic() < deadline, "sink and bucket differ"


def markers(rows):
    return [(row.vbucket, row.seqno, row.epoch) for row in rows if row.op == "rollback"]


def test_a_failover_to_a_copy_that_lagged_takes_no_row_back(cluster):
    producer, query = cluster(nodes=2, replicas=1)
    keys = own_keys(producer, 40)
    write(producer, keys[:20], b"1")
    settled(producer, query, keys)
    producer.set_replica_lag(VBUCKET, 1, None)
    write(producer, keys[:30], b"lost")
    query.run()
    assert b"lost" not in {row.value for row in query.rows()}, "it is on one copy only"
    producer.failover(producer.copies_of(VBUCKET)[0])
    write(producer, keys[30:], b"2")
    rows = settled(producer, query, keys)
    assert b"lost" not in {row.value for row in rows}


def test_a_task_ends_only_once_what_replaced_its_rows_is_on_all_copies(spark, cluster):
    producer, query = cluster(nodes=2, replicas=1)
    keys = own_keys(producer, 4)
    write(producer, keys, b"1")
    deadline = time.monotonic() + PATIENCE
    while True:  # until both copies have it on disk
        producer.persist()
        first = dcp_rs.spark.splits(query.options, since="earliest")
        if sum(split.size for split in first) == 4:
            break
        assert time.monotonic() < deadline, "not everything is persisted"
        time.sleep(0.05)
    # The planned end is in the middle of a snapshot now, and the last key beyond it.
    write(producer, keys[:3], b"2")
    producer.persist()
    time.sleep(0.3)
    producer.set_replica_lag(VBUCKET, 1, None)
    write(producer, keys[3:], b"2")
    producer.persist()
    state, outcome = {}, []

    def run(splits):
        task = dcp_rs.spark.map_in_arrow(query.options, splits)
        n = len(task)
        schema = dcp_rs.spark.schema(query.options)
        rows = spark.range(0, n, 1, n).mapInArrow(task, schema).collect()
        state.update({row.key: bytes(row.value) for row in rows if row.op == "mutation"})
        return splits.end

    def run_first():
        try:
            outcome.append(run(first))
        except Exception as error:  # noqa: BLE001 - looked at below
            outcome.append(str(error))

    running = threading.Thread(target=run_first)
    running.start()
    time.sleep(3)
    assert running.is_alive(), "what it passed over is on one copy only"
    producer.failover(producer.copies_of(VBUCKET)[0])
    running.join(PATIENCE)
    (end,) = outcome
    if not end.startswith("{"):
        assert "[COUCHBASE_DCP_ROLLBACK]" in end
        end = "earliest"
    deadline = time.monotonic() + PATIENCE
    while state != truth(producer, keys):
        assert time.monotonic() < deadline, "a row is lost"
        producer.persist()
        end = run(dcp_rs.spark.splits(query.options, since=end))


def test_purged_deletions_stop_a_query_without_statistics_unless_it_may_lose_them(cluster):
    producer, query = cluster(nodes=1)
    # As to a user with the role Data DCP Reader.
    answer = {"answer": {"status": "EACCESS"}}
    producer.set_faults([{"condition": {"opcode": "STAT"}, "reaction": answer}])
    keys = own_keys(producer, 30)
    write(producer, keys[:20], b"1")
    query.run()
    for key in keys[:10]:
        producer.remove(key)
    write(producer, keys[20:], b"2")
    producer.purge(VBUCKET, producer.high_seqnos()[VBUCKET])
    for _ in range(2):
        with pytest.raises(Exception, match=r"COUCHBASE_DCP_DATA_LOSS"):
            query.run()
    query.run(failOnDataLoss="false", onRollback="resync")
    rows = query.rows()
    assert markers(rows) == [(VBUCKET, 0, 1)]
    assert live(documents(rows)) == truth(producer, keys)


def test_an_end_that_was_rolled_back_after_it_was_logged_is_cut(cluster):
    def fail(batches):
        for _ in batches:
            raise RuntimeError("the batch does not end")
        yield from ()

    producer, query = cluster(nodes=2, replicas=1)
    keys = own_keys(producer, 40)
    write(producer, keys[:10], b"1")
    settled(producer, query, keys)
    write(producer, keys[10:30], b"lost")
    # Until the batch is offered.
    running = query.run(wait=False, through=fail)
    with pytest.raises(Exception, match="the batch does not end"):
        running.awaitTermination(PATIENCE)
    producer.roll_back(VBUCKET, 15)
    write(producer, keys[20:], b"2")
    rows = settled(producer, query, keys)
    assert len(markers(rows)) == 1
    assert {row.value for row in rows if row.epoch == 0} == {b"1", b"lost"}, "what is common"


def test_with_fail_a_rollback_inside_a_batch_stops_the_query(cluster):
    producer, query = cluster(nodes=1)
    keys = own_keys(producer, 200)
    write(producer, keys[:100], b"1")
    query.run(onRollback="fail")
    write(producer, keys[100:], b"lost")
    producer.persist()
    held = {"opcode": "DCP_MUTATION", "nth": 30}
    producer.set_faults([{"condition": held, "reaction": {"delay": {"seconds": 3}}}])
    running = query.run(wait=False, onRollback="fail")
    deadline = time.monotonic() + PATIENCE
    while producer.fault_counts() != [1]:
        assert running.exception() is None
        assert time.monotonic() < deadline, "no batch is read"
        time.sleep(0.02)
    producer.roll_back(VBUCKET, 50)
    producer.set_faults([])
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_ROLLBACK"):
        running.awaitTermination(PATIENCE)
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_ROLLBACK"):
        query.run(onRollback="fail")
    rows = settled(producer, query, keys, onRollback="emit")
    assert markers(rows) == [(VBUCKET, 50, 1)]


class TestCollections:
    """Told at planning, before any task."""

    @pytest.fixture
    def shop(self, cluster):
        producer, query = cluster(nodes=1)
        producer.create_scope("shop")
        for name in ("carts", "orders"):
            producer.create_collection(f"shop.{name}")
            write(producer, [f"{name}_{n}" for n in range(20)], b"1", collection=f"shop.{name}")
        return producer, query

    def test_one_that_is_made_again_is_another(self, shop):
        producer, query = shop
        query.run(collections="shop.carts")
        producer.drop_collection("shop.carts")
        with pytest.raises(Exception, match=r"there is no collection 'shop.carts'"):
            query.run(collections="shop.carts")
        producer.create_collection("shop.carts")
        write(producer, ["again"], b"2", collection="shop.carts")
        with pytest.raises(Exception, match=r"COUCHBASE_DCP_FILTER_CHANGED.*shop\.carts"):
            query.run(collections="shop.carts")

    def test_the_lag_is_that_of_what_is_read(self, shop):
        producer, query = shop
        write(producer, [f"default_{n}" for n in range(100)], b"1")
        ended = query.run(collections="shop.orders", maxRowsPerTrigger="30")
        lags = [dcp_rs.spark.lag(progress) for progress in ended.recentProgress]
        totals = [lag.total for lag in lags]
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] == 0
        # The first batch has 30 seqnos of 140; orders are among the first 44 of all vBuckets.
        assert 0 <= totals[0] <= 44


def test_the_lag_is_what_the_server_has_and_not_what_was_planned(cluster):
    producer, query = cluster(nodes=1)
    keys = own_keys(producer, 100)
    write(producer, keys, b"1")
    ended = query.run(maxRowsPerTrigger="40")
    lags = [dcp_rs.spark.lag(progress.json) for progress in ended.recentProgress]
    assert [lag.total for lag in lags][:3] == [60, 20, 0]
    assert lags[0].by_vbucket == {VBUCKET: 60}
    assert dcp_rs.spark.lag(None) is None
    assert dcp_rs.spark.lag(json.dumps({"sources": [{"endOffset": "7"}]})) is None


def test_an_end_is_refused_for_a_stream(spark, cluster):
    _, query = cluster(nodes=1)
    options = query.options | {"endingOffsets": "latest"}
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_CONFIG.*endingOffsets"):
        spark.readStream.format(FORMAT).options(**options).load().writeStream.format(
            "noop"
        ).start().awaitTermination(PATIENCE)


def test_an_outage_shorter_than_the_patience_stops_no_query(cluster):
    producer, query = cluster(nodes=1)
    keys = own_keys(producer, 20)
    write(producer, keys[:10], b"1")
    producer.persist()
    running = query.run(wait=False, connectTimeout="1", retryTimeout="120")
    deadline = time.monotonic() + PATIENCE

    def wait_for(count):
        while sum(progress["numInputRows"] for progress in running.recentProgress) < count:
            assert running.exception() is None
            assert time.monotonic() < deadline, "the query does not go on"
            time.sleep(0.1)

    try:
        wait_for(10)
        producer.kill(0)
        time.sleep(5)
        assert running.exception() is None
        producer.restart(0)
        write(producer, keys[10:], b"2")
        producer.persist()
        wait_for(20)
    finally:
        running.stop()
    assert live(documents(query.rows())) == truth(producer, keys)
