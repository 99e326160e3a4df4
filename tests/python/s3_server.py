"""An S3 server for tests: moto, or the one that `make long` tries in its place."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stores

_MOTO = "import sys; from moto.server import main; main(sys.argv[1:])"
# By `make long`, which builds it.
_VERSITYGW = Path(__file__).parents[2] / ".state" / "tools" / "bin" / "versitygw"


def free_port():
    """Gives a port that nothing listens at."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


class Server:
    """A server in a process of its own.

    Args:
        port: Where it listens.
        command: Its program and arguments.
        environment: Further variables of its environment.
        folder: A folder of its own, which is removed in the end.
    """

    def __init__(self, port, command, environment=None, folder=None):
        self.address = f"http://127.0.0.1:{port}"
        # Not among what is searched for passwords.
        self._folder = folder or Path(tempfile.mkdtemp(prefix="dcp_rs-"))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | (environment or {}), stdout=log, stderr=log
            )
        self._wait(port)

    def _wait(self, port):
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < end, "the server does not listen"
                time.sleep(0.05)
            else:
                return

    def close(self):
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class S3Server(Server):
    """moto; versitygw, which looks at signatures, if `DCP_S3` says so.

    `make long` builds that.
    """

    def __init__(self):
        port, folder = free_port(), Path(tempfile.mkdtemp(prefix="dcp_rs-"))
        command, environment = self._moto(port), {}
        if os.environ.get("DCP_S3") == "versitygw":
            command = [_VERSITYGW, "--port", f"127.0.0.1:{port}", "posix", folder / "data"]
            environment = {"ROOT_ACCESS_KEY": "test", "ROOT_SECRET_KEY": stores.SECRET}
            (folder / "data").mkdir()
        super().__init__(port, command, environment, folder)

    @staticmethod
    def _moto(port):
        return [sys.executable, "-W", "ignore", "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]
