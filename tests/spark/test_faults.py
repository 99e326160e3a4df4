"""What goes wrong between the reads of a job, without Spark."""

import threading
import time
from types import SimpleNamespace

import pytest

import dcp_rs
from dcp_rs.spark import ReadOptions, SparkReadError, read_partition
from dcp_rs.spark.planning import batch_partitions
from sequence import Job, documents, history

PATIENCE = 60


@pytest.fixture
def start_cluster():
    """Starts clusters; gives a cluster and the options to read it with."""
    running = []

    def start(**more):
        cluster = dcp_rs.testing.EmbeddedCluster(bucket="changes", **more)
        running.append(cluster)
        return cluster, {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "canary-8f1c2e",
            "bucket": "changes",
        }

    yield start
    for cluster in running:
        cluster.close()


@pytest.fixture
def start():
    """Starts jobs, and ends them."""
    jobs = []

    def make(options, **more):
        jobs.append(Job(options, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def live(cluster, keys, **more):
    found = {key: cluster.get(key, **more) for key in keys}
    return {key: each.value for key, each in found.items() if each is not None}


def existing(rows):
    return {key: value for key, value in documents(rows).items() if value is not None}


class TestBranchBelowWhatWasRead:
    """The copy that took over had all that was read, but not all of the snapshot it lies in.

    Its branch begins where that snapshot does, so that what was read above is not known to be
    common, though nothing of it is lost.
    """

    KEYS = tuple(f"key_{n}" for n in range(60))

    @pytest.fixture
    def fail(self, start_cluster):
        cluster, options = start_cluster(nodes=2, replicas=1, vbuckets=1)
        # The replica gets one snapshot of everything, and not its end.
        cluster.set_replica_lag(0, 1, None)
        for key in self.KEYS[:40]:
            cluster.upsert(key, b"1")

        def fail():
            for key in self.KEYS[40:50]:
                cluster.upsert(key, b"2")
            cluster.set_replica_lag(0, 1, 5)
            cluster.failover(cluster.copies_of(0)[0])
            return cluster

        return options | {"persistedOnly": "false"}, fail

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_it_is_read_again(self, start, fail, mode):
        options, fail = fail
        job = start(options, onRollback=mode)
        job.drain()
        assert len(job.rows) == 40
        cluster = fail()
        assert set(live(cluster, self.KEYS[:40])) == set(self.KEYS[:40]), "nothing read is lost"
        job.drain()
        (marker,) = [row for row in job.rows if row.op == "rollback"]
        assert (marker.seqno, marker.epoch) == (0, 1)
        assert existing(job.rows) == live(cluster, self.KEYS)

    def test_with_fail_the_offsets_stay_usable(self, start, fail):
        options, fail = fail
        job = start(options, onRollback="fail")
        job.drain()
        before = job.start
        cluster = fail()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_ROLLBACK\].*vb:0"):
            job.note()
        assert job.start == before
        job.restart(onRollback="emit")
        job.drain()
        assert existing(job.rows) == live(cluster, self.KEYS)


class TestEndThatWasLost:
    """The batch's end was chosen and its tasks were made; then a failover lost the end."""

    @pytest.mark.parametrize("persisted_only", ["true", "false"])
    def test_tasks_fail_instead_of_waiting_for_it(self, start_cluster, start, persisted_only):
        cluster, options = start_cluster(nodes=1, vbuckets=1)
        for n in range(40):
            cluster.upsert(f"key_{n}", b"1")
        cluster.persist()
        job = start(options, persistedOnly=persisted_only)
        job.batch(10)
        job.note()
        partitions = job.partitions()
        cluster.roll_back(0, 25)
        outcome = []

        def finish():
            try:
                outcome.append(len(job.finish(partitions)))
            except SparkReadError as error:
                outcome.append(error.code)

        task = threading.Thread(target=finish, daemon=True)
        task.start()
        task.join(PATIENCE)
        assert outcome == ["COUCHBASE_DCP_ROLLBACK"]
        job.restart()
        job.batch()
        job.drain()
        assert existing(job.rows) == live(cluster, [f"key_{n}" for n in range(40)])


def test_a_replica_that_lags_behind_on_disk_holds_the_offers_back(start_cluster, start):
    cluster, options = start_cluster(nodes=2, replicas=1, vbuckets=4)
    keys = [f"key_{n}" for n in range(200)]
    for key in keys:
        cluster.upsert(key, b"1")
    cluster.persist()
    job = start(options)
    wait_for(job, lambda: len(documents(job.rows)) == 200)
    cluster.hold_persistence(1, 1)
    for key in keys:
        cluster.upsert(key, b"2")
    cluster.persist()
    behind = {key for key in keys if cluster.vbucket_of(key) == 1}
    assert behind
    wait_for(
        job,
        lambda: sum(value == b"2" for value in documents(job.rows).values()) >= 200 - len(behind),
    )
    assert {key for key, value in documents(job.rows).items() if value == b"1"} == behind
    cluster.hold_persistence(1, 1, hold=False)
    wait_for(job, lambda: set(documents(job.rows).values()) == {b"2"})


def wait_for(job, is_there):
    """Reads what there is until it is enough: replicas and disks take a moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        job.drain()
        if is_there():
            return
        assert time.monotonic() < deadline, "what is waited for does not come"
        time.sleep(0.05)


class TestCollectionThatIsMadeAgain:
    """A collection is dropped, and made again under its name, while nobody reads."""

    @pytest.fixture
    def shop(self, start_cluster):
        cluster, options = start_cluster(nodes=2, vbuckets=16)
        cluster.create_scope("shop")
        cluster.create_collection("shop.carts")
        for n in range(100):
            cluster.upsert(f"old_{n}", b"1", collection="shop.carts")
            cluster.upsert(f"other_{n}", b"1")
        cluster.persist()
        columns = "vbucket,epoch,seqno,op,key,value,collection_id"
        return cluster, options | {"collections": "shop.carts", "columns": columns}

    def test_the_new_one_is_refused_and_read_by_a_new_query(self, shop, start):
        cluster, options = shop
        job = start(options)
        job.drain()
        assert len(job.rows) == 100
        cluster.drop_collection("shop.carts")
        cluster.create_collection("shop.carts")
        for n in range(50, 120):
            cluster.upsert(f"old_{n}", b"2", collection="shop.carts")
        cluster.persist()
        job.restart()
        with pytest.raises(SparkReadError, match=r"\(dropped\).* shop\.carts .* new id") as refused:
            job.drain()
        assert refused.value.code == "COUCHBASE_DCP_FILTER_CHANGED"
        anew = start(options)
        anew.drain()
        assert existing(anew.rows) == {f"old_{n}": b"2" for n in range(50, 120)}

    def test_a_filter_is_narrowed_and_not_widened_again(self, shop, start):
        cluster, options = shop
        cluster.create_collection("shop.orders")
        both = "shop.carts,shop.orders"
        job = start(options, collections=both)
        job.drain()
        assert len(job.rows) == 100
        for name in ("carts", "orders"):
            cluster.upsert("later", b"3", collection=f"shop.{name}")
        cluster.persist()
        job.restart(collections="shop.carts")
        job.drain()
        assert len(job.rows) == 101
        job.restart(collections=both)
        expected = r"also asks for collection shop\.orders"
        with pytest.raises(SparkReadError, match=expected) as refused:
            job.drain()
        assert refused.value.code == "COUCHBASE_DCP_FILTER_CHANGED"

    def test_without_a_new_one_the_read_says_what_is_missing(self, shop, start):
        cluster, options = shop
        job = start(options)
        job.drain()
        cluster.drop_collection("shop.carts")
        cluster.upsert("other", b"2")
        cluster.persist()
        job.restart()
        with pytest.raises((SparkReadError, dcp_rs.exceptions.ConfigError), match=r"shop\.carts"):
            job.drain()

    def test_what_lies_elsewhere_makes_a_batch_without_rows(self, shop, start):
        cluster, options = shop
        job = start(options)
        job.drain()
        for n in range(100):
            cluster.upsert(f"other_{n}", b"2")
        cluster.persist()
        before = job.start
        assert job.note() != before
        assert job.batch() == []
        assert job.note() == job.start, "and there is nothing left"


def test_a_thousand_vbuckets_are_read_exactly(start_cluster, start):
    cluster, options = start_cluster(nodes=2, vbuckets=1024)
    keys = [f"key_{n}" for n in range(4000)]
    for key in keys:
        cluster.upsert(key, b"1")
    cluster.persist()
    job = start(options)
    sizes = []
    while job.note(1500) != job.start:
        sizes.append(len(job.batch()))
        job.restart()
    assert max(sizes) <= 1500
    assert sum(sizes) == 4000
    assert existing(job.rows) == dict.fromkeys(keys, b"1")
    text = job.driver.dump(job.start)
    assert len(text) < 24_000, "what Spark writes into its log for each batch"


def test_vbuckets_that_move_after_the_plan_are_followed(start_cluster, start):
    cluster, options = start_cluster(nodes=3, replicas=2, vbuckets=12)
    keys = [f"key_{n}" for n in range(600)]
    for key in keys:
        cluster.upsert(key, b"1")
    job = start(options)
    wait_for_offer(cluster, job, 600)
    partitions = job.partitions()
    cluster.failover(0)
    job.finish(partitions[:1])
    cluster.restart(0)
    cluster.rebalance()
    for partition in partitions[1:]:
        job.rows += [
            SimpleNamespace(**row)
            for batch in read_partition(partition)
            for row in batch.to_pylist()
        ]
    assert existing(job.rows) == dict.fromkeys(keys, b"1")
    assert history(job.rows)


def wait_for_offer(cluster, job, rows):
    """Notes an end that holds so many rows: replicas and disks take a moment."""
    deadline = time.monotonic() + PATIENCE
    while sum(job.note()["s"]) < rows:
        assert time.monotonic() < deadline, "not everything is persisted"
        cluster.persist()
        time.sleep(0.05)


def test_no_live_key_is_missing_from_a_read_while_all_are_rewritten(start_cluster):
    cluster, options = start_cluster(nodes=2, vbuckets=16)
    keys = [f"key_{n}" for n in range(2000)]
    for key in keys:
        cluster.upsert(key, b"0")
    stop = threading.Event()
    rounds = []

    def rewrite():
        while not stop.is_set():
            for key in keys:
                cluster.upsert(key, b"%d" % (len(rounds) + 1))
            rounds.append(1)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(5):
            seen = set()
            for partition in batch_partitions(ReadOptions.parse(options)):
                for batch in read_partition(partition):
                    seen.update(batch.column("key").to_pylist())
            assert seen == set(keys)
    finally:
        stop.set()
        writer.join()
    assert rounds, "everything was rewritten at least once"


class TestReadsFromACheckpoint:
    """Where a stream stood is where a read of Spark begins, rolled back or not."""

    @pytest.fixture
    def rolled_back(self, start_cluster):
        """A checkpoint at seqno 10 of a vBucket that now has 7, of which 5 are common."""
        cluster, options = start_cluster(nodes=1, vbuckets=2)
        keys = [key for key in (f"k{n}" for n in range(200)) if cluster.vbucket_of(key) == 0]
        with cluster.connect() as client:
            for key in keys[:10]:
                cluster.upsert(key, b"1")
            with client.stream(until="now") as stream:
                assert sum(batch.num_rows for batch in stream) == 10
                checkpoint = stream.checkpoint()
            cluster.roll_back(0, 5)
            for key in keys[10:12]:
                cluster.upsert(key, b"2")
            cluster.persist()
            with client.stream(start=checkpoint, until="now") as stream:
                rows = [row for batch in stream for row in batch.rows()]
        assert rows[0]["op"] == "rollback"
        return (
            options,
            checkpoint.to_json(),
            [(row["op"], row["key"], row["seqno"]) for row in rows],
        )

    @staticmethod
    def rows(partitions):
        batches = [batch for partition in partitions for batch in read_partition(partition)]
        rows = [row for batch in batches for row in batch.to_pylist()]
        return [(row["op"], row["key"], row["seqno"]) for row in rows]

    def test_a_read_up_to_now_has_what_a_stream_has(self, rolled_back):
        options, checkpoint, wanted = rolled_back
        assert (
            self.rows(dcp_rs.spark.partitions(options | {"startingOffsets": checkpoint})) == wanted
        )

    def test_a_job_goes_on_from_it(self, rolled_back):
        options, checkpoint, wanted = rolled_back
        partitions = dcp_rs.spark.partitions(options, start=checkpoint)
        assert self.rows(partitions) == wanted
        assert dcp_rs.spark.partitions(options, start=partitions.end) == []

    def test_it_may_have_an_end(self, rolled_back):
        options, checkpoint, wanted = rolled_back
        end = dcp_rs.spark.partitions(options, start="earliest").end
        bounded = options | {"startingOffsets": checkpoint, "endingOffsets": end}
        assert self.rows(batch_partitions(ReadOptions.parse(bounded))) == wanted

    def test_with_fail_it_is_refused(self, rolled_back):
        options, checkpoint, _ = rolled_back
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_ROLLBACK\].*vb:0"):
            dcp_rs.spark.partitions(options | {"startingOffsets": checkpoint, "onRollback": "fail"})
