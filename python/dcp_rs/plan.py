"""Plans of bounded reads, whose partitions any process can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from dcp_rs import _checks, _clients, _dcp_rs, _keywords
from dcp_rs.connection import Bucket, ConnectionOptions, without_secrets
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import engine_options
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    import pyarrow as pa

    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BackfillOrder, BatchPolicy, Include, Priority
    from dcp_rs.planner import Offsets


# Options of `Client.plan` that are like those of a stream.
_OF_PLAN = (
    "start", "until", "vbuckets", "collections", "keys", "ops", "since", "persisted_only",
    "on_rollback", "on_purge",
)  # fmt: skip


class Range(NamedTuple):
    """The changes to read from one vBucket."""

    vbucket: int
    vbuuid: int
    """History branch to resume from; 0 for the beginning."""
    from_seqno: int
    """Seqno after which to start."""
    to_seqno: int
    """Last seqno to read."""
    epoch: int
    """Rollbacks seen on the vBucket."""
    rolled_back: bool
    """Whether a rollback row to `from_seqno` comes before the changes."""

    @property
    def size(self) -> int:
        """Upper bound of the number of changes: seqnos, of all collections."""
        return self.to_seqno - self.from_seqno


class Partition:
    """Part of a plan: some vBuckets of one node, each with a range of seqnos.

    It is plain data of a few KB, without an open connection: pickle it, or send its JSON, to the
    process that reads it. Neither contains a password, a token or the passphrase of a key. A pickle
    has the options of the client that made the plan, if its credentials are elsewhere: in a
    `password_file` or `token_file`, with a function as `credentials` or `token`, or with a client
    certificate.

        >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     _ = cluster.upsert("key", b"{}")
        ...     plan = client.plan(persisted_only=False)
        ...     sent = [partition.to_json() for partition in plan.partitions]
        ...     for text in sent:  # elsewhere
        ...         with Partition.from_json(text).open(client) as stream:
        ...             [row["key"] for batch in stream for row in batch.rows()]
        ['key']
    """

    __slots__ = ("_connection", "_plan")

    def __init__(self, plan: _dcp_rs.ReadPlan, connection: ConnectionOptions | None) -> None:
        self._plan = plan
        self._connection = None if connection is None else _by_reference(connection)

    @property
    def bucket_uuid(self) -> str:
        """UUID of the bucket. No other bucket is read."""
        return self._plan.bucket_uuid

    @property
    def node(self) -> str:
        """Node of the vBuckets when they were planned, as `host:port`.

        A stream is nearest to its data there. It follows vBuckets that have moved.
        """
        return self._plan.node or ""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What is read of each vBucket, in ascending order."""
        return tuple(self._plan.ranges())

    @property
    def vbuckets(self) -> tuple[int, ...]:
        """The vBuckets of the partition, in ascending order."""
        return tuple(each.vbucket for each in self.ranges)

    @property
    def size(self) -> int:
        """Upper bound of the number of changes in the partition."""
        return sum(each.size for each in self.ranges)

    @property
    def needs_client(self) -> bool:
        """Whether `open` needs a client, because the partition has no options to connect with."""
        return self._connection is None

    @_keywords.checked_but(
        {name: f"what is read is the plan's, as in client.plan({name}=...)" for name in _OF_PLAN}
    )
    def open(
        self,
        client: Bucket | None = None,
        *,
        columns: Literal["basic", "full"] | Sequence[str] = "basic",
        key_type: Literal["string", "binary"] = "string",
        value_format: Literal["binary", "string", "variant"] = "binary",
        document_schema: str | pa.Schema | DocumentSchema | None = None,
        drop_fields: str | Iterable[str] | None = None,
        hash_fields: str | Iterable[str] | None = None,
        hash_key: str | bytes | None = None,
        include: Include | Iterable[Include] = (),
        initial_deletions: Literal["deliver", "skip", "skip_if_supported"] = "deliver",
        priority: Priority | None = None,
        backfill_order: BackfillOrder | None = None,
        batch: BatchPolicy | None = None,
        ack: Literal["next", "manual"] = "next",
    ) -> ChangeStream:
        """Opens the stream of the partition, which ends by itself.

        Every stream of a partition has the same bounds, however often it is opened, and begins with
        the rollback rows of the plan. A key that was written again in the meantime may be missing:
        its new version is above the bound, and comes with the next plan.

        Args:
            client: A `dcp_rs.Client` of the bucket; by default, a client with the options that the
                partition has. This process keeps that one for the next partition, and its
                connections for a minute.
            columns: As in `dcp_rs.Client.stream`, like the options below. Without `value` and
                `document_schema`, the server does not send documents.
            key_type: As there.
            value_format: As there.
            document_schema: As there.
            drop_fields: As there.
            hash_fields: As there.
            hash_key: As there.
            include: As there. Whether `system_documents` are read is the plan's.
            initial_deletions: As there.
            priority: As there.
            backfill_order: As there.
            batch: As there.
            ack: As there.

        Raises:
            ConfigError: An option is wrong, or there is no client and the partition has no options:
                it was read from JSON, or its client had a password, token or passphrase in them.
            CheckpointError: The partition belongs to another bucket, or is ahead of the server.
            RollbackError: The server's history is no longer the one that was planned. A plan with
                `is_last` delivers a rollback row instead, unless `on_rollback="fail"` or the end of
                the plan is gone.
            DcpError: As `dcp_rs.Client.stream`, and without `client` as `dcp_rs.connect`.
        """
        options = dict(locals())
        del options["self"], options["client"]
        delivery = {
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in options.items()
        }
        delivery = engine_options(delivery)
        _checks.each_utf8(delivery)
        _dcp_rs.check_stream(delivery)
        if client is None:
            return self._stream(self._own_connection(), delivery)
        _checks.instance("client", client, Bucket, "a Client")
        inner = client._inner  # noqa: SLF001 - the package's own
        return ChangeStream(inner.run(self._plan, delivery), client.bucket_name)

    def _stream(self, connection: ConnectionOptions, delivery: dict[str, Any]) -> ChangeStream:
        """Opens the stream with options as the engine takes them, on a client that is kept."""
        return _clients.open_plan(self._plan, connection, delivery)

    def to_json(self) -> str:
        """Returns what is read as JSON, the same as the Rust crate's `ReadPlan`.

        It contains nothing about the connection.
        """
        return self._plan.to_json()

    @classmethod
    def from_json(cls, text: str, connection: ConnectionOptions | None = None) -> Partition:
        """Parses what `to_json` returned.

        Args:
            text: The JSON.
            connection: How `open` connects without a client.

        Raises:
            ConfigError: The text is damaged, is no partition, or was written by another release.
        """
        _checks.text("text", text)
        if connection is not None:
            _checks.instance("connection", connection, ConnectionOptions, "ConnectionOptions")
        return cls(_dcp_rs.ReadPlan.from_json(text), connection)

    def _own_connection(self) -> ConnectionOptions:
        if self._connection is None:
            raise ConfigError(
                "is needed: the partition has no options to connect with, because it was read from "
                "JSON or was planned by a client with a password, token or passphrase in its "
                "options, which a partition never contains. Pass a client, or plan with one that "
                "has password_file, token_file, or functions as credentials or token",
                option="client",
            )
        return self._connection

    def __reduce__(self) -> tuple[Any, tuple[_dcp_rs.ReadPlan, ConnectionOptions | None]]:
        """Pickles without secrets."""
        return Partition, (self._plan, self._connection)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return (self._plan, self._connection) == (other._plan, other._connection)

    def __hash__(self) -> int:
        return hash(self._plan)

    def __repr__(self) -> str:
        where = f" of {self.node}" if self.node else ""
        return f"<dcp_rs.Partition {len(self.ranges)} vBuckets{where}, size={self.size}>"


@dataclass(frozen=True)
class ReadPlan:
    """What a bounded read covers, from `dcp_rs.Client.plan`.

    Attributes:
        partitions: Its parts, which together read each change once. None is empty; there are none
            if there is nothing to read.
        end: Where the plan ends: `start` of the next plan. JSON, to be stored with what was read.
            `None` with `is_last`.
    """

    partitions: tuple[Partition, ...]
    end: Offsets | None

    @property
    def size(self) -> int:
        """Upper bound of the number of changes in all partitions."""
        return sum(each.size for each in self.partitions)

    def __repr__(self) -> str:
        return f"<dcp_rs.ReadPlan {len(self.partitions)} partitions, size={self.size}>"


def _by_reference(options: ConnectionOptions) -> ConnectionOptions | None:
    """Returns options without a secret as they are; `None` if they contain one."""
    literal = (options.password, options.tls_key_password)
    address, _, others = without_secrets(options.connection_string).partition("?")
    has_secret = (
        isinstance(options.token, str)
        or any(each is not None for each in literal)
        or address == "***"
        or "password" in others
    )
    return None if has_secret else options
