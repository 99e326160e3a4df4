"""Planning while other threads of the engine log."""

import subprocess
import sys

import pytest

from dcp_rs import planner
from dcp_rs.exceptions import CheckpointError, ConfigError

PROGRAM = """
import logging, threading, time
import dcp_rs
from dcp_rs.planner import Planner, PlanOptions

logging.basicConfig(level=logging.WARNING, handlers=[logging.NullHandler()])
logging.getLogger("dcp_rs").setLevel(logging.DEBUG)
stop = time.monotonic() + 3
with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16) as cluster, cluster.connect() as client:
    for n in range(50):
        cluster.upsert(f"key_{n}", b"{}")
    with client.stream() as stream:
        next(stream)
        planner, options = Planner(client), PlanOptions(persisted_only=False)

        def move():
            n = 0
            while time.monotonic() < stop:
                cluster.move_vbucket(0, n % 2)
                n += 1
                time.sleep(0.002)

        mover = threading.Thread(target=move)
        mover.start()
        start = planner.earliest()
        end = planner.end(start, options)
        while time.monotonic() < stop:
            assert planner.partitions(start, end, options, count=4)
        mover.join()
"""


def test_offsets_that_are_nested_too_deeply_are_damaged():
    nested = "[" * 100_000
    assert not planner.is_offsets(nested)
    with pytest.raises(CheckpointError, match="the offsets are damaged") as raised:
        planner.parse_offsets(nested)
    assert raised.value.code == "offsets"


def test_planning_and_logging_do_not_wait_for_each_other():
    # In a process of its own: what stands still holds the interpreter.
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_text_is_no_list_of_vbuckets(client):
    with pytest.raises(ConfigError, match=r"such as range\(64\), or a Share, not str"):
        planner.Planner(client, "0-3")
