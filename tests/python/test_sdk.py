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
)
from couchbase.options import (
    ClusterOptions,
    InsertOptions,
    RemoveOptions,
    ReplaceOptions,
    UpsertOptions,
)


def open_cluster(cluster, password="password"):
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
