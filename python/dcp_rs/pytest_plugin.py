"""The pytest fixtures `couchbase_cluster` and `couchbase_session_cluster`: embedded clusters.

pytest loads this module in every test run if dcp_rs is installed, so it imports no optional library
and starts nothing until a test uses a fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_rs.testing import EmbeddedCluster


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark that the fixture reads."""
    config.addinivalue_line(
        "markers",
        "couchbase(**options): options of couchbase_cluster, as dcp_rs.testing.EmbeddedCluster's",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses the mark on a test without a cluster of its own, where it would do nothing."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        is_shared = "couchbase_session_cluster" in fixtures and "couchbase_cluster" not in fixtures
        if is_shared and item.get_closest_marker("couchbase") is not None:
            raise pytest.UsageError(
                f"{item.nodeid}: the mark couchbase is for couchbase_cluster: the options of"
                " couchbase_session_cluster are in the fixture couchbase_session_options"
            )


@pytest.fixture
def couchbase_cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """An embedded Couchbase cluster with an empty bucket, closed after the test.

    Set its options with `@pytest.mark.couchbase(nodes=3, vbuckets=1024)`.
    """
    from dcp_rs.testing import EmbeddedCluster

    mark = request.node.get_closest_marker("couchbase")
    # Positional arguments are passed on, so that they are refused instead of ignored.
    args, options = (mark.args, mark.kwargs) if mark else ((), {})
    with EmbeddedCluster(*args, **options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def couchbase_session_options() -> dict[str, Any]:
    """Options of `couchbase_session_cluster`; override this fixture in your `conftest.py`."""
    return {}


@pytest.fixture(scope="session")
def couchbase_session_cluster(
    couchbase_session_options: dict[str, Any],
) -> Iterator[EmbeddedCluster]:
    """An embedded Couchbase cluster that all tests share, closed after the last of them.

    Tests see each other's writes, so use different keys in each test.
    """
    from dcp_rs.testing import EmbeddedCluster

    with EmbeddedCluster(**couchbase_session_options) as cluster:
        yield cluster
