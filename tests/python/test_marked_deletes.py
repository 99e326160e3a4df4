"""Tables that keep the rows of removed documents."""

import datetime as dt

import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=4) as running:
        running.create_collection("_default.other")
        yield running


@pytest.fixture(params=[f"{kind}-table" for kind in replicas.TABLES])
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


def marked(replica):
    return {
        row["key"]: row["_deleted_at"] for row in replica.rows() if row["_deleted_at"] is not None
    }


def live(replica):
    return replicas.as_documents(row for row in replica.rows() if row["_deleted_at"] is None)


def test_the_row_of_a_removed_document_says_when_it_was_removed(cluster, replica):
    written = replicas.Written(cluster)
    for number in range(30):
        written.upsert(f"key_{number}", {"n": number})
    cluster.remove("key_29")
    replicas.replicate(cluster, replica, deletes="mark")
    assert marked(replica).keys() <= {"key_29"}, "a load need not have earlier deletions"
    begun = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=60)
    for number in range(10):
        cluster.remove(f"key_{number}")
    cluster.expire("key_10")
    written.upsert("key_3", {"n": "again"})
    replicas.replicate(cluster, replica, deletes="mark")
    gone = marked(replica)
    assert gone.keys() - {"key_29"} == {f"key_{number}" for number in range(11)} - {"key_3"}
    assert all(gone[f"key_{number}"] > begun for number in range(3))
    assert all(row["value"] is None for row in replica.rows() if row["_deleted_at"] is not None)
    assert live(replica) == written.documents()


def test_what_a_rollback_takes_back_is_no_longer_marked(cluster, replica):
    written = replicas.Written(cluster)
    for number in range(40):
        written.upsert(f"key_{number}", {"n": number})
    replicas.replicate(cluster, replica, deletes="mark")
    for number in range(40):
        cluster.remove(f"key_{number}")
    replicas.replicate(cluster, replica, deletes="mark")
    assert len(marked(replica)) == 40
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, max(high - 4, 0))
    replicas.replicate(cluster, replica, deletes="mark")
    assert len(written.documents()) > 0
    assert live(replica) == written.documents()


def test_rows_of_a_dropped_collection_are_removed_all_the_same(cluster, replica):
    written = replicas.Written(cluster)
    written.upsert("kept", {"n": 1})
    written.upsert("gone", {"n": 1}, "_default.other")
    replicas.replicate(cluster, replica, deletes="mark")
    cluster.remove("gone", collection="_default.other")
    replicas.replicate(cluster, replica, deletes="mark")
    assert marked(replica).keys() == {"gone"}
    cluster.drop_collection("_default.other")
    replicas.replicate(cluster, replica, deletes="mark")
    assert [row["key"] for row in replica.rows()] == ["kept"]


def test_a_removed_document_whose_key_is_not_text_leaves_no_row_and_no_reject(cluster, replica):
    written = replicas.Written(cluster)
    written.upsert(b"\xff", {"n": 1})
    replicas.replicate(cluster, replica, deletes="mark")
    assert replica.rejects() == written.rejects() != {}
    cluster.remove(b"\xff")
    replicas.replicate(cluster, replica, deletes="mark")
    assert replica.rejects() == {}
    assert replica.rows() == []


def test_marks_cannot_be_left_out_later(cluster, replica):
    cluster.upsert("key", {"n": 1})
    replicas.replicate(cluster, replica, deletes="mark")
    with pytest.raises(ConfigError, match="_deleted_at") as raised:
        replicas.replicate(cluster, replica)
    assert raised.value.option == "deletes"


def test_a_log_has_no_marks(cluster, tmp_path):
    with pytest.raises(ConfigError, match="a log has a row") as raised:
        replicas.replicate(cluster, f"parquet://{tmp_path}/log", mode="log", deletes="mark")
    assert raised.value.option == "deletes"
