"""A replication that is killed again and again, while a cluster does what clusters do."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from replicas import Written

_PROGRAM = """
import sys, threading
import dcp_rs
connection_string, url, mode, once = sys.argv[1:]
with dcp_rs.connect(
    connection_string, bucket="default", username="Administrator", password="canary-8f1c2e"
) as client:
    print("ready", flush=True)
    dcp_rs.replicate(
        client, url, mode=mode, once=once == "once", commit_rows=50, commit_interval=0.02)
"""

_COLLECTIONS = ("_default._default", "inventory.airline", "inventory.hotel")


class Trouble:
    """Writes to a cluster and lets it fail, as a seed says, until it is stopped."""

    def __init__(self, cluster, seed):
        self.chance, self.cluster, self.written = random.Random(seed), cluster, Written(cluster)
        self.done = {}
        self._stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            while not self._stop.wait(0.002):
                kind = self.chance.choices(
                    (
                        self.write,
                        self.remove,
                        self.fail_over,
                        self.roll_back,
                        self.drop,
                        self.flush,
                    ),
                    (60, 8, 1, 1, 1, 1),
                )[0]
                kind()
                self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self._error = error

    def write(self):
        for _ in range(10):
            key = f"key_{self.chance.randrange(400)}"
            value = {"n": self.chance.randrange(10**9)}
            self.written.upsert(key, value, self.chance.choice(_COLLECTIONS))

    def remove(self):
        collection, key = self.chance.choice(sorted(self.written.keys or {(_COLLECTIONS[0], "")}))
        if key and self.cluster.get(key, collection=collection) is not None:
            self.cluster.remove(key, collection=collection)

    def fail_over(self):
        """A failover that loses what was written since the replicas lag."""
        cluster = self.cluster
        for vbucket in range(cluster.num_vbuckets):
            cluster.set_replica_lag(vbucket, 1, None)
        for _ in range(5):
            self.write()
            time.sleep(0.01)
        node = cluster.copies_of(self.chance.randrange(cluster.num_vbuckets))[0]
        cluster.failover(node)
        cluster.restart(node)
        cluster.rebalance()

    def roll_back(self):
        vbucket = self.chance.randrange(self.cluster.num_vbuckets)
        high = self.cluster.high_seqnos()[vbucket]
        # Not as far as before a failover: the versions of that time are not kept.
        with contextlib.suppress(ConfigError):
            self.cluster.roll_back(vbucket, max(high - self.chance.randrange(1, 6), 0))

    def drop(self):
        collection = self.chance.choice(_COLLECTIONS[1:])
        self.cluster.drop_collection(collection)
        self.cluster.create_collection(collection)

    def flush(self):
        self.cluster.flush_collection(self.chance.choice(_COLLECTIONS[1:]))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=3, replicas=1, vbuckets=8) as running:
        running.create_scope("inventory")
        for name in _COLLECTIONS[1:]:
            running.create_collection(name)
        yield running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", replicas.ALL)
def test_a_target_is_as_the_bucket_however_often_its_writer_is_killed(
    cluster, start_python, request, tmp_path, kind
):
    kills = int(os.environ.get("DCP_KILLS", "4"))
    seed = int(os.environ.get("DCP_KILLS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    replica = replicas.make(kind, request, tmp_path)
    with Trouble(cluster, seed) as trouble:
        for _ in range(kills):
            writer = start_python(
                _PROGRAM, cluster.connection_string, replica.url, replica.mode, ""
            )
            assert writer.stdout.readline(), f"seed {seed}: {writer.communicate()[1]}"
            time.sleep(chance.random() * 1.5)
            writer.send_signal(signal.SIGKILL)
            assert writer.wait(timeout=30) == -signal.SIGKILL, (
                f"seed {seed}: {writer.communicate()[1]}"
            )
    last = start_python(_PROGRAM, cluster.connection_string, replica.url, replica.mode, "once")
    _, error = last.communicate(timeout=120)
    assert last.returncode == 0, f"seed {seed}: {error}"
    assert replica.documents() == trouble.written.documents(), f"seed {seed}: {trouble.done}"
    assert trouble.written.documents(), "something is left to compare"
