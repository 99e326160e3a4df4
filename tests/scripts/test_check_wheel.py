"""A wheel that should not be published is named, with the reason."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_wheel.py"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
NAME = f"dcp_rs-{VERSION}-cp311-abi3-manylinux_2_17_x86_64.whl"
INFO = f"dcp_rs-{VERSION}.dist-info"
METADATA = """Metadata-Version: 2.4
Name: dcp-rs
Summary: Changes
Keywords: couchbase
Classifier: Typing :: Typed
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: pyarrow ; extra == 'arrow'
Description-Content-Type: text/markdown; charset=UTF-8

# dcp_rs
"""
# The beginning of an ELF file for x86-64.
ELF = "\x7fELF" + "\0" * 14 + "\x3e\0"
FILES = {
    "dcp_rs/_dcp_rs.abi3.so": ELF + "\0GLIBC_2.2.5\0GLIBC_2.17\0",
    "dcp_rs/_dcp_rs.pyi": "",
    "dcp_rs/py.typed": "",
    "dcp_rs/pytest_plugin.py": "",
    "pyspark_couchbase_dcp/__init__.py": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/entry_points.txt": "",
    f"{INFO}/licenses/LICENSE": "",
}


@pytest.fixture
def check(tmp_path):
    def run(files, name=NAME, platform="manylinux_2_17", more=()):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for each, text in files.items():
                archive.writestr(each, text)
        return subprocess.run(
            [sys.executable, SCRIPT, "--platform", platform, *more, tmp_path / name],
            capture_output=True,
            text=True,
        )

    return run


def test_a_whole_wheel_is_good(check):
    done = check(FILES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dcp_rs/_dcp_rs.abi3.so": ELF + "\0GLIBC_2.9\0GLIBC_2.34\0"}, "needs glibc 2.34"),
        ({"dcp_rs/_dcp_rs.abi3.so": ELF + "x" * 12_000_001}, "bytes, at most 12,000,000"),
        ({"dcp_rs/py.typed": None}, "lacks dcp_rs/py.typed"),
        ({f"{INFO}/licenses/LICENSE": None}, "lacks dcp_rs-"),
        ({"dcp_rs/other.so": ""}, "should not have dcp_rs/other.so"),
        ({"dcp_rs/a.pyc": ""}, "should not have dcp_rs/a.pyc"),
        ({"tests/a.py": ""}, "should not have tests/a.py"),
        ({f"{INFO}/METADATA": METADATA.replace("Apache-2.0", "MIT")}, "License-Expression is MIT"),
        ({f"{INFO}/METADATA": METADATA.replace("Keywords", "Words")}, "lacks Keywords"),
        ({f"{INFO}/METADATA": METADATA.replace("# dcp_rs", "")}, "README is not its description"),
        ({f"{INFO}/METADATA": METADATA.replace("; extra", "; extr")}, "requires pyarrow"),
    ],
)
def test_what_is_wrong_is_named(check, changed, said):
    files = {name: text for name, text in (FILES | changed).items() if text is not None}
    done = check(files)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert said in done.stdout


def test_a_release_needs_urls_and_links_that_work(check):
    urls = "".join(
        f"Project-URL: {name}, https://example.org/x\n"
        for name in ("Homepage", "Documentation", "Changelog", "Source", "Issues")
    )
    good = METADATA.replace("Keywords", f"{urls}Keywords")
    info = f"{INFO}/METADATA"
    assert check(FILES | {info: good}, more=["--urls"]).returncode == 0
    done = check(FILES, more=["--urls"])
    assert done.stdout.count("lacks the URL") == 5
    done = check(FILES | {info: good + "[a](docs/a.md)"}, more=["--urls"])
    assert "files that are not there" in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAME.replace("abi3", "cp311"), "not that of an abi3 wheel"),
        (NAME.replace(VERSION, "0.0.1"), "not that of an abi3 wheel"),
        (NAME.replace("manylinux_2_17", "linux"), "lacks manylinux_2_17"),
        (NAME.replace("x86_64", "aarch64"), "not for aarch64"),
    ],
)
def test_a_wrong_name_is_told(check, name, said):
    done = check(FILES, name)
    assert done.returncode == 1
    assert said in done.stdout


def test_no_wheel_is_no_success():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing would be checked" in done.stderr
