"""What `dcp-rs cat` prints: JSON lines, format strings, and which changes."""

import base64
import json

import pytest

from dcp_rs.cli import main

DOCUMENTS = {
    b"object": b'{"name":"x","list":[1,2.50,null]}',
    b"pretty": b'{\n  "a": 1,\r\n\t"b": "line\\nbreak"\n}',
    b"digits": b'{"n":12345678901234567890.12345678901234567890,"e":1e400,"i":'
    + b"9" * 5000
    + b"}",
    b"twice": b'{"a":1,"a":2}',
    b"surrogate": b'"\\ud800"',
    b"text": "größe".encode(),
    b"nan": b"NaN",
    b"empty": b"",
    b"bytes": b"\xff\x00\x80",
    b"utf16": '{"a":1}'.encode("utf-16"),
    b"nested": b"[" * 100_000 + b"]" * 100_000,
    b"nested 10001": b"[" * 10_001 + b"]" * 10_001,
    b"cut": b'{"a":',
    b"\xff\xfekey": b"1",
    b'quo"ted\n': b"true",
    "größe".encode(): b"null",
}
EMBEDDED = {b"object", b"pretty", b"digits", b"twice", b"surrogate", b"\xff\xfekey"} | {
    b'quo"ted\n', "größe".encode()
}  # fmt: skip


@pytest.fixture
def run(cluster, monkeypatch, capfdbinary):
    """Runs a command on the cluster; gives what it printed."""
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")

    def command(name, *arguments, status=0):
        address = f"{cluster.connection_string}/default"
        done = main([name, address, "--username", "Administrator", *map(str, arguments)])
        shown = capfdbinary.readouterr()
        assert done == status, shown.err
        return shown.out if status == 0 else shown.err

    return command


def records(shown):
    return [json.loads(line, parse_float=str, parse_int=str) for line in shown.splitlines()]


def bytes_of(record, name):
    if f"{name}_base64" in record:
        assert name not in record
        return base64.b64decode(record[f"{name}_base64"], validate=True)
    return record[name].encode()


def test_json_embeds_documents_and_loses_no_byte(cluster, run):
    for key, value in DOCUMENTS.items():
        cluster.upsert(key, value)
    shown = run("cat", "--json", "--columns", "key,value")
    lines = shown.splitlines()
    by_key = {
        bytes_of(record, "key"): (line, record)
        for line, record in zip(lines, records(shown), strict=True)
    }
    assert by_key.keys() == DOCUMENTS.keys()
    for key, value in DOCUMENTS.items():
        line, record = by_key[key]
        if key in EMBEDDED:
            # As it was written, in one line.
            text = value.translate(bytes.maketrans(b"\r\n", b"  "))
            assert line.endswith(b'"value": ' + text + b"}"), key
        else:
            assert bytes_of(record, "value") == value, key


def test_json_is_embedded_up_to_ten_thousand_levels(cluster, run):
    for depth in (3_000, 10_000):
        document = b'{"a":' * (depth - 1) + b"[]" + b"}" * (depth - 1)
        cluster.upsert("a", document)
        assert run("cat", "--json", "--columns", "value") == b'{"value": %s}\n' % document


def test_a_deletion_has_no_value_and_a_time_is_text(cluster, run):
    cluster.upsert("a", b"{}")
    cluster.remove("a")
    (record,) = records(run("cat", "--json"))
    assert (record["op"], record["key"], record["value"]) == ("deletion", "a", None)
    assert record["timestamp"].endswith("+00:00")


def test_columns_of_documents_are_values_of_their_types(cluster, run):
    cluster.upsert("a", b'{"name":"n","price":1.10,"raw":"/wA=","at":"2024-02-29","in":{"x":[1]}}')
    schema = "name STRING, price DECIMAL(9, 2), raw BINARY, at DATE, in STRUCT<x: ARRAY<INT>>"
    columns = "name,price,raw,at,in"
    (line,) = run("cat", "--json", "--document-schema", schema, "--columns", columns).splitlines()
    assert json.loads(line) == {
        "name": "n", "price": "1.10", "raw_base64": "/wA=", "at": "2024-02-29", "in": {"x": [1]}
    }  # fmt: skip
    # A text that is called value is one, whatever it says.
    cluster.upsert("a", b'{"in":{"value":"[5]","raw":"/wA="}}')
    schema = "in STRUCT<value: STRING, raw: BINARY>"
    (line,) = run("cat", "--json", "--document-schema", schema, "--columns", "in").splitlines()
    assert json.loads(line) == {"in": {"value": "[5]", "raw": {"base64": "/wA="}}}
    prefixed = run(
        "cat", "--json", "--document-schema", "op STRING", "--document-prefix", "d_",
        "--columns", "op,d_op",
    )  # fmt: skip
    assert records(prefixed) == [{"op": "mutation", "d_op": None}]
    assert b"--document-schema" in run("cat", "--document-prefix", "d_", status=2)


def test_columns_of_documents_of_every_type_are_shown_in_a_table(cluster, run):
    cluster.upsert(
        "a", {"d": "2024-02-29", "t": "2024-02-29T01:02:03.4Z", "n": "1.10", "m": {"x": 1}}
    )
    schema = "d DATE, t TIMESTAMP, n DECIMAL(9, 2), m MAP<STRING, INT>"
    shown = run("cat", "--output", "table", "--document-schema", schema, "--columns", "d,t,n,m")
    cells = shown.decode().splitlines()[1].split("  ")
    found = [cell.strip() for cell in cells if cell]
    assert found == ["2024-02-29", "2024-02-29 01:02:03.400", "1.10", '{"x": 1}']


def test_a_format_string_writes_keys_and_documents_byte_by_byte(cluster, run):
    key, value = b"\xff\tkey", b'\x00{"a":\n'
    written = cluster.upsert(key, value)
    form = r"%k|%s|%o|%p|%c|%C|%O|%K|%S|%{cas}|%T\t\n\x00%%\\"
    shown = run("cat", "-f", form)
    start = b"%s|%s|%d|%d|_default|_default|mutation|5|7|%d|" % (
        key, value, written.seqno, written.vbucket, written.cas
    )  # fmt: skip
    assert shown.startswith(start)
    milliseconds, rest = shown[len(start) :].split(b"\t", 1)
    assert int(milliseconds) == written.cas // 1_000_000
    assert rest == b"\n\x00%\\"


def test_a_format_string_shows_that_there_is_no_value(cluster, run):
    cluster.upsert("a", b"1")
    cluster.remove("a")
    assert run("cat", "-f", "%k %s %S %O") == b"a  -1 deletion"


@pytest.mark.parametrize("form", ["%z", "%", r"\q", r"\xg0", "%{}", "\\"])
def test_a_format_string_that_means_nothing_is_refused(run, form):
    assert b"is unknown" in run("cat", "-f", form, status=2)


def test_what_a_format_string_may_not_name_is_refused(run):
    shown = run("cat", "-f", "%{keyy}", status=1)
    assert b'--format: there is no column "keyy"' in shown
    assert b"--columns" not in shown
    assert b"--columns" in run("cat", "-f", "%k", "--columns", "key", status=2)


@pytest.mark.parametrize("name", ["name", "nme", "foo"])
def test_a_column_that_only_a_schema_can_add_is_refused_with_its_option(run, name):
    shown = run("cat", "--columns", f"key,{name}", status=1).decode()
    hint = "a field of documents needs a document schema that declares it"
    assert shown == f'dcp-rs: --columns: there is no column "{name}": {hint}\n'
    shown = run("cat", "--columns", "key,nmae", "--document-schema", "name STRING", status=1)
    assert shown.endswith(b'; did you mean "name"?\n')


def test_a_format_string_without_columns_prints_a_line_for_each_change(fill, run):
    fill(3)
    assert run("cat", "-f", r".\n") == b".\n" * 3


def test_limits_stop_after_so_many_and_a_checkpoint_counts_only_those(fill, run, tmp_path):
    documents = fill(50)
    kept = tmp_path / "kept"
    assert run("cat", "-n", 0, "-f", "%k\n") == b""
    seen = []
    for _ in range(60):
        shown = run("cat", "-n", 7, "--checkpoint", kept, "-f", "%k\n").decode().split()
        assert len(shown) <= 7
        if not shown:
            break
        seen += shown
    assert sorted(seen) == sorted(documents)
    assert len(run("cat", "-n", 20, "-f", "%k\n").split()) == 20


def test_numbers_that_are_too_large_are_refused(run):
    assert b"--limit" in run("cat", "-n", "9" * 30, status=2)
    for interval in ("inf", "nan", "0", "-1", "x"):
        assert b"--interval" in run("top", "--once", "--interval", interval, status=2)


def test_a_limit_within_a_batch_is_counted_to_the_change(cluster, run, tmp_path):
    keys = [f"key_{n}" for n in range(60)]
    early = [key for key in keys if cluster.vbucket_of(key) < 8][:3]
    late = [key for key in keys if cluster.vbucket_of(key) >= 8][:14]
    for key in early + late:
        cluster.upsert(key, b"1")
    # Those of the second node come long after the others have been handed out.
    condition = {"opcode": "DCP_MUTATION", "node": 1, "nth": 1}
    cluster.set_faults([{"condition": condition, "reaction": {"delay": {"seconds": 0.5}}}])
    arguments = ("-n", 7, "--checkpoint", tmp_path / "kept", "-f", r"%k\n")
    first = run("cat", *arguments).decode().split()
    assert sorted(first[:3]) == sorted(early)
    seen = first + [key for _ in range(2) for key in run("cat", *arguments).decode().split()]
    assert sorted(seen) == sorted(early + late)


def test_a_checkpoint_is_a_start_that_is_not_written_to(fill, run, tmp_path):
    fill(5)
    kept = tmp_path / "kept"
    run("cat", "--checkpoint", kept)
    before = kept.read_bytes()
    fill(3, prefix="later")
    shown = run("cat", "-o", kept, "-f", "%k\n").decode().split()
    assert sorted(shown) == ["later_0", "later_1", "later_2"]
    assert kept.read_bytes() == before
    assert b"give one file" in run("cat", "-o", kept, "--checkpoint", kept, status=1)
    assert b"earliest, latest" in run("cat", "-o", tmp_path / "none", status=2)
    assert run("cat", "-o", "latest") == b""


def test_vbuckets_and_collections_are_chosen(cluster, fill, run):
    cluster.create_scope("shop")
    cluster.create_collection("shop.orders")
    cluster.upsert("order", b"1", collection="shop.orders")
    fill(40)
    vbuckets = {int(n) for n in run("cat", "--vbuckets", "0-2,5", "-f", "%p ").split()}
    assert vbuckets == {0, 1, 2, 5}
    assert run("cat", "--collections", "shop.orders", "-f", "%C.%c %k") == b"shop.orders order"
    assert run("cat", "--collections", "shop.*", "-f", "%k") == b"order"
    chosen = ("--include", "xattrs,system_events", "--collections", "shop.*")
    events = records(run("cat", "--columns", "op,value", *chosen))
    assert {"CreateScope", "BeginCollection"} <= {
        each["value"]["event"] for each in events if each["op"] == "system_event"
    }
