"""One table, log or history: what it has, and the commits that bring it further."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import changes as reducing
from dcp_rs.replication import history
from dcp_rs.replication.changes import Layout
from dcp_rs.replication.decoding import bytes_of
from dcp_rs.replication.progress import TableProgress
from dcp_rs.replication.rejects import refuse, rejecting
from dcp_rs.replication.state import Decision, State
from dcp_rs.replication.target import ENDED_BY, IDENTITY, Commit, Endings, check_use
from dcp_rs.replication.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.schemas import OwnSchema
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import HistoryTarget, OnError, Target

_log = logging.getLogger("dcp_rs.replication")

# Reasons of rejects that are logged.
_REASONS = 100

OnDrop = Literal["empty", "drop", "keep"]


class Step(NamedTuple):
    """A commit, and what it is about.

    Attributes:
        commit: The commit.
        changes: How many changes it commits.
        rollbacks: How many vBuckets were rolled back.
    """

    commit: Commit
    changes: int
    rollbacks: int


class LostPosition(Exception):  # noqa: N818 - not an error of a user
    """The stream of several tables cannot tell what one of them lacks, which needs its own."""


class Table:
    """A table, log or history, which takes changes in the order of a stream.

    Args:
        target: Where the rows go.
        layout: Which columns are read and kept; or the columns of the table's own schema.
        mode: Whether it is a table, a log or a history.
        on_error: What to do with a change that cannot be a row.
        on_drop: What becomes of the rows of a dropped collection.
        collection: The only collection of the table, if there are several tables.
        share: The share of the vBuckets that is replicated; `None` if all are.
        bucket: Name of the bucket.
        num_vbuckets: Number of its vBuckets.
    """

    def __init__(
        self,
        target: Target,
        layout: Layout | OwnSchema,
        mode: Mode,
        *,
        on_error: OnError,
        on_drop: OnDrop = "empty",
        collection: str | None = None,
        share: BucketShare | None = None,
        bucket: str,
        num_vbuckets: int,
    ) -> None:
        self.target = target
        self._bucket, self._num_vbuckets = bucket, num_vbuckets
        self.collection = collection
        self._share = share
        self.state: State | None = None
        # Where it is; the state may be behind as long as there are no changes.
        self.position: Checkpoint | None = None
        # Up to where everything is committed, or need not be.
        self.reached: Checkpoint | None = None
        # Changes after the position.
        self.waiting = Waiting()
        # When its position was last committed.
        self.committed_at = time.monotonic()
        self.commits = self.changes = self.malformed = self.rejected = 0
        self._schema: OwnSchema | None = None if isinstance(layout, Layout) else layout
        self._shared = layout if isinstance(layout, Layout) else None
        # Schema of the rows that the target expects.
        self._expected: pa.Schema | None = None
        self._mode: Mode = mode
        self._on_error: OnError = on_error
        self._keeps_dropped = on_drop == "keep"
        self._first = reducing.FirstSnapshots(is_possible=False)
        self._reasons: set[str] = set()
        # Seqnos that the table has, of vBuckets in which its stream began before them.
        self._ahead: dict[int, int] = {}
        # IDs of its collection when the stream was opened.
        self._former: tuple[int, ...] = ()
        # Rows of older generations, which the next commit removes.
        self._replaced: list[str] = []

    @property
    def _layout(self) -> Layout:
        """Which columns are read and kept, now."""
        if self._schema is not None:
            return self._schema.layout
        if self._shared is None:
            raise AssertionError("a table has a layout")
        return self._shared

    @property
    def undecided(self) -> OwnSchema | None:
        """The schema that documents have to be read for; `None` if there is none such."""
        schema = self._schema
        is_open = schema is not None and schema.contract.infers and schema.decision is None
        return schema if is_open else None

    def restore(self) -> None:
        """Takes what was decided about the columns of documents, before the target is opened."""
        if self._schema is not None:
            stored = self.target.stored() if self._schema.contract.is_own else None  # type: ignore[attr-defined]
            self._schema.restore(stored)

    def open(self) -> None:
        """Opens the target, and restores the state."""
        self.waiting.forget()
        self._first = reducing.FirstSnapshots(is_possible=False)
        self._ahead, self._former, self._replaced = {}, (), []
        found = self.target.open(self._layout.schema, self._mode)
        # Targets of this package have checked it before they changed anything.
        self._check(found)
        if found is not None:
            # Releases up to 0.2 did not store it.
            found = replace(found, bucket=self._bucket, num_vbuckets=self._num_vbuckets)
        if found is not None and found.is_loading and found.generation == 1:
            seen = found.checkpoint.seqnos
            self._first = reducing.FirstSnapshots(is_possible=True, seen=seen)
        self._expected = self._layout.schema
        self.state = found
        self.position = self.reached = None if found is None else found.checkpoint

    def check(self, found: State, bucket_uuid: str, collection_id: int | None = None) -> str | None:
        """Checks a state that the target has, without opening it.

        Args:
            found: The state.
            bucket_uuid: As for `why_anew`.
            collection_id: As for `why_anew`.

        Returns:
            Why the table would be loaded anew; `None` if it would not.

        Raises:
            ConfigError: `open` would refuse it.
        """
        if self._schema is not None and self._schema.contract.is_own:
            self._schema.restore(found)
        self._check(found)
        self.state = found
        return self.why_anew(bucket_uuid, collection_id)

    def _check(self, found: State | None) -> None:
        check_use(found, self._layout.schema, self._mode)
        if found is None:
            return
        if found.collection != self.collection:
            others = "all that it reads" if found.collection is None else found.collection
            raise ConfigError(
                f"the table is that of another replication, which writes {others} to it: choose"
                " another, or drop it",
                option="tables" if self.collection else "target",
            )
        found.check_bucket(self._bucket)
        if found.share is not None and self._share is not None:
            found.share.check_bucket(self._share.num_vbuckets)
        if found.mode != "table" and found.masks != self._layout.masks:
            raise ConfigError(
                f"the {found.mode} was written with other fields masked, or with another hash_key,"
                f" and keeps what it has: give the same, or replicate to a new {found.mode}",
                option=("drop_fields", "hash_fields"),
            )

    def read_again(self, vbuckets: Iterable[int] | None) -> None:
        """Has vBuckets read again from the beginning; `None` for all. Their rows stay until then.

        They are in the next epoch, so that the end of the catch-up removes what is left of them.
        """
        state = self.state
        if state is None:
            return
        read = state.checkpoint.seqnos
        chosen = frozenset(read if vbuckets is None else read.keys() & set(vbuckets))
        if not chosen:
            return
        self._first = reducing.FirstSnapshots(is_possible=False)
        checkpoint = state.checkpoint._begun_again(chosen)  # noqa: SLF001 - the package's own
        self.state = replace(state, rereading=state.rereading | chosen, checkpoint=checkpoint)
        self.position = self.reached = checkpoint

    @property
    def known(self) -> State:
        """The state, once a stream was opened."""
        if self.state is None:
            raise AssertionError("a state is there once a stream was opened")
        return self.state

    @property
    def seqnos(self) -> dict[int, int]:
        """How far it is in each vBucket that it has read."""
        return {} if self.position is None else self.position.seqnos

    def why_anew(self, bucket_uuid: str, collection_id: int | None = None) -> str | None:
        """Says why a stored state cannot be resumed from.

        Args:
            bucket_uuid: UUID of the bucket.
            collection_id: ID of the table's collection now, if it has one and it exists.
        """
        state = self.known
        if state.moved:
            return f"the table is not as it was left: {state.moved}"
        if state.checkpoint.bucket_uuid != bucket_uuid:
            return "the bucket is another one"
        why = self._why_documents_differ(state) if state.mode == "table" else None
        if why is not None:
            return why
        is_same = collection_id is None or collection_id in state.collection_ids
        if not is_same and not self._saw_all():
            return "the collection was created again while its stream was limited to the one before"
        return None

    def _why_documents_differ(self, state: State) -> str | None:
        if state.masks != self._layout.masks:
            return "other fields of documents are masked, or with another key"
        missing = set(self._layout.documents) - set(state.documents)
        if missing:
            return f"documents have new columns: {', '.join(sorted(missing))}"
        return None if self._schema is None else self._schema.why_anew(state.decision)

    def _saw_all(self) -> bool:
        """Whether the stream of the state would have had another collection of the name."""
        made_with = self.known.checkpoint.filter
        return (
            made_with is not None
            and made_with.scope_id is None
            and made_with.collection_ids is None
        )

    def begin(
        self, checkpoint: Checkpoint, collection_id: int | None = None, *, is_whole: bool = False
    ) -> None:
        """Begins a generation.

        Args:
            checkpoint: Where its stream begins.
            collection_id: ID of the table's collection, if it has one and it exists.
            is_whole: Whether the stream follows a collection that has just been created, so that
                nothing has to be loaded.
        """
        state = self.state
        self.waiting.forget()
        self._first = reducing.FirstSnapshots(is_possible=state is None)
        self._ahead, self._former = {}, ()
        generation = 1 if state is None else state.generation + 1
        complete = 0 if state is None else state.complete_generation
        self._replaced = [_of_others(generation)] if is_whole and generation > 1 else []
        if self._schema is not None:
            self._schema.begin()
        self.state = State(
            mode=self._mode,
            commits=0 if state is None else state.commits,
            generation=generation,
            complete_generation=generation if is_whole else complete,
            documents=self._layout.documents,
            collection=self.collection,
            collection_ids=() if collection_id is None else (collection_id,),
            decision=self._decision,
            masks=self._layout.masks,
            share=self._share,
            bucket=self._bucket,
            num_vbuckets=self._num_vbuckets,
            checkpoint=checkpoint,
        )
        self.position = self.reached = checkpoint

    @property
    def _decision(self) -> Decision | None:
        """What is stored about the columns of documents."""
        is_own = self._schema is not None and self._schema.contract.is_own
        return self._schema.decision if self._schema is not None and is_own else None

    def go_on_from(self, start: Checkpoint) -> None:
        """Takes changes from a stream that begins at or before the table's position."""
        self.waiting.forget()
        self._former = self.known.collection_ids
        have, begun = self.seqnos, start.seqnos
        self._ahead = {
            vbucket: seqno for vbucket, seqno in have.items() if seqno > begun.get(vbucket, 0)
        }

    # ----- commits -----

    def commit_of(
        self,
        changes: pa.Table,
        position: Checkpoint,
        *,
        is_caught_up: bool = False,
        is_due: bool = True,
        collection_id: int | None = None,
    ) -> Step | None:
        """Returns the commit of changes; `None` if there is nothing to commit.

        Args:
            changes: Changes of the stream that concern the table.
            position: Position of the stream after them.
            is_caught_up: Whether they end a catch-up.
            is_due: Whether to commit even if there is nothing but the position.
            collection_id: ID of the table's collection, if it has one and it exists.

        Raises:
            LostPosition: The table has more than the stream, of a branch that the stream lacks.
        """
        state = self.known
        if not (len(changes) or is_caught_up or is_due or self._ahead):
            self._passed(position)
            return None
        if self._ahead:
            changes, position = self._lacking(changes, position)
            if is_caught_up and self._ahead:
                # The server no longer has as much as the table.
                raise LostPosition
        before, self.position = self.position or state.checkpoint, position
        rollbacks = reducing.rolled_back(changes)
        rereading = state.rereading | rollbacks if state.mode != "log" else frozenset()
        after = replace(
            state,
            commits=state.commits + 1,
            rereading=frozenset() if is_caught_up else rereading,
            complete_generation=state.generation if is_caught_up else state.complete_generation,
            collection_ids=self._collections_after(changes),
            checkpoint=position,
        )
        removals = self._replaced
        # A log keeps its rows. After a rollback, it needs the ends of its collections again.
        if is_caught_up and self.collection is not None and state.mode != "log":
            gone = [
                each
                for each in after.collection_ids
                if (each in self._former if collection_id is None else each < collection_id)
            ]
            if gone and not (self._keeps_dropped and collection_id is None):
                removals = [*removals, f"collection_id <= {max(gone)}"]
                left = tuple(each for each in after.collection_ids if each not in gone)
                after = replace(after, collection_ids=left)
        unmoved = after if is_due else replace(after, checkpoint=state.checkpoint)
        if not len(changes) and replace(unmoved, commits=state.commits) == state:
            self._passed(position)
            return None
        if state.mode == "history":
            commit, unfit = self._as_history(changes, after, rereading, before)
            commit = _ending(commit, removals)
        else:
            commit, unfit = self._as_commit(changes, after, rereading)
            commit = replace(commit, removals=[*removals, *commit.removals])
        is_loaded = is_caught_up and state.complete_generation < state.generation
        if self._schema is not None and is_loaded:
            self._schema.read_enough()
        commit = rejecting(commit, unfit)
        refuse(commit.rejects, commit.on_error)
        return Step(commit, reducing.count(changes, state.mode), len(rollbacks))

    def _passed(self, position: Checkpoint) -> None:
        """Notes a position up to which there was nothing to commit."""
        self.position = self.reached = position
        self.waiting.written = None

    def has_none_newer(self) -> bool:
        """Whether no collection has had its name since the stream was opened."""
        return set(self.known.collection_ids) <= set(self._former)

    def committed(self, step: Step) -> None:
        """Notes that a commit was applied."""
        commit = step.commit
        self.committed_at = time.monotonic()
        self.state, self.reached = commit.state, self.position
        self.waiting.written = None
        self._expected = self._layout.schema
        self._replaced = []
        self.commits += 1
        self.changes += step.changes
        self._note_rejects(commit.rejects)
        self.malformed += self._layout.malformed(commit.rows)

    def _collections_after(self, changes: pa.Table) -> tuple[int, ...]:
        """Returns the IDs that the table's collection has had after changes."""
        known = self.known.collection_ids
        if self.collection is None or not len(changes):
            return known
        found = changes["collection_id"].unique().drop_null().to_pylist()
        return tuple(sorted({*known, *found}))

    def _lacking(self, changes: pa.Table, position: Checkpoint) -> tuple[pa.Table, Checkpoint]:
        """Returns the changes that the table lacks, and its position after them."""
        own, reached = self.position or self.known.checkpoint, position.seqnos
        rolled_back = self._ahead.keys() & reducing.rolled_back(changes)
        if rolled_back and self._mode == "log":
            # Which of its rows the rollback takes back depends on branches that are gone.
            raise LostPosition
        has = dict(self._ahead)
        for vbucket, seqno in has.items():
            # What is rolled back in a table is read again from the beginning.
            if vbucket in rolled_back:
                del self._ahead[vbucket]
            elif reached.get(vbucket, 0) >= seqno:
                if not position._has_in_history(vbucket, own):  # noqa: SLF001 - the package's own
                    raise LostPosition
                del self._ahead[vbucket]
        for vbucket in rolled_back:
            del has[vbucket]
        if has:
            count = max(has) + 1
            limits = pa.array([has.get(each, -1) for each in range(count)] + [-1], pa.int64())
            place = pc.min_element_wise(changes["vbucket"], count).combine_chunks()
            changes = changes.filter(pc.greater(changes["seqno"], limits.take(place)))
        return changes, position._with_positions_of(own, self._ahead)  # noqa: SLF001 - as above

    def _as_commit(
        self, changes: pa.Table, after: State, rereading: frozenset[int]
    ) -> tuple[Commit, dict[int, str]]:
        """Returns a commit of changes, and why some of its rows are to be rejected."""
        state = self.known
        if state.mode == "log":
            return self._of(changes, after)
        vbuckets = changes["vbucket"].unique().to_pylist()
        unread = {vbucket for vbucket in vbuckets if self._first.is_unread(vbucket)}
        are_first = self._first.hold(changes)
        reduced = reducing.reduce(
            changes,
            each_once=are_first,
            keeps_dropped=self._keeps_dropped,
            marks_deletes=self._layout.marks_deletes,
        )
        deletes = reduced.deletes
        commit, unfit = self._of(reduced.written, after)
        if self._layout.has_text_keys:
            deletes, _ = reducing.with_text_keys(deletes)
            deletes = deletes.set_column(1, "key", deletes["key"].cast(pa.string()))
        commit = replace(
            commit,
            deletes=deletes.slice(0, 0) if are_first else deletes,
            settled=pa.concat_tables([reduced.written.select(IDENTITY), reduced.deletes]),
            removals=[
                *reduced.removals(state.generation, unread.__contains__),
                *_outdated(state, after, rereading),
            ],
            has_new_rows_only=are_first,
        )
        return commit, unfit

    def _as_history(
        self, changes: pa.Table, after: State, rereading: frozenset[int], before: Checkpoint
    ) -> tuple[Commit, dict[int, str]]:
        """Returns a commit of the versions among changes, as `_as_commit` does.

        Args:
            changes: The changes.
            after: State after them.
            rereading: vBuckets that are read again.
            before: Position before them.
        """
        generation, at = after.generation, datetime.now(UTC)
        vbuckets = changes["vbucket"].unique().to_pylist()
        unread = {vbucket for vbucket in vbuckets if self._first.is_unread(vbucket)}
        changes, after, lost = self._without_lost(changes, after, before)
        if pc.any(changes["history"]).as_py():
            # A document may have several versions in a snapshot.
            self._first = reducing.FirstSnapshots(is_possible=False)
        are_first = self._first.hold(changes)
        ends = history.Ends(changes, keeps_dropped=self._keeps_dropped)
        documents = history.documents(changes)
        settled, others = history.identities(documents), documents.slice(0, 0)
        if self._layout.has_text_keys:
            documents, others = reducing.with_text_keys(documents)
            key = documents["key"].cast(pa.string())
            documents = documents.set_column(documents.schema.get_field_index("key"), "key", key)
        removals = history.lost_rows("seqno", lost, generation)
        known = history.KNOWN.empty_table()
        if len(documents) and not are_first:
            target = cast("HistoryTarget", self.target)
            known = target.newest(history.identities(documents), removals)
        kind = documents.schema.field("key").type
        known = known.cast(history.KNOWN.set(1, pa.field("key", kind)))
        found = history.versions(documents, known, ends, lost, generation=generation, at=at)
        commit, unfit = self._of(found.rows, after)
        endings = Endings(
            reopened=history.lost_rows(ENDED_BY, lost, generation),
            ended=[
                *ends.conditions(generation, unread),
                *_outdated(self.known, after, rereading),
            ],
            at=at,
            changed=found.changed,
        )
        rejects = self._layout.rejects(history.left(others, ends), generation)
        return replace(
            commit,
            removals=removals,
            rejects=pa.concat_tables([commit.rejects, rejects]),
            settled=settled,
            endings=endings,
        ), unfit

    def _without_lost(
        self, changes: pa.Table, after: State, before: Checkpoint
    ) -> tuple[pa.Table, State, dict[int, int]]:
        """Leaves out what rollbacks have taken back.

        Returns:
            The other changes, the state after them, and the seqnos above which the rows of vBuckets
            were lost.
        """
        rolled_back = reducing.rolled_back(changes)
        branches = dict(after.branches)
        changes = history.of_one_branch(changes, branches)
        new = rolled_back - branches.keys()
        branches |= history.failover_logs(before, new)
        # Known as soon as something was read since.
        logs = history.failover_logs(after.checkpoint, branches)
        shared = {each: history.shared_until(branches[each], log) for each, log in logs.items()}
        lost = {vbucket: seqno for vbucket, seqno in shared.items() if seqno is not None}
        left = {vbucket: log for vbucket, log in branches.items() if vbucket not in logs}
        return history.without_lost(changes, lost), replace(after, branches=left), lost

    def _of(self, changes: pa.Table, after: State) -> tuple[Commit, dict[int, str]]:
        """Returns a commit that appends changes, and why some of its rows are to be rejected."""
        generation = after.generation
        rejected = changes.slice(0, 0)
        if self._layout.has_text_keys:
            changes, rejected = reducing.with_text_keys(changes)
            if self._layout.marks_deletes:
                # A document that was removed has no row to mark.
                rejected = rejected.filter(pc.equal(rejected["op"], "mutation"))
        if self._schema is not None:
            # Decoded columns have one chunk, and DuckDB takes no slices of structs.
            changes = changes.combine_chunks()
        decoded = None if self._schema is None else self._schema.fit(changes)
        unfit = {} if self._schema is None else self._schema.rejected(decoded)
        layout = self._layout
        rows = layout.rows(changes, generation, decoded)
        after = replace(after, documents=layout.documents, decision=self._decision)
        commit = Commit(
            rows=rows,
            deletes=rows.select(IDENTITY).slice(0, 0),
            removals=(),
            has_new_rows_only=True,
            state=after,
            rejects=self._layout.rejects(rejected, generation),
            settled=rejected.select(IDENTITY).slice(0, 0),
            documents=bytes_of(changes),
            on_error=self._on_error,
            schema=None if layout.schema == self._expected else layout.schema,
        )
        return commit, unfit

    def _note_rejects(self, rejects: pa.Table) -> None:
        """Counts changes that were rejected, and warns of the first for each reason."""
        self.rejected += len(rejects)
        for row in rejects.select(["reason", "vbucket", "seqno"]).to_pylist():
            # A reason may name a position in a document, so the number of them is bounded.
            if row["reason"] in self._reasons or len(self._reasons) >= _REASONS:
                continue
            self._reasons.add(row["reason"])
            _log.warning(
                "vBucket %d seqno %d was rejected: %s. More of this kind are only counted",
                row["vbucket"],
                row["seqno"],
                row["reason"],
                extra=about(
                    "rejected",
                    vbucket=row["vbucket"],
                    seqno=row["seqno"],
                    collection=self.collection,
                    reason=row["reason"],
                ),
            )

    def count_on(self, before: Table) -> None:
        """Goes on with the figures of the same table, which was opened before."""
        self.commits, self.changes = before.commits, before.changes
        self.malformed, self.rejected = before.malformed, before.rejected
        self._reasons = before._reasons

    def progress(self) -> TableProgress:
        """Returns the figures of the table."""
        return TableProgress(
            generation=0 if self.state is None else self.state.generation,
            changes=self.changes,
            commits=self.commits,
            malformed=self.malformed,
            rejected=self.rejected,
            uncommitted=self.waiting.rows,
        )


def _ending(commit: Commit, conditions: Iterable[str]) -> Commit:
    """Returns a commit to a history that also ends the rows that conditions select."""
    endings = commit.endings
    if endings is None:
        raise AssertionError("it is one to a history")
    return replace(commit, endings=replace(endings, ended=[*conditions, *endings.ended]))


def _outdated(state: State, after: State, rereading: frozenset[int]) -> list[str]:
    """Returns the conditions that select the rows that a complete catch-up has replaced."""
    if after.is_loading or after.rereading:
        return []
    is_replacing = state.is_loading and state.generation > 1
    found = [_of_others(state.generation)] if is_replacing else []
    by_epoch: dict[int, set[int]] = {}
    positions = after.checkpoint.positions if rereading else {}
    for vbucket in rereading:
        by_epoch.setdefault(positions[vbucket].epoch, set()).add(vbucket)
    return found + [
        f"epoch < {epoch} AND {reducing.vbuckets_in(vbuckets)}"
        for epoch, vbuckets in sorted(by_epoch.items())
    ]


def _of_others(generation: int) -> str:
    """Returns the condition that selects the rows of other generations.

    Rows that others wrote, in a table that is loaded anew for them, may have any or none.
    """
    return f"generation <> {generation} OR generation IS NULL"
