"""The page of other clients' options says what the data has, and the data what the code has."""

import inspect
import re
import sys
from functools import reduce
from pathlib import Path

import confluent_kafka
import pytest

import dcp_rs
from dcp_rs.cli.replicate import replicate
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.kafka.settings import Settings
from dcp_rs.replication.target import Address
from dcp_rs.spark import ReadOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import option_tables
import options_of_others

FUNCTIONS = {
    "BatchPolicy": (dcp_rs.BatchPolicy, None),
    "DocumentSchema": (dcp_rs.DocumentSchema, None),
    "connect": (dcp_rs.connect, dcp_rs.ConnectionOptions),
    "replicate": (dcp_rs.replicate, None),
    "stream": (dcp_rs.Client.stream, None),
}
# How many options the sources of these versions have, and the values of those that have some.
COUNTS = {"couchbase-kv": 35, "go-dcp": 50, "go-dcp-kafka": 28, "kafka-connect": 52}
MEMBERSHIPS = "couchbase dynamic kubernetesHa kubernetesStatefulSet lilCouchbase static"
BALANCERS = "CRC32Balancer Hash LeastBytes Murmur2Balancer ReferenceHash RoundRobin"
HANDLERS = (
    "ConfigurableSchemaSourceHandler DefaultSchemaSourceHandler RawJsonSourceHandler"
    " RawJsonWithMetadataSourceHandler SchemaRegistrySourceHandler others"
)
VALUES = {
    "checkpoint.autoReset": "earliest latest",
    "checkpoint.type": "auto manual",
    "couchbase.compression": "DISABLED ENABLED FORCED",
    "couchbase.event.filter": "AllPassFilter AllPassIncludingSystemFilter others",
    "couchbase.persistence.polling.interval": "0 others",
    "couchbase.schema.failure.action": "DLQ DROP TERMINATE",
    "couchbase.source.handler": HANDLERS,
    "couchbase.stream.from": "BEGINNING NOW SAVED_OFFSET_OR_BEGINNING SAVED_OFFSET_OR_NOW",
    "dcp.config.priority": "high low medium",
    "dcp.group.membership.type": MEMBERSHIPS,
    "dcp.mode": "finite infinite",
    "errors.tolerance": "all none",
    "kafka.balancer": BALANCERS,
    "metadata.type": "couchbase file kafka noop",
    "rollbackMitigation.disabled": "false true",
    "streamFrom": "fromBeginning fromNow",
    "streamMetaData": "basic full none",
    "streamPersistencePollingInterval": "0 others",
}
VALUES_IN_URLS = {"config": "/dev/null", "headers": "one", "partitions": "1", "replication": "1"}
OPTIONS = [
    (name, option)
    for name, client in options_of_others.clients().items()
    for option in client["options"]
]
OURS = [
    (place, text)
    for _, option in OPTIONS
    for place, texts in option.get("ours", {}).items()
    for text in texts
]


def check_argument(place, name, value):
    function, described = FUNCTIONS[place]
    found = {each.name: each for each in option_tables.options_of(function, described)}
    assert name in found, f"{place} has no option {name}"
    text = re.fullmatch(r'"(\w+)"', value)
    if text and found[name].choices:
        assert text[1] in found[name].choices, f"{place}: {name} is never {value}"


def check_url(name, value):
    Settings.of(Address.parse(f"kafka://broker?{name}={value or VALUES_IN_URLS.get(name, 'a')}"))


def check_librdkafka(name, value):
    Settings(brokers="broker", config={name: value})
    with pytest.raises(confluent_kafka.KafkaException) as caught:
        # One of them has no such value, so that nothing is made.
        confluent_kafka.Producer({name: value, "compression.type": "no such"})
    assert "No such configuration property" not in str(caught.value)


def check_command(name, _value):
    assert name in {flag for each in replicate.params for flag in each.opts}


def check_spark(name, value):
    assert name in option_tables.options_of_spark()
    if value:
        needed = {"connectionString": "couchbase://host", "bucket": "bucket"}
        ReadOptions.parse(needed | {name: value})


def check(place, text):
    """Checks that an option, and its value if it has one, is one of the code."""
    name, _, value = text.partition("=")
    if place in FUNCTIONS:
        check_argument(place, name, value)
    elif place == "dcp_rs":
        reduce(getattr, name.split(".")[1:], dcp_rs)
    else:
        known = {
            "command": check_command,
            "librdkafka": check_librdkafka,
            "spark": check_spark,
            "url": check_url,
        }
        known[place](name, value)


def test_the_page_has_the_options_of_the_data():
    page = options_of_others.PAGE.read_text(encoding="utf-8")
    assert options_of_others.with_tables(page) == page, "run `make option-tables`"


@pytest.mark.parametrize(("place", "text"), sorted(set(OURS)))
def test_an_option_that_takes_the_place_of_others_is_one_of_the_code(place, text):
    check(place, text)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("stream", "from"),
        ("stream", 'default="now"'),
        ("replicate", "start"),
        ("url", "acks"),
        ("url", "value_format=avro"),
        ("librdkafka", "client.ids"),
        ("librdkafka", "acks"),
        ("command", "--level"),
        ("spark", "scope"),
        ("spark", "startingOffsets=now"),
        ("dcp_rs", "dcp_rs.FileStore.put"),
    ],
)
def test_what_is_no_option_is_noticed(place, text):
    with pytest.raises((AssertionError, AttributeError, ConfigError)):
        check(place, text)


def test_each_option_of_the_versions_that_were_read_has_one_place():
    found = {name: set() for name in COUNTS}
    for client, option in OPTIONS:
        found[client] |= {*options_of_others.names(option)}
        # Either of them, and a reason where there is no place.
        assert ("ours" in option) != ("none" in option), option
        assert len(option.get("none", option.get("note", "")).split()) <= 8, option
    assert {name: len(names) for name, names in found.items()} == COUNTS
    rows = [(client, str(each["theirs"]), each.get("value")) for client, each in OPTIONS]
    assert len(rows) == len(set(rows))


def test_each_value_of_an_option_has_its_place():
    values = {}
    for _, option in OPTIONS:
        if "value" in option:
            values.setdefault(option["theirs"], []).append(option["value"])
    assert {name: " ".join(sorted(found)) for name, found in values.items()} == VALUES


def test_what_replicate_has_too_is_said():
    replicated = inspect.signature(dcp_rs.replicate).parameters
    for _, option in OPTIONS:
        ours = option.get("ours", {})
        both = [each for each in ours.get("stream", []) if each.partition("=")[0] in replicated]
        assert [each for each in both if each not in ours.get("replicate", [])] == [], option
