"""Reads that follow each other, as a query's micro-batches do, and failovers between them."""

import random
import time

import pytest

import dcp_rs
from dcp_rs.spark import SparkReadError
from sequence import Job, documents, history

VBUCKET = 7
PATIENCE = 30


@pytest.fixture
def keys(producer):
    """Keys of one vBucket."""
    keys = (f"k{n}" for n in range(10_000))
    return [key for key in keys if producer.vbucket_of(key) == VBUCKET][:100]


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


def write(producer, keys, value):
    for key in keys:
        producer.upsert(key, value)
    producer.persist()


def truth(producer, keys):
    """The documents that there are; None for one that is not."""
    found = {key: producer.get(key) for key in keys}
    return {key: None if each is None else each.value for key, each in found.items()}


def live(documents):
    return {key: value for key, value in documents.items() if value is not None}


def test_a_limit_is_kept_and_nothing_is_missing(producer, start):
    write(producer, [f"key_{n}" for n in range(1000)], b"1")
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
    def behind(self, producer, keys, start):
        def make(**more):
            write(producer, keys[:40], b"1")
            job = start(**more)
            job.drain()
            for key in keys[:20]:
                producer.remove(key)
            write(producer, keys[40:50], b"2")
            producer.purge(VBUCKET, producer.high_seqnos()[VBUCKET])
            return job

        return make

    def test_it_stops_the_read(self, behind):
        job = behind()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_DATA_LOSS\].*vb:7") as told:
            job.note()
        assert told.value.code == "COUCHBASE_DCP_DATA_LOSS"

    def test_the_vbucket_can_be_read_again(self, producer, behind, keys):
        job = behind()
        job.restart(failOnDataLoss="false")
        job.drain()
        (marker,) = [row for row in job.rows if row.op == "rollback"]
        assert (marker.vbucket, marker.seqno, marker.epoch) == (VBUCKET, 0, 1)
        assert live(documents(job.rows)) == live(truth(producer, keys))

    def test_what_was_read_in_time_is_none(self, producer, keys, start):
        write(producer, keys[:40], b"1")
        for key in keys[:20]:
            producer.remove(key)
        producer.persist()
        job = start()
        job.drain()
        producer.purge(VBUCKET, producer.high_seqnos()[VBUCKET])
        write(producer, keys[40:50], b"2")
        job.drain()
        assert live(documents(job.rows)) == live(truth(producer, keys))


class TestLostTail:
    """A failover that lost the tail: 40 changes of a vBucket, of which 25 are left."""

    @pytest.fixture
    def lose(self, producer, keys):
        def lose():
            producer.roll_back(VBUCKET, 25)
            write(producer, keys[30:50], b"new")

        write(producer, keys[:40], b"old")
        return lose

    @staticmethod
    def markers(job):
        return [(row.seqno, row.epoch) for row in job.rows if row.op == "rollback"]

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_between_batches_it_is_told(self, producer, keys, start, lose, mode):
        job = start(onRollback=mode)
        job.drain()
        lose()
        job.drain()
        assert self.markers(job) == [(25 if mode == "emit" else 0, 1)]
        assert documents(job.rows) == live(truth(producer, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_after_the_end_was_noted_the_batch_ends_early(self, producer, keys, start, lose, mode):
        job = start(onRollback=mode)
        job.batch(10)
        job.note(30)
        lose()
        job.restart()
        assert len(job.batch()) == 15, "what is common to both histories"
        assert self.markers(job) == []
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(producer, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_tasks_that_begin_above_it_fail_and_are_planned_again(
        self, producer, keys, start, lose, mode
    ):
        job = start(onRollback=mode)
        job.batch(30)
        job.note()
        splits = job.splits()
        lose()
        with pytest.raises(SparkReadError, match=r"\[COUCHBASE_DCP_ROLLBACK\]"):
            job.finish(splits)
        assert len(job.rows) == 30
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(producer, keys))

    @pytest.mark.parametrize("mode", ["emit", "resync"])
    def test_tasks_that_begin_below_it_read_on_and_it_is_told_afterwards(
        self, producer, keys, start, lose, mode
    ):
        job = start(onRollback=mode)
        job.batch(10)
        job.note()
        splits = job.splits()
        lose()
        job.finish(splits)
        job.drain()
        assert len(self.markers(job)) == 1
        assert documents(job.rows) == live(truth(producer, keys))

    def test_with_fail_the_checkpoint_stays_usable(self, producer, keys, start, lose):
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
        assert documents(job.rows) == live(truth(producer, keys))

    def test_a_second_one_before_the_first_was_read_is_told_once(self, producer, keys, start, lose):
        job = start()
        job.drain()
        lose()
        job.note()
        producer.roll_back(VBUCKET, 10)
        write(producer, keys[60:70], b"newer")
        job.restart()
        job.batch()
        job.drain()
        assert documents(job.rows) == live(truth(producer, keys))


def test_a_version_that_became_the_truth_again_is_read(producer, keys, start):
    """A newer version replaced it in the batch's snapshot and was then lost with a failover."""
    write(producer, keys[:10], b"old")
    write(producer, keys[:1], b"lost")
    job = start(persistedOnly="false")
    job.note(10)  # ends inside the snapshot that has the newer version
    assert keys[0] not in {row.key for row in job.batch()}
    producer.roll_back(VBUCKET, 10)
    job.drain()
    assert documents(job.rows) == dict.fromkeys(keys[:10], b"old")
    assert [row.seqno for row in job.rows if row.op == "rollback"] == [0]


def test_another_bucket_of_the_same_name_is_refused(producer, keys, start):
    write(producer, keys[:10], b"1")
    job = start()
    job.drain()
    producer.drop_bucket()
    producer.create_bucket()
    with pytest.raises(SparkReadError, match="COUCHBASE_DCP_BUCKET_CHANGED"):
        job.note()


def test_an_ephemeral_bucket_is_read_and_told_of():
    with dcp_rs.Producer(nodes=1, vbuckets=8, ephemeral=True, bucket="changes") as producer:
        options = {
            "connectionString": producer.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "changes",
        }
        for n in range(50):
            producer.upsert(f"key_{n}", b"1")
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

    def __init__(self, producer, job, seed):
        self.producer, self.job, self.chance = producer, job, random.Random(seed)
        self.out = None
        self.steps = 0

    def step(self):
        self.steps += 1
        getattr(self, self.chance.choice(self.STEPS))()

    def write(self):
        for key in self.chance.choices(self.KEYS, k=15):
            self.producer.upsert(key, f"{self.steps}".encode())

    def remove(self):
        for key in self.chance.choices(self.KEYS, k=5):
            if self.producer.get(key) is not None:
                self.producer.remove(key)

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
        for replica in range(1, len(self.producer.copies_of(vbucket))):
            self.producer.set_replica_lag(vbucket, replica, self.chance.choice([None, 5, 0]))

    def catch_up(self):
        for vbucket in range(4):
            for replica in range(1, len(self.producer.copies_of(vbucket))):
                self.producer.set_replica_lag(vbucket, replica, 0)

    def fail(self):
        """Loses a node, or has the lost one back."""
        if self.out is None:
            self.out = self.chance.randrange(3)
            self.producer.failover(self.out)
        else:
            self.producer.restart(self.out)
            self.producer.rebalance()
            self.out = None


@pytest.mark.parametrize("persisted_only", ["true", "false"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_writes_failovers_and_restarts_ends_at_the_truth(seed, persisted_only):
    with dcp_rs.Producer(nodes=3, replicas=2, vbuckets=4, bucket="changes") as producer:
        options = {
            "connectionString": producer.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "changes",
        }
        job = Job(options, numPartitions="2", persistedOnly=persisted_only)
        story = Story(producer, job, seed)
        for _ in range(50):
            story.step()
        story.catch_up()
        settle(producer, job)
        job.close()
        assert live(documents(job.rows)) == live(truth(producer, story.KEYS))


def attempt(job, limit):
    """Runs a batch; one that meets a failover is run again by the next attempt."""
    try:
        job.batch(limit)
    except SparkReadError as error:
        if error.code not in {"COUCHBASE_DCP_ROLLBACK", "COUCHBASE_DCP_STREAM_ENDED"}:
            raise


def settle(producer, job):
    """Reads until everything is on disk and has been read."""
    deadline = time.monotonic() + PATIENCE
    while job.start["s"] != list(producer.high_seqnos().values()):
        assert time.monotonic() < deadline, "not everything arrives"
        producer.persist()
        attempt(job, None)
    assert history(job.rows)
