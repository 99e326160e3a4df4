"""Durable and plain writes of the Couchbase SDK while nodes and the links between them fail.

Each run has a cluster of three nodes with two replicas, writers that note what the SDK answered,
and a DCP reader that runs throughout. The oracle is what the writers noted; it shares no code with
the cluster.
"""

import collections
import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

pytest.importorskip("couchbase")

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    DocumentNotFoundException,
    DurabilityImpossibleException,
    DurabilitySyncWriteAmbiguousException,
    DurabilitySyncWriteInProgressException,
    RequestCanceledException,
    TemporaryFailException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import ClusterOptions, GetOptions, RemoveOptions, UpsertOptions

from dcp_rs import BatchPolicy
from dcp_rs.testing import EmbeddedCluster

_NODES, _VBUCKETS, _WRITERS, _KEYS = 3, 8, 3, 3
_LEVELS = (
    None,
    DurabilityLevel.MAJORITY,
    DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
    DurabilityLevel.PERSIST_TO_MAJORITY,
)
# SDKs give servers nine tenths of it for a durable write, but at least 1.5 seconds.
_PATIENCE = timedelta(seconds=2)
_LONG = timedelta(seconds=20)
# Runs at the same time: most of a run is waiting.
_AT_ONCE = 8
# After these, nobody may ever see the write.
_FAILURES = (
    DocumentNotFoundException,
    DurabilityImpossibleException,
    DurabilitySyncWriteInProgressException,
    TemporaryFailException,
    UnAmbiguousTimeoutException,
)
# The SDK did not wait for the answer: the request may still be on its way.
_GIVEN_UP = (AmbiguousTimeoutException, RequestCanceledException)


def _eventually(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return False


@dataclass
class Attempt:
    """A write of a document, or its removal, and what the SDK said."""

    value: int | None
    level: int
    # How many events before it may have lost changes: crashes without failover, and any.
    crashes: int
    losses: int
    outcome: str = "ambiguous"
    # Seqno of a write that is done: for a durable one, where it was prepared.
    seqno: int = 0


@dataclass
class Document:
    """What may be there of one document."""

    value: int | None = None
    attempts: list[Attempt] = field(default_factory=list)

    def allowed(self, run, seen, seqno):
        """Values of which one has to be there, if the newest version has `seqno`.

        A write that the SDK gave up on may wait in a connection that the SDK has closed, and be
        done after later ones. Its seqno is above theirs then.
        """
        last = max((each.seqno for each in self.attempts if run.keeps(each)), default=0)
        late = {each.value for each in self.attempts if each.outcome == "given up"}
        allowed = late if seqno > last else set()
        for attempt in reversed(self.attempts):
            if attempt.outcome == "failed":
                continue
            allowed.add(attempt.value)
            # Removals cannot be told apart.
            was_seen = attempt.level and attempt.value is not None and attempt.value in seen
            if (attempt.outcome == "done" or was_seen) and run.keeps(attempt):
                return allowed
        return allowed | {self.value}


class Writer:
    """Writes its own documents, each with another number every time."""

    def __init__(self, run, name, seed):
        self.run, self.chance = run, random.Random(seed)
        self.documents = {f"{name}-{number}": Document() for number in range(_KEYS)}
        self.count = 0

    def write_on(self, until):
        while not until.is_set():
            self.write(self.chance.choice(list(self.documents)))

    def write(self, key):
        self.count += 1
        run, level = self.run, self.chance.choice((0, 1, 1, 2, 3))
        removes = self.chance.random() < 0.15
        value = None if removes else self.count
        attempt = Attempt(value, level, run.crashes, run.losses)
        self.documents[key].attempts.append(attempt)
        given = {"timeout": _PATIENCE}
        if level:
            given["durability"] = ServerDurability(_LEVELS[level])
        try:
            if removes:
                result = run.sdk.remove(key, RemoveOptions(**given))
            else:
                result = run.sdk.upsert(key, {"n": value}, UpsertOptions(**given))
            attempt.outcome = "done"
            attempt.seqno = result.mutation_token().sequence_number
        except _FAILURES:
            attempt.outcome = "failed"
        except _GIVEN_UP:
            attempt.outcome = "given up"
        except DurabilitySyncWriteAmbiguousException:
            # It may be there.
            pass
        run.counts[level, attempt.outcome] += 1


class Reader(threading.Thread):
    """Follows the cluster, and goes back with it."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self.client, self.versions, self.seen = client, {}, collections.defaultdict(set)
        self.error, self.rollbacks, self.is_done = None, 0, False

    def run(self):
        try:
            self.follow()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            if not self.is_done:
                self.error = error

    def follow(self):
        self.stream = self.client.stream(columns="full", batch=BatchPolicy(linger=0.02))
        for batch in self.stream:
            for row in batch.rows():
                versions = self.versions.setdefault(row["vbucket"], [])
                if row["op"] == "rollback":
                    self.rollbacks += 1
                    versions[:] = [each for each in versions if each[0] <= row["seqno"]]
                    continue
                value = json.loads(row["value"])["n"] if row["op"] == "mutation" else None
                versions.append((row["seqno"], row["key"], value))
                self.seen[row["key"]].add(value)

    def documents(self):
        """The seqno and value of each document."""
        versions = [version for of in list(self.versions.values()) for version in list(of)]
        return {key: (seqno, value) for seqno, key, value in versions}


class Run:
    """One cluster, from its beginning to its end."""

    def __init__(self, seed, counts):
        self.seed, self.chance, self.counts = seed, random.Random(seed), counts
        self.crashes = self.losses = 0
        self.events = []
        self.writers = [Writer(self, f"doc-{n}", f"{seed} {n}") for n in range(_WRITERS)]

    def keeps(self, attempt):
        """Whether what was acknowledged has to be there still."""
        if attempt.level == 0:
            return attempt.losses == self.losses
        # Level 1 is in the memory of a majority. A failover keeps that; a node that crashes and
        # comes back with the active copy does not.
        return attempt.level > 1 or attempt.crashes == self.crashes

    def play(self):
        options = {"nodes": _NODES, "replicas": _NODES - 1, "vbuckets": _VBUCKETS}
        with EmbeddedCluster(
            **options, persist_delay=self.chance.choice((0.01, 0.2))
        ) as self.cluster:
            login = PasswordAuthenticator("Administrator", "password")
            sdk = Cluster(self.cluster.connection_string, ClusterOptions(login))
            try:
                self.sdk = sdk.bucket("default").default_collection()
                sdk.wait_until_ready(_LONG)
                with self.cluster.connect() as client:
                    self.reader = Reader(client)
                    self.reader.start()
                    for number in range(2):
                        self.disturb()
                        self.check(number)
                    self.reader.is_done = True
                self.reader.join(timeout=20)
                assert not self.reader.is_alive()
            finally:
                sdk.close()

    def disturb(self):
        """Lets things happen while documents are written."""
        quiet = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(len(self.writers)) as threads:
            writing = [threads.submit(writer.write_on, quiet) for writer in self.writers]
            try:
                for _ in range(self.chance.randint(1, 2)):
                    time.sleep(self.chance.random() * 0.05)
                    self.happen()
                time.sleep(0.02)
            finally:
                quiet.set()
            for each in writing:
                each.result()

    def happen(self):
        node = self.chance.randrange(_NODES)
        event = self.chance.choice(
            (self.partition, self.partition, self.isolate, self.crash, self.die, self.leave)
        )
        self.events.append(f"{event.__name__} {node}")
        event(node)

    def wait(self):
        time.sleep(self.chance.random() * 0.15)

    def cut(self, node):
        """Cuts a node off, in one of the ways there are."""
        condition = {"between": [[node], [each for each in range(_NODES) if each != node]]}
        reaction = self.chance.choice(("disconnect", "half_open"))
        if self.chance.random() < 0.3:
            condition["from"] = self.chance.choice(condition["between"])
        self.events.append(f"{reaction} {condition}")
        self.cluster.set_faults([{"condition": condition, "reaction": reaction}])
        self.wait()

    def partition(self, node):
        """A node is cut off for a while."""
        self.cut(node)
        self.cluster.set_faults([])

    def isolate(self, node):
        """A node that is cut off, or only behind, is failed over."""
        if self.chance.random() < 0.7:
            self.cut(node)
        else:
            others = [each for each in range(_NODES) if each != node]
            lag = {"lag": {"changes": self.chance.randrange(4)}}
            window = {"window": {"bytes": self.chance.randrange(1, 400)}}
            slow = {"condition": {"between": [[node], others]}}
            self.cluster.set_faults([slow | {"reaction": lag}, slow | {"reaction": window}])
            self.wait()
        self.die(node)

    def die(self, node):
        """A node crashes, and others take over."""
        if self.chance.random() < 0.5:
            self.cluster.kill(node)
            self.wait()
        self.cluster.failover(node)
        # Not before: what is acknowledged until then may be lost.
        self.losses += 1
        self.wait()
        self.cluster.set_faults([])
        self.cluster.restart(node, clean=False)
        self.cluster.rebalance()

    def crash(self, node):
        """A node crashes, and goes on with what is on its disk."""
        is_clean = self.chance.random() < 0.3
        if not is_clean:
            self.cluster.kill(node)
            self.losses += 1
            self.crashes += 1
            self.wait()
        self.cluster.restart(node, clean=is_clean)

    def leave(self, node):
        """A node leaves in good order, and joins again."""
        self.cluster.failover(node, graceful=True)
        self.wait()
        self.cluster.rebalance()

    def get(self, key):
        # A write that was prepared before a failover may be committed by the first read.
        for _ in range(2):
            try:
                value = self.sdk.get(key, GetOptions(timeout=_LONG)).content_as[dict]["n"]
            except DocumentNotFoundException:
                value = None
        return value

    def check(self, number):
        """Compares documents with what writers know, and what was streamed with the documents."""
        durably = UpsertOptions(
            timeout=_LONG, durability=ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY)
        )
        last = {}
        for key in (f"end-{each}" for each in range(10 * _VBUCKETS)):
            if self.cluster.vbucket_of(key) not in last:
                last[self.cluster.vbucket_of(key)] = key
                self.sdk.upsert(key, {"n": number}, durably)
        assert len(last) == _VBUCKETS
        # An open connection is in order: behind these writes, none waits that was given up.
        found = {key: self.get(key) for writer in self.writers for key in writer.documents}

        def has_everything():
            streamed = self.reader.documents()
            return self.reader.error or all(
                streamed.get(key, (0, None))[1] == number for key in last.values()
            )

        assert _eventually(has_everything), "the reader does not catch up"
        assert self.reader.error is None, self.reader.error
        streamed = self.reader.documents()
        for writer in self.writers:
            for key, document in writer.documents.items():
                seen = self.reader.seen[key]
                seqno, value = streamed.get(key, (0, None))
                known = f"{key}: {found[key]}, streamed {value} at {seqno}, {document}"
                assert value == found[key], known
                assert found[key] in document.allowed(self, seen, seqno), known
                for attempt in document.attempts:
                    if attempt.outcome == "failed" and attempt.value is not None:
                        assert attempt.value not in seen, (key, attempt)
                writer.documents[key] = Document(found[key])


def play_runs(runs, first):
    """Plays `runs` runs from the seed `first` on, several at a time."""
    counts = collections.Counter()

    def play(seed):
        run = Run(seed, counts)
        try:
            run.play()
        except BaseException as error:
            error.add_note(f"DCP_DURABLE_RUNS=1 DCP_DURABLE_SEED={seed}, {run.events}")
            raise
        return run.reader.rollbacks

    failures, rollbacks = [], 0
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
        playing = [threads.submit(play, first + number) for number in range(runs)]
        for each in concurrent.futures.as_completed(playing):
            try:
                rollbacks += each.result()
            except Exception as error:  # noqa: BLE001 - raised below, with the others
                failures.append(error)
    summary = f"{runs} runs from seed {first}: {dict(counts)}, {rollbacks} rollbacks"
    sys.stdout.write(summary + "\n")
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {runs} runs", failures)
    for level in range(4):
        assert counts[level, "done"] > runs, counts
        unknown = counts[level, "ambiguous"] + counts[level, "given up"]
        assert runs < 50 or unknown or level == 0, counts
    assert rollbacks or runs < 50, "nothing was ever lost"


@pytest.mark.timeout(7200)
def test_no_durable_write_is_lost_and_no_aborted_one_is_seen():
    runs = int(os.environ.get("DCP_DURABLE_RUNS", "50"))
    first = int(os.environ.get("DCP_DURABLE_SEED", random.randrange(10**6)))
    while runs > 0:
        # The SDK's library crashed once in a thousand runs, and ends the process with it.
        some = min(runs, 50)
        for is_last in (False, True):
            play = [sys.executable, "-X", "faulthandler", __file__, str(some), str(first)]
            played = subprocess.run(play, capture_output=True, text=True, check=False)
            sys.stdout.write(played.stdout + played.stderr)
            if is_last or not _of_sdk(played):
                break
        assert played.returncode == 0, f"{some} runs from seed {first}"
        runs, first = runs - some, first + some


def _of_sdk(played):
    """Whether the process crashed while it executed code of the SDK."""
    found = re.search(r'^Current thread .*\n  File "(.*)"', played.stderr, re.MULTILINE)
    is_sdk = found is not None and "/site-packages/couchbase/" in found[1]
    return played.returncode == -signal.SIGSEGV and is_sdk


if __name__ == "__main__":
    play_runs(int(sys.argv[1]), int(sys.argv[2]))
