"""Where a stream begins, and its vBuckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dcp_rs import _checks
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.stores import CheckpointStore, FileStore, SharedStore


class Beginning:
    """The start and vBuckets that `start`, `default` and `member` select.

    Raises:
        ConfigError: One of them is wrong.
    """

    def __init__(self, start: object, default: object, member: object) -> None:
        _checks.word("default", default, ("earliest", "latest"))
        # Before the stores: a checkpoint has `save` and `load` as well.
        is_store = isinstance(start, CheckpointStore) and not isinstance(start, Checkpoint)
        self.store = cast("CheckpointStore", start) if is_store else None
        if default != "earliest" and self.store is None:
            raise ConfigError(
                "default: applies only to an empty store: pass a store as start, or "
                f"start={default!r}"
            )
        self._member = None if member is None else _pair(member)
        if self._member and self.store is not None and not isinstance(self.store, SharedStore):
            raise ConfigError(
                "member: the store must be a dcp_rs.SharedStore, which members can share: use "
                "dcp_rs.FileStore, dcp_rs.SqlStore or dcp_rs.ObjectStore"
            )
        self._start, self._default = start, default

    def of(
        self, options: Mapping[str, Any], num_vbuckets: int, bucket_uuid: str
    ) -> dict[str, object]:
        """Returns the engine's `start` and `vbuckets`; claims the vBuckets in a store.

        Raises:
            CheckpointError: The store cannot be read or written.
            ConfigError: `member` does not fit the bucket.
        """
        given: dict[str, object] = {}
        vbuckets = options["vbuckets"]
        if self._member is not None:
            if vbuckets is not None:
                raise ConfigError("member, vbuckets: give one of them")
            vbuckets = given["vbuckets"] = _share(*self._member, num_vbuckets)
        given["start"] = self._start
        if isinstance(self._start, Checkpoint):
            # Otherwise, its positions of other members' vBuckets would be saved.
            part = self._start.restricted_to(vbuckets) if self._member else self._start
            given["start"] = part._inner  # noqa: SLF001 - the package's own
        elif self.store is not None:
            stored = self._stored(vbuckets, options["until"], num_vbuckets)
            if isinstance(stored, Checkpoint):
                _check_bucket(self.store, stored, bucket_uuid)
                stored = stored._inner  # noqa: SLF001 - the package's own
            given["start"] = stored
        return given

    def _stored(self, vbuckets: list[int] | None, until: object, num_vbuckets: int) -> object:
        if isinstance(self.store, SharedStore):
            read = range(num_vbuckets) if vbuckets is None else vbuckets
            if isinstance(until, Mapping):
                read = [vbucket for vbucket in read if vbucket in until]
            stored = self.store.claim(read)
        else:
            stored = cast("CheckpointStore", self.store).load()
        if stored is None:
            return self._default
        if not isinstance(stored, Checkpoint):
            raise _checks.wrong_type("start: load() of the store", stored, "a Checkpoint or None")
        # The store may have newer positions of vBuckets that others read.
        if not len(stored) and self._default == "latest":
            return self._default
        return stored


def _check_bucket(store: object, stored: Checkpoint, bucket_uuid: str) -> None:
    """Refuses another bucket's checkpoint, by the name of its file; the engine does not know it."""
    if isinstance(store, FileStore) and stored.bucket_uuid != bucket_uuid:
        error = CheckpointError(
            f"{store.path}: the checkpoint belongs to another bucket (uuid {stored.bucket_uuid}, "
            f"this one has {bucket_uuid}): if the bucket was recreated, delete the file to read "
            "from the beginning"
        )
        error.code = "checkpoint"
        raise error


def _pair(member: object) -> tuple[int, int]:
    expected = "a pair such as (0, 3): which reader, from 0, of how many"
    if not isinstance(member, tuple | list) or len(member) != 2:
        raise _checks.wrong_type("member", member, expected)
    for number in member:
        _checks.integer("member", number, 0, 0xFFFF)
    which, many = member
    if which >= many:
        raise ConfigError(
            f"member: ({which}, {many}) is not a reader of {many}: readers are counted from 0"
        )
    return which, many


def _share(which: int, many: int, num_vbuckets: int) -> list[int]:
    if many > num_vbuckets:
        raise ConfigError(
            f"member: {many} readers are too many: the bucket has only {num_vbuckets} vBuckets"
        )
    return list(range(which * num_vbuckets // many, (which + 1) * num_vbuckets // many))
