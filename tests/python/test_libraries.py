"""Versions of optional libraries: which are refused, which are warned of, which are tested."""

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dcp_rs
import dcp_rs.dlt
import dcp_rs.polars
import dcp_rs.ray
import dcp_rs.spark
from dcp_rs import _libraries, cli, metrics
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import open_target
from dcp_rs.replication.iceberg import IcebergTarget

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of the extra `demo` alone, which a program in the repository uses, not the package.
DEMO = {"airportsdata", "couchbase", "tqdm"}


def pins(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    # Of an environment of its own, which has one version.
    (ray,) = re.findall(r'"ray\[data\]==([\d.]+)\.\*"', (ROOT / "tests/engines/run.py").read_text())
    return {"ray": ray} | dict(re.findall(r"^([a-z0-9-]+)==([\w.]+)", text, re.MULTILINE))


def minor(version):
    return (*version.split("."), "0")[:2]


def floors():
    """Gives the lowest versions that the extras allow, by library."""
    found = {}
    for needed in PROJECT["optional-dependencies"].values():
        for each in needed:
            name, floor = re.match(r"([\w-]+)(?:\[.*\])?(?:>=([\d.]+))?", each).groups()
            if name != "dcp-rs":
                assert found.setdefault(name, floor) == floor, f"{name} has two floors"
    return found


@pytest.fixture(autouse=True)
def _looked_at_anew():
    _libraries._too_old.cache_clear()
    yield
    _libraries._too_old.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a version of a library the one that Python's metadata tell of."""

    def install(library, version):
        folder = tmp_path / f"{library.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_the_floors_are_those_of_the_extras():
    assert floors() == {name: floor for name, (floor, _) in _libraries.TESTED.items()} | {
        name: floors()[name] for name in DEMO
    }


def test_the_newest_versions_are_those_that_the_tests_run_with():
    # Of what fits no newer DuckDB, those with the lowest.
    pinned = pins("lowest") | pins("test")
    for name, (_, newest) in _libraries.TESTED.items():
        assert minor(pinned[name]) == minor(newest), name


def test_the_floors_are_what_the_lowest_environment_has():
    pinned = pins("lowest")
    for name, floor in floors().items():
        assert _libraries._numbers(pinned[name]) == _libraries._numbers(floor), name


def test_the_page_has_the_versions_that_are_tested():
    page = (ROOT / "docs" / "reference" / "libraries.md").read_text()
    table = page[page.index("| library |") : page.index("An older version")]
    found = {
        library: (extras, lowest, newest)
        for library, extras, lowest, newest in re.findall(
            r"^\| ([a-z-]+) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE
        )
    }
    of_extras = PROJECT["optional-dependencies"].items()
    assert found == {
        library: (
            ", ".join(
                f"`{extra}`"
                for extra, needed in of_extras
                if any(re.match(rf"{library}(\[|>)", each) for each in needed)
            ),
            *versions,
        )
        for library, versions in _libraries.TESTED.items()
    }


USES = {
    "adbc-driver-postgresql": lambda *_: open_target("postgresql://h/d"),
    "confluent-kafka": lambda *_: open_target("kafka://h:1?topic=t"),
    "deltalake": lambda _, folder: open_target(f"delta://{folder}/t"),
    "duckdb": lambda _, folder: open_target(f"duckdb://{folder}/t"),
    "duckdb-extension-ducklake": lambda *_: open_target("ducklake+sqlite:///lake.db"),
    "duckdb-extension-httpfs": lambda *_: open_target("ducklake+sqlite:///l.db?data=s3://b/p"),
    "duckdb-extension-postgres-scanner": lambda *_: open_target("ducklake+postgresql://h/d"),
    "duckdb-extension-sqlite-scanner": lambda *_: open_target("ducklake+sqlite:///lake.db"),
    "obstore": lambda *_: dcp_rs.ObjectStore(None, "prefix"),
    "opentelemetry-api": lambda client, _: metrics.instrument(client.stream(until="now")),
    "dlt": lambda client, _: dcp_rs.dlt.source(client),
    "pandas": lambda *_: dcp_rs.ChangeBatch.to_pandas(None),
    "polars": lambda client, _: dcp_rs.polars.scan(client),
    "prometheus-client": lambda *_: metrics.PrometheusCollector(),
    "pyarrow": lambda client, folder: dcp_rs.replicate(
        client, f"parquet://{folder}/t", mode="log", once=True
    ),
    "pyiceberg": lambda _, folder: open_target(f"iceberg://{folder}/t"),
    "pyspark": lambda *_: dcp_rs.spark.register(None),
    "ray": lambda client, _: dcp_rs.ray.read(client),
}


@pytest.mark.parametrize("library", [*USES, "a catalog", "spark without pandas"])
def test_a_version_below_the_floor_is_refused_by_name(client, tmp_path, installed, library):
    use = USES.get(library)
    if library == "a catalog":
        library, use = "pyiceberg", lambda *_: IcebergTarget(None, "a.b")
    elif library == "spark without pandas":
        library, use = "pandas", lambda *_: dcp_rs.spark.register(None)
    installed(library, "0.1.2")
    floor, _ = _libraries.TESTED[library]
    told = rf'needs {library} {re.escape(floor)} or newer, and 0\.1\.2 is installed: pip install "'
    for _ in range(2):
        with pytest.raises(ConfigError, match=told) as raised:
            use(client, tmp_path)
    package = re.search(r'pip install "(.*)"$', str(raised.value))[1]
    extra = re.fullmatch(r"dcp-rs\[([\w-]+)\]", package)
    needed = PROJECT["optional-dependencies"][extra[1]] if extra else [package]
    assert any(re.match(rf"{library}(\[.*\])?>={floor}", each) for each in needed), package


@pytest.mark.parametrize("library", ["click", "rich"])
def test_the_command_is_refused_below_the_floor(installed, capsys, library):
    installed(library, "0.1.2")
    assert cli.main(["--version"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        rf"dcp-rs: the command line needs {library} [\d.]+ or newer, and 0\.1\.2 is installed: "
        r'pip install "dcp-rs\[cli\]"\n',
        printed.err,
    )


def test_every_library_has_a_use_that_is_tried():
    assert {*USES, "click", "rich"} == set(_libraries.TESTED)


def test_a_newer_version_is_warned_of_once(tmp_path, installed, caplog):
    installed("duckdb", "99.1.0")
    for n in range(3):
        open_target(f"duckdb://{tmp_path}/{n}")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("dcp_rs", logging.WARNING)
    floor, newest = _libraries.TESTED["duckdb"]
    assert record.getMessage() == (
        f"duckdb 99.1.0 is newer than the versions that dcp_rs is tested with, {floor} to {newest}"
    )


@pytest.mark.parametrize("ending", [".99", ".99+local.7", ".3rc1", ""])
def test_a_later_patch_release_is_not_warned_of(tmp_path, installed, caplog, ending):
    _, newest = _libraries.TESTED["duckdb"]
    installed("duckdb", newest + ending)
    open_target(f"duckdb://{tmp_path}/t")
    assert not caplog.records


@pytest.mark.parametrize("version", ["1.5.0", "1.5", "1.4.99", "1.5.0+2.0"])
def test_versions_are_compared_as_numbers(tmp_path, installed, version):
    installed("duckdb", version)
    with pytest.raises(ConfigError, match=f"and {re.escape(version)} is installed"):
        open_target(f"duckdb://{tmp_path}/t")
    # 1.5.1 is lower than 1.10.
    assert _libraries._numbers("1.10") > _libraries._numbers("1.5.1")


def test_what_has_no_version_is_not_refused(tmp_path, installed):
    installed("duckdb", "unknown")
    open_target(f"duckdb://{tmp_path}/t")
    (tmp_path / "duckdb-unknown.dist-info" / "METADATA").write_text("")
    _libraries._too_old.cache_clear()
    open_target(f"duckdb://{tmp_path}/t")


def test_a_look_at_a_version_imports_no_library():
    program = (
        "import sys, dcp_rs\n"
        "from dcp_rs import _libraries\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "names = [*_libraries.TESTED]\n"
        "for name in names: _libraries.check_version('this', name)\n"
        "print({name.replace('-', '_') for name in names} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n", done.stderr
