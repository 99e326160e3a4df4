"""`dcp-rs export`: files that are whole or not there."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from dcp_rs.cli import main

ENVIRONMENT = {"DCP_RS_PASSWORD": "canary-8f1c2e", "PYTHONWARNINGS": "ignore::RuntimeWarning"}


@pytest.fixture
def arguments(cluster):
    return [f"{cluster.connection_string}/default", "--username", "Administrator"]


@pytest.fixture
def export(arguments, monkeypatch, capsys):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")

    def command(*more, status=0):
        done = main(["export", *arguments, *map(str, more)])
        shown = capsys.readouterr()
        assert done == status, shown.err
        assert shown.out == ""
        return shown.err

    return command


def in_order(table):
    return table.sort_by([("vbucket", "ascending"), ("seqno", "ascending")])


def test_each_format_has_the_changes_that_the_stream_has(cluster, client, fill, export, tmp_path):
    fill(3000, size=20)
    cluster.remove("key_7")
    expected = in_order(client.stream(until="now").read_all())

    shown = export(tmp_path / "out.parquet")
    assert "3,000 changes" in shown.splitlines()[-1]
    read = pa.parquet.read_table(tmp_path / "out.parquet")
    assert in_order(read).equals(expected)
    # Batches are gathered: a small row group costs every reader.
    assert pa.parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 1

    export(tmp_path / "out.arrow")
    with pa.ipc.open_file(tmp_path / "out.arrow") as file:
        assert in_order(file.read_all()).equals(expected)

    export(tmp_path / "out.csv", "--columns", "vbucket,seqno,op,key,value")
    columns = ["vbucket", "seqno", "op", "key", "value"]
    options = pa.csv.ConvertOptions(
        column_types=expected.select(columns).schema,
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    read = pa.csv.read_csv(tmp_path / "out.csv", convert_options=options)
    assert in_order(read.cast(expected.select(columns).schema)).equals(expected.select(columns))

    export(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: (row["vbucket"], row["seqno"]))
    assert [row["key"] for row in rows] == expected["key"].to_pylist()
    documents = [value and json.loads(value) for value in expected["value"].to_pylist()]
    assert [row["value"] for row in rows] == documents

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out.parquet", "out.arrow", "out.csv", "out.jsonl"}


def test_an_empty_bucket_is_a_file_with_columns(export, tmp_path):
    for name in ("a.parquet", "a.arrow", "a.csv", "a.jsonl"):
        export(tmp_path / name)
    assert pa.parquet.read_table(tmp_path / "a.parquet").num_rows == 0
    assert "key" in pa.parquet.read_schema(tmp_path / "a.parquet").names
    assert "key" in (tmp_path / "a.csv").read_text()
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_what_is_there_is_written_over_only_by_force(fill, export, tmp_path):
    fill(5)
    file = tmp_path / "out.jsonl"
    file.write_text("mine")
    assert "--force" in export(file, status=1)
    assert file.read_text() == "mine"
    export(file, "--force")
    assert len(file.read_text().splitlines()) == 5


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(fill, export, tmp_path, monkeypatch, has_links):
    fill(5)
    file = tmp_path / "out.jsonl"
    sync = os.fsync

    def sync_beside_another(number):
        sync(number)
        file.write_text("another's")

    def link(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", link)
        export(tmp_path / "first.jsonl")
        assert len((tmp_path / "first.jsonl").read_text().splitlines()) == 5
        (tmp_path / "first.jsonl").unlink()
    monkeypatch.setattr(os, "fsync", sync_beside_another)
    kept = tmp_path / "kept"
    assert "--force" in export(file, "--checkpoint", kept, status=1)
    assert file.read_text() == "another's"
    assert not kept.exists()
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_regular_file_is_never_replaced(fill, export, tmp_path):
    fill(1)
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, "", "/"):
        for force in ((), ("--force",)):
            assert "is not a regular file" in export(path, "--format", "jsonl", *force, status=1)
    assert pipe.is_fifo()
    assert folder.is_dir()


def test_a_symbolic_link_stays_one(fill, export, tmp_path):
    fill(3)
    link, file = tmp_path / "link.jsonl", tmp_path / "elsewhere" / "file.jsonl"
    file.parent.mkdir()
    file.write_text("before")
    link.symlink_to(file)
    assert "--force" in export(link, status=1)
    export(link, "--force")
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"link.jsonl", "elsewhere"}


def test_a_checkpoint_makes_the_next_file_one_of_what_came_since(fill, export, tmp_path):
    fill(5)
    kept = tmp_path / "kept"
    export(tmp_path / "1.jsonl", "--checkpoint", kept)
    fill(3, prefix="later")
    export(tmp_path / "2.jsonl", "--checkpoint", kept)
    export(tmp_path / "3.jsonl", "--checkpoint", kept)
    counts = [len((tmp_path / f"{n}.jsonl").read_text().splitlines()) for n in (1, 2, 3)]
    assert counts == [5, 3, 0]


def test_bytes_in_csv_are_refused_and_say_what_to_do(cluster, export, tmp_path):
    cluster.upsert("bytes", b"\xff")
    shown = export(tmp_path / "out.csv", status=1)
    assert "--format: a key or document is not UTF-8" in shown
    assert not list(tmp_path.iterdir())
    export(tmp_path / "out.csv", "--value-format", "string")
    assert '"bytes",,' in (tmp_path / "out.csv").read_text()


def test_a_wrong_ending_and_nested_columns_in_csv_are_refused(fill, export, tmp_path):
    fill(1)
    assert "--format" in export(tmp_path / "out.xlsx", status=2)
    export(tmp_path / "out.xlsx", "--format", "csv")
    assert "xattrs" in export(tmp_path / "out.csv", "--include", "xattrs", status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out.xlsx"]


def test_standard_output_is_a_file_too(fill, arguments):
    fill(3)
    done = subprocess.run(
        [sys.executable, "-m", "dcp_rs", "export", *arguments, "-", "--format", "arrow"],
        capture_output=True, timeout=60, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with pa.ipc.open_file(pa.BufferReader(done.stdout)) as file:
        assert file.read_all().num_rows == 3
    assert b"3 changes" in done.stderr


def test_without_pyarrow_it_says_what_to_install(arguments, tmp_path):
    program = """
import sys
sys.modules["pyarrow"] = None
from dcp_rs.cli import main
sys.exit(main(sys.argv[1:]))
"""

    def run(name):
        return subprocess.run(
            [sys.executable, "-c", program, "export", *arguments, str(tmp_path / name)],
            capture_output=True, timeout=60, text=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip

    done = run("out.parquet")
    assert done.returncode == 1
    assert 'pip install "dcp-rs[cli,arrow]"' in done.stderr
    assert "Traceback" not in done.stderr
    # JSON lines need none.
    assert run("out.jsonl").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_killed_leaves_no_file(cluster, arguments, tmp_path, number, ending):
    for n in range(500):
        cluster.upsert(f"key_{n}", b"x" * 100)
    # One vBucket's changes never come, so the export never ends.
    cluster.set_faults([
        {"condition": {"opcode": "DCP_MUTATION", "vbucket": 3}, "reaction": "half_open"}
    ])  # fmt: skip
    file = tmp_path / f"out.{ending}"
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_rs", "export", *arguments, str(file)],
        stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    end = time.monotonic() + 20
    while not any(tmp_path.iterdir()) or sum(cluster.fault_counts()) == 0:
        assert time.monotonic() < end
        time.sleep(0.02)
    # It is being written, under another name.
    (hidden,) = tmp_path.iterdir()
    assert hidden.name.startswith(f".{file.name}.")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == {2: 130, 15: 143, 9: -9}[number], errors
    assert "Traceback" not in errors
    assert not file.exists()
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(export, tmp_path):
    said = export(tmp_path / "lake" / "changes.csv", status=1)
    assert f"the folder {tmp_path / 'lake'} does not exist: create it first" in said
    assert not list(tmp_path.iterdir())
