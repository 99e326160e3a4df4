"""Compares tables with the bucket that they are kept in step with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.exceptions import ConfigError
from dcp_rs.options import BatchPolicy
from dcp_rs.replication import changes as reducing
from dcp_rs.replication.names import is_pattern, matches, qualified
from dcp_rs.replication.sharing import split_key
from dcp_rs.replication.target import IDENTITY, Address
from dcp_rs.replication.verification import (
    DROPPED,
    KINDS,
    Difference,
    TableVerification,
    Verification,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.client import Client
    from dcp_rs.replication.contents import Contents, Part
    from dcp_rs.replication.sharing import BucketShare
    from dcp_rs.replication.state import State
    from dcp_rs.replication.verification import Kind

CONTENTS = {
    "duckdb": "contents.DuckDBContents",
    "ducklake": "ducklake_contents.DuckLakeContents",
    "postgresql": "postgres.contents.PostgresContents",
    "delta": "delta_contents.DeltaContents",
}
# Rows of a table, and bytes of what the bucket has, that are compared at once, unless one vBucket
# has more.
_ROWS = 500_000
_BYTES = 128 * 1024 * 1024
_VBUCKETS = 64
_COLUMNS = ("op", "key", "collection_id", "vbucket", "epoch", "seqno", "cas")


def verify(
    client: Client,
    target: str,
    names: list[str] | None,
    vbuckets: Iterable[int] | None,
    examples: int,
) -> Verification:
    """See `dcp_rs.verify`."""
    contents = contents_of(Address.parse(target))
    try:
        states = {
            table: state for table, state in contents.states().items() if _is_chosen(state, names)
        }
        if not states:
            raise ConfigError(
                "has no table that replicate wrote, of these collections: check its name",
                option="target",
            )
        chosen = range(client.num_vbuckets) if vbuckets is None else sorted(set(vbuckets))
        tables: dict[str, list[TableVerification]] = {}
        shares: dict[str, list[BucketShare]] = {}
        for key, state in sorted(states.items()):
            comparison = _Comparison(client, contents, key, state, examples)
            if state.share is None:
                tables[key] = [comparison.run(chosen)]
                continue
            table = split_key(key)[0]
            shares.setdefault(table, []).append(state.share)
            own = [vbucket for vbucket in chosen if vbucket in state.share.vbuckets]
            tables.setdefault(table, []).append(comparison.run(own))
        for table, there in shares.items():
            lacking = sorted(set(there[0].all()) - set(there))
            if any(vbucket in share.vbuckets for share in lacking for vbucket in chosen):
                why = f"share {', '.join(map(str, lacking))} has committed nothing"
                collection = tables[table][0].collection
                tables[table].append(TableVerification(collection=collection, not_compared=why))
        return Verification(
            tables={table: together(parts, examples) for table, parts in sorted(tables.items())}
        )
    finally:
        contents.close()


def contents_of(address: Address) -> Contents:
    """Opens what is at the URL of a target, to read only.

    Raises:
        ConfigError: There is nothing, or it is not compared.
    """
    if address.storage and address.scheme != "ducklake":
        raise ConfigError(
            f"tables in {address.storage} are not compared: only those of a database or on a disk",
            option="target",
        )
    if address.scheme not in CONTENTS:
        known = ", ".join(f"{each}://" for each in CONTENTS)
        raise ConfigError(
            f"only tables are compared, which begin with one of {known}", option="target"
        )
    module, _, name = CONTENTS[address.scheme].rpartition(".")
    made: Contents = getattr(import_module(f"dcp_rs.replication.{module}"), name)(address)
    return made


def _is_chosen(state: State, names: list[str] | None) -> bool:
    if state.mode != "table":
        raise ConfigError(
            f"is a {state.mode}, which keeps what was before and is not compared: compare a table",
            option="target",
        )
    if names is None or state.collection is None:
        return True
    return any(matches(qualified(each), state.collection) for each in names)


class _Found(NamedTuple):
    """What the bucket has of some vBuckets: versions, and the last event of each collection."""

    versions: pa.Table
    events: dict[tuple[int, int], int]
    checkpoint: Checkpoint


class _TooManyError(Exception):
    """The bucket has more than may be held at once."""


class _Comparison:
    """Compares a table."""

    def __init__(
        self, client: Client, contents: Contents, table: str, state: State, examples: int
    ) -> None:
        self._client = client
        self._contents = contents
        self._table = table
        self._state = state
        self._most = examples
        self._examples: list[Difference] = []
        self._counts: dict[str, int] = dict.fromkeys(
            ("documents", "rows", "rejected", "later", *KINDS), 0
        )
        self._differ: set[int] = set()
        self._rolled_back: set[int] = set()
        self._is_dropped = False

    def run(self, chosen: Sequence[int]) -> TableVerification:
        """Returns how the table compares, or a share of it."""
        try:
            names = self._names()
        except _NotComparedError as why:
            return self._result(str(why))
        if self._is_dropped:
            return self._result(DROPPED if self._has_rows(chosen) else "")
        rows = self._contents.counts(self._table)
        for some in _parts(chosen, rows):
            todo = [some]
            while todo:
                part = todo.pop()
                try:
                    self._compare(part, names)
                except _TooManyError:
                    middle = len(part) // 2
                    todo += [part[middle:], part[:middle]]
                except _NotComparedError as why:
                    return self._result(str(why))
        return self._result("")

    def _result(self, not_compared: str) -> TableVerification:
        share = self._state.share
        if not_compared and share is not None:
            not_compared = f"share {share}: {not_compared}"
        return TableVerification(
            collection=self._state.collection,
            rolled_back=tuple(sorted(self._rolled_back)),
            vbuckets=tuple(sorted(self._differ)),
            examples=tuple(self._examples),
            not_compared=not_compared,
            is_dropped=self._is_dropped,
            **self._counts,
        )

    def _names(self) -> list[str] | None:
        """Returns the collections of the table."""
        if self._state.bucket not in {None, self._client.bucket_name}:
            raise _NotComparedError(f"its rows are of the bucket {self._state.bucket}")
        if self._state.checkpoint.bucket_uuid != self._client.bucket_uuid:
            raise _NotComparedError("it is of another bucket, or of one that was recreated")
        there = self._client.collections()
        collection = self._state.collection
        if collection is not None:
            self._is_dropped = collection not in there
            return [collection]
        read = self._state.checkpoint.filter
        if read is None or read.scope_id is not None:
            raise _NotComparedError("its state does not name the collections that it has")
        if read.patterns is not None:
            return [each for each in read.patterns if is_pattern(each) or qualified(each) in there]
        if read.collection_ids is None:
            return None
        return [name for name, number in there.items() if number in read.collection_ids]

    def _has_rows(self, chosen: Sequence[int]) -> bool:
        """Whether the table of a dropped collection still has rows or rejects."""
        counts = self._contents.counts(self._table)
        self._counts["rows"] = sum(counts.get(each, 0) for each in chosen)
        return bool(
            self._counts["rows"] or len(self._contents.read(self._table, [*chosen]).rejects)
        )

    def _compare(self, vbuckets: Sequence[int], names: list[str] | None) -> None:
        """Compares some vBuckets."""
        # The table first: the bucket is then never behind it.
        part = self._contents.read(self._table, vbuckets)
        if part.state.is_loading or part.state.rereading:
            raise _NotComparedError("it is being loaded: start replicate, which completes that")
        found = self._documents(vbuckets, names, is_last=len(vbuckets) == 1)
        position = part.state.checkpoint
        # A stream that brings nothing of a vBucket does not tell its history.
        told = found.checkpoint.seqnos
        lost = {
            vbucket
            for vbucket in vbuckets
            if told.get(vbucket) and not found.checkpoint._has_in_history(vbucket, position)  # noqa: SLF001 - the package's own
        }
        self._rolled_back |= lost
        reached = position.seqnos
        limits = pa.array(
            [-1 if each in lost else reached.get(each, 0) for each in range(max(vbuckets) + 1)],
            pa.int64(),
        )
        self._count(part, found, limits)

    def _documents(
        self, vbuckets: Sequence[int], names: list[str] | None, *, is_last: bool
    ) -> _Found:
        """Reads the newest change of each document of some vBuckets."""
        batches, size = [], 0
        with self._client.stream(
            until="now",
            vbuckets=vbuckets,
            collections=names,
            columns=_COLUMNS,
            key_type="binary",
            include="system_events",
            on_rollback="resync",
            batch=BatchPolicy(linger=0.0),
        ) as stream:
            for batch in stream:
                batches.append(batch.to_pyarrow())
                size += batches[-1].nbytes
                if size > _BYTES and not is_last:
                    raise _TooManyError
            checkpoint = stream.checkpoint()
            schema = stream.schema
        changes = _of_last_epochs(pa.Table.from_batches(batches, schema))
        is_event = pc.equal(changes["op"], "system_event")
        events: dict[tuple[int, int], int] = {}
        for row in (
            changes.filter(is_event).select(["collection_id", "vbucket", "seqno"]).to_pylist()
        ):
            place = row["collection_id"], row["vbucket"]
            events[place] = max(row["seqno"], events.get(place, 0))
        ops = pa.array(["mutation", "deletion", "expiration"])
        documents = changes.filter(pc.is_in(changes["op"], ops))
        return _Found(reducing.newest(documents, IDENTITY), events, checkpoint)

    def _count(self, part: Part, found: _Found, limits: pa.Array) -> None:
        """Counts what differs, as far as the bucket had it at the table's position.

        Args:
            part: What the table has.
            found: What the bucket has.
            limits: Seqnos of the table by vBucket; -1 for one that is not compared.
        """
        rows = pa.concat_tables([part.rows, part.rejects])
        rows = rows.append_column(
            "is_reject", pa.array([False] * len(part.rows) + [True] * len(part.rejects), pa.bool_())
        )
        rows, versions = (_compared(each, limits, found.events) for each in (rows, found.versions))
        once = reducing.newest(rows, IDENTITY)
        doubled = len(rows) - len(once)
        both = once.join(
            versions.select([*IDENTITY, "op", "vbucket", "seqno", "cas"]),
            list(IDENTITY),
            join_type="full outer",
            right_suffix="_there",
        )
        has_row, is_there = pc.is_valid(both["seqno"]), pc.is_valid(both["seqno_there"])
        place = pc.coalesce(both["vbucket"], both["vbucket_there"])
        limit = limits.take(place.combine_chunks())
        is_later = _true(pc.greater(both["seqno_there"], limit))
        is_known = pc.invert(is_later)
        is_document = pc.and_(_true(pc.equal(both["op"], "mutation")), is_known)
        # A row that stays although its document is gone, as when deletions are marked.
        stays = _true(both["is_marked"])
        is_gone = pc.and_(pc.invert(is_document), is_known)
        is_same = _true(
            pc.and_(
                pc.equal(both["seqno"], both["seqno_there"]),
                pc.equal(both["cas"], both["cas_there"]),
            )
        )
        wrong = pc.and_(
            pc.and_(has_row, is_there),
            pc.and_(pc.invert(is_same), pc.or_(is_document, pc.and_(stays, is_gone))),
        )
        is_older = _true(pc.less(both["seqno"], both["seqno_there"]))
        kinds: dict[Kind, pa.ChunkedArray] = {
            "missing": pc.and_(is_document, pc.invert(has_row)),
            "extra": pc.and_(pc.and_(has_row, is_gone), pc.invert(stays)),
            "older": pc.and_(wrong, is_older),
            "other": pc.and_(wrong, pc.invert(is_older)),
        }
        rejected = _true(both["is_reject"])
        self._add("documents", is_document)
        self._counts["rows"] += len(part.rows)
        self._add("rejected", pc.and_(rejected, is_document))
        self._add("later", is_later)
        both = both.append_column("place", place)
        for kind, those in kinds.items():
            self._add(kind, those)
            self._note(kind, both.filter(those))
        if doubled:
            self._counts["extra"] += doubled
            counted = rows.group_by(list(IDENTITY)).aggregate(
                [("seqno", "count"), ("vbucket", "min")]
            )
            twice = counted.filter(pc.greater(counted["seqno_count"], 1))
            self._differ.update(twice["vbucket_min"].to_pylist())

    def _add(self, name: str, those: pa.ChunkedArray) -> None:
        self._counts[name] += int(pc.sum(those).as_py() or 0)

    def _note(self, kind: Kind, rows: pa.Table) -> None:
        self._differ.update(rows["place"].unique().to_pylist())
        for row in rows.slice(0, max(self._most - len(self._examples), 0)).to_pylist():
            self._examples.append(
                Difference(
                    kind=kind,
                    key=row["key"],
                    vbucket=row["place"],
                    seqno=row["seqno"],
                    bucket_seqno=row["seqno_there"],
                )
            )


class _NotComparedError(Exception):
    """Nothing can be compared, and why."""


def _true(those: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(those, False)


def _parts(vbuckets: Sequence[int], rows: Mapping[int, int]) -> Iterator[Sequence[int]]:
    """Splits vBuckets so that a part has a bounded number of rows, or one vBucket."""
    part: list[int] = []
    count = 0
    for vbucket in vbuckets:
        own = rows.get(vbucket, 0)
        if part and (count + own > _ROWS or len(part) >= _VBUCKETS):
            yield part
            part, count = [], 0
        part.append(vbucket)
        count += own
    if part:
        yield part


def _of_last_epochs(changes: pa.Table) -> pa.Table:
    """Returns the changes without those that a rollback meanwhile has taken back."""
    newest = changes.group_by("vbucket").aggregate([("epoch", "max")])
    epochs = dict(zip(newest["vbucket"].to_pylist(), newest["epoch_max"].to_pylist(), strict=True))
    if not any(epochs.values()):
        return changes
    by_vbucket = pa.array([epochs.get(each, 0) for each in range(max(epochs) + 1)], pa.int32())
    last = by_vbucket.take(changes["vbucket"].combine_chunks())
    return changes.filter(pc.equal(changes["epoch"], last))


def _compared(rows: pa.Table, limits: pa.Array, events: Mapping[tuple[int, int], int]) -> pa.Table:
    """Returns what is compared: not of collections that were dropped or flushed since."""
    kept = pc.greater_equal(limits.take(rows["vbucket"].combine_chunks()), 0)
    for (collection, vbucket), seqno in events.items():
        if seqno > limits[vbucket].as_py():
            is_of = pc.and_(
                pc.equal(rows["collection_id"], collection), pc.equal(rows["vbucket"], vbucket)
            )
            kept = pc.and_(kept, pc.invert(is_of))
    return rows.filter(kept)
