"""Delta tables of tests, and what others do to them."""

import json
import struct
from pathlib import Path

import deltalake
import pyarrow as pa

import dcp_rs
import replicas

BINARY = b"\xff\xfe"


def fill(written, count=20, value=0):
    for n in range(count):
        written.upsert(f"key_{n}", {"n": value + n}, (None, "inventory.hotel")[n % 2])


def replicate(cluster, replica, **options):
    with cluster.connect() as client:
        given = {"mode": replica.mode, "once": True} | options
        return dcp_rs.replicate(client, given.pop("target", replica.url), **given)


def delta(replica, version=None):
    return deltalake.DeltaTable(str(replica.folder), version=version)


def rejects(replica):
    folder = f"{replica.folder}_rejected"
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder))
    found = pa.table(query.execute("SELECT * FROM t")).to_pylist()
    return sorted((row["key"], row["op"], row["reason"]) for row in found)


def data_files(folder):
    return {path.name for path in Path(folder).rglob("part-*.parquet")}


def named_files(replica):
    """Files that any version of a table has."""
    return {
        Path(action["add"]["path"]).name
        for file in (replica.folder / "_delta_log").glob("*.json")
        for action in map(json.loads, file.read_text().splitlines())
        if "add" in action
    }


def replicas_at(folder):
    replica = replicas.InDelta(folder)
    replica.folder, replica.url = folder, f"delta://{folder}"
    return replica


def documents(replica):
    """The documents of a table; or of a log, without the rows that others have added."""
    if replica.mode == "table":
        return replica.documents()
    return replicas.settle([row for row in replica.rows() if row["key"] != "of others"])


def commit_as_spark(replica, *, protocol=None, properties=None, fields=()):
    """Changes the metadata of a table in ways that deltalake does not offer."""
    log = replica.folder / "_delta_log"
    files = sorted(log.glob("*.json"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    metadata = [line["metaData"] for line in lines if "metaData" in line][-1]
    metadata["configuration"] |= properties or {}
    schema = json.loads(metadata["schemaString"])
    schema["fields"] += fields
    metadata["schemaString"] = json.dumps(schema)
    actions = [
        {"commitInfo": {"timestamp": 1, "operation": "CHANGE COLUMN"}},
        {"metaData": metadata},
    ]
    if protocol is not None:
        actions.append({"protocol": protocol})
    path = log / f"{delta(replica).version() + 1:020}.json"
    path.write_text("\n".join(map(json.dumps, actions)))


def column(name, kind="integer", *, nullable=True, **notes):
    return {"name": name, "type": kind, "nullable": nullable, "metadata": notes}


def legacy(writer):
    return {"minReaderVersion": 1, "minWriterVersion": writer}


def features(*names):
    return {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": list(names)}


def block(replica, target, name, *, suffix=""):
    """Has the log of a table be a file, to which nothing can be added, while it is written."""
    log = Path(f"{replica.folder}{suffix}", "_delta_log")
    inner = getattr(target, name)

    def write(*given, **named):
        log.rename(log.with_name("_moved"))
        log.touch()
        try:
            return inner(*given, **named)
        finally:
            log.unlink()
            log.with_name("_moved").rename(log)

    setattr(target, name, write)


def delete_by_vector(replica):
    """Deletes the first row of a file as Spark does, with a deletion vector."""
    table = delta(replica)
    log = replica.folder / "_delta_log"
    name = Path(table.file_uris()[0]).name
    lines = [
        json.loads(line) for file in log.glob("*.json") for line in file.read_text().splitlines()
    ]
    (add,) = [line["add"] for line in lines if line.get("add", {}).get("path") == name]
    # A bitmap of the number 0, as a portable Roaring bitmap in an array of such.
    bitmap = struct.pack("<IQIIIHHIH", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 0)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": _z85(bitmap),
        "sizeInBytes": len(bitmap),
        "cardinality": 1,
    }
    remove = {key: add[key] for key in ("path", "partitionValues", "size")}
    actions = [
        {"commitInfo": {"timestamp": 1, "operation": "DELETE", "operationParameters": {}}},
        {"protocol": features("deletionVectors")
         | {"minReaderVersion": 3, "readerFeatures": ["deletionVectors"]}},
        {"remove": remove | {"dataChange": True, "deletionTimestamp": 1}},
        {"add": add | {"deletionVector": vector}},
    ]  # fmt: skip
    path = log / f"{table.version() + 1:020}.json"
    path.write_text("\n".join(map(json.dumps, actions)))


def _z85(data):
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    data += bytes(-len(data) % 4)
    text = ""
    for place in range(0, len(data), 4):
        number = int.from_bytes(data[place : place + 4])
        text += "".join(digits[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text
