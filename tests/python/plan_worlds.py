"""What happens to a bucket in tests of plans, and what a reader keeps of it."""

from dcp_rs.exceptions import ConfigError

VBUCKETS = 8


class Bucket:
    """What an application does to a bucket, and what happens to its nodes."""

    def __init__(self, cluster, rng):
        self.cluster, self.rng = cluster, rng

    def write(self):
        for _ in range(self.rng.randint(1, 25)):
            key = f"key_{self.rng.randrange(40)}"
            if self.rng.random() < 0.25 and self.cluster.get(key) is not None:
                self.cluster.remove(key)
            else:
                self.cluster.upsert(key, {"n": self.rng.random()})
        if self.rng.random() < 0.7:
            self.cluster.persist()

    def trouble(self):
        """Fails over a node, moves vBuckets, or loses the newest changes of one."""
        chosen = self.rng.randrange(4)
        vbucket = self.rng.randrange(VBUCKETS)
        if chosen == 0:
            to = self.rng.randint(0, self.cluster.high_seqnos()[vbucket])
            try:
                self.cluster.roll_back(vbucket, to)
            except ConfigError:  # older versions are no longer kept
                self.cluster.roll_back(vbucket, 0)
        elif chosen == 1:
            self.cluster.set_replica_lag(vbucket, 1, self.rng.choice([0, 3]))
            node = self.cluster.copies_of(vbucket)[0]
            self.cluster.failover(node, graceful=self.rng.random() < 0.5)
            self.cluster.restart(node)
            self.cluster.rebalance()
        elif chosen == 2:
            self.cluster.rebalance()
        else:
            self.cluster.persist()

    def documents(self):
        found = ((key, self.cluster.get(key)) for key in map("key_{}".format, range(40)))
        return {key: document.value for key, document in found if document is not None}


class Table:
    """The changes of each vBucket that were not rolled back, as an application would keep them."""

    def __init__(self):
        self.vbuckets = {vbucket: [] for vbucket in range(VBUCKETS)}
        self.end = "earliest"

    def commit(self, rows, end):
        for row in rows:
            kept = self.vbuckets[row["vbucket"]]
            if row["op"] == "rollback":
                kept[:] = [each for each in kept if each["seqno"] <= row["seqno"]]
            else:
                kept.append(row)
        self.end = end

    def documents(self):
        newest = {row["key"]: row for kept in self.vbuckets.values() for row in kept}
        return {key: row["value"] for key, row in newest.items() if row["op"] == "mutation"}
