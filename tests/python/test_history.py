"""Change history: every version of a document, where the bucket keeps them."""

import pytest

import dcp_rs
from dcp_rs.exceptions import ConfigError, UnsupportedError
from dcp_rs.testing import EmbeddedCluster
from reading import rows_of

VERSIONS = [b'{"n":%d}' % n for n in range(5)]


@pytest.fixture
def versions():
    """A cluster that keeps history, with five versions of a document on disk."""
    with EmbeddedCluster(vbuckets=1, keeps_history=True) as cluster:
        for version in VERSIONS:
            cluster.upsert("a", version)
        cluster.persist()
        yield cluster


def values(rows):
    return [row["value"] for row in rows]


def test_every_version_is_a_row_and_says_so(versions):
    with versions.connect() as client:
        rows = rows_of(client.stream(until="now", include="history"))
        assert values(rows) == VERSIONS
        assert [row["history"] for row in rows] == [True] * 5
        assert list(rows[0])[-1] == "history"
        (newest,) = rows_of(client.stream(until="now", columns=["value", "history"]))
        assert newest == {"value": VERSIONS[-1], "history": False}


def test_a_stream_goes_on_among_the_versions(versions):
    with versions.connect() as client:
        with client.stream(
            until="now", include="history", batch=dcp_rs.BatchPolicy(max_rows=2)
        ) as stream:
            first = next(iter(stream))
            checkpoint = dcp_rs.Checkpoint.from_json(first.checkpoint.to_json())
        rest = rows_of(client.stream(start=checkpoint, until="now", include="history"))
        assert values(list(first.rows()) + rest) == VERSIONS


def test_history_may_be_turned_on_and_off_at_a_checkpoint(versions):
    with versions.connect() as client:
        with client.stream(until="now") as stream:
            for _ in stream:
                pass
        for version in VERSIONS:
            versions.upsert("b", version)
        versions.persist()
        options = {"start": stream.checkpoint(), "until": "now", "columns": ["key", "value"]}
        with client.stream(**options, include="history") as of_history:
            assert values(row for batch in of_history for row in batch.rows()) == VERSIONS
        assert rows_of(client.stream(**options | {"start": of_history.checkpoint()})) == []


def test_a_bucket_without_history_refuses(client):
    # What the client was granted before says nothing about it: there is nothing to wait for.
    rows_of(client.stream(until="now"))
    with pytest.raises(UnsupportedError, match=r"change_streams=true.*7\.2 and a bucket stored"):
        client.stream(include="history")


def test_a_misspelt_word_is_named(client):
    with pytest.raises(ConfigError, match="did you mean 'history'"):
        client.stream(include=["xattrs", "histoy"])
