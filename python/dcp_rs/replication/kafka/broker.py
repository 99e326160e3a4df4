"""What a Kafka target asks brokers for, other than to write: topics, and what is in them."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_rs._libraries import require
from dcp_rs._logging import about
from dcp_rs.exceptions import (
    AccessDeniedError,
    AuthenticationError,
    ConfigError,
    ConnectError,
    DcpError,
    TimeoutError,  # noqa: A004 - the package's own
)
from dcp_rs.replication.heap import turn_off_fastbins

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dcp_rs.replication.kafka.settings import Settings

_log = logging.getLogger("dcp_rs.replication.kafka")

# Seconds.
_CONTACT = 8.0
_REQUEST = 15.0
# To wait for the transactions of others, which a broker aborts after a minute by default.
_READ = 90.0
_RECORDS = 10_000
_ERRORS = 100
# What a broker says while another one begins to lead a partition.
_PASSING = {"NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "UNKNOWN_TOPIC_OR_PART"}
# A start reads the topic of states, of which a broker compacts all but the newest segment.
_OF_STATES = {"segment.bytes": "16777216", "min.cleanable.dirty.ratio": "0.1"}
_SEGMENT_BYTES = 64 * 1024 * 1024
# What this process has loaded.
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Topic:
    """A topic as it is.

    Attributes:
        name: Its name.
        uuid: Its ID, which another of the name does not have.
        partitions: How many partitions it has.
    """

    name: str
    uuid: str
    partitions: int


def library() -> str:
    """Returns the path of the librdkafka that confluent-kafka has loaded, and turns off fastbins.

    Raises:
        ConfigError: It has none that others can load, or is too old.
        ImportError: confluent-kafka is not installed.
    """
    require("a Kafka target", "confluent_kafka", "kafka")
    for line in _MAPS.read_text().splitlines():
        if "/librdkafka" in line:
            turn_off_fastbins()
            return line.split(maxsplit=5)[5].strip()
    raise ConfigError(
        "confluent-kafka has no librdkafka that can be loaded: install its wheel from PyPI"
    )


class Broker:
    """The brokers of a target.

    Args:
        settings: Options of the target.

    Raises:
        ConfigError: An option of librdkafka is wrong.
        ImportError: confluent-kafka is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self._kafka = require("a Kafka target", "confluent_kafka", "kafka")
        self._api = require("a Kafka target", "confluent_kafka.admin", "kafka")
        self._settings = settings
        # The last errors: a cluster may be away for days.
        self._seen: deque[Any] = deque(maxlen=_ERRORS)
        if settings.config:
            # Without brokers, it only looks at the options.
            self._client({**settings.client, "bootstrap.servers": ""})

    @cached_property
    def _admin(self) -> Any:
        return self._client(self._settings.client)

    def _client(self, options: dict[str, str]) -> Any:
        try:
            return self._api.AdminClient(
                {**options, "error_cb": self._seen.append}, logger=_Quiet()
            )
        except self._kafka.KafkaException as error:
            raise self.failure(error) from None

    def check(self) -> None:
        """Checks that a broker answers.

        Raises:
            AuthenticationError: It refuses who this is.
            ConnectError: None does within seconds.
        """
        until = time.monotonic() + _CONTACT
        while True:
            try:
                self._admin.list_topics(timeout=1)
            except self._kafka.KafkaException as error:
                self._admin.poll(0)
                refused = [each for each in self._seen if each.name() == "_AUTHENTICATION"]
                if refused:
                    raise self.failure(self._kafka.KafkaException(refused[0])) from None
                if time.monotonic() < until:
                    continue
                last = self._seen[-1].str() if self._seen else error.args[0].str()
                raise ConnectError(
                    f"no broker of {self._settings.brokers} answers within {_CONTACT:.0f} s:"
                    f" {last}: check the addresses in the option target, and security.protocol"
                ) from None
            return

    def failure(self, error: Exception, what: str = "the option target") -> DcpError:
        """Returns the error for an exception of confluent-kafka."""
        cause = error.args[0]
        name, text = cause.name(), f"{what}: {cause.str()} ({cause.name()})"
        if "AUTHORIZATION" in name:
            return AccessDeniedError(f"{text}: grant the right to the user of sasl.username")
        if "AUTHENTICATION" in name:
            return AuthenticationError(
                f"{text}: check security.protocol and the options that begin with sasl. or ssl."
            )
        if name in {"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_SSL"}:
            return ConnectError(text)
        if "TIMED_OUT" in name:
            return TimeoutError(text)
        if name in {"_INVALID_ARG", "TOPIC_EXCEPTION", "INVALID_PARTITIONS",
                    "INVALID_REPLICATION_FACTOR", "POLICY_VIOLATION"}:  # fmt: skip
            return ConfigError(text.removeprefix("the option target: "), option="target")
        return DcpError(text)

    def topic(self, name: str) -> Topic | None:
        """Returns a topic; `None` if there is none of the name."""
        wanted = self._kafka.TopicCollection([name])
        (waiting,) = self._admin.describe_topics(wanted, request_timeout=_REQUEST).values()
        try:
            found = waiting.result()
        except self._kafka.KafkaException as error:
            if error.args[0].name() in {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"}:
                return None
            raise self.failure(error, f"topic {name}") from None
        return Topic(name, str(found.topic_id), len(found.partitions))

    def make_states(self) -> Topic:
        """Returns the topic of states, which is created if it is missing.

        Raises:
            ConfigError: It is there with settings that lose records, or cannot be created.
            AccessDeniedError: The right to is missing.
        """
        name = self._settings.state
        found = self.make(name, is_compacted=True, partitions=1, config=_OF_STATES)
        segment = int(self._config(name)["segment.bytes"].value)
        if segment > _SEGMENT_BYTES:
            _log.warning(
                "the topic %s keeps old states in segments of %d bytes, which each start reads: set"
                " segment.bytes=%s",
                name,
                segment,
                _OF_STATES["segment.bytes"],
                extra=about("states_not_compacted", topic=name, segment_bytes=segment),
            )
        return found

    def make(
        self,
        name: str,
        *,
        is_compacted: bool,
        partitions: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Topic:
        """Returns a topic, which is created if it is missing, with some settings.

        Raises:
            ConfigError: It is there with settings that lose records, or cannot be created.
            AccessDeniedError: The right to is missing.
        """
        found = self.topic(name)
        if found is None:
            own = {"cleanup.policy": "compact"} if is_compacted else {}
            new = self._api.NewTopic(
                name,
                partitions or self._settings.partitions,
                self._settings.replication,
                config=own | dict(config or {}),
            )
            (waiting,) = self._admin.create_topics([new], request_timeout=_REQUEST).values()
            try:
                waiting.result()
            except self._kafka.KafkaException as error:
                if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                    raise self.failure(error, f"topic {name}") from None
            found = self._appeared(name)
        self._check(name, is_compacted=is_compacted)
        return found

    def _appeared(self, name: str) -> Topic:
        until = time.monotonic() + _REQUEST
        while time.monotonic() < until:
            found = self.topic(name)
            if found is not None:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"topic {name} was created, and did not appear in {_REQUEST:.0f} s")

    def _config(self, name: str) -> Any:
        """Returns the settings of a topic by their names."""
        resource = self._api.ConfigResource("topic", name)
        (waiting,) = self._admin.describe_configs([resource], request_timeout=_REQUEST).values()
        try:
            return waiting.result()
        except self._kafka.KafkaException as error:
            raise self.failure(error, f"topic {name}") from None

    def _check(self, name: str, *, is_compacted: bool) -> None:
        found = self._config(name)
        policy = found["cleanup.policy"].value
        if is_compacted and policy != "compact":
            raise ConfigError(
                f"the topic {name} has cleanup.policy {policy}, which removes documents that did"
                " not change for long: set compact, or choose another topic",
                option="target",
            )
        if not is_compacted and "compact" in policy:
            raise ConfigError(
                f"the topic {name} is compacted, and a log has every change: set cleanup.policy"
                " delete, or choose another topic",
                option="target",
            )
        largest = int(found["max.message.bytes"].value)
        if largest < self._settings.message_bytes:
            raise ConfigError(
                f"the topic {name} takes at most {largest} bytes (max.message.bytes): set"
                f" message.max.bytes={largest}, or raise it",
                option="target",
            )

    def remove(self, name: str) -> None:
        """Removes a topic, which may be gone already."""
        (waiting,) = self._admin.delete_topics([name], operation_timeout=_REQUEST).values()
        try:
            waiting.result()
        except self._kafka.KafkaException as error:
            if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                raise self.failure(error, f"topic {name}") from None

    def records(self, topic: Topic) -> Iterator[Any]:
        """Reads what is committed in a topic now, with the transactions that are open.

        Raises:
            TimeoutError: It was not read in time, since a transaction stays open.
        """
        consumer = self._kafka.Consumer(
            self._settings.client
            | {
                "group.id": self._settings.transactional_id,
                "enable.auto.commit": "false",
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "enable.partition.eof": "true",
                "fetch.wait.max.ms": "20",
                "queued.max.messages.kbytes": "16384",
            },
            logger=_Quiet(),
        )
        try:
            yield from self._read(consumer, topic)
        except self._kafka.KafkaException as error:
            raise self.failure(error, f"topic {topic.name}") from None
        finally:
            consumer.close()

    def _offsets(self, topic: Topic, spec: Any) -> dict[int, int]:
        """Returns an offset of each partition, of what is not committed too.

        A consumer of committed records would leave out those whose commit was just answered.
        """
        places = [self._kafka.TopicPartition(topic.name, each) for each in range(topic.partitions)]
        until = time.monotonic() + _REQUEST
        while True:
            try:
                waiting = self._admin.list_offsets(
                    dict.fromkeys(places, spec), request_timeout=_REQUEST
                )
                return {place.partition: each.result().offset for place, each in waiting.items()}
            except self._kafka.KafkaException as error:
                # Of a topic that was made again, the library may ask the broker of the one before.
                is_passing = error.args[0].name() in _PASSING
                if not is_passing or time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _read(self, consumer: Any, topic: Topic) -> Iterator[Any]:
        spec = self._api.OffsetSpec
        firsts = self._offsets(topic, spec.earliest())
        ends = {
            number: end
            for number, end in self._offsets(topic, spec.latest()).items()
            if firsts[number] < end
        }
        if ends:
            consumer.assign(
                [self._kafka.TopicPartition(topic.name, each, firsts[each]) for each in ends]
            )
        until = time.monotonic() + _READ
        while ends:
            for record in consumer.consume(_RECORDS, timeout=0.02):
                error = record.error()
                if error is None:
                    until = time.monotonic() + _READ
                    yield record
                elif error.name() != "_PARTITION_EOF":
                    raise self._kafka.KafkaException(error)
                elif record.offset() >= ends.get(record.partition(), 0):
                    ends.pop(record.partition(), None)
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the topic {topic.name} could not be read to its end in {_READ:.0f} s: does"
                    " another program keep a transaction open?"
                )


class _Quiet:
    """A logger for librdkafka: what goes wrong for good is raised, the rest is for debugging."""

    def log(self, _level: int, *message: object) -> None:
        """Takes a record."""
        text, *arguments = message
        _log.debug(str(text), *arguments)
