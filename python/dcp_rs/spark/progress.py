"""Lag of a streaming query."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Lag(NamedTuple):
    """Seqnos that a query has yet to read, an upper bound of the rows."""

    total: int
    """Sum over all vBuckets."""
    by_vbucket: dict[int, int]
    """Lag of each vBucket that is behind."""


def lag(progress: Any, source: int = 0) -> Lag | None:
    """Returns the lag of a query when its last batch was planned.

    It counts seqnos, including those of replaced versions, which the server no longer sends. With
    `collections`, it counts only theirs, if the server reports them.

        dcp_rs.spark.lag(query.lastProgress).total

    Args:
        progress: `query.lastProgress`, an element of `query.recentProgress` or the progress that a
            listener receives; or its JSON.
        source: Index of the source, if a query reads from several sources of this kind.

    Returns:
        The lag, or `None` if it is unknown, for example before the first batch.
    """
    found = [each for each in _sources(progress) if each is not None]
    if source >= len(found):
        return None
    end, latest = found[source]
    left = {
        vbucket: there - read
        for vbucket, (read, there) in enumerate(zip(end["s"], latest["s"], strict=False))
        if there > read
    }
    return Lag(sum(left.values()), left)


def _sources(progress: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]] | None]:
    if progress is None:
        return
    text = progress if isinstance(progress, str) else getattr(progress, "json", progress)
    document = json.loads(text) if isinstance(text, str) else dict(text)
    for source in document.get("sources", []):
        end, latest = (_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
        yield None if end is None or latest is None else (end, latest)


def _offsets(value: Any) -> Mapping[str, Any] | None:
    """Reads an offset that this source passed to Spark, which is text in some versions."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    is_ours = isinstance(value, dict) and "bucket" in value and isinstance(value.get("s"), list)
    return value if is_ours else None
