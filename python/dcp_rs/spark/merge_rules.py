"""What every sink of `merge_into` needs of a batch, and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_rs.documents import MALFORMED, MALFORMED_FIELDS
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Row

IDENTITY = ("scope", "collection", "key")
"""The columns that tell documents apart."""

NUMBERS = ("vbucket", "epoch", "seqno")
NEEDED = ("op", *IDENTITY, *NUMBERS)


def check_kept(table: str, lost: Iterable[str]) -> None:
    """Checks that a batch has all columns of a table.

    Raises:
        ConfigError: It lacks some.
    """
    names = list(lost)
    if not names:
        return
    is_note = {MALFORMED, MALFORMED_FIELDS}.issuperset(names)
    raise ConfigError(
        f"lacks {', '.join(names)}, which table {table} has and which would no longer be updated: "
        "keep it, or start a new table with a new checkpoint",
        option="on_malformed" if is_note else "document_schema",
    )


def rolled_back(rows: Iterable[Mapping[str, Any] | Row]) -> dict[int, list[int]]:
    """Returns the vBuckets of rollback rows by their epoch, before which rows are removed.

    Raises:
        ConfigError: Only some of a vBucket's changes come again. Versions that were replaced by
            what was lost do not.
    """
    by_epoch: dict[int, list[int]] = {}
    for row in rows:
        if row["seqno"]:
            raise ConfigError(
                f"vBucket {row['vbucket']} was rolled back to seqno {row['seqno']}, "
                "and documents overwritten above it would be missing from the table: set it to "
                "resync, and restart the query from its checkpoint",
                option="on_rollback",
            )
        by_epoch.setdefault(row["epoch"], []).append(row["vbucket"])
    return by_epoch
