"""An embedded cluster and a client of it, for each test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_rs

# The modules of this folder are imported by name from its tests.
sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16) as running:
        yield running


@pytest.fixture
def client(cluster):
    with cluster.connect() as connected:
        yield connected


@pytest.fixture
def fill(cluster):
    """Writes `count` documents; gives their values by key."""

    def write(count, prefix="key", size=0):
        documents = {
            f"{prefix}_{n}": b'{"n":%d,"pad":"%s"}' % (n, b"x" * size) for n in range(count)
        }
        for key, value in documents.items():
            cluster.upsert(key, value)
        return documents

    return write


# A shell's background job, as CI can be, hands on that SIGINT is ignored.
_TAKES_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.fixture
def start_python():
    """Starts Python programs, given as text, and ends those that still run."""
    started = []

    def start(program, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", _TAKES_CTRL_C + program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore::RuntimeWarning"},
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
