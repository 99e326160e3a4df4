"""What the Scala connector's way of making micro-batches loses, and this one does not."""

from types import SimpleNamespace

import pytest

import dcp_rs
from couchbase_kv import SeqnoJob
from dcp_rs.spark import read_partition
from sequence import Job, documents

VBUCKET = 0


class Ours:
    """The same interface over this source's own planner and tasks."""

    def __init__(self, options):
        self.job = Job(options, persistedOnly="false")

    def note(self):
        self.job.note()

    def batch(self, during=lambda: None):
        if self.job.noted is None:
            self.job.note()
        for partition in self.job.partitions():
            for batch in read_partition(partition):
                self.job.rows += [SimpleNamespace(**row) for row in batch.to_pylist()]
                during()
                during = lambda: None  # noqa: E731
        self.job.start, self.job.noted = self.job.noted, None

    def live(self):
        self.job.drain()
        found = documents(self.job.rows)
        return {key: value for key, value in found.items() if value is not None}


@pytest.fixture(params=["theirs", "ours"])
def way(request):
    return request.param


def make(way, options):
    return SeqnoJob(options) if way == "theirs" else Ours(options)


def options_of(cluster):
    return {
        "connectionString": cluster.connection_string,
        "username": "Administrator",
        "password": "canary-8f1c2e",
        "bucket": "default",
    }


def truth(cluster, keys):
    found = {key: cluster.get(key) for key in keys}
    return {key: each.value for key, each in found.items() if each is not None}


def catch_up(way, job):
    """Ours reads to the end when it is asked what there is."""
    if way == "theirs":
        for _ in range(3):
            job.batch()


def test_without_faults_both_are_right(way):
    keys = [f"key_{n}" for n in range(400)]
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=8) as cluster:
        job = make(way, options_of(cluster))
        for value in (b"1", b"2", b"3"):
            for key in keys:
                cluster.upsert(key, value)
            job.batch()
        cluster.remove(keys[0])
        catch_up(way, job)
        assert job.live() == truth(cluster, keys)


def test_a_failover_that_lost_the_tail(way):
    keys = [f"key_{n}" for n in range(60)]
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster:
        job = make(way, options_of(cluster))
        for key in keys[:40]:
            cluster.upsert(key, b"old")
        job.batch()
        cluster.roll_back(VBUCKET, 25)
        for key in keys[35:60]:
            cluster.upsert(key, b"new")
        catch_up(way, job)
        found, wanted = job.live(), truth(cluster, keys)
    if way == "ours":
        assert found == wanted
    else:
        missing = {key for key in wanted if found.get(key) != wanted[key]}
        assert len(missing) == 15, "the new branch up to where the lost one was read"
        assert len(set(found) - set(wanted)) == 10, "and what the server does not have any more"


def test_a_version_that_became_the_truth_again(way):
    keys = [f"key_{n}" for n in range(10)]
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster:
        job = make(way, options_of(cluster))
        for key in keys:
            cluster.upsert(key, b"old")
        job.note()
        # Replaces the old one in the snapshot that the batch is read from.
        cluster.upsert(keys[0], b"lost")
        job.batch()
        cluster.roll_back(VBUCKET, 10)
        catch_up(way, job)
        found, wanted = job.live(), truth(cluster, keys)
    assert wanted == dict.fromkeys(keys, b"old")
    assert (found == wanted) == (way == "ours")


def test_a_rebalance_inside_a_batch(way):
    keys = [f"key_{n}" for n in range(4000)]
    # More than lies in windows and sockets: the batch is on its way until somebody reads on.
    value = b"x" * 10_000
    with dcp_rs.testing.EmbeddedCluster(nodes=1, vbuckets=8) as cluster:
        job = make(way, options_of(cluster))
        for key in keys:
            cluster.upsert(key, value)
        job.note()

        def rebalance():
            cluster.add_node()
            cluster.rebalance()

        job.batch(during=rebalance)
        catch_up(way, job)
        found, wanted = job.live(), truth(cluster, keys)
    assert wanted == dict.fromkeys(keys, value)
    if way == "ours":
        assert found == wanted
    else:
        assert len(found) < len(wanted), "what a moved vBucket still had is never read"
