"""Fails a test that shows a password: in a log, an error, a repr, a pickle, its output or a file.

The passwords of `tests/python` and `tests/spark` contain `CANARY`. Whatever a test gives away is
searched for it, as text, in hexadecimal, in base64 and as a list of bytes. A test that writes a
password on purpose has the mark `shows_password(reason)`.
"""

import base64
import functools
import logging
import pickle
import re
import subprocess
from pathlib import Path

import pytest
from _pytest.capture import CaptureFixture

import dcp_rs

CANARY = "canary-8f1c2e"

# Below any level: all that the engine can log.
_EVERYTHING = 1
# Of a larger file, such as a core dump, the rest is not read.
_MOST_BYTES = 64 << 20


def forms(secret):
    """Yields how bytes may be written, with whatever bytes before and after them."""
    yield secret
    for text in (secret.hex(), secret.hex().upper(), secret.hex(" "), secret.hex(",")):
        yield text.encode()
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + secret)
        # The first and the last digits are those of the neighbours, too.
        end = (before + len(secret)) * 8 // 6
        yield encoded[(before * 8 + 5) // 6 : end]
    yield ", ".join(map(str, secret)).encode()
    yield ", ".join(f"{byte:x}" for byte in secret).encode()


_SHOWN = re.compile(b"|".join(re.escape(form) for form in forms(CANARY.encode())))


def shows(said):
    """Returns what surrounds a password in text or bytes; `None` if there is none."""
    if isinstance(said, str):
        said = said.encode("utf-8", "surrogateescape")
    found = _SHOWN.search(said)
    if found is None:
        return None
    start, end = max(found.start() - 200, 0), found.end() + 100
    return said[start:end].decode("utf-8", "replace")


class Canary(logging.Handler):
    """What pytest calls, and where log records arrive."""

    def __init__(self):
        super().__init__(level=_EVERYTHING)
        self.leaks = []
        self.searched = dict.fromkeys(("log", "error", "repr", "pickle", "output", "file"), 0)
        self._is_allowed = False
        self._has_default = False
        self._searched = set()

    def search(self, where, *said):
        """Notes what shows a password."""
        for each in said:
            self.searched[where] += 1
            found = None if self._is_allowed or not each else shows(each)
            if found is not None:
                self.leaks.append(f"{where}: {found}")

    def emit(self, record):
        self.search("log", f"{record.getMessage()} {record.__dict__}")

    def search_files(self, folder):
        for path in Path(folder).rglob("*"):
            is_new = self._searched.isdisjoint(path.parents)
            if is_new and path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    self.searched["file"] += 1
                    found = None if self._is_allowed else shows(file.read(_MOST_BYTES))
                    if found is not None:
                        self.leaks.append(f"file {path}: {found}")

    # Where things are shown.

    def after(self, owner, name, search):
        """Has `search(result, *arguments)` see each call of a function."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def called(*arguments, **options):
            result = call(*arguments, **options)
            search(result, *arguments)
            return result

        setattr(owner, name, called)

    def start_cluster(self, start):
        """Gives clusters a password of which no text is a part by chance."""

        @functools.wraps(start)
        def started(cluster, **given):
            default = {"password": CANARY} if self._has_default else {}
            start(cluster, **default | given)

        return started

    def watch(self):
        cluster = dcp_rs.testing.EmbeddedCluster
        cluster.__init__ = self.start_cluster(cluster.__init__)
        for owner in (
            dcp_rs.ConnectionOptions, dcp_rs.Client, dcp_rs.AsyncClient,
            dcp_rs.testing.EmbeddedCluster, dcp_rs.testing.User,
        ):  # fmt: skip
            self.after(owner, "__init__", lambda _, made, *__: self.search("repr", repr(made)))
        for owner in (dcp_rs.Client, dcp_rs.AsyncClient):
            self.after(owner, "stream", lambda made, *_: self.search("repr", repr(made)))
        self.after(
            dcp_rs.exceptions.DcpError,
            "__init__",
            lambda _, error, *__: self.search("error", f"{error} {error!r} {vars(error)}"),
        )
        self.after(pickle, "dumps", lambda made, *_: self.search("pickle", made))
        self.after(subprocess.Popen, "communicate", lambda said, *_: self.search("output", *said))
        self.after(CaptureFixture, "readouterr", lambda said, *_: self.search("output", *said))
        for name in (None, "dcp_rs"):
            logging.getLogger(name).addHandler(self)

    # When.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._is_allowed = item.get_closest_marker("shows_password") is not None
        # Programs of the documentation and of others have the password that the guides name.
        is_ours = item.path.parent.name in {"python", "spark"}
        self._has_default = is_ours and item.get_closest_marker("default_password") is None
        logging.getLogger("dcp_rs").setLevel(_EVERYTHING)
        result = yield
        self._is_allowed = False
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        folder = item.funcargs.get("tmp_path") if hasattr(item, "funcargs") else None
        if folder is not None:
            self.search_files(folder)
            self._searched.add(folder)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        self.search("error", report.longreprtext)
        self.search("output", *(said for _, said in report.sections))
        if self.leaks:
            report.outcome = "failed"
            report.longrepr = "\n\n".join(["a password is shown", *self.leaks])
            # Each leak fails a test once.
            report.sections = []
            item._report_sections.clear()
            self.leaks.clear()
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        factory = session.config._tmp_path_factory
        if factory._basetemp is not None:
            self.search_files(factory._basetemp)
        if self.leaks:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        counts = ", ".join(f"{count} {where}" for where, count in self.searched.items())
        terminalreporter.write_line(f"searched for passwords: {counts}")
        for leak in self.leaks:
            terminalreporter.write_line(f"a password is shown: {leak}", red=True)


def pytest_configure(config):
    config.addinivalue_line("markers", "shows_password(reason): writes a password on purpose")
    config.addinivalue_line(
        "markers",
        "default_password: has clusters with the password of the guides, which is not searched for",
    )
    canary = Canary()
    canary.watch()
    config.pluginmanager.register(canary, "canary watch")
