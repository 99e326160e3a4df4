"""What the tests of `replicate` compare: the cluster's own documents and what a target holds.

Nothing here reads a stream or uses `dcp_rs.replication`.
"""

import json

import duckdb


class Written:
    """Writes documents, and knows every key that was ever written."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.keys = set()

    def upsert(self, key, value, collection=None):
        self.keys.add((collection or "_default._default", key))
        return self.cluster.upsert(key, value, collection=collection)

    def documents(self):
        """Gives what the cluster has, by collection and key."""
        there = {
            f"{scope}.{name}"
            for scope, names in self.cluster.collections().items()
            for name in names
        }
        found = {}
        for collection, key in self.keys:
            if collection not in there:
                continue
            document = self.cluster.get(key, collection=collection)
            if document is not None:
                found[collection, key] = document.value
        return found


def as_documents(rows):
    """Gives documents of rows of scope, collection, key, JSON and bytes that are no JSON."""
    found = {}
    for scope, collection, key, text, other in rows:
        name = f"{scope}.{collection}"
        assert (name, key) not in found, f"{key} is doubled"
        found[name, key] = bytes(other) if text is None else text.encode()
    return found


_COLUMNS = "scope, collection, key, value, _malformed"


def in_duckdb(path, table="documents"):
    with duckdb.connect(str(path), read_only=True) as database:
        return as_documents(database.execute(f"SELECT {_COLUMNS} FROM {table}").fetchall())


def settle(log):
    """Gives the documents that a log comes to, by its rule.

    Rows are dicts of the log's columns, in any order.
    """
    newest = max((row["generation"] for row in log), default=0)
    by_vbucket = {}
    for row in log:
        if row["generation"] == newest:
            by_vbucket.setdefault(row["vbucket"], []).append(row)
    documents = [row for rows in by_vbucket.values() for row in _settle_vbucket(rows)]
    return as_documents(
        [
            [row[name] for name in ("scope", "collection", "key", "value", "_malformed")]
            for row in documents
        ]
    )


def _settle_vbucket(rows):
    # A rollback comes before the changes of its epoch.
    places = [(row["epoch"], row["op"] != "rollback", row["seqno"]) for row in rows]
    assert len(set(places)) == len(places), "a row is doubled"
    rollbacks = [(row["epoch"], row["seqno"]) for row in rows if row["op"] == "rollback"]
    documents = {}
    for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0]):
        if any(row["epoch"] < epoch and row["seqno"] > seqno for epoch, seqno in rollbacks):
            continue
        if row["op"] == "mutation":
            documents[row["collection_id"], row["key"]] = row
        elif row["op"] == "system_event":
            event = json.loads(row["value"])
            if event["event"] in {"BeginCollection", "EndCollection"}:
                gone = int(event["collection_id"], 16)
                documents = {name: row for name, row in documents.items() if name[0] != gone}
        elif row["op"] != "rollback":
            documents.pop((row["collection_id"], row["key"]), None)
    return documents.values()
