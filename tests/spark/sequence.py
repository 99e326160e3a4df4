"""What rows tell of a server's history, and reads that follow each other, without Spark."""

from types import SimpleNamespace

from dcp_rs.spark import ReadOptions, read_partition
from dcp_rs.spark.driver import Driver


def history(rows):
    """What the rows say the server's history is: rollbacks take back what is above them."""
    kept = {}
    for row in sorted(rows, key=lambda row: (row.vbucket, row.epoch, row.op != "rollback")):
        branch = kept.setdefault(row.vbucket, {})
        if row.op == "rollback":
            for seqno in [seqno for seqno in branch if seqno > row.seqno]:
                del branch[seqno]
        else:
            assert row.seqno not in branch, "doubled"
            branch[row.seqno] = row
    return kept


def documents(rows):
    """Latest document per key; None for a removed one."""
    latest = {}
    for _, branch in sorted(history(rows).items()):
        for _, row in sorted(branch.items()):
            latest[row.key] = bytes(row.value) if row.op == "mutation" else None
    return latest


class Job:
    """A query as Spark runs it: ends are noted before they are read, rows and ends kept together.

    Attributes:
        rows: What the batches that were finished brought.
        start: Offsets that the next batch begins at.
        noted: The end of the batch that is to be run, if one was noted.
    """

    def __init__(self, options, **more):
        self.options, self.rows, self.noted = {**options, **more}, [], None
        self.driver = Driver(ReadOptions.parse(self.options))
        self.start = self.driver.earliest()

    def restart(self, **more):
        """As another driver process, which knows nothing but what was stored."""
        self.driver.close()
        self.options |= more
        self.driver = Driver(ReadOptions.parse(self.options))

    def note(self, limit=None):
        self.noted = self.driver.end(self.start, limit)
        return self.noted

    def partitions(self):
        return self.driver.partitions(self.start, self.noted)

    def finish(self, partitions):
        """Runs the tasks; the batch counts only if all are done."""
        rows = [
            SimpleNamespace(**row)
            for partition in partitions
            for batch in read_partition(partition)
            for row in batch.to_pylist()
        ]
        self.rows += rows
        self.start, self.noted = self.noted, None
        return rows

    def batch(self, limit=None):
        if self.noted is None:
            self.note(limit)
        return self.finish(self.partitions())

    def drain(self):
        """Reads until there is nothing more."""
        while self.note() != self.start:
            self.batch()
        self.noted = None

    def close(self):
        self.driver.close()
