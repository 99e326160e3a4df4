"""Clients that others wrote read from our producer, and see what it holds."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


def assert_versions(history, seen, sid=0, after=None, expirations="deletion"):
    """Every change seen is a version that was written, and each key's newest one was seen."""
    for vbucket, versions in history.versions.items():
        start = (after or {}).get(vbucket, 0)
        known = {v.seqno: told(v, expirations) for v in versions}
        changes = seen.changes(vbucket, sid)
        for change in changes:
            assert change == known.get(change.seqno), f"vBucket {vbucket}"
        newest = {v.key: told(v, expirations) for v in versions if v.seqno > start}
        assert {change.key: change for change in changes} == newest, f"vBucket {vbucket}"
        assert [c.seqno for c in changes] == sorted({c.seqno for c in changes})
        assert all(change.seqno > start for change in changes)


def told(version, expirations):
    """A version as a client is told of it: most take an expiration for a deletion."""
    if version.op == "expiration":
        return type(version)(**{**vars(version), "op": expirations})
    return version


def ends_of(seen):
    """Where each vBucket's stream ended."""
    return {line["vb"]: line["seqno"] for line in seen.of("vbucket")}


def test_a_drain_of_memory_gives_the_newest_version_of_every_key(client, open_history):
    history = open_history(client, persist_delay=3600.0)
    history.write(3000)
    seen = client.drain(history.producer)
    assert_versions(history, seen)
    assert ends_of(seen) == history.producer.high_seqnos()
    assert all(line["memory"] for line in seen.of("marker"))


def test_a_drain_of_disk_gives_every_key_once(client, open_history):
    history = open_history(client)
    history.write(3000)
    history.producer.persist()
    seen = client.drain(history.producer)
    assert_versions(history, seen)
    keys = sum(len(history.latest(vbucket)) for vbucket in history.versions)
    assert seen.count() == keys
    assert seen.of("marker")
    assert all(line["disk"] for line in seen.of("marker"))


def test_an_empty_bucket_ends_every_stream_at_once(client, open_history):
    history = open_history(client)
    seen = client.drain(history.producer)
    assert seen.count() == 0
    assert set(ends_of(seen).values()) == {0}
    assert len(ends_of(seen)) == client.vbuckets
