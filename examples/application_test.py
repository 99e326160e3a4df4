"""Tests of an application, against a cluster inside the test process. Run it with pytest.

The application uses the Couchbase SDK. The fixture `couchbase_cluster` comes with dcp_rs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import DocumentNotFoundException
from couchbase.options import ClusterOptions, ReplaceOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from couchbase.collection import Collection

    from dcp_rs.testing import EmbeddedCluster


def book(seats: Collection, flight: str, passenger: str) -> bool:
    """Books a seat: this is the application. Returns whether one was free."""
    try:
        found = seats.get(flight)
    except DocumentNotFoundException:
        return False
    document = found.content_as[dict]
    if not document["free"]:
        return False
    document["free"] -= 1
    document["passengers"].append(passenger)
    seats.replace(flight, document, ReplaceOptions(cas=found.cas))
    return True


@pytest.fixture
def seats(couchbase_cluster: EmbeddedCluster) -> Iterator[Collection]:
    """Opens the collection as the application does."""
    login = PasswordAuthenticator("Administrator", "password")
    cluster = Cluster(couchbase_cluster.connection_string, ClusterOptions(login))
    cluster.wait_until_ready(timedelta(seconds=10))
    yield cluster.bucket("default").default_collection()
    cluster.close()


def test_a_seat_is_booked_once(couchbase_cluster: EmbeddedCluster, seats: Collection) -> None:
    """A test can look at documents, and at the newest version of each one that DCP sends."""
    couchbase_cluster.upsert("UA1", {"free": 1, "passengers": []})
    assert book(seats, "UA1", "Ada")
    assert not book(seats, "UA1", "Grace")
    assert not book(seats, "nowhere", "Grace")
    assert seats.get("UA1").content_as[dict] == {"free": 0, "passengers": ["Ada"]}
    with couchbase_cluster.connect() as client:
        rows = [row for batch in client.stream(until="now") for row in batch.rows()]
    assert [row["key"] for row in rows] == ["UA1"]
