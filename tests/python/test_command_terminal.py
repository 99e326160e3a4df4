"""`dcp-rs` in a terminal, at the end of a pipe, and without its extra."""

import os
import signal
import subprocess
import sys

import pytest

import dcp_rs
from terminal import Terminal

USER = ("--username", "Administrator")


@pytest.fixture
def address(cluster):
    return f"{cluster.connection_string.split(',')[0]}/default"


def test_a_terminal_gets_a_table_that_fits_and_that_documents_cannot_disturb(cluster, address):
    cluster.upsert("long", b'{"text":"' + b"x" * 500 + b'"}')
    cluster.upsert("\x1b[2Jclears", b"\xff\x1b]0;title\x07\r\n")
    with Terminal("cat", address, *USER, columns=90, DCP_RS_PASSWORD="canary-8f1c2e") as terminal:
        assert terminal.end() == 0
        heading, *rows = terminal.text.splitlines()
        raw = terminal.raw
    assert heading.split() == ["VBUCKET", "SEQNO", "OP", "SCOPE", "COLLECTION", "KEY", "VALUE"]
    assert len(rows) == 2
    assert max(map(len, [heading, *rows])) <= 90
    assert b"\x1b" not in raw
    assert b"\x07" not in raw
    (cut,) = [row for row in rows if " long " in row]
    assert cut.endswith("x…")
    (clears,) = [row for row in rows if "clears" in row]
    assert r"\x1b[2Jclears" in clears
    assert r"\xff\x1b" in clears


def test_a_bucket_without_changes_says_so_in_a_terminal(address):
    with Terminal("cat", address, *USER, DCP_RS_PASSWORD="canary-8f1c2e") as terminal:
        assert terminal.end() == 0
        assert terminal.text.splitlines() == ["dcp-rs: 0 changes"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dcp_rs", "cat", address, *USER],
        env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_password_is_asked_for_and_not_shown(cluster, address):
    cluster.upsert("a", b"1")
    with Terminal("cat", address, *USER, "-f", "%k=%s\n") as terminal:
        terminal.wait_for("Password: ")
        terminal.press(b"canary-8f1c2e\n")
        assert terminal.end() == 0
        assert terminal.text.splitlines()[-1] == "a=1"
        assert "canary-8f1c2e" not in terminal.text
        assert terminal.modes_now() == terminal.modes


def test_tail_follows_until_ctrl_c(cluster, address):
    cluster.upsert("before", b"1")
    with Terminal(
        "tail", address, *USER, "-f", "%k\n", DCP_RS_PASSWORD="canary-8f1c2e"
    ) as terminal:
        # There is no sign that it has begun but what comes.
        for n in range(100):
            cluster.upsert(f"key_{n}", b"1")
            if "key_" in terminal.text:
                break
            terminal._read(0.1)
        terminal.wait_for("key_")
        terminal.press(b"\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
        assert "before" not in terminal.text


def test_top_shows_what_goes_on_until_q(cluster, address):
    arguments = ("top", address, *USER, "--interval", "0.3")
    with Terminal(*arguments, DCP_RS_PASSWORD="canary-8f1c2e") as terminal:
        terminal.wait_for("q quits")
        terminal.wait_for("16 streaming")
        written = 0
        for n in range(200):
            cluster.upsert(f"key_{n}", b"{}")
            written += 1
            terminal._read(0.01)
        # A change of a later picture may be drawn alone: everything is looked for at any time.
        assert int(terminal.wait_for(r"written ([1-9][\d,]*)/s")[1].replace(",", "")) > 0
        terminal.wait_for(rf"changes {written}\b")
        for node in cluster.connection_string.removeprefix("couchbase://").split(","):
            assert terminal.wait_for(rf"{node} +8 +8 streaming")
        terminal.press(b"q")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
        # The screen that was there before is there again, and keys are shown.
        assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")
        assert terminal.modes_now() == terminal.modes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_leaves_the_terminal_as_it_was_when_a_signal_ends_it(address, number):
    with Terminal("top", address, *USER, DCP_RS_PASSWORD="canary-8f1c2e") as terminal:
        terminal.wait_for("16 streaming")
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number
        assert "Traceback" not in terminal.text
        assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")
        assert terminal.modes_now() == terminal.modes


def test_top_ends_with_the_error_of_its_stream(cluster, address):
    arguments = ("top", address, *USER, "--retry-timeout", "0.2")
    with Terminal(*arguments, DCP_RS_PASSWORD="canary-8f1c2e") as terminal:
        terminal.wait_for("16 streaming")
        cluster.drop_bucket()
        assert terminal.end() == 1
        assert terminal.text.splitlines()[-1].startswith("dcp-rs: ")
        assert terminal.modes_now() == terminal.modes


@pytest.mark.parametrize(
    "command",
    ["seqnos {} --json", "seqnos {} --output table", "cat {} --json", "export {} - --format csv"],
)
def test_a_closed_pipe_ends_a_command_quietly(address, fill, command):
    fill(2000, size=200)
    words = command.format(f"{address} --username Administrator")
    # The reader is gone before the first line is written.
    done = subprocess.run(
        f"{sys.executable} -W ignore -m dcp_rs {words} 2> >(cat >&2) | true;"
        " echo ${PIPESTATUS[0]}",
        shell=True, executable="/bin/bash", capture_output=True, timeout=60, text=True,
        env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"},
    )  # fmt: skip
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.parametrize("errors", ["2>&1 | true", "2>/dev/full"])
def test_progress_that_no_one_reads_ends_no_export(address, fill, tmp_path, errors):
    fill(3)
    done = subprocess.run(
        f"{sys.executable} -W ignore -m dcp_rs export {address} --username Administrator"
        f" changes.jsonl {errors}; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, timeout=60, text=True,
        cwd=tmp_path, env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "changes.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("cat {} --checkpoint kept >&-", 1),
        ("cat {} --checkpoint kept --output table >&-", 1),
        ("export {} changes.jsonl >&-", 0),
        ("export {} changes.jsonl 2>&-", 0),
        ("export {} changes.jsonl >&- 2>&-", 0),
        ("cat {} 2>&-", 0),
    ],
)
def test_a_closed_standard_stream_ends_only_what_writes_to_it(
    address, fill, tmp_path, command, status
):
    fill(3)
    words = command.format(f"{address} --username Administrator")
    done = subprocess.run(
        f"{sys.executable} -W ignore -m dcp_rs {words}",
        shell=True, executable="/bin/bash", capture_output=True, timeout=60, text=True,
        cwd=tmp_path, env=os.environ | {"DCP_RS_PASSWORD": "canary-8f1c2e"},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "kept").exists()
    for file in tmp_path.iterdir():
        if file.name == "changes.jsonl":
            assert len(file.read_text().splitlines()) == 3
    if command.startswith("cat {} 2"):
        assert len(done.stdout.splitlines()) == 3


def run_python(program, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True, timeout=60, text=True, env=os.environ | variables,
    )  # fmt: skip


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_extra_the_command_says_what_to_install(missing):
    program = f"""
import sys
sys.modules["{missing}"] = None
from dcp_rs.cli import main
sys.exit(main(["--version"]))
"""
    done = run_python(program)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dcp-rs: the command line needs {missing}: ")
    assert line.endswith('pip install "dcp-rs[cli]"')


def test_ctrl_c_while_it_is_imported_ends_quietly(tmp_path):
    (tmp_path / "click.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(tmp_path)!r})
from dcp_rs.cli import main
sys.exit(main(["--version"]))
"""
    done = run_python(program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_package_needs_nothing_of_the_extra():
    done = run_python("import dcp_rs, sys; print({'click', 'rich', 'pyarrow'} & set(sys.modules))")
    assert done.stdout == "set()\n"


def test_completion_knows_commands_and_options():
    program = "import sys; from dcp_rs.cli import main; sys.exit(main())"

    def completed(*words):
        done = run_python(
            program,
            _DCP_RS_COMPLETE="bash_complete",
            COMP_WORDS=" ".join(words),
            COMP_CWORD=str(len(words) - 1),
        )
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("dcp-rs", "ex") == {"export", "explain-rollback"}
    assert "--document-schema" in completed("dcp-rs", "cat", "--doc")
    assert {"emit", "fail", "resync"} == completed("dcp-rs", "cat", "--on-rollback", "")
    script = run_python(program, "completion", "bash")
    assert script.returncode == 0
    checked = subprocess.run(["/bin/bash", "-n"], input=script.stdout, text=True)
    assert checked.returncode == 0


def test_a_command_that_is_none_suggests_the_nearest_and_does_not_repeat_it(capsys):
    from dcp_rs.cli import main

    assert main(["exprot", "hunter2"]) == 2
    shown = capsys.readouterr()
    assert "did you mean export?" in shown.err
    assert "exprot" not in shown.err
    assert dcp_rs.__version__ not in shown.out
