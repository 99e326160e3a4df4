"""A reader of a cluster that is written to and loses nodes: it stays whole and does not grow."""

import json
import os
import random
import time
from pathlib import Path

import dcp_rs

# Keeps the documents as the changes tell them; reads the rest once a line comes, and prints them.
_READER = """
import json, os, sys, threading, time
import dcp_rs

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def opened():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
documents, last, rollbacks, rows = {}, {}, 0, 0
settled, grown, most = None, 0, (0, 0)
begin, warm = time.monotonic(), float(sys.argv[2])

def take(batch):
    global rollbacks, rows
    for row in batch.rows():
        rows += 1
        vbucket, epoch = row["vbucket"], row["epoch"]
        if row["op"] == "rollback":
            rollbacks += 1
            for key in [key for key, (of, _) in documents.items() if of == vbucket]:
                del documents[key]
            last[vbucket] = epoch, 0
            continue
        assert (epoch, row["seqno"]) > last.get(vbucket, (0, 0)), f"doubled: {row}"
        last[vbucket] = epoch, row["seqno"]
        if row["op"] == "mutation":
            documents[row["key"]] = vbucket, row["value"].decode()
        else:
            documents.pop(row["key"], None)

policy = dcp_rs.BatchPolicy(linger=0.02, max_bytes=1 << 20)
options = {"on_rollback": "resync", "batch": policy}
checkpoint = "earliest"
with dcp_rs.connect(
    sys.argv[1], bucket="default", username="Administrator", password="canary-8f1c2e",
) as client:
    with client.stream(**options) as stream:
        for batch in stream:
            take(batch)
            checkpoint = batch.checkpoint
            if time.monotonic() - begin > warm:
                settled = settled or resident()
                grown = max(grown, resident() - settled)
                most = tuple(map(max, most, opened()))
            if told.is_set():
                break
    for batch in client.stream(start=checkpoint, until="now", **options):
        take(batch)
print(json.dumps({
    "documents": {key: value for key, (_, value) in documents.items()},
    "rows": rows, "rollbacks": rollbacks, "grown": grown, "most": most,
}))
"""


def _is_struck(cluster, chance):
    """Strikes the cluster with one of the things that happen to clusters."""
    node = chance.randrange(3)
    match chance.choice(["failover", "failover", "graceful", "kill", "restart", "rebalance"]):
        case "failover":
            for vbucket in range(64):
                if cluster.copies_of(vbucket)[0] == node:
                    cluster.set_replica_lag(vbucket, 1, None)
            yield
            cluster.failover(node)
            yield
            cluster.restart(node)
            cluster.rebalance()
        case "graceful":
            cluster.failover(node, graceful=True)
            yield
            cluster.restart(node)
            cluster.rebalance()
        case "kill":
            cluster.kill(node)
            yield
            cluster.restart(node)
        case "restart":
            cluster.restart(node)
        case "rebalance":
            cluster.rebalance()


def test_a_reader_stays_whole_and_does_not_grow(start_python):
    seconds = float(os.environ.get("DCP_SOAK_SECONDS", "10"))
    seed = int(os.environ.get("DCP_SOAK_SEED", "1"))
    chance, writes, strikes, written = random.Random(seed), 0, 0, set()
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, vbuckets=64, replicas=1, history_bytes=16 << 20
    ) as cluster:
        reader = start_python(_READER, cluster.connection_string, seconds / 5)

        def write():
            nonlocal writes
            for _ in range(40):
                key = f"key-{chance.randrange(2000)}"
                try:
                    if chance.random() < 0.1 and key in written:
                        cluster.remove(key)
                    else:
                        cluster.upsert(key, json.dumps({"n": writes, "pad": "x" * 400}))
                except dcp_rs.DcpError:
                    continue  # its node is away, or the failover took the document back
                written.add(key)
                writes += 1
            time.sleep(0.02)

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in _is_struck(cluster, chance):
                for _ in range(10):
                    write()
            strikes += 1
            for _ in range(20):
                write()
        reader.stdin.write("done\n")
        reader.stdin.flush()
        write()  # wakes the reader
        out, error = reader.communicate(timeout=120)
        assert reader.returncode == 0, f"seed {seed}: {error}"
        got = json.loads(out)
        kept = {key: cluster.get(key) for key in written}
    expected = {key: document.value.decode() for key, document in kept.items() if document}
    assert got.pop("documents") == expected, f"seed {seed}"
    assert got["rows"] >= len(expected)
    assert got["grown"] <= 16 << 20, got
    # 3 nodes of data and of questions, the runtime and Python's own.
    assert got["most"][0] <= 64, got
    assert got["most"][1] <= 32, got
    if "DCP_FIGURES" in os.environ:
        figures = {"seconds": seconds, "writes": writes, "strikes": strikes} | got
        with Path(os.environ["DCP_FIGURES"]).open("a") as file:
            file.write(json.dumps(figures) + "\n")
