"""The Java SDK does to the embedded cluster what is hard to get right: another implementation."""

import json

import pytest
from programs import ForeignClient, Program, build_java

from dcp_rs.testing import EmbeddedCluster

# The fixture builds the program, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(120, func_only=True)]

LEVELS = ["NONE", "MAJORITY", "MAJORITY_AND_PERSIST_TO_ACTIVE", "PERSIST_TO_MAJORITY"]


@pytest.fixture(scope="module")
def done():
    """What the program printed, and the documents that a DCP client is sent then."""
    program = Program("java-client", build_java("Sdk"), does_many=False)
    with EmbeddedCluster(nodes=2, replicas=1, vbuckets=64) as cluster:
        try:
            seen = ForeignClient(program, vbuckets=64).drain(cluster)
        finally:
            program.kill()
        with cluster.connect() as client, client.stream(until="now") as stream:
            rows = [row for batch in stream for row in batch.rows()]
    newest = {row["key"]: row for row in rows if not row["key"].startswith("_txn:")}
    return seen, {
        key: json.loads(row["value"])["n"] for key, row in newest.items() if row["op"] == "mutation"
    }


def test_durable_writes_are_on_every_copy(done):
    seen, documents = done
    assert [documents[level] for level in LEVELS] == [0, 1, 2, 3]
    for call in ("getAllReplicas", "lookupInAllReplicas"):
        copies = [line for line in seen.of("copy") if line["call"] == call]
        found = sorted((line["key"], line["is_replica"], line["n"]) for line in copies)
        assert found == sorted(
            (level, is_replica, n) for n, level in enumerate(LEVELS) for is_replica in (False, True)
        )


def test_transactions_are_committed_and_rolled_back(done):
    seen, documents = done
    assert [line["cause"] for line in seen.of("rolled back")] == ["no"]
    transferred = {key: n for key, n in documents.items() if key not in LEVELS}
    assert transferred == {"giver": 60, "taker": 40}


def test_what_is_not_there_is_said_at_once(done):
    seen, _ = done
    answers = {line["call"]: line["error"] for line in seen.of("refused")}
    assert answers == {
        "scan": "FeatureNotAvailableException",
        **dict.fromkeys(
            ["query", "searchQuery", "analyticsQuery", "viewQuery"], "ServiceNotAvailableException"
        ),
    }
    assert max(line["seconds"] for line in seen.of("refused")) < 2
