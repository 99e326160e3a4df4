"""A topic as a target, and the topics of several collections."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.decoding import as_array
from dcp_rs.replication.kafka import records as recording
from dcp_rs.replication.kafka.kept import Kept
from dcp_rs.replication.kafka.records import Implied, Records
from dcp_rs.replication.kafka.session import Session, Stored
from dcp_rs.replication.kafka.settings import Settings, check_topic
from dcp_rs.replication.rejects import SUFFIX, rejecting
from dcp_rs.replication.target import DELETED, NO_HISTORY, check_use

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcp_rs.replication.kafka.broker import Topic
    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.target import Address, Commit

_KNOWN = {"key", "value", "scope", "collection", "collection_id", "vbucket", "generation", "epoch"}
_KNOWN |= {"seqno", "cas", "timestamp", "_malformed", DELETED, *recording.COLUMNS}
_KNOWN |= {*recording.COLUMNS_OF_ENVELOPE}
# Rows whose records are made at a time: an envelope takes memory of its own.
_AT_ONCE = 50_000
_TOO_LARGE = "the record is larger than message.max.bytes"


class KafkaTarget:
    """A topic that is a table, compacted, or a log.

    The state is in a compacted topic, in the transaction of the rows that it describes: who reads
    only what is committed sees each change once.

    Args:
        brokers: Addresses of brokers, separated by commas.
        topic: Name of the topic.
        config: Options of librdkafka, such as `security.protocol`.
        session: That of several topics, if it is one of them.
        options: The other options of the URL.

    Raises:
        ConfigError: An option is wrong, or confluent-kafka too old.
        ImportError: confluent-kafka is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"table", "log"})
    why_not: ClassVar[dict[Mode, str]] = NO_HISTORY
    takes_rejects: ClassVar[bool] = True
    takes_structs: ClassVar[bool] = False
    commits_when_idle: ClassVar[bool] = True
    marks_deletes: ClassVar[bool] = True

    def __init__(
        self,
        brokers: str,
        topic: str,
        *,
        config: Mapping[str, str] | None = None,
        session: Session | None = None,
        **options: Any,
    ) -> None:
        check_topic(topic)
        self._owns = session is None
        if session is None:
            session = Session(
                Settings(brokers=brokers, topic=topic, config=config or {}, **options)
            )
        self._session = session
        self.name = topic
        self.columns = _columns(session.settings)
        self._topic: Topic | None = None
        self._rejects_topic: Topic | None = None
        self._rejects: Kept | None = None
        self._mode: Mode = "table"
        self._collections: tuple[str, ...] = ()
        self._implied: Implied | None = None

    @classmethod
    def at(cls, address: Address) -> KafkaTarget:
        """Creates the target for `kafka://broker:9092?topic=name`.

        Raises:
            ConfigError: There is no topic, or an option is wrong.
        """
        settings = Settings.of(address)
        if not settings.topic:
            raise ConfigError(
                "names no topic: give one, as in kafka://broker:9092?topic=name", option="target"
            )
        check_topic(settings.topic)
        found = cls(settings.brokers, settings.topic, session=Session(settings))
        found._owns = True
        return found

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:
        """See `dcp_rs.replication.Target.open`."""
        others = sorted(set(schema.names) - _KNOWN)
        if others:
            raise ConfigError(
                "a topic has documents as JSON, without columns: leave it out",
                option="document_schema",
            )
        self._mode = mode
        self._check_headers()
        session = self._session
        session.open()
        session.topics.add(self.name)
        if self.name in {session.settings.state, f"{session.settings.state}{SUFFIX}"}:
            raise ConfigError(
                f"{self.name} is the topic of states: choose another name", option="target"
            )
        stored = session.states.get(self.name)
        if stored is not None:
            check_use(stored.state, schema, mode)
            self._check_name(stored)
        is_new = session.broker.topic(self.name) is None
        self._topic = session.broker.make(self.name, is_compacted=mode == "table")
        if stored is None:
            self._check_empty(self._topic, is_new=is_new)
            return None
        self._collections = stored.collections
        if stored.uuid != self._topic.uuid:
            return replace(stored.state, moved="the topic was created anew")
        if stored.partitions != self._topic.partitions:
            raise ConfigError(
                f"the topic {self.name} had {stored.partitions} partitions and now has"
                f" {self._topic.partitions}, so that the same key would be in two of them:"
                " replicate to a new topic",
                option="target",
            )
        self._check_shape(stored)
        self._implied = stored.implied
        return stored.state

    def _check_headers(self) -> None:
        """Checks that each change has its position, with or without headers."""
        settings = self._session.settings
        if settings.headers != "none":
            return
        if self._mode == "log" and settings.value_format != "envelope":
            raise ConfigError(
                "without headers, a reader of the log cannot follow a rollback: give"
                " value_format=envelope, which has the position, or headers=one",
                option="target",
            )
        if self._mode == "table" and settings.key_format != "key":
            raise ConfigError(
                "without headers, records do not tell which collection they are of: use a topic"
                " for each collection and leave out key_format, or give headers=one",
                option="target",
            )

    def _check_name(self, stored: Stored) -> None:
        own = self._session.settings.transactional_id
        if stored.name != own:
            raise ConfigError(
                f"the topic {self.name} is written by the replication {stored.name}, not by {own}:"
                " give its name, or choose another topic",
                option="target",
            )

    def _check_shape(self, stored: Stored) -> None:
        given = self._session.settings.shape
        for name, value in stored.shape.items():
            if (own := given.get(name)) != value:
                raise ConfigError(
                    f"the topic {self.name} was written with {name}={value}, not {own}, and its"
                    " older records would stay: give it, or replicate to a new topic",
                    option="target",
                )

    def _check_empty(self, topic: Topic, *, is_new: bool) -> None:
        """Checks that nobody else has written to a topic without a state."""
        if is_new:
            return
        records = self._session.broker.records(topic)
        if next(iter(records), None) is not None:
            raise ConfigError(
                f"the topic {topic.name} has records of others, and no state in"
                f" {self._session.settings.state}: choose a new topic",
                option="target",
            )

    @property
    def _here(self) -> Topic:
        if self._topic is None:
            raise AssertionError("the target is open")
        return self._topic

    def commit(self, commit: Commit) -> Commit | None:
        """See `dcp_rs.replication.Target.commit`."""
        return commit_together(self._session, [(self, commit)])[0]

    def prepared(self, commit: Commit) -> tuple[Commit, Prepared]:
        """Returns a commit without what is too large, and what to send for it."""
        self._check_collections(commit.rows)
        self._decide_implied(commit)
        rows, documents = commit.rows, commit.documents
        large = self._too_large(rows, documents)
        commit = rejecting(commit, dict.fromkeys(large, _TOO_LARGE))
        sent = Prepared(self, commit)
        if large:
            sent.refused = rows.take(large)
        if commit.removals:
            sent.removed = Kept(self._implied)
            sent.removed.read(self._session.broker.records(self._here))
        if self._mode == "table" and self._rejects is None:
            self._find_rejects()
        if len(commit.rejects) and self._rejects_topic is None:
            self._open_rejects()
        return commit, sent

    def _too_large(self, rows: pa.Table, documents: pa.ChunkedArray) -> list[int]:
        """Returns the rows whose records are too large, as they are before compression."""
        settings = self._session.settings
        # PyArrow 18 crashes on the indices of several chunks.
        is_near = pc.greater(
            pc.fill_null(pc.binary_length(documents), 0),
            recording.surely_small(settings),
        ).combine_chunks()
        near = pc.indices_nonzero(is_near)
        if not len(near):
            return []
        own = rows.take(near), documents.take(near)
        found = recording.of_rows(*own, self._here.partitions, settings, self._implied)
        sizes = found.sizes()
        is_large = pc.greater(sizes, settings.message_bytes)
        return [int(each) for each in near.filter(is_large).to_pylist()]

    def _check_collections(self, rows: pa.Table) -> None:
        settings = self._session.settings
        if settings.key_format != "key" or self._mode != "table" or not len(rows):
            return
        _, names = recording.collections_of(rows)
        found = tuple(sorted({*self._collections, *names}))
        if len(found) > 1:
            raise ConfigError(
                f"the topic {self.name} would have documents of {', '.join(found)} under the same"
                " keys: give a topic for each, as in topic={scope}.{collection}, or"
                " key_format=path",
                option="target",
            )
        self._collections = found

    def _decide_implied(self, commit: Commit) -> None:
        """Decides once which position the records without headers have."""
        wants_none = self._session.settings.headers == "none" and self._mode == "table"
        if self._implied is None and wants_none and len(commit.rows):
            state = commit.state
            self._implied = Implied(
                collection_id=commit.rows["collection_id"][0].as_py(),
                generation=state.generation,
                num_vbuckets=state.num_vbuckets,
            )

    def _find_rejects(self) -> None:
        """Reads which rejects there are, once."""
        name = f"{self.name}{SUFFIX}"
        self._rejects = Kept()
        if not self._session.has_table(name):
            self._rejects_topic = self._session.broker.topic(name)
        if self._rejects_topic is not None:
            self._rejects.read(self._session.broker.records(self._rejects_topic))

    def _open_rejects(self) -> None:
        name = f"{self.name}{SUFFIX}"
        if self._session.has_table(name):
            raise ConfigError(
                f"{name} is where changes go that cannot be written, and it is the topic of"
                " another table: choose another template",
                option="target",
            )
        self._rejects_topic = self._session.broker.make(
            name, is_compacted=self._mode == "table", partitions=1
        )

    def drop(self) -> None:
        """Removes the topic, its rejects and its state."""
        # The state last: a topic without one is taken for that of others.
        self._session.broker.remove(self.name)
        self._session.broker.remove(f"{self.name}{SUFFIX}")
        with self._session.transaction():
            self._session.save({self.name: None})
        self._session.states.pop(self.name, None)

    def stored(self, state: State) -> Stored:
        """Returns what to store with a state."""
        settings, topic = self._session.settings, self._here
        return Stored(
            settings.transactional_id,
            topic.uuid,
            topic.partitions,
            self._collections,
            settings.shape,
            state,
            self._implied,
        )

    def close(self) -> None:
        """Closes the target."""
        if self._rejects is not None:
            self._rejects.close()
            self._rejects = None
        if self._owns:
            self._session.close()

    def __repr__(self) -> str:
        return f"KafkaTarget({self._session.settings.brokers!r}, {self.name!r})"


class Prepared:
    """What is sent for a commit of a target.

    Attributes:
        refused: Rows that are too large, of which older records are removed.
        removed: The records that the topic has, if some are to be removed.
    """

    def __init__(self, target: KafkaTarget, commit: Commit) -> None:
        self._target, self._commit = target, commit
        self.refused: pa.Table | None = None
        self.removed: Kept | None = None

    def send(self) -> None:
        """Adds the records to the transaction, those of older rows first."""
        session, topic = self._target._session, self._target._here  # noqa: SLF001 - its own
        if self.removed is not None:
            for batch in self.removed.chosen(self._commit.removals):
                session.send(topic, recording.tombstones(batch))
        for records in self._records(topic):
            session.send(topic, records)
        self._send_rejects()

    def _records(self, topic: Topic) -> Iterator[Records]:
        commit, settings = self._commit, self._target._session.settings  # noqa: SLF001 - its own
        rows, documents, implied = commit.rows, commit.documents, self._target._implied  # noqa: SLF001 - its own
        is_table = commit.state.mode == "table"
        if is_table and commit.has_new_rows_only and rows[DELETED].null_count < len(rows):
            # What was removed before the first load has no record.
            is_there = pc.is_null(rows[DELETED])
            rows, documents = rows.filter(is_there), documents.filter(is_there)
        if is_table and self.refused is not None and not commit.has_new_rows_only:
            none = pa.chunked_array([pa.nulls(len(self.refused), pa.binary())])
            found = recording.of_rows(self.refused, none, topic.partitions, settings)
            yield replace(found, values=none.combine_chunks())
        if is_table:
            for at in range(0, len(rows), _AT_ONCE):
                part = rows.slice(at, _AT_ONCE), documents.slice(at, _AT_ONCE)
                yield recording.of_rows(*part, topic.partitions, settings, implied)
            return
        # In order, and what concerns a vBucket in each partition.
        special = pc.is_in(rows["op"], pa.array(recording.SPECIAL))
        begin = 0
        for at in [*pc.indices_nonzero(special.combine_chunks()).to_pylist(), len(rows)]:
            part = rows.slice(begin, at - begin)
            if len(part):
                own = documents.slice(begin, at - begin)
                yield recording.of_rows(part, own, topic.partitions, settings)
            if at < len(rows):
                row = recording.of_rows(
                    rows.slice(at, 1), documents.slice(at, 1), topic.partitions, settings
                )
                yield row if settings.partition_by == "vbucket" else row.to_all(topic.partitions)
            begin = at + 1

    def _send_rejects(self) -> None:
        target, commit = self._target, self._commit
        kept, topic = target._rejects, target._rejects_topic  # noqa: SLF001 - its own
        if topic is None:
            if len(commit.rejects):
                raise AssertionError("rejects have a topic")
            return
        session = target._session  # noqa: SLF001 - its own
        settings = session.settings
        if kept is not None and len(kept):
            gone: list[tuple[int, bytes]] = []
            if commit.removals:
                gone = [each for batch in kept.chosen(commit.removals) for each in batch]
            keys = _reject_keys(commit.settled, settings)
            # A new reject takes the place of its older one by itself.
            anew = set(_reject_keys(commit.rejects, settings))
            gone += [(0, key) for key in keys if key not in anew and kept.has(0, key)]
            session.send(topic, recording.tombstones(gone))
            for partition, key in gone:
                kept.remove(partition, key)
        rejects = commit.rejects
        if not len(rejects):
            return
        # A compacted topic takes null for a tombstone.
        values = pc.fill_null(rejects["value"], b"").combine_chunks()
        found = Records(
            pa.array(_reject_keys(rejects, settings), pa.binary()),
            as_array(values),
            pa.repeat(pa.scalar(0, pa.int32()), len(rejects)),
            recording.headers_of(rejects, (*recording.HEADERS, "reason")),
        )
        is_large = pc.greater(found.sizes(), settings.message_bytes)
        session.send(topic, replace(found, values=pc.if_else(is_large, b"", found.values)))
        if kept is not None:
            position = rejects.select(["collection_id", "vbucket", "epoch", "generation"])
            for key, row in zip(found.keys.to_pylist(), position.to_pylist(), strict=True):
                kept.add(0, key, list(row.values()))


def _reject_keys(rows: pa.Table, settings: Settings) -> list[bytes]:
    keys: list[bytes] = rows["key"].cast(pa.binary()).to_pylist()
    if settings.key_format == "key":
        return keys
    ids = rows["collection_id"].to_pylist()
    return [b"%d.%b" % each for each in zip(ids, keys, strict=True)]


def commit_together(
    session: Session, commits: Sequence[tuple[KafkaTarget, Commit]]
) -> list[Commit | None]:
    """Applies commits of several topics in one transaction."""
    prepared = [(target, *target.prepared(commit)) for target, commit in commits]
    states: dict[str, Stored | None] = {
        target.name: target.stored(commit.state) for target, commit, _ in prepared
    }
    try:
        with session.transaction():
            for _, _, sent in prepared:
                sent.send()
            session.save(states)
    finally:
        for _, _, sent in prepared:
            if sent.removed is not None:
                sent.removed.close()
    session.states |= {name: stored for name, stored in states.items() if stored is not None}
    return [commit for _, commit, _ in prepared]


def _columns(settings: Settings) -> tuple[str, ...]:
    more = recording.COLUMNS_OF_ENVELOPE if settings.value_format == "envelope" else ()
    return (*recording.COLUMNS, *more)


class KafkaDatabase:
    """Topics of several collections, which are written in one transaction.

    Args:
        settings: Options of the target.

    Raises:
        ConfigError: confluent-kafka is too old.
        ImportError: confluent-kafka is not installed.
    """

    modes: ClassVar[frozenset[Mode]] = KafkaTarget.modes
    why_not: ClassVar[dict[Mode, str]] = KafkaTarget.why_not
    takes_rejects: ClassVar[bool] = True
    takes_structs: ClassVar[bool] = False
    commits_when_idle: ClassVar[bool] = True
    marks_deletes: ClassVar[bool] = True

    def __init__(self, settings: Settings) -> None:
        self._session = Session(settings)
        self._targets: list[KafkaTarget] = []
        self.columns = _columns(settings)

    @classmethod
    def at(cls, address: Address) -> KafkaDatabase:
        """Creates the topics' place for `kafka://broker:9092?topic={scope}.{collection}`.

        Raises:
            ConfigError: An option is wrong.
        """
        settings = Settings.of(address)
        if settings.topic and "{" not in settings.topic:
            raise ConfigError(
                "the topic is one, and tables asks for several: leave out one of them",
                option="target",
            )
        return cls(settings)

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        self._session.open()
        own = self._session.settings.transactional_id
        return {
            topic: stored.state.collection
            for topic, stored in self._session.states.items()
            if stored.state.collection is not None and stored.name == own
        }

    def target(self, table: str) -> KafkaTarget:
        """See `dcp_rs.replication.Database.target`."""
        found = KafkaTarget(self._session.settings.brokers, table, session=self._session)
        self._targets.append(found)
        return found

    def fold(self, table: str) -> str:
        """See `dcp_rs.replication.Database.fold`."""
        # Kafka's metrics do not tell them apart, so that it refuses both.
        return table.replace(".", "_")

    def commit(self, commits: Sequence[tuple[KafkaTarget, Commit]]) -> list[Commit | None]:
        """See `dcp_rs.replication.Database.commit`."""
        return commit_together(self._session, commits)

    def drop(self, target: KafkaTarget) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        target.drop()

    def close(self) -> None:
        """Closes it, and its topics."""
        for target in self._targets:
            target.close()
        self._session.close()

    def __repr__(self) -> str:
        return f"KafkaDatabase({self._session.settings.brokers!r})"
