"""Values of the options of `dcp_rs.Client.stream`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _checks, _dcp_rs, _keywords
from dcp_rs.documents import as_options
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Op = Literal["mutation", "deletion", "expiration"]
Include = Literal["xattrs", "history", "system_events", "system_documents"]
Priority = Literal["low", "medium", "high"]
BackfillOrder = Literal["round-robin", "sequential"]


@dataclass(frozen=True)
class Share:
    """The vBuckets of one of several members, for `vbuckets` of `dcp_rs.Client.stream`.

    Every process computes the same shares, which differ by at most one vBucket.

        >>> [list(Share(member, of=3).vbuckets(8)) for member in range(3)]
        [[0, 1], [2, 3, 4], [5, 6, 7]]

    Attributes:
        member: Which member, from 0.
        of: Number of members.

    Raises:
        ConfigError: There is no such member.
    """

    member: int
    of: int

    def __post_init__(self) -> None:
        _checks.integer("of", self.of, 1, 0xFFFF)
        _checks.integer("member", self.member, 0, self.of - 1)

    def vbuckets(self, num_vbuckets: int) -> range:
        """Returns the vBuckets of the share.

        These are `member * num_vbuckets // of` up to, but not including,
        `(member + 1) * num_vbuckets // of`.

        Args:
            num_vbuckets: Number of vBuckets in the bucket.

        Raises:
            ConfigError: There are more members than vBuckets.
        """
        _checks.integer("num_vbuckets", num_vbuckets, 1, 0xFFFF)
        if self.of > num_vbuckets:
            raise ConfigError(
                f"{self.of} members are too many: the bucket has only {num_vbuckets} vBuckets",
                option="vbuckets",
            )
        return range(
            self.member * num_vbuckets // self.of, (self.member + 1) * num_vbuckets // self.of
        )


@_keywords.checked
@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """When a batch is delivered, for `batch` of `dcp_rs.Client.stream`.

    A batch ends at the first limit that it reaches. `linger` ends one only if you are waiting for
    it: a slow reader gets larger batches instead of more of them.

    Attributes:
        max_rows: Most rows in a batch.
        max_bytes: Size in bytes at which a batch ends, at most 16 MiB.
        linger: How long the first row of a batch waits at most for more rows, in seconds. A stream
            without an end waits so long only while changes come so fast that they would fill the
            batch; other rows are handed over once nothing is left to read, under load after 3 ms.
            From 2 ms on, data on a busy connection may collect for that long before it is read;
            with less, every batch waits for `linger`.

    Raises:
        ConfigError: A limit is out of range.
    """

    max_rows: int = 10_000
    max_bytes: int = 4 * 1024 * 1024
    linger: float = 0.1

    def __post_init__(self) -> None:
        _dcp_rs.check_batch(vars(self))


@dataclass(frozen=True)
class Masks:
    """Fields of documents that are masked, as the options of `dcp_rs.Client.stream` say.

    Attributes:
        drop_fields: Paths of fields that are dropped.
        hash_fields: Paths of fields that are hashed.
        hash_key: Secret of the hashes.
    """

    drop_fields: tuple[str, ...] = ()
    hash_fields: tuple[str, ...] = ()
    hash_key: str | bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        drop_fields: str | Iterable[str] | None,
        hash_fields: str | Iterable[str] | None,
        hash_key: str | bytes | None,
    ) -> Masks:
        """Takes the options.

        Raises:
            ConfigError: A path is none, or the options contradict each other.
        """
        given = {"drop_fields": drop_fields, "hash_fields": hash_fields, "hash_key": hash_key}
        options: dict[str, Any] = {
            # The check would exhaust an iterator.
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in given.items()
        }
        _checks.each_utf8(options)
        _dcp_rs.masks(options)
        for name in ("drop_fields", "hash_fields"):
            paths = options[name]
            options[name] = (paths,) if isinstance(paths, str) else tuple(paths or ())
        return cls(**options)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return dict(vars(self))

    @property
    def text(self) -> str | None:
        """JSON that is the same for the same masks, without the key; `None` if there are none."""
        return _dcp_rs.masks(self.options)


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a stream as the engine takes them: without objects of this package."""
    batch = options["batch"]
    if batch is not None:
        _checks.instance("batch", batch, BatchPolicy, "a BatchPolicy")
        batch = vars(batch)
    schema = as_options(options["document_schema"])
    return {**options, "document_schema": schema, "batch": batch}
