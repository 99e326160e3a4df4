"""Kills of driver, executors and workers, and failovers, while `merge_into` keeps a table.

`on_version.py` runs it. The driver is a process of its own, on a standalone cluster. At a step that
is chosen, it stops until this process has killed what is to be killed.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import dcp_rs
import dcp_rs.spark
import kept_tables
from merged import PASSWORD
from standalone import Standalone, parent, wait_for

PATIENCE = 900
MOST_RESTARTS = 6

# Of a batch: before it is read, while the executors read it, when they hold it, during the merge,
# and before Spark's own commit. "between": after the first of several tables.
OF_EXECUTORS = [
    ("driver", "before"), ("executor", "reading"), ("worker", "held"), ("node", "reading"),
    ("driver", "held"), ("executor", "held"), ("worker", "merging"), ("node", "before"),
    ("driver", "merging"), ("executor", "merging"), ("worker", "reading"), ("node", "after"),
    ("driver", "after"), ("executor", "reading"), ("worker", "held"), ("lost", "after"),
]  # fmt: skip
OF_TEMPLATE = [
    ("driver", "between"), ("executor", "between"), ("worker", "between"), ("node", "between"),
    ("driver", "after"), ("executor", "merging"), ("worker", "reading"), ("lost", "before"),
]  # fmt: skip
# merge_into(path) merges on the driver.
OF_DRIVER = [
    ("driver", "before"), ("executor", "reading"), ("worker", "reading"), ("node", "reading"),
    ("driver", "held"), ("executor", "reading"), ("worker", "reading"), ("node", "before"),
    ("driver", "after"), ("executor", "reading"), ("worker", "reading"), ("node", "after"),
]  # fmt: skip


# ----- the driver -----


class Steps:
    """Stops this process, or a task of an executor, at a step, once."""

    def __init__(self, folder):
        self.at, self.wanted = Path(folder, "at"), None

    def reach(self, step):
        if step == self.wanted:
            self.wanted = None
            stop(self.at)


def stop(at):
    """Tells that a step is reached, and waits until the file is gone."""
    noted = at.with_suffix(".new")
    noted.write_text(str(os.getpid()))
    noted.rename(at)
    wait_for(lambda: not at.exists(), patience=PATIENCE)


def stop_once(folder):
    """Gives what `mapInArrow` does: the first task that has read rows stops."""

    def pass_on(batches):
        import killing_tables  # in the driver it is the program

        for batch in batches:
            try:
                Path(folder, "reading").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                killing_tables.stop(Path(folder, "at"))
            yield batch

    return pass_on


class Driver:
    """A query that follows the cluster, and stops where it is told to."""

    def __init__(self, kind, folder, master, name):
        self.kind, self.folder, self.name = kind, Path(folder), name
        format_ = None if kind == "path" else kind
        self.spark = kept_tables.session(format_, folder, master, **Standalone.SETTINGS)
        self.steps = Steps(folder)
        given = {} if kind == "path" else {"table": name}
        self.sink = dcp_rs.spark.merge_into(*([name] if kind == "path" else ()), **given)
        self.stop_in_sink()

    def stop_in_sink(self):
        from dcp_rs.replication.delta_table import DeltaTable
        from dcp_rs.spark.merge_target import Target

        take, merge, commit = Target.take, Target._merge, DeltaTable.commit
        steps, tracker = self.steps, self.spark.sparkContext.statusTracker()

        def stopping_take(*arguments):
            steps.reach("held")
            take(*arguments)
            steps.reach("between")

        def stopping_merge(*arguments):
            is_over = threading.Event()

            def tell():
                while steps.wanted == "merging" and not is_over.wait(0.01):
                    if tracker.getActiveStageIds():
                        steps.reach("merging")

            teller = threading.Thread(target=tell)
            teller.start()
            try:
                merge(*arguments)
            finally:
                is_over.set()
                teller.join()

        def stopping_commit(*arguments):
            steps.reach("held")
            commit(*arguments)

        Target.take, Target._merge = stopping_take, stopping_merge
        DeltaTable.commit = stopping_commit

    def merge(self, batch, batch_id):
        self.steps.reach("before")
        if self.steps.wanted == "reading":
            self.steps.wanted = None
            batch = batch.mapInArrow(stop_once(str(self.folder)), batch.schema)
        self.sink(batch, batch_id)
        self.steps.reach("after")

    def start(self):
        options = json.loads((self.folder / "options").read_text())
        changes = self.spark.readStream.format("couchbase.dcp").options(**options).load()
        writer = changes.writeStream.foreachBatch(self.merge).trigger(processingTime="1 second")
        self.query = writer.option("checkpointLocation", f"{self.folder}/checkpoint").start()

    def set(self, step):
        """Chooses the step of a later batch at which to stop."""
        (self.folder / "reading").unlink(missing_ok=True)
        self.steps.wanted = step

    def look(self):
        """Gives what the table is, and why the query had to be started again."""
        reason = None
        if not self.query.isActive:
            reason = " ".join(str(self.query.exception()).split())
            self.start()
        return self.state() | {"reason": reason}

    def state(self):
        rows, batches = [], {}
        for table in self.tables():
            if self.kind == "path":
                rows += path_rows(table)
                batches[table] = path_batches(table)
                continue
            if not self.spark.catalog.tableExists(table):
                continue
            self.spark.catalog.refreshTable(table)
            found = self.spark.table(table).select("collection", "key", "n").collect()
            rows += [row.asDict() for row in found]
            batches[table] = kept_tables.batches(self.spark, self.kind, table)
        return {"rows": rows, "batches": batches}

    def tables(self):
        """Gives the tables that the name or template stands for."""
        schema, _, table = self.name.rpartition(".")
        if "{" not in table:
            return [self.name]
        prefix = table.partition("{")[0]
        rows = self.spark.sql(f"SHOW TABLES IN {schema} LIKE '{prefix}*'").collect()
        return sorted(f"{schema}.`{row['tableName']}`" for row in rows)


def path_rows(location):
    import deltalake
    import pyarrow as pa

    if not deltalake.DeltaTable.is_deltatable(location):
        return []
    table = deltalake.DeltaTable(location)
    if not table.file_uris():
        return []
    query = deltalake.QueryBuilder().register("kept", table)
    return pa.table(query.execute("SELECT collection, key, n FROM kept")).to_pylist()


def path_batches(location):
    """Gives the versions of the transactions in the log of a Delta table, oldest first."""
    lines = [
        line
        for log in sorted(Path(location, "_delta_log").glob("*.json"))
        for line in log.read_text().splitlines()
    ]
    return [action["txn"]["version"] for action in map(json.loads, lines) if "txn" in action]


def drive(kind, folder, master, name):
    """Starts the query, and does what each line of stdin asks for."""
    driver = Driver(kind, folder, master, name)
    driver.start()
    result = Path(folder, "result")
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        found = getattr(driver, what)(*arguments)
        result.with_suffix(".new").write_text(json.dumps(found))
        result.with_suffix(".new").rename(result)
    os._exit(0)


# ----- what is outside -----


class Killed:
    """A Couchbase cluster with two collections, a Spark cluster, and a driver that dies."""

    COLLECTIONS = ("a", "b")

    def __init__(self, kind, folder, name, seed):
        self.kind, self.folder, self.name = kind, Path(folder), name
        self.chosen, self.process, self.n = random.Random(seed), None, 0
        self.done, self.restarts = Counter(), 0
        self.cluster = dcp_rs.testing.EmbeddedCluster(
            nodes=3, replicas=1, vbuckets=6, bucket="merged", password=PASSWORD
        )
        self.cluster.create_scope("s")
        for collection in self.COLLECTIONS:
            self.cluster.create_collection(f"s.{collection}")
        self.standalone = Standalone(folder)
        options = {
            "connectionString": self.cluster.connection_string,
            "username": "Administrator",
            "password": PASSWORD,
            "bucket": "merged",
            "onRollback": "resync",
            "maxOffsetsPerTrigger": 80,
            # What only one copy has is read, and lost.
            "persistedOnly": "false",
            "documentSchema": "n INT",
        }
        (self.folder / "options").write_text(json.dumps(options))

    def change(self):
        self.n += 1
        for _ in range(20):
            collection = f"s.{self.chosen.choice(self.COLLECTIONS)}"
            key = f"key_{self.chosen.randrange(60)}"
            self.cluster.upsert(key, {"n": self.n}, collection=collection)
            if self.chosen.random() < 0.2:
                self.cluster.remove(key, collection=collection)

    def truth(self):
        found = {}
        for collection in self.COLLECTIONS:
            for n in range(60):
                document = self.cluster.get(f"key_{n}", collection=f"s.{collection}")
                if document is not None:
                    found[collection, f"key_{n}"] = json.loads(document.value)["n"]
        return found

    # ----- the driver -----

    def start(self):
        arguments = [self.kind, str(self.folder), self.standalone.master, self.name]
        log = (self.folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *arguments],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
        )
        log.close()

    def end(self, how):
        if self.process is not None:
            how(self.process)
            self.process.wait(PATIENCE)
            self.process.stdin.close()
            self.process = None

    def ask(self, what, *arguments):
        """Has the driver do something; gives the answer."""
        if self.process is None:
            self.start()
        result = self.folder / "result"
        result.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        wait_for(result.exists, self.process, PATIENCE)
        return json.loads(result.read_text())

    def log(self):
        return (self.folder / "driver.log").read_text(errors="replace")[-5000:]

    # ----- what happens -----

    def driver(self, _):
        self.end(subprocess.Popen.kill)

    def executor(self, process):
        self.standalone.kill_executor(self._executor(process))

    def worker(self, process):
        worker = parent(self._executor(process))
        (number,) = (n for n, each in enumerate(self.standalone.workers) if each.pid == worker)
        self.standalone.kill_worker(number)

    def _executor(self, process):
        """The executor of a Python process of a task; if it is the driver's, one of them."""
        executor = parent(parent(process))
        executors = self.standalone.executors()
        return executor if executor in executors else self.chosen.choice(executors)

    def lag(self, lag, node=None):
        for vbucket in range(self.cluster.num_vbuckets):
            if node is None or self.cluster.copies_of(vbucket)[0] == node:
                self.cluster.set_replica_lag(vbucket, 1, lag)

    def node(self, _):
        """A failover of the node whose replicas lag, which comes back."""
        before = self.cluster.high_seqnos()
        self.cluster.failover(self.lagging)
        after = self.cluster.high_seqnos()
        lost = sum(max(0, before[each] - after[each]) for each in before)
        assert lost, "nothing is lost"
        self.done["changes lost"] += lost
        self.cluster.restart(self.lagging)
        self.cluster.rebalance()
        self.lag(0)

    def lost(self, _):
        """A failover of each vBucket that takes back its last changes."""
        for vbucket, high in self.cluster.high_seqnos().items():
            self.cluster.roll_back(vbucket, max(high - 3, 0))

    def happen(self, what, step):
        """Lets something happen at a step of a batch, and sees that the table becomes right."""
        began, self.lagging = time.monotonic(), self.chosen.randrange(3)
        if what == "node":
            self.lag(None, self.lagging)
        self.ask("set", step)
        self.change()
        at = self.folder / "at"
        wait_for(at.exists, self.process, PATIENCE)
        getattr(self, what)(int(at.read_text()))
        at.unlink()
        self.change()
        reasons = self.settle()
        self.done[f"{what} {step}"] += 1
        self.restarts += len(reasons)
        sys.stderr.write(f"{what} {step}: {time.monotonic() - began:.0f} s {reasons}\n")

    def settle(self):
        """Waits until the table has what the cluster has; gives why the query was restarted."""
        reasons, deadline = [], time.monotonic() + PATIENCE
        while True:
            found = self.ask("look")
            if found["reason"] is not None:
                codes = re.findall(r"\bCOUCHBASE_[A-Z_]+|\b[A-Z]+(?:_[A-Z]+)+\b", found["reason"])
                reasons.append(" ".join(dict.fromkeys(codes)) or found["reason"][-300:])
                assert len(reasons) < MOST_RESTARTS, reasons
            wrong = self.differences(found)
            if not wrong:
                return reasons
            assert time.monotonic() < deadline, wrong
            time.sleep(1)

    def differences(self, found):
        """Gives the documents that differ from the cluster's; checks the commits."""
        rows = {(row["collection"], row["key"]): row["n"] for row in found["rows"]}
        assert len(rows) == len(found["rows"]), "a document is doubled"
        for table, numbers in found["batches"].items():
            # A table of a template has no commit of a batch without changes for it.
            whole = sorted(set(numbers)) if "{" in self.name else list(range(len(numbers)))
            assert numbers == whole, f"{table} has the batches {numbers}"
        truth = self.truth()
        return {
            key: (rows.get(key), truth.get(key))
            for key in rows.keys() | truth
            if rows.get(key) != truth.get(key)
        }

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.end(lambda process: process.wait(PATIENCE))
        self.standalone.close()
        self.cluster.close()


def kill(kind, count, plan, name, seed):
    """Lets what is planned happen, from a place by the seed; tells how often what did."""
    sys.stderr.write(f"{kind} {name}: DCP_KILLS_SEED={seed}\n")
    with tempfile.TemporaryDirectory() as folder:
        if kind == "path":
            name = f"{folder}/{name}"
        killed = Killed(kind, folder, name, seed)
        try:
            killed.change()
            killed.settle()
            for n in range(count):
                killed.happen(*plan[(seed + n) % len(plan)])
        except BaseException:
            sys.stderr.write(killed.log())
            raise
        finally:
            killed.close()
    told = ", ".join(f"{what}: {number}" for what, number in sorted(killed.done.items()))
    sys.stdout.write(f"{kind} {name}: {told}; {killed.restarts} restarts of the query\n")
    sys.stdout.flush()


def everything(kind):
    """Kills DCP_SPARK_KILLS times, of those a third with a table for each collection."""
    count = int(os.environ.get("DCP_SPARK_KILLS", "24"))
    seed = int(os.environ.get("DCP_KILLS_SEED", random.randrange(10**6)))
    if kind == "path":
        kill(kind, count, OF_DRIVER, "kept", seed)
        return
    kill(kind, count - count // 3, OF_EXECUTORS, kept_tables.TABLES[kind], seed)
    template = kept_tables.TABLES[kind].replace("kept", "of_{scope}_{collection}")
    kill(kind, count // 3, OF_TEMPLATE, template, seed)


if __name__ == "__main__":
    drive(*sys.argv[1:])
