"""A Spark Connect server in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from standalone import QUICK

PATIENCE = 120
SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
}


@contextmanager
def started(folder, **more):
    """Runs a server, with its log in a folder; gives its address."""
    import pyspark

    folder = Path(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = SETTINGS | {"spark.connect.grpc.binding.port": port} | more
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with (folder / "log").open("ab") as log:
        running = subprocess.Popen(
            [*command, "spark-internal"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not _listens(port):
            told = log_of(folder)
            assert running.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(PATIENCE)


def log_of(folder):
    """What a server has logged last."""
    return (Path(folder) / "log").read_text(errors="replace")[-5000:]


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
