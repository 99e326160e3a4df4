"""The Couchbase SDK writes to a cluster to which things happen; what it wrote is streamed.

It has no DCP and so no flow control: for it these are the same scenarios on the side of documents.
"""

from __future__ import annotations

import contextlib
import json
import threading
from datetime import timedelta

import pytest
from programs import skip

from dcp_rs.testing import EmbeddedCluster

try:
    from couchbase.auth import PasswordAuthenticator
    from couchbase.cluster import Cluster
    from couchbase.diagnostics import PingState, ServiceType
    from couchbase.durability import DurabilityLevel, ServerDurability
    from couchbase.exceptions import (
        AmbiguousTimeoutException,
        BucketAlreadyExistsException,
        BucketDoesNotExistException,
        CASMismatchException,
        CollectionAlreadyExistsException,
        CollectionNotFoundException,
        DocumentLockedException,
        DocumentNotFoundException,
        DocumentNotLockedException,
        DurabilityImpossibleException,
        DurabilitySyncWriteAmbiguousException,
        ScopeNotFoundException,
        TransactionFailed,
        UnAmbiguousTimeoutException,
    )
    from couchbase.management.buckets import CreateBucketSettings
    from couchbase.management.collections import CreateCollectionSettings
    from couchbase.options import (
        ClusterOptions,
        ClusterTimeoutOptions,
        GetOptions,
        MutateInOptions,
        PingOptions,
        RemoveOptions,
        ReplaceOptions,
        UpsertOptions,
    )
    from couchbase.subdocument import upsert as upsert_path
except ImportError:
    Cluster = None

# The fixtures build the programs, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(autouse=True)
def sdk():
    if Cluster is None:
        skip("the Couchbase SDK is not tried: it is not installed")


@pytest.fixture
def cluster():
    with EmbeddedCluster(nodes=2, vbuckets=64, replicas=1) as running:
        yield running


@pytest.fixture
def open_cluster():
    """Connects SDKs and closes them."""
    opened = []

    def connect(cluster, *, tls=False):
        password = PasswordAuthenticator("Administrator", "password")
        address = cluster.connection_string
        if tls:
            address = cluster.tls_connection_string
            password = PasswordAuthenticator(
                "Administrator", "password", cert_path=str(cluster.ca_file)
            )
        # As patient as the machine may be slow.
        timeouts = ClusterTimeoutOptions(
            kv_timeout=timedelta(seconds=60), connect_timeout=timedelta(seconds=60)
        )
        opened.append(Cluster(address, ClusterOptions(password, timeout_options=timeouts)))
        opened[-1].bucket("default")
        opened[-1].wait_until_ready(timedelta(seconds=60))
        return opened[-1]

    yield connect
    for sdk in opened:
        sdk.close()


@pytest.fixture
def collection(cluster, open_cluster):
    return open_cluster(cluster).bucket("default").default_collection()


def streamed(cluster):
    """What a DCP client is sent: the documents, decoded, by key."""
    with cluster.connect() as client, client.stream(until="now") as stream:
        rows = [row for batch in stream for row in batch.rows()]
    newest = {row["key"]: row for row in rows}
    return {key: json.loads(row["value"]) for key, row in newest.items() if row["op"] == "mutation"}


def write(collection, count, prefix="doc"):
    """Writes documents; gives them by key."""
    documents = {f"{prefix}-{n}-é": {"n": n, "text": "ü" * (n % 50)} for n in range(count)}
    for key, value in documents.items():
        collection.upsert(key, value)
    return documents


def settle(collection, key):
    """Reads a document until the SDK has the new cluster map.

    It never sends, nor sends again, a request that waits for a new connection to a node at the time
    a map comes in which that node is no more: the request times out.
    """
    for _ in range(20):
        with contextlib.suppress(UnAmbiguousTimeoutException):
            collection.get(key, GetOptions(timeout=timedelta(seconds=3)))
            return
    pytest.fail("the SDK did not find the node that took over")


def test_what_the_sdk_loads_is_streamed(cluster, collection):
    documents = write(collection, 500)
    for key in list(documents)[::5]:
        collection.remove(key)
        del documents[key]
    assert streamed(cluster) == documents
    assert {key: collection.get(key).content_as[dict] for key in documents} == documents


def test_documents_are_written_over_tls(open_cluster):
    with EmbeddedCluster(nodes=2, vbuckets=64, tls=True) as cluster:
        collection = open_cluster(cluster, tls=True).bucket("default").default_collection()
        documents = write(collection, 50)
        assert streamed(cluster) == documents


def test_what_the_sdk_compressed_it_reads_as_it_was(open_cluster):
    with EmbeddedCluster(nodes=1, vbuckets=4, keeps_compressed=True) as cluster:
        documents = open_cluster(cluster).bucket("default").default_collection()
        large = {"pad": "abc" * 2000}
        documents.upsert("large", large)
        assert documents.get("large").content_as[dict] == large
        assert documents.touch("large", timedelta(hours=1)).cas
        assert documents.get("large").content_as[dict] == large


def test_another_session_goes_on_where_the_first_ended(cluster, open_cluster):
    first = open_cluster(cluster)
    documents = write(first.bucket("default").default_collection(), 50)
    versions = {key: first.bucket("default").default_collection().get(key).cas for key in documents}
    first.close()
    again = open_cluster(cluster).bucket("default").default_collection()
    for key, cas in versions.items():
        again.replace(key, {"again": True}, ReplaceOptions(cas=cas))
        with pytest.raises(CASMismatchException):
            again.replace(key, {"late": True}, ReplaceOptions(cas=cas))
    assert streamed(cluster) == {key: {"again": True} for key in documents}


def test_what_a_failover_loses_is_gone_and_what_follows_is_of_another_branch(cluster, collection):
    documents = write(collection, 200)
    for vbucket in range(cluster.num_vbuckets):
        cluster.set_replica_lag(vbucket, 1, None)
    on_first = [key for key in documents if cluster.copies_of(cluster.vbucket_of(key))[0] == 0]
    lost = {key: collection.upsert(key, {"lost": True}).mutation_token() for key in on_first}
    cluster.failover(0)
    settle(collection, on_first[0])
    for key in documents:
        assert collection.get(key).content_as[dict] == documents[key]
    for key, before in lost.items():
        after = collection.upsert(key, {"found": True}).mutation_token()
        documents[key] = {"found": True}
        assert after.partition_id == before.partition_id == cluster.vbucket_of(key)
        assert after.partition_uuid != before.partition_uuid
    assert streamed(cluster) == documents


def test_writes_go_on_through_a_crash(cluster, collection):
    documents = write(collection, 200)
    cluster.persist()
    cluster.kill(1)
    # What is written meanwhile waits for the node.
    threading.Timer(0.5, cluster.restart, [1]).start()
    documents |= write(collection, 200, prefix="meanwhile")
    assert streamed(cluster) == documents


def test_writes_go_on_through_rebalances(cluster, collection):
    documents = {}
    failure = []
    done = threading.Event()

    def keep_writing():
        try:
            for n in range(100_000):
                key = f"live-{n % 500}"
                collection.upsert(key, {"n": n})
                documents[key] = {"n": n}
                if done.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - it is raised again where the test waits
            failure.append(error)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for vbucket in range(cluster.num_vbuckets):
            cluster.move_vbucket(vbucket, 1 - cluster.copies_of(vbucket)[0])
        cluster.add_node()
        cluster.rebalance()
        documents_then = len(documents)
        assert cluster.copies_of(0)
    finally:
        done.set()
        writer.join()
    assert not failure, failure[0]
    assert documents_then <= len(documents)
    assert streamed(cluster) == documents


def test_collections_hold_documents_apart(cluster, open_cluster):
    bucket = open_cluster(cluster).bucket("default")
    with pytest.raises(ScopeNotFoundException):
        bucket.scope("inventory").collection("airline").upsert(
            "early", {}, UpsertOptions(timeout=timedelta(seconds=1))
        )
    cluster.create_scope("inventory")
    cluster.create_collection("inventory.airline")
    airline = bucket.scope("inventory").collection("airline")
    plain = bucket.default_collection()
    airline.upsert("same", {"in": "airline"})
    plain.upsert("same", {"in": "default"})
    assert airline.get("same").content_as[dict] == {"in": "airline"}
    assert plain.get("same").content_as[dict] == {"in": "default"}
    with (
        cluster.connect() as client,
        client.stream(until="now", collections=["inventory.airline"]) as stream,
    ):
        rows = [row for batch in stream for row in batch.rows()]
    assert [(row["key"], json.loads(row["value"])) for row in rows] == [("same", {"in": "airline"})]
    scopes = {scope.name: scope for scope in bucket.collections().get_all_scopes()}
    assert {each.name for each in scopes["inventory"].collections} == {"airline"}


def test_every_node_answers_a_noop(cluster, open_cluster):
    bucket = open_cluster(cluster).bucket("default")
    answers = bucket.ping(PingOptions(service_types=[ServiceType.KeyValue])).endpoints
    told = {answer.remote: answer.state for answer in answers[ServiceType.KeyValue]}
    nodes = cluster.connection_string.removeprefix("couchbase://").split(",")
    assert told == dict.fromkeys(nodes, PingState.OK)


def test_replicas_are_read_on_their_own_nodes(collection):
    documents = write(collection, 20)
    for key, document in documents.items():
        answers = list(collection.get_all_replicas(key))
        assert [answer.content_as[dict] for answer in answers] == [document] * 2
        assert sorted(answer.is_replica for answer in answers) == [False, True]


def test_a_document_that_was_removed_is_missing(collection):
    collection.upsert("gone", {})
    collection.remove("gone")
    with pytest.raises(DocumentNotFoundException):
        collection.get("gone")


@pytest.mark.parametrize(
    "level", ["MAJORITY", "MAJORITY_AND_PERSIST_TO_ACTIVE", "PERSIST_TO_MAJORITY"]
)
def test_durable_writes_are_streamed_once_committed(cluster, collection, level):
    durability = ServerDurability(DurabilityLevel[level])
    for n in range(20):
        collection.upsert(f"key_{n}", {"n": n}, UpsertOptions(durability=durability))
    options = MutateInOptions(durability=durability)
    collection.mutate_in("key_0", [upsert_path("more", True)], options)
    collection.remove("key_1", RemoveOptions(durability=durability))
    expected = {f"key_{n}": {"n": n} for n in range(20) if n != 1}
    expected["key_0"] = {"n": 0, "more": True}
    assert streamed(cluster) == expected


def test_a_durable_write_that_no_replica_gets_is_ambiguous_and_undone(cluster, collection):
    for vbucket in range(64):
        cluster.set_replica_lag(vbucket, 1, None)
    majority = ServerDurability(DurabilityLevel.MAJORITY)
    options = UpsertOptions(durability=majority, timeout=timedelta(seconds=2))
    ambiguous = (DurabilitySyncWriteAmbiguousException, AmbiguousTimeoutException)
    with pytest.raises(ambiguous):
        collection.upsert("key", {}, options)
    assert not collection.exists("key").exists
    with EmbeddedCluster(replicas=1) as lonely:
        login = PasswordAuthenticator("Administrator", "password")
        sdk = Cluster(lonely.connection_string, ClusterOptions(login))
        sdk.wait_until_ready(timedelta(seconds=10))
        with pytest.raises(DurabilityImpossibleException):
            sdk.bucket("default").default_collection().upsert("key", {}, options)
        sdk.close()


def test_transactions_are_committed_and_rolled_back(cluster, open_cluster):
    sdk = open_cluster(cluster)
    collection = sdk.bucket("default").default_collection()
    for key in ("from", "to", "old"):
        collection.upsert(key, {"amount": 100})

    def transfer(context):
        giver, taker = context.get(collection, "from"), context.get(collection, "to")
        context.replace(giver, {"amount": 60})
        context.replace(taker, {"amount": 140})
        context.insert(collection, "receipt", {"amount": 40})
        context.remove(context.get(collection, "old"))

    sdk.transactions.run(transfer)
    committed = {"from": {"amount": 60}, "to": {"amount": 140}, "receipt": {"amount": 40}}
    assert streamed(cluster) == committed

    def fail(context):
        context.replace(context.get(collection, "from"), {"amount": 0})
        context.insert(collection, "never", {})
        raise RuntimeError("no")

    with pytest.raises(TransactionFailed):
        sdk.transactions.run(fail)
    assert streamed(cluster) == committed
    assert not collection.exists("never").exists


def test_scopes_and_collections_are_made_and_dropped_by_the_sdk(cluster, open_cluster):
    bucket = open_cluster(cluster).bucket("default")
    manager = bucket.collections()
    manager.create_scope("shop")
    manager.create_collection("shop", "orders", CreateCollectionSettings(max_expiry=timedelta(60)))
    with pytest.raises(CollectionAlreadyExistsException):
        manager.create_collection("shop", "orders")
    with pytest.raises(ScopeNotFoundException):
        manager.create_collection("none", "orders")
    orders = bucket.scope("shop").collection("orders")
    orders.upsert("order_1", {"n": 1})
    assert streamed(cluster) == {"order_1": {"n": 1}}
    manager.drop_collection("shop", "orders")
    with pytest.raises(CollectionNotFoundException):
        manager.drop_collection("shop", "orders")
    manager.drop_scope("shop")
    assert "shop" not in {scope.name for scope in manager.get_all_scopes()}
    assert "shop" not in cluster.collections()


def test_the_bucket_is_flushed_dropped_and_made_by_the_sdk(cluster, open_cluster):
    sdk = open_cluster(cluster)
    manager = sdk.buckets()
    sdk.bucket("default").default_collection().upsert("key", {"n": 1})
    manager.flush_bucket("default")
    assert streamed(cluster) == {}
    assert not sdk.bucket("default").default_collection().exists("key").exists
    identity = cluster.bucket_uuid
    settings = CreateBucketSettings(name="default", ram_quota_mb=100)
    with pytest.raises(BucketAlreadyExistsException):
        manager.create_bucket(settings)
    manager.drop_bucket("default")
    assert cluster.bucket_uuid == ""
    with pytest.raises(BucketDoesNotExistException):
        manager.drop_bucket("default")
    manager.create_bucket(settings)
    assert cluster.bucket_uuid not in {"", identity}


def test_a_locked_document_waits_for_who_has_locked_it(collection):
    collection.upsert("key", {"n": 1})
    locked = collection.get_and_lock("key", timedelta(seconds=10))
    assert locked.content_as[dict] == {"n": 1}
    options = UpsertOptions(timeout=timedelta(milliseconds=300))
    with pytest.raises(CASMismatchException):
        collection.unlock("key", locked.cas + 1)
    with pytest.raises((AmbiguousTimeoutException, DocumentLockedException)):
        collection.upsert("key", {"n": 2}, options)
    collection.unlock("key", locked.cas)
    with pytest.raises(DocumentNotLockedException):
        collection.unlock("key", locked.cas)
    again = collection.get_and_lock("key", timedelta(seconds=10))
    collection.replace("key", {"n": 3}, ReplaceOptions(cas=again.cas))
    assert collection.get("key").content_as[dict] == {"n": 3}
