"""What targets have to do each for itself: a state that fits the rows, and types of values."""

import dataclasses
import json
import math
import sys
from urllib.parse import quote

import duckdb
import pytest

import dcp_rs
import replicas
from dcp_rs.cli import _program
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError, DcpError
from dcp_rs.replication import open_target
from dcp_rs.replication.target import Address
from replicas import replicate

# Whose target is locked while it is open.
_LOCKED = ("postgres", "parquet")


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        running.create_scope("inventory")
        running.create_collection("inventory.hotel")
        yield running


@pytest.fixture(params=replicas.ALL)
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


class Checked:
    """A target that is compared with its state after every commit.

    Every key is written once, so up to the position of the state a log must have every seqno once,
    and a table every document, and none above it. `spoil` is done to every seventh commit.
    """

    def __init__(self, replica, written, spoil=None):
        self.replica, self.written, self.spoil = replica, written, spoil
        self.inner = open_target(replica.url)
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
        seqnos = dcp_rs.Checkpoint.from_json(self.replica.state()["checkpoint"]).seqnos
        found = {vbucket: [] for vbucket in seqnos}
        rows = self.replica.rows()
        rollbacks = [row for row in rows if row.get("op") == "rollback"]
        for row in rows:
            if row not in rollbacks and is_valid(row, rollbacks):
                found.setdefault(row["vbucket"], []).append(row["seqno"])
        for vbucket, there in found.items():
            last = seqnos.get(vbucket, 0)
            is_log = self.replica.mode == "log"
            expected = range(1, last + 1) if is_log else self.written.get(vbucket, [])
            assert sorted(there) == [each for each in expected if each <= last], f"vB {vbucket}"


def is_valid(row, rollbacks):
    return not any(
        each["vbucket"] == row["vbucket"]
        and each["epoch"] > row["epoch"]
        and each["seqno"] < row["seqno"]
        for each in rollbacks
    )


@pytest.fixture
def fill(cluster):
    """Writes documents; gives the seqnos of all that it has written, by vBucket."""
    written = {}

    def write(name, count=60):
        for n in range(count):
            collection = (None, "inventory.hotel")[n % 2]
            token = cluster.upsert(f"{name}_{n}", {"n": n}, collection=collection)
            written.setdefault(token.vbucket, []).append(token.seqno)
        return written

    return write


def run(cluster, target):
    """Replicates in commits of five changes."""
    mode = target.replica.mode
    done = replicate(cluster, target, mode=mode, commit_rows=5, commit_interval=60.0)
    assert target.commits > 3
    return done


def test_the_state_is_that_of_the_rows_after_every_commit(cluster, fill, replica):
    run(cluster, Checked(replica, fill("first")))
    run(cluster, Checked(replica, fill("second", 20)))
    if replica.mode == "log":
        for vbucket, high in cluster.high_seqnos().items():
            cluster.roll_back(vbucket, high - 4)
        assert run(cluster, Checked(replica, fill("third", 30))).rollbacks == 4


def stale(before, commit):
    """A checkpoint of one commit before."""
    state = dataclasses.replace(commit.state, checkpoint=before.checkpoint)
    return dataclasses.replace(commit, state=state)


def ahead(_, commit):
    """A checkpoint that is ahead of the rows."""
    return dataclasses.replace(commit, rows=commit.rows.slice(1))


@pytest.mark.parametrize("spoil", [stale, ahead])
def test_a_state_that_does_not_fit_on_one_commit_in_seven_is_noticed(cluster, fill, replica, spoil):
    target = Checked(replica, fill("first"), spoil)
    with pytest.raises(AssertionError, match="vB "):
        run(cluster, target)
    assert target.commits == 7


@pytest.fixture(params=[name for name in replicas.ALL if not name.startswith(_LOCKED)])
def unlocked(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_writer_that_another_has_overtaken_since_it_opened_commits_nothing(
    cluster, fill, unlocked, has_rows
):
    fill("first", 20)
    given = replicas.Collected()
    replicate(cluster, given, mode=unlocked.mode, commit_rows=5)
    for number in range(2):
        fast, slow = open_target(unlocked.url), open_target(unlocked.url)
        # In a lake, that which starts last goes on.
        for target in (slow, fast):
            target.open(given.schema, unlocked.mode)
        commit = given.commits[number]
        fast.commit(commit)
        fast.close()
        rows = commit.rows if has_rows else commit.rows.slice(0, 0)
        state = dataclasses.replace(commit.state, complete_generation=7)
        with pytest.raises(ConcurrentWriterError, match="another process writes"):
            slow.commit(dataclasses.replace(commit, rows=rows, state=state))
        slow.close()
    assert len(unlocked.rows()) == sum(len(commit.rows) for commit in given.commits[:2])
    assert unlocked.generations() == (1, 0)


@pytest.mark.parametrize("name", ["delta-table", "delta-log"])
def test_an_attempt_with_the_number_of_another_leaves_its_state(
    cluster, request, tmp_path, name, monkeypatch
):
    """One in a million has the same random bits."""
    monkeypatch.setattr("secrets.randbits", lambda _: 7)
    cluster.upsert("key", {"n": 1})
    replica, given = replicas.make(name, request, tmp_path), replicas.Collected()
    replicate(cluster, given, mode=replica.mode)
    fast, slow = open_target(replica.url), open_target(replica.url)
    for target in (slow, fast):
        target.open(given.schema, replica.mode)
    fast.commit(given.commits[0])
    fast.close()
    with pytest.raises(DcpError, match="File exists: the next start resumes"):
        slow.commit(given.commits[0])
    slow.close()
    assert open_target(replica.url).stored() == given.commits[0].state


@pytest.mark.parametrize(
    "options", ["", pytest.param("?value_format=variant", marks=pytest.mark.duckdb_2)]
)
@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_document_that_duckdb_does_not_take_for_json_is_malformed(
    cluster, tmp_path, mode, options
):
    """Half a surrogate pair is what is left of an emoji that was cut in two."""
    documents = {"good": b'{"a":"\\ud83d\\ude00"}', "cut": b'{"a":"\\ud83d"}', "text": b"\\x41 {"}
    for key, value in documents.items():
        cluster.upsert(key, value)
    assert cluster.get("cut").datatype == "json"
    replica = replicas.InDuckDB(tmp_path)
    replicate(cluster, replica.url + options, mode=mode)
    found = replica.query(
        "SELECT key, value::JSON AS value, _malformed FROM documents"
        f" WHERE key IN {tuple(documents)}"
    )
    assert {row["key"]: row["_malformed"] for row in found} == documents | {"good": None}
    assert {row["key"]: row["value"] and json.loads(row["value"]) for row in found} == {
        "good": {"a": "\N{GRINNING FACE}"}, "cut": None, "text": None,
    }  # fmt: skip


@pytest.mark.duckdb_2
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


@pytest.mark.duckdb_2
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
        with pytest.raises(ConfigError, match=f"VARIANT to {other.url.split(':')[0]}"):
            open_target(f"{other.url}{'&' if '?' in other.url else '?'}value_format=variant")


@pytest.mark.duckdb_2
def test_json_and_variants_are_not_mixed_up(cluster, tmp_path):
    cluster.upsert("a", {"n": 1})
    replica = replicas.InDuckDB(tmp_path)
    replicate(cluster, replica.url)
    variant = f"{replica.url}?value_format=variant"
    with pytest.raises(ConfigError, match="value is JSON but must be VARIANT"):
        replicate(cluster, variant)
    with pytest.raises(ConfigError, match="target: value_format is for documents"):
        replicate(
            cluster, f"duckdb://{tmp_path}/other?value_format=variant", document_schema="n INT"
        )


def test_an_option_of_a_url_is_no_option_of_its_own(cluster, tmp_path, monkeypatch, capsys):
    url = f"{replicas.InDuckDB(tmp_path).url}?value_format=jsonb"
    told = "value_format must be json or variant, not 'jsonb'"
    with pytest.raises(ConfigError, match=f"target: {told}"):
        replicate(cluster, url)
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    bucket = f"{cluster.connection_string}/default"
    assert _program.run(["replicate", bucket, url, "--username=Administrator", "--once"]) == 1
    assert f"TARGET: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "schema"), [("?value_format=variant", None), ("", "s STRUCT<v: VARIANT>")]
)
def test_a_duckdb_without_variants_says_so(cluster, tmp_path, options, schema):
    replica = replicas.InDuckDB(tmp_path)
    config = {"storage_compatibility_version": "v1.4.0"}
    duckdb.connect(replica.path, config=config).close()
    is_old = duckdb.__version__.startswith("1.")
    told = "DuckDB .* install 2.0 or later" if is_old else "replica.duckdb is in a format that has"
    with pytest.raises(ConfigError, match=f"^target: .*{told}"):
        replicate(cluster, replica.url + options, document_schema=schema)
    assert replica.query("SHOW TABLES") == []


@pytest.mark.parametrize("scheme", ["duckdb", "delta", "parquet"])
def test_a_path_is_not_taken_for_a_host(scheme):
    with pytest.raises(ConfigError, match=f"'data' is a host here.* as in {scheme}:///"):
        open_target(f"{scheme}://data/replica")
    with pytest.raises(ConfigError, match=f"target: name the .*, as in {scheme}:///"):
        open_target(f"{scheme}://")


@pytest.mark.parametrize("kind", ["duckdb", "postgres"])
def test_a_table_that_was_made_for_a_log_is_none(cluster, request, tmp_path, kind):
    """As when a first attempt had a misspelt collection."""
    cluster.upsert("a", {})
    replica = replicas.make(f"{kind}-table", request, tmp_path)
    with pytest.raises(ConfigError, match="no collection"):
        replicate(cluster, replica.url, mode="log", collections="misspelt")
    with pytest.raises(ConfigError, match=r"has no primary key \(collection_id, key\).*: drop it"):
        replicate(cluster, replica.url)
    replica.query("DROP TABLE documents")
    for n in range(2):
        replicate(cluster, replica.url)
        cluster.upsert("a", {"n": n})


@pytest.mark.parametrize("kind", ["duckdb", "postgres"])
def test_a_table_of_the_users_own_may_have_a_unique_index(cluster, request, tmp_path, kind):
    replica = replicas.make(f"{kind}-table", request, tmp_path)
    replica.query(
        "CREATE TABLE documents"
        f" (key {'text' if kind == 'postgres' else 'VARCHAR'}, collection_id bigint,"
        " UNIQUE (key, collection_id))"
    )
    for n in range(3):
        cluster.upsert("a", {"n": n})
        replicate(cluster, replica.url)
        assert [json.loads(row["value"]) for row in replica.rows()] == [{"n": n}]


@pytest.mark.parametrize(
    "url", ["delta://{}", "parquet://{}", "iceberg://{}?table=a.b", "duckdb://{}.duckdb"]
)
def test_a_target_that_cannot_be_there_is_refused(client, tmp_path, url):
    mode = "table" if url.startswith(("delta", "duckdb")) else "log"
    with pytest.raises(ConfigError, match=r"^target: has a NUL \(%00\)"):
        dcp_rs.replicate(client, url.format(tmp_path / "a%00b"), mode=mode, once=True)
    if not url.startswith("duckdb"):
        (tmp_path / "file").touch()
        told = r"^target: the folder .*/file/x cannot be created: Not a directory"
        with pytest.raises(ConfigError, match=told):
            dcp_rs.replicate(client, url.format(tmp_path / "file/x"), mode=mode, once=True)
        told = r"^target: the folder .*/file cannot be created: a file has its name: use another"
        with pytest.raises(ConfigError, match=told):
            dcp_rs.replicate(client, url.format(tmp_path / "file"), mode=mode, once=True)
    assert [each.name for each in tmp_path.iterdir()] in ([], ["file"])


def test_a_number_sign_is_part_of_a_path(cluster, tmp_path):
    cluster.upsert("a", {})
    replicate(cluster, f"duckdb://{tmp_path}/a#b.duckdb?table=c")
    assert {path.name for path in tmp_path.iterdir()} == {"a#b.duckdb"}
    with duckdb.connect(tmp_path / "a#b.duckdb") as database:
        assert database.sql("SELECT count(*) FROM c").fetchall() == [(1,)]


@pytest.mark.parametrize("password", ["some@one", "some/one", "some#one", "some:one", "some%one"])
def test_a_password_that_libpq_would_cut_in_two_is_refused_and_not_shown(password):
    """In the error of libpq was a part of it, or all."""
    with pytest.raises(ConfigError, match="write @ as %40") as raised:
        open_target(f"postgresql://user:{password}@host:5432,[::1]/lake?table=t")
    assert "some" not in str(raised.value)
    open_target(f"postgresql://user:{quote(password, safe='')}@host:5432,[::1]/lake?table=t")


@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_document_schema_without_columns_is_refused(cluster, tmp_path, mode):
    documents = dcp_rs.DocumentSchema(on_malformed="fail")
    with pytest.raises(ConfigError, match=r"^document_schema: names no columns"):
        replicate(cluster, f"duckdb://{tmp_path}/lake.duckdb", mode=mode, document_schema=documents)


def test_an_address_does_not_show_its_password():
    for url in ("postgresql://user:word@host/lake", "postgresql://host/lake?password=word"):
        address = Address.parse(url)
        assert address.url == url
        assert "word" not in repr(address)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b"])
def test_a_folder_whose_name_pyiceberg_would_cut_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="at which pyiceberg would take a part"):
        open_target(f"iceberg://{tmp_path}/{quote(name)}?table=a.b")
    assert not list(tmp_path.iterdir())


def test_a_catalog_that_pyiceberg_does_not_know_is_named():
    with pytest.raises(ConfigError, match=r"^target: pyiceberg cannot load the catalog lake: "):
        open_target("iceberg://lake?table=a.b")


@pytest.mark.parametrize("table", ["changes", "lake.", ".changes", "lake. "])
def test_a_table_of_iceberg_needs_a_namespace(tmp_path, table):
    with pytest.raises(ConfigError, match="needs a namespace, as in default"):
        open_target(f"iceberg://{tmp_path}?table={quote(table)}")


def test_a_column_that_only_a_target_has_gets_a_prefix(cluster, tmp_path):
    cluster.upsert("a", {"generation": 7})
    replica = replicas.InDuckDB(tmp_path)
    for name in ("generation", "Generation"):
        with pytest.raises(ConfigError, match=f'"{name}" would appear twice: give a prefix'):
            replicate(cluster, replica.url, document_schema=f"{name} INT")
    schema = dcp_rs.DocumentSchema("generation INT", prefix="doc_")
    replicate(cluster, replica.url, document_schema=schema)
    (row,) = replica.rows("generation, doc_generation")
    assert row == {"generation": 1, "doc_generation": 7}


def test_a_target_that_lacks_something_is_told_what(client):
    class Half:
        modes = frozenset({"log"})

        def open(self, schema, mode): ...

    with pytest.raises(ConfigError, match=r"target: Half lacks commit, close of dcp_rs"):
        dcp_rs.replicate(client, Half())
    del Half.modes
    with pytest.raises(ConfigError, match=r"target: Half lacks modes, commit, close of dcp_rs"):
        dcp_rs.replicate(client, Half())
    with pytest.raises(ConfigError, match="target: must be a URL or a Target, not float"):
        dcp_rs.replicate(client, math.pi)


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("duckdb:///x", "duckdb"), ("postgresql://h/d?table=t", "postgres"),
        ("delta:///x", "delta"),
        ("iceberg:///x?table=a.b", "iceberg"), ("parquet:///x", "arrow"), ("what", "arrow"),
    ],
)  # fmt: skip
def test_without_pyarrow_the_targets_own_extra_is_named(client, monkeypatch, url, extra):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=rf'pip install "dcp-rs\[{extra}\]"'):
        dcp_rs.replicate(client, url)
