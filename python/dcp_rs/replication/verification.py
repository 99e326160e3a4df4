"""How tables compare with their bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["missing", "extra", "older", "other"]
KINDS: tuple[Kind, ...] = ("missing", "extra", "older", "other")
"""How a table may differ."""

DROPPED = "its collection was dropped"
"""What is said of the table of such a collection."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A document that a table and the bucket do not both have in one version.

    Attributes:
        kind: As the attributes of `dcp_rs.replication.TableVerification`.
        key: Its key.
        vbucket: Its vBucket.
        seqno: Seqno of its row; `None` without one.
        bucket_seqno: Seqno of its last change in the bucket; `None` if there is none.
    """

    kind: Kind
    key: bytes
    vbucket: int
    seqno: int | None
    bucket_seqno: int | None


@dataclass(frozen=True, kw_only=True)
class TableVerification:
    """How a table compares with the bucket as it was at the table's position.

    Attributes:
        collection: The table's collection, if it has only one.
        documents: Documents of the bucket that the table is to have.
        rows: Rows that it has.
        rejected: Documents that are in the table of rejects instead.
        missing: Documents without a row.
        extra: Rows without a document, or beyond the first of one document.
        older: Rows with an earlier version of the document.
        other: Rows with a version that the bucket does not have.
        later: Documents that changed after the table's position, which were not compared.
        rolled_back: vBuckets in which a failover took back changes that the table has, and that
            `dcp_rs.replicate` will read again. They were not compared.
        vbuckets: vBuckets that differ.
        examples: Some of what differs.
        not_compared: Why nothing was compared; empty if it was.
        is_dropped: Whether its collection was dropped: the table is equal once it has no row.
    """

    collection: str | None
    documents: int = 0
    rows: int = 0
    rejected: int = 0
    missing: int = 0
    extra: int = 0
    older: int = 0
    other: int = 0
    later: int = 0
    rolled_back: tuple[int, ...] = ()
    vbuckets: tuple[int, ...] = ()
    examples: tuple[Difference, ...] = field(default=(), repr=False)
    not_compared: str = ""
    is_dropped: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether it was compared, and nothing differs."""
        return not (self.vbuckets or self.rolled_back or self.not_compared)


def together(parts: Sequence[TableVerification], examples: int) -> TableVerification:
    """Returns how a table compares, of which parts were compared on their own."""
    if len(parts) == 1:
        return parts[0]
    counts: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("documents", "rows", "rejected", "later", *KINDS)
    }
    return TableVerification(
        collection=parts[0].collection,
        rolled_back=tuple(sorted(each for part in parts for each in part.rolled_back)),
        vbuckets=tuple(sorted(each for part in parts for each in part.vbuckets)),
        examples=tuple(each for part in parts for each in part.examples)[:examples],
        not_compared="; ".join(part.not_compared for part in parts if part.not_compared),
        is_dropped=any(part.is_dropped for part in parts),
        **counts,
    )


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How the tables of a target compare with the bucket.

    Attributes:
        tables: Each of them by its name.
    """

    tables: dict[str, TableVerification]

    @property
    def is_equal(self) -> bool:
        """Whether all were compared, and nothing differs."""
        return all(each.is_equal for each in self.tables.values())

    @property
    def reload(self) -> dict[str, list[int]] | list[int]:
        """What differs, as `dcp_rs.replicate` takes it to read it again."""
        found = {each.collection: list(each.vbuckets) for each in self.tables.values()}
        if None in found:
            return found[None]
        return {str(name): vbuckets for name, vbuckets in found.items() if vbuckets}
