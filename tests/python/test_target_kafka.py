"""Kafka as a target, with a broker in a process of its own."""

import itertools
import json
import logging
import random
import socket
import threading
import time
import zlib

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

import dcp_rs
from dcp_rs.exceptions import (
    AccessDeniedError,
    AuthenticationError,
    CheckpointError,
    ConcurrentWriterError,
    ConfigError,
    ConnectError,
    DataError,
    DcpError,
)
from dcp_rs.replication import open_database, open_target
from dcp_rs.replication.kafka import broker as contact
from dcp_rs.replication.kafka import records as recording
from dcp_rs.replication.kafka import session as sessions
from dcp_rs.replication.kafka.settings import Settings
from kafka_broker import headers
from replicas import replicate

_PASSWORD = "canary-8f1c2e"
_topics = itertools.count()


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def topic():
    return f"topic-{next(_topics)}"


@pytest.fixture
def admin(kafka_broker):
    return AdminClient({"bootstrap.servers": kafka_broker.address})


def documents(cluster, keys, collection=None):
    found = {key.encode(): cluster.get(key, collection=collection) for key in keys}
    return {key: each.value for key, each in found.items() if each is not None}


def values(broker, topic):
    return {key: record.value() for key, record in broker.table(topic).items()}


def test_a_record_has_the_key_the_document_and_its_position(cluster, kafka_broker, topic):
    written = {
        f"key {number}": cluster.upsert(f"key {number}", {"n": number}) for number in range(9)
    }
    url = kafka_broker.url(topic, partitions=5)
    assert replicate(cluster, url).changes == 9
    cluster.remove("key 3")
    replicate(cluster, url)
    *_, last = sorted(kafka_broker.records(topic), key=lambda each: each.timestamp())
    by_key = {record.key().decode(): record for record in kafka_broker.records(topic)}
    assert by_key["key 3"].value() is None
    assert headers(by_key["key 3"])["op"] == "deletion"
    for key, mutation in written.items():
        if key == "key 3":
            continue
        record = by_key[key]
        assert record.value() == cluster.get(key).value
        found = headers(record)
        assert (found["seqno"], found["cas"]) == (mutation.seqno, mutation.cas)
        assert found["vbucket"] == mutation.vbucket
        assert found["vbuuid"] == mutation.vbuuid
        assert (found["op"], found["epoch"], found["generation"]) == ("mutation", 0, 1)
        assert found["collection"] == "_default._default"
    assert last.key() == b"key 3"


def test_a_batch_is_sent_in_parts(cluster, kafka_broker, topic, monkeypatch):
    monkeypatch.setattr(recording, "_AT_ONCE", 4)
    begin = time.time()
    written = {f"key {number}": "x" * (number * 7 % 30) for number in range(19)}
    for key, value in written.items():
        cluster.upsert(key, {"x": value})
    for key in ("key 3", "key 11"):
        cluster.remove(key)
    expected = documents(cluster, written.keys() - {"key 3", "key 11"})
    replicate(cluster, kafka_broker.url(topic, partitions=2), mode="log")
    records = list(kafka_broker.records(topic))
    found = {record.key(): record.value() for record in records}
    assert {key: value for key, value in found.items() if value} == expected
    assert {key for key, value in found.items() if not value} == {b"key 3", b"key 11"}
    for record in records:
        assert headers(record)["op"] == ("mutation" if record.value() else "deletion")
        assert begin - 1 < record.timestamp()[1] / 1000 < time.time() + 1


def test_partitions_are_those_of_other_clients_or_of_the_vbucket(
    cluster, kafka_broker, topic, admin
):
    keys = [f"k{'x' * number}" for number in range(12)]
    for key in keys:
        cluster.upsert(key, {})
    replicate(cluster, kafka_broker.url(topic, partitions=5))
    admin.create_topics([NewTopic(f"{topic}-java", 5)])[f"{topic}-java"].result()
    java = Producer({"bootstrap.servers": kafka_broker.address, "partitioner": "murmur2_random"})
    for key in keys:
        java.produce(f"{topic}-java", b"", key)
    assert java.flush(10) == 0
    chosen = [
        {record.key(): record.partition() for record in kafka_broker.records(name)}
        for name in (topic, f"{topic}-java")
    ]
    assert chosen[0] == chosen[1]
    url = kafka_broker.url(f"{topic}-vb", partitions=3, partition_by="vbucket", name="vb")
    replicate(cluster, url)
    for record in kafka_broker.records(f"{topic}-vb"):
        assert record.partition() == headers(record)["vbucket"] % 3


def test_the_envelope_is_that_of_the_connector(cluster, kafka_broker, topic):
    mutation = cluster.upsert('a "key"', {"n": 1})
    cluster.upsert("binary", b"\xff\x00")
    replicate(cluster, kafka_broker.url(topic, value_format="envelope", headers="one"))
    found = kafka_broker.table(topic)
    envelope = json.loads(found[b'a "key"'].value())
    assert envelope == {
        "event": "mutation",
        "partition": mutation.vbucket,
        "key": 'a "key"',
        "cas": mutation.cas,
        "bySeqno": mutation.seqno,
        "revSeqno": 1,
        "expiration": 0,
        "flags": envelope["flags"],
        "vbUuid": mutation.vbuuid,
        "content": {"n": 1},
    }
    assert json.loads(found[b"binary"].value())["content"] == "/wA="
    ((name, position),) = found[b"binary"].headers()
    op, seqno, *_, collection = position.decode().split(",")
    assert (name, op, collection) == ("dcp", "mutation", "_default._default")
    assert int(seqno) > 0


def test_the_compacted_topic_follows_a_rollback(cluster, kafka_broker, topic):
    for number in range(8):
        cluster.upsert(f"k{number}", {"n": number})
    url = kafka_broker.url(topic, headers="one")
    replicate(cluster, url)
    cluster.upsert("k1", {"n": 11})
    lost = cluster.upsert("lost", {})
    replicate(cluster, url)
    assert b"lost" in values(kafka_broker, topic)
    cluster.roll_back(lost.vbucket, lost.seqno - 1)
    done = replicate(cluster, url)
    assert done.rollbacks == 1
    keys = [f"k{number}" for number in range(8)]
    assert values(kafka_broker, topic) == documents(cluster, keys)


def test_a_topic_is_read_with_what_was_committed_just_now(kafka_broker, topic, admin):
    admin.create_topics([NewTopic(topic, 2)])[topic].result()
    address = {"bootstrap.servers": kafka_broker.address}
    broker = contact.Broker(Settings(brokers=kafka_broker.address, topic=topic))
    found = broker.make(topic, is_compacted=False)
    producer = Producer(address | {"transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"", b"a", partition=1)
    assert producer.flush(10) == 0
    # As a commit that was answered, whose markers are not written yet.
    later = threading.Timer(0.5, producer.commit_transaction)
    later.start()
    try:
        assert [each.key() for each in broker.records(found)] == [b"a"]
    finally:
        later.join()


def test_a_log_has_the_rollback_in_each_partition(cluster, kafka_broker, topic):
    lost = cluster.upsert("lost", {})
    url = kafka_broker.url(topic, partitions=3)
    replicate(cluster, url, mode="log")
    cluster.roll_back(lost.vbucket, 0)
    replicate(cluster, url, mode="log")
    found = [each for each in kafka_broker.records(topic) if headers(each)["op"] == "rollback"]
    assert [each.partition() for each in found] == [0, 1, 2]
    assert {each.key() for each in found} == {None}
    assert {(headers(each)["vbucket"], headers(each)["epoch"]) for each in found} == {
        (lost.vbucket, 1)
    }


def test_each_collection_has_a_topic_by_the_template_of_the_url(cluster, kafka_broker, topic):
    cluster.create_collection("_default.air")
    cluster.upsert("a", {"n": 1})
    cluster.upsert("a", {"n": 2}, collection="_default.air")
    url = kafka_broker.url(f"{topic}.{{scope}}.{{collection}}")
    done = replicate(cluster, url)
    assert set(done.tables) == {f"{topic}._default._default", f"{topic}._default.air"}
    assert values(kafka_broker, f"{topic}._default.air") == {b"a": b'{"n":2}'}
    cluster.drop_collection("_default.air")
    with pytest.raises(ConfigError, match="tables: ") as raised, cluster.connect() as client:
        dcp_rs.replicate(client, url, tables="{collection}", once=True)
    assert raised.value.option == "tables"
    replicate(cluster, url)
    assert values(kafka_broker, f"{topic}._default.air") == {}


def test_the_topic_of_a_dropped_collection_can_go(cluster, kafka_broker, topic, monkeypatch):
    cluster.create_collection("_default.air")
    cluster.upsert("a", {}, collection="_default.air")
    tables = {"*.*": f"{topic}.{{collection}}"}
    url = kafka_broker.url("", name=topic).replace("topic=&", "")
    replicate(cluster, url, tables=tables, on_drop="drop")
    assert f"{topic}.air" in kafka_broker.topics()
    cluster.drop_collection("_default.air")
    save = sessions.Session.save

    def interrupted(self, states):
        if None in states.values():
            raise KeyboardInterrupt
        save(self, states)

    monkeypatch.setattr(sessions.Session, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replicate(cluster, url, tables=tables, on_drop="drop")
    monkeypatch.setattr(sessions.Session, "save", save)
    cluster.create_collection("_default.air")
    cluster.upsert("b", {}, collection="_default.air")
    replicate(cluster, url, tables=tables, on_drop="drop")
    assert set(values(kafka_broker, f"{topic}.air")) == {b"b"}
    cluster.drop_collection("_default.air")
    replicate(cluster, url, tables=tables, on_drop="drop")
    assert f"{topic}.air" not in kafka_broker.topics()
    assert f"{topic}._default" in kafka_broker.topics()


def test_two_collections_do_not_share_keys_in_silence(cluster, kafka_broker, topic):
    cluster.create_collection("_default.air")
    cluster.upsert("a", {"n": 1})
    cluster.upsert("a", {"n": 2}, collection="_default.air")
    with pytest.raises(ConfigError, match="under the same keys"):
        replicate(cluster, kafka_broker.url(topic))
    url = kafka_broker.url(topic, key_format="path")
    replicate(cluster, url)
    assert values(kafka_broker, topic) == {
        b"_default._default.a": b'{"n":1}',
        b"_default.air.a": b'{"n":2}',
    }


def test_a_document_of_a_collection_without_a_name_has_a_key():
    rows = pa.table(
        {
            "key": ["a", "b", None],
            "scope": ["s", None, None],
            "collection": ["c", None, None],
            "collection_id": pa.array([8, 9, 9], pa.int64()),
        }
    )
    settings = Settings(brokers="h:1", key_format="path")
    assert recording.keys_of(rows, settings).to_pylist() == [b"s.c.a", b"9.b", None]


def test_a_second_process_stops_the_first(cluster, kafka_broker, topic):
    url, stop, failed = kafka_broker.url(topic), threading.Event(), []
    written = threading.Event()

    def first():
        try:
            with cluster.connect() as client:
                dcp_rs.replicate(client, url, stop=stop, on_progress=look)
        except DcpError as error:
            failed.append(error)

    def look(progress):
        if progress.commits:
            written.set()

    cluster.upsert("a", {"n": 1})
    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert written.wait(30)
        cluster.upsert("b", {"n": 2})
        assert replicate(cluster, url).phase == "done"
        cluster.upsert("c", {"n": 3})
        thread.join(30)
    finally:
        stop.set()
        thread.join()
    (error,) = failed
    assert isinstance(error, ConcurrentWriterError)
    assert f"dcp_rs.dcp_rs_states.{topic}" in str(error)
    replicate(cluster, url)
    found = [record.key() for record in kafka_broker.records(topic)]
    assert sorted(found) == [b"a", b"b", b"c"], "each once"


def test_a_replication_of_another_name_does_not_write_to_the_topic(cluster, kafka_broker, topic):
    cluster.upsert("a", {})
    replicate(cluster, kafka_broker.url(topic))
    with pytest.raises(ConfigError, match=rf"written by the replication dcp_rs.*{topic}"):
        replicate(cluster, kafka_broker.url(topic, name="another"))


def test_what_is_too_large_is_rejected_and_its_older_record_removed(cluster, kafka_broker, topic):
    url = kafka_broker.url(topic, **{"message.max.bytes": 1_000_000})
    cluster.upsert("large", {"n": 1})
    cluster.upsert("small", {"n": 1})
    replicate(cluster, url)
    mutation = cluster.upsert("large", {"text": "x" * 1_100_000})
    cluster.upsert("small", {"n": 2})
    with pytest.raises(DataError, match=r"larger than message\.max\.bytes") as raised:
        replicate(cluster, url, on_error="fail")
    assert raised.value.seqno == mutation.seqno
    assert values(kafka_broker, topic) == {b"large": b'{"n":1}', b"small": b'{"n":1}'}
    assert replicate(cluster, url).rejected == 1
    assert values(kafka_broker, topic) == {b"small": b'{"n":2}'}
    (reject,) = kafka_broker.table(f"{topic}_rejected").values()
    assert (reject.key(), headers(reject)["seqno"]) == (b"large", mutation.seqno)
    assert headers(reject)["reason"] == "the record is larger than message.max.bytes"
    cluster.upsert("large", {"n": 3})
    replicate(cluster, url)
    assert values(kafka_broker, topic) == {b"large": b'{"n":3}', b"small": b'{"n":2}'}
    assert not kafka_broker.table(f"{topic}_rejected"), "it is settled"


@pytest.mark.parametrize(
    ("options", "compression", "is_json"),
    [
        ({}, "producer", True),
        # The broker compresses anew what does not compress.
        ({}, "gzip", False),
        ({"value_format": "envelope", "headers": "one"}, "gzip", False),
        (
            {"value_format": "envelope", "key_format": "path", "compression.type": "zstd"},
            "producer",
            True,
        ),
    ],
)
def test_a_record_of_nearly_the_broker_s_limit_is_written_or_kept_as_a_reject(  # noqa: PLR0917 - fixtures and cases
    cluster, kafka_broker, topic, admin, options, compression, is_json
):
    limit = 20_000
    config = {"max.message.bytes": str(limit), "compression.type": compression}
    config["cleanup.policy"] = "compact"
    admin.create_topics([NewTopic(topic, 1, config=config)])[topic].result()
    url = kafka_broker.url(topic, **options, **{"message.max.bytes": limit})

    def written_of(sizes):
        """Gives which documents of these sizes are in the topic; the others are rejects."""
        keys = {size: '"' * 200 + str(size) for size in sizes}
        for size, key in keys.items():
            text = random.Random(size).randbytes(size)
            if is_json:
                text = b'"%s"' % text.hex().encode()[: size - 2]
            cluster.upsert(key, text)
        done = replicate(cluster, url)
        found = [str(each) for each in kafka_broker.table(topic)]
        kept = [str(each) for each in kafka_broker.table(f"{topic}_rejected")]
        is_there = {size: sum(f"\"{size}'" in each for each in found) for size in sizes}
        is_kept = {size: sum(f"\"{size}'" in each for each in kept) for size in sizes}
        places = {size: is_there[size] + 2 * is_kept[size] for size in sizes}
        assert {size: place for size, place in places.items() if place not in {1, 2}} == {}
        assert done.rejected >= sum(is_kept.values())
        return [size for size in sizes if is_there[size]]

    sizes = range(limit // 2, limit + 500, 100)
    below = written_of(sizes)
    assert below == list(sizes)[: len(below)], "the large are the rejects"
    assert 0 < len(below) < len(sizes)
    exact = range(below[-1] - 20, below[-1] + 120)
    assert 0 < len(written_of(exact)) < len(exact)


def test_a_topic_that_takes_less_while_it_is_written_is_an_error(
    cluster, kafka_broker, topic, admin, monkeypatch
):
    url = kafka_broker.url(topic)
    cluster.upsert("a", {"n": 1})
    replicate(cluster, url)
    cluster.upsert("a", {"text": random.Random(1).randbytes(5000).hex()})
    send = sessions.Session.send

    def lowered(self, *arguments):
        less = ConfigEntry("max.message.bytes", "2000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource("topic", topic, incremental_configs=[less])
        admin.incremental_alter_configs([resource])[resource].result()
        time.sleep(0.2)
        send(self, *arguments)

    monkeypatch.setattr(sessions.Session, "send", lowered)
    with pytest.raises(DataError, match="MSG_SIZE_TOO_LARGE"):
        replicate(cluster, url)
    assert values(kafka_broker, topic) == {b"a": b'{"n":1}'}
    monkeypatch.setattr(sessions.Session, "send", send)
    with pytest.raises(ConfigError, match=r"set message\.max\.bytes=2000"):
        replicate(cluster, url)


def test_a_state_that_is_too_large_is_named(kafka_broker, topic):
    with dcp_rs.testing.EmbeddedCluster(vbuckets=64) as cluster:
        for number in range(200):
            cluster.upsert(f"k{number}", {})
        url = kafka_broker.url(topic, **{"message.max.bytes": 2000})
        with pytest.raises(ConfigError, match=r"set message\.max\.bytes=\d{4} or") as raised:
            replicate(cluster, url)
    assert raised.value.option == "target"
    assert kafka_broker.records(topic) == []


def test_other_partitions_are_refused(cluster, kafka_broker, topic, admin):
    cluster.upsert("a", {})
    url = kafka_broker.url(topic, partitions=2)
    replicate(cluster, url)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
    time.sleep(0.1)
    with pytest.raises(ConfigError, match="had 2 partitions and now has 3") as raised:
        replicate(cluster, url)
    assert raised.value.option == "target"


def test_the_topic_of_a_collection_is_not_taken_for_rejects(cluster, kafka_broker, topic):
    keys = [f"k{number}" for number in range(9)]
    for name in ("a", "a_rejected"):
        cluster.create_collection(f"_default.{name}")
        for key in keys:
            cluster.upsert(key, {}, collection=f"_default.{name}")
    url = kafka_broker.url(f"{topic}.{{collection}}", partitions=1)
    for _ in range(2):
        replicate(cluster, url)
        for key in keys:
            cluster.upsert(key, {"n": 1}, collection="_default.a")
    expected = dict.fromkeys(map(str.encode, keys), b"{}")
    assert values(kafka_broker, f"{topic}.a_rejected") == expected
    cluster.upsert(b"\xff", {}, collection="_default.a")
    with pytest.raises(ConfigError, match=f"{topic}.a_rejected is where changes go that cannot"):
        replicate(cluster, url)
    assert values(kafka_broker, f"{topic}.a_rejected") == expected


def test_records_of_another_shape_are_refused(cluster, kafka_broker, topic):
    cluster.upsert("a", {})
    replicate(cluster, kafka_broker.url(topic))
    cluster.upsert("a", {"n": 1})
    for name, value in (
        ("key_format", "path"),
        ("partition_by", "vbucket"),
        ("value_format", "envelope"),
    ):
        with pytest.raises(ConfigError, match=f"written with {name}=.*, not {value}") as raised:
            replicate(cluster, kafka_broker.url(topic, **{name: value}))
        assert raised.value.option == "target"
    replicate(cluster, kafka_broker.url(topic, headers="one"))
    assert values(kafka_broker, topic) == {b"a": b'{"n":1}'}
    kafka_broker.remove(topic)
    replicate(cluster, kafka_broker.url(topic, key_format="path"))
    assert values(kafka_broker, topic) == {b"_default._default.a": b'{"n":1}'}


@pytest.mark.parametrize("seed", range(2))
def test_a_table_without_headers_follows_whatever_happens(cluster, kafka_broker, topic, seed):
    chance, home = random.Random(seed), "_default.air"
    keys = [f"k{number}" for number in range(30)]
    cluster.create_collection(home)

    def change():
        for key in chance.sample(keys, 12):
            if chance.random() < 0.8 or cluster.get(key, collection=home) is None:
                cluster.upsert(key, {"n": chance.random()}, collection=home)
            else:
                cluster.remove(key, collection=home)

    def roll_back():
        vbucket = chance.randrange(4)
        cluster.roll_back(vbucket, chance.randrange(cluster.high_seqnos()[vbucket] + 1))

    def create_anew():
        cluster.drop_collection(home)
        cluster.create_collection(home)

    def lose_topic():
        if topic in kafka_broker.topics():
            kafka_broker.remove(topic)

    happenings = [change, roll_back, create_anew, cluster.flush_bucket, lose_topic]
    chosen = "none"
    for _ in range(14):
        for happening in chance.choices(happenings, [9, 3, 1, 1, 1], k=3):
            happening()
        url = kafka_broker.url(topic, headers=chosen)
        replicate(cluster, url, collections=[home], commit_rows=3)
        assert values(kafka_broker, topic) == documents(cluster, keys, home)
        chosen = chance.choice(["none", "none", "one", "each"])


def test_a_table_has_headers_only_where_it_needs_them(cluster, kafka_broker, topic):
    keys = [f"k{number}" for number in range(40)]
    for key in keys:
        cluster.upsert(key, {})
    url = kafka_broker.url(topic, headers="none")
    replicate(cluster, url)
    cluster.remove(keys.pop())
    replicate(cluster, url)
    assert {tuple(each.headers() or ()) for each in kafka_broker.records(topic)} == {()}
    lost = cluster.upsert("lost", {})
    replicate(cluster, url)
    cluster.roll_back(lost.vbucket, lost.seqno - 1)
    replicate(cluster, url)
    found = kafka_broker.table(topic)
    assert values(kafka_broker, topic) == documents(cluster, keys)
    again = {key for key, each in found.items() if each.headers()}
    assert again == {key.encode() for key in keys if cluster.vbucket_of(key) == lost.vbucket}
    assert {headers(found[key])["epoch"] for key in again} == {1}
    with pytest.raises(ConfigError, match="cannot follow a rollback"):
        replicate(cluster, kafka_broker.url(f"{topic}-log", headers="none"), mode="log")
    with pytest.raises(ConfigError, match="do not tell which collection"):
        replicate(cluster, kafka_broker.url(f"{topic}-path", headers="none", key_format="path"))


def test_other_positions_than_those_of_keys_are_told_apart():
    keys = [b"a", b"key 3", b""]
    implied = recording.Implied(collection_id=8, generation=2, num_vbuckets=64)
    own = [implied.of(key) | {"key": key} for key in keys]
    others = [own[0] | {name: own[0][name] + 1} for name in own[0] if name != "key"]
    rows = pa.Table.from_pylist([*own, *others])
    assert implied.are_others(rows.slice(1)).to_pylist() == [False] * 2 + [True] * 4
    assert [each["vbucket"] for each in own] == [
        (zlib.crc32(key) >> 16 & 0x7FFF) % 64 for key in keys
    ]


def test_an_envelope_of_a_log_has_the_position_without_headers(cluster, kafka_broker, topic):
    lost = cluster.upsert("lost", {})
    options = {"headers": "none", "value_format": "envelope", "partitions": 1}
    url = kafka_broker.url(topic, **options)
    replicate(cluster, url, mode="log")
    cluster.roll_back(lost.vbucket, lost.seqno - 1)
    cluster.upsert("later", {})
    replicate(cluster, url, mode="log")
    first, rollback, later = kafka_broker.records(topic)
    position = json.loads(first.value())
    assert (position["partition"], position["bySeqno"]) == (lost.vbucket, lost.seqno)
    assert position["vbUuid"] == lost.vbuuid
    assert (headers(rollback)["op"], headers(rollback)["seqno"]) == ("rollback", lost.seqno - 1)
    assert (first.headers(), later.headers()) == (None, None)


def test_a_topic_that_was_created_anew_is_loaded_anew(cluster, kafka_broker, topic):
    cluster.upsert("a", {})
    url = kafka_broker.url(topic)
    replicate(cluster, url)
    kafka_broker.remove(topic)
    assert replicate(cluster, url).generation == 2
    assert values(kafka_broker, topic) == {b"a": b"{}"}


def test_a_transaction_that_takes_too_long_is_an_error_and_repeated(
    cluster, kafka_broker, topic, monkeypatch
):
    cluster.upsert("a", {"n": 1})
    url = kafka_broker.url(topic, **{"transaction.timeout.ms": 1000})
    save = sessions.Session.save

    def late(self, states):
        save(self, states)
        time.sleep(2.5)

    monkeypatch.setattr(sessions.Session, "save", late)
    with pytest.raises(ConcurrentWriterError, match=r"transaction\.timeout\.ms"):
        replicate(cluster, url)
    assert kafka_broker.records(topic) == []
    monkeypatch.setattr(sessions.Session, "save", save)
    replicate(cluster, url)
    assert len(kafka_broker.records(topic)) == 1
    with pytest.raises(ConfigError, match="INVALID_TRANSACTION_TIMEOUT") as raised:
        replicate(cluster, kafka_broker.url(f"{topic}x", **{"transaction.timeout.ms": 10**7}))
    assert raised.value.option == "target"


# ----- bad input -----


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("kafka://h:1", "names no topic"),
        ("kafka://?topic=a", "name a broker"),
        ("kafka://u:canary-8f1c2e@h:1?topic=a", r"sasl\.password"),
        ("kafka://h:1?topic=a%25b", "cannot be a topic"),
        ("kafka://h:1?topic=..", "cannot be a topic"),
        ("kafka://h:1/path?topic=a", "has a path"),
        ("kafka://h:1?topic=a&topik=b", "no option topik"),
        ("kafka://h:1?topic=a&topic=b", "gives topic twice"),
        ("kafka://h:1?topic=a&value_format=avro", "json or envelope"),
        ("kafka://h:1?topic=a&partitions=many", "partitions must be a number"),
        ("kafka://h:1?topic=a&transactional.id=x", r"transactional\.id cannot be set"),
        ("kafka://h:1?topic=a&no.such=x", "no.such"),
        ("kafka://h:1?topic=a&config=/nowhere", "cannot be read"),
    ],
)
def test_a_wrong_url_is_refused_by_its_option(url, told):
    with pytest.raises(ConfigError, match=told) as raised:
        open_target(url)
    assert raised.value.option == "target"
    assert _PASSWORD not in str(raised.value)


def test_brokers_are_left_alone_until_a_target_is_opened(monkeypatch):
    asked = []
    client = contact.Broker._client
    monkeypatch.setattr(
        contact.Broker,
        "_client",
        lambda self, options: asked.append(options["bootstrap.servers"]) or client(self, options),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        open_target(f"kafka://{address}?topic=a").close()
        open_database(f"kafka://{address}").close()
        assert asked == [], "no client, and no thread of it"
        found = open_target(f"kafka://{address}?topic=a&linger.ms=5&socket.timeout.ms=1000")
        assert asked == [""]
        with pytest.raises(TimeoutError):
            server.accept()
        found.close()


@pytest.mark.shows_password("the file of options has it")
def test_options_come_from_a_file_of_which_no_line_is_shown(tmp_path):
    file = tmp_path / "client.properties"
    file.write_text(f"# of librdkafka\nsasl.password={_PASSWORD}\n{_PASSWORD}\n")
    with pytest.raises(ConfigError, match=r"line 3 of .* is not name=value") as raised:
        open_target(f"kafka://h:1?topic=a&config={file}")
    assert _PASSWORD not in str(raised.value)
    file.write_text(
        f"sasl.mechanism=PLAIN\nsasl.username=u\nsasl.password={_PASSWORD}\n"
        "security.protocol=SASL_PLAINTEXT\n"
    )
    assert _PASSWORD not in repr(open_target(f"kafka://h:1?topic=a&config={file}"))


def test_a_broker_that_does_not_answer_is_an_error_within_seconds(
    cluster, monkeypatch, caplog, capfd
):
    monkeypatch.setattr(contact, "_CONTACT", 2.0)
    before = time.monotonic()
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        replicate(cluster, "kafka://127.0.0.1:1?topic=a")
    assert time.monotonic() - before < 12
    # The error says it once.
    assert capfd.readouterr() == ("", "")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def _of_the_limited(broker, folder, password):
    file = folder / "client.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=limited\n"
        f"sasl.password={password}\n"
    )
    return f"kafka://{broker.sasl}?topic=limited&config={file}"


@pytest.mark.shows_password("the file of options has it")
def test_a_wrong_password_and_a_missing_right_are_told_apart(cluster, kafka_broker, tmp_path):
    before = time.monotonic()
    with pytest.raises(AuthenticationError, match=r"sasl\.") as raised:
        replicate(cluster, _of_the_limited(kafka_broker, tmp_path, f"{_PASSWORD}-wrong"))
    assert _PASSWORD not in str(raised.value)
    with pytest.raises(AccessDeniedError, match="grant the right") as raised:
        replicate(cluster, _of_the_limited(kafka_broker, tmp_path, _PASSWORD))
    assert _PASSWORD not in str(raised.value)
    assert time.monotonic() - before < 20


def test_a_topic_with_another_use_is_refused(cluster, kafka_broker, topic, admin):
    cluster.upsert("a", {})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    with pytest.raises(ConfigError, match=r"cleanup\.policy delete"):
        replicate(cluster, kafka_broker.url(topic))
    other = f"{topic}-other"
    admin.create_topics([NewTopic(other, 1, config={"cleanup.policy": "compact"})])[other].result()
    with pytest.raises(ConfigError, match="is compacted"):
        replicate(cluster, kafka_broker.url(other), mode="log")
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    producer.produce(other, b"of another", b"a")
    assert producer.flush(10) == 0
    with pytest.raises(ConfigError, match="has records of others"):
        replicate(cluster, kafka_broker.url(other))
    smaller = f"{topic}-smaller"
    limit = {"cleanup.policy": "compact", "max.message.bytes": "5000"}
    admin.create_topics([NewTopic(smaller, 1, config=limit)])[smaller].result()
    with pytest.raises(ConfigError, match=r"set message\.max\.bytes=5000"):
        replicate(cluster, kafka_broker.url(smaller))
    with pytest.raises(ConfigError, match="is the topic of states"):
        replicate(cluster, kafka_broker.url("dcp_rs_states"))


def test_names_that_kafka_does_not_take_or_tell_apart_are_refused(cluster, kafka_broker, topic):
    with pytest.raises(ConfigError, match="cannot be a topic"):
        replicate(cluster, kafka_broker.url(f"{topic} {{scope}}"))
    assert open_database("kafka://h:1").fold("a.b") == open_database("kafka://h:1").fold("a_b")


@pytest.mark.parametrize("key", [None, b"\xff"], ids=["ours", "others"])
def test_a_damaged_state_is_refused(cluster, kafka_broker, topic, key):
    cluster.upsert("a", {})
    url = kafka_broker.url(topic, state=f"{topic}-states")
    replicate(cluster, url)
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    key = key or topic.encode()
    producer.produce(f"{topic}-states", b'{"format": "dcp_rs.kafka"}', key)
    assert producer.flush(10) == 0
    with pytest.raises(CheckpointError, match=f"state of topic {key.decode(errors='replace')}"):
        replicate(cluster, url)
    replicate(cluster, kafka_broker.url(f"{topic}-new", state=f"{topic}-new-states"))


@pytest.mark.parametrize("value", [None, -1, "many", 1 << 20, [3]])
def test_a_damaged_position_of_records_without_headers_is_refused(
    cluster, kafka_broker, topic, value
):
    cluster.upsert("a", {})
    states = f"{topic}-states"
    url = kafka_broker.url(topic, state=states, headers="none")
    replicate(cluster, url)
    (record,) = kafka_broker.table(states).values()
    state = json.loads(record.value())
    state["implied"]["num_vbuckets"] = value
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    producer.produce(states, json.dumps(state).encode(), topic)
    assert producer.flush(10) == 0
    with pytest.raises(CheckpointError, match=f"state of topic {topic} is damaged"):
        replicate(cluster, url)


def test_a_start_reads_few_of_the_old_states(cluster, kafka_broker, topic, admin, caplog):
    states = f"{topic}-states"
    url = kafka_broker.url(topic, state=states)
    replicate(cluster, url)
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    for _ in range(50):
        producer.produce(states, b"x" * 900_000, b"another")
        assert producer.flush(10) == 0
    producer.produce(states, None, b"another")
    assert producer.flush(10) == 0
    until = time.monotonic() + 60
    while sum(len(each.value() or b"") for each in kafka_broker.records(states)) > 20_000_000:
        assert time.monotonic() < until, "it is not compacted"
        time.sleep(0.5)
    replicate(cluster, url)
    assert not [each for each in caplog.records if getattr(each, "event", "")]
    own = f"{topic}-own"
    admin.create_topics([NewTopic(own, 1, config={"cleanup.policy": "compact"})])[own].result()
    replicate(cluster, kafka_broker.url(f"{topic}-2", state=own))
    (told,) = [each for each in caplog.records if getattr(each, "event", "")]
    assert told.event == "states_not_compacted"
    assert told.fields == {"topic": own, "segment_bytes": 1 << 30}


def test_columns_of_documents_are_refused(cluster, kafka_broker, topic):
    with pytest.raises(ConfigError) as raised:
        replicate(cluster, kafka_broker.url(topic), document_schema="name STRING")
    assert raised.value.option == "document_schema"


@pytest.mark.parametrize("options", [{}, {"tables": "{collection}"}])
def test_marks_of_removed_documents_are_refused(cluster, kafka_broker, topic, options):
    url = kafka_broker.url("" if options else topic, name=topic)
    with pytest.raises(ConfigError, match="tombstone") as raised:
        replicate(cluster, url, deletes="mark", **options)
    assert raised.value.option == "deletes"
    assert kafka_broker.topics() & {topic, "_default"} == set()


def test_a_package_without_a_library_is_an_error(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f0000 r-xp 00000000 00:00 1 /lib/libc.so.6\n")
    monkeypatch.setattr(contact, "_MAPS", maps)
    with pytest.raises(ConfigError, match="no librdkafka that can be loaded"):
        open_target("kafka://h:1?topic=a")


def test_small_blocks_of_memory_are_joined_once_librdkafka_is_used(start_python):
    program = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks a b c d e f g".split()]
libc.mallinfo.restype = Mallinfo
def kept():
    blocks = [libc.malloc(100) for _ in range(1000)]
    for block in blocks:
        libc.free(block)
    # While the list is there: to free it may join all.
    return libc.mallinfo().smblks
before = kept()
from dcp_rs.replication.kafka.broker import library
library()
print(before > 900, kept())
"""
    output, error = start_python(program).communicate(timeout=60)
    assert output.split() == ["True", "0"], error


def test_the_settings_of_topics_are_those_of_the_url(cluster, kafka_broker, topic, admin):
    replicate(cluster, kafka_broker.url(topic, partitions=7, replication=1))
    resource = ConfigResource("topic", topic)
    assert admin.describe_configs([resource])[resource].result()["cleanup.policy"].value == (
        "compact"
    )
    assert len(admin.list_topics(topic, timeout=5).topics[topic].partitions) == 7
