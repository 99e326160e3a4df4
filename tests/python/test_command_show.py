"""`dcp-rs show`: one change, by its vBucket and seqno."""

import json
import re

import pytest

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.exceptions import DataError


@pytest.fixture
def run(cluster, monkeypatch, capfd):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")

    def show(vbucket, seqno, *more, status=0):
        arguments = ["show", f"{cluster.connection_string}/default", "--username", "Administrator"]
        more = [*map(str, more)]
        done = main([*arguments, "--vbucket", str(vbucket), "--seqno", str(seqno), *more])
        out, err = capfd.readouterr()
        assert done == status, (out, err)
        return out if status == 0 else err

    return show


def test_a_change_is_printed_with_its_key_collection_and_document(cluster, run):
    cluster.create_scope("shop")
    cluster.create_collection("shop.orders")
    for n in range(50):
        cluster.upsert(f"before_{n}", b"{}")
    written = cluster.upsert("order", b'{"n": 10.50}', collection="shop.orders")
    for n in range(50):
        cluster.upsert(f"after_{n}", b"{}")
    line = run(written.vbucket, written.seqno)
    assert '"value": {"n": 10.50}' in line
    shown = json.loads(line)
    assert (shown["op"], shown["key"]) == ("mutation", "order")
    assert (shown["scope"], shown["collection"]) == ("shop", "orders")
    assert (shown["vbucket"], shown["seqno"]) == (written.vbucket, written.seqno)
    assert {"cas", "rev", "flags", "expiry", "xattrs"} <= shown.keys()
    chosen = json.loads(run(written.vbucket, written.seqno, "--collections", "shop.orders"))
    assert (chosen["key"], chosen["cas"]) == ("order", shown["cas"])
    table = run(written.vbucket, written.seqno, "--output", "table")
    assert re.search(r"^key +order$", table, re.MULTILINE)
    assert re.search(r"^collection +orders$", table, re.MULTILINE)
    assert "deleted_at" not in table


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_was_rewritten_or_removed_since_is_said_to_be(cluster, run, on_disk):
    first = cluster.upsert("key", b"1")
    second = cluster.upsert("key", b"2")
    removed = cluster.remove("key")
    if on_disk:
        cluster.persist()
    for gone in (first, second):
        said = run(gone.vbucket, gone.seqno, status=3)
        assert said == (
            f"dcp-rs: rewritten or removed since: no change of vBucket {gone.vbucket} has seqno"
            f" {gone.seqno} any more\n"
        )
    assert json.loads(run(removed.vbucket, removed.seqno))["op"] == "deletion"


def test_a_change_is_found_on_the_branch_that_has_it(cluster, run):
    written = [cluster.upsert("a", b"1")]
    vbucket = written[0].vbucket
    keys = [f"k{n}" for n in range(2000) if cluster.vbucket_of(f"k{n}") == vbucket]
    for key in keys[:6]:
        written.append(cluster.upsert(key, b"1"))
        cluster.persist()
        if len(written) % 2:
            cluster.move_vbucket(vbucket, len(written) // 2 % 2)
    for key, each in zip(["a", *keys], written, strict=False):
        assert json.loads(run(vbucket, each.seqno))["key"] == key


def test_purged_deletions_do_not_hide_what_is_left(cluster, run):
    first = cluster.upsert("kept", b"1")
    keys = [f"k{n}" for n in range(2000) if cluster.vbucket_of(f"k{n}") == first.vbucket]
    cluster.upsert(keys[0], b"1")
    removed = cluster.remove(keys[0])
    last = cluster.upsert(keys[1], b"1")
    cluster.persist()
    cluster.purge(first.vbucket, removed.seqno)
    assert json.loads(run(first.vbucket, first.seqno))["key"] == "kept"
    assert json.loads(run(first.vbucket, last.seqno))["key"] == keys[1]
    run(first.vbucket, removed.seqno, status=3)


def test_a_seqno_or_vbucket_that_never_was_is_refused(cluster, run):
    written = cluster.upsert("key", b"1")
    said = run(written.vbucket, written.seqno + 1, status=1)
    assert said == (
        f"dcp-rs: vBucket {written.vbucket} has no seqno {written.seqno + 1} yet: its highest is"
        f" {written.seqno}\n"
    )
    assert run(60_000, 1, status=1).startswith("dcp-rs: --vbucket: vBucket 60000 does not exist")
    for vbucket, seqno in ((0, 0), (0, -1), ("x", 1), (0, "9" * 30)):
        assert "is not a whole number" in run(vbucket, seqno, status=2)


def test_a_malformed_document_is_found_by_what_the_error_says(cluster, run):
    written = cluster.upsert("key", b'{"n": "ten"}')
    schema = dcp_rs.DocumentSchema("n BIGINT", on_malformed="fail")
    with (
        cluster.connect() as client,
        pytest.raises(DataError, match="the document is malformed") as caught,
    ):
        list(client.stream(until="now", document_schema=schema))
    told = re.search(r"to see it: dcp-rs show CONNSTR (.*)$", str(caught.value))[1]
    assert told == f"--vbucket {written.vbucket} --seqno {written.seqno}"
    assert json.loads(run(caught.value.vbucket, caught.value.seqno))["value"] == {"n": "ten"}
