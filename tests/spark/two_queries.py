"""Starts two queries at once in one session, again and again: a program without dcp_rs.

Once, of two queries of dcp_rs, one failed with `Task serialization failed: Illegal size 5 of
collection, expected 7`. What fails here is Spark's.

Usage: tests/spark/two_queries.py PAIRS
"""

import re
import sys
import tempfile
import threading
from collections import Counter

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

BATCHES, ROWS, PARTITIONS = 2, 40, 2
PATIENCE = 300


class Numbers(DataSource):
    """A stream of numbers, in batches of ROWS."""

    @classmethod
    def name(cls):
        return "numbers"

    def schema(self):
        return "n INT, name STRING"

    def streamReader(self, schema):  # noqa: ARG002, N802 - Spark's names
        return NumbersReader()


class NumbersReader(DataSourceStreamReader):
    """Gives a batch more each time that it is asked, up to BATCHES."""

    def __init__(self):
        self.end = 0

    def initialOffset(self):  # noqa: N802 - Spark's name
        return {"n": 0}

    def latestOffset(self, *_):  # noqa: N802 - Spark's name
        self.end = min(self.end + ROWS, BATCHES * ROWS)
        return {"n": self.end}

    def partitions(self, start, end):
        first, last = start["n"], end["n"]
        return [InputPartition(range(first + n, last, PARTITIONS)) for n in range(PARTITIONS)]

    def read(self, partition):
        return iter([(n, f"name {n}") for n in partition.value])


def run_pair(spark, changes):
    """Runs two queries of frames, started at once; gives what each failed with."""
    barrier = threading.Barrier(len(changes))
    told = [None] * len(changes)

    def run(n):
        found = []

        def keep(batch, _):
            found.extend(row.n for row in batch.collect())

        with tempfile.TemporaryDirectory() as folder:
            writer = changes[n].writeStream.option("checkpointLocation", f"{folder}/checkpoint")
            if n:
                writer = writer.foreachBatch(keep)
            else:
                writer = writer.format("parquet").option("path", f"{folder}/rows")
            barrier.wait()
            query = None
            try:
                query = writer.start()
                query.processAllAvailable()
                query.stop()
                if not n:
                    keep(spark.read.parquet(f"{folder}/rows"), None)
                if sorted(found) != list(range(BATCHES * ROWS)):
                    told[n] = "other rows"
            except PySparkException as error:
                told[n] = " ".join(str(error).split())
            finally:
                if query is not None:
                    query.stop()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(changes))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
        assert not each.is_alive(), "a query does not end"
    return [each for each in told if each is not None]


def main(count):
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.dataSource.register(Numbers)
    one, other = (spark.readStream.format("numbers").load() for _ in range(2))
    failed = Counter()
    for n in range(1, count + 1):
        for told in run_pair(spark, [one, other if n % 2 else one]):
            sys.stderr.write(f"pair {n}: {told}\n")
            # Spark gives its Python processes ten seconds, whatever else the machine does.
            known = re.search(r"Illegal size|failed to connect back", told)
            failed[known[0] if known else "otherwise"] += 1
        if n % 20 == 0 or n == count:
            sys.stdout.write(f"{n} pairs of queries, failed: {dict(failed) or 'none'}\n")
            sys.stdout.flush()
    spark.stop()
    return bool(failed.keys() - {"failed to connect back"}) or failed.total() >= count


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
