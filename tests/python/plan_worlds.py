"""What happens to a bucket in tests of plans, what a reader keeps of it, and what must be so.

The body is one for all that can read plans, in three environments: processes and Polars, Ray in
`tests/engines`, and Spark.
"""

import random

import dcp_rs
from dcp_rs.exceptions import CheckpointError, ConfigError, RollbackError

VBUCKETS = 8
COLUMNS = ["op", "vbucket", "seqno", "epoch", "key", "value"]


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


class Plans:
    """Reads plans one after the other.

    Args:
        client: Makes them.
        bucket: What else happens.
        on_rollback: What a plan does about one.
        read: Gives the rows of a plan, or raises what ends the read.
    """

    def __init__(self, client, bucket, on_rollback, read):
        self.client, self.bucket, self.read = client, bucket, read
        self.on_rollback, self.rng = on_rollback, bucket.rng
        self.table = Table()
        self.seen = {"again": 0, "rollback": 0}

    def step(self, between=None, **options):
        """Reads a plan; gives how many seqnos it has."""
        plan = self.client.plan(
            start=self.table.end,
            partitions=self.rng.randint(1, 6),
            on_rollback=self.on_rollback,
            **options,
        )
        if between is not None:
            between()
        try:
            rows = self.read(self.client, plan)
        except (RollbackError, CheckpointError):
            self.seen["again"] += 1
            return 1
        self.seen["rollback"] += sum(row["op"] == "rollback" for row in rows)
        self.table.commit(rows, plan.end)
        return plan.size

    def some(self):
        """Reads some of what there is."""
        none, *others = None, self.bucket.write, self.bucket.trouble
        self.step(
            self.rng.choice([none, none, *others]),
            max_seqnos=self.rng.choice([None, 5, 40]),
            persisted_only=self.rng.random() < 0.7,
        )

    def rest(self):
        """Reads what is left; gives the table."""
        while self.step():
            pass
        return self.table

    def check(self):
        assert self.seen["rollback"], f"it tries no rollback: {self.seen}"


def check_the_final_state(seed, make_reader, rounds=10, **options):
    """Checks that a reader comes to the state of the bucket, whatever happens to it.

    Args:
        seed: Decides what happens.
        make_reader: Gives a context with what reads, such as `Plans`, for a bucket.
        rounds: How often something is written and read.
        options: Options of the cluster.
    """
    rng = random.Random(seed)
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, replicas=1, vbuckets=VBUCKETS, **options
    ) as cluster:
        bucket = Bucket(cluster, rng)
        with make_reader(bucket) as reader:
            for number in range(rounds):
                bucket.write()
                if number == rounds // 2:  # in every world
                    high = cluster.high_seqnos()
                    cluster.roll_back(max(high, key=high.get), 0)
                elif rng.random() < 0.5:
                    bucket.trouble()
                reader.some()
            cluster.persist()
            table = reader.rest()
            assert table.documents() == bucket.documents(), f"seed {seed}"
            reader.check()
