"""A program in a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

# What the terminal is told beside text: colours, places, modes.
_CONTROLS = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][0-9A-B])")

# Takes the terminal as its own, so that Ctrl-C in it is a signal, and is `dcp-rs` then.
_PROGRAM = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from dcp_rs.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """`dcp-rs` in a terminal of so many lines and columns."""

    def __init__(self, *arguments, lines=40, columns=100, **variables):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes = termios.tcgetattr(theirs)
        inherited = {
            name: value for name, value in os.environ.items()
            if name not in {"COLUMNS", "LINES", "NO_COLOR", "DCP_RS_PASSWORD"}
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, *map(str, arguments)],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=inherited | {"TERM": "xterm-256color"} | variables,
        )  # fmt: skip
        # Kept open: its modes are looked at when the program has ended.
        self._theirs = theirs
        self._seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)

    @property
    def text(self):
        """What was shown until now, without colours."""
        return _CONTROLS.sub("", self._seen.decode("utf-8", "replace"))

    @property
    def raw(self):
        return self._seen

    def _read(self, seconds):
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            self._seen += os.read(self._ours, 65536)
        return bool(ready)

    def wait_for(self, pattern, patience=20):
        """Waits until something is shown; gives the match."""
        end = time.monotonic() + patience
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, self.text
            self._read(0.1)
        return found

    def press(self, keys):
        os.write(self._ours, keys)

    def end(self, patience=20):
        """Waits until the program has ended; gives its exit status."""
        end = time.monotonic() + patience
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def modes_now(self):
        return termios.tcgetattr(self._theirs)
