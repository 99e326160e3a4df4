"""Replications that are killed again and again, while a cluster does what clusters do."""

import os
import random
import signal
import time

import pytest

import dcp_rs
import replicas
from trouble import COLLECTIONS, Trouble

_PROGRAM = """
import sys, threading
import dcp_rs
connection_string, url, mode, once, *share = sys.argv[1:]
with dcp_rs.connect(
    connection_string, bucket="default", username="Administrator", password="canary-8f1c2e"
) as client:
    print("ready", flush=True)
    dcp_rs.replicate(
        client, url, mode=mode, once=once == "once", commit_rows=50, commit_interval=0.02,
        share=share[0] if share else None)
"""


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=3, replicas=1, vbuckets=8) as running:
        running.create_scope("inventory")
        for name in COLLECTIONS[1:]:
            running.create_collection(name)
        yield running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", replicas.ALL + replicas.KAFKA)
def test_a_target_is_as_the_bucket_however_often_its_writer_is_killed(
    cluster, start_python, request, tmp_path, kind
):
    kills = int(os.environ.get("DCP_KILLS", "2"))
    seed = int(os.environ.get("DCP_KILLS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    replica = replicas.make(kind, request, tmp_path)
    with Trouble(cluster, seed) as trouble:
        for _ in range(kills):
            writer = start_python(
                _PROGRAM, cluster.connection_string, replica.url, replica.mode, ""
            )
            assert writer.stdout.readline(), f"seed {seed}: {writer.communicate()[1]}"
            time.sleep(chance.random() * 1.5)
            writer.send_signal(signal.SIGKILL)
            assert writer.wait(timeout=30) == -signal.SIGKILL, (
                f"seed {seed}: {writer.communicate()[1]}"
            )
    last = start_python(_PROGRAM, cluster.connection_string, replica.url, replica.mode, "once")
    _, error = last.communicate(timeout=120)
    assert last.returncode == 0, f"seed {seed}: {error}"
    assert replica.documents() == trouble.written.documents(), f"seed {seed}: {trouble.done}"
    assert replica.rejects() == trouble.written.rejects(), f"seed {seed}: {trouble.done}"
    assert trouble.written.documents(), "something is left to compare"


@pytest.mark.timeout(3600)
def test_a_table_is_as_the_bucket_however_often_the_writer_of_a_share_is_killed(
    cluster, start_python, request, tmp_path
):
    kills = int(os.environ.get("DCP_KILLS", "2"))
    seed = int(os.environ.get("DCP_KILLS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    replica = replicas.make("postgres-table", request, tmp_path)
    shares = ["1/3", "2/3", "3/3"]

    def start(share):
        return start_python(
            _PROGRAM, cluster.connection_string, replica.url, replica.mode, "", share
        )

    with Trouble(cluster, seed) as trouble:
        writers = {share: start(share) for share in shares}
        for writer in writers.values():
            assert writer.stdout.readline(), f"seed {seed}: {writer.communicate()[1]}"
        for _ in range(kills):
            time.sleep(chance.random() * 1.5)
            share = chance.choice(shares)
            writers[share].send_signal(signal.SIGKILL)
            assert writers[share].wait(timeout=30) == -signal.SIGKILL
            writers[share] = start(share)
            assert writers[share].stdout.readline(), f"seed {seed}"
        for writer in writers.values():
            assert writer.poll() is None, f"seed {seed}: {writer.communicate()[1]}"
    for writer in writers.values():
        writer.kill()
        writer.communicate()
    for share in shares:
        replicas.replicate(cluster, replica, share=share)
    assert replica.documents() == trouble.written.documents(), f"seed {seed}: {trouble.done}"
    assert replica.rejects() == trouble.written.rejects(), f"seed {seed}: {trouble.done}"
    assert trouble.written.documents(), "something is left to compare"
