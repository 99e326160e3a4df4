"""Checkpoints in object storage."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dcp_rs import _checks, _obstore
from dcp_rs._claims import Claims, joined, read_owners, write_owners
from dcp_rs._libraries import require
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from obstore import UpdateVersion

_FORMAT = "dcp_rs positions"
_VERSION = 1

# vBuckets that share an object: a bucket with 1,024 has 16 of them.
_VBUCKETS_PER_OBJECT = 64

# How long to retry a write that loses against other writers.
_CONTENDED_SECONDS = 30.0


@dataclass(frozen=True)
class _Shard:
    """The contents and the version of an object: `None` if there is no object."""

    version: UpdateVersion | None
    owners: dict[int, str]
    checkpoint: Checkpoint | None


class ObjectStore:
    """Keeps a checkpoint in objects of S3, Google Cloud Storage or Azure, 64 vBuckets in each.

    Every write is conditional: it succeeds only if the object is still the version that it was
    based on. Readers can share a prefix, each with its own vBuckets. A stream that starts from the
    store, or otherwise its first save, takes over its vBuckets; after that, saves of their previous
    reader fail.

    It needs `pip install "dcp-rs[object-store]"` and a storage with conditional writes. Not all
    S3-compatible servers support these: the guide shows how to test yours.

        >>> import dcp_rs, obstore.store
        >>> bucket = obstore.store.MemoryStore()  # or S3Store("bucket", ...)
        >>> dcp_rs.ObjectStore(bucket, "positions/orders").load() is None
        True

    Args:
        store: A store of the library `obstore`, which handles credentials and retries.
        prefix: Prefix of the objects' names; use a different one for each checkpoint.

    Raises:
        ConfigError: An argument is wrong, or obstore is too old.
        ImportError: obstore is not installed.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        obstore = require("ObjectStore", "obstore", "object-store")
        if isinstance(store, obstore.store.LocalStore):
            raise ConfigError(
                "files cannot be written conditionally: use dcp_rs.FileStore", option="store"
            )
        if not type(store).__module__.startswith("obstore"):
            raise _checks.wrong_type("store", store, "a store of obstore")
        _checks.text("prefix", prefix)
        if not prefix.strip("/"):
            raise ConfigError("must not be empty", option="prefix")
        self._store = store
        self._prefix = prefix.strip("/")
        self._claims = Claims()
        self._seen: dict[int, _Shard] = {}

    @property
    def _obstore(self) -> Any:
        """The library. Not an attribute, because a module cannot be pickled."""
        import obstore

        return obstore

    @property
    def prefix(self) -> str:
        """Prefix of the objects' names."""
        return self._prefix

    def load(self) -> Checkpoint | None:
        """Reads all objects; `None` if there are none.

        Raises:
            CheckpointError: An object cannot be read or is damaged.
        """
        with _Failing(self._prefix, "read"):
            pages = [*self._obstore.list(self._store, self._prefix)]
        found: Checkpoint | None = None
        for each in itertools.chain.from_iterable(pages):
            name = re.fullmatch(r"(\d{4})\.json", each["path"].rpartition("/")[2])
            if name is None:
                continue
            checkpoint = self._get(int(name[1])).checkpoint
            if checkpoint is not None:
                found = checkpoint if found is None else found.merged_with(checkpoint)
        return found

    def claim(self, vbuckets: Iterable[int]) -> Checkpoint | None:
        """Takes over vBuckets and returns their stored positions, or `None` if there are none.

        Raises:
            CheckpointError: An object cannot be read or written, or is damaged.
        """
        found: Checkpoint | None = None
        for number, wanted in _by_shard(_checks.vbuckets(vbuckets)).items():
            # The cached state may be outdated: a claim must not use it.
            self._seen.pop(number, None)

            def take(shard: _Shard, own: list[int] = wanted) -> _Shard:
                return self._owning(shard, own)

            shard = self._change(number, take)
            self._claims.vbuckets.update(wanted)
            if shard.checkpoint is not None:
                part = shard.checkpoint.restricted_to(wanted)
                found = part if found is None else found.merged_with(part)
        return found

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the objects whose positions have moved, and checks the owners of only those.

        Each object is written atomically. After a crash between two objects, some vBuckets have
        their new position and others the old one; either is correct.

        Raises:
            TakenOverError: Another reader has taken over one of the vBuckets. Its object was not
                written.
            CheckpointError: An object cannot be written, or another reader has saved a later
                position.
        """
        _checks.instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        for number, vbuckets in _by_shard(checkpoint.seqnos).items():
            part = checkpoint.restricted_to(vbuckets)

            def put(shard: _Shard, part: Checkpoint = part, own: list[int] = vbuckets) -> _Shard:
                self._claims.check(shard.owners, self._prefix, own)
                return self._owning(replace(shard, checkpoint=joined(shard.checkpoint, part)), own)

            self._change(number, put)
            self._claims.vbuckets.update(vbuckets)

    def _owning(self, shard: _Shard, vbuckets: list[int]) -> _Shard:
        return replace(shard, owners=shard.owners | dict.fromkeys(vbuckets, self._claims.token))

    def _change(self, number: int, change: Callable[[_Shard], _Shard]) -> _Shard:
        """Replaces an object with the result of `change` for its newest version."""
        end, wait = time.monotonic() + _CONTENDED_SECONDS, 0.01
        shard = self._seen.get(number) or self._get(number)
        while True:
            changed = change(shard)
            if changed == shard:
                return shard
            version = self._put(number, changed)
            if version is not None:
                self._seen[number] = replace(changed, version=version)
                return self._seen[number]
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{self._name(number)}: other writers won for {_CONTENDED_SECONDS:g} s: check "
                    "that the storage supports conditional writes, and that few readers share it"
                )
            time.sleep(wait * random.random())  # noqa: S311 - to part those that collide
            wait = min(2 * wait, 1.0)
            shard = self._get(number)

    def _get(self, number: int) -> _Shard:
        name = self._name(number)
        with _Failing(name, "read"):
            try:
                found = self._obstore.get(self._store, name)
                data = bytes(found.bytes())
            except FileNotFoundError:
                return _Shard(None, {}, None)
        self._seen[number] = _parse(name, data, _version_of(found.meta))
        return self._seen[number]

    def _put(self, number: int, shard: _Shard) -> UpdateVersion | None:
        """Returns the version that was written; `None` if another writer was faster."""
        name = self._name(number)
        checkpoint = None if shard.checkpoint is None else json.loads(shard.checkpoint.to_json())
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "owners": write_owners(shard.owners),
            "checkpoint": checkpoint,
        }
        mode: Literal["create"] | UpdateVersion = (
            "create" if shard.version is None else shard.version
        )
        errors = self._obstore.exceptions
        with _Failing(name, "written"):
            try:
                done = self._obstore.put(
                    self._store, name, json.dumps(document).encode(), mode=mode, use_multipart=False
                )
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return None
        return _version_of(done)

    def _name(self, number: int) -> str:
        return f"{self._prefix}/{number:04}.json"

    def __repr__(self) -> str:
        return f"<dcp_rs.ObjectStore {self._prefix!r} in {type(self._store).__name__}>"


class _Failing:
    """Converts errors of the storage to `CheckpointError`.

    Raises:
        ForkedProcessError: obstore was used before a fork, and would hang.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what

    def __enter__(self) -> None:
        _obstore.use()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        from obstore.exceptions import BaseError

        if isinstance(error, BaseError):
            raise CheckpointError(f"{self._name} could not be {self._what}: {error}") from error


def _version_of(meta: Any) -> UpdateVersion:
    """Identifies the version to replace: obstore accepts no `None`."""
    version: UpdateVersion = {}
    if meta.get("e_tag") is not None:
        version["e_tag"] = meta["e_tag"]
    if meta.get("version") is not None:
        version["version"] = meta["version"]
    return version


def _parse(name: str, data: bytes, version: UpdateVersion) -> _Shard:
    try:
        document = json.loads(data)
        found = (document["format"], document["version"])
        owners, kept = read_owners(document["owners"]), document["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name}: is damaged") from error
    if found != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{name}: is not {_FORMAT} of version {_VERSION}: a newer release may have written it"
        )
    checkpoint = None if kept is None else Checkpoint.from_json(json.dumps(kept))
    return _Shard(version, owners, checkpoint)


def _shard_of(vbucket: int) -> int:
    return vbucket // _VBUCKETS_PER_OBJECT


def _by_shard(vbuckets: Iterable[int]) -> dict[int, list[int]]:
    shards: dict[int, list[int]] = {}
    for each in sorted(vbuckets):
        shards.setdefault(_shard_of(each), []).append(each)
    return shards
