"""What befalls a cluster while a client reads from it, or between two of its processes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from judge import Document, Reading, Version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from history import History
    from programs import ForeignClient, Run

    from dcp_rs.testing import EmbeddedCluster

# Within how many seconds a client is to have caught up when nothing is wrong any more.
CATCH_UP = 45.0
# Programs wait longer than anyone who listens to them.
PATIENCE = 1200


@dataclass
class Reader:
    """A client that reads a cluster: one process after another."""

    client: ForeignClient
    state: Path
    # Seconds between noops; how many of those the client has by itself if nobody can choose.
    noop: float
    # How long a node knows no bucket.
    unknown: float

    def __post_init__(self) -> None:
        self.readings: list[Reading] = []
        self._saved = False

    def start(self, cluster: EmbeddedCluster, **job: object) -> Run:
        """Starts a process, which goes on from where the one before was."""
        if self._saved:
            job["resume"] = self.state
        self._saved = True
        return self.client.start(cluster, save=self.state, patience=PATIENCE, **job)

    def drain(self, cluster: EmbeddedCluster, **job: object) -> None:
        """Reads all that there is."""
        self._listen(self.start(cluster, **job), CATCH_UP)

    def follow(
        self,
        history: History,
        befalls: Callable[[], None] = lambda: None,
        limit: float = CATCH_UP,
        **job: object,
    ) -> None:
        """Reads while something befalls the cluster, and on to what is there after it."""
        run = self.start(history.cluster, follow=True, **job)
        if not run.is_streaming(CATCH_UP):
            self._listen(run, 0)
            return
        begun = time.monotonic()
        befalls()
        # A limit of its own counts from what befell; else from when it was over.
        begun = begun if limit != CATCH_UP else time.monotonic()
        self._listen(run, limit - (time.monotonic() - begun), history.cluster.high_seqnos())

    def _listen(self, run: Run, limit: float, ends: dict[int, int] | None = None) -> None:
        lines, end = run.listen(limit, ends)
        reading = Reading(lines)
        if end == "late":
            reading.stalled = f"not caught up in {max(limit, 0) or CATCH_UP:.0f} s"
        else:
            reading.stopped = end
        self.readings.append(reading)


def truth_of(history: History) -> dict[Document, Version]:
    """The newest version of every document."""
    return {
        (v.collection, v.key): Version(v.cas, v.op != "mutation")
        for vbucket in history.versions
        for v in history.latest(vbucket)
    }


def _lossy(history: History) -> list[int]:
    cluster = history.cluster
    actives = [vb for vb in history.versions if cluster.copies_of(vb)[0] == 0]
    return actives[:: max(1, len(actives) // 8)]


def _lose(history: History, reader: Reader, found: int) -> None:
    """Has the client read three changes of some vBuckets that a failover then loses.

    The client resumes when so many others are in their place. More follow once its streams are
    open: who has read those has read all that it wanted.
    """
    cluster = history.cluster
    history.write(300)
    lossy = _lossy(history)
    for vbucket in lossy:
        cluster.set_replica_lag(vbucket, 1, None)
        history.write_to(vbucket, 3, prefix="lost")
    reader.drain(cluster)
    cluster.failover(0)
    history.forget_lost()
    for vbucket in lossy:
        history.write_to(vbucket, found, prefix="found")

    def go_on() -> None:
        for vbucket in lossy:
            history.write_to(vbucket, 4, prefix="late")

    reader.follow(history, go_on)


def lost_tail(history: History, reader: Reader) -> None:
    """The client has read changes that a failover loses; the new branch is ahead of it."""
    _lose(history, reader, 5)


def same_seqno(history: History, reader: Reader) -> None:
    """The new branch is exactly where the client was on the lost one."""
    _lose(history, reader, 3)


def checkpoint_ahead(history: History, reader: Reader) -> None:
    """The new branch has not come as far as the client was on the lost one."""
    _lose(history, reader, 1)


def second_rollback(history: History, reader: Reader) -> None:
    """The answer to a stream request is a rollback, and to the one after it a lower one."""
    history.write(300)
    history.write_to(7, 10, prefix="rolled")
    reader.drain(history.cluster)
    high = history.cluster.high_seqnos()[7]
    request = {"opcode": "DCP_STREAM_REQ", "vbucket": 7, "nth": 1}
    history.cluster.set_faults(
        [
            {"condition": request, "reaction": {"rollback": {"seqno": high - back}}}
            for back in (2, 4)
        ]
    )

    def go_on() -> None:
        history.write(100, prefix="more")
        history.write_to(7, 1, prefix="last")

    reader.follow(history, go_on)


def tombstone_with_body(history: History, reader: Reader) -> None:
    """Documents are removed whose system attributes stay, so that the deletions have a body."""
    cluster = history.cluster
    history.write(100)
    for index in range(30):
        cluster.upsert(f"attributes-{index}", b"{}", xattrs={"_sync": {"rev": index}})
    reader.drain(cluster)
    for index in range(30):
        history.remove(f"attributes-{index}")
    reader.follow(history)


def unacknowledged(history: History, reader: Reader) -> None:
    """The client acknowledges later changes but not one before them, saves, and crashes."""
    history.write_to(0, 8, prefix="ordered")
    key = history.versions[0][2].key
    follow = {"follow": True} if reader.client.name == "go-dcp" else {}
    if follow:
        reader.follow(history, unacknowledged=key)
    else:
        reader.drain(history.cluster, unacknowledged=key)
    history.write_to(0, 2, prefix="after")
    reader.follow(history)


def _of_collection(reader: Reader, number: int) -> dict[str, Any]:
    if reader.client.name in ("go-dcp", "dcp_rs"):
        return {"scope": "inventory", "collection_names": ["airlines"]}
    return {"filter": [number]}


def collection_recreated(history: History, reader: Reader) -> None:
    """The collection that is read is dropped and created again while the client is away."""
    path = "inventory.airlines"
    number = history.create_collection(path)
    history.write(200, collection=path)
    reader.drain(history.cluster, **_of_collection(reader, number))
    history.drop_collection(path)
    number = history.create_collection(path)
    history.write(200, collection=path)
    reader.drain(history.cluster, **_of_collection(reader, number))


def bucket_recreated(history: History, reader: Reader) -> None:
    """The bucket is dropped and created again while the client is away, with less in it."""
    history.write(300)
    reader.drain(history.cluster)
    history.cluster.drop_bucket()
    history.cluster.create_bucket()
    history.versions = {vbucket: [] for vbucket in history.versions}
    history.write(100, prefix="doc")
    reader.follow(history)


def half_open(history: History, reader: Reader) -> None:
    """A connection stays open and carries nothing any more."""
    history.write(100)

    def cut() -> None:
        condition = {"opcode": "DCP_MUTATION", "nth": 1}
        history.cluster.set_faults([{"condition": condition, "reaction": "half_open"}])
        history.write(100, prefix="more")

    reader.follow(history, cut, 3 * reader.noop, noop_seconds=int(reader.noop))
    history.cluster.set_faults([])


def unknown_bucket(history: History, reader: Reader) -> None:
    """A node restarts and answers for a time that it knows no such bucket."""
    cluster = history.cluster
    history.write(200)

    def restart() -> None:
        condition = {"opcode": ["SELECT_BUCKET", "GET_CLUSTER_CONFIG"]}
        cluster.set_faults(
            [{"condition": condition, "reaction": {"answer": {"status": "KEY_ENOENT"}}}]
        )
        cluster.restart(0)
        threading.Event().wait(reader.unknown)
        cluster.set_faults([])
        history.write(100, prefix="more")

    reader.follow(history, restart)


@dataclass(frozen=True)
class Scenario:
    """What is tried, and with which cluster."""

    name: str
    play: Callable[[History, Reader], None]
    cluster: dict[str, int]
    # Clients that lack the means, and why.
    lacking: dict[str, str]


PAIR = {"nodes": 2, "replicas": 1}
NO_ACKS = {
    "gocbcore": "acknowledges bytes and leaves the position to the program",
    "java-dcp-client": "acknowledges bytes and leaves the position to the program",
}
SCENARIOS = [
    Scenario("failover with a lost tail", lost_tail, PAIR, {}),
    Scenario("second rollback", second_rollback, {}, {}),
    Scenario("position equal to the high seqno on another branch", same_seqno, PAIR, {}),
    Scenario("checkpoint ahead", checkpoint_ahead, PAIR, {}),
    Scenario("tombstone with a body", tombstone_with_body, {}, {}),
    Scenario("acknowledgement out of order and a crash", unacknowledged, {}, NO_ACKS),
    Scenario("collection recreated", collection_recreated, {}, {}),
    Scenario("bucket recreated", bucket_recreated, {}, {}),
    Scenario("half-open link", half_open, {}, {}),
    Scenario("restart with KEY_ENOENT", unknown_bucket, {}, {}),
]
