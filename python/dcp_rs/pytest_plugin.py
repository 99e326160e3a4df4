"""The pytest fixture `couchbase_producer`: an embedded cluster for each test.

pytest loads this module by itself, in every test run of an environment that dcp_rs is installed
in; so it imports no optional library and starts nothing until a test asks for the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_rs.producer import Producer


def pytest_configure(config: pytest.Config) -> None:
    """Announces the mark that the fixture looks at."""
    config.addinivalue_line(
        "markers", "couchbase(**options): options of couchbase_producer, as dcp_rs.Producer's"
    )


@pytest.fixture
def couchbase_producer(request: pytest.FixtureRequest) -> Iterator[Producer]:
    """An embedded Couchbase cluster with an empty bucket, stopped after the test.

    `@pytest.mark.couchbase(nodes=3, vbuckets=1024)` chooses its options.
    """
    from dcp_rs.producer import Producer

    mark = request.node.get_closest_marker("couchbase")
    with Producer(**(mark.kwargs if mark else {})) as producer:
        yield producer
