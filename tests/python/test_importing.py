"""Positions of go-dcp and of the Kafka connector, as checkpoints.

The files are written as by the code of go-dcp (models/type.go, metadata/file_metadata.go,
couchbase/metadata.go) and of the connector (SourceOffset.java, CouchbaseSourceTask.java).
"""

import json
import shlex

import pytest

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.exceptions import CheckpointError, ConfigError, DcpError
from dcp_rs.importing import import_checkpoint
from reading import rows_of

UUID = "0123456789abcdef0123456789abcdef"
LARGE = 0xFEDCBA9876543210
POSITIONS = {0: (17, 10, 20, LARGE), 3: (9, 0, 9, 123456789)}


def go_dcp(positions, uuid=UUID):
    return {
        str(vbucket): {
            "checkpoint": {
                "snapshot": {"startSeqno": start, "endSeqno": end},
                "vbuuid": vbuuid,
                "seqno": seqno,
            },
            "bucketUuid": uuid,
        }
        for vbucket, (seqno, start, end, vbuuid) in positions.items()
    }


def as_documents(positions, uuid=UUID, group="group:a"):
    return [
        {"id": f"_connector:cbgo:{group}:checkpoint:{vbucket}", "cbgo": document}
        for vbucket, document in go_dcp(positions, uuid).items()
    ]


def java(number):
    return number - (1 << 64) if number >> 63 else number


def offset(seqno, start, end, vbuuid):
    return {
        "bySeqno": seqno,
        "vbuuid": java(vbuuid),
        "snapshotStartSeqno": start,
        "snapshotEndSeqno": end,
        "collectionsManifestUid": 7,
    }


def as_lines(positions, connector="couchbase-source"):
    return "".join(
        json.dumps([connector, {"bucket": "travel", "partition": str(vbucket)}])
        + f"\t{json.dumps(offset(*at))}\n"
        for vbucket, at in positions.items()
    )


def as_answer(positions):
    offsets = [
        {"partition": {"bucket": "travel", "partition": str(vbucket)}, "offset": offset(*at)}
        for vbucket, at in positions.items()
    ]
    return json.dumps({"offsets": offsets})


FORMS = {
    "file": ("go-dcp", lambda at: json.dumps(go_dcp(at), indent=2)),
    "documents": ("go-dcp", lambda at: json.dumps(as_documents(at))),
    "lines of documents": ("go-dcp", lambda at: "\n".join(map(json.dumps, as_documents(at)))),
    "topic": ("kafka-connect", as_lines),
    "answer": ("kafka-connect", as_answer),
    # As editors and shells of Windows store it.
    "marked answer": ("kafka-connect", lambda at: f"\ufeff{as_answer(at)}"),
}


def read(tmp_path, form, text, **options):
    path = tmp_path / "positions"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    made_by, _ = FORMS[form]
    return import_checkpoint(path, made_by, **options)


@pytest.mark.parametrize("form", FORMS)
def test_positions_are_the_same_to_the_last_bit(tmp_path, form):
    found = read(tmp_path, form, FORMS[form][1](POSITIONS), bucket_uuid=UUID)
    assert found.bucket_uuid == UUID
    assert {
        vbucket: (at.seqno, at.snapshot_start, at.snapshot_end, at.vbuuid)
        for vbucket, at in found.positions.items()
    } == POSITIONS
    manifest = 7 if FORMS[form][0] == "kafka-connect" else 0
    assert {at.manifest_uid for at in found.positions.values()} == {manifest}
    assert str(found.filter) == "the whole bucket without system documents"
    some = read(tmp_path, form, FORMS[form][1](POSITIONS), bucket_uuid=UUID, collection_ids=[8])
    assert some.filter.collection_ids == (8,)


@pytest.mark.parametrize("command", ["show", "reset", "copy"])
@pytest.mark.parametrize("form", FORMS)
def test_commands_of_checkpoints_say_how_to_import_one(tmp_path, form, command, capsys):
    path, (made_by, text) = tmp_path / "positions", FORMS[form]
    path.write_text(text(POSITIONS))
    to = [str(tmp_path / "to")] if command == "copy" else []
    assert main(["checkpoint", command, str(path), *to]) == 1
    said = capsys.readouterr().err
    assert f"{path} has the positions of {made_by}: make a checkpoint of them with" in said
    hint = said.partition(" with dcp-rs ")[2].replace("TO", f"{path}.new").replace("UUID", UUID)
    assert main(shlex.split(hint)) == 0
    assert main(["checkpoint", "show", f"{path}.new"]) == 0


def test_a_vbucket_that_go_dcp_has_not_read_has_no_position(tmp_path):
    positions = {**POSITIONS, 2: (0, 0, 0, 0)}
    assert set(read(tmp_path, "file", json.dumps(go_dcp(positions))).positions) == {0, 3}


def test_the_last_offset_of_the_topic_counts_and_a_null_removes_it(tmp_path):
    text = as_lines({0: (1, 1, 1, 5), 3: (1, 1, 1, 5)}) + as_lines({0: (2, 2, 2, 5)})
    text += json.dumps(["couchbase-source", {"bucket": "travel", "partition": "3"}]) + "\tnull\n"
    assert read(tmp_path, "topic", text, bucket_uuid=UUID).seqnos == {0: 2}


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_goes_on_where_the_other_client_was(tmp_path, cluster, client, fill, form):
    """Also after a rollback, which the vbuuid tells of."""
    fill(200)
    stream = client.stream(until="now")
    first = rows_of(stream)
    kept = stream.checkpoint()
    positions = {
        vbucket: (at.seqno, at.snapshot_start, at.snapshot_end, at.vbuuid)
        for vbucket, at in kept.positions.items()
        if at.seqno
    }
    text = FORMS[form][1](positions).replace(UUID, client.bucket_uuid)
    start = read(tmp_path, form, text, bucket_uuid=client.bucket_uuid)
    assert len(first) == 200
    assert rows_of(client.stream(start=start, until="now")) == []
    cluster.upsert("later", b"{}")
    assert [row["key"] for row in rows_of(client.stream(start=start, until="now"))] == ["later"]
    vbucket = next(iter(positions))
    cluster.roll_back(vbucket, 0)
    found = rows_of(client.stream(start=start, until="now"))
    assert ("rollback", vbucket, 0) in {(row["op"], row["vbucket"], row["seqno"]) for row in found}


HOSTILE = {
    "file": [
        *(b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"0":1}', b'{"x":{}}'),
        *(json.dumps(go_dcp({vb: POSITIONS[0]})) for vb in ("-1", "1024", "9" * 5000, "01", "²")),
        *(json.dumps(go_dcp({0: at})) for at in [(5, 6, 9, 1), (5, 1, 4, 1), (5, 5, 5, 0)]),
        *(json.dumps(go_dcp({0: (n, 0, 9, 1)})) for n in (1.0, True, None, -1, 1 << 64, "1")),
        json.dumps(go_dcp(POSITIONS, "no uuid")),
        json.dumps(go_dcp({0: (1, 1, 1, 1)}) | go_dcp({1: (1, 1, 1, 1)}, "f" * 32)),
    ],
    "documents": [
        json.dumps(as_documents({0: (1, 1, 1, 1)}) * 2),
        json.dumps(as_documents({0: (1, 1, 1, 1)}) + as_documents({1: (1, 1, 1, 1)}, group="b")),
        json.dumps([{"id": "airline_10", "cbgo": {}}]),
        "[1]",
    ],
    "topic": [
        *("x", "[1]\t{}", '["a",{"bucket":"b","partition":"1"}]', '["a",1]\t{}'),
        as_lines({0: (1, 1, 1, 1)}) + as_lines({1: (1, 1, 1, 1)}, "another"),
        '["a",{"bucket":"b","partition":"1"}]\t{"bySeqno":5}',
        '["a",{"bucket":"b","partition":"1"}]\t{"bySeqno":9223372036854775808,"vbuuid":1}',
    ],
    "answer": ['{"offsets":1}', '{"offsets":[{}]}', '{"offsets":[{"partition":1,"offset":1}]}'],
}


@pytest.mark.parametrize(
    ("form", "text"), [(form, text) for form, texts in HOSTILE.items() for text in texts], ids=str
)
def test_a_damaged_file_is_refused(tmp_path, form, text):
    with pytest.raises(CheckpointError, match="cannot be imported"):
        read(tmp_path, form, text, bucket_uuid=UUID)


def test_wrong_arguments_are_refused(tmp_path):
    text = as_lines(POSITIONS)
    with pytest.raises(ConfigError, match=r"bucket_uuid: is needed.* dcp-rs doctor prints it"):
        read(tmp_path, "topic", text)
    for offsets in (text, as_answer(POSITIONS)):
        with pytest.raises(
            CheckpointError, match="offsets of Kafka Connect: import them as kafka-"
        ):
            read(tmp_path, "file", offsets)
    with pytest.raises(CheckpointError, match="has no offsets: is it of go-dcp"):
        read(tmp_path, "answer", json.dumps(go_dcp(POSITIONS)))
    with pytest.raises(ConfigError, match="bucket_uuid: is not 32"):
        read(tmp_path, "topic", text, bucket_uuid="x")
    with pytest.raises(CheckpointError, match="belong to the bucket"):
        read(tmp_path, "file", json.dumps(go_dcp(POSITIONS)), bucket_uuid="f" * 32)
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_checkpoint(tmp_path / "none", "go-dcp")
    with pytest.raises(DcpError):
        import_checkpoint(tmp_path / "none", "debezium")
    for ids, why in [(8, "a list of numbers, not int"), ([], "names no"), (["8"], "a whole")]:
        with pytest.raises(ConfigError, match=f"collection_ids: .*{why}"):
            read(tmp_path, "topic", text, bucket_uuid=UUID, collection_ids=ids)


def test_the_command_writes_a_checkpoint_that_it_shows(tmp_path, capfd):
    stored, to = tmp_path / "stored", tmp_path / "positions.json"
    stored.write_text(json.dumps(go_dcp(POSITIONS)))

    command = ["checkpoint", "import", str(stored), str(to), "--from", "go-dcp"]
    assert main([*command, "--collection-id", "0x8"]) == 0
    assert json.loads(capfd.readouterr().out) == {"file": str(to), "vbuckets": [0, 3]}
    assert dcp_rs.Checkpoint.load(to).seqnos == {0: 17, 3: 9}
    assert main(command) == 1
    assert "already exists" in capfd.readouterr().err
    assert main([*command, "--force"]) == 0
    assert main([*command, "--force", "--collection-id", "x"]) != 0


def test_the_example_of_the_help_is_taken(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offsets.json").write_text(as_answer(POSITIONS))
    assert main(["checkpoint", "import", "--help"]) == 0
    example = capfd.readouterr().out.replace("\\\n", "").splitlines()[-1]
    assert main(shlex.split(example)[1:]) == 0
    command = ["checkpoint", "import", "offsets.json", "to.json", "--from", "kafka-connect"]
    assert main(command) == 1
    assert "dcp-rs: --bucket-uuid: is needed" in capfd.readouterr().err
