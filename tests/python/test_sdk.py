"""The official Couchbase SDK against the embedded cluster."""

import json
import time
from datetime import timedelta

import pytest

from reading import rows_of

pytest.importorskip("couchbase")

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import (
    AuthenticationException,
    CASMismatchException,
    DocumentExistsException,
    DocumentNotFoundException,
    DocumentUnretrievableException,
)
from couchbase.management.buckets import CreateBucketSettings
from couchbase.options import (
    ClusterOptions,
    InsertOptions,
    RemoveOptions,
    ReplaceOptions,
    UpsertOptions,
)
from couchbase.subdocument import get as path

from dcp_rs.testing import EmbeddedCluster


def open_cluster(cluster, password="canary-8f1c2e"):
    return Cluster(
        cluster.connection_string,
        ClusterOptions(PasswordAuthenticator("Administrator", password)),
    )


@pytest.fixture
def collection(cluster):
    sdk = open_cluster(cluster)
    bucket = sdk.bucket("default")
    sdk.wait_until_ready(timedelta(seconds=10))
    yield bucket.default_collection()
    sdk.close()


@pytest.fixture
def replicated():
    """Three nodes, each vBucket on all of them."""
    with EmbeddedCluster(nodes=3, replicas=2, vbuckets=16) as running:
        sdk = open_cluster(running)
        bucket = sdk.bucket("default")
        sdk.wait_until_ready(timedelta(seconds=10))
        yield running, bucket.default_collection()
        sdk.close()


@pytest.fixture
def replicated_other(replicated):
    """The same with another bucket, whose documents these are."""
    cluster, _ = replicated
    sdk = open_cluster(cluster)
    settings = CreateBucketSettings(name="other", ram_quota_mb=100, num_replicas=2)
    sdk.buckets().create_bucket(settings)
    other = sdk.bucket("other")
    sdk.wait_until_ready(timedelta(seconds=10))
    yield cluster, other.default_collection()
    sdk.close()


def test_documents_are_written_read_and_removed(cluster, client, collection):
    collection.upsert("airline_10", {"name": "40-Mile Air"})
    assert collection.get("airline_10").content_as[dict] == {"name": "40-Mile Air"}
    assert json.loads(cluster.get("airline_10").value) == {"name": "40-Mile Air"}
    collection.replace("airline_10", {"name": "40-Mile"})
    assert collection.exists("airline_10").exists
    collection.remove("airline_10")
    assert not collection.exists("airline_10").exists
    with pytest.raises(DocumentNotFoundException):
        collection.get("airline_10")
    (row,) = rows_of(client.stream(until="now", columns="full"))
    assert (row["op"], row["key"], row["rev"]) == ("deletion", "airline_10", 3)


def test_conflicts_are_refused(collection):
    first = collection.insert("a", {"n": 1})
    with pytest.raises(DocumentExistsException):
        collection.insert("a", {"n": 2})
    collection.replace("a", {"n": 2}, ReplaceOptions(cas=first.cas))
    with pytest.raises(CASMismatchException):
        collection.replace("a", {"n": 3}, ReplaceOptions(cas=first.cas))
    with pytest.raises(CASMismatchException):
        collection.remove("a", RemoveOptions(cas=first.cas))
    with pytest.raises(DocumentNotFoundException):
        collection.replace("missing", {})
    assert collection.get("a").content_as[dict] == {"n": 2}


def test_documents_expire(cluster, client, collection):
    collection.upsert("short", {"n": 1}, UpsertOptions(expiry=timedelta(seconds=1)))
    collection.insert("long", {"n": 2}, InsertOptions(expiry=timedelta(hours=1)))
    (row,) = [r for r in rows_of(client.stream(until="now", columns="full")) if r["key"] == "long"]
    assert 3500 < row["expiry"].timestamp() - time.time() < 3700
    deadline = time.monotonic() + 10
    while collection.exists("short").exists and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(DocumentNotFoundException):
        collection.get("short")
    cluster.expire_due()
    rows = {row["key"]: row["op"] for row in rows_of(client.stream(until="now"))}
    assert rows == {"short": "expiration", "long": "mutation"}


def test_every_document_the_sdk_writes_is_streamed(client, collection):
    documents = {f"doc_{n}": {"n": n, "text": "ü" * n} for n in range(200)}
    for key, value in documents.items():
        collection.upsert(key, value)
    rows = rows_of(client.stream(until="now", columns="full"))
    assert sorted(row["key"] for row in rows) == sorted(documents)
    assert {row["datatype"] for row in rows} == {"json"}
    # The common flags of the SDKs: JSON.
    assert {row["flags"] for row in rows} == {0x0200_0000}


def test_what_the_producer_writes_the_sdk_reads(cluster, collection):
    token = cluster.upsert("mine", {"n": 1}, flags=0x0200_0006)
    found = collection.get("mine")
    assert (found.content_as[dict], found.cas) == ({"n": 1}, token.cas)


def test_a_wrong_password_is_refused(cluster):
    with pytest.raises(AuthenticationException):
        open_cluster(cluster, "wrong")


def whole(results):
    """What each copy has, and whether it is a replica."""
    return sorted((each.is_replica, each.content_as[dict]["n"]) for each in results)


def parts(results):
    """The same of lookups."""
    return sorted((each.is_replica, each.content_as[int](0)) for each in results)


def test_replicas_are_read_as_documents_and_in_parts(replicated):
    _, collection = replicated
    for key in map(str, range(20)):
        collection.upsert(key, {"n": 1})
        expected = [(False, 1), (True, 1), (True, 1)]
        assert whole(collection.get_all_replicas(key)) == expected
        assert parts(collection.lookup_in_all_replicas(key, [path("n")])) == expected
        assert collection.get_any_replica(key).content_as[dict] == {"n": 1}
        assert collection.lookup_in_any_replica(key, [path("n")]).content_as[int](0) == 1
        assert not collection.lookup_in_any_replica(key, [path("none")]).exists(0)


def test_a_replica_that_lags_shows_what_it_has(replicated):
    cluster, collection = replicated
    collection.upsert("key", {"n": 1})
    cluster.set_replica_lag(cluster.vbucket_of("key"), 2, None)
    collection.upsert("key", {"n": 2})
    expected = [(False, 2), (True, 1), (True, 2)]
    assert parts(collection.lookup_in_all_replicas("key", [path("n")])) == expected
    assert whole(collection.get_all_replicas("key")) == expected


def test_faults_between_nodes_concern_every_bucket(replicated_other):
    cluster, other = replicated_other
    other.upsert("key", {"n": 1})
    cluster.set_faults([{"condition": {"between": [0, 1, 2]}, "reaction": "half_open"}])
    assert cluster.fault_counts() == [2 * 2 * 16]  # buckets, replicas, vBuckets
    other.upsert("key", {"n": 2})
    assert whole(other.get_all_replicas("key")) == [(False, 2), (True, 1), (True, 1)]
    cluster.set_faults([])
    assert whole(other.get_all_replicas("key")) == [(False, 2), (True, 2), (True, 2)]


def test_documents_of_every_bucket_expire_when_they_are_due(replicated_other):
    cluster, other = replicated_other
    other.upsert("due", {}, UpsertOptions(expiry=timedelta(seconds=1)))
    deadline = time.monotonic() + 10
    while not cluster.expire_due():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with cluster.connect(bucket="other") as client:
        (row,) = rows_of(client.stream(until="now"))
    assert (row["op"], row["key"]) == ("expiration", "due")


def test_replicas_answer_when_the_active_copy_does_not(replicated):
    cluster, collection = replicated
    collection.upsert("key", {"n": 1})
    cluster.kill(cluster.copies_of(cluster.vbucket_of("key"))[0])
    found = collection.get_any_replica("key")
    assert (found.is_replica, found.content_as[dict]) == (True, {"n": 1})
    found = collection.lookup_in_any_replica("key", [path("n")])
    assert (found.is_replica, found.content_as[int](0)) == (True, 1)


def test_a_document_that_no_copy_has_is_said_to_be_missing(replicated):
    _, collection = replicated
    with pytest.raises(DocumentUnretrievableException):
        collection.get_any_replica("none")
    with pytest.raises(DocumentUnretrievableException):
        collection.lookup_in_any_replica("none", [path("n")])
    with pytest.raises(DocumentNotFoundException):
        list(collection.get_all_replicas("none"))
    with pytest.raises(DocumentNotFoundException):
        list(collection.lookup_in_all_replicas("none", [path("n")]))
