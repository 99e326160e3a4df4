"""What the Couchbase SDK says of calls that the embedded cluster does not answer."""

import time
from datetime import timedelta

import pytest

pytest.importorskip("couchbase")

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import (
    FeatureUnavailableException,
    InternalServerFailureException,
    ServiceUnavailableException,
)
from couchbase.options import ClusterOptions

from dcp_rs.testing import EmbeddedCluster
from sdk_calls import ABSENT, PRODUCTION

UNAVAILABLE = (FeatureUnavailableException, ServiceUnavailableException)
# Well below the shortest time-out of the SDK, 2.5 s.
AT_ONCE = 2.0


def open_sdk(cluster):
    login = PasswordAuthenticator("Administrator", "password")
    sdk = Cluster(cluster.connection_string, ClusterOptions(login))
    sdk.wait_until_ready(timedelta(seconds=10))
    return sdk


@pytest.fixture(scope="module")
def sdk():
    with EmbeddedCluster(nodes=2, replicas=1, vbuckets=16) as cluster:
        sdk = open_sdk(cluster)
        yield sdk
        sdk.close()


# The SDK itself uses an option that it says is deprecated.
@pytest.mark.filterwarnings("ignore:Option scope_name is deprecated")
@pytest.mark.parametrize("call", ABSENT)
def test_what_is_not_there_is_said_at_once(sdk, call):
    started = time.monotonic()
    with pytest.raises(UNAVAILABLE):
        ABSENT[call](sdk)
    assert time.monotonic() - started < AT_ONCE


def test_a_bucket_without_views_is_a_bucket(sdk):
    # The SDK knows nothing better to say, but that there is no such bucket would be wrong.
    views = sdk.bucket("default").view_indexes()
    with pytest.raises(InternalServerFailureException, match="no_ddocs_service"):
        views.get_all_design_documents(PRODUCTION)
