"""Where a stream begins, and its vBuckets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from dcp_rs import _checks
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.options import Share
from dcp_rs.stores import CheckpointStore, FileStore, SharedStore


class StreamStart:
    """The start that `start` and `default` select.

    Raises:
        ConfigError: One of them is wrong.
    """

    def __init__(self, start: object, default: object) -> None:
        _checks.word("default", default, ("earliest", "latest"))
        # Before the stores: a checkpoint has `save` and `load` as well.
        is_store = isinstance(start, CheckpointStore) and not isinstance(start, Checkpoint)
        self.store = cast("CheckpointStore", start) if is_store else None
        if default != "earliest" and self.store is None:
            raise ConfigError(
                f"applies only to an empty store: start from a store, or at {default!r}",
                option="default",
            )
        if isinstance(start, os.PathLike):
            # A file to read only once, or one to go on from: only the caller knows.
            path = os.fspath(start)
            raise ConfigError(
                "must be 'earliest', 'latest', a Checkpoint or a CheckpointStore, not"
                f" {type(start).__name__}: read on from a file with dcp_rs.FileStore({path!r})",
                option="start",
            )
        self._start, self._default = start, default
        self._is_share = False

    @property
    def takes_over(self) -> bool:
        """Whether `start_of` takes vBuckets over from another reader."""
        return isinstance(self.store, SharedStore)

    def vbuckets_of(self, vbuckets: object, num_vbuckets: int) -> object:
        """Returns the vBuckets of a `Share`; anything else unchanged.

        Raises:
            ConfigError: The store cannot be shared, or there are more members than vBuckets.
        """
        if isinstance(vbuckets, str):
            raise _checks.wrong_type("vbuckets", vbuckets, f"{_checks.VBUCKETS}, or a Share")
        if not isinstance(vbuckets, Share):
            return vbuckets
        if self.store is not None and not self.takes_over:
            raise ConfigError(
                "a Share needs a dcp_rs.SharedStore, which members can share: use "
                "dcp_rs.FileStore, dcp_rs.SqlStore or dcp_rs.ObjectStore",
                option="vbuckets",
            )
        self._is_share = True
        return vbuckets.vbuckets(num_vbuckets)

    def start_of(self, options: Mapping[str, Any], num_vbuckets: int, bucket_uuid: str) -> object:
        """Returns the engine's `start`; claims the vBuckets in a store.

        Raises:
            CheckpointError: The store cannot be read or written.
        """
        vbuckets = options["vbuckets"]
        if isinstance(self._start, Checkpoint):
            # Otherwise, its positions of other members' vBuckets would be saved.
            part = self._start.restricted_to(vbuckets) if self._is_share else self._start
            _check_bucket(part, bucket_uuid)
            return part._inner  # noqa: SLF001 - the package's own
        if self.store is None:
            return self._start
        stored = self._stored(vbuckets, options["until"], num_vbuckets)
        if not isinstance(stored, Checkpoint):
            return stored
        _check_bucket(stored, bucket_uuid, self.store)
        return stored._inner  # noqa: SLF001 - the package's own

    def _stored(self, vbuckets: Iterable[int] | None, until: object, num_vbuckets: int) -> object:
        if isinstance(self.store, SharedStore):
            read = range(num_vbuckets) if vbuckets is None else list(vbuckets)
            if isinstance(until, Mapping):
                read = [vbucket for vbucket in read if vbucket in until]
            stored = self.store.claim(read)
        else:
            stored = cast("CheckpointStore", self.store).load()
        if stored is None:
            return self._default
        if not isinstance(stored, Checkpoint):
            raise ConfigError(
                "load() of the store must return a Checkpoint or None, not"
                f" {type(stored).__name__}",
                option="start",
            )
        # The store may have newer positions of vBuckets that others read.
        if not len(stored) and self._default == "latest":
            return self._default
        return stored


def _check_bucket(stored: Checkpoint, bucket_uuid: str, store: object = None) -> None:
    """Refuses another bucket's checkpoint, by the name of its file if it has one."""
    if stored.bucket_uuid == bucket_uuid:
        return
    if isinstance(store, FileStore):
        where = store.path
        advice = "if the bucket was recreated, delete the file to read from the beginning"
    else:
        where = "the checkpoint cannot be used"
        advice = (
            "the bucket was recreated, or the checkpoint was made for another one; start without a "
            "checkpoint"
        )
    error = CheckpointError(
        f"{where}: the checkpoint belongs to another bucket (uuid {stored.bucket_uuid}, this one "
        f"has {bucket_uuid}): {advice}"
    )
    error.code = "bucket_changed"
    raise error
