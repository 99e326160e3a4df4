"""The code of README.md and of the site's pages, run as it is printed.

The blocks of a page run in order, in one namespace and an empty folder. What a page shows as
output must be what its blocks print. A page whose blocks are tests is run by pytest. Blocks of
Spark run in `tests/spark/test_pages.py`, in the session that is there; those of other engines in
`tests/engines`.
"""

import contextlib
import gc
import importlib
import json
import re
import sqlite3
import subprocess
import sys
import tomllib
import warnings
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import ROOT, blocks_of, pages

import dcp_rs
from dcp_rs.testing import EmbeddedCluster

SPARK = ["docs/guides/spark.md", "docs/guides/spark-tables.md"]
PYTEST = ["docs/guides/testing.md"]
RUN = [page for page in pages() if page not in [*SPARK, *PYTEST]]


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNTIME__DLTHUB_TELEMETRY", "false")
    names = {"__name__": "page"}
    run = [block for block in blocks_of(page) if not (block.is_spark or block.is_of_engines)]
    assert run
    try:
        for block in run:
            block.run(names)
    finally:
        for name in ("client", "cluster"):
            if name in names:
                names[name].close()
        names.clear()
        # What a page leaves open is not an error of the next test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.mark.parametrize("page", PYTEST)
def test_the_tests_of_a_page_pass(page, tmp_path):
    blocks = blocks_of(page)
    (tmp_path / "test_page.py").write_text("\n\n".join(block.code for block in blocks))
    count = sum(
        block.code.count("\ndef test_") + block.code.startswith("def test_") for block in blocks
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    assert f"{count} passed" in done.stdout
    assert count >= 3


def test_every_other_page_is_run():
    assert sum(len(blocks_of(page)) for page in RUN) >= 30


def test_output_that_differs_from_what_is_shown_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    (block,) = blocks_of(page)
    with pytest.raises(AssertionError):
        block.run({})


def test_no_docstring_shows_a_raw_link():
    sources = [*(ROOT / "python").rglob("*.py")]
    assert len(sources) > 30
    raw = [str(path) for path in sources if "][dcp_rs" in path.read_text()]
    assert raw == [], "write `dcp_rs.connect` in backticks: the site links it"


# What has a page of its own, or is on another one.
ELSEWHERE = {
    "dcp_rs": {"DcpError", "__version__", "exceptions", "testing"},
    "dcp_rs.replication": {"replicate", "verify"},
}


@pytest.mark.parametrize("name", ["", ".debug", ".replication", ".spark", ".testing"])
def test_the_reference_lists_every_public_name(name):
    module = importlib.import_module(f"dcp_rs{name}")
    page = ROOT / "docs/reference" / f"{name[1:] or 'dcp_rs'}.md"
    listed = re.findall(r"^::: dcp_rs[\w.]*\.(\w+)$", page.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) >= 4
    assert set(listed) == set(module.__all__) - ELSEWHERE.get(module.__name__, set())


def test_the_readme_lists_every_extra_and_what_it_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    extras.pop("demo")
    text = (ROOT / "README.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| .+ \| (.+) \|$", text, re.MULTILINE)
    listed = {name: sorted(installed.split(", ")) for name, installed in rows}
    assert listed == {
        name: sorted(re.match(r"[\w-]+", each)[0] for each in packages)
        for name, packages in extras.items()
    }


def test_the_page_of_errors_lists_every_class_and_every_code():
    text = (ROOT / "docs/reference/errors.md").read_text()
    classes = set(dcp_rs.exceptions.__all__) - {"DcpError"}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == classes
    source = (ROOT / "crates/dcp-python/src/error.rs").read_text()
    engine = (ROOT / "crates/dcp-consumer/src/error.rs").read_text()
    codes = set(re.findall(r'\(?Kind::\w+, "(\w+)"', source))
    codes |= set(re.findall(r'Self::\w+ => "(\w+)",$', engine, re.MULTILINE))
    codes |= set(re.findall(r'=> "(\w+)",$', source, re.MULTILINE)) - set(dcp_rs.exceptions.__all__)
    assert len(codes) > 20
    missing = {code for code in codes if f"`{code}`" not in text}
    assert missing == {"document"}, "a code of what has no class of its own"


def test_the_rules_on_the_page_of_faults_are_accepted():
    page = (ROOT / "docs/guides/faults.md").read_text()
    example, partition = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    page, between = page.split("## Between nodes")
    rows = re.findall(r"^\| (`.*?) \|", page.split("## Reactions")[1], re.MULTILINE)
    reactions = [each for row in rows for each in re.findall(r"`(.+?)`", row)]
    members = re.findall(r"^\| (`.*?) \|", page.split("## Reactions")[0], re.MULTILINE)
    conditions = {
        "opcode": ["DCP_MUTATION", 0x57, ["DCP_MUTATION", 0x58]],
        "vbucket": [1, [1, 2]],
        "connection": [1, "spark*"],
        "node": [0],
        "direction": ["to_client", "to_server"],
        "any": [[{"node": 0}, {"vbucket": 1}]],
        "not": [{"node": 0}],
        "nth": [1],
        "every": [2],
        "probability": [0.5],
        "seed": [1],
    }
    assert re.findall(r"`(\w+)`", " ".join(row.split("|")[0] for row in members)) == [*conditions]
    assert len(reactions) >= 18
    with EmbeddedCluster() as cluster:
        cluster.set_faults(json.loads(example))
        assert [each["name"] for each in cluster.faults() if "name" in each] == ["busy once"]
        for text in reactions:
            reaction = json.loads(text) if text.startswith("{") else text
            cluster.set_faults([{"condition": {"node": 0}, "reaction": reaction}])
        cluster.set_faults(json.loads(partition))
        rows = re.findall(r"^\| `(.*?)` \|", between, re.MULTILINE)
        assert rows[:3] == ["between", "from", "vbucket"]
        for text in rows[3:]:
            reaction = json.loads(text) if text.startswith("{") else text
            condition = {"between": [0, [1, 2]], "from": [0, 1], "vbucket": 0}
            cluster.set_faults([{"condition": condition, "reaction": reaction}])
        assert len(rows) == 7
        for member, values in conditions.items():
            for value in values:
                # A seed belongs to a probability, and both directions to reactions of both.
                condition = {member: value} | ({"probability": 0.5} if member == "seed" else {})
                cluster.set_faults([{"condition": condition, "reaction": "drop"}])


def test_the_table_on_the_page_of_sharing_is_the_one_that_the_store_creates(tmp_path):
    page = (ROOT / "docs/guides/share.md").read_text()
    (statement,) = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    columns = []
    for name, commands in (("own", []), ("given", [statement])):
        connect = partial(sqlite3.connect, tmp_path / f"{name}.db")
        with contextlib.closing(connect()) as database, EmbeddedCluster() as cluster:
            for command in commands:
                database.execute(command)
            cluster.upsert("key", {})
            store = dcp_rs.SqlStore(connect, table="positions")
            with cluster.connect() as client, client.stream(start=store, until="now") as stream:
                for batch in stream:
                    store.save(batch.checkpoint)
            assert len(store.load()) == 1
            columns.append(database.execute("PRAGMA table_info(positions)").fetchall())
    assert columns[0] == columns[1]
