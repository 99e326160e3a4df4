"""Transactions of a Kafka target."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs import _dcp_rs
from dcp_rs.exceptions import CheckpointError, ConcurrentWriterError, ConfigError, DcpError
from dcp_rs.replication.kafka.broker import Broker, Topic, library
from dcp_rs.replication.kafka.records import Implied, Records
from dcp_rs.replication.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dcp_rs.replication.kafka.settings import Settings

_FORMAT = "dcp_rs.kafka"
_VERSION = 2
# What states have whose records all have their position, which older releases read.
_WITHOUT_IMPLIED = 1
# A start reads the states of all topics.
_ELSEWHERE = "write to a new topic, with another state in the option target"
# Seconds.
_INIT = 30.0
_SEND = 60.0
_COMMIT = 60.0
_ABORT = 5.0


@dataclass(frozen=True)
class Stored:
    """What the topic of states has about a topic.

    Attributes:
        name: What tells its replication from others.
        uuid: ID of the topic.
        partitions: How many partitions it had.
        collections: Collections that it has documents of.
        shape: Options that its records were written with; empty if an older release wrote them.
        state: The state.
        implied: The position of records that have none; `None` if all have one.
    """

    name: str
    uuid: str
    partitions: int
    collections: tuple[str, ...]
    shape: Mapping[str, str]
    state: State
    implied: Implied | None = None

    def to_json(self) -> str:
        """Returns the document to store."""
        head = {
            "format": _FORMAT,
            "version": _WITHOUT_IMPLIED if self.implied is None else _VERSION,
            "name": self.name,
            "topic_id": self.uuid,
            "partitions": self.partitions,
            "collections": self.collections,
            "shape": self.shape,
            **({} if self.implied is None else {"implied": asdict(self.implied)}),
        }
        return f'{json.dumps(head)[:-1]}, "state": {self.state.to_json()}}}'

    @classmethod
    def from_json(cls, text: bytes, topic: str) -> Stored:
        """Reads a document.

        Raises:
            CheckpointError: It is damaged, or of a newer release.
        """
        try:
            found = json.loads(text)
            is_ours = found["format"] == _FORMAT and found["version"] <= _VERSION
            state = State.from_json(json.dumps(found["state"])) if is_ours else None
            stored = partial(
                cls,
                found["name"],
                found["topic_id"],
                int(found["partitions"]),
                tuple(found["collections"]),
                dict(found.get("shape", {})),
                implied=Implied.stored(found["implied"]) if "implied" in found else None,
            )
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"the state of topic {topic} is damaged ({type(error).__name__}): {_ELSEWHERE}"
            ) from error
        if state is None:
            raise CheckpointError(
                f"the state of topic {topic} is of another program or a newer release: update this"
                f" one, or {_ELSEWHERE}"
            )
        return stored(state=state)


class Session:
    """A transactional producer with the states of its topics.

    Args:
        settings: Options of the target.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._library = library()
        self.broker = Broker(settings)
        self.states: dict[str, Stored] = {}
        # Topics of targets, which have a state only after a commit.
        self.topics: set[str] = set()
        self._producer: Any = None
        self._topic: Topic | None = None

    def open(self) -> None:
        """Fences other processes, and reads the states that they have left.

        Raises:
            ConfigError: An option of librdkafka is wrong, or the topic of states has another use.
            ConnectError: No broker answers.
        """
        if self._producer is not None:
            return
        producer = _dcp_rs.KafkaProducer(self._library, list(self._options().items()))
        try:
            self.broker.check()
            self._topic = self.broker.make_states()
            with self._explained():
                producer.init(_INIT)
            # After that, no other process adds any.
            # Others may have written what is no name of a topic.
            newest = {
                record.key().decode("utf-8", "replace"): record.value()
                for record in self._newest(self._topic)
            }
            self.states = {name: Stored.from_json(text, name) for name, text in newest.items()}
        except BaseException:
            producer.close()
            raise
        self._producer = producer

    def _options(self) -> dict[str, str]:
        return self.settings.producer | {"message.max.bytes": str(self.settings.message_bytes)}

    def _newest(self, topic: Topic) -> Iterable[Any]:
        found = {record.key(): record for record in self.broker.records(topic) if record.key()}
        return [record for record in found.values() if record.value() is not None]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what an error of the producer is about."""
        try:
            yield
        except ConcurrentWriterError as error:
            raise ConcurrentWriterError(
                f"another process writes as {self.settings.transactional_id}, or a transaction took"
                f" longer than transaction.timeout.ms: {error}. Let one process write, or give"
                " another name in the option target, and start it again"
            ) from None
        except ConfigError:
            raise
        except DcpError as error:
            error.args = (f"{self.settings.transactional_id}: {error} (option target)",)
            raise

    def has_table(self, topic: str) -> bool:
        """Whether a topic is that of a table, also of one that is not written yet."""
        return topic in self.topics or topic in self.states

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Session]:
        """Commits what is sent in the block, or nothing."""
        producer = self._producer
        with self._explained():
            try:
                producer.begin()
                try:
                    yield self
                except DcpError as error:
                    if not str(error).endswith("(_STATE)"):
                        raise
                    # It has failed before, of which only a commit, itself refused, says why.
                producer.commit(_COMMIT)
            except BaseException:
                with contextlib.suppress(DcpError):
                    producer.abort(_ABORT)
                raise

    def send(self, topic: Topic, records: Records) -> None:
        """Adds records to the transaction."""
        records.send(self._producer, topic.name, topic.partitions, self.settings.headers, _SEND)

    def save(self, states: dict[str, Stored | None]) -> None:
        """Adds states of topics to the transaction; `None` for those that are gone.

        Raises:
            ConfigError: One is too large for a record.
        """
        if self._topic is None:
            raise AssertionError("the session is open")
        texts = [None if stored is None else stored.to_json() for stored in states.values()]
        records = Records(
            pa.array([name.encode() for name in states], pa.binary()),
            pa.array([None if text is None else text.encode() for text in texts], pa.binary()),
            pa.array([0] * len(states), pa.int32()),
            [],
        )
        largest = pc.max(records.sizes()).as_py()
        if largest > self.settings.message_bytes:
            raise ConfigError(
                f"a record of {self._topic.name}, a position in all vBuckets, takes {largest}"
                f" bytes: set message.max.bytes={largest} or more, and max.message.bytes of the"
                " topics",
                option="target",
            )
        self.send(self._topic, records)

    def close(self) -> None:
        """Closes the producer."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
