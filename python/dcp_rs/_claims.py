"""Owners of vBuckets in a store: the rules that all stores follow."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from dcp_rs.exceptions import TakenOverError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dcp_rs.checkpoint import Checkpoint


class Claims:
    """The vBuckets that one store object has claimed, under its own token.

    The last one to claim a vBucket owns it. A claim is never renewed by a save: a reader that was
    fenced stays fenced until a stream starts from its store again. A copy of the store, made by a
    fork or a pickle, is another reader, which has claimed nothing.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._token = os.urandom(8).hex()
        self._vbuckets: set[int] = set()

    def __reduce__(self) -> tuple[type[Claims], tuple[()]]:
        """Pickles and copies as claims of nothing."""
        return Claims, ()

    @property
    def token(self) -> str:
        """The name of the owner."""
        if self._process != os.getpid():
            self._begin()
        return self._token

    @property
    def vbuckets(self) -> set[int]:
        """The vBuckets that were claimed, to which others are added."""
        if self._process != os.getpid():
            self._begin()
        return self._vbuckets

    def check(
        self, owners: Mapping[int, str], where: str, among: Iterable[int] | None = None
    ) -> None:
        """Checks that no other reader owns any of the claimed vBuckets.

        Args:
            owners: Owners of vBuckets.
            where: The store, for the error.
            among: vBuckets to check, if not all.

        Raises:
            TakenOverError: Another reader has claimed one of them.
        """
        looked_at = self.vbuckets if among is None else self.vbuckets.intersection(among)
        lost = sorted(each for each in looked_at if owners.get(each) != self.token)
        if lost:
            error = TakenOverError(
                f"{where}: another reader has taken over vBuckets {in_ranges(lost)}, and none of "
                "them was saved. Stop this reader if that is intended; otherwise give each "
                "reader its own share of the vBuckets, or its own store"
            )
            error.vbucket = lost[0]
            raise error


def joined(kept: Checkpoint | None, checkpoint: Checkpoint) -> Checkpoint:
    """Returns the stored state after saving `checkpoint`: other vBuckets keep theirs.

    Raises:
        CheckpointError: It would take a vBucket back, belongs to another bucket, or is a part with
            another filter than the rest.
    """
    if kept is None:
        return checkpoint
    named = checkpoint.seqnos
    checkpoint._check_ahead(kept.restricted_to(named))  # noqa: SLF001 - the package's own
    if kept.seqnos.keys() <= named.keys():
        return checkpoint
    return kept.merged_with(checkpoint)


def in_ranges(vbuckets: Iterable[int]) -> str:
    """Writes numbers of vBuckets as 0-63,70."""
    runs: list[tuple[int, int]] = []
    for each in sorted(vbuckets):
        if runs and runs[-1][1] == each - 1:
            runs[-1] = (runs[-1][0], each)
        else:
            runs.append((each, each))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def write_owners(owners: Mapping[int, str]) -> dict[str, str]:
    """Returns the vBuckets of each owner, as JSON values."""
    by_owner: dict[str, list[int]] = {}
    for vbucket, owner in owners.items():
        by_owner.setdefault(owner, []).append(vbucket)
    return {owner: in_ranges(vbuckets) for owner, vbuckets in by_owner.items()}


def read_owners(by_owner: object) -> dict[int, str]:
    """Reads the result of `write_owners`.

    Raises:
        ValueError: It is something else.
    """
    owners: dict[int, str] = {}
    if not isinstance(by_owner, dict):
        raise ValueError("owners are a JSON object")  # noqa: TRY004 - damage, no caller's mistake
    for owner, vbuckets in by_owner.items():
        if not isinstance(vbuckets, str):
            raise ValueError("vBuckets are text")  # noqa: TRY004 - as above
        for part in vbuckets.split(","):
            low, dash, high = part.partition("-")
            first, last = int(low), int(high if dash else low)
            if not 0 <= first <= last <= 0xFFFF:
                raise ValueError("no vBuckets")
            owners |= dict.fromkeys(range(first, last + 1), str(owner))
    return owners


def owners_to_json(owners: Mapping[int, str]) -> bytes:
    """Writes owners as a separate document."""
    return json.dumps({"owners": write_owners(owners)}).encode()


def owners_from_json(text: bytes) -> dict[int, str]:
    """Reads such a document. A damaged one has no owners, which fences every reader."""
    try:
        return read_owners(json.loads(text)["owners"])
    except (ValueError, KeyError, TypeError):
        return {}
