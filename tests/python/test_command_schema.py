"""What `dcp-rs schema` prints."""

import json

import pytest

import dcp_rs
from dcp_rs.cli import main


@pytest.fixture
def run(cluster, monkeypatch, capfd):
    """Runs the command on the cluster; gives what it printed."""
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")

    def command(*arguments, status=0):
        address = f"{cluster.connection_string}/default"
        done = main(["schema", address, "--username", "Administrator", *map(str, arguments)])
        shown = capfd.readouterr()
        assert done == status, shown.err
        return shown.out if status == 0 else shown.err

    return command


@pytest.fixture
def documents(cluster):
    cluster.create_collection("_default.images")
    for number in range(10):
        document = {"name": f"it's {number}", "at": {"x": number}}
        cluster.upsert(f"key_{number}", document | ({"value": 1} if number < 3 else {}))
    cluster.upsert("image", b"\x00\xff", collection="_default.images")


@pytest.mark.usefixtures("documents")
def test_a_table_has_the_share_of_documents_that_have_each_field(run):
    lines = run("--output", "table").splitlines()
    assert sorted(lines[: lines.index("")][3:]) == [
        "at     STRING  100%",
        "name   STRING  100%",
        "value  BIGINT  30%",
    ]
    assert lines[0] == "_default._default: 10 documents"
    assert lines[1].endswith(" --document-prefix doc_")
    assert lines[-1] == "_default.images: 1 document"


@pytest.mark.usefixtures("documents")
def test_lines_of_json_have_a_schema_that_streams_take(cluster, run):
    shown = run("--json", "--nested", "struct")
    assert "it's" not in shown, "examples are shown only if asked for"
    first, images = map(json.loads, shown.splitlines())
    assert (first["collection"], first["documents"]) == ("_default._default", 10)
    shares = {".".join(each["path"]): each["share"] for each in first["fields"]}
    assert shares == {"name": 1.0, "at": 1.0, "at.x": 1.0, "value": 0.3}
    assert (images["document_schema"], images["documents"]) == (None, 1)
    schema = dcp_rs.DocumentSchema(first["document_schema"], prefix=first["prefix"])
    with cluster.connect() as client:
        rows = [
            row
            for batch in client.stream(until="now", document_schema=schema)
            for row in batch.to_pyarrow().to_pylist()
        ]
    assert {row["doc_at"]["x"] for row in rows if row["doc_at"]} == set(range(10))


@pytest.mark.usefixtures("documents")
def test_examples_are_shown_if_asked_for(run):
    assert "\"it's " in run("--examples", "--output", "table")
    assert "sample" in run("--sample", 0, status=1)
