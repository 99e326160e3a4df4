"""Which changes a stream delivers: by key, operation and time."""

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta

import pytest

import dcp_rs
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.planner import Planner, PlanOptions
from dcp_rs.testing import EmbeddedCluster

SHOWN = {"columns": ["op", "key", "cas"], "until": "now"}


def changes(client, **options):
    stream = client.stream(**(SHOWN | options))
    rows = [row for batch in stream for row in batch.rows()]
    return stream, {(row["op"], row["key"]): row["cas"] for row in rows}


def test_keys_are_matched_whole(cluster, client):
    for key in ("order::1", "order::21", "user::1", "an order::1", "user::ü"):
        cluster.upsert(key, b"{}")
    for keys, wanted in [
        ("order::*", {"order::1", "order::21"}),
        (["order::?1", "user::?"], {"order::21", "user::1", "user::ü"}),
        ("order::1", {"order::1"}),
        ("nothing*", set()),
    ]:
        stream, found = changes(client, keys=keys)
        assert {key for _, key in found} == wanted
        seqnos = {vb: seqno for vb, seqno in stream.checkpoint().seqnos.items() if seqno}
        assert seqnos == {vb: seqno for vb, seqno in client.high_seqnos().items() if seqno}


def test_operations_are_chosen(cluster, client):
    for key in "abc":
        cluster.upsert(key, b"{}")
    cluster.remove("b")
    cluster.expire("c")
    assert set(changes(client, ops="mutation")[1]) == {("mutation", "a")}
    gone = changes(client, ops=["deletion", "expiration"])[1]
    assert set(gone) == {("deletion", "b"), ("expiration", "c")}


def test_changes_before_a_time_are_left_out(cluster, client):
    cluster.upsert("old", b"{}")
    time.sleep(0.01)
    cluster.upsert("new", b"{}")
    times = {key: cas / 1e9 for (_, key), cas in changes(client)[1].items()}
    assert times["new"] - times["old"] > 0.005
    between = (times["new"] + times["old"]) / 2
    for since in (between, datetime.fromtimestamp(between, UTC)):
        stream, found = changes(client, since=since)
        assert set(found) == {("mutation", "new")}
        assert sum(stream.checkpoint().seqnos.values()) == 2
    assert len(changes(client, since=0)[1]) == 2
    assert not changes(client, since=datetime.now(UTC) + timedelta(days=1))[1]


def test_a_checkpoint_goes_on_with_no_more_than_it_was_made_with(cluster, client, tmp_path):
    for key in ("a1", "b1", "c1"):
        cluster.upsert(key, b"{}")
    options = {"keys": ["a*", "b*"], "ops": ["mutation", "deletion"], "since": 1000}
    stream, found = changes(client, **options)
    assert {key for _, key in found} == {"a1", "b1"}
    checkpoint = stream.checkpoint()
    kept = checkpoint.filter
    assert (kept.keys, kept.ops, kept.since) == (
        ("a*", "b*"), ("deletion", "mutation"), pytest.approx(1000, abs=1e-4),
    )  # fmt: skip
    assert "keys ['a*', 'b*'], operations deletion, mutation, since" in str(kept)
    checkpoint.save(tmp_path / "kept")
    checkpoint = dcp_rs.Checkpoint.load(tmp_path / "kept")
    assert checkpoint.filter == kept
    for key in ("a2", "b2", "c2"):
        cluster.upsert(key, b"{}")
    for narrower in ({}, {"keys": "b*"}, {"ops": ["mutation"]}, {"since": 2000}):
        _, found = changes(client, start=checkpoint, **(options | narrower))
        assert {key for _, key in found} == ({"b2"} if "keys" in narrower else {"a2", "b2"})
    for wider, named in [
        ({"keys": None}, "all keys"),
        ({"keys": ["a*", "c*"]}, "keys .*c[*]"),
        ({"ops": None}, "operations expiration"),
        ({"ops": ["expiration"]}, "operations expiration"),
        ({"since": None}, "from any time"),
        ({"since": 999}, "since"),
    ]:
        with pytest.raises(CheckpointError, match=f"also asks for .*{named}"):
            client.stream(start=checkpoint, **(options | wider))


def test_system_events_are_rows_all_the_same(cluster, client):
    cluster.create_collection("events")
    cluster.upsert("a", b"{}")
    found = changes(client, keys="nothing", ops=["deletion"], include="system_events")[1]
    assert {op for op, _ in found} == {"caught_up", "system_event"}


def test_a_planned_read_leaves_the_same_rows_out(cluster, client):
    for key in ("a1", "b1", "a2"):
        cluster.upsert(key, b"{}")
    options = PlanOptions(persisted_only=False)
    planner = Planner(client, keys=["a*"], ops=["mutation"], since=1000)
    start, end = planner.earliest(), planner.end(planner.earliest(), options)
    read = set()
    for partition in planner.partitions(start, end, options, count=2):
        with partition.open(client) as stream:
            read |= {row["key"] for batch in stream for row in batch.rows()}
    assert read == {"a1", "a2"}
    with pytest.raises(CheckpointError, match="also asks for all keys"):
        Planner(client, ops=["mutation"], since=1000).end(end, options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keys": []}, "keys: names no pattern"),
        ({"keys": [""]}, "keys: a pattern has 0 bytes"),
        ({"keys": ["x" * 513]}, "1 to 512"),
        ({"keys": 1}, "keys: "),
        ({"ops": []}, "ops: names no operation"),
        ({"ops": ["mutations"]}, "ops: .*'mutation', 'deletion'"),
        ({"since": datetime(2026, 1, 1)}, "since: .*time zone"),  # noqa: DTZ001 - what is refused
        ({"since": -1}, "since: -1 is not a time from 1970"),
        ({"since": "yesterday"}, "since: .*datetime or seconds"),
        ({"since": True}, "since: "),
    ],
)
def test_what_is_wrong_is_named(client, options, says):
    with pytest.raises(ConfigError, match=says):
        client.stream(**options)


def documents(stream):
    """Gives the collections and keys of a stream's rows."""
    rows = [row for batch in stream for row in batch.rows()]
    return {(f"{row['scope']}.{row['collection']}", row["key"]) for row in rows}


def collections_of(cluster, *names):
    for name in names:
        cluster.create_collection(name)
        cluster.upsert("first", b"{}", collection=name)


def test_patterns_choose_collections_that_are_there_and_those_made_later(cluster, client):
    for scope in ("a", "b"):
        cluster.create_scope(scope)
    collections_of(cluster, "a.events", "a.orders", "b.events", "b.logs")
    options = {"columns": ["scope", "collection", "key"], "until": "now"}
    for patterns, wanted in [
        (["*.events"], {"a.events", "b.events"}),
        (["a.*"], {"a.events", "a.orders"}),
        (["a.*", "b.logs"], {"a.events", "a.orders", "b.logs"}),
        (["b.?o??"], {"b.logs"}),
        (["*.nothing"], set()),
    ]:
        stream = client.stream(collections=patterns, **options)
        assert {name for name, _ in documents(stream)} == wanted, patterns
        if patterns[0].startswith("*"):
            # Of the whole bucket, positions pass over what is left out.
            assert stream.checkpoint().seqnos == client.high_seqnos()
    stream = client.stream(collections=["*.events", "a.o*"], **options)
    assert len(documents(stream)) == 3
    kept = dcp_rs.Checkpoint.from_json(stream.checkpoint().to_json())
    assert kept.filter.patterns == ("*.events", "a.o*")
    # A scope, a collection of it, and one of a scope that is known, while nobody reads.
    cluster.create_scope("c")
    collections_of(cluster, "c.events", "c.orders", "a.old", "b.orders")
    stream = client.stream(start=kept, collections=["a.o*", "*.events"], **options)
    assert documents(stream) == {("c.events", "first"), ("a.old", "first")}


def test_a_collection_made_while_a_stream_runs_is_delivered_from_its_first_change(cluster, client):
    cluster.create_scope("a")
    collections_of(cluster, "a.events")
    columns = ["op", "scope", "collection", "key"]
    found = set()
    with client.stream(
        collections=["*.events"],
        columns=columns,
        include="system_events",
        batch=dcp_rs.BatchPolicy(linger=0.01),
    ) as stream:
        for round_ in range(3):
            scope = f"s{round_}"
            cluster.create_scope(scope)
            collections_of(cluster, f"{scope}.other", f"{scope}.events", f"{scope}.more")
            if round_ == 1:
                cluster.drop_collection("s0.events")
            deadline = time.monotonic() + 20
            while (f"{scope}.events", "first") not in found:
                assert time.monotonic() < deadline
                batch = stream.poll(1)
                for row in () if batch is None else batch.rows():
                    assert row["collection"] in ("events", None), row
                    if row["op"] == "mutation":
                        found.add((f"{row['scope']}.{row['collection']}", row["key"]))
    assert found == {(f"{scope}.events", "first") for scope in ("a", "s0", "s1", "s2")}


def test_patterns_of_a_checkpoint_may_be_fewer_and_not_others(cluster, client):
    for scope in ("a", "b"):
        cluster.create_scope(scope)
    collections_of(cluster, "a.events", "a.orders", "b.events")
    options = {"columns": ["scope", "collection", "key"], "until": "now"}

    def checkpoint(**chosen):
        stream = client.stream(**chosen, **options)
        documents(stream)
        return stream.checkpoint()

    both = checkpoint(collections=["*.events", "a.*"])
    for narrower in (
        {"collections": ["a.*", "*.events"]},
        {"collections": ["*.events"]},
        {"collections": ["b.events", "a.orders"]},
        {"collections": "a.*"},
    ):
        client.stream(start=both, **narrower, **options).close()
    for wider, named in [
        ({}, "the whole bucket"),
        ({"collections": "b.*"}, "scope b"),
        ({"collections": ["*.e*"]}, "collections [*].e[*]"),
    ]:
        with pytest.raises(CheckpointError, match=f"also asks for {named}"):
            client.stream(start=both, **wider, **options)
    whole = checkpoint()
    cluster.create_scope("_system")
    client.stream(start=whole, collections=["*.events"], **options).close()
    with pytest.raises(CheckpointError, match=r"also asks for collections _system\.\*"):
        client.stream(start=whole, collections=["_system.*", "b.*"], **options)
    of_scope = checkpoint(collections=["a.*"])
    assert of_scope.filter.patterns is None, "the server is asked for the scope"
    client.stream(start=of_scope, collections=["a.e*"], **options).close()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["*.events", "a.nope"], "there is no collection 'a.nope'"),
        (["*.events", "nope.*"], "there is no scope 'nope'"),
        ("nope.*", "there is no scope 'nope'"),
        (["a." + "x*" * 300], "a pattern has 602 bytes"),
        ([f"a.{n}*" for n in range(257)], "257 patterns are too many"),
        ([".*"], "must be given as scope.collection"),
    ],
)
def test_patterns_that_match_nothing_ever_are_refused(client, names, says):
    with pytest.raises(ConfigError, match=says):
        client.stream(collections=names)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("shop.order", "whose scope shop has orders, clients; did you mean 'shop.orders'?"),
        ("orders", "which has the scopes _default, shop; did you mean 'shop.orders'?"),
        ("shp.client", "which has the scopes shop, _default; did you mean 'shop.clients'?"),
        ("shp.*", "which has the scopes shop, _default; did you mean 'shop'?"),
        ("quite.another", "which has the scopes _default, shop"),
        ("shop.zz", "whose scope shop has clients, orders"),
        ("a.b,c", "; pass several as a list"),
    ],
)
def test_an_unknown_collection_suggests_the_nearest(client, cluster, name, near):
    cluster.create_scope("shop")
    cluster.create_collection("shop.orders")
    cluster.create_collection("shop.clients")
    what = f"(collection|scope) '(_default.)?{re.escape(name.removesuffix('.*'))}' in the bucket"
    says = f"^collections: there is no {what}.*{re.escape(near)}$"
    for read in (client.stream, client.plan, client.collections):
        with pytest.raises(ConfigError, match=says):
            read(collections=name)

    async def stream():
        async with await dcp_rs.connect_async(cluster.connection_options) as connected:
            await connected.stream(collections=name)

    with pytest.raises(ConfigError, match=says):
        asyncio.run(stream())


def test_of_many_collections_the_nearest_are_named(client, cluster):
    cluster.create_scope("many")
    for number in range(14):
        cluster.create_collection(f"many.{'z' * number}a")
    with pytest.raises(ConfigError, match=r"scope many has za, zza, .* and 4 more; did you mean"):
        client.collections("many.zab")


def test_a_connection_learns_of_a_collection_that_another_one_was_told_of():
    with EmbeddedCluster(nodes=2, vbuckets=1, replicas=0) as cluster, cluster.connect() as client:
        (home,) = (node for node, vbuckets in client.vbuckets_by_node().items() if vbuckets)
        nodes = cluster.connection_string.removeprefix("couchbase://").split(",")
        home = nodes.index(home)
        with client.stream(
            collections=["*.events"], columns=["key"], batch=dcp_rs.BatchPolicy(linger=0.0)
        ) as stream:

            def next_key():
                batch = stream.poll(20)
                return [row["key"] for row in batch.rows()]

            assert stream.poll(0.2) is None
            cluster.move_vbucket(0, 1 - home)
            cluster.create_collection("_default.events")
            cluster.upsert("first", b"{}", collection="_default.events")
            assert next_key() == ["first"]
            # Back to a connection that was made before there was the collection.
            cluster.move_vbucket(0, home)
            cluster.upsert("second", b"{}", collection="_default.events")
            assert next_key() == ["second"]
