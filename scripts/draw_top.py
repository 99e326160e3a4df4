"""Draws docs/top.svg: the output of `dcp-rs top` for an embedded cluster under load.

Usage: scripts/draw_top.py
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console

import dcp_rs
from dcp_rs.cli._top import Monitor, Sample, live_picture

_TARGET = Path(__file__).resolve().parent.parent / "docs" / "top.svg"
_SAMPLES = 45
_INTERVAL = 0.2


def main() -> None:
    """Writes to a cluster, reads it while moving vBuckets, and draws the last sample."""
    with dcp_rs.testing.EmbeddedCluster(
        nodes=3, vbuckets=1024, replicas=1, bucket="travel"
    ) as cluster:
        over = threading.Event()
        writer = threading.Thread(target=_write, args=(cluster, over))
        writer.start()
        try:
            sample = _watch(cluster)
        finally:
            over.set()
            writer.join()
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    console.print(live_picture(sample))
    console.save_svg(
        str(_TARGET), title="dcp-rs top couchbase://127.0.0.1/travel --checkpoint positions.json"
    )


def _write(cluster: dcp_rs.testing.EmbeddedCluster, over: threading.Event) -> None:
    n = 0
    while not over.is_set():
        # The load varies as over a day.
        burst = 200 + 150 * ((n // 2000) % 4)
        for _ in range(burst):
            cluster.upsert(f"airline_{n % 20_000}", {"n": n})
            n += 1
        time.sleep(0.05)


def _watch(cluster: dcp_rs.testing.EmbeddedCluster) -> Sample:
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.connect() as client,
        client.stream(start="latest", columns=["seqno"]) as stream,
    ):
        # The reader whose lag is shown; it saves its positions from time to time.
        store = dcp_rs.FileStore(f"{folder}/positions.json")
        store.save(stream.checkpoint())
        reader = threading.Thread(target=_read, args=(stream, store))
        reader.start()
        monitor = Monitor(client, stream, lambda: dcp_rs.Checkpoint.load(store.path).seqnos)
        for at in range(_SAMPLES):
            time.sleep(_INTERVAL)
            sample = monitor.sample()
            if at == _SAMPLES - 8:
                for vbucket in (7, 8):
                    cluster.move_vbucket(vbucket, 2)
        stream.close()
        reader.join()
    return sample


def _read(stream: dcp_rs.ChangeStream, store: dcp_rs.FileStore) -> None:
    due = time.monotonic()
    for batch in stream:
        if time.monotonic() >= due:
            store.save(batch.checkpoint)
            due += 1.0


if __name__ == "__main__":
    main()
