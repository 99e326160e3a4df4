"""Priority and the order of backfills: what a node does about them, and what stays as it is."""

import asyncio
import itertools
import logging

import pyarrow.csv
import pyarrow.parquet
import pytest

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.spark.worker import read_partition
from dcp_rs.testing import EmbeddedCluster

# Of each vBucket there are more than two turns of the highest priority.
DOCUMENTS, VBUCKETS = 600, 3
# So many changes come before a vBucket has no more.
BOTH = 300
# What a connection asks for without options of this page.
SETTINGS = 7


@pytest.fixture
def cluster():
    """Sends its documents from disk, over one connection."""
    with EmbeddedCluster(vbuckets=VBUCKETS, nodes=1, password="canary-8f1c2e") as cluster:
        for number in range(DOCUMENTS):
            cluster.upsert(f"key_{number}", {"n": number})
        assert min(cluster.high_seqnos().values()) > 120
        cluster.persist()
        yield cluster


def runs(vbuckets):
    """How many changes in a row are of the same vBucket, as long as all have some."""
    return [len(list(group)) for _, group in itertools.groupby(vbuckets[:BOTH])]


def vbuckets_of(client, **options):
    with client.stream(until="now", columns=["vbucket"], **options) as stream:
        found = [row["vbucket"] for batch in stream for row in batch.rows()]
    assert len(found) == DOCUMENTS
    return found


@pytest.mark.parametrize(("priority", "most"), [("low", 1), ("medium", 5), ("high", 50)])
def test_a_priority_is_the_number_of_messages_in_a_turn(client, priority, most):
    lengths = runs(vbuckets_of(client, priority=priority))
    # The first turn of each vBucket has the snapshot marker as well.
    assert max(lengths) == most
    assert set(lengths[VBUCKETS:-1]) == {most}


def test_backfills_take_turns_or_follow_each_other(client):
    in_turns = vbuckets_of(client, priority="low", backfill_order="round-robin")
    assert len(runs(in_turns)) == BOTH
    one_by_one = vbuckets_of(client, priority="low", backfill_order="sequential")
    assert one_by_one == sorted(one_by_one, key=one_by_one.index)


def test_nothing_is_asked_for_by_default(cluster):
    settings = {"opcode": "DCP_CONTROL", "direction": "to_server"}
    cluster.set_faults([{"condition": settings, "reaction": {"delay": {"seconds": 0}}}])
    counts = []
    for options in ({}, {"priority": "high"}, {"priority": "low", "backfill_order": "sequential"}):
        before = cluster.fault_counts()[0]
        with cluster.connect() as fresh:
            vbuckets_of(fresh, **options)
        counts.append(cluster.fault_counts()[0] - before)
    assert counts == [SETTINGS, SETTINGS + 1, SETTINGS + 2]


def test_a_node_without_the_settings_is_read_without_them(cluster, client, caplog):
    # The second rule does not see what the first one has answered.
    refused = {
        "condition": {"opcode": "DCP_CONTROL", "nth": SETTINGS + 1},
        "reaction": {"answer": {"status": "EINVAL"}},
    }
    cluster.set_faults([refused, refused])
    with caplog.at_level(logging.WARNING, "dcp_rs"):
        found = vbuckets_of(client, priority="low", backfill_order="sequential")
    assert runs(found) != [1] * BOTH, "the node did not take the priority"
    warned = [text for text in caplog.messages if "does not have a setting" in text]
    assert ["set_priority" in text for text in warned] == [True, False]
    assert "backfill_order" in warned[1]


def test_a_checkpoint_does_not_depend_on_them(client):
    asked = [{}, {"priority": "high"}, {"priority": "low", "backfill_order": "sequential"}]
    ends = []
    for options in asked:
        with client.stream(until="now", **options) as stream:
            rows = next(stream).num_rows
            checkpoint = stream.checkpoint()
            rows += sum(batch.num_rows for batch in stream)
            ends.append(stream.checkpoint())
        assert rows == DOCUMENTS
        for others in asked:
            with client.stream(start=checkpoint, until="now", **others) as stream:
                assert stream.checkpoint() == checkpoint
    assert ends[0] == ends[1] == ends[2]


def test_connections_are_not_shared_between_priorities(cluster):
    with cluster.connect(keep_connections=60) as client:
        assert max(runs(vbuckets_of(client, priority="high"))) == 50
        assert max(runs(vbuckets_of(client, priority="low"))) == 1
        assert max(runs(vbuckets_of(client))) > 50


def test_asyncio_has_them_too(cluster):
    async def read():
        options = vars(cluster.connection_options)
        async with dcp_rs.connect_async(**options) as client:
            stream = client.stream(until="now", columns=["vbucket"], priority="low")
            async with stream as changes:
                return [row["vbucket"] async for batch in changes for row in batch.rows()]

    assert runs(asyncio.run(read())) == [1] * BOTH


def test_the_command_line_has_them(cluster, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    where = [f"{cluster.connection_string}/default", "--username", "Administrator"]
    options = ["--priority", "low", "--columns", "vbucket"]
    file = tmp_path / "changes.csv"
    assert main(["export", *where, str(file), *options]) == 0
    assert runs(pyarrow.csv.read_csv(file)["vbucket"].to_pylist()) == [1] * BOTH
    capsys.readouterr()
    count = ["-n", str(BOTH)]
    assert main(["cat", *where, *count, *options, "--backfill-order", "sequential"]) == 0
    assert len(runs(capsys.readouterr().out.splitlines())) < VBUCKETS + 1


def test_replications_have_them(client, tmp_path):
    for order, turns in (("round-robin", BOTH), ("sequential", None)):
        folder = tmp_path / order
        dcp_rs.replicate(
            client,
            f"parquet://{folder}",
            mode="log",
            once=True,
            priority="low",
            backfill_order=order,
        )
        (file,) = folder.glob("**/*.parquet")
        table = pyarrow.parquet.read_table(file)
        changes = table.filter(pyarrow.compute.equal(table["op"], "mutation"))
        found = runs(changes["vbucket"].to_pylist())
        assert found == [1] * BOTH if turns else len(found) <= VBUCKETS


def test_reads_of_spark_have_them(cluster):
    options = {
        "connectionString": cluster.connection_string,
        "bucket": "default",
        "username": "Administrator",
        "password": "canary-8f1c2e",
        "numPartitions": 1,
    }
    for more, most in (({"priority": "low"}, 1), ({"priority": "medium"}, 5)):
        (partition,) = dcp_rs.spark.partitions(options | more)
        batches = list(read_partition(partition))
        found = [vbucket for batch in batches for vbucket in batch["vbucket"].to_pylist()]
        assert max(runs(found)) == most
