"""The commands of the pages: consoles run in a terminal as they are printed, scripts are parsed.

A console block has lines that begin with `$ `, and below each what it prints. Names of hosts,
ports, identities and times differ from run to run and are masked on both sides, and so is the
order of lines, as there is none between vBuckets.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT

from dcp_rs.cli._program import _program
from dcp_rs.testing import EmbeddedCluster

PAGE = ROOT / "docs" / "guides" / "command-line.md"
WIDTH = 100

MASKED = [
    (r"\x1b\[[0-9;?]*[A-Za-z]", ""),  # colours, and progress that is drawn over
    (r"(127\.0\.0\.1|localhost)(:\d+)?(, ::1|, 127\.0\.0\.1)*", "HOST"),
    (r"\b[0-9a-f]{32}\b", "UUID"),
    (r"0x[0-9a-f]{9,12}\b", "VBUUID"),
    (r'"(cas|pid|elapsed|writes_per_second)": [0-9.]+', r'"\1": N'),
    (r"(?m)^(cas|timestamp|vbuuid) .*$", r"\1 N"),
    (r'"timestamp": "[^"]+"', '"timestamp": TIME'),
    (r"\d+(\.\d+)? (ms|s)\b|[\d,]+/s", "TIME"),
    (r"[ \t]+", " "),
]


def masked(text):
    for pattern, mask in MASKED:
        text = re.sub(pattern, mask, text)
    # Of a line of progress the last state stays.
    lines = [line.rpartition("\r")[2].strip() for line in text.replace("\r\n", "\n").split("\n")]
    return sorted(line for line in lines if line)


def consoles(text):
    """The commands of a page and what it shows below each."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append((command, shown))
    return found


def run(command, folder, environment):
    """Runs a command in a terminal and gives what it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    shell = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    # The other end of a terminal that nobody has open any more is an error.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65_536):
            shown += data
    os.close(ours)
    return shown.decode(), shell.wait(30)


@pytest.fixture
def cluster():
    """The cluster that the page speaks of: two nodes and a few documents."""
    with EmbeddedCluster(bucket="travel", nodes=2, vbuckets=8) as cluster:
        cluster.create_scope("inventory")
        cluster.create_collection("inventory.airline")
        cluster.create_collection("inventory.route")
        for key, name, country in [
            ("airline_10", "40-Mile Air", "US"),
            ("airline_11", "Texas Wings", "US"),
            ("airline_12", "Q5", "US"),
            ("airline_13", "Jc royal.britannica", "GB"),
            ("airline_14", "Locair", "US"),
        ]:
            document = {"name": name, "country": country}
            cluster.upsert(key, document, collection="inventory.airline")
        cluster.remove("airline_12", collection="inventory.airline")
        cluster.upsert("photo", b"\x89PNG\r\n", collection="inventory.route")
        yield cluster


def test_the_consoles_of_the_page_show_what_is_printed(cluster, tmp_path):
    environment = os.environ | {
        "DCP_RS_PASSWORD": "password",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "xterm",
    }
    commands = consoles(PAGE.read_text())
    assert len(commands) >= 15
    seed = cluster.connection_string.partition(",")[0].replace("127.0.0.1", "localhost")
    address = f"{seed}/travel --username Administrator"
    status = 0
    for command, shown in commands:
        prepare(cluster, command, lambda line: run(line, tmp_path, environment), address)
        line = command.replace("couchbase://localhost/travel", address)
        line = line.replace("/data/", f"{tmp_path}/").replace("$?", str(status))
        if command.startswith("dcp-rs serve"):
            line = f"timeout --foreground -s INT 3 {line}"
        deadline = time.monotonic() + 30
        output, status = run(line, tmp_path, environment)
        while "top" in command and masked(output) != masked(shown) and time.monotonic() < deadline:
            # On a slow machine its first second may be over before every stream is open.
            output, status = run(line, tmp_path, environment)
        if command.startswith("dcp-rs serve") or " -n 3 " in command:
            # Which change comes first, and a new cluster's facts, are not known before.
            assert masked(members(output)) == masked(members(shown)), f"$ {command}\n{output}"
        else:
            assert masked(output) == masked(shown), f"$ {command}\n{output}"


def prepare(cluster, command, run, address):
    """Does what the text around a console tells of."""
    if command.startswith("dcp-rs doctor"):
        cluster.kill(1)
    elif command.startswith("dcp-rs seqnos"):
        # A reader that keeps its positions, and a change that it has not read.
        assert run(f"dcp-rs cat {address} --checkpoint positions.json")[1] == 0
    elif command.startswith("dcp-rs lag") and cluster.high_seqnos()[4] == 4:
        cluster.upsert("airline_14", {"name": "Locair"}, collection="inventory.airline")


def members(text):
    """The lines of a console, with only the names of what JSON has."""
    lines = text.replace("\r", "").splitlines()
    return "\n".join(
        f"{sorted(json.loads(line))}" if line.startswith("{") else line for line in lines
    )


def test_a_console_that_shows_something_else_is_noticed(tmp_path):
    ((command, shown),) = consoles("```console\n$ echo one\ntwo\n```\n")
    output, status = run(command, tmp_path, os.environ)
    assert (output, status) == ("one\r\n", 0)
    assert masked(output) == ["one"]
    assert masked(output) != masked(shown)


def scripts():
    """Every use of the command in the pages' scripts, as words."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                shlex.split(re.sub(r" (>>?|&|\|).*", "", line), comments=True)
                for line in lines
                if line.startswith("dcp-rs ")
            ]
    return found


@pytest.mark.parametrize("words", scripts(), ids=" ".join)
def test_the_commands_of_scripts_have_options_that_there_are(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.toml").write_text('target = "duckdb:///lake.duckdb"')
    name, *arguments = words[1:]
    _program.commands[name].make_context(name, arguments)


def test_scripts_were_found():
    assert {name for _, name, *_ in scripts()} >= {"replicate", "export", "tail", "serve"}
