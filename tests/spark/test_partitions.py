"""Planning: who reads what."""

import pickle
from collections import Counter
from functools import partial

import pyarrow as pa
import pytest

import dcp_rs
import dcp_rs.spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark import ReadOptions, SparkReadError
from dcp_rs.spark.planning import batch_partitions
from dcp_rs.spark.worker import read_partition


def test_the_end_of_a_read_without_start_is_no_start(options, cluster):
    cluster.upsert("a", b"{}")
    cluster.persist()
    whole = dcp_rs.spark.partitions(options)
    assert len(whole) == 1
    with pytest.raises(ConfigError, match=r'^start is None, .* pass "earliest" the first time'):
        dcp_rs.spark.partitions(options, start=whole.end)
    with pytest.raises(ConfigError, match=r"^start: 'end.json' is not earliest or offsets as JSON"):
        dcp_rs.spark.partitions(options, start="end.json")
    first = dcp_rs.spark.partitions(options, start="earliest")
    assert len(first) == 1
    assert dcp_rs.spark.partitions(options, start=first.end) == []


def test_partitions_cover_each_changed_vbucket_once_by_node(cluster, options, load):
    load(500)
    partitions = dcp_rs.spark.partitions(options)
    high = {vbucket: seqno for vbucket, seqno in cluster.high_seqnos().items() if seqno}
    planned = {
        each.vbucket: (each.from_seqno, each.to_seqno)
        for partition in partitions
        for each in partition.ranges
    }
    assert sum(len(partition.ranges) for partition in partitions) == len(planned) > 50
    assert planned == {vbucket: (0, seqno) for vbucket, seqno in high.items()}
    assert len({partition.node for partition in partitions}) == 2
    assert len(partitions) == 8
    assert {partition.bucket_uuid for partition in partitions} == {cluster.bucket_uuid}


def test_partitions_of_an_empty_bucket_are_none(options):
    assert dcp_rs.spark.partitions(options) == []


@pytest.mark.shows_password("each task logs in for itself")
def test_a_partition_is_plain_data_without_a_password_in_its_repr(options, load):
    load(50)
    for partition in dcp_rs.spark.partitions(options):
        assert pickle.loads(pickle.dumps(partition)) == partition
        assert options["password"] not in repr(partition)


def test_vbuckets_choose_and_are_checked(options, load):
    load(500)
    partitions = dcp_rs.spark.partitions(options | {"vbuckets": "3,7-9"})
    assert sorted(vbucket for partition in partitions for vbucket in partition.vbuckets) == [
        3,
        7,
        8,
        9,
    ]
    with pytest.raises(ConfigError, match="there is no vBucket 64, the bucket has 64"):
        dcp_rs.spark.partitions(options | {"vbuckets": "64"})


def test_first_loads_may_leave_out_deletions(cluster, options, load):
    load(100)
    cluster.persist()

    def ops(**more):
        partitions = dcp_rs.spark.partitions(options | more)
        batches = [batch for partition in partitions for batch in read_partition(partition)]
        return Counter(op for batch in batches for op in batch["op"].to_pylist())

    assert ops() == {"mutation": 90, "deletion": 10}
    assert ops(initialDeletions="skip") == {"mutation": 90}
    assert ops(initialDeletions="skip_if_supported") == {"mutation": 90}
    with pytest.raises((ConfigError, SparkReadError), match="initialDeletions, include: "):
        ops(initialDeletions="skip", include="history")


def test_latest_leaves_nothing_to_read(options):
    with pytest.raises(ConfigError, match="cannot start at latest"):
        dcp_rs.spark.partitions(options | {"startingOffsets": "latest"})


def test_unknown_columns_are_refused_before_connecting(options):
    with pytest.raises(ConfigError, match='no column "sequence"; did you mean "seqno"'):
        dcp_rs.spark.partitions(
            options | {"columns": "sequence", "connectionString": "couchbase://x"}
        )


def test_a_wrong_password_has_its_code_in_the_text(options):
    wrong = options | {"password": "not this one"}
    with pytest.raises(SparkReadError, match=r"^\[COUCHBASE_DCP_AUTHENTICATION\]") as caught:
        dcp_rs.spark.partitions(wrong)
    assert "not this one" not in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, str(again)) == (caught.value.code, str(caught.value))


class TestOffsetsThatAreNotTrue:
    """Told with a code before anything is read, wherever offsets are given."""

    @pytest.fixture
    def ends(self, options, load, cluster):
        load(10)
        cluster.persist()
        return dcp_rs.spark.partitions(options, start="earliest").end

    @pytest.fixture
    def refused(self, options):
        def refuse(code, offsets, **more):
            for read in (
                lambda: dcp_rs.spark.partitions(options | more, start=offsets),
                lambda: batch_partitions(ReadOptions.parse(options | {"startingOffsets": offsets})),
                lambda: batch_partitions(ReadOptions.parse(options | {"endingOffsets": offsets})),
            ):
                with pytest.raises(SparkReadError, match=f"^\\[COUCHBASE_DCP_{code}\\]"):
                    read()

        return refuse

    def test_damaged_ones(self, refused, ends):
        refused("OFFSETS", ends.replace('"s":[', '"s":[1'))
        refused("OFFSETS", ends[:-1])

    def test_those_of_a_later_release(self, refused, ends):
        refused("OFFSETS", ends.replace('"v":2', '"v":3'))

    def test_those_of_another_bucket(self, refused, options):
        known = {name: options[name] for name in ("bucket", "username", "password")}
        with dcp_rs.testing.EmbeddedCluster(**known) as other:
            there = options | {"connectionString": other.connection_string}
            refused("BUCKET_CHANGED", dcp_rs.spark.partitions(there, start="earliest").end)

    def test_an_end_that_is_not_there_yet(self, options, cluster, ends):
        before = dcp_rs.spark.partitions(options, start="earliest").end
        vbucket = cluster.vbucket_of("more")
        cluster.upsert("more", b"{}")
        cluster.persist()
        later = dcp_rs.spark.partitions(options, start=ends).end
        until = options | {"startingOffsets": before, "endingOffsets": later}
        (partition,) = batch_partitions(ReadOptions.parse(until))
        assert partition.vbuckets == (vbucket,)
        cluster.roll_back(vbucket, cluster.high_seqnos()[vbucket] - 1)
        with pytest.raises(SparkReadError, match=f"OFFSETS.*vBucket {vbucket} "):
            batch_partitions(ReadOptions.parse(until))

    def test_a_start_that_is_not_there_is_a_rollback(self, options, cluster, ends):
        vbucket = next(iter(dcp_rs.spark.partitions(options)[0].vbuckets))
        cluster.roll_back(vbucket, 0)
        with pytest.raises(SparkReadError, match=f"ROLLBACK.*vb:{vbucket} "):
            dcp_rs.spark.partitions(options | {"onRollback": "fail"}, start=ends)


@pytest.mark.parametrize("on_rollback", ["emit", "resync"])
def test_a_rollback_row_is_that_of_a_stream(options, cluster, load, on_rollback):
    load(200)
    cluster.persist()
    # Change history needs another kind of bucket.
    columns = [column.name for column in dcp_rs.columns() if column.name != "history"]
    given = {"include": ["xattrs"], "columns": [*columns, "n", "_malformed_fields"]}
    stream_of = partial(
        dcp_rs.connect(
            options["connectionString"],
            username=options["username"],
            password=options["password"],
            bucket=options["bucket"],
        ).stream,
        until="now",
        on_rollback=on_rollback,
        document_schema="n INT",
        persisted_only=True,
        **given,
    )
    with stream_of() as stream:
        list(stream)
        read = stream.checkpoint()
    vbuckets = [vbucket for vbucket, seqno in read.seqnos.items() if seqno > 2][:3]
    # One is rolled back to its beginning.
    for vbucket, seqno in zip(vbuckets, (0, 1, 2), strict=True):
        cluster.roll_back(vbucket, seqno)
    with stream_of(start=read) as stream:
        expected = rollbacks_of(stream)
    options |= {name: ",".join(names) for name, names in given.items()}
    options |= {"documentSchema": "n INT", "onRollback": on_rollback}
    partitions = dcp_rs.spark.partitions(options, start=read.to_json())
    found = rollbacks_of(batch for each in partitions for batch in read_partition(each))
    assert found == expected
    assert {row["vbucket"] for row in found} == set(vbuckets)
    # Branch 0 is the beginning.
    assert all((row["vbuuid"] == 0) == (row["seqno"] == 0) for row in found)


def rollbacks_of(batches):
    rows = pa.Table.from_batches([pa.record_batch(batch) for batch in batches]).to_pylist()
    rollbacks = [row for row in rows if row["op"] == "rollback"]
    return sorted(rollbacks, key=lambda row: row["vbucket"])


def test_a_node_that_is_not_there_is_told(options):
    with pytest.raises(SparkReadError, match=r"^\[COUCHBASE_DCP_CONNECT"):
        dcp_rs.spark.partitions(options | {"connectionString": "couchbase://127.0.0.1:1"})


def test_a_checkpoint_of_another_bucket_is_refused(options, load):
    load(10)
    with dcp_rs.testing.EmbeddedCluster(username="u", password="p") as other:  # noqa: SIM117
        with dcp_rs.connect(
            other.connection_string, username="u", password="p", bucket="default"
        ) as client:
            other.upsert(b"key", b"{}")
            with client.stream(until="now") as stream:
                list(stream)
                elsewhere = stream.checkpoint().to_json()
    with pytest.raises(SparkReadError, match="COUCHBASE_DCP_BUCKET_CHANGED"):
        dcp_rs.spark.partitions(options | {"startingOffsets": elsewhere})
