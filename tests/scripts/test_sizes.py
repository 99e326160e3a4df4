"""Files that grow long are named."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sizes.py"


def check(folder):
    return subprocess.run(
        [sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_files_above_600_lines_are_named_and_above_1000_refused(folder):
    (folder / "just.rs").write_text("//\n" * 600)
    (folder / "data.json").write_text("\n" * 5000)
    (folder / ".gitignore").write_text("ignored.rs\n")
    (folder / "ignored.rs").write_text("//\n" * 1001)
    result = check(folder)
    assert (result.returncode, result.stdout) == (0, "")
    (folder / "growing.rs").write_text("//\n" * 1000)
    result = check(folder)
    assert result.returncode == 0
    assert "warning: growing.rs: 1000 lines" in result.stdout
    (folder / "long.rs").write_text("//\n" * 1001)
    result = check(folder)
    assert result.returncode == 1
    assert "long.rs: 1001 lines" in result.stdout
    assert "just.rs" not in result.stdout
    assert "ignored.rs" not in result.stdout


def test_a_folder_without_sources_is_no_success(folder):
    assert "nothing was checked" in check(folder).stdout
