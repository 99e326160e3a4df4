"""A streaming query into Parquet."""

FORMAT = "couchbase.dcp"
PATIENCE = 240


class Query:
    """A query into Parquet, started again and again from its checkpoint."""

    def __init__(self, spark, options, folder, cluster):
        self.spark, self.options, self.folder, self.cluster = spark, options, folder, cluster

    def run(self, *, wait=True, through=None, attempts=5, **more):
        """Starts it; to the end of what is there, unless it is not waited for.

        `through` is what `mapInArrow` does with the rows on their way, in the tasks that read them.
        """
        # A batch takes only what is on disk, where changes arrive a moment later.
        self.cluster.persist()
        changes = (
            self.spark.readStream.format(FORMAT).options(**self.options).options(**more).load()
        )
        if through is not None:
            changes = changes.mapInArrow(through, changes.schema)
        query = (
            changes.writeStream.format("parquet")
            .option("path", f"{self.folder}/rows")
            .option("checkpointLocation", f"{self.folder}/checkpoint")
            .trigger(**({"availableNow": True} if wait else {"processingTime": "0 seconds"}))
            .start()
        )
        if wait:
            try:
                assert query.awaitTermination(PATIENCE), "the query does not end"
            except Exception as error:
                # Spark gives its Python processes ten seconds, whatever else the machine does.
                if attempts > 1 and "failed to connect back" in str(error):
                    return self.run(through=through, attempts=attempts - 1, **more)
                raise
        return query

    def rows(self):
        return self.spark.read.parquet(f"{self.folder}/rows").collect()
