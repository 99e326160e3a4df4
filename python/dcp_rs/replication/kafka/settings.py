"""Options of a Kafka target, of which those with a dot are librdkafka's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_rs.replication.target import Address

ValueFormat = Literal["json", "envelope"]
KeyFormat = Literal["key", "path"]
PartitionBy = Literal["key", "vbucket"]
Headers = Literal["each", "one", "none"]

_WORDS = {
    "value_format": get_args(ValueFormat),
    "key_format": get_args(KeyFormat),
    "partition_by": get_args(PartitionBy),
    "headers": get_args(Headers),
}
_NUMBERS = ("partitions", "replication")
# Options of librdkafka that exactness depends on.
_OWN = frozenset({
    "bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "group.id",
    "isolation.level", "enable.auto.commit", "partitioner",
})  # fmt: skip
# What librdkafka has without an option.
_MESSAGE_BYTES = 1_000_000
_LEGAL = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a URL or a caller says about a Kafka target.

    Attributes:
        brokers: Addresses of brokers, separated by commas.
        topic: Name of the topic, or the template of several; empty if `tables` names them.
        state: Name of the compacted topic that has the states.
        name: What tells this replication from others, in `transactional.id`; by default the
            topic.
        partitions: Partitions of topics that it creates.
        replication: Replicas of these; -1 for the broker's default.
        value_format: Whether a record has the document, or the envelope of Couchbase's connector.
        key_format: Whether its key is the document's, or has the collection before it.
        partition_by: Whether its partition is chosen by the key, as Kafka's clients do, or by the
            vBucket.
        headers: Whether it has a header for each part of its position, one for all, or none
            but where the upkeep of the topic needs them.
        config: Options of librdkafka.
    """

    brokers: str
    topic: str = ""
    state: str = "dcp_rs_states"
    name: str = ""
    partitions: int = 6
    replication: int = -1
    value_format: ValueFormat = "json"
    key_format: KeyFormat = "key"
    partition_by: PartitionBy = "key"
    headers: Headers = "each"
    # May contain a password.
    config: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Checks the options.

        Raises:
            ConfigError: One is wrong.
        """
        if not self.brokers:
            raise _wrong("name a broker, as in kafka://broker:9092?topic=name")
        if "@" in self.brokers:
            raise _wrong(
                "has a user before the brokers: give security.protocol, sasl.mechanism,"
                " sasl.username and sasl.password in the file that config names"
            )
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise _wrong(f"{name} must be {' or '.join(words)}")
        if self.partitions < 1 or not (self.replication == -1 or self.replication > 0):
            raise _wrong("partitions must be 1 or more, and replication too, or -1")
        check_topic(self.state)
        own = sorted(_OWN & self.config.keys())
        if own:
            raise _wrong(f"{', '.join(own)} cannot be set, since exactness depends on it")

    @classmethod
    def of(cls, address: Address) -> Settings:
        """Reads a URL.

        Raises:
            ConfigError: An option is unknown or wrong, or the file of options cannot be read.
        """
        own = {name: value for name, value in address.options.items() if "." not in name}
        known = {"topic", "state", "name", "config", *_NUMBERS, *_WORDS}
        unknown = sorted(own.keys() - known)
        if unknown:
            raise _wrong(
                f"kafka has no option {', '.join(unknown)}; it takes {', '.join(sorted(known))},"
                " and options of librdkafka, which have a dot"
            )
        if address.path.strip("/"):
            raise _wrong("has a path, and a topic is given as in kafka://broker:9092?topic=name")
        file = own.pop("config", "")
        config = _read(file) if file else {}
        config |= {name: value for name, value in address.options.items() if "." in name}
        numbers = {name: _number(name, own.pop(name)) for name in _NUMBERS if name in own}
        return cls(brokers=address.host, config=config, **own, **numbers)  # type: ignore[arg-type]

    @property
    def transactional_id(self) -> str:
        """The `transactional.id`: of several processes with the same, one can write."""
        return f"dcp_rs.{self.state}.{self.name or self.topic or 'tables'}"

    @property
    def shape(self) -> dict[str, str]:
        """The options that all records of a topic share."""
        return {
            name: getattr(self, name) for name in ("value_format", "key_format", "partition_by")
        }

    @property
    def message_bytes(self) -> int:
        """The most bytes of a message."""
        return _number("message.max.bytes", self.config.get("message.max.bytes", _MESSAGE_BYTES))

    @property
    def client(self) -> dict[str, str]:
        """Options of librdkafka for any client."""
        producer = ("queue.", "batch.", "linger.", "compression.", "transaction.", "message.")
        kept = {name: text for name, text in self.config.items() if not name.startswith(producer)}
        return kept | {"bootstrap.servers": self.brokers}

    @property
    def producer(self) -> dict[str, str]:
        """Options of librdkafka for the producer, whose queue is bounded."""
        return {
            # What is queued stays in the caches: with 20,000 a record costs a sixth more.
            "queue.buffering.max.kbytes": "65536",
            "queue.buffering.max.messages": "10000",
            "linger.ms": "20",
            **self.config,
            "bootstrap.servers": self.brokers,
            "transactional.id": self.transactional_id,
        }


def check_topic(name: str) -> None:
    """Checks that there can be a topic of a name.

    Raises:
        ConfigError: Kafka takes no such name.
    """
    if not _LEGAL.fullmatch(name) or name in {".", ".."}:
        raise ConfigError(
            f"{name!r} cannot be a topic, whose name has 1 to 249 letters, digits, dots, hyphens"
            " and underscores: choose another name or template",
            option="target",
        )


def _read(file: str) -> dict[str, str]:
    """Reads a file of options, one a line as name=value, which may have passwords."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise _wrong(f"the file {file} of config cannot be read: {why}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, sign, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not sign:
            # The line may be a password.
            raise _wrong(f"line {number} of {file} is not name=value")
        found[name.strip()] = value.strip()
    return found


def _number(name: str, text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise _wrong(f"{name} must be a number") from None


def _wrong(problem: str) -> ConfigError:
    return ConfigError(problem, option="target")
