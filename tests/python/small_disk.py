"""A small file system, which a test fills."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path


class Disk:
    """A file system in memory."""

    def __init__(self, folder, size):
        self.folder, self._filler = folder, folder / "filler"
        options = f"size={size},mode=777"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            check=True, capture_output=True,
        )  # fmt: skip

    def fill(self):
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def make_room(self):
        self._filler.unlink()

    def close(self):
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


def can_mount():
    """Whether a file system can be mounted, as an administrator of the machine can."""
    with tempfile.TemporaryDirectory() as folder, mounted(Path(folder), 1 << 20) as disk:
        return disk is not None


@contextlib.contextmanager
def mounted(folder, size):
    """Mounts one; gives nothing where only an administrator of the machine could."""
    folder.mkdir(exist_ok=True)
    disk = None
    with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
        disk = None if os.getuid() else Disk(folder, size)
    try:
        yield disk
    finally:
        if disk is not None:
            disk.close()
