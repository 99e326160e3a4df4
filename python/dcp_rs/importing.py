"""Positions that other clients have stored, as checkpoints.

go-dcp stores, for each vBucket, its position and the UUID of the bucket: in a file, or in extended
attributes of documents. The Kafka connector gives its positions to Kafka Connect.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcp_rs import _checks, _keywords
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LARGEST_FILE = 64 << 20
_U64 = (1 << 64) - 1
# No bucket has more vBuckets.
_LAST = 1023
_UUID = re.compile("[0-9a-f]{32}")
_GO_DCP_KEY = re.compile(r"_connector:cbgo:(.*):checkpoint:(\d{1,5})")


class _Position(NamedTuple):
    seqno: int
    start: int
    end: int
    vbuuid: int
    manifest: int


@_keywords.checked
def import_checkpoint(
    path: str | os.PathLike[str],
    made_by: Literal["go-dcp", "kafka-connect"],
    *,
    bucket_uuid: str | None = None,
    collection_ids: Iterable[int] | None = None,
) -> Checkpoint:
    """Reads the positions that another client has stored.

    Args:
        path: For `go-dcp` its file, or what a query returns of its documents: objects with `id`
            and `cbgo`, as an array or one in each line. For `kafka-connect` what Connect's REST
            interface returns for `/connectors/<name>/offsets`, or lines of its topic of offsets,
            each with a key, a tab and a value, of which the last of each key counts.
        made_by: The client.
        bucket_uuid: UUID of the bucket, as `dcp_rs.Client.bucket_uuid`. The Kafka connector stores
            none. If another one is stored, the file is refused.
        collection_ids: IDs of the collections, as `dcp_rs.Client.collections` returns them, if the
            client read only some: a stream from the checkpoint cannot have others.

    Raises:
        CheckpointError: The file cannot be read or is damaged, or is of several buckets or
            connectors, or a position has no vbuuid.
        ConfigError: `bucket_uuid` is missing, or an argument is wrong.
    """
    _checks.path("path", path)
    _checks.word("made_by", made_by, ("go-dcp", "kafka-connect"))
    if bucket_uuid is not None:
        _checks.text("bucket_uuid", bucket_uuid)
        if _UUID.fullmatch(bucket_uuid) is None:
            raise ConfigError("is not 32 hexadecimal digits", option="bucket_uuid")
    text = _text_of(path)
    if made_by == "go-dcp":
        positions, stored = _of_go_dcp(text)
        if positions and bucket_uuid is not None and bucket_uuid != stored:
            raise CheckpointError(f"the positions belong to the bucket {stored}, not {bucket_uuid}")
        bucket_uuid = stored
    else:
        positions = _of_kafka_connect(text)
        if bucket_uuid is None:
            raise ConfigError(
                "is needed, as Kafka Connect does not store it: dcp-rs doctor prints it, and"
                " Client.bucket_uuid has it",
                option="bucket_uuid",
            )
    if not positions:
        raise _damaged("it has no position")
    return _checkpoint(positions, bucket_uuid, collection_ids)


def client_of(path: str | os.PathLike[str]) -> Literal["go-dcp", "kafka-connect"] | None:
    """Returns the client that has stored the positions in a file; `None` if it is neither."""
    with suppress(CheckpointError):
        text = _text_of(path)
        with suppress(CheckpointError):
            if _of_go_dcp(text)[0]:
                return "go-dcp"
        if _of_kafka_connect(text):
            return "kafka-connect"
    return None


def _checkpoint(
    positions: dict[int, _Position], bucket_uuid: str, collection_ids: Iterable[int] | None
) -> Checkpoint:
    made_with: dict[str, object] = {}
    if collection_ids is not None:
        ids = _checks.items("collection_ids", collection_ids, "a list of numbers")
        if not ids:
            raise ConfigError("names no collection", option="collection_ids")
        for each in ids:
            _checks.integer("collection_ids", each, 0, 0xFFFF_FFFF)
            made_with.setdefault("collections", []).append(f"{each:08x}")  # type: ignore[attr-defined]
    content = {
        "bucket_uuid": bucket_uuid,
        "filter": made_with | {"system_documents": False},
        "positions": {
            str(vbucket): {
                "seqno": at.seqno,
                "snapshot": [at.start, at.end],
                # Where its branch begins is not stored.
                "failover_log": [[f"{at.vbuuid:016x}", 0]],
                "manifest": f"{at.manifest:016x}",
                "purge_seqno": 0,
                "epoch": 0,
            }
            for vbucket, at in sorted(positions.items())
        },
    }
    compact = json.dumps(content, separators=(",", ":"))
    crc32 = f"{zlib.crc32(compact.encode()):08x}"
    return Checkpoint.from_json(
        f'{{"format":"dcp_rs checkpoint","version":3,"crc32":"{crc32}","content":{compact}}}'
    )


# ----- go-dcp -----


def _of_go_dcp(text: str) -> tuple[dict[int, _Position], str]:
    positions, uuids = {}, set()
    for name, document in _documents_of_go_dcp(text):
        vbucket = _vbucket(name)
        if vbucket in positions:
            raise _damaged(f"vBucket {vbucket} has two positions")
        uuid = _member(document, "bucketUuid", vbucket)
        if not isinstance(uuid, str) or _UUID.fullmatch(uuid) is None:
            raise _damaged(f"bucketUuid of vBucket {vbucket} is not 32 hexadecimal digits")
        uuids.add(uuid)
        stored = _member(document, "checkpoint", vbucket)
        snapshot = _member(stored, "snapshot", vbucket)
        at = _Position(
            _unsigned(_member(stored, "seqno", vbucket), vbucket),
            _unsigned(_member(snapshot, "startSeqno", vbucket), vbucket),
            _unsigned(_member(snapshot, "endSeqno", vbucket), vbucket),
            _unsigned(_member(stored, "vbuuid", vbucket), vbucket),
            0,
        )
        positions[vbucket] = at
    if len(uuids) > 1:
        raise _damaged(f"its positions are of {len(uuids)} buckets")
    # What go-dcp stores of a vBucket that it has not read.
    read = {vb: at for vb, at in positions.items() if at.seqno or at.vbuuid}
    return _checked(read), next(iter(uuids), "")


def _documents_of_go_dcp(text: str) -> Iterator[tuple[str, object]]:
    if text.partition("\n")[0].count("\t") == 1 and text.startswith("["):
        raise _of_kafka()
    found = _json_of(text)
    if isinstance(found, dict) and isinstance(found.get("offsets"), list):
        raise _of_kafka()
    if isinstance(found, dict) and not {"id", "cbgo"} <= found.keys():
        yield from found.items()
        return
    groups = set()
    for each in found if isinstance(found, list) else [found]:
        name = _GO_DCP_KEY.fullmatch(str(each.get("id"))) if isinstance(each, dict) else None
        if name is None or "cbgo" not in each:
            raise _damaged("an object has no id of a checkpoint of go-dcp, or no cbgo")
        groups.add(name[1])
        if len(groups) > 1:
            raise _damaged("it has positions of several groups: leave those of one")
        yield name[2], each["cbgo"]


# ----- Kafka Connect -----


def _of_kafka_connect(text: str) -> dict[int, _Position]:
    positions: dict[int, _Position | None] = {}
    owners = set()
    for partition, offset in _offsets_of_kafka_connect(text):
        name, source = partition
        if not isinstance(source, dict) or "bucket" not in source or "partition" not in source:
            raise _damaged("a partition is not one of the Couchbase connector")
        vbucket = _vbucket(source["partition"])
        owners.add((name, str(source["bucket"]), str(source.get("connector"))))
        if len(owners) > 1:
            raise _damaged("it has offsets of several connectors or buckets: leave those of one")
        positions[vbucket] = None if offset is None else _of_offset(offset, vbucket)
    return _checked({vb: at for vb, at in positions.items() if at is not None})


def _of_offset(offset: object, vbucket: int) -> _Position:
    seqno = _signed(_member(offset, "bySeqno", vbucket), vbucket)
    members: Any = offset  # an object, since it has a member

    def optional(name: str, default: int) -> int:
        return _signed(members.get(name, default), vbucket)

    return _Position(
        seqno,
        optional("snapshotStartSeqno", seqno),
        optional("snapshotEndSeqno", seqno),
        optional("vbuuid", 0),
        optional("collectionsManifestUid", 0),
    )


def _offsets_of_kafka_connect(text: str) -> Iterator[tuple[tuple[object, object], object]]:
    if text.lstrip().startswith("{"):
        answer = _json_of(text)
        offsets = answer.get("offsets") if isinstance(answer, dict) else None
        if not isinstance(offsets, list):
            raise _damaged("it has no offsets: is it of go-dcp?")
        for each in offsets:
            if not isinstance(each, dict) or not {"partition", "offset"} <= each.keys():
                raise _damaged("an offset has no partition")
            yield (None, each["partition"]), each["offset"]
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        key, tab, value = line.partition("\t")
        name = _json_of(key)
        if not tab or not isinstance(name, list) or len(name) != 2:
            raise _damaged(f"line {number} has no key and value with a tab between them")
        yield (str(name[0]), name[1]), _json_of(value)


# ----- both -----


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise _damaged("it is larger than 64 MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _damaged("it is not UTF-8 text: the file of a standalone Connect cannot be read, "
                       "but its REST interface returns the offsets") from error  # fmt: skip


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _damaged("it is nested too deeply") from error
    except ValueError as error:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise _damaged("it is not JSON") from error


def _vbucket(name: object) -> int:
    text = str(name)
    if not text.isascii() or not text.isdigit() or str(int(text[:6])) != text or int(text) > _LAST:
        raise _damaged(f"{text[:20]!r} is no vBucket")
    return int(text)


def _member(document: object, name: str, vbucket: int) -> Any:
    if not isinstance(document, dict) or name not in document:
        raise _damaged(f"vBucket {vbucket} has no {name}")
    return document[name]


def _unsigned(number: object, vbucket: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _U64:
        raise _damaged(f"a number of vBucket {vbucket} is not one of 64 bits")
    return number


def _signed(number: object, vbucket: int) -> int:
    """Returns a number that Java has written, which has no unsigned ones."""
    if isinstance(number, int) and not isinstance(number, bool) and -(1 << 63) <= number < 0:
        return number & _U64
    found = _unsigned(number, vbucket)
    if found >> 63:
        raise _damaged(f"a number of vBucket {vbucket} is not one of 64 bits")
    return found


def _checked(positions: dict[int, _Position]) -> dict[int, _Position]:
    for vbucket, at in positions.items():
        if not at.start <= at.seqno <= at.end:
            raise _damaged(f"the seqno of vBucket {vbucket} lies outside its snapshot")
        if not at.vbuuid:
            raise _damaged(
                f"vBucket {vbucket} has no vbuuid, so that a rollback would not be noticed: read "
                "from the beginning"
            )
    return positions


def _of_kafka() -> CheckpointError:
    return _damaged("they are offsets of Kafka Connect: import them as kafka-connect")


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"the positions cannot be imported: {what}")
