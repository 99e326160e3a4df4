"""A process of `dcp-rs run`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

PASSWORD = "canary-8f1c2e"


class Service:
    """A process of `dcp-rs run --json`, and the lines that it has printed."""

    def __init__(self, path, cluster, **connection):
        self.path, self.lines = path, []
        login = {
            "connection_string": f"{cluster.connection_string}/travel",
            "username": "Administrator",
            "password": "${PASSWORD}",
        }
        self._login = {k: v for k, v in (login | connection).items() if v is not None}

    def write(self, more):
        values = {name: json.dumps(value, default=str) for name, value in self._login.items()}
        of_connection = "\n".join(f"{name} = {value}" for name, value in values.items())
        self.path.write_text(f"{more}\n[connection]\n{of_connection}\n")

    def start(self, *flags):
        command = [sys.executable, "-W", "ignore", "-m", "dcp_rs", "run", str(self.path)]
        self.process = subprocess.Popen(
            [*command, "--json", *flags], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PASSWORD": PASSWORD},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        self.lines.extend(map(json.loads, self.process.stderr))

    def __iter__(self):
        return iter(list(self.lines))

    def until(self, found, patience=30.0):
        """Waits for a line with something, and returns it."""
        end = time.monotonic() + patience
        while (line := next((each for each in self if found(each)), None)) is None:
            assert time.monotonic() < end, self.lines[-5:]
            assert self.process.poll() is None, self.lines[-5:]
            time.sleep(0.02)
        return line

    def has(self, changes):
        return self.until(
            lambda each: each.get("changes") == changes and each["phase"] == "following"
        )

    def reload(self, text, until=("reloaded", "reload_failed")):
        """Writes the file, has it read again, and returns what the log says about that."""
        self.write(text)
        self.lines.clear()
        self.process.send_signal(signal.SIGHUP)
        self.until(lambda each: each.get("event") in until)
        return {each["event"]: each for each in self if each.get("event")}

    def kill(self):
        self.process.kill()
        self._reader.join()
        self.process.communicate()
        self.lines.clear()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        self._reader.join()
        return status
