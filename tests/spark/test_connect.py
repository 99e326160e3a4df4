"""Spark Connect: a server in a process of its own, and clients in others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import connect_server

pytest.importorskip("grpc")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

# All that can happen to a table takes a minute: tests/spark/versions.py asks for it.
TRIED = (
    "tell_apart",
    "refuse",
    "ask_again",
    *(["keep"] if os.environ.get("DCP_SPARK_ALL") else []),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with connect_server.started(folder) as address:
        yield address, folder


@pytest.mark.parametrize("name", TRIED)
def test_a_table_is_merged_into_over_connect(server, name):
    address, folder = server
    program = [sys.executable, "-W", "ignore", Path(__file__).with_name("connecting.py")]
    done = subprocess.run([*program, address, name], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:] + connect_server.log_of(folder)
