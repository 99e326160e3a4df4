"""Real queries with `persistedOnly`, on copies that lag, fail, purge and come back."""

import json
import threading
import time

import pytest

import dcp_rs
import dcp_rs.spark
from query import FORMAT, PATIENCE, REPORTS_LAG, Query
from sequence import documents

# The first test waits for Spark to start, too.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

VBUCKET = 1


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    dcp_rs.spark.register(spark)


@pytest.fixture
def start_cluster(spark, tmp_path):
    """Starts clusters; gives a cluster and a query of it."""
    running = []

    def start(**more):
        cluster = dcp_rs.testing.EmbeddedCluster(bucket="changes", vbuckets=4, **more)
        running.append(cluster)
        options = {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "canary-8f1c2e",
            "bucket": "changes",
        }
        return cluster, Query(spark, options, tmp_path, cluster)

    yield start
    for cluster in running:
        cluster.close()


def own_keys(cluster, count):
    """Keys of one vBucket."""
    keys = (f"k{n}" for n in range(10_000))
    return [key for key in keys if cluster.vbucket_of(key) == VBUCKET][:count]


def write(cluster, keys, value, **more):
    for key in keys:
        cluster.upsert(key, value, **more)


def live(found):
    return {key: value for key, value in found.items() if value is not None}


def truth(cluster, keys, **more):
    found = {key: cluster.get(key, **more) for key in keys}
    return {key: each.value for key, each in found.items() if each is not None}


def settled(cluster, query, keys, **more):
    """Reads until the sink has what the bucket has: replicas and disks take a moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        query.run(**more)
        rows = query.rows()
        if live(documents(rows)) == truth(cluster, keys):
            return rows
        assert time.monotonic() < deadline, "sink and bucket differ"


def markers(rows):
    return [(row.vbucket, row.seqno, row.epoch) for row in rows if row.op == "rollback"]


def test_a_failover_to_a_copy_that_lagged_takes_no_row_back(start_cluster):
    cluster, query = start_cluster(nodes=2, replicas=1)
    keys = own_keys(cluster, 40)
    write(cluster, keys[:20], b"1")
    settled(cluster, query, keys)
    cluster.set_replica_lag(VBUCKET, 1, None)
    write(cluster, keys[:30], b"lost")
    query.run()
    assert b"lost" not in {bytes(row.value) for row in query.rows()}, "it is on one copy only"
    cluster.failover(cluster.copies_of(VBUCKET)[0])
    write(cluster, keys[30:], b"2")
    rows = settled(cluster, query, keys)
    assert b"lost" not in {bytes(row.value) for row in rows}


def test_a_task_ends_only_once_what_replaced_its_rows_is_on_all_copies(spark, start_cluster):
    cluster, query = start_cluster(nodes=2, replicas=1)
    keys = own_keys(cluster, 4)
    write(cluster, keys, b"1")
    deadline = time.monotonic() + PATIENCE
    while True:  # until both copies have it on disk
        cluster.persist()
        first = dcp_rs.spark.partitions(query.options, start="earliest")
        if sum(partition.size for partition in first) == 4:
            break
        assert time.monotonic() < deadline, "not everything is persisted"
        time.sleep(0.05)
    # The planned end is in the middle of a snapshot now, and the last key beyond it.
    write(cluster, keys[:3], b"2")
    cluster.persist()
    time.sleep(0.3)
    cluster.set_replica_lag(VBUCKET, 1, None)
    write(cluster, keys[3:], b"2")
    cluster.persist()
    state, outcome = {}, []

    def run(partitions):
        task = dcp_rs.spark.map_in_arrow(query.options, partitions)
        n = len(task)
        schema = dcp_rs.spark.schema(query.options)
        rows = spark.range(0, n, 1, n).mapInArrow(task, schema).collect()
        state.update({row.key: bytes(row.value) for row in rows if row.op == "mutation"})
        return partitions.end

    def run_first():
        try:
            outcome.append(run(first))
        except Exception as error:  # noqa: BLE001 - looked at below
            outcome.append(str(error))

    running = threading.Thread(target=run_first)
    running.start()
    time.sleep(3)
    assert running.is_alive(), "what it passed over is on one copy only"
    cluster.failover(cluster.copies_of(VBUCKET)[0])
    running.join(PATIENCE)
    (end,) = outcome
    if not end.startswith("{"):
        assert "[COUCHBASE_DCP_ROLLBACK]" in end
        end = "earliest"
    deadline = time.monotonic() + PATIENCE
    while state != truth(cluster, keys):
        assert time.monotonic() < deadline, "a row is lost"
        cluster.persist()
        end = run(dcp_rs.spark.partitions(query.options, start=end))


def test_purged_deletions_stop_a_query_without_statistics_unless_it_may_lose_them(start_cluster):
    cluster, query = start_cluster(nodes=1)
    # As to a user with the role Data DCP Reader.
    answer = {"answer": {"status": "EACCESS"}}
    cluster.set_faults([{"condition": {"opcode": "STAT"}, "reaction": answer}])
    keys = own_keys(cluster, 30)
    write(cluster, keys[:20], b"1")
    query.run()
    for key in keys[:10]:
        cluster.remove(key)
    write(cluster, keys[20:], b"2")
    cluster.purge(VBUCKET, cluster.high_seqnos()[VBUCKET])
    for _ in range(2):
        with pytest.raises(Exception, match=r"COUCHBASE_DCP_DATA_LOSS"):
            query.run()
    query.run(onPurge="resync", onRollback="resync")
    rows = query.rows()
    assert markers(rows) == [(VBUCKET, 0, 1)]
    assert live(documents(rows)) == truth(cluster, keys)


def test_an_end_that_was_rolled_back_after_it_was_logged_is_cut(start_cluster):
    def fail(batches):
        for _ in batches:
            raise RuntimeError("the batch does not end")
        yield from ()

    cluster, query = start_cluster(nodes=2, replicas=1)
    keys = own_keys(cluster, 40)
    write(cluster, keys[:10], b"1")
    settled(cluster, query, keys)
    write(cluster, keys[10:30], b"lost")
    # Until the batch is offered.
    running = query.run(wait=False, through=fail)
    with pytest.raises(Exception, match="the batch does not end"):
        running.awaitTermination(PATIENCE)
    cluster.roll_back(VBUCKET, 15)
    write(cluster, keys[20:], b"2")
    rows = settled(cluster, query, keys)
    assert len(markers(rows)) == 1
    assert {bytes(row.value) for row in rows if row.epoch == 0} == {b"1", b"lost"}, "what is common"


def test_with_fail_a_rollback_inside_a_batch_stops_the_query(start_cluster):
    cluster, query = start_cluster(nodes=1)
    keys = own_keys(cluster, 200)
    write(cluster, keys[:100], b"1")
    query.run(onRollback="fail")
    write(cluster, keys[100:], b"lost")
    cluster.persist()
    held = {"opcode": "DCP_MUTATION", "nth": 30}
    cluster.set_faults([{"condition": held, "reaction": {"delay": {"seconds": 3}}}])
    running = query.run(wait=False, onRollback="fail")
    deadline = time.monotonic() + PATIENCE
    while cluster.fault_counts() != [1]:
        assert running.exception() is None
        assert time.monotonic() < deadline, "no batch is read"
        time.sleep(0.02)
    cluster.roll_back(VBUCKET, 50)
    cluster.set_faults([])
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_ROLLBACK"):
        running.awaitTermination(PATIENCE)
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_ROLLBACK"):
        query.run(onRollback="fail")
    rows = settled(cluster, query, keys, onRollback="emit")
    assert markers(rows) == [(VBUCKET, 50, 1)]


class TestCollections:
    """Told at planning, before any task."""

    @pytest.fixture
    def shop(self, start_cluster):
        cluster, query = start_cluster(nodes=1)
        cluster.create_scope("shop")
        for name in ("carts", "orders"):
            cluster.create_collection(f"shop.{name}")
            write(cluster, [f"{name}_{n}" for n in range(20)], b"1", collection=f"shop.{name}")
        return cluster, query

    def test_one_that_is_made_again_is_another(self, shop):
        cluster, query = shop
        query.run(collections="shop.carts")
        cluster.drop_collection("shop.carts")
        with pytest.raises(Exception, match=r"there is no collection 'shop.carts'"):
            query.run(collections="shop.carts")
        cluster.create_collection("shop.carts")
        write(cluster, ["again"], b"2", collection="shop.carts")
        with pytest.raises(Exception, match=r"COUCHBASE_DCP_FILTER_CHANGED.*shop\.carts"):
            query.run(collections="shop.carts")

    def test_what_is_new_in_a_wider_choice_is_read_by_a_query_of_its_own(self, shop, tmp_path):
        cluster, query = shop
        query.run(collections="shop.carts")
        advice = "would miss.*read the other collections with a query"
        with pytest.raises(Exception, match=rf"COUCHBASE_DCP_FILTER_CHANGED.*{advice}"):
            query.run(collections="shop.*")
        new = Query(query.spark, query.options, tmp_path / "new", cluster)
        for each, name in ((new, "orders"), (query, "carts")):
            each.run(collections=f"shop.{name}")
            assert sorted({row.collection for row in each.rows()}) == [name]
            assert len(each.rows()) == 20

    def test_the_lag_is_that_of_what_is_read(self, shop):
        cluster, query = shop
        write(cluster, [f"default_{n}" for n in range(100)], b"1")
        query.run(collections="shop.orders", maxOffsetsPerTrigger="30")
        lags = [dcp_rs.spark.lag(progress) for progress in query.progress]
        if not REPORTS_LAG:
            assert set(lags) == {None}
            return
        totals = [lag.total for lag in lags]
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] == 0
        # The first batch has 30 seqnos of 140; orders are among the first 44 of all vBuckets.
        assert 0 <= totals[0] <= 44


def test_the_lag_is_what_the_server_has_and_not_what_was_planned(start_cluster):
    cluster, query = start_cluster(nodes=1)
    keys = own_keys(cluster, 100)
    write(cluster, keys, b"1")
    query.run(maxOffsetsPerTrigger="40")
    lags = [dcp_rs.spark.lag(progress.json) for progress in query.progress]
    if REPORTS_LAG:
        assert [lag.total for lag in lags][:3] == [60, 20, 0]
        assert lags[0].by_vbucket == {VBUCKET: 60}
        assert dcp_rs.spark.lag(query.progress).seconds == 0
    else:
        assert set(lags) == {None}
    assert dcp_rs.spark.lag(None) is None
    assert dcp_rs.spark.lag(json.dumps({"sources": [{"endOffset": "7"}]})) is None


def test_the_lag_has_an_age_if_several_batches_are_given():
    def planned(second, end, latest):
        def offsets(seqnos):
            return json.dumps({"bucket": "default", "s": seqnos})

        source = {"endOffset": offsets(end), "latestOffset": offsets(latest)}
        return {"timestamp": f"2026-01-01T00:00:{second}.000Z", "sources": [source]}

    seen = [
        planned("00", [0, 0], [5, 0]),
        planned("10", [3, 0], [9, 2]),
        planned("25", [5, 0], [9, 2]),
        planned("30", [9, 2], [9, 2]),
    ]
    if not REPORTS_LAG:
        assert dcp_rs.spark.lag(seen) is None
        return
    # What the first batch saw is read by the third, and what the second saw is not.
    ages = [dcp_rs.spark.lag(seen[:count]).seconds for count in (1, 2, 3, 4)]
    assert ages == [0, 10, 15, 0]
    assert dcp_rs.spark.lag(seen[2]).seconds is None
    assert dcp_rs.spark.lag(seen[:3])[:2] == dcp_rs.spark.lag(seen[2])[:2] == (6, {0: 4, 1: 2})
    assert dcp_rs.spark.lag([]) is None


def test_an_end_is_refused_for_a_stream(spark, start_cluster):
    _, query = start_cluster(nodes=1)
    options = query.options | {"endingOffsets": "latest"}
    with pytest.raises(Exception, match=r"COUCHBASE_DCP_CONFIG.*endingOffsets") as raised:
        spark.readStream.format(FORMAT).options(**options).load().writeStream.format(
            "noop"
        ).start().awaitTermination(PATIENCE)
    first, *_, last = str(raised.value).partition(" SQLSTATE")[0].splitlines()
    line = (
        "[COUCHBASE_DCP_CONFIG] endingOffsets: a stream has no end; use trigger(availableNow=True)"
    )
    assert line in first
    assert line in last


def test_an_outage_shorter_than_the_retry_timeout_stops_no_query(start_cluster):
    cluster, query = start_cluster(nodes=1)
    keys = own_keys(cluster, 20)
    write(cluster, keys[:10], b"1")
    cluster.persist()
    running = query.run(wait=False, connectTimeout="1", retryTimeout="120")
    deadline = time.monotonic() + PATIENCE

    def wait_for(count):
        while sum(progress["numInputRows"] for progress in running.recentProgress) < count:
            assert running.exception() is None
            assert time.monotonic() < deadline, "the query does not go on"
            time.sleep(0.1)

    try:
        wait_for(10)
        cluster.kill(0)
        time.sleep(5)
        assert running.exception() is None
        cluster.restart(0)
        write(cluster, keys[10:], b"2")
        cluster.persist()
        wait_for(20)
    finally:
        running.stop()
    assert live(documents(query.rows())) == truth(cluster, keys)
