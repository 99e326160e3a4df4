"""The page that begins with nothing and ends with a dashboard: its commands and files are tried."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT
from test_alarms import PROMTOOL

PAGE = (ROOT / "docs" / "guides" / "dashboard.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_its_commands_show_what_is_printed(tmp_path):
    begin, run, _ = blocks("sh")
    (pipeline,), (shown,) = blocks("toml"), blocks("text")
    # Without the installation, and with a moment for the cluster to begin.
    script = begin.partition("\n")[2].replace("&\n", "&\nsleep 3\n") + run
    script = script.replace("python examples", f"{sys.executable} {ROOT}/examples")
    for port in ("11210", "9108"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            other = str(free.getsockname()[1])
        assert port in script
        pipeline, script = pipeline.replace(port, other), script.replace(port, other)
    (tmp_path / "pipeline.toml").write_text(pipeline)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "shown").open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-ec", script], cwd=tmp_path, stdout=file, stderr=file,
            env=os.environ | {"PATH": path}, start_new_session=True,
        )  # fmt: skip
    try:
        status = shell.wait(60)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    found = (tmp_path / "shown").read_text()
    assert status == 0, found
    assert shown in found


def test_prometheus_takes_its_configuration(tmp_path):
    if PROMTOOL is None:
        pytest.skip("promtool is not installed")
    (configuration,) = blocks("yaml")
    (tmp_path / "prometheus.yml").write_text(configuration)
    shutil.copy(ROOT / "deploy/prometheus/dcp_rs.rules.yml", tmp_path)
    done = subprocess.run(
        [PROMTOOL, "check", "config", "prometheus.yml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_picture_is_small():
    assert (ROOT / "docs" / "dashboard.svg").stat().st_size < 100_000
