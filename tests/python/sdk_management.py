"""Calls of the Couchbase SDK for transactions, collections, buckets and the cluster."""

import asyncio
import contextlib
import json

import pytest
from acouchbase.cluster import Cluster as AsyncCluster
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.diagnostics import ClusterState, PingState, ServiceType
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    BucketAlreadyExistsException,
    BucketDoesNotExistException,
    BucketNotFlushableException,
    CollectionAlreadyExistsException,
    CollectionNotFoundException,
    InternalServerFailureException,
    InvalidArgumentException,
    ScopeNotFoundException,
    TransactionFailed,
    TransactionOperationFailed,
    UnAmbiguousTimeoutException,
)
from couchbase.management.buckets import (
    BucketSettings,
    BucketType,
    ConflictResolutionType,
    CreateBucketSettings,
)
from couchbase.management.collections import CreateCollectionSettings, UpdateCollectionSettings
from couchbase.options import ClusterOptions, UpsertOptions

from dcp_rs.exceptions import BucketNotFoundError
from dcp_rs.testing import EmbeddedCluster
from sdk_case import HOUR, LOGIN, PRODUCTION, call


@call("`transactions.run`, committed")
def _(case):
    collection, key = case.collection, case.key
    giver, taker, old, receipt = (f"{key}-{name}" for name in ("a", "b", "old", "receipt"))
    for name in (giver, taker, old):
        collection.upsert(name, {"n": 100})

    def transfer(context):
        context.replace(context.get(collection, giver), {"n": 60})
        context.replace(context.get(collection, taker), {"n": 140})
        context.insert(collection, receipt, {"n": 40})
        context.remove(context.get(collection, old))
        assert context.get(collection, receipt).content_as[dict] == {"n": 40}
        # Others do not see it yet.
        assert collection.get(giver).content_as[dict] == {"n": 100}

    case.sdk.transactions.run(transfer)
    found = {name: collection.get(name).content_as[dict]["n"] for name in (giver, taker, receipt)}
    assert found == {giver: 60, taker: 140, receipt: 40}
    assert not collection.exists(old).exists


@call("`transactions.run`, rolled back")
def _(case):
    collection, key = case.collection, case.key
    collection.upsert(key, {"n": 1})

    def fail(context):
        context.replace(context.get(collection, key), {"n": 2})
        context.insert(collection, f"{key}-never", {})
        raise RuntimeError("no")

    with pytest.raises(TransactionFailed):
        case.sdk.transactions.run(fail)
    assert case.value == {"n": 1}
    assert not collection.exists(f"{key}-never").exists


@call("`transactions.run` with a query")
def _(case):
    seen = []

    def ask(context):
        try:
            context.query("SELECT 1")
        except TransactionOperationFailed as error:
            seen.append(str(error))
            raise

    with pytest.raises((TransactionOperationFailed, TransactionFailed)):
        case.sdk.transactions.run(ask)
    assert "service_not_available" in seen[0]
    return "not available: `TransactionOperationFailed`"


@call("`acouchbase`")
def _(case):
    async def go():
        sdk = await AsyncCluster.connect(case.cluster.connection_string, ClusterOptions(LOGIN))
        bucket = sdk.bucket("default")
        await bucket.on_connect()
        collection = bucket.default_collection()
        await collection.upsert(case.key, {"n": 1})
        found = (await collection.get(case.key)).content_as[dict]
        await sdk.close()
        return found

    assert asyncio.run(go()) == {"n": 1}


@call("`collections().get_all_scopes`")
def _(case):
    scopes = {each.name for each in case.bucket.collections().get_all_scopes()}
    assert "_default" in scopes
    if "_system" in scopes:
        return None
    return "differs: there is no scope `_system` unless you create it"


@call("`collections()`: creating, updating, dropping")
def _(case):
    manager, scope = case.bucket.collections(), f"s{case.key[:20]}"
    manager.create_scope(scope)
    manager.create_collection(scope, "a", CreateCollectionSettings(max_expiry=HOUR))
    with pytest.raises(CollectionAlreadyExistsException):
        manager.create_collection(scope, "a")
    with pytest.raises(ScopeNotFoundException):
        manager.create_collection("none", "a")

    def listed():
        scopes = {each.name: each for each in manager.get_all_scopes()}
        return {each.name: each.max_expiry for each in scopes[scope].collections}

    assert listed() == {"a": HOUR}
    manager.update_collection(scope, "a", UpdateCollectionSettings(max_expiry=2 * HOUR))
    assert listed() == {"a": 2 * HOUR}
    collection = case.bucket.scope(scope).collection("a")
    collection.upsert(case.key, {"n": 1})
    assert collection.get(case.key).content_as[dict] == {"n": 1}
    assert not case.collection.exists(case.key).exists
    manager.drop_collection(scope, "a")
    with pytest.raises(CollectionNotFoundException):
        manager.drop_collection(scope, "a")
    manager.drop_scope(scope)
    assert scope not in {each.name for each in manager.get_all_scopes()}


@call("`buckets()`: listing")
def _(case):
    manager = case.sdk.buckets()
    assert [each.name for each in manager.get_all_buckets()] == ["default"]
    assert manager.get_bucket("default").num_replicas == 1
    with pytest.raises(BucketDoesNotExistException):
        manager.get_bucket("none")


@call("`buckets().flush_bucket`", alone=True)
def _(case):
    case.collection.upsert(case.key, {})
    case.sdk.buckets().flush_bucket("default")
    assert not case.collection.exists(case.key).exists
    case.collection.upsert(case.key, {})


@call("`buckets().drop_bucket`", alone=True)
def _(case):
    manager = case.sdk.buckets()
    manager.drop_bucket("default")
    with pytest.raises(BucketDoesNotExistException):
        manager.drop_bucket("default")
    assert manager.get_all_buckets() == []


@call("`buckets().create_bucket`", alone=True)
def _(case):
    manager = case.sdk.buckets()
    settings = CreateBucketSettings(name="default", ram_quota_mb=345, flush_enabled=False)
    with pytest.raises(BucketAlreadyExistsException):
        manager.create_bucket(settings)
    manager.drop_bucket("default")
    manager.create_bucket(settings)
    made = manager.get_bucket("default")
    assert (made.ram_quota_mb, made.flush_enabled) == (345, False)
    fixed = {"max_expiry": HOUR, "conflict_resolution_type": ConflictResolutionType.TIMESTAMP}
    for setting, value in fixed.items():
        settings = CreateBucketSettings(name="another", ram_quota_mb=345, **{setting: value})
        with pytest.raises(InvalidArgumentException, match="embedded cluster"):
            manager.create_bucket(settings)
    return "differs: with its type, replicas, quota and flushing; other settings are fixed"


@call("several buckets on one `Cluster`", alone=True)
def _(case):
    manager = case.sdk.buckets()
    settings = {"bucket_type": BucketType.EPHEMERAL, "num_replicas": 1, "flush_enabled": True}
    manager.create_bucket(CreateBucketSettings(name="another", ram_quota_mb=123, **settings))
    assert {each.name for each in manager.get_all_buckets()} == {"default", "another"}
    made = manager.get_bucket("another")
    assert (made.bucket_type, made.num_replicas) == (BucketType.EPHEMERAL, 1)
    assert (made.ram_quota_mb, made.flush_enabled) == (123, True)
    another = case.sdk.bucket("another").default_collection()
    durable = UpsertOptions(durability=ServerDurability(DurabilityLevel.MAJORITY))
    case.collection.upsert(case.key, {"in": "default"})
    another.upsert(case.key, {"in": "another"}, durable)

    def streamed(bucket):
        with case.cluster.connect(bucket=bucket) as client, client.stream(until="now") as stream:
            return [json.loads(row["value"]) for batch in stream for row in batch.rows()]

    for bucket in ("default", "another"):
        assert streamed(bucket) == [{"in": bucket}]
    case.cluster.failover(0)
    # The SDK may have put the request off until it has a new connection to the node that is gone.
    with contextlib.suppress(UnAmbiguousTimeoutException):
        another.get(case.key)
    assert another.get(case.key).content_as[dict] == {"in": "another"}
    manager.flush_bucket("another")
    assert not another.exists(case.key).exists
    assert streamed("another") == []
    with case.cluster.connect() as client, client.stream() as stream:
        manager.drop_bucket("another")
        case.collection.upsert(case.key, {"in": "default", "n": 2})
        values = (json.loads(row["value"]) for batch in stream for row in batch.rows())
        assert {"in": "default", "n": 2} in values
    assert [each.name for each in manager.get_all_buckets()] == ["default"]
    assert case.value == {"in": "default", "n": 2}
    with pytest.raises(BucketNotFoundError):
        streamed("another")


@call("`buckets().update_bucket`", alone=True)
def _(case):
    manager = case.sdk.buckets()
    manager.update_bucket(BucketSettings(name="default", ram_quota_mb=345, flush_enabled=False))
    changed = manager.get_bucket("default")
    assert (changed.ram_quota_mb, changed.flush_enabled) == (345, False)
    with pytest.raises(BucketNotFlushableException):
        manager.flush_bucket("default")
    with pytest.raises(InvalidArgumentException, match="replicaNumber"):
        manager.update_bucket(BucketSettings(name="default", num_replicas=2))
    return "differs: the memory quota, and whether the bucket can be flushed; nothing else"


@call("`view_indexes().get_all_design_documents`")
def _(case):
    # There is no bucket, is what the SDK makes of other answers.
    with pytest.raises(InternalServerFailureException, match="no_ddocs_service"):
        case.bucket.view_indexes().get_all_design_documents(PRODUCTION)
    return "not available: `InternalServerFailureException`"


@call("`ping`, `diagnostics`, `wait_until_ready`")
def _(case):
    nodes = set(case.cluster.connection_string.removeprefix("couchbase://").split(","))
    endpoints = case.bucket.ping().endpoints[ServiceType.KeyValue]
    assert {each.remote for each in endpoints} == nodes
    assert {each.state for each in endpoints} == {PingState.OK}
    assert case.sdk.diagnostics().state == ClusterState.Online


@call("`cluster_info`")
def _(case):
    assert case.sdk.cluster_info().server_version_short >= 8


@call("connecting with `couchbases://`")
def _(case):
    with EmbeddedCluster(tls=True) as cluster:
        authority = str(cluster.ca_file)
        login = PasswordAuthenticator("Administrator", "canary-8f1c2e", cert_path=authority)
        sdk = Cluster(cluster.tls_connection_string, ClusterOptions(login))
        sdk.bucket("default").default_collection().upsert(case.key, {})
        sdk.close()
        assert cluster.get(case.key).value == b"{}"
