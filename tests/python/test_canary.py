"""A test that shows a password fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import base64, logging, pickle, subprocess, sys
import pytest
import dcp_rs
from canary import CANARY

def test_log():
    logging.getLogger("dcp_rs.consumer").debug("login with %s", list(CANARY.encode()))

def test_error():
    with pytest.raises(dcp_rs.exceptions.DcpError):
        raise dcp_rs.exceptions.ConfigError(base64.b64encode(f"user:{CANARY}".encode()).decode())

def test_failure():
    raise ValueError(CANARY)

def test_repr(monkeypatch):
    monkeypatch.setattr(dcp_rs.ConnectionOptions, "__repr__", lambda self: f"p={self.password}")
    dcp_rs.ConnectionOptions("couchbase://h", username="u", password=CANARY)

def test_pickle():
    pickle.dumps(dcp_rs.ConnectionOptions("couchbase://h", username="u", password=CANARY))

def test_output():
    print(CANARY.encode().hex())

def test_output_that_is_read(capsys):
    print(CANARY)
    assert capsys.readouterr().out

def test_output_of_a_process():
    subprocess.run([sys.executable, "-c", f"print({CANARY!r})"], capture_output=True)

def test_file(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "1").write_bytes(b"{" + CANARY.encode() + b"}")

@pytest.mark.shows_password("to see that it may")
def test_allowed(tmp_path):
    (tmp_path / "secret").write_text(CANARY)

def test_careful():
    print("password")
"""


@pytest.mark.shows_password("the tests that it runs do")
def test_a_test_fails_that_shows_a_password_in_any_way(tmp_path):
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "conftest.py").write_text("from canary import pytest_configure\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir",
            tmp_path, "--basetemp", tmp_path / "files", tmp_path / "test_leaks.py",
        ],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    passed = {"test_allowed", "test_careful"}
    names = re.findall(r"def (test_\w+)", LEAKS)
    # What is in a file is seen once the test is over.
    expected = {(("PASSED" if name in passed else "FAILED"), name) for name in names}
    expected |= {("PASSED", "test_file"), ("ERROR", "test_file")}
    assert set(outcomes) == expected - {("FAILED", "test_file")}, done.stdout + done.stderr
