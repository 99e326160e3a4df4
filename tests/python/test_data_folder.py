"""A bucket that survives its process, stopped or killed."""

import itertools
import json
import socket
import struct
import subprocess
import sys

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError
from reading import rows_of


@pytest.fixture
def serve(tmp_path):
    processes = []

    def start():
        process = subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "dcp_rs", "serve", "--json", "--vbuckets",
                "1", "--data", tmp_path / "data",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def connect(facts):
    return dcp_rs.connect(
        facts["connection_string"], bucket="default", username="Administrator", password="password"
    )


def test_a_bucket_is_there_again_after_it_was_closed(tmp_path):
    options = {"vbuckets": 4, "data": tmp_path}
    with dcp_rs.testing.EmbeddedCluster(**options) as cluster:
        cluster.create_collection("landmark")
        cluster.upsert("key", {"a": 1}, collection="landmark", xattrs={"_x": 1})
        before = (cluster.bucket_uuid, cluster.high_seqnos(), cluster.manifest())
        document = cluster.get("key", collection="landmark")
        with cluster.connect() as client:
            stream = client.stream(until="now")
            assert len(rows_of(stream)) == 1
            position = stream.checkpoint()
    with dcp_rs.testing.EmbeddedCluster(**options) as cluster:
        assert (cluster.bucket_uuid, cluster.high_seqnos(), cluster.manifest()) == before
        assert cluster.get("key", collection="landmark") == document
        cluster.upsert("new", "1")
        with cluster.connect() as client:
            rows = rows_of(client.stream(start=position, until="now"))
        assert [(row["op"], row["key"]) for row in rows] == [("mutation", "new")]
    with pytest.raises(ConfigError, match=r"vbuckets.*has 4"):
        dcp_rs.testing.EmbeddedCluster(vbuckets=8, data=tmp_path)


def wait_until_persisted(facts, seqno):
    """Waits, as SDKs do, until vBucket 0 is on disk up to `seqno`."""
    port = int(facts["connection_string"].rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        reader = connection.makefile("rb")

        def ask(opcode, extras=b"", key=b"", value=b""):
            body = extras + key + value
            connection.sendall(
                struct.pack(
                    ">BBHBBHIIQ", 0x80, opcode, len(key), len(extras), 0, 0, len(body), 0, 0
                )
                + body
            )
            header = reader.read(24)
            status, length = struct.unpack(">6xHI12x", header)
            reader.read(length)
            assert status == 0, (opcode, status)

        ask(0x21, key=b"PLAIN", value=b"\0Administrator\0password")
        ask(0x89, key=b"default")
        ask(0xB7, extras=struct.pack(">Q", seqno))


def test_a_killed_server_goes_on_where_its_folder_ends(serve):
    """A reader goes on or is rolled back to what is left; either way it has what a new one gets."""
    pytest.importorskip("couchbase")
    from couchbase.auth import PasswordAuthenticator
    from couchbase.cluster import Cluster
    from couchbase.options import ClusterOptions

    state, safe, position, numbers, branches = {}, set(), None, itertools.count(), []

    def read(facts):
        nonlocal position
        with connect(facts) as client:
            stream = client.stream(start=position or "earliest", until="now", columns="full")
            for row in rows_of(stream):
                if row["op"] == "rollback":
                    for key in [key for key, seqno in state.items() if seqno > row["seqno"]]:
                        del state[key]
                else:
                    state[row["key"]] = row["seqno"]
            position = stream.checkpoint()

    for _round in range(2):
        process, facts = serve()
        read(facts)
        sdk = Cluster(
            facts["connection_string"],
            ClusterOptions(PasswordAuthenticator("Administrator", "password")),
        )
        collection = sdk.bucket("default").default_collection()
        for is_safe in (True, False):
            for _ in range(100):
                collection.upsert(f"key_{next(numbers)}", {})
            read(facts)
            if is_safe:
                wait_until_persisted(facts, max(state.values()))
                safe = set(state)
        process.kill()
        process.wait()
        sdk.close()
    for _life in range(2):
        process, facts = serve()
        read(facts)
        with connect(facts) as client:
            stream = client.stream(until="now", columns="full")
            assert state == {row["key"]: row["seqno"] for row in rows_of(stream)}
        content = json.loads(stream.checkpoint().to_json())["content"]
        branches.append(content["positions"]["0"]["failover_log"])
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert safe <= state.keys()
    assert len(safe) >= 200
    assert len(branches[0]) == 3, "each of two crashes began a branch"
    assert branches[1] == branches[0], "a stop in good order began none"


def test_only_the_owner_may_read_the_data(tmp_path):
    file = tmp_path / "data" / "bucket.redb"
    for _ in range(2):
        with dcp_rs.testing.EmbeddedCluster(vbuckets=1, data=tmp_path / "data") as cluster:
            cluster.upsert("key", b"1")
        assert file.stat().st_mode & 0o777 == 0o600
        # As an earlier release made it.
        file.chmod(0o644)
