"""A pipeline file: what it may say, what wins over it, and what `check` finds."""

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pytest

import dcp_rs
import replicas
from dcp_rs.cli import _pipeline, _program
from dcp_rs.exceptions import ConfigError

ROOT = Path(__file__).parents[2]
_PASSWORD = "canary-8f1c2e"
# Keys of the example that a test has in its own way.
_OF_LAKE = ("listen", "log_format", "target", "tables", "document_schema", "collections")


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, bucket="travel") as running:
        running.create_scope("inventory")
        for name in ("inventory.airline", "inventory.hotel"):
            running.create_collection(name)
            running.upsert("key_1", {"n": 1}, collection=name)
        yield running


@pytest.fixture
def file(cluster, tmp_path, monkeypatch):
    """Writes a file, as the example has it, with other keys in front."""
    monkeypatch.setenv("COUCHBASE", cluster.connection_string)
    monkeypatch.setenv("PASSWORD", _PASSWORD)
    monkeypatch.setenv("LAKE", str(tmp_path / "lake.duckdb"))

    def write(more="", of_connection="", *, but=("listen", "log_format")):
        text = (ROOT / "examples" / "pipeline.toml").read_text()
        for key in but:
            text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        path = tmp_path / "pipeline.toml"
        path.write_text(f"{more}\n{text}{of_connection}\n")
        return path

    return write


def tables_of(path):
    with duckdb.connect(path, read_only=True) as database:
        found = database.sql("SELECT table_name FROM duckdb_tables()").fetchall()
    return {name for (name,) in found if not name.startswith(("_", "dcp_rs"))}


def run(*arguments):
    return _program.run([str(each) for each in arguments])


def refused(path):
    with pytest.raises(ConfigError) as error:
        dcp_rs.Pipeline.from_file(path)
    return str(error.value)


def test_the_example_keeps_a_table_of_each_collection(file, tmp_path, capsys):
    assert run("run", file(but=["listen"]), "--once") == 0
    assert tables_of(tmp_path / "lake.duckdb") == {"inventory__airline", "inventory__hotel"}
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (lines[-1]["phase"], lines[-1]["changes"]) == ("done", 2)


def test_warnings_are_shown_unless_other_levels_are_asked_for(file, monkeypatch, capsys):
    path = file('listen = "127.0.0.1:0"\n')
    assert run("run", path, "--once") == 0
    assert "WARNING" not in capsys.readouterr().err
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, bucket="travel") as another:
        monkeypatch.setenv("COUCHBASE", another.connection_string)
        another.create_scope("inventory")
        another.create_collection("inventory.airline")
        assert run("run", path, "--once") == 0
    told = capsys.readouterr().err
    assert "WARNING dcp_rs.replication: generation 2 of inventory.airline begins" in told


def test_a_service_has_one_heap(file):
    program = (
        "import sys\nfrom dcp_rs.cli import _program\n_program.run(sys.argv[1:])\n"
        "import pyarrow\nprint(pyarrow.default_memory_pool().backend_name)"
    )
    command = [sys.executable, "-c", program, "run", file(), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1:] == ["system"], done


def test_python_runs_the_same_file(file):
    pipeline = dcp_rs.Pipeline.from_file(file())
    stop, seen = threading.Event(), []

    def take(progress):
        seen.append(progress)
        if progress.changes == 2 and progress.lag == 0:
            stop.set()

    assert pipeline.run(stop=stop, on_progress=take).changes == 2
    assert seen
    assert _PASSWORD not in repr(pipeline)
    assert "lake.duckdb" not in repr(pipeline)


def test_tables_may_be_a_mapping(file, tmp_path):
    path = file(but=["tables", "document_schema", "listen", "log_format"], more="once = true")
    path.write_text(path.read_text() + '[tables."inventory.*"]\ntable = "t_{collection}"\n')
    assert dcp_rs.Pipeline.from_file(path).run().changes == 2
    assert tables_of(tmp_path / "lake.duckdb") == {"t_airline", "t_hotel"}


def test_options_of_a_storage_are_a_table(file):
    path = file()
    path.write_text(path.read_text() + '[storage_options]\naws_region = "eu-west-1"\n')
    assert _pipeline.given_in(path)["storage_options"] == {"aws_region": "eu-west-1"}
    path.write_text(path.read_text().replace('"eu-west-1"', "1") + "[more]\n")
    assert "there is no such table" in refused(path)


def test_a_flag_wins_over_a_variable_and_that_over_the_file(file, tmp_path, monkeypatch):
    made = {name: tmp_path / f"{name}.duckdb" for name in ("lake", "variable", "flag")}
    steps = [(), (f"--target=duckdb://{made['flag']}",)]
    monkeypatch.setenv("DCP_RS_TARGET", f"duckdb://{made['variable']}")
    assert run("run", file(), "--once", *steps[1]) == 0
    assert [name for name, path in made.items() if path.exists()] == ["flag"]
    assert run("run", file(), "--once") == 0
    assert [name for name, path in made.items() if path.exists()] == ["variable", "flag"]
    monkeypatch.delenv("DCP_RS_TARGET")
    assert run("run", file(), "--once") == 0
    assert made["lake"].exists()


def test_a_variable_that_is_wrong_is_named(file, monkeypatch, capsys):
    # Kubernetes sets some for a service of the name.
    monkeypatch.setenv("DCP_RS_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("DCP_RS_PASSWORD", "of another command")
    assert run("run", file(), "--once") == 0
    monkeypatch.setenv("DCP_RS_COMMIT_INTERVAL", "5s")
    assert run("run", file(), "--once") == 2
    assert "Invalid value for DCP_RS_COMMIT_INTERVAL" in capsys.readouterr().err
    monkeypatch.setenv("DCP_RS_TARGTE", "duckdb:///x.duckdb")
    assert run("check", file()) == 1
    told = "DCP_RS_TARGTE: there is no such variable: did you mean DCP_RS_TARGET?"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("comit_interval = 1", ("comit_interval of pipeline.toml: there is no such key: did you"
         " mean commit_interval?")),
        ('bucket = "b"', "bucket of pipeline.toml: belongs in [connection]"),
        ('commit_rows = "many"', "commit_rows of pipeline.toml: must be a whole number"),
        ("commit_rows = true", "commit_rows of pipeline.toml: must be a whole number"),
        ('once = "yes"', "once of pipeline.toml: must be true or false"),
        ('mode = "tabel"', "mode of pipeline.toml: 'tabel' is not one of 'table', 'log', 'history"),
        ('on_drop = ["drop"]', "on_drop of pipeline.toml: must be a string"),
        ('reload = "${NONE}"', ("reload of pipeline.toml: the variable NONE is not set: set it, or"
         " check its name")),
        ('reload = "${no-name}"', ("reload of pipeline.toml: ${no-name} names no variable: write"
         " $${ for the characters ${")),
        ('hash_key = "a secret"', ("hash_key of pipeline.toml: must be a variable, as in"
         ' "${PASSWORD}": a file is no place for a secret')),
        ("connection = 1", None),
        ("= 1", None),
        ("commit_rows = 0", "commit_rows of pipeline.toml: 0 is not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_called_as_it_stands_in_the_file(file, more, told, capsys):
    path = file(more)
    assert run("run", path, "--once") == 1
    shown = capsys.readouterr().err
    assert _PASSWORD not in shown
    assert f"dcp-rs: {told}" in shown if told else "pipeline.toml: is not TOML: " in shown


@pytest.mark.parametrize(
    ("of_connection", "told"),
    [
        ('target = "x"', "connection.target of pipeline.toml: belongs above the first table"),
        ('tls_kay = "x"', ("connection.tls_kay of pipeline.toml: there is no such key: did you mean"
         " tls_key?")),
        ("connect_timeout = 0.0", "connection.connect_timeout of pipeline.toml: 0.0 is not from"),
    ],
)  # fmt: skip
def test_so_is_what_is_wrong_with_the_connection(file, of_connection, told):
    assert refused(file(of_connection=of_connection)).startswith(told)


def test_a_connection_is_a_table(tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text("connection = 1")
    told = "connection of pipeline.toml: must be a table, as [connection] begins"
    assert refused(path) == told


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, "[connection]") for name in ("conection", "Connection", "conections", "conn")),
        ("table", "[tables]"),
        ("storage", "[storage_options]"),
    ],
)
def test_a_table_with_a_wrong_name_is_told_the_right_one(file, name, meant):
    path = file(of_connection=f'[{name}]\nbucket = "travel"')
    told = f"{name} of pipeline.toml: there is no such table: did you mean {meant}?"
    assert refused(path) == told


def test_a_table_with_no_likely_name_is_told_those_that_there_are(file):
    told = "there are [connection], [storage_options], [tables]"
    assert refused(file(of_connection="[x]\ny = 1")).endswith(f"there is no such table: {told}")


def test_a_file_without_what_it_needs_is_refused(file, tmp_path):
    told = "target of pipeline.toml: is missing: add it to the file"
    assert refused(file(but=["target"])) == told
    told = "connection.connection_string of pipeline.toml: is missing: add it to the file"
    assert refused(file(but=["connection_string"])) == told
    assert "none.toml: cannot be read: No such file" in refused(tmp_path / "none.toml")


def test_braces_after_two_dollars_are_text(file):
    path = file('document_schema = "n BIGINT"\nreload = "a$${b}"', but=["document_schema"])
    assert _pipeline.given_in(path)["reload"] == "a${b}"


# ----- check -----


def checked(capsys, *arguments):
    status = run("check", *arguments, "--json")
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "target", ["duckdb://{}/lake.duckdb", "delta://{}/lake", "parquet://{}/lake", "iceberg://{}/l"]
)
def test_check_writes_nothing_and_says_what_it_would_create(file, tmp_path, capsys, target):
    path = file()
    before = sorted(tmp_path.rglob("*"))
    mode = "log" if target.startswith(("parquet", "iceberg")) else "table"
    status, found = checked(capsys, path, f"--target={target.format(tmp_path)}", f"--mode={mode}")
    assert status == 0
    assert {each["status"] for each in found} == {"ok"}
    by_step = {each["step"]: each["detail"] for each in found}
    assert by_step["read"] == "inventory.airline, inventory.hotel"
    assert by_step["target"].endswith("would be created")
    assert sorted(tmp_path.rglob("*")) == before


def test_check_looks_at_a_database(file, postgres_database, tmp_path, capsys):
    assert checked(capsys, file(), f"--target={postgres_database}")[1][-1]["detail"].startswith(
        "schema test_"
    )
    url = postgres_database.replace("user=postgres", "user=nobody")
    status, found = checked(capsys, file(), f"--target={url}")
    assert (status, found[-1]["status"]) == (1, "failed")
    assert run("run", file(), "--once") == 0
    capsys.readouterr()
    assert checked(capsys, file())[1][-1]["detail"] == "a database with 3 tables"
    url = f"duckdb:///{tmp_path}/new.duckdb"
    found = checked(capsys, file(), f"--target={url}")[1]
    assert found[-1]["detail"] == f"{tmp_path}/new.duckdb would be created"
    (tmp_path / "lake.duckdb").write_bytes(b"no database")
    status, found = checked(capsys, file())
    assert (status, found[-1]["status"]) == (1, "failed")
    (tmp_path / "lake.csv").write_bytes(b"a,b\n1,2\n")
    url = f"duckdb://{tmp_path}/lake.csv"
    for command in ("check", "run"):
        assert run(command, file(), f"--target={url}") == 1
        assert "target: " in (told := capsys.readouterr().err)
        assert "lake.csv is no DuckDB database" in told


def test_check_asks_of_a_target_what_run_does(file, postgres_database, tmp_path, capsys):
    path = file(but=["tables", "document_schema", "listen", "log_format"])
    # A table's name may stand before what else the URL says.
    url = postgres_database.replace("?", "?table=airlines&")
    assert checked(capsys, path, f"--target={url}")[0] == 0
    # A template of topics stands for tables.
    status, found = checked(capsys, path, "--target=kafka://127.0.0.1:1?topic={scope}.{collection}")
    assert (status, found[-1]["status"]) == (0, "ok")
    assert found[-1]["detail"].startswith("not looked at")
    assert run("check", path, f"--target=parquet://{tmp_path}/lake") == 1
    assert "mode of pipeline.toml: must be log for this target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "keep_versions_for = 7200",
            "keep_versions_for of pipeline.toml: .* set the key compact_every",
        ),
        ("extra = 'column'", "extra of pipeline.toml: .* set the key document_schema"),
        ("compact_every = 60", "compact_every of pipeline.toml: only Delta tables and DuckLakes"),
        ("commit_rows = 0", "commit_rows of pipeline.toml: 0 is not from 1"),
        ("commit_interval = 1e9", "commit_interval of pipeline.toml: 1000000000 is not from 0.001"),
        ("listen = '9108x'", "listen of pipeline.toml: is not an address"),
        ("mode = 'log'\nreload = '1'", "reload of pipeline.toml: a log keeps what it has"),
        ("tables = 'collections'", "tables of pipeline.toml: 'collections' is the same"),
    ],
)
def test_check_finds_options_that_run_would_refuse(file, capsys, lines, told):
    path = file(lines, but=["tables", "document_schema", "listen", "commit_interval"])
    assert run("check", path) == 1
    assert re.search(f"dcp-rs: {told}", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_option_that_the_file_lacks_is_called_as_it_would_be_there(
    file, tmp_path, capsys, command
):
    lacks = ["tables", "document_schema", "listen"]
    of_tables = file(but=lacks)
    of_tables.write_text(
        of_tables.read_text() + '[tables."inventory.*"]\ndocument_shema = "infer"\n'
    )
    assert run(command, of_tables) == 1
    told = "tables of pipeline.toml: 'inventory.*' has no option 'document_shema': did you mean"
    assert told in capsys.readouterr().err
    assert run(command, file(but=[*lacks, "bucket"])) == 1
    shown = "".join(capsys.readouterr())
    assert "connection.bucket of pipeline.toml: name one" in shown
    assert "--" not in shown
    # But a flag is called a flag.
    flags = ("--mode=log", "--deletes=mark", f"--target=parquet://{tmp_path}/lake")
    assert run(command, file(but=lacks), *flags) == 1
    assert "--deletes: a log has" in capsys.readouterr().err
    assert run(command, file(but=[*lacks, "target"]), "--target=x://") == 1
    assert "--target: must begin with one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (
            'document_schema = "id BIGNT"',
            "document_schema of 'inventory.*': there is no type BIGNT",
        ),
        ('deletes = "hide"', "deletes of 'inventory.*': must be 'remove' or 'mark', not 'hide'"),
        (
            'document_schema = "id BIGINT"\nnested = "json"',
            "nested of 'inventory.*': applies to schemas that are inferred",
        ),
        ('on_error = "skip"', "on_error of 'inventory.*': must be 'reject' or 'fail', not 'skip'"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_an_error_in_a_table_of_a_pattern_names_the_pattern(file, capsys, command, option, told):
    path = file(but=["tables", "listen"])
    path.write_text(f'{path.read_text()}[tables."*.hotel"]\n[tables."inventory.*"]\n{option}\n')
    assert run(command, path) == 1
    assert f"tables of pipeline.toml: {told}" in capsys.readouterr().err


def test_an_option_of_all_tables_is_called_so_beside_patterns(file, capsys):
    path = file('document_schema = "id BIGNT"', but=["document_schema", "tables", "listen"])
    path.write_text(path.read_text() + '[tables."inventory.*"]\ndeletes = "mark"\n')
    assert run("check", path) == 1
    assert "dcp-rs: document_schema of pipeline.toml: there is no type" in capsys.readouterr().err


def test_check_advises_as_the_file_calls_options(file, capsys):
    status, found = checked(capsys, file(but=["bucket"], of_connection="bucket = 'none'"))
    assert (status, found[-1]["step"]) == (1, "bucket")
    assert "in the connection string or connection.bucket of pipeline.toml" in found[-1]["advice"]


@pytest.mark.parametrize(
    ("target", "tables"),
    [
        ("duckdb://{}/lake.duckdb", ""),
        ("duckdb://{}/lake.duckdb", "tables = 'collection'"),
        ("delta://{}/lake", ""),
        ("delta://{}/lake", "tables = 'collection'"),
    ],
)
def test_check_finds_that_a_table_is_that_of_another_bucket(file, tmp_path, capsys, target, tables):
    path = file(f"target = '{target.format(tmp_path)}'\n{tables}", but=_OF_LAKE)
    assert run("run", path, "--once") == 0
    capsys.readouterr()
    assert checked(capsys, path)[0] == 0
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, bucket="city") as other:
        other.upsert("key_1", {})
        for command in ("check", "run"):
            connection = f"--connection-string={other.connection_string}", "--bucket=city"
            assert run(command, path, *connection) == 1
            named = "tables" if tables else "target"
            of = r" of \S+" if tables else ""
            told = rf"{named} of pipeline.toml: the table{of} has rows of the bucket travel, which"
            assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("tables", ["", "tables = 'collection'"])
@pytest.mark.parametrize(
    ("target", "before", "after", "told"),
    [
        ("duckdb", "", "mode = 'log'", "mode of .*: the target is a table, not a log"),
        (
            "delta",
            "document_schema = 'n BIGINT, m BIGINT'",
            "document_schema = 'n BIGINT'",
            "document_schema of .*: lacks m, which the table has",
        ),
        (
            "delta",
            "document_schema = 'n BIGINT'\nmode = 'log'",
            "document_schema = 'n BIGINT'\nmode = 'log'\ndrop_fields = ['name']",
            "hash_fields of .*: the log was written with other fields masked",
        ),
        ("duckdb", "deletes = 'mark'", "", "deletes of .*: the table has _deleted_at"),
        (
            "duckdb",
            "document_schema = 'infer'\nnested = 'columns'",
            "document_schema = 'infer'\nnested = 'json'",
            "nested of .*: the table was made with columns",
        ),
    ],
)
def test_check_finds_what_run_would_refuse_of_a_table(  # noqa: PLR0917 - fixtures and cases
    file, tmp_path, capsys, tables, target, before, after, told
):
    where = f"target = '{target}://{tmp_path}/lake'\n{tables}"
    assert run("run", file(f"{where}\n{before}", but=_OF_LAKE), "--once") == 0
    assert checked(capsys, file(f"{where}\n{before}", but=_OF_LAKE))[0] == 0
    path = file(f"{where}\n{after}", but=_OF_LAKE)
    for command in ("check", "run"):
        assert run(command, path) == 1
        assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("tables", ["", "tables = 'collection'"])
def test_check_says_which_tables_would_be_loaded_anew(file, capsys, tmp_path, tables):
    where = f"target = 'duckdb://{tmp_path}/lake'\n{tables}"
    path = file(f"{where}\ndocument_schema = 'n BIGINT'", but=_OF_LAKE)
    assert run("run", path, "--once") == 0
    capsys.readouterr()
    path = file(f"{where}\ndocument_schema = 'n BIGINT, m BIGINT'", but=_OF_LAKE)
    status, found = checked(capsys, path)
    names = ["the table"]
    if tables:
        names = ["_default___default", "inventory__airline", "inventory__hotel"]
    whole = [f"{name} would be loaded anew: documents have new columns: m" for name in names]
    assert (status, found[-1]["status"]) == (0, "ok")
    assert found[-1]["detail"].split("; ")[1:] == whole
    assert run("run", path, "--once") == 0
    assert "anew" not in checked(capsys, path)[1][-1]["detail"]
    if tables:
        # Nothing goes on with the table of a collection that is no longer chosen.
        less = "--collections=inventory.airline"
        path = file(f"{where}\ndocument_schema = 'n BIGINT'", but=_OF_LAKE)
        assert run("check", path, less) == 1
        assert "document_schema of pipeline.toml: lacks m" in capsys.readouterr().err
        path = file(f"{where}\ndocument_schema = 'k BIGINT, n BIGINT, m BIGINT'", but=_OF_LAKE)
        detail = checked(capsys, path, less)[1][-1]["detail"]
        assert detail.split("; ")[1:] == [whole[1].replace(": m", ": k")]


def test_check_looks_at_what_its_share_has(file, capsys, postgres_database):
    where = f"target = '{postgres_database}'\ntables = 'collection'\ndocument_schema = 'n BIGINT"
    for share in ("1/2", "2/2"):
        path = file(f"{where}'\nshare = '{share}'", but=_OF_LAKE)
        assert run("run", path, "--once") == 0
    more = {
        share: file(f"{where}, m BIGINT'\nshare = '{share}'", but=_OF_LAKE).read_text()
        for share in ("1/2", "2/2")
    }
    for done, expected in (((), (True, True)), (("2/2",), (True, False))):
        for share in done:
            path.write_text(more[share])
            assert run("run", path, "--once") == 0
        capsys.readouterr()
        found = []
        for text in more.values():
            path.write_text(text)
            found.append("would be loaded anew" in checked(capsys, path)[1][-1]["detail"])
        assert tuple(found) == expected


def test_check_shows_few_of_many_tables(file, capsys, tmp_path, cluster):
    cluster.create_scope("many")
    for number in range(9):
        cluster.create_collection(f"many.c{number}")
        cluster.upsert("key", {}, collection=f"many.c{number}")
    where = f"target = 'duckdb://{tmp_path}/lake'\ntables = 'collection'\ncollections = ['many.*']"
    assert run("run", file(f"{where}\ndocument_schema = 'n BIGINT'", but=_OF_LAKE), "--once") == 0
    path = file(f"{where}\ndocument_schema = 'm BIGINT, n BIGINT'", but=_OF_LAKE)
    capsys.readouterr()
    detail = checked(capsys, path)[1][-1]["detail"]
    assert [each.split()[0] for each in detail.split("; ")[1:]] == [
        *(f"many__c{number}" for number in range(5)), "4"
    ]  # fmt: skip
    assert detail.endswith("; 4 more tables would be loaded anew")


def test_check_finds_a_port_in_use(file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        path = file(f"listen = '{port}'", but=["listen"])
        for command in ("check", "run"):
            assert run(command, path) == 1
            told = f"listen of pipeline.toml: port {port} of 127.0.0.1 is in use"
            assert told in capsys.readouterr().err
    status, found = checked(capsys, path)
    assert (status, found[-1]["step"], found[-1]["detail"]) == (0, "listen", "is free")


def test_check_finds_that_a_library_is_missing(file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    status, found = checked(capsys, file("listen = '0'", but=["listen"]))
    assert (status, found[-1]["step"], found[-1]["status"]) == (1, "listen", "failed")
    assert 'pip install "dcp-rs[prometheus]"' in found[-1]["detail"]


def test_check_stops_where_something_is_wrong(file, capsys, monkeypatch):
    monkeypatch.setenv("PASSWORD", "another")
    status, found = checked(capsys, file())
    assert (status, found[-1]["step"], found[-1]["status"]) == (1, "login", "failed")
    monkeypatch.setenv("PASSWORD", _PASSWORD)
    assert run("check", file("collections = ['inventory.none']", but=["collections"])) == 1
    assert "collections of pipeline.toml" in capsys.readouterr().err


def test_check_says_what_a_share_is_and_refuses_another_number(
    file, capsys, cluster, postgres_database
):
    def target_of(more):
        status, found = checked(
            capsys, file(f"target = '{postgres_database}'\n{more}", but=_OF_LAKE)
        )
        (told,) = [each for each in found if each["step"] == "target"]
        return status, told["detail"]

    status, told = target_of("share = '1/2'")
    assert status == 0
    assert told.endswith("; share 1/2 has the vBuckets 0 to 1")
    replicas.replicate(cluster, postgres_database, share="1/2")
    assert target_of("share = '2/2'")[0] == 0
    for more in ("share = '1/3'", ""):
        status, told = target_of(more)
        assert status == 1
        assert "documents is that of 2 shares, and cannot become" in told
    refused = {
        "share = '1/2'\non_drop = 'drop'\ntables = 'collection'": "on_drop of pipeline.toml: one",
        "share = '1/2'\ndocument_schema = 'infer'": "document_schema of pipeline.toml: each share",
        "share = '1/5'": "share of pipeline.toml: 5 shares are too many",
    }
    for more, reason in refused.items():
        assert run("check", file(f"target = '{postgres_database}'\n{more}", but=_OF_LAKE)) == 1
        assert reason in capsys.readouterr().err
    assert run("check", file("share = '1/2'", but=["document_schema"])) == 1
    assert "share of pipeline.toml: DuckDB has one writer" in capsys.readouterr().err


# ----- one list of options -----


def test_every_option_of_replicate_is_a_key():
    options = {
        each.name if each.multiple else option.removeprefix("--").replace("-", "_")
        for each in _program._program.commands["replicate"].params
        for option in each.opts
        if not getattr(each, "hidden", False)
    }
    assert {key for keys in _pipeline.KEYS.values() for key in keys} == options


def test_the_schema_for_editors_is_that_of_the_code(capsys):
    assert run("check", "--schema") == 0
    shown = capsys.readouterr().out
    assert shown == (ROOT / "docs" / "reference" / "pipeline.schema.json").read_text()
    known = json.loads(shown)["properties"]
    assert known["tables"]["type"] == ["string", "object"]
    assert known["connection"]["properties"]["password"]["pattern"].startswith(r"^\$\{")
