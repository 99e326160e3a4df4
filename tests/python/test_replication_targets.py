"""What targets have to do each for itself: a state that fits the rows, and types of values."""

import dataclasses
import json

import duckdb
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import open_target


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        running.create_scope("inventory")
        running.create_collection("inventory.hotel")
        yield running


@pytest.fixture(params=replicas.LOGS)
def log(request, tmp_path):
    return replicas.make(f"{request.param}-log", request, tmp_path)


def replicate(cluster, target, **options):
    with cluster.connect() as client:
        return dcp_rs.replicate(client, target, once=True, **options)


class Checked:
    """A log that is compared with its state after every commit.

    Every key is written once, so that the server has every seqno: up to the position of the state
    the log must have each of them once, and above it none. `spoil` is done to every seventh commit.
    """

    def __init__(self, log, spoil=None):
        self.log, self.inner, self.spoil = log, open_target(log.url), spoil
        self.modes, self.open, self.close = self.inner.modes, self.inner.open, self.inner.close
        self.before = None
        self.commits = 0

    def commit(self, commit):
        self.commits += 1
        spoiled = self.spoil is not None and self.commits % 7 == 0
        self.inner.commit(self.spoil(self.before, commit) if spoiled else commit)
        self.before = commit.state
        self.check()

    def check(self):
        checkpoint = dcp_rs.Checkpoint.from_json(self.log.state()["checkpoint"])
        rows = self.log.rows()
        rollbacks = [row for row in rows if row["op"] == "rollback"]
        for vbucket in {*checkpoint.seqnos, *(row["vbucket"] for row in rows)}:
            found = [
                row["seqno"]
                for row in rows
                if row["vbucket"] == vbucket
                and row["op"] != "rollback"
                and is_valid(row, rollbacks)
            ]
            assert sorted(found) == list(range(1, checkpoint.seqnos.get(vbucket, 0) + 1)), (
                f"vBucket {vbucket}"
            )


def is_valid(row, rollbacks):
    return not any(
        each["vbucket"] == row["vbucket"]
        and each["epoch"] > row["epoch"]
        and each["seqno"] < row["seqno"]
        for each in rollbacks
    )


def fill(cluster, name, count=60):
    for n in range(count):
        cluster.upsert(f"{name}_{n}", {"n": n}, collection=(None, "inventory.hotel")[n % 2])


def test_the_state_is_that_of_the_rows_after_every_commit(cluster, log):
    fill(cluster, "first")
    first = Checked(log)
    replicate(cluster, first, mode="log", commit_rows=5, commit_interval=60.0)
    fill(cluster, "second", 20)
    second = Checked(log)
    replicate(cluster, second, mode="log", commit_rows=5, commit_interval=60.0)
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, high - 4)
    fill(cluster, "third", 30)
    third = Checked(log)
    done = replicate(cluster, third, mode="log", commit_rows=5, commit_interval=60.0)
    assert done.rollbacks == 4
    assert min(first.commits, second.commits, third.commits) > 3


def stale(before, commit):
    """A checkpoint of one commit before."""
    state = dataclasses.replace(commit.state, checkpoint=before.checkpoint)
    return dataclasses.replace(commit, state=state)


def ahead(_, commit):
    """A checkpoint that is ahead of the rows."""
    return dataclasses.replace(commit, rows=commit.rows.slice(1))


@pytest.mark.parametrize("spoil", [stale, ahead])
def test_a_state_that_does_not_fit_on_one_commit_in_seven_is_noticed(cluster, log, spoil):
    fill(cluster, "first")
    target = Checked(log, spoil)
    with pytest.raises(AssertionError, match="vBucket"):
        replicate(cluster, target, mode="log", commit_rows=5, commit_interval=60.0)
    assert target.commits == 7


@pytest.mark.parametrize("mode", ["table", "log"])
def test_documents_are_variants_in_duckdb(cluster, tmp_path, mode):
    documents = {
        "a": {"name": "A", "geo": {"lat": 60.5, "lon": None}, "tags": ["x", 1, True, {}]},
        "b": {"name": 17, "big": 2**63 - 1},
        "c": [1, [2, [3]]],
        "d": "text",
        "e": 0.1,
    }
    for key, value in documents.items():
        cluster.upsert(key, json.dumps(value).encode())
    cluster.upsert("f", b"no JSON")
    replica = replicas.InDuckDB(tmp_path)
    url = f"{replica.url}?value_format=variant"
    replicate(cluster, url, mode=mode)
    documents |= {"a": {"name": "again", "geo": {"lat": 61}}, "g": {}}
    for key in ("a", "g"):
        cluster.upsert(key, json.dumps(documents[key]).encode())
    cluster.remove("e")
    replicate(cluster, url, mode=mode)
    (described,) = replica.query("SELECT typeof(value) AS type FROM documents LIMIT 1")
    assert described["type"] == "VARIANT"
    newest = "FROM documents WHERE op IN ('mutation', 'deletion')" if mode == "log" else ""
    found = replica.query(
        f"SELECT key, value::JSON AS value, _malformed {newest or 'FROM documents'} "
        "QUALIFY row_number() OVER (PARTITION BY key ORDER BY seqno DESC) = 1"
    )
    values = {row["key"]: json.loads(row["value"]) for row in found if row["value"] is not None}
    assert values == {key: value for key, value in documents.items() if key != "e"}
    assert [bytes(row["_malformed"]) for row in found if row["key"] == "f"] == [b"no JSON"]
    paths = replica.query(
        "SELECT value.name::VARCHAR AS name, value.geo.lat::DOUBLE AS lat FROM documents"
        " WHERE key = 'a' ORDER BY seqno DESC LIMIT 1"
    )
    assert paths == [{"name": "again", "lat": 61.0}]
    if mode == "log":
        (events,) = replica.query(
            "SELECT count(*) AS n FROM documents WHERE value.event = 'BeginCollection'"
        )
        assert events["n"] == 4


def test_columns_are_variants_in_duckdb_alone(cluster, tmp_path, request):
    cluster.upsert("a", {"v": {"x": [1, None]}, "l": [1, "x"], "m": {"k": {}}, "s": {"v": 0.5}})
    schema = "v VARIANT, l ARRAY<VARIANT>, m MAP<STRING, VARIANT>, s STRUCT<v: VARIANT>"
    replica = replicas.InDuckDB(tmp_path)
    for _ in range(2):
        replicate(cluster, replica.url, document_schema=schema)
        (row,) = replica.query("SELECT * REPLACE (v::JSON AS v) FROM documents")
        found = replica.query(
            "SELECT v::JSON v, l::JSON l, m::JSON m, s::JSON s, v.x[1]::INT one FROM documents"
        )
        assert row["key"] == "a"
        expected = json.loads(cluster.get("a").value)
        assert {name: json.loads(found[0][name]) for name in expected} == expected
        assert found[0]["one"] == 1
        cluster.upsert("a", {"v": {"x": [1, 2]}, "l": [], "m": {"k": 2}, "s": {"v": "text"}})
    for name in ("delta", "postgres", "parquet", "iceberg"):
        other = replicas.make(f"{name}-log", request, tmp_path)
        for declared in ("v VARIANT", "n INT, l ARRAY<VARIANT>", "s STRUCT<n: INT, v: VARIANT>"):
            with pytest.raises(
                ConfigError, match=r"is a VARIANT, which .* cannot write: .* STRING"
            ):
                replicate(cluster, other.url, mode="log", document_schema=declared)
        with pytest.raises(ConfigError, match=f"{other.url.split(':')[0]} has no VARIANT"):
            open_target(f"{other.url}{'&' if '?' in other.url else '?'}value_format=variant")


def test_json_and_variants_are_not_mixed_up(cluster, tmp_path):
    cluster.upsert("a", {"n": 1})
    replica = replicas.InDuckDB(tmp_path)
    replicate(cluster, replica.url)
    variant = f"{replica.url}?value_format=variant"
    with pytest.raises(ConfigError, match="value is JSON and would have to be VARIANT"):
        replicate(cluster, variant)
    with pytest.raises(ConfigError, match="value_format: document_schema has no column value"):
        replicate(
            cluster, f"duckdb://{tmp_path}/other?value_format=variant", document_schema="n INT"
        )
    with pytest.raises(ConfigError, match="'jsonb' is neither json nor variant"):
        replicate(cluster, f"{replica.url}?value_format=jsonb")


def test_a_duckdb_without_variants_says_so(cluster, tmp_path, monkeypatch):
    """Stands in for DuckDB 1.4, which knows the type and makes no table of it."""
    target = open_target(f"duckdb://{tmp_path}/old?value_format=variant")
    run = target._run

    def refuse(statement, values=None):
        if "VARIANT" in statement:
            raise duckdb.NotImplementedException("no table can be made of VARIANT")
        return run(statement, values)

    monkeypatch.setattr(target, "_run", refuse)
    with pytest.raises(ConfigError, match=r"DuckDB .* takes no VARIANT: install 2.0 or later"):
        replicate(cluster, target)
