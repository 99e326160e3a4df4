"""Calls of the Couchbase SDK, by the names that docs/guides/sdks.md has for them.

A function that `call` keeps makes them on an embedded cluster and asserts that they did what a
server does. It gives the answer where that is not "works".
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.management.views import DesignDocumentNamespace
from couchbase.options import ClusterOptions

from dcp_rs.testing import EmbeddedCluster

PRODUCTION = DesignDocumentNamespace.PRODUCTION
HOUR = timedelta(hours=1)
LOGIN = PasswordAuthenticator("Administrator", "canary-8f1c2e")


def open_sdk(cluster):
    """An SDK that is ready to use the cluster's bucket."""
    sdk = Cluster(cluster.connection_string, ClusterOptions(LOGIN))
    sdk.bucket("default")
    sdk.wait_until_ready(timedelta(seconds=10))
    return sdk


@dataclass
class Case:
    """A cluster with its SDK, and a key that nobody has used."""

    cluster: EmbeddedCluster
    sdk: Cluster
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def bucket(self):
        return self.sdk.bucket("default")

    @property
    def scope(self):
        return self.bucket.default_scope()

    @property
    def collection(self):
        return self.bucket.default_collection()

    @property
    def value(self):
        return self.collection.get(self.key).content_as[dict]

    def parts(self, *paths):
        """What a document has at paths."""
        found = self.collection.lookup_in(self.key, list(paths))
        return [found.content_as[lambda part: part](n) for n in range(len(paths))]


Try = Callable[[Case], str | None]
PRESENT: dict[str, Try] = {}
# Those that change the bucket as a whole have a cluster of their own.
ALONE: set[str] = set()


def call(name: str, *, alone: bool = False) -> Callable[[Try], Try]:
    def keep(tried: Try) -> Try:
        PRESENT[name] = tried
        if alone:
            ALONE.add(name)
        return tried

    return keep
