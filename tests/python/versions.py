"""What a history has to hold, from what was written to a cluster.

Nothing here reads a stream, or uses `dcp_rs.replication`.
"""

from datetime import UTC, datetime, timedelta

from dcp_rs.exceptions import ConfigError
from replicas import Written
from trouble import Trouble

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Ledger(Written):
    """Writes documents, and knows every version that is on the branch of now.

    A change is a dict with `seqno`, `collection_id`, `key`, `value` (`None` for a deletion) and
    `at`. One without `key` is the end of a collection.

    Args:
        cluster: The cluster.
        keeps_history: Whether a reader gets each version.
    """

    def __init__(self, cluster, *, keeps_history):
        super().__init__(cluster)
        self.changes = {vbucket: [] for vbucket in range(cluster.num_vbuckets)}
        self._keeps_history = keeps_history
        # What a history had when it was checked last, by document, and what was there to read.
        self._held, self._seen = {}, set()
        # What it need not have.
        self._lacking = set()

    def upsert(self, key, value, collection=None):
        token = super().upsert(key, value, collection)
        there = self.cluster.get(key, collection=collection)
        self._note(token, key, collection, there.value)
        return token

    def remove(self, key, collection):
        self._note(self.cluster.remove(key, collection=collection), key, collection, None)

    def _note(self, token, key, collection, value):
        self.changes[token.vbucket].append(
            {
                "seqno": token.seqno,
                "collection_id": self._id(collection),
                "key": key,
                "value": value,
                "at": _EPOCH + timedelta(microseconds=token.cas // 1000),
            }
        )

    def _id(self, collection):
        scope, _, name = (collection or "_default._default").partition(".")
        (found,) = [
            int(each["uid"], 16)
            for in_scope in self.cluster.manifest()["scopes"]
            if in_scope["name"] == scope
            for each in in_scope["collections"]
            if each["name"] == name
        ]
        return found

    def end(self, collection, ending):
        """Notes that a call ends a collection, in all vBuckets."""
        gone = self._id(collection)
        ending(collection)
        for vbucket, seqno in self.cluster.high_seqnos().items():
            self.changes[vbucket].append({"seqno": seqno, "collection_id": gone, "key": None})

    def lose(self, vbucket, above):
        """Notes that a vBucket has lost its changes above a seqno. Collections end again."""
        self.changes[vbucket] = [
            change
            for change in self.changes[vbucket]
            if change["seqno"] <= above or change["key"] is None
        ]
        self._seen &= self._places()
        for (_, key), seqnos in self._held.items():
            if self.cluster.vbucket_of(key) == vbucket:
                seqnos.difference_update({each for each in seqnos if each > above})

    def forget_older(self):
        """Notes that copies were moved, and have the newest versions only."""
        self._lacking |= self._places() - self._seen

    def _places(self):
        """Gives where each change of a document is."""
        return {
            (*document, change["seqno"])
            for document, changes in self.versions().items()
            for change in changes
            if change["key"] is not None
        }

    def check(self, rows):
        """Checks the rows of a history, which are dicts of its columns."""
        by_document = {}
        for row in rows:
            by_document.setdefault((row["collection_id"], row["key"]), []).append(row)
        written = self.versions()
        assert by_document.keys() <= written.keys()
        found = {}
        for document, changes in written.items():
            own = sorted(by_document.get(document, ()), key=lambda row: row["seqno"])
            found[document] = {row["seqno"] for row in own}
            must_have = {
                change["seqno"]
                for change in changes
                if change.get("value") is not None
                and (
                    (*document, change["seqno"]) not in self._lacking
                    if self._keeps_history
                    else change["seqno"] in self._held.get(document, ())
                )
            }
            assert must_have <= found[document], ("a version is missing", own, changes)
            is_whole = self._keeps_history and not any(
                (*document, change["seqno"]) in self._lacking for change in changes
            )
            _check_document(own, changes, is_whole=is_whole)
        self._held, self._seen = found, self._places()

    def versions(self):
        """Gives the changes of each document whose key is text, and the ends of its collection."""
        found = {}
        for changes in self.changes.values():
            # Of documents of this vBucket.
            here = {}
            for change in changes:
                if isinstance(change["key"], str):
                    here.setdefault((change["collection_id"], change["key"]), []).append(change)
                elif change["key"] is None:
                    for (collection_id, _), own in here.items():
                        if collection_id == change["collection_id"]:
                            own.append(change)
            found |= here
        return found


class TroubleOfVersions(Trouble):
    """The same trouble, of which a ledger knows what was lost."""

    def __init__(self, cluster, seed, *, keeps_history):
        super().__init__(cluster, seed)
        self.written = Ledger(cluster, keeps_history=keeps_history)

    def remove(self):
        collection, key = self.chance.choice(self.written.in_order() or [("", "")])
        if key and self.cluster.get(key, collection=collection) is not None:
            self.written.remove(key, collection)

    def fail_over(self):
        cluster = self.cluster
        before = cluster.high_seqnos()
        for vbucket in before:
            cluster.set_replica_lag(vbucket, 1, None)
        for _ in range(5):
            self.write()
        node = cluster.copies_of(self.chance.randrange(cluster.num_vbuckets))[0]
        lost = [vbucket for vbucket in before if cluster.copies_of(vbucket)[0] == node]
        cluster.failover(node)
        for vbucket in lost:
            self.written.lose(vbucket, before[vbucket])
        cluster.restart(node)
        cluster.rebalance()
        self.written.forget_older()

    def roll_back(self):
        vbucket = self.chance.randrange(self.cluster.num_vbuckets)
        to = max(self.cluster.high_seqnos()[vbucket] - self.chance.randrange(1, 6), 0)
        # Not as far as before a failover: the versions of that time are not kept.
        try:
            self.cluster.roll_back(vbucket, to)
        except ConfigError:
            return
        self.written.lose(vbucket, to)

    def drop(self):
        collection = self.chance.choice(self.collections[1:])
        self.written.end(collection, self.cluster.drop_collection)
        self.cluster.create_collection(collection)

    def flush(self):
        collection = self.chance.choice(self.collections[1:])
        self.written.end(collection, self.cluster.flush_collection)


def _check_document(own, changes, *, is_whole):
    """Checks the rows of a document, by its changes and the ends of its collection."""
    by_seqno = {change["seqno"]: change for change in changes if change["key"] is not None}
    writes = [seqno for seqno, change in by_seqno.items() if change["value"] is not None]
    seqnos = [row["seqno"] for row in own]
    assert len(set(seqnos)) == len(seqnos), "a version is doubled"
    assert set(seqnos) <= set(writes), ("what is lost has no row", seqnos, changes)
    places = {id(change): place for place, change in enumerate(changes)}
    last = changes[-1]
    assert bool(own and own[-1]["is_current"]) == (last.get("value") is not None), (own, changes)
    begins = None
    for row, following in zip(own, [*own, None][1:], strict=True):
        change = by_seqno[row["seqno"]]
        text = row["value"].encode() if row["value"] is not None else bytes(row["_malformed"])
        assert text == change["value"]
        assert row["valid_from"] == max(change["at"], begins or change["at"]), (own, changes)
        later = changes[places[id(change)] + 1 :]
        ended_by = row["valid_to_seqno"]
        if row["is_current"]:
            assert (following, row["valid_to"], ended_by, later) == (None, None, None, [])
            continue
        begins = row["valid_to"]
        assert begins >= row["valid_from"]
        if following is not None:
            assert begins <= following["valid_from"], "no two overlap"
        if ended_by is None:
            assert any(each["key"] is None for each in later), ("the collection ended", own, later)
            continue
        ending = by_seqno[ended_by]
        assert begins == max(ending["at"], row["valid_from"])
        if is_whole:
            assert ending is later[0]
        if ending["value"] is not None:
            assert ended_by == following["seqno"], "versions are adjacent"
            assert begins == following["valid_from"]


def assert_none_doubled(rows):
    """Asserts that a history has no version twice, and no document two that are current."""
    of = ("generation", "epoch", "collection_id", "key", "seqno")
    found = [tuple(row[name] for name in of) for row in rows]
    assert len(set(found)) == len(found), "a version is doubled"
    current = [(row["collection_id"], row["key"]) for row in rows if row["is_current"]]
    assert len(set(current)) == len(current), "two versions of a document are current"
