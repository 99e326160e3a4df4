"""State that a target stores with its rows, to resume from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.sharing import BucketShare

Mode = Literal["table", "log", "history"]
Nested = Literal["json", "struct", "columns"]
FailoverLog = Sequence[tuple[str, int]]
"""Branches of a vBucket, newest first: their UUIDs, and the seqnos at which they begin."""

_FORMAT = "dcp_rs.replication"
_VERSION = 3
# What states without masks have, and those without a decision, which older releases read. One that
# does not know masks must not go on.
_WITHOUT_MASKS = 2
_WITHOUT_DECISION = 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided about the columns of documents, once.

    Attributes:
        base: The option that it was made for: `infer`, or the text of a schema.
        kind: Whether documents have columns of their own (`fields`), are kept as JSON in the column
            `value`, or as bytes in it (`binary`).
        fields: Schema of the columns, as text; `None` unless documents have columns.
        nested: What becomes of objects within documents.
        left_fields: Whether a document of this generation had a field that has no column.
        left_values: Whether one had a value that its column does not hold.
    """

    base: str
    kind: Literal["fields", "json", "binary"]
    fields: str | None = None
    nested: Nested = "json"
    left_fields: bool = False
    left_values: bool = False


# The checkpoint that was written last. Tables that are committed together have the same, which has
# a hundred kilobytes.
_last: tuple[Checkpoint, str] | None = None


def _quoted(checkpoint: Checkpoint) -> str:
    """Returns the document of a checkpoint as a string of JSON."""
    global _last  # noqa: PLW0603 - a memory of one
    known = _last
    if known is None or known[0] is not checkpoint:
        known = _last = checkpoint, json.dumps(checkpoint.to_json())
    return known[1]


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a target, committed with the rows that it describes.

    Attributes:
        mode: `table`, `log` or `history`.
        commits: Number of the commit that holds it, from 1.
        generation: Load from the beginning that the newest rows belong to, from 1.
        complete_generation: Newest generation whose load is complete; 0 before the first is.
        rereading: vBuckets that were rolled back and are being read again; their rows of smaller
            epochs are removed once that is complete.
        branches: Failover logs, as in a checkpoint, of vBuckets that were rolled back and of which
            nothing has been read since. Only of a history, whose versions on lost branches go once
            the failover log of now is known.
        documents: Names of the columns that hold documents.
        collection: The only collection of the table, as `scope.collection`, if it is one of several
            tables.
        collection_ids: IDs of the collections of that name, one after the other, of which there may
            be rows; ascending.
        decision: What was decided about the columns of documents, if they are the table's own.
        masks: Which fields of documents are masked, as JSON; `None` if none are.
        share: The share of the vBuckets that it is of; `None` if it is of all.
        bucket: Name of the bucket; `None` if a release up to 0.2 wrote it.
        checkpoint: Position to resume from.
        num_vbuckets: Number of vBuckets in the bucket; 0 if it is not known. It is not stored.
        moved: Why the table no longer holds what the state says; empty if it does. The next load
            begins anew then. It is not stored.
    """

    mode: Mode
    commits: int
    generation: int
    complete_generation: int
    rereading: frozenset[int] = frozenset()
    branches: Mapping[int, FailoverLog] = field(default_factory=dict)
    documents: tuple[str, ...] = ()
    collection: str | None = None
    collection_ids: tuple[int, ...] = ()
    decision: Decision | None = None
    masks: str | None = None
    share: BucketShare | None = None
    bucket: str | None = None
    checkpoint: Checkpoint = field(repr=False)
    num_vbuckets: int = field(default=0, compare=False)
    moved: str = ""

    @property
    def is_loading(self) -> bool:
        """Whether the load of the generation is not complete."""
        return self.complete_generation < self.generation

    def check_bucket(self, bucket: str) -> None:
        """Checks that the table is that of a bucket.

        A bucket that was made anew has the same name, and takes the place of the older one.

        Raises:
            ConfigError: It is that of a bucket with another name.
        """
        if self.bucket not in {None, bucket}:
            raise ConfigError(
                f"the table{f' of {self.collection}' if self.collection else ''} has rows of the"
                f" bucket {self.bucket}, which those of {bucket} would replace: name another table,"
                " or drop this one and its state",
                option="target" if self.collection is None else "tables",
            )

    def to_json(self) -> str:
        """Returns the state as a JSON document, which contains the checkpoint with its checksum."""
        head = json.dumps(
            {
                "format": _FORMAT,
                "version": self._version,
                "mode": self.mode,
                "commits": self.commits,
                "generation": self.generation,
                "complete_generation": self.complete_generation,
                "rereading": sorted(self.rereading),
                "documents": self.documents,
                **({"branches": self.branches} if self.branches else {}),
                **self._of_collection(),
                **({} if self.decision is None else {"decision": asdict(self.decision)}),
                **({} if self.masks is None else {"masks": self.masks}),
                **({} if self.share is None else {"share": asdict(self.share)}),
                **({} if self.bucket is None else {"bucket": self.bucket}),
            },
            separators=(",", ":"),
        )
        return f'{head[:-1]},"checkpoint":{_quoted(self.checkpoint)}}}'

    @property
    def _version(self) -> int:
        if self.masks is not None:
            return _VERSION
        return _WITHOUT_DECISION if self.decision is None else _WITHOUT_MASKS

    def _of_collection(self) -> dict[str, object]:
        if self.collection is None:
            return {}
        return {"collection": self.collection, "collection_ids": self.collection_ids}

    @classmethod
    def from_json(cls, text: str) -> State:
        """Reads a document that `to_json` returned.

        Raises:
            CheckpointError: The document is damaged, or of a newer release.
        """
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise CheckpointError("the target's state belongs to another program")
            if found["version"] > _VERSION:
                raise CheckpointError(
                    f"the target's state has version {found['version']}, and this release reads "
                    f"{_VERSION}: install the release that wrote it"
                )
            return cls(
                mode=found["mode"],
                commits=int(found["commits"]),
                generation=int(found["generation"]),
                complete_generation=int(found["complete_generation"]),
                rereading=frozenset(map(int, found["rereading"])),
                branches={
                    int(vbucket): tuple((str(vbuuid), int(seqno)) for vbuuid, seqno in log)
                    for vbucket, log in found.get("branches", {}).items()
                },
                documents=tuple(map(str, found["documents"])),
                collection=found.get("collection"),
                collection_ids=tuple(map(int, found.get("collection_ids", ()))),
                decision=Decision(**found["decision"]) if "decision" in found else None,
                masks=found.get("masks"),
                share=BucketShare(**found["share"]) if "share" in found else None,
                bucket=found.get("bucket"),
                checkpoint=Checkpoint.from_json(found["checkpoint"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the target's state is damaged ({type(error).__name__}): restore the target, or "
                "begin with a new one"
            ) from error
