"""Clients that others wrote read collections, and hear of those that come and go."""

from __future__ import annotations

import pytest
from expectations import assert_versions

# The fixtures build the programs, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(300, func_only=True)]


def write_collections(history):
    """Writes to two collections of a scope and to the default one; gives the first's number."""
    airline = history.create_collection("inventory.airline")
    history.create_collection("inventory.hotel")
    history.write(300)
    # The same keys in each.
    history.write(300, collection="inventory.airline")
    history.write(200, collection="inventory.hotel")
    return airline


@pytest.mark.parametrize("persisted", [True, False], ids=["disk", "memory"])
def test_a_filter_lets_only_its_collection_pass(client, persisted, open_history):
    history = open_history(client, nodes=2, persist_delay=3600.0)
    airline = write_collections(history)
    if persisted:
        history.cluster.persist()
    wanted = {"filter": [airline]}
    if client.name == "go-dcp":
        wanted = {"scope": "inventory", "collection_names": ["airline"]}
    seen = client.drain(history.cluster, **wanted)
    assert {line["collection"] for line in seen.of("change")} == {airline}
    assert_versions(history, seen, collection=airline)


def test_a_filter_is_resumed(client, open_history, tmp_path):
    history = open_history(client)
    airline = write_collections(history)
    state = tmp_path / "state.json"
    wanted = {"filter": [airline]}
    if client.name == "go-dcp":
        wanted = {"scope": "inventory", "collection_names": ["airline"]}
    client.drain(history.cluster, save=state, **wanted)
    before = history.cluster.high_seqnos()
    history.write(200, prefix="more", collection="inventory.airline")
    history.write(200, prefix="more")
    seen = client.drain(history.cluster, resume=state, **wanted)
    assert not seen.of("rollback")
    assert_versions(history, seen, after=before, collection=airline)


@pytest.mark.parametrize("name", ["gocbcore", "java"])
def test_collections_that_come_and_go_are_told_of(name, request, open_history):
    client = request.getfixturevalue(name)
    history = open_history(client, nodes=2)
    history.write(100)
    run = client.start(history.cluster, follow=True)
    run.await_streaming()
    # The client has to learn of these while it reads.
    write_collections(history)
    history.drop_collection("inventory.hotel")
    history.write(100, prefix="last")
    seen = run.finish(history.cluster.high_seqnos())
    events = {
        vbucket: [line["event"] for line in seen.of("system", vbucket)]
        for vbucket in history.versions
    }
    created = ["create_scope"] * (name == "gocbcore") + ["create_collection"] * 2
    told = {tuple(each) for each in events.values()}
    # A collection may be gone before its vBucket has told of it.
    assert told == {(*created, "delete_collection")}
