"""What a cluster does to its tasks and executors while a Delta table is kept.

`on_version.py` runs it on a standalone cluster. Workers are on addresses of their own, since Spark
runs no second copy of a task on the host of the first.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import dcp_rs
import dcp_rs.spark
import kept_tables
from kept_tables import KeptTable
from killing_tables import stop_once
from standalone import Standalone, is_alive, parent, wait_for

HOSTS = ("127.0.0.2", "127.0.0.3")
DECOMMISSION = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
}


@contextmanager
def started(**settings):
    """A cluster of two workers, and a table that is kept on it."""
    with tempfile.TemporaryDirectory() as folder:
        options = " ".join(f"-D{name}={value}" for name, value in settings.items())
        with Standalone(folder, workers=0, SPARK_WORKER_OPTS=options) as cluster:
            for host in HOSTS:
                cluster.add_worker(host)
            more = cluster.SETTINGS | settings
            spark = kept_tables.session("delta", folder, cluster.master, **more)
            kept = KeptTable(spark, folder, "delta")
            try:
                yield cluster, kept
            finally:
                kept.close()
                spark.stop()


def wait_until_ready(kept):
    """Waits until Spark has an executor of each worker, beside the driver."""
    context = kept.spark.sparkContext._jsc.sc()
    wait_for(lambda: context.getExecutorMemoryStatus().size() == len(HOSTS) + 1)


def run_stopping(kept, act):
    """Runs a query, of which the first task that has read rows stops until something is done."""
    at = kept.folder / "at"
    (kept.folder / "reading").unlink(missing_ok=True)
    found = []

    def acting():
        wait_for(at.exists)
        found.append(act(int(at.read_text())))
        at.unlink()

    def stopping(batch, batch_id):
        kept.sink(batch.mapInArrow(stop_once(str(kept.folder)), batch.schema), batch_id)

    actor = threading.Thread(target=acting)
    actor.start()
    kept.run(stopping, numPartitions=2)
    actor.join()
    assert kept.table() == kept.truth()
    assert kept.batches() == sorted(set(kept.batches()))
    return found[0]


def speculation():
    """Speculation runs a slow task twice: each row once."""
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "100ms",
    }
    with started(**settings) as (_, kept):
        tracker = kept.spark.sparkContext.statusTracker()

        def until_copied(_):
            def copied():
                stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
                # A stage with one task left has two that run.
                return any(
                    each is not None
                    and each.numTasks - each.numCompletedTasks == 1
                    and each.numActiveTasks > 1
                    for each in stages
                )

            return wait_for(copied)

        wait_until_ready(kept)
        for n in range(2):
            kept.write(0, 120, n)
            assert run_stopping(kept, until_copied)


def allocation():
    """Dynamic allocation takes idle executors away, also with rows of a batch: nothing."""
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.timeout": "1s",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
        # Delta keeps what it knows of a table in executors, and a batch waits there.
        "spark.dynamicAllocation.cachedExecutorIdleTimeout": "10s",
        "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
        "spark.dynamicAllocation.initialExecutors": "2",
        "spark.dynamicAllocation.minExecutors": "0",
    }
    with started(**settings) as (cluster, kept):
        for n in range(2):
            kept.write(0, 120, n)
            kept.run(numPartitions=2)
            assert kept.table() == kept.truth()
            assert kept.batches() == list(range(n + 1))
            wait_for(lambda: not cluster.executors())


def decommission():
    """Executors are decommissioned while they read, by themselves and with their worker."""
    with started(**DECOMMISSION) as (cluster, kept):
        wait_until_ready(kept)

        def executor(process):
            leaving = parent(parent(process))
            assert leaving in cluster.executors()
            os.kill(leaving, signal.SIGPWR)
            time.sleep(1)
            return leaving

        def worker(process):
            leaving = executor(process)
            (of,) = (each for each in cluster.workers if each.pid == parent(leaving))
            of.send_signal(signal.SIGPWR)
            return leaving

        for n, each in enumerate((executor, worker)):
            kept.write(0, 120, n)
            leaving = run_stopping(kept, each)
            wait_for(lambda gone=leaving: not is_alive(gone))
        kept.write(0, 120, 3)
        kept.run()
        assert kept.table() == kept.truth()


def many_vbuckets():
    """1,024 vBuckets in 64 partitions: 64 tasks, each row once."""
    with started() as (_, kept):
        kept.cluster.close()
        kept.cluster = dcp_rs.testing.EmbeddedCluster(
            nodes=3, vbuckets=1024, bucket="merged", password=kept_tables.PASSWORD
        )
        more = {"numPartitions": 64}
        for n in range(2):
            kept.write(0, 120, n)
            changes = kept.spark.read.format("couchbase.dcp").options(**kept.options(**more)).load()
            assert changes.rdd.getNumPartitions() == 64
            kept.run(**more)
            assert kept.table() == kept.truth()


TRIED = (speculation, allocation, decommission, many_vbuckets)


def everything():
    for each in TRIED:
        began = time.monotonic()
        each()
        sys.stdout.write(f"{each.__doc__} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
