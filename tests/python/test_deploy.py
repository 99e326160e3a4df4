"""The files of deploy/, and what a service tells systemd."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from dcp_rs._listener import Answer, Listener
from dcp_rs.cli import _pipeline
from dcp_rs.cli._systemd import Systemd
from lag import until

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd/dcp-rs.service"


@pytest.fixture
def systemd(tmp_path):
    """A socket in place of systemd's; gives what it was told."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.setblocking(False)
        told = []

        def lines():
            with contextlib.suppress(BlockingIOError):
                while True:
                    told.extend(listening.recv(4096).decode().splitlines())
            return told

        lines.path = path
        yield lines


def test_a_service_says_that_it_is_ready_lives_and_stops(cluster, systemd, tmp_path):
    cluster.upsert("key", {})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = cluster.connection_options
    process = subprocess.Popen(
        [
            sys.executable, "-W", "ignore", "-m", "dcp_rs", "replicate", cluster.connection_string,
            f"duckdb://{tmp_path}/d.duckdb", "--bucket", "default", "--username",
            options.username, "--listen", f"127.0.0.1:{port}", "--hung-after", "2",
        ],
        env=os.environ
        | {"DCP_RS_PASSWORD": options.password, "NOTIFY_SOCKET": str(systemd.path)}
        | {"WATCHDOG_USEC": "600000"},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: {"READY=1", "WATCHDOG=1"} <= set(systemd()), 60)
        until(lambda: "STATUS=following, 1 changes, lag 0 s" in systemd())
        assert systemd().index("READY=1") == 0 or systemd()[0] == "WATCHDOG=1"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "STOPPING=1" in systemd()
        assert systemd().count("READY=1") == 1
    finally:
        process.kill()
        process.wait()


def test_the_watchdog_hears_nothing_while_livez_fails(systemd, monkeypatch):
    status = [HTTPStatus.OK]
    monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    with contextlib.closing(Listener("0", lambda _: Answer(status[0], b""))) as listener:
        with Systemd(listener.url.removeprefix("http://")):
            until(lambda: systemd().count("WATCHDOG=1") > 2)
            status[0] = HTTPStatus.SERVICE_UNAVAILABLE
            # One may be on its way.
            time.sleep(0.2)
            count = len(systemd())
            time.sleep(0.3)
            assert len(systemd()) == count
            status[0] = HTTPStatus.OK
            until(lambda: len(systemd()) > count)
        monkeypatch.setenv("WATCHDOG_PID", "1")
        assert Systemd(listener.url.removeprefix("http://"))._pace is None, "another process's"


def test_the_unit_is_valid_and_exposes_little(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/dcp-rs/bin/dcp-rs", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60
    )
    about_it = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about_it) == (0, []), done.stderr
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_manifest_has_one_writer_with_few_rights():
    (manifest,) = yaml.safe_load_all((DEPLOY / "kubernetes/deployment.yaml").read_text())
    spec = manifest["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    named = kustomization["resources"] + kustomization["configMapGenerator"][0]["files"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in named)
    (volume,) = [each for each in pod["volumes"] if each["name"] == "pipeline"]
    assert volume["configMap"]["name"] == kustomization["configMapGenerator"][0]["name"]
    assert kustomization["images"][0]["name"] == container["image"]


@pytest.mark.parametrize(
    "path", [*DEPLOY.glob("*/pipeline.toml")], ids=lambda path: path.parent.name
)
def test_the_pipelines_are_such(path, tmp_path, monkeypatch):
    (tmp_path / "password").write_text("secret")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    here = tmp_path / "pipeline.toml"
    secrets = "/etc/dcp-rs-secrets/password"
    here.write_text(path.read_text().replace(secrets, str(tmp_path / "password")))
    given = _pipeline.given_in(here)
    assert given["listen"].endswith(":9108")
    assert (given["log_format"], given["connection"].bucket) == ("json", None)


def test_the_files_agree_on_the_command_the_port_and_the_user():
    containerfile = (DEPLOY / "Containerfile").read_text()
    (command,) = re.findall(r"^CMD (.*)$", containerfile, re.MULTILINE)
    assert json.loads(command) == ["run", "/etc/dcp-rs/pipeline.toml"]
    assert "dcp-rs run /etc/dcp-rs/pipeline.toml" in UNIT.read_text()
    assert "USER 10001:10001" in containerfile
    (manifest,) = yaml.safe_load_all((DEPLOY / "kubernetes/deployment.yaml").read_text())
    assert manifest["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 10001
    extras = re.findall(r"^ARG EXTRAS=(.*)$", containerfile, re.MULTILINE)[0].split(",")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
