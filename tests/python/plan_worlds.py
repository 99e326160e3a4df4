"""What happens to a bucket in tests of plans, what a reader keeps of it, and what must be so.

The body is one for all that can read plans, in three environments: processes and Polars, Ray in
`tests/engines`, and Spark.
"""

import random

import dcp_rs
from dcp_rs.exceptions import CheckpointError, RollbackError

VBUCKETS = 8
COLUMNS = ["op", "vbucket", "seqno", "epoch", "key", "value"]


class Bucket:
    """What an application does to a bucket, and what happens to its nodes."""

    def __init__(self, cluster, rng):
        self.cluster, self.rng = cluster, rng

    def write(self):
        self._write()
        if self.rng.random() < 0.7:
            self.cluster.persist()

    def _write(self):
        for _ in range(self.rng.randint(1, 25)):
            key = f"key_{self.rng.randrange(40)}"
            if self.rng.random() < 0.25 and self.cluster.get(key) is not None:
                self.cluster.remove(key)
            else:
                self.cluster.upsert(key, {"n": self.rng.random()})

    def trouble(self):
        """Fails over a node, moves vBuckets, or loses the newest changes of one."""
        chosen = self.rng.randrange(4)
        vbucket = self.rng.randrange(VBUCKETS)
        if chosen == 0:
            # All, or what no copy has on disk yet. If a part of what every copy had were lost, a
            # version that nobody was sent might be the newest again: see `roll_back`.
            to = self.rng.choice([0, self.cluster.high_seqnos()[vbucket]])
            self._write()
            self.cluster.roll_back(vbucket, to)
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
        self.seen = {"again": 0, "rollback": 0, "between": 0}

    def step(self, between=None, **options):
        """Reads a plan, before which something happens; gives how many seqnos it has.

        Args:
            between: Is given the plan, and gives the vBuckets whose branch it has lost.
            options: Options of the plan.
        """
        plan = self.client.plan(
            start=self.table.end,
            partitions=self.rng.randint(1, 6),
            on_rollback=self.on_rollback,
            **options,
        )
        lost = set() if between is None else between(plan)
        self.seen["between"] += len(lost)
        try:
            rows = self.read(self.client, plan)
        except (RollbackError, CheckpointError):
            self.seen["again"] += 1
            return 1
        rollbacks = [row["vbucket"] for row in rows if row["op"] == "rollback"]
        assert lost <= set(rollbacks), "the branch that it was planned on is gone, without a word"
        self.seen["rollback"] += len(rollbacks)
        self.table.commit(rows, plan.end)
        return plan.size

    def some(self, number):
        """Reads some of what there is."""
        if number == 7:  # in every world
            self.bucket.cluster.persist()
            self.step(self._lose)
            return
        happens = self.rng.choice([None, None, self.bucket.write, self.bucket.trouble])

        def between(_plan):
            if happens is not None:
                happens()
            return set()

        self.step(
            between,
            max_seqnos=self.rng.choice([None, 5, 40]),
            persisted_only=self.rng.random() < 0.7,
        )

    def _lose(self, plan):
        """Loses the branch of a vBucket that has been read and of which more is planned."""
        ranges = [each for partition in plan.partitions for each in partition.ranges]
        chosen = [each for each in ranges if each.size and each.from_seqno][:1]
        for each in chosen:
            self.bucket.cluster.roll_back(each.vbucket, 0)
        return {each.vbucket for each in chosen}

    def rest(self):
        """Reads what is left; gives the table."""
        while self.step():
            pass
        return self.table

    def check(self):
        assert self.seen["rollback"], f"it tries no rollback: {self.seen}"
        assert self.seen["between"], f"no branch is lost between a plan and its read: {self.seen}"


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
                reader.some(number)
            cluster.persist()
            table = reader.rest()
            assert table.documents() == bucket.documents(), f"seed {seed}"
            reader.check()
