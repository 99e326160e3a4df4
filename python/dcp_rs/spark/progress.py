"""Lag of a streaming query."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql.streaming.query import StreamingQuery


class Lag(NamedTuple):
    """Seqnos that a query has yet to read, an upper bound of the rows."""

    total: int
    """Sum over all vBuckets."""
    by_vbucket: dict[int, int]
    """Lag of each vBucket that is behind."""
    seconds: float | None = None
    """Age of the oldest of them, since a batch was planned that saw it; `None` unless several were
    given."""


def lag(progress: Any, source: int = 0) -> Lag | None:
    """Returns the lag of a query when its last batch was planned.

    It counts seqnos, including those of replaced versions, which the server no longer sends. With
    `collections`, it counts only theirs, if the server reports them.

        dcp_rs.spark.lag(query.recentProgress).total

    Args:
        progress: `query.lastProgress`, an element of `query.recentProgress` or the progress that a
            listener receives; or its JSON. Or `query.recentProgress` as a whole, whose last element
            counts; the age then goes back as far as its first.
        source: Index of the source, if a query reads from several sources of this kind.

    Returns:
        The lag, or `None` if it is unknown, for example before the first batch, or on PySpark 4.0
            and 4.1, which do not report what the server has.
    """
    if not _reports_latest():
        return None
    several = list(progress) if isinstance(progress, list | tuple) else [progress]
    seen = [(each, found) for each in several if (found := _source(each, source)) is not None]
    if not seen or seen[-1][0] is not several[-1]:
        return None
    end, latest = seen[-1][1]
    left = {
        vbucket: there - read
        for vbucket, (read, there) in enumerate(zip(end["s"], latest["s"], strict=False))
        if there > read
    }
    if several[0] is progress:
        return Lag(sum(left.values()), left)
    now = _planned(seen[-1][0])
    # The first batch that saw more of a vBucket than the last one has read.
    first = next(
        each for each, (_, there) in seen if not left or _is_above(there["s"], end["s"], left)
    )
    return Lag(sum(left.values()), left, (now - _planned(first)).total_seconds() if left else 0.0)


def _is_above(seqnos: list[int], others: list[int], vbuckets: Iterable[int]) -> bool:
    return any(vbucket < len(seqnos) and seqnos[vbucket] > others[vbucket] for vbucket in vbuckets)


def _planned(progress: Any) -> datetime:
    return datetime.fromisoformat(str(_document(progress)["timestamp"]))


def _source(progress: Any, source: int) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    found = [each for each in _sources(progress) if each is not None]
    return found[source] if source < len(found) else None


def _reports_latest() -> bool:
    """Whether Spark reports the server's offsets; before 4.2, it repeats the end of the batch."""
    try:
        from pyspark.sql.streaming.datasource import ReadLimit  # noqa: F401
    except ImportError:
        return importlib.util.find_spec("pyspark") is None
    return True


def last_batch(
    query: StreamingQuery, bucket: str
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]] | None:
    """Returns the start and the end of the last batch of a query, of the source with this bucket.

    Returns:
        The offsets, of which the first batch of a query has no start; `None` if it had no batch.
    """
    progress = query.lastProgress
    for source in _document(progress).get("sources", []) if progress is not None else []:
        end = _offsets(source.get("endOffset"))
        if end is not None and end["bucket"] == bucket:
            return _offsets(source.get("startOffset")), end
    return None


def _document(progress: Any) -> dict[str, Any]:
    text = progress if isinstance(progress, str) else getattr(progress, "json", progress)
    return json.loads(text) if isinstance(text, str) else dict(text)


def _sources(progress: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]] | None]:
    if progress is None:
        return
    for source in _document(progress).get("sources", []):
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
