"""A PostgreSQL server of a test's own, which can be stopped, held and started again."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path


class PostgresServer:
    """A server on a socket of its own. As root it runs as `nobody`: PostgreSQL does not as root."""

    def __init__(self):
        found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb"), shutil.which("initdb")]
        assert found != [None], "no PostgreSQL: scripts/require.sh postgres installs it"
        self._programs = Path(found[0]).resolve().parent
        # A short path that `nobody` can reach: that of a socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="dcp_rs-"))
        self.options = f"host={self.folder}&user=postgres"
        self._as_user = []
        if os.getuid() == 0:
            self.owns(self.folder)
            self._as_user = ["runuser", "-u", "nobody", "--"]
        self._run("initdb", "--username=postgres", "--auth=trust", "--no-sync")
        self.start()

    @staticmethod
    def owns(folder):
        """Gives a folder to the server."""
        if os.getuid() == 0:
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)

    def _run(self, program, *arguments):
        command = [*self._as_user, str(self._programs / program), "-D", str(self.folder / "data")]
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self):
        settings = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        self._run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", settings)

    def stop(self):
        """Stops it as a crash does."""
        self._run("pg_ctl", "stop", "-m", "immediate")

    def hold(self):
        """Has it do nothing, and keep its connections."""
        self._signal(signal.SIGSTOP)

    def let_go(self):
        self._signal(signal.SIGCONT)

    def _signal(self, number):
        main = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        for each in [main, *map(int, children)]:
            os.kill(each, number)

    def close(self):
        if (self.folder / "data" / "postmaster.pid").exists():
            self.let_go()
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
