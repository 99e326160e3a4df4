"""What happens to a cluster while something is read from it."""

import contextlib
import random
import threading
import time

from dcp_rs.exceptions import ConfigError
from replicas import Written

COLLECTIONS = ("_default._default", "inventory.airline", "inventory.hotel")


class Trouble:
    """Writes to a cluster and lets it fail, as a seed says, until it is stopped."""

    def __init__(self, cluster, seed, collections=COLLECTIONS):
        self.collections = collections
        # All that any document has been.
        self.versions = {}
        self.chance, self.cluster, self.written = random.Random(seed), cluster, Written(cluster)
        self.done = {}
        self._stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            while not self._stop.wait(0.002):
                self.cause()
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self._error = error

    def cause(self):
        """Does one thing."""
        kinds = (
            (self.write, 60),
            (self.write_legacy, 6),
            (self.remove, 10),
            (self.fail_over, 1),
            (self.roll_back, 1),
            (self.drop, 1),
            (self.flush, 1),
        )
        (kind,) = self.chance.choices([kind for kind, _ in kinds], [often for _, often in kinds])
        kind()
        self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1

    def write(self):
        for _ in range(10):
            key = f"key_{self.chance.randrange(400)}"
            value = {"n": self.chance.randrange(10**9)}
            self.upsert(key, value, self.chance.choice(self.collections))

    def upsert(self, key, value, collection):
        self.written.upsert(key, value, collection)
        text = self.cluster.get(key, collection=collection).value
        self.versions.setdefault((collection, key), []).append(text)

    def assert_was_committed(self, replica, before):
        """Asserts that a writer that died left nothing torn, doubled or lost.

        Args:
            replica: What it wrote to.
            before: The documents when that was last in step.
        """
        found, now = replica.documents(), self.written.documents()
        for name, text in found.items():
            collection, key = name
            # It may have a dropped one, of which only the ID is known, without its end.
            known = self.collections if collection[0] == "#" else [collection]
            versions = [self.versions.get((each, key), ()) for each in known]
            assert any(text in each for each in versions), (name, text)
        if replica.mode == "table":
            # A log that was rolled back has the rest of its vBucket only later.
            kept = {name: text for name, text in now.items() if before.get(name) == text}
            assert kept == {name: found.get(name) for name in kept}

    def write_legacy(self):
        """A document whose key is not UTF-8."""
        key = b"session_\xff_%d" % self.chance.randrange(20)
        self.written.upsert(
            key, b"%d" % self.chance.randrange(10**9), self.chance.choice(self.collections)
        )

    def remove(self):
        collection, key = self.chance.choice(self.written.in_order() or [("", "")])
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
        collection = self.chance.choice(self.collections[1:])
        self.cluster.drop_collection(collection)
        self.cluster.create_collection(collection)

    def flush(self):
        self.cluster.flush_collection(self.chance.choice(self.collections[1:]))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
