"""Fields of documents that are dropped or hashed, against Python's own JSON."""

import hashlib
import hmac
import itertools
import json
import os
import random
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.documents import DocumentSchema
from dcp_rs.exceptions import CheckpointError, ConfigError, DataError
from dcp_rs.replication import State

SECRET = "leak-7f3a"
KEY = "canary-8f1c2e of hashes"


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as running:
        yield running


@pytest.fixture
def client(cluster):
    with cluster.connect() as connected:
        yield connected


# ----- the oracle -----


class Members(list):
    """The members of an object, with those of the same name."""


class Number(str):
    """The text of a number."""

    __slots__ = ()


def parsed(text):
    return json.loads(text, object_pairs_hook=Members, parse_int=Number, parse_float=Number)


def number_text(number):
    sign, digits, power = Decimal(number).as_tuple()
    while len(digits) > 1 and digits[-1] == 0:
        digits, power = digits[:-1], power + 1
    if digits == (0,):
        return "0"
    plain = format(Decimal((0, digits, power)), "f") if abs(power) < 100 else "0" * 99
    whole, _, fraction = plain.partition(".")
    if len(whole + fraction) > 40:
        plain = f"{''.join(map(str, digits))}e{power}"
    return "-" * sign + plain


def canonical(value):
    if isinstance(value, Members):
        last = dict(value)
        members = (f"{canonical(name)}:{canonical(last[name])}" for name in sorted(last))
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, Number):
        return number_text(value)
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def hashed(value, key=None):
    if value is None:
        return None
    text = canonical(value).encode()
    plain = hashlib.sha256(text) if key is None else hmac.new(key.encode(), text, "sha256")
    return plain.hexdigest()


def masked(value, path, act):
    """Gives a value without what a path masks; `act` returns what is left, in a list."""
    name, rest = path[0], path[1:]
    if isinstance(value, Members):
        found = Members()
        for member, inner in value:
            if member != name:
                kept = [inner]
            elif not rest:
                kept = act(inner)
            elif rest == ("[]",):
                is_array = isinstance(inner, list) and not isinstance(inner, Members)
                kept = [list(itertools.chain(*map(act, inner)))] if is_array else act(inner)
            else:
                kept = [masked(inner, rest, act)]
            found += [(member, each) for each in kept]
        return found
    return [masked(each, path, act) for each in value] if isinstance(value, list) else value


# ----- random documents -----

NAMES = ["a", "b", "c", "a b", "é", "\U0001f600", 'x"\\', "\ud800", ""]
PATHS = {"a.b": ("a", "b"), 'c["a b"]': ("c", "a b"), "é": ("é",), "b[]": ("b", "[]")}
HASHES = {'["x\\"\\\\"]': ('x"\\',), "a.c": ("a", "c"), "c.a[]": ("c", "a", "[]")}


class Writer:
    """Writes JSON in one of many ways."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def space(self):
        return self.random.choice(["", "", "", " ", "\n\t "])

    def text(self, value):
        escaped = (
            f"\\u{unit:04X}" if self.random.random() < 0.3 else json.dumps(char)[1:-1]
            for char in value
            for unit in [ord(char)]
            if unit < 0x10000
        )
        beyond = "".join(char for char in value if ord(char) >= 0x10000)
        return f'"{"".join(escaped)}{self.random.choice([beyond, json.dumps(beyond)[1:-1]])}"'

    def number(self):
        digits = "".join(self.random.choices("0123456789", k=self.random.randint(1, 45)))
        whole = self.random.choice(["0", "1", "100", digits.lstrip("0") or "0"])
        fraction = self.random.choice(["", "", ".0", ".50", f".{digits}"])
        power = self.random.choice(["", "", "e2", "E-3", "e+0", "e400", "e-400"])
        return self.random.choice(["", "-"]) + whole + fraction + power

    def value(self, depth):
        kind = self.random.randrange(8 if depth else 4)
        if kind == 0:
            return self.random.choice(["null", "true", "false"])
        if kind == 1:
            return self.number()
        if kind <= 3:
            return self.text(self.random.choice(["", "x", "é\n", "\x7f\x01/", "\ud83d", *NAMES]))
        count = self.random.randrange(5)
        if kind == 4:
            return self.around("[", (self.value(depth - 1) for _ in range(count)), "]")
        return self.object(depth, count)

    def object(self, depth, count):
        members = (
            f"{self.text(self.random.choice(NAMES))}{self.space()}:{self.space()}"
            f"{self.value(depth - 1)}"
            for _ in range(count)
        )
        return self.around("{", members, "}")

    def around(self, first, items, last):
        inner = ",".join(f"{self.space()}{each}{self.space()}" for each in items)
        return f"{first}{inner or self.space()}{last}"


def test_mask_leaves_what_pythons_json_leaves(client, cluster):
    # Another one in each run but those of CI.
    seed = int(os.environ.get("MASK_SEED", "") or random.randrange(1 << 32))
    writer, documents = Writer(seed), {}
    for number in range(400):
        documents[f"k{number}"] = text = writer.object(4, 6)
        cluster.upsert(f"k{number}", text.encode(errors="strict"))
    options = {"drop_fields": list(PATHS), "hash_fields": iter(HASHES), "hash_key": KEY}
    found = 0
    for batch in client.stream(until="now", **options):
        for row in batch.rows():
            before = expected = parsed(documents[row["key"]])
            for path in PATHS.values():
                expected = masked(expected, path, lambda _value: [])
            for path in HASHES.values():
                expected = masked(expected, path, lambda value: [hashed(value, KEY)])
            where = f"MASK_SEED={seed} {documents[row['key']]}"
            assert parsed(row["value"]) == expected, where
            if expected == before:
                assert row["value"].decode() == documents[row["key"]], where
            found += 1
    assert found == 400


# ----- streams -----


def write_secrets(cluster):
    """Writes documents with the secret in every way: more than one of each has to be masked."""
    whole = f'{{"p":"{SECRET}","n":1,"q":[{{"p":"{SECRET}"}}],"h":"{SECRET}"}}'
    cluster.upsert("plain", whole.encode())
    cluster.upsert("escaped", f'{{"\\u0070":"{SECRET}","p":2,"n":"x"}}'.encode())
    cluster.upsert("binary", f'{{"p":"{SECRET}"'.encode() + b"\xff")
    deep = "[" * 500
    cluster.upsert("deep", f'{{"q":{deep}{{"p":"{SECRET}"}}{deep.replace("[", "]")}}}'.encode())
    filler = ",".join(f'{{"p":"{SECRET}","n":{number}}}' for number in range(60_000))
    cluster.upsert("large", f'{{"q":[{filler}],"n":3}}'.encode())


@pytest.mark.parametrize("compressed", [False, True])
def test_masked_field_is_in_no_column(cluster, compressed):
    write_secrets(cluster)
    masks = {"drop_fields": ["p", "q.p"], "hash_fields": "h"}
    schema = "p STRING, n BIGINT, q VARIANT, h STRING"
    with cluster.connect(compressed=compressed) as client:
        for options in (
            {},
            {
                "value_format": "string",
                "document_schema": DocumentSchema(None, on_malformed="column"),
            },
            {"value_format": "variant"},
            {"document_schema": schema, "columns": "full"},
            {"document_schema": DocumentSchema(schema, on_malformed="column")},
        ):
            with client.stream(until="now", **masks, **options) as stream:
                table = pa.Table.from_batches([batch.to_pyarrow() for batch in stream])
                stats = stream.stats()
            assert len(table) == 5
            assert SECRET not in repr(table.to_pylist())
            # The binary document and the deep one; of another, a value does not fit its column.
            assert stats.malformed + stats.partly_malformed == 2 + ("n" in table.schema.names)
            rows = {row["key"]: row for row in table.to_pylist()}
            for key in ("binary", "deep"):
                assert rows[key].get("value") is None
                assert rows[key].get("_malformed") in (None, b"")
            if "value" in table.schema.names and not options:
                assert rows["plain"]["value"] == (
                    f'{{"n":1,"q":[{{}}],"h":"{hashed(SECRET)}"}}'.encode()
                )
                assert len(json.loads(rows["large"]["value"])["q"]) == 60_000
        failing = {"document_schema": DocumentSchema(None, on_malformed="fail"), **masks}
        with pytest.raises(DataError) as failed:
            list(client.stream(until="now", **failing))
        assert SECRET not in str(failed.value)


def test_partitions_and_lazy_frames_are_masked(client, cluster):
    import dcp_rs.polars

    cluster.upsert("k", {"p": SECRET, "n": 1})
    plan = client.plan(persisted_only=False)
    masks = {"drop_fields": "p"}
    rows = [
        row
        for partition in plan.partitions
        for batch in partition.open(client, **masks)
        for row in batch.rows()
    ]
    assert [row["value"] for row in rows] == [b'{"n":1}']
    lazy = dcp_rs.polars.scan(client, plan, document_schema="p STRING, n BIGINT", **masks)
    assert lazy.select("p", "n").collect().rows() == [(None, 1)]


def test_wrong_masks_are_refused_and_the_key_is_not_shown(client):
    for options, option in [
        ({"drop_fields": "a b"}, "drop_fields"),
        ({"hash_fields": ["a", "a.b"]}, "hash_fields"),
        ({"hash_key": KEY}, "hash_key"),
        ({"hash_fields": "a", "hash_key": 5}, "hash_key"),
        ({"hash_fields": "a", "hash_key": KEY[:15]}, "hash_key"),
        ({"hash_fields": 5}, "hash_fields"),
        ({"hash_fields": "a", "document_schema": "a INT"}, "hash_fields"),
        ({"drop_fields": "a", "include": "xattrs"}, "drop_fields"),
    ]:
        with pytest.raises(ConfigError) as refused:
            client.stream(**options)
        assert refused.value.option.startswith(option)
        assert KEY not in str(refused.value)


def unmatched(caplog):
    """Gives what was logged of paths that no document has, and forgets it."""
    events = [each for each in caplog.records if getattr(each, "event", None) == "mask_unmatched"]
    assert {each.levelname for each in events} <= {"WARNING"}
    assert SECRET not in caplog.text
    found = sorted(tuple(each.fields.values()) for each in events)
    caplog.clear()
    return found


def test_masked_path_that_no_document_has_is_warned_of_once(client, cluster, caplog):
    for number in range(3):
        cluster.upsert(f"k{number}", {"who": {"email": SECRET}, "tags": [], "n": None})
    cluster.upsert("binary", b"\xff")
    right = ["who.email", "tags[]", "n"]
    assert len(list(client.stream(until="now", drop_fields=right))) > 0
    assert unmatched(caplog) == []
    masks = {"drop_fields": ["who.emial", "tags[]"], "hash_fields": ["Who.email"]}
    with client.stream(until="now", **masks) as stream:
        checkpoint = stream.checkpoint()
        assert sum(len(batch) for batch in stream) == 4
    assert unmatched(caplog) == [("Who.email", 3), ("who.emial", 3)]
    assert sum(len(batch) for batch in client.stream(until="now", **masks)) == 4
    assert unmatched(caplog) == []
    # Documents that were changed since say little of fields that few have.
    with client.stream(start=checkpoint, until="now", drop_fields="rare") as stream:
        list(stream)
        later = stream.checkpoint()
    assert unmatched(caplog) == [("rare", 3)]
    cluster.upsert("k0", {"x": 1})
    assert sum(map(len, client.stream(start=later, until="now", drop_fields="scarce"))) == 1
    assert unmatched(caplog) == []


def test_masked_path_that_a_thousand_documents_lack_is_warned_of(client, cluster, caplog):
    for number in range(999):
        cluster.upsert(f"k{number}", {"who": number} | ({"last": 1} if number == 500 else {}))
    with client.stream(drop_fields=["who.emial", "last"]) as stream:
        read = 0
        while read < 999:
            read += len(stream.poll(60))
        assert unmatched(caplog) == []
        cluster.upsert("l", {"who": 5})
        assert len(stream.poll(60)) == 1
    assert unmatched(caplog) == [("who.emial", 1000)]


# ----- tables -----


@pytest.mark.parametrize("own", [{}, {"extra": "column"}])
def test_hashed_column_that_is_no_text_is_refused_before_a_table_is_made(client, tmp_path, own):
    path = tmp_path / "d.duckdb"
    options = {"hash_fields": "price", "document_schema": "price INT", "once": True, **own}
    with pytest.raises(ConfigError, match=r'"price" is hashed.*declare it STRING, not INT'):
        dcp_rs.replicate(client, f"duckdb://{path}?table=t", **options)
    assert not path.exists()


def cells(path):
    """Gives all tables of a database as text."""
    with duckdb.connect(str(path), read_only=True) as database:
        names = [
            name
            for (name,) in database.execute("SELECT table_name FROM duckdb_tables()").fetchall()
        ]
        tables = {name: database.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}
    return tables, repr(tables)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"document_schema": "infer", "extra": "column", "nested": "columns"},
        {"document_schema": "n BIGINT, h STRING", "type_conflicts": "reject", "extra": "column"},
        {"document_schema": "n BIGINT", "new_fields": "reject", "tables": "collection"},
    ],
)
def test_masked_field_reaches_no_table_reject_or_log(client, cluster, tmp_path, caplog, options):
    caplog.set_level("DEBUG")
    write_secrets(cluster)
    cluster.upsert(b"\xff", {"p": SECRET, "n": 1})
    path = tmp_path / "d.duckdb"
    table = "" if "tables" in options else "?table=t"
    done = dcp_rs.replicate(
        client,
        f"duckdb://{path}{table}",
        once=True,
        drop_fields=["p", "q.p"],
        hash_fields=["h"],
        hash_key=KEY,
        **options,
    )
    assert done.rejected >= 1
    assert done.malformed + done.rejected >= 3
    tables, text = cells(path)
    assert any(name.endswith("rejected") for name in tables)
    written = [
        *(each.read_bytes() for each in tmp_path.iterdir()),
        text.encode(),
        caplog.text.encode(),
    ]
    for secret in (SECRET, KEY):
        for form in (secret.encode(), secret.encode().hex().encode()):
            assert not any(form in each for each in written)
    if options.get("document_schema") != "n BIGINT":
        assert hashed(SECRET, KEY) in text


def test_table_that_was_masked_otherwise_is_loaded_anew(client, cluster, tmp_path):
    cluster.upsert("k", {"p": SECRET, "n": 1})
    path = tmp_path / "d.duckdb"

    def replicate(**options):
        done = dcp_rs.replicate(client, f"duckdb://{path}?table=t", once=True, **options)
        tables, text = cells(path)
        assert len(tables["t"]) == 1
        return done.generation, text

    assert SECRET in replicate()[1]
    generation, text = replicate(drop_fields="p")
    assert generation == 2
    assert SECRET not in text
    assert replicate(drop_fields=["p"])[0] == 2
    keyed = {"hash_fields": "p", "hash_key": KEY}
    assert hashed(SECRET, KEY) in replicate(**keyed)[1]
    assert replicate(**keyed)[0] == 3
    another = f"another {KEY}"
    assert hashed(SECRET, another) in replicate(**keyed | {"hash_key": another})[1]
    assert SECRET in replicate()[1]


def test_log_that_was_masked_otherwise_is_refused(client, cluster, tmp_path):
    cluster.upsert("k", {"p": SECRET, "n": 1})
    log = {"target": f"parquet://{tmp_path}/log", "mode": "log", "once": True}
    dcp_rs.replicate(client, **log, drop_fields="p")
    cluster.upsert("l", {"p": SECRET, "n": 2})
    for options in ({}, {"drop_fields": ["p", "q"]}, {"hash_fields": "p"}):
        with pytest.raises(ConfigError, match="other fields masked"):
            dcp_rs.replicate(client, **log, **options)
    dcp_rs.replicate(client, **log, drop_fields="p")
    found = pq.read_table(tmp_path / "log")
    assert sorted(filter(None, found["value"].to_pylist()))[:2] == ['{"n":1}', '{"n":2}']


def test_state_with_masks_is_refused_by_releases_that_know_none(client):
    with client.stream(until="now") as stream:
        checkpoint = stream.checkpoint()
    state = State(
        mode="table", commits=1, generation=1, complete_generation=1, checkpoint=checkpoint
    )
    assert json.loads(state.to_json())["version"] == 1
    from dataclasses import replace

    of_masks = replace(state, masks="{}").to_json()
    assert json.loads(of_masks)["version"] == 3
    assert State.from_json(of_masks).masks == "{}"
    with pytest.raises(CheckpointError, match="reads 3"):
        State.from_json(of_masks.replace('"version":3', '"version":4'))


def test_inferred_schema_has_no_masked_field(client, cluster):
    cluster.upsert("k", {"p": SECRET, "n": 1, "h": 5})
    found = dcp_rs.replication.infer_schemas(
        client, drop_fields="p", hash_fields="h", examples=True
    )
    schema = found["_default._default"]
    assert schema.document_schema == "n BIGINT, h STRING"
    assert SECRET not in repr(found)


def test_masks_of_the_command_line(cluster, tmp_path, monkeypatch, capsys):
    cluster.upsert("k", {"p": SECRET, "n": 1, "h": 5})
    monkeypatch.setenv("DCP_RS_PASSWORD", KEY[:13])
    monkeypatch.setenv("KEY_OF_HASHES", KEY)
    address = [f"{cluster.connection_string}/default", "--username", "Administrator"]
    masks = ["--drop-fields", "p", "--drop-fields", "x.y", "--hash-fields", "h"]
    masks += ["--hash-key-env", "KEY_OF_HASHES"]
    out = tmp_path / "out.jsonl"
    assert main(["export", *address, str(out), *masks]) == 0
    assert SECRET not in out.read_text()
    assert hashed(Number("5"), KEY) in out.read_text()
    assert main(["export", *address, str(out), "--force", "--drop-fields", "a b"]) != 0
    assert "--drop-fields" in capsys.readouterr().err
