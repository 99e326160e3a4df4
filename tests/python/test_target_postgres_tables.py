"""Names of PostgreSQL tables that are kept in step, what their owners add to them, and rights."""

import contextlib
import re
from urllib.parse import quote

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError
from dcp_rs.replication import open_target
from dcp_rs.replication.changes import Layout
from dcp_rs.replication.postgres import target as postgres
from replicas import replicate

_LEGACY = b"session\xff\x01"


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as running:
        yield running


@pytest.fixture
def table(postgres_database):
    return replicas.InPostgres(postgres_database)


def names(replica):
    """Gives what there is in the schema."""
    found = replica.query(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
    )
    return {row["relname"] for row in found}


def schema_of(replica):
    return replica.query("SELECT current_schema()")[0]["current_schema"]


def in_step(cluster, replica, **options):
    """Whether nothing is left to do, and no load is due."""
    done = replicate(cluster, replica, **options)
    return (done.generation, done.commits) == (1, 0)


# ----- names -----


def test_one_table_has_one_state_whatever_it_is_called(cluster, table):
    schema = schema_of(table)
    table.query(
        "CREATE TABLE dcp_rs_replication (table_name text PRIMARY KEY, commits bigint,"
        " generation bigint, complete_generation bigint, state text)"
    )
    for n, name in enumerate([f"{schema}.Docs", "Docs", f"{schema}.Docs"]):
        cluster.upsert("a", {"n": n})
        done = replicate(cluster, f"{table.url}&table={name}")
        assert (done.generation, done.commits) == (1, 1), name
    assert table.query('SELECT count(*) FROM "Docs"') == [{"count": 1}]
    found = table.query("SELECT table_name, commits FROM dcp_rs_replication")
    assert found == [{"table_name": f"{schema}.Docs", "commits": 3}]
    replicate(cluster, f"{table.url}&table=docs")
    other = f"{table.url.partition('&options')[0]}&table={schema}.docs"
    with pytest.raises(
        ConfigError, match=rf"the state of table {schema}.docs is in {schema}\.dcp_rs"
    ):
        replicate(cluster, other)
    table.query(
        "INSERT INTO dcp_rs_replication SELECT 'Docs', commits, generation,"
        " complete_generation, state FROM dcp_rs_replication WHERE table_name LIKE '%.Docs'"
    )
    with pytest.raises(ConfigError, match=rf"Docs and {schema}\.Docs are the same table"):
        replicate(cluster, f"{table.url}&table=Docs")


@pytest.mark.parametrize("held", ["documents", "{schema}.documents"])
@pytest.mark.parametrize("given", ["documents", "{schema}.documents"])
def test_one_process_writes_a_table_whatever_it_calls_it(cluster, table, monkeypatch, held, given):
    """The lock of the last release is of the name as it was given."""
    cluster.upsert("a", {})
    schema = schema_of(table)
    held, given = held.format(schema=schema), given.format(schema=schema)
    monkeypatch.setattr(postgres, "_WAIT_SECONDS", 0.1)
    first = open_target(f"{table.url}&table={held}")
    with contextlib.closing(first):
        first.open(Layout.of("table", None).schema, "table")
        with pytest.raises(ConcurrentWriterError, match="another process writes to"):
            replicate(cluster, f"{table.url}&table={given}")
    replicate(cluster, f"{table.url}&table={held}")
    with psycopg.connect(table.url) as older:
        older.execute(
            "SELECT pg_advisory_lock(hashtext('dcp_rs'), hashtext(current_schema() || %s))", [held]
        )
        with pytest.raises(ConcurrentWriterError, match="another process writes to"):
            replicate(cluster, f"{table.url}&table={given}")


def test_a_table_of_the_last_release_goes_on(cluster, table):
    """Its states have no number of rows, and its process may run in between."""
    cluster.upsert("a", {})
    replicate(cluster, table)
    table.query("ALTER TABLE dcp_rs_replication DROP COLUMN rows")
    assert in_step(cluster, table)
    cluster.upsert("b", {})
    replicate(cluster, table)
    assert in_step(cluster, table)
    table.query("DELETE FROM documents WHERE key = 'a'")
    assert replicate(cluster, table).generation == 2


def test_a_table_of_rejects_is_nobody_elses(cluster, table):
    cluster.upsert(_LEGACY, b"x")
    replicate(cluster, table)
    with pytest.raises(
        ConfigError, match="documents_rejected is the table of rejects of documents"
    ):
        replicate(cluster, f"{table.url}&table=documents_rejected")
    for made in ("TABLE plain_rejected (a int)", "VIEW plain_rejected AS SELECT 1 AS a"):
        table.query(f"CREATE {made}")
        before = names(table)
        with pytest.raises(ConfigError, match="plain_rejected is where changes go that cannot be"):
            replicate(cluster, f"{table.url}&table=plain")
        assert names(table) == before
        table.query(f"DROP {made.split()[0]} plain_rejected")
    replicate(cluster, f"{table.url}&table=plain", collections="_default._default")
    assert len(table.query("SELECT key FROM plain_rejected")) == 1


def test_rejects_of_a_table_that_was_forgotten_are_void(cluster, table):
    cluster.upsert(_LEGACY, b"x")
    replicate(cluster, table)
    table.query("DROP TABLE documents")
    table.query("DELETE FROM dcp_rs_replication")
    table.query("UPDATE documents_rejected SET key = 'of another bucket'")
    replicate(cluster, table)
    found = table.query("SELECT key FROM documents_rejected")
    assert [bytes(row["key"]) for row in found] == [_LEGACY]


def test_tables_and_columns_may_be_called_anything(cluster, table):
    columns = [
        "size (`cm`)",
        'say "hi"',
        "a.b",
        "a;b",
        "é",
        "e\N{COMBINING ACUTE ACCENT}",
        "select",
    ]
    columns += ["Mixed", "mixed", "x" * 63, "rows", "t"]
    schema = pa.schema([pa.field(name, pa.int64()) for name in columns])
    for name in ('a "quoted" \N{SNOWMAN}', "with space;--", "x" * 54):
        url = f"{table.url}&table={quote(name)}"
        cluster.upsert(_LEGACY, {})
        for n in range(2):
            cluster.upsert("a", dict.fromkeys(columns, n))
            replicate(cluster, url, document_schema=schema)
            quoted = name.replace('"', '""')
            (row,) = table.query(f'SELECT * FROM "{quoted}"')
            assert [row[column] for column in columns] == [n] * len(columns)
        assert len(table.query(f'SELECT * FROM "{quoted}_rejected"')) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lakes.docs", r"the schema lakes of table lakes\.docs does not exist: .* CREATE SCHEMA"),
        ("a.b.c", r"'a\.b\.c' names no table: write table or schema\.table"),
        (".docs", "names no table"),
        ("", "names no table"),
        ("x" * 55, "at most 54 bytes"),
        ("é" * 28, "at most 54 bytes"),
        ("dcp_rs_replication", "dcp_rs needs the name dcp_rs_replication itself"),
        ("_dcp_rs_rows", "dcp_rs needs the name _dcp_rs_rows itself"),
        ("a_view", "a_view is a view"),
        ("a_matview", "a_matview is a materialized view"),
        ("a_foreign", "a_foreign is a foreign table"),
        ("a_sequence", "a_sequence is a sequence"),
    ],
)
def test_a_name_that_cannot_be_a_table_is_refused(cluster, table, name, message):
    table.query("CREATE VIEW a_view AS SELECT 1 AS one")
    table.query("CREATE MATERIALIZED VIEW a_matview AS SELECT 1 AS one")
    table.query("CREATE SEQUENCE a_sequence")
    if name == "a_foreign":
        table.query(f"CREATE FOREIGN DATA WRAPPER {schema_of(table)}")
        table.query(f"CREATE SERVER {schema_of(table)} FOREIGN DATA WRAPPER {schema_of(table)}")
        table.query(f"CREATE FOREIGN TABLE a_foreign (key text) SERVER {schema_of(table)}")
    before = names(table)
    with pytest.raises(ConfigError, match=f"^target: .*{message}"):
        replicate(cluster, open_target(table.url).__class__(table.url, name))
    assert names(table) == before


def test_without_a_schema_to_create_tables_in_it_is_said(cluster, postgres_server):
    url = f"postgresql:///postgres?{postgres_server}&options=-csearch_path%3Dnowhere&table="
    for name in ("docs", "public.docs"):
        with pytest.raises(ConfigError, match="no schema of search_path exists"):
            replicate(cluster, url + name)


@pytest.mark.parametrize("name", ["x" * 64, "é" * 32, "xmin", "ctid"])
def test_a_column_that_postgresql_would_cut_or_refuse_is_refused(cluster, table, name):
    with pytest.raises(ConfigError, match=r"^document_schema: PostgreSQL takes no column '"):
        replicate(cluster, table, document_schema=pa.schema([pa.field(name, pa.int64())]))
    assert names(table) == set()


# ----- what its owner added -----

_KEY = "collection_id bigint, key text, PRIMARY KEY (collection_id, key)"


_MADE = f"CREATE TABLE documents ({_KEY})"
_NO_KEY = "has no primary key"
_REFUSED = {
    f"CREATE TABLE documents ({_KEY}, needed int NOT NULL)": "column needed of .* no default",
    f"CREATE TABLE documents ({_KEY}, n bigint GENERATED ALWAYS AS IDENTITY)": "n of .* generated",
    f"CREATE TABLE documents ({_KEY}, n bigint GENERATED ALWAYS AS (1) STORED)": "n of .* generat",
    f"CREATE TABLE documents ({_KEY}, n text)": "n is text but must be bigint",
    f"CREATE TABLE documents ({_KEY} DEFERRABLE)": _NO_KEY,
    "CREATE TABLE documents (collection_id bigint, key text);"
    "CREATE UNIQUE INDEX ON documents (collection_id, key) WHERE key <> ''": _NO_KEY,
    "CREATE COLLATION either (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
    f"{_MADE.replace('key text', 'key text COLLATE either')}": _NO_KEY,
    f"{_MADE}; CREATE TABLE notes (c bigint, k text, FOREIGN KEY (c, k) REFERENCES documents)": (
        "foreign key notes_c_k_fkey of notes keeps rows .* ON DELETE CASCADE"
    ),
    f"{_MADE}; CREATE RULE kept AS ON DELETE TO documents DO INSTEAD NOTHING": "has the rule kept",
}


@pytest.mark.parametrize(("prepare", "message"), _REFUSED.items())
def test_a_table_that_cannot_be_kept_in_step_is_refused_as_it_is(cluster, table, prepare, message):
    cluster.upsert("a", {"n": 1})
    for statement in prepare.split(";"):
        table.query(statement)
    every = "SELECT attrelid::regclass::text, attname FROM pg_attribute JOIN pg_class c"
    every += (
        " ON c.oid = attrelid WHERE relnamespace = current_schema()::regnamespace ORDER BY 1, 2"
    )
    before = table.query(every)
    with pytest.raises(ConfigError, match=message):
        replicate(cluster, table, document_schema="n BIGINT")
    assert table.query(every) == before


@pytest.fixture
def role(table):
    """A role with the rights of its name's, and a replica that it writes."""
    name = f"loader_{schema_of(table)}"
    table.query(f"CREATE ROLE {name} LOGIN")
    table.query(f"GRANT USAGE ON SCHEMA {schema_of(table)} TO {name}")
    other = replicas.InPostgres(table.url.replace("user=postgres", f"user={name}"))
    other.role = name
    return other


def test_a_role_that_may_only_write_rows_replicates(cluster, table, role, caplog):
    def grant(*, run=True, **options):
        """Gives what the error says to grant, and grants it."""
        with pytest.raises(ConfigError) as error:
            replicate(cluster, role, **options)
        said = re.fullmatch(
            r"target: .*: run (.+ TO) <the role>, or let a role .*", str(error.value)
        )
        assert said is not None, error.value
        if run:
            table.query(f"{said[1]} {role.role}")
        return said[1]

    schema = "n BIGINT"
    cluster.upsert("a", {})
    of_schema = f"GRANT USAGE, CREATE ON SCHEMA {schema_of(table)} TO"
    assert grant(document_schema=schema, run=False) == of_schema
    replicate(cluster, table, document_schema=schema)
    rights = "GRANT SELECT, INSERT, UPDATE, DELETE ON"
    assert grant(document_schema=schema) == f"{rights} dcp_rs_replication TO"
    assert grant(document_schema=schema) == f"{rights} documents TO"
    cluster.upsert("b", {})
    assert replicate(cluster, role, document_schema=schema).generation == 1
    assert in_step(cluster, role, document_schema=schema)
    wider = "n BIGINT, city STRING"
    assert grant(document_schema=wider, run=False) == "ALTER TABLE documents OWNER TO"
    cluster.upsert(_LEGACY, {})
    assert grant(document_schema=schema, run=False) == of_schema
    cluster.remove(_LEGACY)
    table.query("ALTER TABLE dcp_rs_replication DROP COLUMN rows")
    table.query(f"REVOKE DELETE ON documents FROM {role.role}")
    cluster.remove("b")
    with pytest.raises(ConfigError, match=f"permission denied for table documents: run {rights}"):
        replicate(cluster, role, document_schema=schema)
    assert "ADD COLUMN IF NOT EXISTS rows bigint" in caplog.text
    assert len(table.query("SELECT key FROM documents")) == 2
    database = table.query("SELECT current_database() AS name")[0]["name"]
    table.query(f"REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC")
    try:
        assert grant(document_schema=schema) == f"GRANT TEMPORARY ON DATABASE {database} TO"
    finally:
        table.query(f"GRANT TEMPORARY ON DATABASE {database} TO PUBLIC")
        table.query(f"REVOKE TEMPORARY ON DATABASE {database} FROM {role.role}")


def test_a_policy_that_hides_rows_is_refused(cluster, table, role):
    cluster.upsert("a", {})
    replicate(cluster, table)
    table.query("ALTER TABLE documents ENABLE ROW LEVEL SECURITY")
    assert in_step(cluster, table), "its owner sees all rows"
    table.query(f"GRANT ALL ON documents, dcp_rs_replication TO {role.role}")
    with pytest.raises(ConfigError, match="row-level security of table documents applies"):
        replicate(cluster, role)


def test_a_server_that_is_read_only_is_named(cluster, table):
    cluster.upsert("a", {})
    replicate(cluster, table)
    cluster.upsert("b", {})
    url = table.url + "%20-cdefault_transaction_read_only%3Don"
    with pytest.raises(
        ConfigError, match="read-only transaction: name the primary server"
    ) as caught:
        replicate(cluster, url)
    assert isinstance(caught.value.__cause__, adbc.Error)
