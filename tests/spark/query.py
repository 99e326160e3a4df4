"""A streaming query into Parquet, and queries that read all there is, on every version of Spark."""

from importlib.metadata import version

import dcp_rs.spark

FORMAT = "couchbase.dcp"
PATIENCE = 240

# Before 4.2, Spark ends trigger(availableNow=True) after one batch.
ENDS_AFTER_ONE_BATCH = tuple(map(int, version("pyspark").split(".")[:2])) < (4, 2)
# Nor does it report what the server has.
REPORTS_LAG = not ENDS_AFTER_ONE_BATCH
# And it leaves the sockets of `collect` to the garbage collector.
LEAVES_SOCKETS = ENDS_AFTER_ONE_BATCH


class Noted:
    """A writer that notes the queries it starts."""

    def __init__(self, writer):
        self.writer, self.started = writer, []

    def trigger(self, **how):
        self.writer = self.writer.trigger(**how)
        return self

    def start(self):
        self.started.append(self.writer.start())
        return self.started[-1]


def read_available(writer, options, patience=PATIENCE):
    """Lets a query read what there is; gives its last run, and the progress of all of them."""
    noted = Noted(writer)
    if ENDS_AFTER_ONE_BATCH:
        query = dcp_rs.spark.run_available_now(noted, options, timeout=patience)
    else:
        query = noted.trigger(availableNow=True).start()
        assert query.awaitTermination(patience), "the query does not end"
    return query, [progress for each in noted.started for progress in each.recentProgress]


class Query:
    """A query into Parquet, started again and again from its checkpoint."""

    def __init__(self, spark, options, folder, cluster):
        self.spark, self.options, self.folder, self.cluster = spark, options, folder, cluster
        # The progress of what `run` waited for.
        self.progress = []

    def run(self, *, wait=True, through=None, attempts=5, **more):
        """Starts it; to the end of what is there, unless it is not waited for.

        `through` is what `mapInArrow` does with the rows on their way, in the tasks that read them.
        """
        # A batch takes only what is on disk, where changes arrive a moment later.
        self.cluster.persist()
        options = self.options | more
        changes = self.spark.readStream.format(FORMAT).options(**options).load()
        if through is not None:
            changes = changes.mapInArrow(through, changes.schema)
        writer = (
            changes.writeStream.format("parquet")
            .option("path", f"{self.folder}/rows")
            .option("checkpointLocation", f"{self.folder}/checkpoint")
        )
        if not wait:
            return writer.trigger(processingTime="0 seconds").start()
        try:
            query, self.progress = read_available(writer, options)
        except Exception as error:
            # Spark gives its Python processes ten seconds, whatever else the machine does.
            if attempts > 1 and "failed to connect back" in str(error):
                return self.run(through=through, attempts=attempts - 1, **more)
            raise
        return query

    def rows(self):
        return self.spark.read.parquet(f"{self.folder}/rows").collect()
