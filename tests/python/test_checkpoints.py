"""Going on from checkpoints, and rollbacks."""

import json
import zlib

import pytest

import dcp_rs
from dcp_rs import planner
from dcp_rs.exceptions import CheckpointError, ConfigError, RollbackError
from reading import rows_of


@pytest.fixture
def checkpoint(client, fill):
    fill(100)
    stream = client.stream(until="now")
    rows_of(stream)
    return stream.checkpoint()


def test_a_stream_goes_on_after_each_batch(client, fill):
    documents = fill(300)
    stream = client.stream(until="now", batch=dcp_rs.BatchPolicy(max_rows=25))
    read = []
    for batch in stream:
        read += [row["key"] for row in batch.rows()]
        rest = [row["key"] for row in rows_of(client.stream(start=batch.checkpoint, until="now"))]
        assert sorted(read + rest) == sorted(documents)
    assert sorted(read) == sorted(documents)


def test_a_checkpoint_says_where_the_stream_stands(cluster, client, checkpoint):
    assert checkpoint.bucket_uuid == cluster.bucket_uuid == client.bucket_uuid
    high = {vbucket: seqno for vbucket, seqno in cluster.high_seqnos().items() if seqno}
    seqnos = {vbucket: seqno for vbucket, seqno in checkpoint.seqnos.items() if seqno}
    assert seqnos == high
    for vbucket, seqno in high.items():
        position = checkpoint.positions[vbucket]
        assert (position.seqno, position.snapshot_end, position.epoch) == (seqno, seqno, 0)
        assert position.vbuuid > 0


def test_it_survives_text_and_files(checkpoint, tmp_path):
    text = checkpoint.to_json()
    assert dcp_rs.Checkpoint.from_json(text) == checkpoint
    assert dcp_rs.Checkpoint.from_json(text.encode()) == checkpoint
    path = tmp_path / "positions.json"
    checkpoint.save(path)
    checkpoint.save(str(path))
    assert dcp_rs.Checkpoint.load(path) == checkpoint
    assert [each.name for each in tmp_path.iterdir()] == ["positions.json"]


def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path):
    text = checkpoint.to_json()
    damaged = [text[:cut] for cut in range(0, len(text), 97)]
    digit = next(i for i, char in enumerate(text) if char.isdigit())
    damaged.append(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    damaged += ["null", "[]", "{}", "\udcff"]
    for each in damaged:
        with pytest.raises(CheckpointError):
            dcp_rs.Checkpoint.from_json(each)
    path = tmp_path / "positions.json"
    path.write_text(text[:-20])
    with pytest.raises(CheckpointError):
        dcp_rs.Checkpoint.load(path)
    with pytest.raises(CheckpointError):
        dcp_rs.Checkpoint.load(tmp_path / "missing.json")
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "missing" / "positions.json")


def test_a_checkpoint_of_another_bucket_is_refused(checkpoint):
    with dcp_rs.testing.EmbeddedCluster(vbuckets=16) as other, other.connect() as client:
        other.upsert("a", b"1")
        kept = dcp_rs.MemoryStore()
        kept.save(checkpoint)
        for start in (checkpoint, kept):
            with pytest.raises(CheckpointError, match="another bucket") as raised:
                client.stream(start=start, until="now")
            assert raised.value.code == "bucket_changed"
        with pytest.raises(CheckpointError, match="another bucket") as raised:
            planner.Planner(client).end(checkpoint, planner.PlanOptions())
        assert raised.value.code == "bucket_changed"


async def test_a_file_with_another_buckets_checkpoint_is_named(checkpoint, tmp_path):
    store = dcp_rs.FileStore(tmp_path / "positions.json")
    store.save(checkpoint)
    told = r"positions\.json: the checkpoint belongs to another bucket.*delete the file"
    with dcp_rs.testing.EmbeddedCluster(vbuckets=16) as other, other.connect() as client:
        with pytest.raises(CheckpointError, match=told) as raised:
            client.stream(start=store, until="now")
        assert raised.value.code == "bucket_changed"
        async with dcp_rs.connect_async(client.options) as same:
            with pytest.raises(CheckpointError, match=told):
                await same.stream(start=store, until="now")


def moved(checkpoint, vbucket, by):
    """The checkpoint, well-formed, with one vBucket moved forward by `by` seqnos."""
    document = json.loads(checkpoint.to_json())
    position = document["content"]["positions"][str(vbucket)]
    position["seqno"] += by
    position["snapshot"] = [position["seqno"]] * 2
    content = json.dumps(document["content"], separators=(",", ":")).encode()
    document["crc32"] = f"{zlib.crc32(content):08x}"
    return dcp_rs.Checkpoint.from_json(json.dumps(document))


@pytest.mark.parametrize("until", ["now", None])
def test_a_checkpoint_ahead_of_the_server_is_refused(client, checkpoint, until):
    assert moved(checkpoint, 3, 0).seqnos == checkpoint.seqnos
    with pytest.raises(CheckpointError, match=r"ahead of the server \(vb:3: seqno \d+, the server"):
        rows_of(client.stream(start=moved(checkpoint, 3, 1), until=until))


@pytest.fixture
def shop(cluster):
    """Collections `orders` and `carts` of scope `shop`; gives what writes one document to each."""
    cluster.create_scope("shop")
    cluster.create_collection("shop.orders")
    cluster.create_collection("shop.carts")

    def write(key):
        cluster.upsert(key, b"1", collection="shop.orders")
        cluster.upsert(key, b"1", collection="shop.carts")

    return write


def read(client, start, **options):
    """The names of the collections of rows, and the checkpoint after them."""
    stream = client.stream(start=start, until="now", columns=["key", "collection"], **options)
    names = sorted(row["collection"] for row in rows_of(stream))
    return names, stream.checkpoint()


def test_a_checkpoint_serves_its_filter_and_parts_of_it(client, shop):
    shop("a")
    names, whole = read(client, "earliest")
    assert (names, whole.filter.scope_id, whole.filter.collection_ids) == (
        ["carts", "orders"], None, None,
    )  # fmt: skip
    shop("b")
    names, scope = read(client, whole, collections="shop.*")
    assert (names, scope.filter.scope_id) == (["carts", "orders"], 8)
    shop("c")
    names, orders = read(client, scope, collections=["shop.orders"])
    assert names == ["orders"]
    assert orders.filter == dcp_rs.StoredFilter(
        scope_id=None, collection_ids=(8,), system_documents=False
    )
    assert "filter='collection 0x8 without system documents'" in repr(orders)
    assert "filter='scope 0x8 without system documents'" in repr(scope)

    for wider in ({}, {"collections": "shop.*"}, {"collections": ["shop.orders", "shop.carts"]}):
        with pytest.raises(CheckpointError, match="earlier changes it would miss") as refused:
            read(client, orders, **wider)
        assert refused.value.code == "filter_changed"
    assert "also asks for collection shop.carts (0x9)" in str(refused.value)
    with pytest.raises(CheckpointError, match="also asks for system documents"):
        read(client, orders, collections=["shop.orders"], include="system_documents")
    with pytest.raises(CheckpointError, match="different filters") as mixed:
        orders.merged_with(scope)
    assert mixed.value.code == "filter_changed"


def test_a_checkpoint_outlives_one_of_its_collections(cluster, client, shop):
    shop("a")
    both = ["shop.orders", "shop.carts"]
    names, checkpoint = read(client, "earliest", collections=both)
    assert names == ["carts", "orders"]
    cluster.drop_collection("shop.carts")
    cluster.upsert("b", b"1", collection="shop.orders")
    assert read(client, checkpoint, collections=["shop.orders"])[0] == ["orders"]
    cluster.create_collection("shop.carts")
    with pytest.raises(CheckpointError, match=r"0x9 \(dropped\).* new id"):
        read(client, checkpoint, collections=both)


def as_version_2(checkpoint, hash_of_filter):
    """The document that an earlier release wrote, without the filter."""
    document = json.loads(checkpoint.to_json())
    document["version"] = 2
    document["content"]["filter"] = hash_of_filter
    content = json.dumps(document["content"], separators=(",", ":")).encode()
    document["crc32"] = f"{zlib.crc32(content):08x}"
    return dcp_rs.Checkpoint.from_json(json.dumps(document))


def test_a_checkpoint_of_an_earlier_release_is_read(client, shop):
    shop("a")
    old = as_version_2(read(client, "earliest")[1], "84b1e683aaee08a1")
    assert old.filter is None
    assert "filter='unknown'" in repr(old)
    shop("b")
    names, resumed = read(client, old)
    assert names == ["carts", "orders"]
    assert resumed.filter.collection_ids is None
    with pytest.raises(CheckpointError, match=r"another filter \(an earlier release stored only"):
        read(client, old, collections="shop.*")


def test_parts_can_be_taken_and_joined(client, checkpoint):
    left, right = checkpoint.restricted_to(range(8)), checkpoint.restricted_to(range(8, 16))
    assert set(left.seqnos) <= set(range(8))
    assert left != checkpoint
    assert left.merged_with(right) == checkpoint
    # A vBucket without a position is read from its beginning.
    rows = rows_of(client.stream(start=left, until="now"))
    assert {row["vbucket"] for row in rows} <= set(range(8, 16))
    assert len(rows) == sum(right.seqnos.values())


def test_a_checkpoint_is_not_made_by_hand():
    with pytest.raises(TypeError, match="from_json"):
        dcp_rs.Checkpoint()
    with pytest.raises(ConfigError, match="text: must be"):
        dcp_rs.Checkpoint.from_json(5)


def test_no_key_is_in_it(checkpoint):
    assert "key_" not in checkpoint.to_json()
    json.loads(checkpoint.to_json())


class Rolled:
    """A vBucket that was read to seqno 6 and then rolled back to 3."""

    def __init__(self, cluster, client):
        self.key = "a"
        self.vbucket = cluster.vbucket_of("a")
        names = (f"a{n}" for n in range(10_000))
        self.keys = [name for name in names if cluster.vbucket_of(name) == self.vbucket][:8]
        for key in self.keys[:3]:
            cluster.upsert(key, b"old")
        stream = client.stream(until="now", vbuckets=[self.vbucket])
        rows_of(stream)
        for key in self.keys[3:6]:
            cluster.upsert(key, b"lost")
        stream = client.stream(start=stream.checkpoint(), until="now", vbuckets=[self.vbucket])
        assert len(rows_of(stream)) == 3
        self.checkpoint = stream.checkpoint()
        assert self.checkpoint.seqnos[self.vbucket] == 6
        cluster.roll_back(self.vbucket, 3)
        cluster.upsert(self.keys[6], b"new")


def apply(rows):
    """What a reader believes after these rows: values by key, changes above a rollback undone."""
    history = []
    for row in rows:
        if row["op"] == "rollback":
            history = [each for each in history if each["seqno"] <= row["seqno"]]
        else:
            history.append(row)
    return {row["key"]: row["value"] for row in history if row["op"] == "mutation"}


def test_a_rollback_is_a_row(cluster, client):
    rolled = Rolled(cluster, client)
    rows = rows_of(
        client.stream(
            start=rolled.checkpoint, until="now", vbuckets=[rolled.vbucket], columns="full"
        )
    )
    rollback, *rest = rows
    assert (rollback["op"], rollback["vbucket"]) == ("rollback", rolled.vbucket)
    assert rollback["key"] is rollback["value"] is rollback["cas"] is None
    assert rollback["seqno"] <= 3
    assert rollback["epoch"] == 1
    assert {row["epoch"] for row in rest} == {1}
    assert all(row["seqno"] > rollback["seqno"] for row in rest)
    keys = [row["key"] for row in rest]
    assert keys[-1] == rolled.keys[6]
    assert not set(keys) & set(rolled.keys[3:6])


def test_a_rollback_can_be_an_error(cluster, client):
    rolled = Rolled(cluster, client)
    with pytest.raises(RollbackError) as raised:
        rows_of(
            client.stream(
                start=rolled.checkpoint,
                until="now",
                vbuckets=[rolled.vbucket],
                on_rollback="fail",
            )
        )
    assert raised.value.vbucket == rolled.vbucket
    assert raised.value.seqno <= 3


def test_a_rollback_can_be_answered_from_the_beginning(cluster, client):
    rolled = Rolled(cluster, client)
    rollback, *rest = rows_of(
        client.stream(
            start=rolled.checkpoint, until="now", vbuckets=[rolled.vbucket], on_rollback="resync"
        )
    )
    assert (rollback["op"], rollback["seqno"]) == ("rollback", 0)
    assert [row["key"] for row in rest] == [*rolled.keys[:3], rolled.keys[6]]


def test_a_rollback_under_a_running_stream_is_a_row(cluster, client):
    vbucket = cluster.vbucket_of("a")
    names = (f"a{n}" for n in range(10_000))
    keys = [name for name in names if cluster.vbucket_of(name) == vbucket][:8]
    rows = []
    with client.stream(vbuckets=[vbucket], batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        for key in keys[:6]:
            cluster.upsert(key, b"1")
            rows += next(stream).rows()
        cluster.roll_back(vbucket, 3)
        cluster.upsert(keys[6], b"2")
        while rows[-1]["key"] != keys[6]:
            rows += next(stream).rows()
    assert [row["op"] for row in rows].count("rollback") == 1
    assert apply(rows) == {keys[0]: b"1", keys[1]: b"1", keys[2]: b"1", keys[6]: b"2"}
