"""Reading through Spark's Python workers."""

import dataclasses
import os
import pickle
from collections import Counter

import pyarrow as pa
import pytest

import dcp_rs
import dcp_rs.spark
from dcp_rs.spark import ReadOptions, SparkReadError

pytestmark = pytest.mark.spark


def changes(spark, options, task=None):
    task = task or dcp_rs.spark.map_in_arrow(options)
    n = len(task)
    return spark.range(0, n, 1, n).mapInArrow(task, dcp_rs.spark.schema(options))


def as_documents(rows):
    """Latest document per key; None for a removed one."""
    latest = {}
    for row in sorted(rows, key=lambda row: (row.vbucket, row.epoch, row.seqno)):
        latest[row.key] = bytes(row.value) if row.op == "mutation" else None
    return latest


def test_every_document_arrives(spark, options, load):
    expected = load(3000)
    rows = changes(spark, options).collect()
    assert as_documents(rows) == expected
    assert Counter(row.op for row in rows)["deletion"] == 300


def test_a_task_yields_record_batches(options, load):
    load(10)
    batches = [
        batch
        for partition in dcp_rs.spark.partitions(options)
        for batch in dcp_rs.spark.read_partition(partition)
    ]
    assert {type(batch) for batch in batches} == {pa.RecordBatch}


def test_order_holds_within_a_vbucket(options, load):
    load(2000)
    checked = 0
    for partition in dcp_rs.spark.partitions(options):
        last = {}
        for batch in dcp_rs.spark.read_partition(partition):
            columns = batch.select(["vbucket", "seqno"]).to_pydict()
            for vbucket, seqno in zip(columns["vbucket"], columns["seqno"], strict=True):
                assert last.get(vbucket, 0) < seqno
                last[vbucket] = seqno
                checked += 1
    assert checked >= 2000


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"metadata": "full"},
        {"metadata": "full", "include": "xattrs"},
        {"includeValue": "false"},
        {"keyType": "binary"},
        {"columns": "seqno,key,vbucket,collection_id,op"},
    ],
    ids=lambda more: ",".join(more) or "default",
)
def test_the_schema_is_exactly_that_of_the_batches(spark, options, load, more):
    from pyspark.sql.pandas.types import to_arrow_schema

    load(20)
    chosen = options | more
    declared = to_arrow_schema(dcp_rs.spark.schema(chosen), timezone="UTC")
    seen = 0
    for partition in dcp_rs.spark.partitions(chosen):
        for batch in dcp_rs.spark.read_partition(partition):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema.equals(declared), (batch.schema, declared)
            seen += 1
    assert seen > 0
    assert changes(spark, chosen).count() == 20


@pytest.mark.parametrize("through", ["mapInArrow", "format", "read_partition"])
def test_documents_may_come_compressed_and_the_rows_are_the_same(spark, options, cluster, through):
    for n in range(40):
        cluster.upsert(f"doc_{n}", {"n": n, "pad": "x" * 1000})
    settings = {"opcode": "DCP_CONTROL", "direction": "to_server"}
    cluster.set_faults([{"condition": settings, "reaction": {"delay": {"seconds": 0}}}])

    def rows(**more):
        chosen = options | {"metadata": "full", "numPartitions": "1"} | more
        if through == "read_partition":
            batches = [
                b for s in dcp_rs.spark.partitions(chosen) for b in dcp_rs.spark.read_partition(s)
            ]
            found = [tuple(map(str, row.values())) for b in batches for row in b.to_pylist()]
        elif through == "format":
            dcp_rs.spark.register(spark)
            frame = spark.read.format("couchbase.dcp").options(**chosen).load()
            found = [tuple(map(str, row)) for row in frame.collect()]
        else:
            found = [tuple(map(str, row)) for row in changes(spark, chosen).collect()]
        (asked,) = cluster.fault_counts()
        return sorted(found), asked

    plain, without = rows()
    again, both = rows(compressed="true")
    assert len(plain) == 40
    assert again == plain
    # One setting more for each connection that reads: one for each node that has documents.
    assert both - without == without + cluster.num_nodes


def test_all_tasks_share_the_bound_of_the_plan(spark, options, cluster, load):
    load(200)
    task = dcp_rs.spark.map_in_arrow(options)
    bound = {
        each.vbucket: each.to_seqno for partition in task.partitions for each in partition.ranges
    }
    # Other keys: nothing that was there is rewritten, so nothing may be missing either.
    for n in range(200):
        cluster.upsert(b"later_%d" % n, b"{}")
    rows = changes(spark, options, task).collect()
    original = [row for row in rows if row.key.startswith("doc_")]
    assert len(original) == 200
    assert {row.vbucket for row in rows} <= set(bound)


def test_a_second_action_reads_again(spark, options, load):
    load(300)
    frame = changes(spark, options)
    assert frame.count() == frame.count() == 300


def test_an_empty_bucket_is_an_empty_table(spark, options):
    task = dcp_rs.spark.map_in_arrow(options)
    assert len(task) == 0
    assert changes(spark, options, task).collect() == []


def test_a_read_resumes_from_a_checkpoint(spark, options, cluster, load):
    load(400)
    with (
        dcp_rs.connect(
            options["connectionString"],
            username=options["username"],
            password=options["password"],
            bucket=options["bucket"],
        ) as client,
        client.stream(until="now") as stream,
    ):
        assert stream.read_all().num_rows == 400
        checkpoint = stream.checkpoint().to_json()
    for n in range(100):
        cluster.upsert(b"new_%d" % n, b"{}")
    rows = changes(spark, options | {"startingOffsets": checkpoint}).collect()
    assert sorted(row.key for row in rows) == sorted(f"new_{n}" for n in range(100))


@pytest.mark.shows_password("each task logs in for itself")
def test_the_task_pickles_and_holds_no_connection(options, load):
    load(30)
    task = dcp_rs.spark.map_in_arrow(options)
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    numbers = pa.record_batch({"id": list(range(len(again)))})
    assert sum(batch.num_rows for batch in again([numbers])) == 30


def test_a_worker_keeps_its_connection(spark, options, load):
    """Counts the connections the workers make: one for each process, not for each task."""
    load(500)
    partitions = dcp_rs.spark.partitions(options | {"numPartitions": 16})

    def task(batches):
        from dcp_rs import _clients

        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        for number in numbers:
            rows = sum(batch.num_rows for batch in dcp_rs.spark.read_partition(partitions[number]))
            clients = len(_clients.CLIENTS._clients)
            yield pa.record_batch({"pid": [os.getpid()], "clients": [clients], "rows": [rows]})

    n = len(partitions)
    rows = spark.range(0, n, 1, n).mapInArrow(task, "pid long, clients long, rows long").collect()
    assert sum(row.rows for row in rows) == 500
    assert len(rows) == 16 > len({row.pid for row in rows})
    # Every task of a worker found the one client there is for these options. Earlier tests left
    # theirs, of other clusters, in the same workers.
    by_worker = {}
    for row in rows:
        by_worker.setdefault(row.pid, set()).add(row.clients)
    assert all(len(counts) == 1 for counts in by_worker.values()), by_worker


def test_a_dead_connection_is_replaced(options, load):
    load(40)
    partition = dcp_rs.spark.partitions(options | {"numPartitions": 2})[0]
    from dcp_rs._clients import CLIENTS

    before = sum(batch.num_rows for batch in dcp_rs.spark.read_partition(partition))
    client = CLIENTS.get(partition.options.connection())
    client.close()
    assert sum(batch.num_rows for batch in dcp_rs.spark.read_partition(partition)) == before > 0
    assert CLIENTS.get(partition.options.connection()) is not client


def test_a_read_that_fails_ends_no_other_of_its_process(options, cluster):
    for n in range(4000):
        cluster.upsert(f"key_{n}", b'{"n": %d}' % n + b" " * 500)
    options |= {"documentSchema": "n INT", "onMalformed": "fail", "numPartitions": "2"}
    options |= {"batchRows": "100", "flowControlBufferBytes": "128k"}
    _, second = dcp_rs.spark.partitions(options)
    keys = map("key_{}".format, range(4000))
    cluster.upsert(next(key for key in keys if cluster.vbucket_of(key) in second.vbuckets), b"no")
    first, second = dcp_rs.spark.partitions(options)
    batches = dcp_rs.spark.read_partition(first)
    rows = next(batches).num_rows
    with pytest.raises(SparkReadError, match="COUCHBASE_DCP_MALFORMED"):
        list(dcp_rs.spark.read_partition(second))
    # It is far from its end: the server sends as much as the buffer holds.
    assert rows < first.size / 2
    rows += sum(batch.num_rows for batch in batches)
    assert rows == first.size


def test_limit_ends_the_tasks_early(spark, options, load):
    load(2000)
    assert len(changes(spark, options).limit(5).collect()) == 5
    assert changes(spark, options).count() == 2000


def test_a_failing_task_hands_on_its_code(spark, options, load):
    load(10)
    task = dcp_rs.spark.map_in_arrow(options)
    known = {name: options[name] for name in ("bucket", "username", "password")}
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=64, **known) as other:
        there = ReadOptions.parse(options | {"connectionString": other.connection_string})
        partitions = [
            dataclasses.replace(partition, options=there) for partition in task.partitions
        ]
        elsewhere = dcp_rs.spark.map_in_arrow(there, partitions)
        with pytest.raises(Exception, match="COUCHBASE_DCP_BUCKET_CHANGED"):
            changes(spark, options, elsewhere).collect()


def test_a_partition_number_that_does_not_exist_is_an_error(options, load):
    load(10)
    task = dcp_rs.spark.map_in_arrow(options)
    with pytest.raises(SparkReadError, match=r"use spark.range\(0, "):
        list(task([pa.record_batch({"id": [len(task)]})]))


@pytest.mark.parametrize("metadata", ["basic", "full"])
@pytest.mark.parametrize("schema", [{"documentSchema": "n INT"}, {}])
def test_system_events_are_rows_with_the_id_of_their_collection(cluster, options, metadata, schema):
    cluster.create_scope("s")
    cluster.create_collection("s.c")
    cluster.upsert("a", {"n": 1}, collection="s.c")
    cluster.drop_collection("s.c")
    cluster.upsert("b", {"n": 2})
    given = options | schema | {"include": "system_events", "metadata": metadata}
    batches = [
        batch
        for partition in dcp_rs.spark.partitions(given)
        for batch in dcp_rs.spark.read_partition(partition)
    ]
    rows = pa.Table.from_batches(batches).to_pylist()
    assert {row["op"] for row in rows} <= {"mutation", "system_event"}
    (value,) = [row["value"] for row in rows if row["key"] == "b"]
    assert value == (None if schema else b'{"n":2}')
    events = [row for row in rows if row["op"] == "system_event"]
    ended = [row for row in events if b"EndCollection" in row["value"]]
    assert len(ended) == len(cluster.high_seqnos())
    assert len({row["collection_id"] for row in ended}) == 1
    assert batches[0].schema.names == dcp_rs.spark.schema(given).names
