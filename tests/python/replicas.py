"""What the tests of `replicate` compare: the cluster's own documents and what a target holds.

Nothing here reads a stream or uses `dcp_rs.replication`.
"""

import json

import duckdb
import psycopg
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader


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
    """Gives the documents of rows, which are dicts of a target's columns."""
    found = {}
    for row in rows:
        name = f"{row['scope']}.{row['collection']}", row["key"]
        assert name not in found, f"{name} is doubled"
        text = row["value"]
        found[name] = bytes(row["_malformed"]) if text is None else text.encode()
    return found


class Replica:
    """A target of a test, and what is in it."""

    mode = "table"

    def rows(self, columns="*"):
        return self.query(f"SELECT {columns} FROM documents")

    def documents(self):
        return as_documents(self.rows()) if self.mode == "table" else settle(self.rows())

    def generations(self):
        (state,) = self.query("SELECT generation, complete_generation FROM dcp_rs_replication")
        return state["generation"], state["complete_generation"]

    def make_another(self):
        """Makes a table that `replicate` knows nothing of."""
        self.query("CREATE TABLE documents (value INTEGER)")
        self.query("INSERT INTO documents VALUES (1)")


class InDuckDB(Replica):
    def __init__(self, folder):
        self.path = folder / "replica.duckdb"
        self.url = f"duckdb://{self.path}"

    def query(self, statement):
        with duckdb.connect(str(self.path)) as database:
            found = database.sql(statement)
            return None if found is None else found.to_arrow_table().to_pylist()


class InPostgres(Replica):
    def __init__(self, uri):
        self.url = uri

    def query(self, statement):
        with psycopg.connect(self.url, row_factory=dict_row) as database:
            # JSON as the text that was written.
            database.adapters.register_loader("json", TextLoader)
            cursor = database.execute(statement)
            return cursor.fetchall() if cursor.description else None


KINDS = {
    "duckdb": lambda _, folder: InDuckDB(folder),
    "postgres": lambda request, _: InPostgres(request.getfixturevalue("postgres_database")),
}


TABLES = ["duckdb", "postgres"]
LOGS = ["duckdb", "postgres"]
ALL = [f"{kind}-table" for kind in TABLES] + [f"{kind}-log" for kind in LOGS]


def make(name, request, folder):
    """Makes a replica by the name of its kind and mode."""
    kind, mode = name.split("-")
    replica = KINDS[kind](request, folder)
    replica.mode = mode
    return replica


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
    return as_documents(documents)


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
