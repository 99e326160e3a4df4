"""What an operator does to the embedded cluster, and what its clients see of it."""

import socket
import struct
from types import MappingProxyType

import pytest

import dcp_rs
from dcp_rs.exceptions import (
    BucketNotFoundError,
    ConfigError,
    ConnectError,
    DcpError,
    DocumentNotFoundError,
)
from reading import rows_of


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=4) as running:
        yield running


def on_vbucket(cluster, vbucket, prefix):
    """A key of a vBucket."""
    keys = (f"{prefix}_{n}" for n in range(1000))
    return next(key for key in keys if cluster.vbucket_of(key) == vbucket)


def changes(cluster, **options):
    with cluster.connect() as client, client.stream(until="now", **options) as stream:
        return [(row["op"], row["key"]) for row in rows_of(stream)]


def test_a_failover_loses_what_the_replica_lacked_and_says_so(cluster):
    kept, lost = on_vbucket(cluster, 0, "kept"), on_vbucket(cluster, 0, "lost")
    assert cluster.copies_of(0) == [0, 1]
    cluster.upsert(kept, "1")
    cluster.set_replica_lag(0, 1, None)
    cluster.upsert(lost, "2")
    with cluster.connect() as client:
        stream = client.stream(until="now", vbuckets=[0])
        assert [row["key"] for row in rows_of(stream)] == [kept, lost]
        position = stream.checkpoint()
    cluster.failover(0)
    assert (cluster.num_nodes, cluster.copies_of(0)) == (1, [1])
    assert cluster.get(lost) is None
    with cluster.connect() as client:
        rows = rows_of(client.stream(start=position, until="now", vbuckets=[0]))
    assert rows[0]["op"] == "rollback"


def test_an_unsafe_failover_begins_an_epoch_that_clients_follow(cluster):
    epoch, rev = cluster.map_version
    cluster.move_vbucket(0, 1)
    assert cluster.map_version == (epoch, rev + 1)
    keys = [on_vbucket(cluster, vbucket, "key") for vbucket in range(4)]
    with cluster.connect() as client, client.stream(batch=dcp_rs.BatchPolicy(linger=0)) as stream:
        cluster.upsert(keys[0], "1")
        assert rows_of([next(stream)])[0]["key"] == keys[0]
        cluster.failover_unsafely([1])
        assert cluster.map_version == (epoch + 1, 1)
        assert {tuple(cluster.copies_of(vbucket)) for vbucket in range(4)} == {(0,)}
        for key in keys:
            cluster.upsert(key, "2")
        seen = set()
        while not seen.issuperset(keys):
            seen |= {row["key"] for row in rows_of([next(stream)]) if row["value"] == b"2"}
    with pytest.raises(ConfigError, match="node 0"):
        cluster.failover_unsafely([0])


@pytest.mark.parametrize("option", ["port", "management_port"])
def test_a_port_in_use_is_told_with_what_to_do(option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = (
            rf"cannot listen on 127\.0\.0\.1:{port}: .*: choose another port or host, or end what"
        )
        with pytest.raises(ConnectError, match=told) as raised:
            dcp_rs.testing.EmbeddedCluster(**{option: port})
    assert raised.value.code == "listen"


def test_a_document_shows_its_value_or_the_beginning_of_it(cluster):
    cluster.upsert("short", {"n": 1}, xattrs={"hidden": "x"})
    cluster.upsert("long", b"x" * 10_000)
    assert repr(cluster.get("short")).startswith("""Document(value=b'{"n":1}', datatype='json', """)
    assert "hidden" not in repr(cluster.get("short"))
    assert len(repr(cluster.get("long"))) < 300


def test_a_graceful_failover_loses_nothing(cluster):
    key = on_vbucket(cluster, 0, "key")
    cluster.set_replica_lag(0, 1, None)
    cluster.upsert(key, "1")
    cluster.failover(0, graceful=True)
    assert cluster.get(key).value == b"1"


def test_a_killed_node_comes_back_with_what_it_had_persisted(cluster):
    saved, lost = on_vbucket(cluster, 0, "saved"), on_vbucket(cluster, 0, "lost")
    cluster.upsert(saved, "1")
    cluster.persist()
    cluster.hold_persistence(0)
    cluster.hold_persistence(0, 1)
    cluster.upsert(lost, "2")
    cluster.kill(0)
    with pytest.raises(DcpError, match="restart its node"):
        cluster.upsert(saved, "3")
    cluster.restart(0)
    assert (cluster.get(saved).value, cluster.get(lost)) == (b"1", None)


def test_a_clean_restart_loses_nothing_and_an_unclean_one_what_was_held(cluster):
    key = on_vbucket(cluster, 0, "key")
    cluster.hold_persistence(0)
    cluster.upsert(key, "1")
    cluster.restart(0)
    assert cluster.get(key).value == b"1"
    cluster.upsert(key, "2")
    cluster.restart(0, clean=False)
    assert cluster.get(key).value == b"1"


def test_an_added_node_gets_its_share(cluster):
    node = cluster.add_node()
    assert (node, cluster.num_nodes) == (2, 3)
    assert node not in {cluster.copies_of(vbucket)[0] for vbucket in range(4)}
    cluster.rebalance()
    assert {cluster.copies_of(vbucket)[0] for vbucket in range(4)} == {0, 1, 2}
    cluster.move_vbucket(0, node)
    assert cluster.copies_of(0)[0] == node
    assert len(cluster.management_urls) == 3


def test_a_bucket_is_dropped_and_made_anew(cluster):
    cluster.upsert("key", "1")
    identity = cluster.bucket_uuid
    cluster.drop_bucket()
    assert cluster.bucket_uuid == ""
    with pytest.raises(BucketNotFoundError):
        cluster.connect()
    cluster.create_bucket()
    assert cluster.bucket_uuid not in {"", identity}
    assert cluster.get("key") is None
    assert changes(cluster) == []


def test_a_flushed_bucket_is_empty_and_whoever_reads_on_starts_over(cluster):
    cluster.create_collection("landmark")
    cluster.upsert("key", "1")
    with cluster.connect() as client:
        with client.stream(until="now") as stream:
            list(stream)
            read = stream.checkpoint()
        cluster.flush_bucket()
        assert cluster.get("key") is None
        assert "landmark" in cluster.collections()["_default"]
        cluster.upsert("other", "2")
        with client.stream(start=read, until="now") as stream:
            ops = [row["op"] for batch in stream for row in batch.rows()]
        assert "rollback" in ops
        assert "mutation" in ops
    cluster.drop_bucket()
    with pytest.raises(ConfigError, match="bucket"):
        cluster.flush_bucket()


def test_collections_are_written_read_and_dropped(cluster):
    cluster.create_scope("inventory")
    cluster.create_collection("inventory.airline")
    cluster.create_collection("landmark", max_ttl=3600)
    cluster.upsert("key", "default")
    cluster.upsert("key", "airline", collection="inventory.airline")
    cluster.upsert("key", "landmark", collection="landmark")
    assert cluster.collections() == {"_default": ["_default", "landmark"], "inventory": ["airline"]}
    assert cluster.get("key").value == b"default"
    assert cluster.get("key", collection="inventory.airline").value == b"airline"
    assert cluster.get("key", collection="landmark").expiry > 0
    assert changes(cluster, collections=["inventory.airline"]) == [("mutation", "key")]
    cluster.remove("key", collection="inventory.airline")
    cluster.expire("key", collection="landmark")
    assert changes(cluster, collections=["inventory.airline", "landmark"]) in (
        [("deletion", "key"), ("expiration", "key")],
        [("expiration", "key"), ("deletion", "key")],
    )
    with pytest.raises(DocumentNotFoundError):
        cluster.remove("key", collection="landmark")
    cluster.drop_collection("landmark")
    cluster.drop_scope("inventory")
    assert cluster.collections() == {"_default": ["_default"]}
    with pytest.raises(ConfigError, match=r"no collection inventory\.airline: create it"):
        cluster.get("key", collection="inventory.airline")


def test_a_value_may_be_any_mapping(cluster):
    value = MappingProxyType({"a": 1, "in": MappingProxyType({"b": 2})})
    cluster.upsert("key", value, xattrs=MappingProxyType({"meta": value}))
    assert cluster.get("key").value == b'{"a":1,"in":{"b":2}}'
    assert cluster.get("key").xattrs == {"meta": {"a": 1, "in": {"b": 2}}}
    cluster.insert("other", value)
    assert cluster.get("other").value == b'{"a":1,"in":{"b":2}}'


def test_xattrs_are_written_read_and_streamed(cluster):
    cluster.upsert("key", {"a": 1}, xattrs={"_sync": {"rev": 3}, "user": "me"})
    found = cluster.get("key")
    assert (found.value, found.datatype) == (b'{"a":1}', "json")
    assert found.xattrs == {"_sync": {"rev": 3}, "user": "me"}
    with cluster.connect() as client:
        (row,) = rows_of(client.stream(until="now", include="xattrs"))
    assert row["value"] == b'{"a":1}'
    assert dict(row["xattrs"]) == {"_sync": '{"rev":3}', "user": '"me"'}
    cluster.upsert("key", b"\xff")
    assert (cluster.get("key").xattrs, cluster.get("key").datatype) == ({}, "binary")


def test_purged_deletions_are_not_streamed(cluster):
    first, last = on_vbucket(cluster, 0, "first"), on_vbucket(cluster, 0, "last")
    cluster.upsert(first, "1")
    removed = cluster.remove(first)
    cluster.upsert(last, "2")
    assert ("deletion", first) in changes(cluster)
    cluster.purge(0, removed.seqno)
    assert changes(cluster) == [("mutation", last)]


def test_an_ephemeral_bucket_loses_everything_in_a_restart():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1, ephemeral=True) as cluster:
        cluster.upsert("key", "1")
        cluster.restart(0)
        assert cluster.get("key") is None


def test_the_alternate_address_is_where_external_clients_go():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1, alternate_host="localhost") as cluster:
        cluster.upsert("key", "1")
        with cluster.connect(network="external") as client:
            assert [node.split(":")[0] for node in client.vbuckets_by_node()] == ["localhost"]
            assert client.high_seqnos() == {0: 1}


def test_connecting_takes_the_options_of_connect(cluster):
    with cluster.connect(connect_timeout=30.0) as client:
        assert client.options.connect_timeout == 30.0
    with pytest.raises(BucketNotFoundError):
        cluster.connect(bucket="nonesuch")
    with pytest.raises(ConfigError, match="start the cluster with tls=True"):
        cluster.connect(tls=True)
    with pytest.raises(TypeError, match="nonesuch"):
        cluster.connect(nonesuch=1)


def test_connecting_over_tls_trusts_the_authority_that_was_made():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1, tls=True) as cluster:
        cluster.upsert("key", "1")
        with cluster.connect(tls=True) as client:
            assert client.options.connection_string.startswith("couchbases://")
            assert client.high_seqnos() == {0: 1}
        file = cluster.ca_file
        assert file.read_text() == cluster.ca_pem
    assert not file.exists()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda cluster: cluster.failover(7), "node"),
        (lambda cluster: cluster.kill("0"), "node: must be a whole number"),
        (lambda cluster: cluster.restart(0, clean=1), "clean: must be True or False"),
        (lambda cluster: cluster.copies_of(99), "vbucket:99 does not exist|99"),
        (lambda cluster: cluster.set_replica_lag(0, 2, 1), "no replica 2"),
        (lambda cluster: cluster.set_replica_lag(0, 1, -1), "lag"),
        (lambda cluster: cluster.hold_persistence(0, 2), "no replica 2"),
        (lambda cluster: cluster.create_bucket(), "drop it first"),
        (lambda cluster: cluster.create_collection("nonesuch.a"), "no such scope"),
        (
            lambda cluster: cluster.create_collection("long", max_ttl=1 << 31),
            "max_ttl: 2147483648 is not from 0 to 2147483647",
        ),
        (
            lambda cluster: cluster.modify_collection("_default", max_ttl=1 << 31),
            "max_ttl: 2147483648 is not from 0 to 2147483647",
        ),
        (lambda cluster: cluster.upsert("a", "1", collection=1), "collection: must be text"),
        (lambda cluster: cluster.upsert("a", {"n": float("nan")}), "value: is not JSON"),
        (lambda cluster: cluster.upsert("a", {"n": object()}), "value: is not JSON: .* object "),
        (
            lambda cluster: cluster.upsert("a", "1", xattrs={"n": float("inf")}),
            "xattrs: is not JSON",
        ),
        (lambda _: dcp_rs.testing.EmbeddedCluster(replicas=4), "replicas: 4 is not from 0 to 3"),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(limits=dcp_rs.testing.Limits(max_streams=0)),
            "max_streams: 0 is not from 1",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(
                limits=dcp_rs.testing.Limits(max_unacknowledged_bytes=1 << 32)
            ),
            "max_unacknowledged_bytes",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(limits=dcp_rs.testing.Limits(idle_timeout=0)),
            "idle_timeout",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(
                limits=dcp_rs.testing.Limits(dcp_idle_timeout=0)
            ),
            "dcp_idle_timeout",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(
                limits=dcp_rs.testing.Limits(persistence_timeout=-1)
            ),
            "persistence_timeout",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(keeps_history=1),
            "keeps_history: must be True or False",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(keeps_compressed="no"),
            "keeps_compressed: must be True or",
        ),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(
                limits=dcp_rs.testing.Limits(congestion_control=1)
            ),
            "congestion_control: must be text",
        ),
        (lambda _: dcp_rs.testing.EmbeddedCluster(data=1), "data: must be a path"),
        (
            lambda _: dcp_rs.testing.EmbeddedCluster(data="x", ephemeral=True),
            "data: an ephemeral bucket has no",
        ),
        (lambda cluster: cluster.failover_unsafely([7]), "node"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(cluster, call, named):
    with pytest.raises(ConfigError, match=named):
        call(cluster)


def test_a_client_that_says_nothing_is_shown_out():
    with dcp_rs.testing.EmbeddedCluster(
        limits=dcp_rs.testing.Limits(authentication_timeout=0.1)
    ) as cluster:
        host, _, port = cluster.connection_string.removeprefix("couchbase://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            assert connection.recv(1) == b""


class RawClient:
    """A client that knows nothing but packets."""

    def __init__(self, cluster):
        host, _, port = cluster.connection_string.removeprefix("couchbase://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)

    def ask(self, opcode, key=b"", extras=b"", value=b""):
        """Sends a request; gives the status and the value of the answer."""
        body = extras + key + value
        lengths = struct.pack(">HBxxxI", len(key), len(extras), len(body))
        self.socket.sendall(bytes([0x80, opcode]) + lengths + bytes(12) + body)
        _, keys, extras, status, length = struct.unpack(">HHBxHI", self.read(24)[:12])
        return status, self.read(length)[extras + keys :]

    def read(self, count):
        read = b""
        while len(read) < count:
            more = self.socket.recv(count - len(read))
            assert more, "the node has closed the connection"
            read += more
        return read

    def open_for_dcp(self, *controls):
        """Authenticates and opens the connection for DCP; gives the status of each control."""
        assert self.ask(0x1F, b"raw", value=bytes.fromhex("000a"))[0] == 0
        assert self.ask(0x21, b"PLAIN", value=b"\0Administrator\0canary-8f1c2e")[0] == 0
        assert self.ask(0x89, b"default")[0] == 0
        assert self.ask(0x50, b"raw", struct.pack(">II", 0, 1))[0] == 0
        return [self.ask(0x5E, key, value=value)[0] for key, value in controls]


def test_a_dcp_client_that_answers_no_noop_is_shown_out():
    with dcp_rs.testing.EmbeddedCluster(
        limits=dcp_rs.testing.Limits(dcp_idle_timeout=0.2)
    ) as cluster:
        client = RawClient(cluster)
        with client.socket:
            assert client.open_for_dcp((b"enable_noop", b"true")) == [0]
            assert client.socket.recv(1) == b""


@pytest.mark.parametrize(("keeps_history", "status"), [(False, 0x83), (True, 0)])
def test_every_version_is_streamed_if_history_is_kept(keeps_history, status):
    with dcp_rs.testing.EmbeddedCluster(keeps_history=keeps_history) as cluster:
        client = RawClient(cluster)
        with client.socket:
            assert client.open_for_dcp((b"change_streams", b"true")) == [status]


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_client_compressed_may_be_kept_so(kept):
    document = b'{"a":"' + b"x" * 100 + b'"}'
    # Snappy: the length, the beginning as it is, and copies of its last byte.
    compressed = bytes([108, 6 << 2]) + document[:7] + bytes([0xFE, 1, 0]) + bytes([0x8A, 1, 0])
    compressed += bytes([1 << 2]) + b'"}'
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1, keeps_compressed=kept) as cluster:
        client = RawClient(cluster)
        with client.socket:
            assert client.ask(0x1F, b"raw", value=bytes.fromhex("000a"))[0] == 0
            assert client.ask(0x21, b"PLAIN", value=b"\0Administrator\0canary-8f1c2e")[0] == 0
            assert client.ask(0x89, b"default")[0] == 0
            body = bytes(8) + b"key" + compressed
            head = struct.pack(">BBHBBHI", 0x80, 0x01, 3, 8, 2, 0, len(body))
            client.socket.sendall(head + bytes(12) + body)
            answer = client.read(24)
            client.read(int.from_bytes(answer[8:12], "big"))
            assert answer[6:8] == bytes(2)
        client = RawClient(cluster)
        with client.socket:
            client.open_for_dcp()
            request = struct.pack(">IIQQQQQ", 0, 0, 0, 1, 0, 0, 0)
            assert client.ask(0x53, extras=request)[0] == 0
            opcode = 0
            while opcode != 0x57:
                opcode, keys, extras, length = struct.unpack(">xBHBxxxI", client.read(24)[:12])
                value = client.read(length)[extras + keys :]
            assert value == (compressed if kept else document)


def test_a_congestion_control_nobody_knows_is_refused():
    with pytest.raises(dcp_rs.DcpError, match=r"(?i)listen"):
        dcp_rs.testing.EmbeddedCluster(limits=dcp_rs.testing.Limits(congestion_control="nonesuch"))
