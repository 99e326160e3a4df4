"""What a client that was served well has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from history import Change, History
    from programs import ForeignClient, Seen


def assert_versions(
    history: History,
    seen: Seen,
    *,
    sid: int = 0,
    after: dict[int, int] | None = None,
    expirations: str = "deletion",
    collection: int | None = None,
) -> None:
    """Every change seen is a version that was written, and each key's newest one was seen.

    Args:
        history: What was written.
        seen: What the client printed.
        sid: Stream that is looked at.
        after: Where the streams began, by vBucket.
        expirations: What the client is told of expirations.
        collection: The only collection that was asked for, by its number.
    """
    for vbucket in history.versions:
        start = (after or {}).get(vbucket, 0)
        versions = [v.told_as(expirations) for v in history.versions[vbucket]]
        newest = [v.told_as(expirations) for v in history.latest(vbucket, start)]
        if collection is not None:
            newest = [v for v in newest if v.collection == collection]
        changes = seen.changes(vbucket, sid)
        where = f"vBucket {vbucket}"
        known = {v.seqno: v for v in versions}
        wrong = [(c, known.get(c.seqno)) for c in changes if c != known.get(c.seqno)]
        assert not wrong, f"{where}: {wrong[0]}"
        assert newest_of(changes) == newest, where
        assert [c.seqno for c in changes] == sorted({c.seqno for c in changes}), where
        assert all(change.seqno > start for change in changes), where


def newest_of(changes: list[Change]) -> list[Change]:
    """The last version seen of each key, in the order of seqnos."""
    newest = {(change.collection, change.key): change for change in changes}
    return sorted(newest.values(), key=lambda change: change.seqno)


def assert_lived_through_loss(
    client: ForeignClient, history: History, seen: Seen, vbucket: int, lost_to: int
) -> None:
    """What a client has of a vBucket that lost its tail, up to `lost_to`, while it was streamed.

    Some of the tail may have been sent before it was lost; what was lost has keys of its own.
    """
    changes = [c for c in seen.changes(vbucket) if not c.key.startswith("lost-")]
    newest = [v.told_as("deletion") for v in history.latest(vbucket)]
    if client.after_rollback == "skip":
        # Of seqnos that it saw on the lost branch it takes none on the new one.
        changes = [c for c in changes if c.key.startswith("found-") and c.seqno > lost_to]
        newest = [v for v in newest if v.key.startswith("found-") and v.seqno > lost_to]
    assert newest_of(changes) == newest, f"vBucket {vbucket}"


def ends_of(seen: Seen) -> dict[int, int]:
    """Where each vBucket's stream ended."""
    return {line["vb"]: line["seqno"] for line in seen.of("vbucket")}
