"""`dcp-rs run` for long, while the cluster, the target and the operator do what they do.

DCP_SOAK_SECONDS is for how long; without it, every trouble comes once and is short.
"""

import collections
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psycopg
import pytest

import dcp_rs
import replicas
from exposition import values
from pipelines import PASSWORD, Service
from postgres_server import PostgresServer
from small_disk import mounted

SECONDS = float(os.environ.get("DCP_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("DCP_SOAK_SEED", "1"))
IS_LONG = SECONDS >= 600
# Within which a trouble has to be seen.
SOON = 45.0
# How long the target is away, other troubles last, it is quiet, and a commit may hang.
OUTAGE, HOLD, CALM, HUNG_AFTER = (600, 40, 20, 90) if IS_LONG else (2, 1, 0.2, 6)
CHANGES_PER_SECOND = 200
# Bytes of the file system that becomes full.
DISK = 64 << 20
# By which memory may grow between the second round of troubles and the last.
GROWTH = 24 << 20


def keep(figures):
    """Adds figures to the file that DCP_FIGURES names."""
    if "DCP_FIGURES" in os.environ:
        with Path(os.environ["DCP_FIGURES"]).open("a") as file:
            file.write(json.dumps(figures) + "\n")


class Observer:
    """Asks a process each second how it is."""

    def __init__(self, url, pid):
        self.url, self.pid = url, pid
        self.status, self.series = {}, {}
        self.not_alive, self.slowest, self.asked = [], 0.0, 0
        # When it is right that it does not live.
        self.is_hung = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _get(self, path):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return None, str(error)

    def _run(self):
        while not self._over.wait(1.0 if IS_LONG else 0.1):
            begun = time.monotonic()
            code, text = self._get("/livez")
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.asked += 1
            if code != 200 and not self.is_hung:
                self.not_alive.append((code, text))
            self.ready = self._get("/readyz")
            status = json.loads(self._get("/status")[1])
            self.series = values(self._get("/metrics")[1])
            self.status = status | {"at": begun}

    def memory(self):
        """The bytes of the process."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        # Without libraries, of which another process takes a share.
        (found,) = [line for line in lines if line.startswith("Pss_Anon:")]
        return int(found.split()[1]) << 10

    def close(self):
        self._over.set()
        self._thread.join()


class Kept(Service):
    """A service of which the log is kept, and of its progress the last line."""

    progress = None

    def _read(self):
        for line in self.process.stderr:
            found = json.loads(line)
            if "level" in found:
                self.lines.append(found)
            else:
                self.progress = found


class Soak:
    """A cluster that is written to, a server that takes it, and what happens to both."""

    def __init__(self, cluster, server, disk, service, folder):
        self.cluster, self.server, self.disk, self.service = cluster, server, disk, service
        self.secret, self.chance = folder / "password", random.Random(SEED)
        self.written, self.writes = replicas.Written(cluster), 0
        self.collections = ["shop.order_0", "shop.order_1"]
        cluster.create_scope("shop")
        for each in self.collections:
            cluster.create_collection(each)
        self.interval, self.figures = 1.0, []
        self._pause, self._is_paused = threading.Event(), threading.Event()
        self._over, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._write)
        tablespace = "-cdefault_tablespace%3Dsmall%20-ctemp_tablespaces%3Dsmall" if disk else ""
        self.url = f"postgresql:///postgres?{server.options}&options={tablespace}"
        self.replica = replicas.OfMany(replicas.InPostgres(self.url), "postgres", "table")

    # ----- writing -----

    def _write(self):
        try:
            while not self._over.wait(0.05):
                if self._pause.is_set():
                    self._is_paused.set()
                    continue
                self._is_paused.clear()
                for _ in range(round(CHANGES_PER_SECOND * 0.05)):
                    # Its node is away, or the failover took the document back.
                    with contextlib.suppress(dcp_rs.DcpError):
                        self._change()
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self._error = error

    def _change(self):
        name = self.chance.choice(self.collections), f"key_{self.chance.randrange(500)}"
        if self.chance.random() < 0.1 and name in self.written.keys:
            self.cluster.remove(name[1], collection=name[0])
        else:
            value = {"n": self.writes, "pad": "x" * self.chance.randrange(300)}
            self.written.upsert(name[1], value, name[0])
        self.writes += 1

    # ----- looking -----

    def begin(self):
        self.secret.write_text(PASSWORD)
        self.pipeline()
        self.service.start()
        line = self.service.until(lambda each: each["event"] == "listening")
        self.observer = Observer(line["url"], self.service.process.pid)
        self._thread.start()
        self.until(lambda: self.observer.status.get("ready"))

    def pipeline(self, more=""):
        self.service.write(
            f'target = "{self.url}"\ntables = "collection"\nlisten = "127.0.0.1:0"\n'
            f"collections = {json.dumps(self.collections)}\ncommit_interval = {self.interval}\n"
            f"hung_after = {HUNG_AFTER}.0\ntarget_retry_timeout = 3600.0\n"
            f'log_levels = ["info"]\n{more}'
        )

    def until(self, holds, patience=180.0):
        end = time.monotonic() + patience
        while not holds():
            assert self._error is None, self._error
            assert self.service.process.poll() is None, json.dumps(
                self.service.lines[-9:], indent=1
            )
            if time.monotonic() > end:
                last = {k: v for k, v in self.observer.status.items() if "vbucket" not in k}
                pytest.fail(f"it never was so: {last} {self.service.lines[-3:]}")
            time.sleep(0.05)

    def trouble(self, kind):
        """Causes something, and sees that it is seen and that it passes."""
        before, logged = dict(self.observer.series), len(self.service.lines)
        told_before = self.observer.status
        steps = getattr(self, kind)()
        # What is to be seen: in the status, in a metric, and in the log.
        in_status, in_metric, in_log = next(steps)
        begun, seen = time.monotonic(), {}
        checks = {
            "status": lambda: in_status(self.observer.status, told_before),
            "metric": lambda: in_metric(self.observer.series, before),
            "log": lambda: any(map(in_log, self.service.lines[logged:])),
        }

        def are_all_seen():
            for where, check in checks.items():
                if where not in seen and check():
                    seen[where] = round(time.monotonic() - begun, 1)
            return len(seen) == len(checks)

        with contextlib.suppress(pytest.fail.Exception):
            self.until(are_all_seen, SOON)
        assert len(seen) == len(checks), f"{kind} was seen only in {seen}: {self.observer.status}"
        next(steps, None)
        memory = self.settle()
        lasted = round(time.monotonic() - begun, 1)
        found = {"trouble": kind, "seen": seen, "lasted": lasted, "memory": memory}
        self.figures.append(found)
        keep(found | {"writes": self.writes})
        time.sleep(CALM)

    def settle(self, *, goes_on=True):
        """Stops writing until the tables are in step, and compares them.

        Returns:
            Bytes of memory that are in use while nothing waits.
        """
        self._pause.set()
        self._is_paused.wait()
        since = time.monotonic()

        def is_quiet():
            found = self.observer.status
            figures = [found.get(name) for name in ("lag", "lag_seconds", "uncommitted")]
            is_new = found.get("at", 0) > since + (2 if IS_LONG else 0.1)
            return is_new and found["ready"] and figures == [0, 0, 0]

        self.until(is_quiet)
        # What nodes have is told by them with some delay.
        self.until(lambda: self.replica.documents() == self.written.documents(), 30)
        memory = self.observer.memory()
        if goes_on:
            self._pause.clear()
        return memory

    def end(self):
        self.settle(goes_on=False)
        self._over.set()
        self._thread.join()
        self.observer.close()
        assert self.service.stop() == 0
        assert self.replica.documents() == self.written.documents()

    def kill_all(self):
        """Ends what a failed test left."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if hasattr(self, "observer"):
            self.observer.close()
        if hasattr(self.service, "process"):
            self.service.process.kill()
            self.service.process.wait()
            self.service.process.stderr.close()

    # ----- what happens: it gives what is to be seen, and then ends it -----

    def _node(self):
        return self.chance.randrange(3)

    def rebalance(self):
        node = self._node()
        self.cluster.failover(node, graceful=True)
        yield self._counted("moved")
        self.cluster.restart(node)
        self.cluster.rebalance()

    def failover(self):
        """A failover that loses what its replicas lack."""
        node = self._node()
        for vbucket in range(self.cluster.num_vbuckets):
            if self.cluster.copies_of(vbucket)[0] == node:
                self.cluster.set_replica_lag(vbucket, 1, None)
        # What is written is read, and then lost.
        records = self.observer.status["changes"]
        self.until(lambda: self.observer.status["changes"] > records + 100)
        self.cluster.failover(node)
        yield self._counted("rolled_back")
        self.cluster.restart(node)
        self.cluster.rebalance()

    @staticmethod
    def _counted(kind):
        def value(found):
            return found.get(("dcp_rs_stream_events_total", kind), 0)

        return (
            lambda found, before: found["events"].get(kind, 0) > before["events"].get(kind, 0),
            lambda found, before: value(found) > value(before),
            lambda line: line["event"] == kind,
        )

    def kill(self):
        node = self._node()
        self.cluster.kill(node)
        yield self._disconnected("connection_lost")
        time.sleep(HOLD / 2)
        self.cluster.restart(node)

    def cut_off(self):
        for node in range(3):
            self.cluster.kill(node)
        yield (
            lambda found, _: found["phase"] == "disconnected" and found["lag"] is None,
            lambda found, _: found["dcp_rs_phase", "disconnected"] == 1,
            lambda line: line["event"] == "node_unreachable",
        )
        time.sleep(HOLD / 2)
        for node in range(3):
            self.cluster.restart(node)

    def password(self):
        """Another password, which is in its file only later."""
        node, password = self._node(), f"{PASSWORD}-{self.chance.randrange(10**6)}"
        self.cluster.set_password(password)
        self.cluster.persist()
        self.cluster.restart(node)
        yield self._disconnected("node_unreachable", "uthenticat")
        time.sleep(HOLD / 2)
        self.secret.write_text(password)

    @staticmethod
    def _disconnected(event, why=""):
        def is_told(line):
            return line["event"] == event and why in line["message"] + str(line.get("error"))

        return (
            lambda found, _: (
                found["vbuckets"]["disconnected"] and any(map(is_told, found["errors"]))
            ),
            lambda found, _: found["dcp_rs_disconnected_vbuckets",] > 0,
            is_told,
        )

    def outage(self):
        self.server.stop()
        yield self._unavailable("")
        time.sleep(OUTAGE)
        self.server.start()

    def full_disk(self):
        self.disk.fill()
        yield self._unavailable("No space left")
        time.sleep(HOLD)
        self.disk.make_room()

    @staticmethod
    def _unavailable(why):
        return (
            lambda found, _: found["phase"] == "target unavailable" and why in found["reason"],
            lambda found, _: found["dcp_rs_target_unavailable_seconds",] > 0,
            lambda line: line["event"] == "target_unavailable" and why in line["error"],
        )

    def hang(self, seconds=HUNG_AFTER / 2):
        """A commit that hangs for less than it may."""
        begun = time.monotonic()
        self.server.hold()
        yield (
            lambda found, _: found["last_commit"]["running_seconds"] > 1,
            lambda found, _: found["dcp_rs_commit_running_seconds",] > 1,
            lambda line: line["event"] == "commit_slow",
        )
        time.sleep(max(begun + seconds - time.monotonic(), 0))
        self.server.let_go()

    def hang_too_long(self):
        """For longer than it may, which `/livez` has to tell."""
        # What was committed may have been so a moment before.
        self.observer.is_hung, asked = True, self.observer._get
        steps = self.hang(HUNG_AFTER * 1.2)
        yield next(steps)
        end = time.monotonic() + HUNG_AFTER * 1.5
        while asked("/livez")[0] == 200:
            assert time.monotonic() < end, "/livez never failed"
            time.sleep(0.5)
        next(steps, None)
        self.until(lambda: asked("/livez")[0] == 200)
        self.observer.is_hung = False

    def reload(self):
        """Another collection, and other options."""
        self.collections.append(f"shop.order_{len(self.collections)}")
        self.cluster.create_collection(self.collections[-1])
        table = self.collections[-1].replace(".", "__")
        self.interval = self.chance.choice([0.5, 1.0, 2.0])
        self.pipeline()
        self.service.process.send_signal(signal.SIGHUP)
        yield (
            lambda found, _: found["tables"].get(table, {}).get("changes", 0) > 0,
            lambda found, _: found.get(("dcp_rs_table_committed_records_total", table), 0) > 0,
            lambda line: line["event"] == "reloaded" and "collections" in line["options"],
        )

    def refused_reload(self):
        self.pipeline('mode = "log"\n')
        self.service.process.send_signal(signal.SIGHUP)
        name = ("dcp_rs_warnings_total", "reload_refused")

        def count(found):
            return sum(e["count"] for e in found["errors"] if e["event"] == "reload_refused")

        yield (
            lambda found, before: count(found) > count(before),
            lambda found, before: found.get(name, 0) > before.get(name, 0),
            lambda line: line["event"] == "reload_refused",
        )
        self.pipeline()


@pytest.fixture
def server():
    with contextlib.closing(PostgresServer()) as running:
        yield running


@pytest.fixture
def disk(server):
    """A small file system with a tablespace; nothing where none can be mounted."""
    with mounted(server.folder / "disk", DISK) as found:
        if found is not None:
            space = found.folder / "space"
            space.mkdir()
            server.owns(space)
            uri = f"postgresql:///postgres?{server.options}"
            with psycopg.connect(uri, autocommit=True) as database:
                database.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        yield found


@pytest.fixture
def soak(server, disk, tmp_path):
    cluster = dcp_rs.testing.EmbeddedCluster(
        nodes=3, vbuckets=64, replicas=1, bucket="travel", history_bytes=16 << 20
    )
    path, secret = tmp_path / "pipeline.toml", tmp_path / "password"
    with cluster:
        service = Kept(path, cluster, password=None, password_file=secret)
        found = Soak(cluster, server, disk, service, tmp_path)
        try:
            yield found
        finally:
            found.kill_all()


# What comes in CI, and what comes also.
SHORT = ("rebalance", "failover", "outage", "hang", "full_disk", "reload")
LONG = (
    "rebalance", "hang", "failover", "full_disk", "kill", "password", "reload", "cut_off",
    "refused_reload", "outage", "failover", "hang_too_long",
)  # fmt: skip


@pytest.mark.shows_password("the file has it, which a user writes")
def test_a_service_stays_whole_and_says_what_is_wrong(soak, caplog):
    # What the cluster says would fill the memory.
    caplog.set_level(logging.WARNING, "dcp_rs")
    begun = time.monotonic()
    soak.begin()
    kinds = [each for each in (LONG if IS_LONG else SHORT) if soak.disk or each != "full_disk"]
    for kind in itertools.cycle(kinds):
        soak.trouble(kind)
        if time.monotonic() - begun > SECONDS and len(soak.figures) >= len(kinds):
            break
    soak.end()
    observer, memory = soak.observer, [each["memory"] for each in soak.figures]
    assert observer.not_alive == []
    a_round = len(kinds)
    second, last = (
        statistics.median(part)
        for part in (memory[a_round : 2 * a_round] or memory, memory[-a_round:])
    )
    figures = {
        "seconds": round(time.monotonic() - begun),
        "writes": soak.writes,
        "troubles": collections.Counter(each["trouble"] for each in soak.figures),
        "longest_until_seen": max(max(each["seen"].values()) for each in soak.figures),
        "asked": observer.asked,
        "slowest_livez": round(observer.slowest, 2),
        "memory_mib": [round(each / (1 << 20), 1) for each in (second, last, max(memory))],
    }
    keep(figures)
    assert last - second <= GROWTH, figures
