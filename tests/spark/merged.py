"""A table that `merge_into` keeps, and what the cluster itself has.

Nothing here reads the table or the cluster by way of the sink. `on_version.py` runs `keep` with
other versions of PySpark.
"""

import json
import tempfile
from pathlib import Path

import deltalake
import pyarrow as pa

import dcp_rs.spark
from query import read_available

KEYS = [f"key_{n}" for n in range(120)]
PATIENCE = 120
PASSWORD = "canary-8f1c2e"


class CrashError(Exception):
    """Ends a batch in the middle, as the driver's death does."""


class Kept:
    """The table, the query that keeps it, and the cluster it is kept after."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, Path(folder)
        self.location = self.folder / "table"
        self.checkpoint = self.folder / "checkpoint"
        self.cluster = dcp_rs.testing.EmbeddedCluster(
            vbuckets=4, bucket="merged", password=PASSWORD
        )
        self.sink = dcp_rs.spark.merge_into(self.location)

    def write(self, first, last, n):
        """Writes documents, removes every fifth of them and lets every seventh expire."""
        for place, key in enumerate(KEYS[first:last]):
            self.cluster.upsert(key, {"n": n, "name": f"{key} {n}", "at": "2024-02-29T12:00:00Z"})
            if place % 5 == 0:
                self.cluster.remove(key)
            elif place % 7 == 1:
                self.cluster.expire(key)

    def lose(self, least=3):
        """Lets a failover of each vBucket take its last changes back."""
        for vbucket, high in self.cluster.high_seqnos().items():
            self.cluster.roll_back(vbucket, max(high - least, 0))

    def options(self, **more):
        return {
            "connectionString": self.cluster.connection_string,
            "username": "Administrator",
            "password": PASSWORD,
            "bucket": "merged",
            "documentSchema": "n INT, at TIMESTAMP",
            "onRollback": "resync",
        } | more

    def changes(self, **more):
        options = self.options(**more)
        return self.spark.readStream.format("couchbase.dcp").options(**options).load()

    def run(self, sink=None, **more):
        """Lets the query do what there is to do; gives its progress."""
        self.cluster.persist()
        writer = self.changes(**more).writeStream.foreachBatch(sink or self.sink)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        _, progress = read_available(writer, self.options(**more), PATIENCE)
        return progress

    def forget_commit(self):
        """Has the last batch run again, as if the driver had died at its end."""
        last = max(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))
        for path in (self.checkpoint / "commits").glob(f"*{last}*"):
            path.unlink()

    def delta(self):
        return deltalake.DeltaTable(str(self.location))

    def rows(self):
        table = self.delta()
        if not table.file_uris():
            return []
        query = deltalake.QueryBuilder().register("merged", table)
        return pa.table(query.execute("SELECT * FROM merged")).to_pylist()

    def table(self, column="n"):
        rows = self.rows()
        assert len({row["key"] for row in rows}) == len(rows), "a document is doubled"
        return {row["key"]: row[column] for row in rows}

    def truth(self, column="n"):
        found = {key: self.cluster.get(key) for key in KEYS}
        return {
            key: json.loads(each.value)[column] for key, each in found.items() if each is not None
        }

    def close(self):
        self.cluster.close()


def keep(spark, read=Kept.table, new=Kept):
    """Lets everything happen to a table that the guide tells of."""
    with tempfile.TemporaryDirectory() as folder:
        kept = new(spark, folder)

        def run(**more):
            kept.run(**more)
            assert read(kept) == kept.truth()

        kept.write(0, 60, 1)
        run(maxOffsetsPerTrigger=50)
        # A batch again, of whose keys some were rewritten, removed and made again meanwhile.
        kept.forget_commit()
        kept.write(24, 54, 3)
        kept.write(15, 18, 4)
        run()
        # What was read is lost, and others are written in its place.
        kept.write(30, 90, 5)
        run()
        kept.lose()
        kept.write(36, 48, 6)
        run(maxOffsetsPerTrigger=60)
        # A batch is to run again whose end is lost.
        kept.forget_commit()
        kept.lose()
        kept.write(66, 90, 7)
        run()
        kept.close()
