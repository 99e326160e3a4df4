"""Reads that follow each other, as a query's micro-batches do, and failovers between them."""

import json
import random
import tarfile
import time
from pathlib import Path

import pytest

import dcp_rs
from dcp_rs.spark import ReadOptions, SparkReadError
from sequence import Job, documents, history

VBUCKET = 7
PATIENCE = 30


@pytest.fixture
def keys(cluster):
    """Keys of one vBucket."""
    keys = (f"k{n}" for n in range(10_000))
    return [key for key in keys if cluster.vbucket_of(key) == VBUCKET][:100]


@pytest.fixture
def start(options):
    """Starts jobs, and ends them."""
    jobs = []

    def make(**more):
        jobs.append(Job(options, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def write(cluster, keys, value):
    for key in keys:
        cluster.upsert(key, value)
    cluster.persist()


def truth(cluster, keys):
    """The documents that there are; None for one that is not."""
    found = {key: cluster.get(key) for key in keys}
    return {key: None if each is None else each.value for key, each in found.items()}


def live(documents):
    return {key: value for key, value in documents.items() if value is not None}


def test_a_limit_is_kept_and_nothing_is_missing(cluster, start):
    write(cluster, [f"key_{n}" for n in range(1000)], b"1")
    job = start()
    sizes = []
    while job.note(150) != job.start:
        sizes.append(len(job.batch()))
    assert max(sizes) <= 150
    assert sum(sizes) == 1000
    assert len(documents(job.rows)) == 1000


class TestDataLoss:
    """Deletions that were purged before they were read."""

    @pytest.fixture
    def behind(self, cluster, keys, start):
        def make(**more):
            write(cluster, keys[:40], b"1")
            job = start(**more)
            job.drain()
            for key in keys[:20]:
                cluster.remove(key)
            write(cluster, keys[40:50], b"2")
            cluster.purge(VBUCKET, cluster.high_seqnos()[VBUCKET])
            return job

        return make

    def test_it_stops_the_read(self, behind):
        job = behind()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_DATA_LOSS\].*vb:7") as told:
            job.note()
        assert told.value.code == "COUCHBASE_DCP_DATA_LOSS"

    def test_the_vbucket_can_be_read_again(self, cluster, behind, keys):
        job = behind()
        job.restart(onPurge="resync")
        job.drain()
        (marker,) = [row for row in job.rows if row.op == "rollback"]
        assert (marker.vbucket, marker.seqno, marker.epoch) == (VBUCKET, 0, 1)
        assert live(documents(job.rows)) == live(truth(cluster, keys))

    def test_what_was_read_in_time_is_none(self, cluster, keys, start):
        write(cluster, keys[:40], b"1")
        for key in keys[:20]:
            cluster.remove(key)
        cluster.persist()
        job = start()
        job.drain()
        cluster.purge(VBUCKET, cluster.high_seqnos()[VBUCKET])
        write(cluster, keys[40:50], b"2")
        job.drain()
        assert live(documents(job.rows)) == live(truth(cluster, keys))


class TestLostTail:
    """A failover that lost the tail: 40 changes of a vBucket, of which 25 are left."""

    @pytest.fixture
    def lose(self, cluster, keys):
        def lose():
            cluster.roll_back(VBUCKET, 25)
            write(cluster, keys[30:50], b"new")

        write(cluster, keys[:40], b"old")
        return lose

    @staticmethod
    def markers(job):
        return [(row.seqno, row.epoch) for row in job.rows if row.op == "rollback"]

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_between_batches_it_is_told(self, cluster, keys, start, lose, mode):
        job = start(onRollback=mode)
        job.drain()
        lose()
        job.drain()
        assert self.markers(job) == [(25 if mode == "emit" else 0, 1)]
        assert documents(job.rows) == live(truth(cluster, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_after_the_end_was_noted_the_batch_ends_early(self, cluster, keys, start, lose, mode):
        job = start(onRollback=mode)
        job.batch(10)
        job.note(30)
        lose()
        job.restart()
        assert len(job.batch()) == 15, "what is common to both histories"
        assert self.markers(job) == []
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(cluster, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_tasks_that_begin_above_it_fail_and_are_planned_again(
        self, cluster, keys, start, lose, mode
    ):
        job = start(onRollback=mode)
        job.batch(30)
        job.note()
        partitions = job.partitions()
        lose()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_ROLLBACK\]"):
            job.finish(partitions)
        assert len(job.rows) == 30
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(cluster, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_tasks_that_begin_below_it_read_on_and_it_is_told_afterwards(
        self, cluster, keys, start, lose, mode
    ):
        job = start(onRollback=mode)
        job.batch(10)
        job.note()
        partitions = job.partitions()
        lose()
        job.finish(partitions)
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(cluster, keys))

    def test_with_fail_the_checkpoint_stays_usable(self, cluster, keys, start, lose):
        job = start(onRollback="fail")
        job.drain()
        before = job.start
        lose()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_ROLLBACK\].*vb:7"):
            job.note()
        assert job.start == before
        job.restart(onRollback="emit")
        job.drain()
        assert self.markers(job) == [(25, 1)]
        assert documents(job.rows) == live(truth(cluster, keys))

    def test_a_second_one_before_the_first_was_read_is_told_once(self, cluster, keys, start, lose):
        job = start()
        job.drain()
        lose()
        job.note()
        cluster.roll_back(VBUCKET, 10)
        write(cluster, keys[60:70], b"newer")
        job.restart()
        job.batch()
        job.drain()
        assert documents(job.rows) == live(truth(cluster, keys))


def test_a_version_that_became_the_truth_again_is_read(cluster, keys, start):
    """A newer version replaced it in the batch's snapshot and was then lost with a failover."""
    write(cluster, keys[:10], b"old")
    write(cluster, keys[:1], b"lost")
    job = start(persistedOnly="false")
    job.note(10)  # ends inside the snapshot that has the newer version
    assert keys[0] not in {row.key for row in job.batch()}
    cluster.roll_back(VBUCKET, 10)
    job.drain()
    assert documents(job.rows) == dict.fromkeys(keys[:10], b"old")
    assert [row.seqno for row in job.rows if row.op == "rollback"] == [0]


def test_another_bucket_of_the_same_name_is_refused(cluster, keys, start):
    write(cluster, keys[:10], b"1")
    job = start()
    job.drain()
    cluster.drop_bucket()
    cluster.create_bucket()
    with pytest.raises(SparkReadError, match="COUCHBASE_DCP_BUCKET_CHANGED"):
        job.note()


def test_an_ephemeral_bucket_is_read_and_told_of():
    with dcp_rs.testing.EmbeddedCluster(
        nodes=1, vbuckets=8, ephemeral=True, bucket="changes"
    ) as cluster:
        options = {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "canary-8f1c2e",
            "bucket": "changes",
        }
        for n in range(50):
            cluster.upsert(f"key_{n}", b"1")
        with pytest.warns(RuntimeWarning, match="persistedOnly is off"):
            job = Job(options)
        job.drain()
        assert len(documents(job.rows)) == 50
        job.close()


class Story:
    """Anything that can happen, in any order, to three nodes that hold every vBucket each."""

    STEPS = (
        ("write",) * 3
        + ("batch",) * 3
        + (
            "remove",
            "note",
            "note",
            "lag",
            "lag",
            "fail",
            "fail",
            "restart",
        )
    )
    KEYS = tuple(f"key_{n}" for n in range(40))

    def __init__(self, cluster, job, seed):
        self.cluster, self.job, self.chance = cluster, job, random.Random(seed)
        self.out = None
        self.steps = 0

    def step(self):
        self.steps += 1
        getattr(self, self.chance.choice(self.STEPS))()

    def write(self):
        for key in self.chance.choices(self.KEYS, k=15):
            self.cluster.upsert(key, f"{self.steps}".encode())

    def remove(self):
        for key in self.chance.choices(self.KEYS, k=5):
            if self.cluster.get(key) is not None:
                self.cluster.remove(key)

    def note(self):
        if self.job.noted is None:
            self.job.note(self.chance.choice([None, 7, 20]))

    def batch(self):
        attempt(self.job, self.chance.choice([None, 7, 20]))

    def restart(self):
        self.job.restart()

    def lag(self):
        """Lets a replica stand still or fall behind, so that a failover to it loses the tail.

        With `persistedOnly` a batch would wait for it, and this story with the batch.
        """
        if self.job.options["persistedOnly"] == "true":
            return
        vbucket = self.chance.randrange(4)
        for replica in range(1, len(self.cluster.copies_of(vbucket))):
            self.cluster.set_replica_lag(vbucket, replica, self.chance.choice([None, 5, 0]))

    def catch_up(self):
        for vbucket in range(4):
            for replica in range(1, len(self.cluster.copies_of(vbucket))):
                self.cluster.set_replica_lag(vbucket, replica, 0)

    def fail(self):
        """Loses a node, or has the lost one back."""
        if self.out is None:
            self.out = self.chance.randrange(3)
            self.cluster.failover(self.out)
        else:
            self.cluster.restart(self.out)
            self.cluster.rebalance()
            self.out = None


@pytest.mark.parametrize("persisted_only", ["true", "false"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_writes_failovers_and_restarts_ends_at_the_truth(seed, persisted_only):
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, replicas=2, vbuckets=4, bucket="changes"
    ) as cluster:
        options = {
            "connectionString": cluster.connection_string,
            "username": "Administrator",
            "password": "canary-8f1c2e",
            "bucket": "changes",
        }
        job = Job(options, numPartitions="2", persistedOnly=persisted_only)
        story = Story(cluster, job, seed)
        for _ in range(50):
            story.step()
        story.catch_up()
        settle(cluster, job)
        job.close()
        assert live(documents(job.rows)) == live(truth(cluster, story.KEYS))


def attempt(job, limit):
    """Runs a batch; one that meets a failover is run again by the next attempt."""
    try:
        job.batch(limit)
    except SparkReadError as error:
        if error.code not in {"COUCHBASE_DCP_ROLLBACK", "COUCHBASE_DCP_STREAM_ENDED"}:
            raise


def settle(cluster, job):
    """Reads until everything is on disk and has been read."""
    deadline = time.monotonic() + PATIENCE
    while job.start["s"] != list(cluster.high_seqnos().values()):
        assert time.monotonic() < deadline, "not everything arrives"
        cluster.persist()
        attempt(job, None)
    assert history(job.rows)


def test_a_first_batch_that_the_release_before_planned_at_latest_is_read(tmp_path):
    from dcp_rs.spark.schema import Projection, schema
    from dcp_rs.spark.source import CouchbaseDcpStreamReader

    kept = Path(__file__).parents[1] / "python" / "kept"
    end = json.loads((kept / "spark_offsets-0.2.0.json").read_text())["latest"]
    with tarfile.open(kept / "0.2.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    data = tmp_path / "dcp_rs-kept-0.2.0" / "data"
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, data=data) as cluster:
        cluster.upsert("later", b"{}")
        connection = cluster.connection_options
        options = ReadOptions.parse(
            {
                "connectionString": connection.connection_string,
                "username": connection.username,
                "password": connection.password,
                "bucket": "default",
                "startingOffsets": "latest",
            }
        )
        reader = CouchbaseDcpStreamReader(Projection.of(options, schema(options)))
        # Not where a query would start that has stored nothing.
        planned = reader.partitions(reader.initialOffset(), end)
        assert reader.partitions(end, end) == []
        reader.stop()
        bounds = {
            each.vbucket: (each.from_seqno, each.to_seqno)
            for task in planned
            for each in task.partition.ranges
        }
        assert bounds == dict(enumerate(zip(end["start"]["s"], end["s"], strict=True)))
        rows = [row for task in planned for batch in reader.read(task) for row in batch.to_pylist()]
        assert rows
        assert "later" not in {row["key"] for row in rows}
