"""Spark Connect: a server in a process of its own, and clients in others."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PATIENCE = 120
# All that can happen to a table takes a minute: tests/spark/versions.py asks for it.
TRIED = ("tell_apart", "refuse", *(["keep"] if os.environ.get("DCP_SPARK_ALL") else []))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    import pyspark

    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [*command, "spark-internal"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not listens(port):
            told = (folder / "log").read_text(errors="replace")
            assert running.poll() is None, told[-5000:]
            assert time.monotonic() < deadline, told[-5000:]
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}", folder
    finally:
        running.terminate()
        running.wait(PATIENCE)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("name", TRIED)
def test_a_table_is_merged_into_over_connect(server, name):
    address, folder = server
    program = [sys.executable, "-W", "ignore", Path(__file__).with_name("connecting.py")]
    done = subprocess.run([*program, address, name], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:] + (folder / "log").read_text()[-5000:]
