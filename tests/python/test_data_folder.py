"""A bucket that survives its process, stopped or killed."""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError, ConnectError
from reading import rows_of


@pytest.fixture
def serve(tmp_path):
    processes = []

    def start():
        process = subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "dcp_rs", "serve", "--json", "--nodes",
                str(_NODES), "--replicas", str(_NODES - 1), "--vbuckets", str(_VBUCKETS), "--data",
                tmp_path / "data",
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


class Node:
    """A connection to a node, over which documents are written and read as SDKs do."""

    def __init__(self, facts, number):
        _, nodes = facts["connection_string"].split("://")
        port = int(nodes.split(",")[number].rsplit(":", 1)[1])
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = self._socket.makefile("rb")

    def __enter__(self):
        try:
            # Requests with framing extras, and durable writes.
            self.succeed(0x1F, key=b"killed", value=struct.pack(">HH", 0x10, 0x11))
            self.succeed(0x21, key=b"PLAIN", value=b"\0Administrator\0password")
            self.succeed(0x89, key=b"default")
        except ConnectionError:
            # The node was killed meanwhile.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._reader.close()
        self._socket.close()

    def ask(self, opcode, *, vbucket=0, framing=b"", extras=b"", key=b"", value=b""):
        body = framing + extras + key + value
        lengths = (
            struct.pack(">BB", len(framing), len(key)) if framing else struct.pack(">H", len(key))
        )
        self._socket.sendall(
            struct.pack(">BB", 0x08 if framing else 0x80, opcode)
            + lengths
            + struct.pack(">BBHIIQ", len(extras), 0, vbucket, len(body), 0, 0)
            + body
        )
        header = self._reader.read(24)
        if len(header) < 24:
            raise ConnectionError
        key_length, extras_length, status, length = struct.unpack(">2xHBxHI12x", header)
        answer = self._reader.read(length)
        if len(answer) < length:
            raise ConnectionError
        return status, answer[extras_length + key_length :]

    def succeed(self, opcode, **request):
        status, value = self.ask(opcode, **request)
        assert status == 0, (hex(opcode), hex(status))
        return value

    def get(self, vbucket, key, *, from_replica=False):
        opcode = 0x83 if from_replica else 0x00
        status, value = self.ask(opcode, vbucket=vbucket, key=key.encode())
        assert status in (0, 1), hex(status)
        return None if status else int(value)

    def set(self, vbucket, key, number, level):
        """Writes a document; with a level once it is durable, without at once."""
        framing = struct.pack(">BBH", 0x13, level, 60_000) if level else b""
        self.succeed(
            0x01, vbucket=vbucket, framing=framing, extras=bytes(8), key=key.encode(),
            value=str(number).encode(),
        )  # fmt: skip

    def wait_until_persisted(self, vbucket):
        """Waits until everything is on disk; returns up to where."""
        branch = struct.pack(">Q", self.failover_log(vbucket)[0][0])
        high = self.succeed(0x91, vbucket=vbucket, value=branch)[19:27]
        self.succeed(0xB7, vbucket=vbucket, extras=high)
        return int.from_bytes(high)

    def failover_log(self, vbucket):
        return list(struct.iter_unpack(">QQ", self.succeed(0x96, vbucket=vbucket)))


_NODES, _VBUCKETS, _DOCUMENTS = 3, 4, 30


def _keys():
    """Some keys of each vBucket."""
    keys, numbers = [[] for _ in range(_VBUCKETS)], itertools.count()
    while min(map(len, keys)) < _DOCUMENTS:
        key = f"key_{next(numbers)}"
        keys[(zlib.crc32(key.encode()) >> 16) % _VBUCKETS].append(key)
    return keys


class Writer:
    """Writes the documents of a vBucket and knows what of them a cluster that is killed must have.

    The number in a document counts its versions.
    """

    def __init__(self, vbucket, keys, chance):
        self.vbucket, self.keys, self.chance = vbucket, keys, random.Random(chance.random())
        # The node of the active copy, as an even layout has it.
        self.node = vbucket * _NODES // _VBUCKETS
        self.tried = dict.fromkeys(keys, 0)
        self.safe = dict.fromkeys(keys, 0)
        self.acknowledged = collections.Counter()
        self.log, self.persisted = None, 0

    def run(self, facts):
        """Writes until the cluster is gone."""
        with contextlib.suppress(ConnectionError), Node(facts, self.node) as connection:
            while True:
                # Level 1 is durable only as long as not all nodes are killed at once.
                level = self.chance.choice((0, 0, 0, 1, 2, 3))
                keys = self.chance.sample(self.keys, 1 if level else 5)
                for key in keys:
                    self.tried[key] += 1
                    connection.set(self.vbucket, key, self.tried[key], level)
                if level == 0:
                    self.persisted = connection.wait_until_persisted(self.vbucket)
                if level != 1:
                    self.safe.update((key, self.tried[key]) for key in keys)
                    self.acknowledged[level] += 1

    def check(self, facts):
        """Compares the documents with what must be there, on every node; returns them."""
        copies = []
        for node in range(_NODES):
            with Node(facts, node) as connection:
                get = functools.partial(
                    connection.get, self.vbucket, from_replica=node != self.node
                )
                copies.append({key: get(key) or 0 for key in self.keys})
        found = copies[self.node]
        assert copies == [found] * _NODES
        for key, number in found.items():
            assert self.safe[key] <= number <= self.tried[key], key
        self.safe = found
        return {key: number for key, number in found.items() if number}

    def check_branches(self, facts, *, was_killed):
        """The failover log of every copy has one more entry after a kill, and no other."""
        logs = []
        for node in range(_NODES):
            with Node(facts, node) as connection:
                logs.append(connection.failover_log(self.vbucket))
        log = logs[self.node]
        assert logs == [log] * _NODES
        before, self.log = self.log, log
        if before is not None:
            # A log has 25 entries at most.
            assert log[was_killed:] == before[: 25 - was_killed]
            assert len(set(log)) == len(log)
        if was_killed:
            assert log[0][1] >= self.persisted


class Reader:
    """Follows a cluster from life to life, going back with it."""

    def __init__(self):
        self.versions, self.position, self.rollbacks = {}, None, 0

    def read(self, facts):
        """Reads up to now; returns the documents there are then."""
        with connect(facts) as client:
            stream = client.stream(start=self.position or "earliest", until="now", columns="full")
            for row in rows_of(stream):
                vbucket, seqno = row["vbucket"], row["seqno"]
                versions = self.versions.setdefault(vbucket, [])
                if row["op"] == "rollback":
                    self.rollbacks += 1
                    versions[:] = [version for version in versions if version[0] <= seqno]
                else:
                    versions.append((seqno, row["key"], int(row["value"])))
            self.position = stream.checkpoint()
        return {key: number for versions in self.versions.values() for _, key, number in versions}


@pytest.mark.timeout(3600)
def test_ft_16_to_ft_18_a_cluster_that_is_killed_again_and_again_has_what_it_acknowledged(serve):
    kills = int(os.environ.get("DCP_KILLS", "20"))
    seed = int(os.environ.get("DCP_KILLS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    writers = [Writer(vbucket, keys, chance) for vbucket, keys in enumerate(_keys())]
    reader = Reader()

    def check(facts, *, was_killed):
        documents = {}
        for writer in writers:
            documents |= writer.check(facts)
            writer.check_branches(facts, was_killed=was_killed)
        assert reader.read(facts) == documents, f"seed {seed}"
        return documents

    for life in range(kills):
        process, facts = serve()
        check(facts, was_killed=life > 0)
        with concurrent.futures.ThreadPoolExecutor(len(writers)) as threads:
            running = [threads.submit(writer.run, facts) for writer in writers]
            time.sleep(chance.random() * 0.4)
            if chance.random() < 0.3:
                # What is lost of this is taken back.
                reader.read(facts)
            process.send_signal(signal.SIGKILL)
            for each in running:
                each.result()
        assert process.wait(timeout=60) == -signal.SIGKILL, f"seed {seed}"
    for was_killed in (True, False, False):
        process, facts = serve()
        documents = check(facts, was_killed=was_killed)
        assert Reader().read(facts) == documents, "who comes new gets the same"
        process.terminate()
        assert process.wait(timeout=60) == 0
    acknowledged = sum((writer.acknowledged for writer in writers), collections.Counter())
    assert all(acknowledged[level] > kills / 2 for level in (0, 2, 3)), acknowledged
    assert reader.rollbacks or kills < 20, f"seed {seed}: nothing was ever lost"


_FAIL_OVER = """
import sys, time
from dcp_rs.testing import EmbeddedCluster

cluster = EmbeddedCluster(nodes=3, replicas=2, vbuckets=4, data=sys.argv[1])
for key in "abcdefgh":
    cluster.upsert(key, "1")
cluster.persist()
cluster.failover(0)
print("failed over", flush=True)
time.sleep(60)
"""


def _three_nodes(folder):
    """Opens a folder on ports that follow each other; returns the cluster and its first port."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(ConnectError):
            return port, dcp_rs.testing.EmbeddedCluster(
                nodes=3, replicas=2, vbuckets=4, data=folder, port=port
            )


@pytest.mark.default_password
def test_a_node_that_was_failed_over_stays_out_when_the_cluster_is_killed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _FAIL_OVER, tmp_path], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"failed over\n"
    finally:
        process.kill()
        process.communicate()
    port, cluster = _three_nodes(tmp_path)
    with cluster:
        assert cluster.num_nodes == 2
        assert all(cluster.get(key).value == b"1" for key in "abcdefgh")
        with Node({"connection_string": f"couchbase://127.0.0.1:{port}"}, 0) as node:
            status, value = node.ask(0x00, vbucket=0, key=b"a")
            assert status == 7, "it has no vBuckets"
            servers = json.loads(value)["vBucketServerMap"]["serverList"]
            assert servers == [f"127.0.0.1:{port + number}" for number in (1, 2)]
        assert all(0 not in cluster.copies_of(vbucket) for vbucket in range(4))
        cluster.rebalance()
        assert cluster.num_nodes == 3
        assert any(0 in cluster.copies_of(vbucket) for vbucket in range(4))


def test_only_the_owner_may_read_the_data(tmp_path):
    file = tmp_path / "data" / "bucket.redb"
    for _ in range(2):
        with dcp_rs.testing.EmbeddedCluster(vbuckets=1, data=tmp_path / "data") as cluster:
            cluster.upsert("key", b"1")
        assert file.stat().st_mode & 0o777 == 0o600
        # As an earlier release made it.
        file.chmod(0o644)
