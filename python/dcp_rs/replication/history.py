"""Histories: tables with a row for each version of a document.

A version is the document until the next one, or until its document is removed. Which rows of a
table that changes is worked out here, from the newest row of each document; a target only looks
these up, and applies the result.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs.replication import changes as reducing
from dcp_rs.replication.changes import is_rollback
from dcp_rs.replication.target import ENDED_BY, IDENTITY, IS_CURRENT, VALID_FROM, VALID_TO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.replication.state import FailoverLog

_TIME = pa.timestamp("us", tz="UTC")
_INT = pa.int64()
_OF_DOCUMENTS = pa.array(["mutation", "deletion", "expiration"])

KNOWN = pa.schema(
    [
        ("collection_id", _INT),
        ("key", pa.binary()),
        ("generation", pa.int32()),
        ("epoch", pa.int32()),
        ("vbucket", pa.int32()),
        ("seqno", _INT),
        ("cas", _INT),
        (VALID_FROM, _TIME),
        (VALID_TO, _TIME),
        (IS_CURRENT, pa.bool_()),
        (ENDED_BY, _INT),
    ]
)
"""Columns of a row that a target has; `key` may also be text."""


def newest_of(table: str, keys: str, lost: Iterable[str]) -> str:
    """Returns the query for `HistoryTarget.newest`.

    Args:
        table: The table, quoted.
        keys: A relation with the identities.
        lost: As for `HistoryTarget.newest`.
    """
    names = ", ".join(f"t.{name}" for name in KNOWN.names)
    same = " AND ".join(f"t.{name} = k.{name}" for name in IDENTITY)
    left = "".join(f" AND ({each}) IS NOT TRUE" for each in lost)
    return (
        f"SELECT {', '.join(KNOWN.names)} FROM (SELECT {names}, row_number() OVER (PARTITION BY"  # noqa: S608
        " t.collection_id, t.key ORDER BY t.generation DESC, t.seqno DESC) AS place_"
        f" FROM {table} t JOIN {keys} k ON {same} WHERE true{left}) AS newest WHERE place_ = 1"
    )


# ----- branches that were lost -----


def failover_logs(checkpoint: Checkpoint, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
    """Returns the failover logs that a checkpoint has of some vBuckets."""
    chosen = set(vbuckets)
    if not chosen:
        return {}
    positions = json.loads(checkpoint.to_json())["content"]["positions"]
    logs = {vbucket: positions.get(str(vbucket), {}).get("failover_log", ()) for vbucket in chosen}
    return {
        vbucket: tuple((str(vbuuid), int(seqno)) for vbuuid, seqno in log)
        for vbucket, log in logs.items()
        if log
    }


def shared_until(old: FailoverLog, new: FailoverLog) -> int | None:
    """Returns the seqno up to which two failover logs have one history; `None` if all of the old.

    Nothing is shared above 0 if no branch is in both.
    """
    ends = _ends(new)
    for vbuuid, end in _ends(old).items():
        if vbuuid in ends:
            limits = [each for each in (end, ends[vbuuid]) if each is not None]
            return min(limits, default=None)
    return 0


def _ends(log: FailoverLog) -> dict[str, int | None]:
    """Returns the seqno at which each branch of a failover log ends, newest first."""
    ends: list[int | None] = [None, *(seqno for _, seqno in log)]
    return {vbuuid: end for (vbuuid, _), end in zip(log, ends, strict=False)}


def of_one_branch(changes: pa.Table, pending: Iterable[int]) -> pa.Table:
    """Leaves out what rollbacks among changes have taken back, if it is not told from the rest.

    Args:
        changes: Changes, in the order of the stream.
        pending: vBuckets that were rolled back before, and of which nothing has been read since.
    """
    index = pa.array(range(len(changes)), _INT)
    is_one = is_rollback(changes)
    if not pc.any(is_one).as_py():
        return changes
    marks = pa.table([changes["vbucket"], index], ["vbucket", "index"]).filter(is_one)
    places: dict[int, list[int]] = defaultdict(list)
    for row in marks.to_pylist():
        places[row["vbucket"]].append(row["index"])
    unsure = set(pending)
    void = pa.repeat(pa.scalar(False), len(changes))
    for vbucket, at in places.items():
        first = 0 if vbucket in unsure else at[0]
        is_between = pc.and_(pc.greater_equal(index, first), pc.less(index, at[-1]))
        is_of = pc.equal(changes["vbucket"], vbucket).combine_chunks()
        void = pc.or_(void, pc.and_(is_of, is_between))
    return changes.filter(pc.invert(void))


def lost_rows(column: str, limits: Mapping[int, int], generation: int) -> list[str]:
    """Returns the condition that a seqno is above the limit of its vBucket."""
    if not limits:
        return []
    return [f"generation = {generation} AND {column} > {_by_vbucket(limits)}"]


def without_lost(changes: pa.Table, limits: Mapping[int, int]) -> pa.Table:
    """Leaves out changes from before the rollback of their vBucket that are above its limit."""
    if not limits or not len(changes):
        return changes
    index = pa.array(range(len(changes)), _INT)
    is_one = is_rollback(changes)
    begins = {
        row["vbucket"]: row["index"]
        for row in pa.table([changes["vbucket"], index], ["vbucket", "index"])
        .filter(is_one)
        .to_pylist()
    }
    void = pa.repeat(pa.scalar(False), len(changes))
    for vbucket, limit in limits.items():
        if vbucket in begins:
            is_of = pc.equal(changes["vbucket"], vbucket).combine_chunks()
            is_before = pc.less(index, begins[vbucket])
            is_above = pc.greater(changes["seqno"], limit).combine_chunks()
            void = pc.or_(void, pc.and_(is_of, pc.and_(is_before, is_above)))
    return changes.filter(pc.invert(void))


def _by_vbucket(seqnos: Mapping[int, int]) -> str:
    # Deep conditions, of one comparison for each vBucket, are more than some parsers take.
    cases = " ".join(f"WHEN {vbucket} THEN {seqno}" for vbucket, seqno in sorted(seqnos.items()))
    return f"CASE vbucket {cases} END"


# ----- collections that end -----


class Ends:
    """Where changes say that the documents of collections are gone.

    Args:
        changes: Changes of one branch of each vBucket.
        keeps_dropped: Whether documents of a dropped collection stay until another collection
            begins. All changes are then about collections that had the same name.
    """

    def __init__(self, changes: pa.Table, *, keeps_dropped: bool) -> None:
        self._keeps_dropped = keeps_dropped
        # By collection and vBucket.
        self._seqnos: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        is_event = pc.equal(changes["op"], "system_event")
        for row in changes.select(["vbucket", "seqno", "value", "op"]).filter(is_event).to_pylist():
            event = json.loads(row["value"])
            kind = event["event"]
            is_end = kind == "BeginCollection" if keeps_dropped else kind == "EndCollection"
            # One that is flushed begins again.
            if is_end or (kind == "BeginCollection" and "flush_uid" in event):
                collection = int(event["collection_id"], 16)
                self._seqnos[collection][row["vbucket"]].append(row["seqno"])
        for by_vbucket in self._seqnos.values():
            for seqnos in by_vbucket.values():
                seqnos.sort()

    def conditions(self, generation: int, unread: set[int]) -> list[str]:
        """Returns the conditions that select the rows of documents that are gone.

        Args:
            generation: Generation of the rows.
            unread: vBuckets of which there is none.
        """
        sign = "<>" if self._keeps_dropped else "="
        found = []
        for collection, by_vbucket in self._seqnos.items():
            last = {
                vbucket: seqnos[-1]
                for vbucket, seqnos in by_vbucket.items()
                if vbucket not in unread
            }
            if last:
                found.append(
                    f"generation = {generation} AND collection_id {sign} {collection}"
                    f" AND seqno < {_by_vbucket(last)}"
                )
        return found

    def come(self, rows: pa.Table) -> pa.Array:
        """Returns whether the document of each row is gone between two seqnos.

        Args:
            rows: With the columns `collection_id`, `vbucket`, `seqno` and `until`, which is null if
                there is no later change.
        """
        if not self._seqnos:
            return pa.repeat(pa.scalar(False), len(rows))
        columns = [
            rows[name].to_pylist() for name in ("collection_id", "vbucket", "seqno", "until")
        ]
        return pa.array([self._comes(*row) for row in zip(*columns, strict=True)], pa.bool_())

    def _comes(self, collection: int, vbucket: int, seqno: int, until: int | None) -> bool:
        if self._keeps_dropped:
            chosen: Iterable[int] = (each for each in self._seqnos if each != collection)
        else:
            chosen = (collection,)
        for each in chosen:
            seqnos = self._seqnos.get(each, {}).get(vbucket, [])
            place = bisect_right(seqnos, seqno)
            if place < len(seqnos) and (until is None or seqnos[place] < until):
                return True
        return False


# ----- versions -----


def documents(changes: pa.Table) -> pa.Table:
    """Returns the changes of documents."""
    return changes.filter(pc.is_in(changes["op"], _OF_DOCUMENTS))


def identities(changes: pa.Table) -> pa.Table:
    """Returns the documents that changes are about, each once."""
    return changes.select(IDENTITY).group_by(list(IDENTITY)).aggregate([])


def left(changes: pa.Table, ends: Ends) -> pa.Table:
    """Returns the newest change of each document, unless that is gone."""
    newest = reducing.newest(changes, IDENTITY)
    place = {name: newest[name] for name in ("collection_id", "vbucket", "seqno")}
    goes = ends.come(pa.table(place | {"until": pa.nulls(len(newest), _INT)}))
    is_written = pc.equal(_array(newest["op"]), "mutation")
    return newest.filter(pc.and_(is_written, pc.invert(goes)))


class Versions(NamedTuple):
    """What changes do to a history.

    Attributes:
        rows: Changes that are new versions, with the columns that say when.
        changed: Rows of the table that change, as in `Endings`.
    """

    rows: pa.Table
    changed: pa.Table


def versions(
    changes: pa.Table,
    known: pa.Table,
    ends: Ends,
    lost: Mapping[int, int],
    *,
    generation: int,
    at: datetime,
) -> Versions:
    """Works out the versions that changes bring.

    What the table has of a document in the same generation, up to the seqno of its newest row and
    of what ended it, is known: it is only noted in which epoch it was read last. A version begins
    at the time of its CAS, but not before the one before it began or ended.

    Args:
        changes: Changes of documents, of one branch of each vBucket.
        known: Newest row of each of them in the table, if it has one, without those that were lost.
        ends: Ends of collections among the changes.
        lost: Seqnos above which vBuckets were rolled back.
        generation: Generation of the changes.
        at: Time of ends that have none.
    """
    # The order of seqnos: of what comes again after a rollback, the last is kept.
    index = pa.array(range(len(changes)), _INT)
    order = pa.table(
        [*(changes[name] for name in (*IDENTITY, "seqno")), index], [*IDENTITY, "seqno", "index"]
    )
    changes = changes.combine_chunks().take(
        pc.sort_indices(order, [(name, "ascending") for name in order.column_names])
    )
    is_last = pc.invert(_is_same_as_next(changes, (*IDENTITY, "seqno")))
    changes = changes.filter(is_last)
    of = _Joined(changes, _reopened(known, lost, generation), generation)
    is_new = of.is_new
    fresh, group, k_from = changes.filter(is_new), of.group.filter(is_new), of.bound.filter(is_new)
    begins = _times(fresh, group, k_from)
    # What follows a change of the same document.
    follows = _is_same_as_next(fresh, IDENTITY)
    until = pc.if_else(follows, _next(_array(fresh["seqno"])), None)
    then = pc.if_else(follows, _next(begins), None)
    place = {name: fresh[name] for name in ("collection_id", "vbucket", "seqno")}
    goes = ends.come(pa.table(place | {"until": until}))
    micros = pa.scalar(at, _TIME)
    gone = pc.if_else(goes, _later(begins, micros), None)
    rows = (
        fresh.append_column(VALID_FROM, begins)
        .append_column(VALID_TO, pc.coalesce(then, gone))
        .append_column(IS_CURRENT, pc.invert(pc.or_(follows, goes)))
        .append_column(ENDED_BY, pc.if_else(goes, None, until))
        .filter(pc.equal(fresh["op"], "mutation"))
    )
    is_first = pc.invert(_shifted(follows))
    firsts = pa.table(
        {
            "group": group.filter(is_first),
            "c_seqno": _array(fresh["seqno"]).filter(is_first),
            "c_time": begins.filter(is_first),
            "c_writes": pc.equal(_array(fresh["op"]), "mutation").filter(is_first),
            "c_again": of.is_again.filter(is_new).filter(is_first),
        }
    )
    return Versions(rows, of.changed(firsts, ends, micros))


def _reopened(known: pa.Table, lost: Mapping[int, int], generation: int) -> pa.Table:
    """Returns known rows as they are after a rollback."""
    if not lost or not len(known):
        return known
    limits = [
        lost.get(vbucket) if of == generation else None
        for vbucket, of in zip(
            known["vbucket"].to_pylist(), known["generation"].to_pylist(), strict=True
        )
    ]
    is_open = pc.fill_null(pc.greater(known[ENDED_BY], pa.array(limits, _INT)), False)
    values: dict[str, Any] = {name: known[name] for name in known.column_names}
    for name in (VALID_TO, ENDED_BY):
        values[name] = pc.if_else(is_open, pa.scalar(None, known[name].type), known[name])
    values[IS_CURRENT] = pc.or_(known[IS_CURRENT], is_open)
    return pa.table(values)


class _Joined:
    """Changes, sorted by document and seqno, beside the newest row of each document."""

    def __init__(self, changes: pa.Table, known: pa.Table, generation: int) -> None:
        self._generation = generation
        starts = pc.invert(_shifted(_is_same_as_next(changes, IDENTITY)))
        self.group = pc.subtract(pc.cumulative_sum(starts.cast(_INT)), 1)
        first = changes.select(IDENTITY).filter(starts)
        first = first.append_column("group", pa.array(range(len(first)), _INT))
        named = known.rename_columns(
            [name if name in IDENTITY else f"k_{name}" for name in known.column_names]
        ).append_column("k_there", pa.repeat(pa.scalar(True), len(known)))
        joined = first.join(named, list(IDENTITY), join_type="left outer")
        # One row for each document, in their order.
        self._known = joined.take(pc.sort_indices(joined["group"])).combine_chunks()
        k = {
            name: _array(self._known[name]).take(self.group)
            for name in self._known.column_names
            if name.startswith("k_")
        }
        seqno, is_there = _array(changes["seqno"]), pc.fill_null(k["k_there"], False)
        is_written = pc.equal(_array(changes["op"]), "mutation")
        is_of = pc.and_(is_there, pc.fill_null(pc.equal(k["k_generation"], generation), False))
        is_newest = pc.fill_null(pc.equal(seqno, k["k_seqno"]), False)
        last = pc.max_element_wise(k["k_seqno"], k[f"k_{ENDED_BY}"])
        # A version that was ended by another one, of which there is no row: that was rejected.
        is_again = pc.and_(is_of, pc.fill_null(pc.equal(seqno, k[f"k_{ENDED_BY}"]), False))
        self.is_again = pc.and_(is_again, is_written)
        is_read = pc.and_(is_of, pc.fill_null(pc.less_equal(seqno, last), False))
        # The version that an older generation has.
        is_kept = pc.and_(
            pc.and_(is_newest, pc.and_(is_written, pc.and_(is_there, pc.invert(is_of)))),
            pc.fill_null(
                pc.and_(
                    pc.equal(_array(changes["cas"]), k["k_cas"]),
                    pc.equal(_array(changes["vbucket"]), k["k_vbucket"]),
                ),
                False,
            ),
        )
        confirms = pc.or_(is_kept, pc.and_(is_of, pc.and_(is_newest, is_written)))
        by_group = pa.table(
            {
                "group": self.group,
                "kept": is_kept,
                "epoch": pc.if_else(confirms, _array(changes["epoch"]), None),
            }
        ).group_by("group", use_threads=False)
        found = by_group.aggregate([("kept", "max"), ("epoch", "max")])
        found = found.take(pc.sort_indices(found["group"]))
        self._is_kept, self._epoch = _array(found["kept_max"]), _array(found["epoch_max"])
        is_older = pc.and_(
            self._is_kept.take(self.group),
            pc.fill_null(pc.less_equal(seqno, k["k_seqno"]), False),
        )
        self.is_new = pc.and_(pc.invert(is_older), pc.or_(pc.invert(is_read), self.is_again))
        # A version begins no earlier than this.
        is_ended = pc.and_(
            pc.is_valid(k[f"k_{ENDED_BY}"]), pc.invert(self._is_kept.take(self.group))
        )
        self.bound = pc.if_else(is_ended, k[f"k_{VALID_TO}"], k[f"k_{VALID_FROM}"])

    def changed(self, firsts: pa.Table, ends: Ends, at: pa.Scalar) -> pa.Table:
        """Returns the known rows that change.

        Args:
            firsts: First new change of each document that has one, by `group`.
            ends: Ends of collections among the changes.
            at: Time of these ends.
        """
        joined = self._known.select(["group"]).join(firsts, "group", join_type="left outer")
        joined = joined.take(pc.sort_indices(joined["group"])).combine_chunks()
        c = {name: _array(joined[name]) for name in joined.column_names}
        k = {name: _array(self._known[name]) for name in self._known.column_names}
        is_there = pc.fill_null(k["k_there"], False)
        is_confirmed = pc.and_(is_there, pc.is_valid(self._epoch))
        is_current = pc.or_(self._is_kept, pc.fill_null(k[f"k_{IS_CURRENT}"], False))
        is_noted = pc.and_(is_confirmed, is_current)
        generation = pc.if_else(self._is_kept, self._generation, k["k_generation"])
        epoch = pc.if_else(is_noted, self._epoch, k["k_epoch"])
        valid_to = pc.if_else(self._is_kept, None, k[f"k_{VALID_TO}"])
        ended_by = pc.if_else(self._is_kept, None, k[f"k_{ENDED_BY}"])
        follows = pc.and_(pc.is_valid(c["c_seqno"]), pc.invert(pc.fill_null(c["c_again"], False)))
        is_of = pc.fill_null(pc.equal(generation, self._generation), False)
        until = {
            "collection_id": k["collection_id"],
            "vbucket": k["k_vbucket"],
            "seqno": k["k_seqno"],
            "until": pc.if_else(follows, c["c_seqno"], None),
        }
        goes = pc.and_(is_of, pc.and_(is_current, _of_some(until, is_there, ends)))
        # It ends by the next change, with its collection, or had ended with it some time before.
        is_ended = pc.and_(is_current, pc.or_(follows, goes))
        is_earlier = pc.and_(
            pc.and_(pc.and_(follows, pc.fill_null(c["c_writes"], False)), pc.invert(is_current)),
            pc.fill_null(pc.and_(pc.is_null(ended_by), pc.less(c["c_time"], valid_to)), False),
        )
        ends_at = pc.if_else(follows, c["c_time"], _later(k[f"k_{VALID_FROM}"], at))
        values = {
            "collection_id": k["collection_id"],
            "key": k["key"],
            "seqno": k["k_seqno"],
            "was_generation": k["k_generation"],
            "generation": generation,
            "epoch": epoch,
            VALID_TO: pc.if_else(pc.or_(is_ended, is_earlier), ends_at, valid_to),
            IS_CURRENT: pc.and_(is_current, pc.invert(is_ended)),
            ENDED_BY: pc.if_else(
                is_ended,
                pc.if_else(pc.and_(follows, pc.invert(goes)), c["c_seqno"], None),
                ended_by,
            ),
        }
        is_other = pc.or_(pc.or_(is_ended, is_earlier), self._is_kept)
        is_other = pc.or_(is_other, pc.fill_null(pc.not_equal(epoch, k["k_epoch"]), False))
        schema = pa.schema([pa.field(name, _type_of(name, k["key"].type)) for name in values])
        return pa.table(values).cast(schema).filter(pc.and_(is_there, is_other))


def _type_of(name: str, key: pa.DataType) -> pa.DataType:
    if name == "key":
        return key
    return KNOWN.field("generation" if name == "was_generation" else name).type


def _of_some(rows: dict[str, pa.Array], chosen: pa.Array, ends: Ends) -> pa.Array:
    """Returns `Ends.come` of some rows, and false for the others."""
    places = pc.indices_nonzero(chosen)
    found = ends.come(pa.table(rows).take(places))
    where = pc.index_in(pa.array(range(len(chosen)), pa.uint64()), value_set=places)
    return pc.fill_null(found.take(where), False)


def _times(changes: pa.Table, group: pa.Array, bound: pa.Array) -> pa.Array:
    """Returns when each change is, which is not before the one before it."""
    times = pc.fill_null(_array(changes["timestamp"]), pa.scalar(0, _TIME))
    times = _later(times, bound)
    index = pa.array(range(len(times)), _INT)
    distance = 1
    # The greatest of the 2, then 4, then 8 before each, as long as that changes anything.
    while distance < len(times):
        earlier = pc.max_element_wise(pc.subtract(index, distance), 0)
        is_same = pc.and_(pc.equal(group.take(earlier), group), pc.greater_equal(index, distance))
        later = pc.if_else(is_same, _later(times, times.take(earlier)), times)
        if later.equals(times):
            break
        times, distance = later, 2 * distance
    return times


def _later(times: pa.Array, others: pa.Array | pa.Scalar) -> pa.Array:
    """Returns the later of two times, or the one that is there."""
    return pc.if_else(pc.fill_null(pc.greater(others, times), pc.is_null(times)), others, times)


def _is_same_as_next(rows: pa.Table, names: Iterable[str]) -> pa.Array:
    """Returns whether each row has the values of the next one."""
    count = len(rows)
    if not count:
        return pa.array([], pa.bool_())
    found = pa.array([True] * (count - 1) + [False])
    for name in names:
        column = _array(rows[name])
        equal = pc.equal(column.slice(0, count - 1), column.slice(1))
        found = pc.and_(found, pa.concat_arrays([equal, pa.array([False])]))
    return found


def _next(values: pa.Array) -> pa.Array:
    """Returns the value after each one, and null after the last."""
    return pa.concat_arrays([values.slice(1), pa.nulls(min(len(values), 1), values.type)])


def _shifted(values: pa.Array) -> pa.Array:
    """Returns the truth value before each one, and false before the first."""
    return pa.concat_arrays(
        [
            pa.array([False] * min(len(values), 1), pa.bool_()),
            values.slice(0, max(len(values) - 1, 0)),
        ]
    )


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
