"""What the set-up says where something is missing: one line, and little installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["bash", "cut", "grep", "head", "id", "sed", "sort"]


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but a shell and what the tests put on it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))

    def put(name, script):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!{folder}/bash\n{script}\n")
        (folder / name).chmod(0o755)

    def require(what, **variables):
        return subprocess.run(
            ["bash", ROOT / "scripts" / "require.sh", what],
            cwd=ROOT,
            env={"PATH": str(folder), "HOME": str(tmp_path)} | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    require.put = put
    return require


def says(finished):
    """The one line that a failed check says."""
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert finished.stdout == ""
    return line


def test_missing_rust_is_named(machine):
    assert "install cargo and rustc 1.88 or newer" in says(machine("rust"))


def test_an_old_rust_is_named(machine):
    machine.put("cargo", "true")
    machine.put("rustc", "echo 'rustc 1.9.0 (abc 2016-05-18)'")
    assert "rustc 1.9.0 is too old: install Rust 1.88" in says(machine("rust"))


def test_a_missing_linker_is_named(machine):
    machine.put("cargo", "true")
    machine.put("rustc", "echo 'rustc 1.100.1 (abc 2030-01-01)'")
    assert "install gcc" in says(machine("rust"))
    machine.put("cc", "true")
    assert machine("rust").returncode == 0


def test_a_missing_python_is_named(machine):
    assert "no Python 3.11 or newer with venv" in says(machine("python"))


def test_the_newest_python_is_not_needed(machine):
    machine.put("python3.11", "exit 1")
    machine.put("python3.12", "exit 0")
    finished = machine("python")
    assert (finished.returncode, finished.stdout.strip()) == (0, "python3.12")
    assert machine("python", PYTHON="python3.12").stdout.strip() == "python3.12"


def test_a_missing_jdk_is_named_to_a_user_who_is_not_root(machine):
    machine.put("id", "echo 1000")
    machine.put("apt-get", "touch called")
    assert "install openjdk-17-jre-headless" in says(machine("java"))
    machine.put("java", """echo 'openjdk version "11.0.2" 2019-01-15' >&2""")
    assert "Java 17 or newer" in says(machine("java"))
    assert not (ROOT / "called").exists()


@pytest.mark.parametrize("version", ["17.0.15", "25", "25-ea"])
def test_a_jdk_that_is_there_is_used(machine, version):
    machine.put("java", f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")
    machine.put("apt-get", "exit 9")
    assert machine("java").returncode == 0


on_debian = pytest.mark.skipif(
    "debian" not in Path("/etc/os-release").read_text().lower()
    if Path("/etc/os-release").exists()
    else True,
    reason="packages are installed on Debian and Ubuntu only",
)


@on_debian
def test_root_on_debian_gets_a_jdk(machine, tmp_path):
    log = tmp_path / "apt.log"
    java = tmp_path / "bin" / "java"
    machine.put("id", "echo 0")
    machine.put(
        "apt-get",
        f"""echo "$@" >> {log}
[ "$1" = install ] || exit 0
[[ "$*" == *openjdk-21-jre-headless ]] || exit 100
printf '#!{tmp_path}/bin/bash\\necho "openjdk version \\\\"21.0.2\\\\"" >&2\\n' > {java}
{shutil.which("chmod")} +x {java}""",
    )
    finished = machine("java")
    assert finished.returncode == 0, finished.stderr
    calls = log.read_text().splitlines()
    assert calls[0].startswith("update")
    assert [call.split()[-1] for call in calls[1:]] == [
        "openjdk-17-jre-headless",
        "openjdk-21-jre-headless",
    ]
    assert os.access(java, os.X_OK)


def test_tests_go_on_without_tshark(machine):
    machine.put("id", "echo 1000")
    machine.put("apt-get", "touch called")
    finished = machine("tshark")
    assert finished.returncode == 0
    assert "no capture will be read" in finished.stderr
    assert not (ROOT / "called").exists()
    machine.put("tshark", "")
    assert machine("tshark").stderr == ""


@on_debian
def test_root_on_debian_gets_tshark_without_a_question(machine, tmp_path):
    log = tmp_path / "apt.log"
    tshark = tmp_path / "bin" / "tshark"
    machine.put("id", "echo 0")
    machine.put(
        "apt-get",
        f"""echo "$DEBIAN_FRONTEND $@" >> {log}
[ "$1" = install ] || exit 0
echo > {tshark}
{shutil.which("chmod")} +x {tshark}""",
    )
    finished = machine("tshark")
    assert finished.returncode == 0
    assert "no capture will be read" not in finished.stderr
    assert log.read_text().splitlines() == [
        " update -qq",
        "noninteractive install -qq -y --no-install-recommends tshark",
    ]
