"""The command `dcp-rs`."""

import dataclasses
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import dcp_rs
from dcp_rs.cli import main
from reading import TRACES

PASSWORD = "secret word"


def environment(**more):
    # Output is buffered as it is for users.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return inherited | {"PYTHONWARNINGS": "ignore::RuntimeWarning"} | more


def run(*arguments, stdin=b"", **variables):
    return subprocess.run(
        [sys.executable, "-m", "dcp_rs", *map(str, arguments)],
        input=stdin, capture_output=True, timeout=60, env=environment(**variables),
    )  # fmt: skip


def lines(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


PACKET = "80550000040000030000000400001000000000000000000000000002"
LINE = (
    "ClientRequest DCP_STREAM_END vbucket=3 opaque=0x1000 cas=0x0 datatype=raw length=28"
    " reason=StateChanged"
)
XXD = """00000000: 8055 0000 0400 0003 0000 0004 0000 1000  .U..............
00000010: 0000 0000 0000 0000 0000 0002            ............
"""
GROUPS = " ".join(PACKET[at : at + 8] for at in range(0, len(PACKET), 8))
HEXDUMP = """00000000  80 55 00 00 04 00 00 03  00 00 00 04 00 00 10 00  |.U..............|
00000010  00 00 00 00 00 00 00 00  00 00 00 02              |............|
0000001c
"""


@pytest.mark.parametrize("option", ["--collections", "--keys", "--ops"])
def test_a_list_that_is_given_twice_is_refused(option):
    done = run("cat", "couchbase://h/b", option, "a.b", "--limit", "1", option, "a.c")
    assert done.returncode == 2
    assert f"{option}: is given twice: give it once, with commas" in done.stderr.decode()


def test_a_trace_is_shown_packet_by_packet():
    trace = TRACES / "6.0.5-multi-vb.jsonl"
    packets = sum("hex" in json.loads(line) for line in trace.read_text().splitlines())
    shown = lines(run("decode", "--output", "table", trace))
    assert len(shown) == packets
    assert shown[0].startswith("0 -> ClientRequest HELLO vbucket=0")
    records = [json.loads(line) for line in lines(run("decode", "--json", trace))]
    assert [record["opcode"] for record in records] == [line.split()[3] for line in shown]


def test_a_value_that_is_not_text_is_base64_in_json():
    packet = (
        bytes.fromhex("80010001080000000000000a0000000000000000000000000000000000000000") + b"k\xff"
    )
    (line,) = lines(run("decode", "--json", "-", stdin=packet))
    assert json.loads(line)["value"] == {"base64": "/w=="}


def test_an_end_of_connection_is_shown():
    shown = lines(run("decode", "--output", "table", TRACES / "6.0.5-same-name-disconnect.jsonl"))
    assert any(line.endswith("<- closed") for line in shown)


@pytest.mark.parametrize(
    "content",
    [
        bytes.fromhex(PACKET),
        PACKET.encode(),
        XXD.encode(),
        HEXDUMP.encode(),
        b"0x" + PACKET.encode(),
        GROUPS.encode(),
    ],
    ids=["bytes", "digits", "xxd", "hexdump", "prefix", "groups"],
)
def test_packets_are_read_in_every_form(tmp_path, content):
    path = tmp_path / "packets"
    path.write_bytes(content)
    assert lines(run("decode", "--output", "table", path)) == [LINE]
    assert lines(run("decode", "--output", "table", "-", stdin=content)) == [LINE]


def test_what_is_no_packet_fails_with_one_line(tmp_path):
    path = tmp_path / "packets"
    for content in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes.fromhex(PACKET)[:-1],
        b'{"hex": 5}',
        b'{"a":' * 100_000,
        b'{"dir": "c2s", "hex": "80", "conn": 1e999}',
        b'{"dir": ["c2s"], "hex": "80"}',
        # A text from outside that would reach the terminal.
        b'{"dir": "\\u001b[2J", "eof": true}',
    ):
        path.write_bytes(content)
        done = run("decode", path)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(b"dcp-rs: ")
    assert run("decode", tmp_path / "missing").returncode == 1


def test_a_wrong_command_line_exits_with_2():
    assert run().returncode == 2
    assert run("decod").returncode == 2
    assert run("--version").stdout.split() == [b"dcp-rs", dcp_rs.__version__.encode()]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--hashfield", "--hashfield; did you mean --hash-fields?"),
        ("--tls-keys=x", "--tls-keys; did you mean --tls-key?"),
        ("--keys", "--keys"),
        ("--foo", "--foo"),
    ],
)
def test_an_option_is_suggested_only_if_it_is_near(option, told):
    done = run("replicate", "couchbase://localhost/a", "delta:///a", option)
    assert done.returncode == 2
    assert done.stderr.decode().endswith(f"dcp-rs: no such option: {told}\n")


@pytest.fixture
def serve():
    """Starts `dcp-rs serve`, and ends it."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "dcp_rs", "serve", "--json", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(SERVE_PASSWORD=PASSWORD),
        )  # fmt: skip
        started.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def serving(serve):
    return serve("--nodes", "2", "--vbuckets", "8", "--password-env", "SERVE_PASSWORD")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_cluster_takes_clients_and_stops_cleanly(serving, number):
    process, facts = serving
    assert PASSWORD not in json.dumps(facts)
    assert facts["pid"] == process.pid
    with dcp_rs.connect(
        facts["connection_string"],
        bucket=facts["bucket"],
        username=facts["username"],
        password=PASSWORD,
    ) as client:
        assert client.bucket_uuid == facts["bucket_uuid"]
        assert client.num_vbuckets == 8
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "dcp-rs: stopped after 0 changes\n")


def test_a_served_cluster_takes_every_option_there_is():
    shown = run("serve", "--help").stdout.decode()
    taken = [dcp_rs.testing.EmbeddedCluster, dcp_rs.testing.Limits]
    options = [
        option for each in taken for option in inspect.signature(each).parameters
        if option not in {"password", "tls", "limits"}
    ]  # fmt: skip
    assert len(options) > 20
    assert [o for o in options if f"--{o.replace('_', '-')}" not in shown] == []


def test_a_served_cluster_keeps_to_its_limits(serve):
    _, facts = serve("--max-connections", "1")
    host, _, port = facts["connection_string"].removeprefix("couchbase://").partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=30),
        socket.create_connection((host, int(port)), timeout=30) as second,
    ):
        assert second.recv(1) == b""
    assert b"--max-streams" in run("serve", "--max-streams", "0").stderr


def test_a_key_of_tokens_that_is_given_to_a_served_cluster_is_read(serve, tmp_path):
    authority, key = tmp_path / "ca.pem", tmp_path / "key"
    key.write_text("the key of an issuer, of 32 bytes.\n")
    _, facts = serve("--tls-ca", authority, "--token-key-file", key)
    address = facts["tls_connection_string"]
    with pytest.raises(dcp_rs.exceptions.AuthenticationError, match="refuses the token"):
        dcp_rs.connect(address, bucket="default", token="x.y.z", tls_ca=authority)
    key.unlink()
    done = run("serve", "--tls-ca", authority, "--token-key-file", key)
    assert (done.returncode, b"--token-key-file: the file cannot be read" in done.stderr) == (
        1,
        True,
    )


def test_a_certificate_that_is_given_to_a_served_cluster_is_read(tmp_path):
    done = run("serve", "--tls-certificate", tmp_path / "none", "--tls-key", tmp_path / "none")
    assert done.returncode == 1
    assert b"--tls-certificate" in done.stderr


def test_no_authority_is_written_for_a_certificate_that_is_given(tmp_path):
    given = ["--tls-certificate", tmp_path / "none", "--tls-key", tmp_path / "none"]
    done = run("serve", *given, "--tls-ca", tmp_path / "ca.pem")
    assert done.returncode == 2
    assert b"--tls-ca and --tls-certificate" in done.stderr


def test_changes_are_printed_and_a_checkpoint_is_kept(cluster, fill, tmp_path):
    fill(30)
    address = f"{cluster.connection_string}/default"
    options = ["--username", "Administrator", "--json"]
    kept = tmp_path / "positions.json"

    def cat(*more):
        done = run("cat", address, *options, *more, DCP_RS_PASSWORD="canary-8f1c2e")
        return [json.loads(line) for line in lines(done)]

    rows = cat("--columns", "key,value,timestamp")
    assert sorted(row["key"] for row in rows) == sorted(f"key_{n}" for n in range(30))
    assert list(rows[0]) == ["key", "value", "timestamp"]
    assert rows[0]["value"]["pad"] == ""

    assert len(cat("--checkpoint", kept)) == 30
    cluster.upsert("later", b"1")
    assert [row["key"] for row in cat("--checkpoint", kept)] == ["later"]

    shown = lines(run("checkpoint", "show", kept, "--output", "table"))
    assert shown[0] == f"bucket {cluster.bucket_uuid}, {len(shown) - 3} vBuckets"
    assert shown[1] == "made with the whole bucket without system documents"
    assert shown[2].split()[:3] == ["VBUCKET", "SEQNO", "SNAPSHOT"]
    found = json.loads(lines(run("checkpoint", "show", kept, "--json"))[0])
    everything = {
        "scope_id": None, "collection_ids": None, "system_documents": False,
        "patterns": None, "keys": None, "ops": None, "since": None,
    }  # fmt: skip
    assert found["filter"] == everything
    assert {int(vb): p["seqno"] for vb, p in found["positions"].items() if p["seqno"]} == {
        vb: seqno for vb, seqno in cluster.high_seqnos().items() if seqno
    }


def test_a_reader_that_has_enough_is_no_error(cluster, fill):
    fill(2000, size=100)
    command = f"{sys.executable} -m dcp_rs cat {cluster.connection_string.split(',')[0]}/default"
    done = subprocess.run(
        f"{command} --username Administrator | head -n 3; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, timeout=60,
        env=environment(DCP_RS_PASSWORD="canary-8f1c2e"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) == 3


def test_a_failure_is_one_line_and_shows_no_password(cluster):
    done = run(
        "cat", f"{cluster.connection_string.split(',')[0]}/default", "--username", "Administrator",
        DCP_RS_PASSWORD="wrong word",
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert b"wrong word" not in done.stderr


def on(cluster, command, *more):
    address = f"{cluster.connection_string.split(',')[0]}/default"
    return [command, address, "--username", "Administrator", *more]


def begin(cluster, command, *more, stdout):
    return subprocess.Popen(
        [sys.executable, "-m", "dcp_rs", *map(str, on(cluster, command, *more))],
        stdout=stdout, stderr=subprocess.PIPE, env=environment(DCP_RS_PASSWORD="canary-8f1c2e"),
    )  # fmt: skip


TAIL = ["tail", "--start", "earliest"]


def positions(path):
    return sum(dcp_rs.Checkpoint.load(path).seqnos.values()) if path.exists() else 0


def eventually(condition, patience=20):
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_checkpoint_counts_no_row_that_was_not_written(cluster, fill, tmp_path):
    fill(20)
    kept, output = tmp_path / "positions.json", tmp_path / "output"
    with output.open("ab") as out:
        process = begin(cluster, *TAIL, "--columns", "key", "--checkpoint", kept, stdout=out)
        eventually(lambda: positions(kept) == 20)
        process.kill()
        process.communicate()
        assert len(output.read_text().splitlines()) == 20
        again = begin(cluster, "cat", "--checkpoint", kept, stdout=out)
        assert again.communicate(timeout=30) == (None, b"")
        assert again.returncode == 0
    assert len(output.read_text().splitlines()) == 20


@pytest.mark.parametrize("command", ["cat {}", "export {} - --format jsonl"])
def test_rows_are_written_to_disk_before_the_checkpoint_is(cluster, fill, tmp_path, command):
    fill(20)
    # Says what is done in which order; the process is the real one otherwise.
    program = """
import os, sys
import dcp_rs.stores
from dcp_rs.cli import main
fsync, save = os.fsync, dcp_rs.stores.FileStore.save
def note(what):
    size = os.fstat(1).st_size
    print(what, size, file=sys.stderr, flush=True)
def noted_fsync(file):
    fsync(file)
    note("synced")
def noted_save(self, checkpoint):
    note("saved")
    save(self, checkpoint)
os.fsync, dcp_rs.stores.FileStore.save = noted_fsync, noted_save
sys.exit(main(sys.argv[1:]))
"""
    output = tmp_path / "output"
    name, *more = command.replace(" {}", "").split()
    arguments = on(cluster, name, *more, "--checkpoint", str(tmp_path / "kept"))
    with output.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=out, stderr=subprocess.PIPE,
            timeout=60, env=environment(DCP_RS_PASSWORD="canary-8f1c2e"), text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    notes = [tuple(line.split()) for line in told if line.startswith(("synced", "saved"))]
    assert ("saved", str(output.stat().st_size)) in notes
    synced = "0"
    for what, size in notes:
        if what == "synced":
            synced = size
        else:
            assert size == synced, notes


def test_a_start_at_the_latest_change_is_kept_before_the_first_row(cluster, fill, tmp_path):
    fill(20)
    kept = tmp_path / "positions.json"
    process = begin(cluster, "tail", "--checkpoint", kept, stdout=subprocess.PIPE)
    eventually(kept.exists)
    process.kill()
    process.communicate()
    cluster.upsert("between", b"1")
    options = ["--start", "latest", "--checkpoint", kept, "-f", "%k\\n"]
    done = run(*on(cluster, "cat", *options), DCP_RS_PASSWORD="canary-8f1c2e")
    assert lines(done) == ["between"]


def test_ctrl_c_keeps_what_was_written_and_no_more(cluster, fill, tmp_path):
    documents = fill(2000)
    kept, output = tmp_path / "positions.json", tmp_path / "output"
    with output.open("wb") as out:
        process = begin(cluster, *TAIL, "--columns", "key", "--checkpoint", kept, stdout=out)
        eventually(lambda: output.stat().st_size > 0)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == (None, b"")
    assert process.returncode == 130
    written = set(output.read_text().splitlines())
    done = run(
        *on(cluster, "cat", "--columns", "key", "--checkpoint", kept),
        DCP_RS_PASSWORD="canary-8f1c2e",
    )
    assert written | set(lines(done)) == {f'{{"key": "{key}"}}' for key in documents}


def test_ctrl_c_before_the_limit_keeps_what_was_written(cluster, fill, tmp_path):
    fill(20)
    kept, output = tmp_path / "positions.json", tmp_path / "output"
    limited = ["-n", "1000", "--columns", "key", "--checkpoint", kept]
    with output.open("wb") as out:
        process = begin(cluster, *TAIL, *limited, stdout=out)
        eventually(lambda: output.read_bytes().count(b"\n") == 20)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == (None, b"")
    assert process.returncode == 130
    # The signal may come right after the last row was written.
    assert positions(kept) in {19, 20}


SECRET = "hunter2-is-secret"


@pytest.mark.parametrize(
    "arguments",
    [
        ["cat", "couchbase://h/b", "--username", "u", "--password", SECRET],
        ["cat", "couchbase://h/b", "--username", "u", f"--password={SECRET}"],
        ["cat", "--password", SECRET, "couchbase://h/b", "--username", "u"],
        ["cat", "couchbase://h/b", "--username", "u", "-p", SECRET],
        ["cat", "couchbase://h/b", "--username", "u", f"-p{SECRET}"],
        ["cat", "couchbase://h/b", "--username", "u", "--pass", SECRET],
        ["cat", "couchbase://h/b", "--username", "u", "--passphrase", SECRET],
        ["cat", "couchbase://h/b", "--username", "u", "--password-env", SECRET],
        ["cat", "couchbase://h/b", "--username", "u", "--password-file", SECRET],
        ["--password", SECRET, "cat", "couchbase://h/b"],
        ["serve", "--password", SECRET],
        ["serve", f"--password={SECRET}"],
        ["serve", "--password-env", SECRET],
        ["serve", "--password-file", SECRET],
        ["serve", SECRET],
        ["cat", f"couchbase://u:{SECRET}@h/b"],
        ["cat", f"couchbase://h/b?password={SECRET}"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_shown(arguments):
    done = run(*arguments)
    assert done.returncode in {1, 2}
    assert b"Traceback" not in done.stderr
    assert SECRET.encode() not in done.stdout + done.stderr
    if any(word.partition("=")[0] == "--password" for word in arguments):
        assert b"--password-file" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["cat", "couchbase://h/b", "--user", "u"],
        ["cat", "couchbase://h/b", "--js"],
        ["serve", "--vb", "4"],
        ["decode", "--collection", "x"],
        ["checkpoint", "show", "x", "--js"],
        ["explain-rollback", "--failover", "1:2"],
    ],
)
def test_options_are_not_abbreviated(arguments):
    assert run(*arguments).returncode == 2


def test_a_password_that_is_not_set_is_asked_for(tmp_path):
    before = ["cat", "couchbase://h/b", "--username", "u"]
    done = run(*before)
    assert done.returncode == 1
    assert b"set DCP_RS_PASSWORD" in done.stderr
    assert b"--password-env" in run(*before, "--password-env", "NOT_SET_AT_ALL").stderr
    assert b"--password-file" in run(*before, "--password-file", tmp_path / "none").stderr
    assert run("serve", "--password-env", "NOT_SET_AT_ALL").returncode == 1


def test_changes_are_printed_over_tls_with_a_password_from_a_file(tmp_path):
    ca, secret = tmp_path / "ca.pem", tmp_path / "password"
    secret.write_text("another word\n")
    with dcp_rs.testing.EmbeddedCluster(tls=True, password="another word") as cluster:
        ca.write_text(cluster.ca_pem)
        cluster.upsert("a", b"1")
        done = run(
            "cat", f"{cluster.tls_connection_string}/default", "--username", "Administrator",
            "--password-file", secret, "--tls-ca", ca, "--network", "default",
            "--connect-timeout", "20", "-f", "%k",
        )  # fmt: skip
        assert lines(done) == ["a"]
        done = run(
            "cat", f"{cluster.tls_connection_string}/default", "--username", "Administrator",
            "--password-file", secret, "--connect-timeout", "5",
        )  # fmt: skip
        assert done.returncode == 1


def test_a_password_is_read_from_a_pipe(cluster, fill):
    fill(2)
    # Two nodes: it is needed for more than one connection.
    arguments = on(cluster, "cat", "--password-file", "/dev/stdin", "-f", "%k\\n")
    assert sorted(lines(run(*arguments, stdin=b"canary-8f1c2e\n"))) == ["key_0", "key_1"]


def test_a_password_is_utf_8_in_any_locale(cluster, fill):
    fill(1)
    cluster.set_password("canary-8f1c2e größe")
    arguments = on(cluster, "cat", "--password-file", "/dev/stdin", "-f", "%k\\n")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(*arguments, stdin="canary-8f1c2e größe\n".encode(), **locale)
    assert lines(done) == ["key_0"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_tables_are_utf_8_in_any_locale(cluster, fill, encoding):
    fill(1)
    arguments = on(cluster, "top", "--once", "--interval", "0.2", "--output", "table")
    done = run(*arguments, PYTHONIOENCODING=encoding, DCP_RS_PASSWORD="canary-8f1c2e")
    assert lines(done)[0].startswith("╭─ default")


def test_errors_name_options_as_the_command_line_does(cluster, monkeypatch, capsys):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    user, admin = ("--username", "u"), ("--username", "Administrator")
    address = f"{cluster.connection_string}/default"
    for arguments, told in [
        (
            ("cat", "couchbase://h/b"),
            "--username: no user is given: pass one, with the password in",
        ),
        (("cat", "couchbase://h/b", "--tls-certificate", "f"), "--tls-certificate"),
        (("cat", "couchbase://h/b", *user, "--connect-timeout", "0"), "--connect-timeout"),
        (
            ("replicate", address, "duckdb:///x", *admin, "--commit-rows", "0"),
            "--commit-rows: 0 is not from 1 to 10000000",
        ),
        (("cat", "couchbase://h", *user), "--bucket: name one here or in the connection string"),
        (
            ("replicate", address, "duckdb:///x?table=t&foo=1", *admin),
            "duckdb has no option foo; it takes table, value_format",
        ),
        (
            ("replicate", address, "delta:///x/persisted_only?value_format=variant", *admin),
            "TARGET: value_format is an option of duckdb only",
        ),
        (
            ("replicate", address, "duckdb:///x?tabel=t", *admin),
            "TARGET: duckdb has no option tabel: did you mean table? It takes table, value_format",
        ),
        (("replicate", address, "duckbd:///x", *admin), "did you mean duckdb://?"),
        (
            ("replicate", address, "delta:///x", *admin, "--keep-versions-for", "7200"),
            "removed after files were compacted: set --compact-every",
        ),
    ]:
        assert main(arguments) == 1, arguments
        line = capsys.readouterr().err
        assert told in line
        assert not re.search(r"\b(tls_\w+|connect_timeout|commit_rows|buffer_size)\b", line)


def test_options_are_called_as_in_python():
    shown = run("export", "--help").stdout.decode()
    connecting = {each.name for each in dataclasses.fields(dcp_rs.ConnectionOptions)}
    reading = set(inspect.signature(dcp_rs.Client.stream).parameters)
    elsewhere = {
        # Words of the command line themselves, or a secret.
        "connection_string", "self", "until", "password", "credentials",
        # How a program takes batches, and keeps connections.
        "keep_connections", "batch", "ack",
        # What --start says, where --checkpoint has nothing.
        "default",
    }  # fmt: skip
    options = (connecting | reading) - elsewhere
    assert len(options) > 25
    assert [o for o in sorted(options) if f"--{o.replace('_', '-')}" not in shown] == []
    shown = run("replicate", "--help").stdout.decode()
    options = set(inspect.signature(dcp_rs.replicate).parameters) - {
        "client", "target", "stop", "on_progress"
    }  # fmt: skip
    # One at a time.
    assert "--storage-option KEY=VALUE" in shown
    options -= {"storage_options"}
    assert [o for o in sorted(options) if f"--{o.replace('_', '-')}" not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["cat", "couchbase://h", "--checkpoint", ""], "'--checkpoint': must not be empty"),
        (["export", "couchbase://h", "a.csv", "--checkpoint", ""], "'--checkpoint': must not"),
        (["lag", "couchbase://h", "--checkpoint", ""], "'--checkpoint': must not be empty"),
        (["checkpoint", "show", ""], "'FILE': must not be empty"),
        (["checkpoint", "copy", "a", ""], "'TO': must not be empty"),
        (["decode", ""], "'FILE': must not be empty"),
        (["serve", "--users", ""], "'--users': must not be empty"),
        (["serve", "--faults", ""], "'--faults': must not be empty"),
        (["serve", "--data", ""], "--data: must not be empty"),
        (["serve", "--faults", "missing.json"], "missing.json cannot be read: No such file"),
    ],
)
def test_an_empty_or_missing_file_name_is_refused_by_the_options_name(
    arguments, named, capfd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in {1, 2}
    assert named in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
