"""Access to the documents of an embedded cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dcp_rs import _checks, _display
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from dcp_rs import _dcp_rs


@dataclass(frozen=True, kw_only=True)
class MutationToken:
    """Position of a write in the history of its vBucket.

    Attributes:
        vbucket: vBucket written to.
        seqno: Position of the write.
        vbuuid: History branch written to.
        cas: CAS of the document after the write.
    """

    vbucket: int
    seqno: int
    vbuuid: int
    cas: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """A stored document.

    Attributes:
        value: Its bytes.
        xattrs: Its extended attributes by name.
        datatype: `json` or `binary`.
        cas: Its CAS.
        seqno: Seqno of its last change.
        rev: Its revision seqno, which each change raises.
        flags: Flags set by the application, 32 bits.
        expiry: When it expires, in seconds since 1970; 0 for never.
    """

    value: bytes
    xattrs: dict[str, Any] = field(repr=False)
    datatype: str
    cas: int
    seqno: int
    rev: int
    flags: int
    expiry: int

    def __repr__(self) -> str:
        named = ", ".join(
            f"{each.name}={_display.shortened(getattr(self, each.name))}"
            for each in fields(self)
            if each.repr
        )
        return f"Document({named})"


class Documents:
    """Documents of the cluster's first bucket."""

    __slots__ = ()

    _inner: _dcp_rs.EmbeddedCluster

    def vbucket_of(self, key: str | bytes) -> int:
        """Returns the vBucket of a key."""
        return self._inner.vbucket_of(_key(key))

    def upsert(
        self,
        key: str | bytes,
        value: bytes | str | Mapping[str, object] | list[object],
        *,
        collection: str | None = None,
        xattrs: Mapping[str, object] | None = None,
        cas: int = 0,
        expiry: int = 0,
        flags: int = 0,
    ) -> MutationToken:
        """Writes a document, whether it exists or not.

        Args:
            key: Its key, 1 to 250 bytes.
            value: Its bytes or text, or a mapping or list to write as JSON.
            collection: Its collection, as `scope.collection`, or as `collection` within `_default`;
                by default, the default collection.
            xattrs: Its extended attributes by name, written as JSON; they replace any existing
                ones. Names that begin with `_` are system attributes, which outlive a deletion.
            cas: CAS that it must have; 0 for any.
            expiry: When it expires: 0 for never, up to 30 days in seconds from now, or else in
                seconds since 1970.
            flags: Flags set by the application, 32 bits.

        Raises:
            DocumentExistsError: It has another CAS.
            ConfigError: The key or value is too long, or the collection does not exist.
        """
        options = {
            "cas": cas,
            "expiry": expiry,
            "flags": flags,
            "collection": collection,
            "xattrs": _xattrs(xattrs),
        }
        return self._inner.upsert(_key(key), _value(value), options)

    def insert(
        self,
        key: str | bytes,
        value: bytes | str | Mapping[str, object] | list[object],
        *,
        collection: str | None = None,
        xattrs: Mapping[str, object] | None = None,
        expiry: int = 0,
        flags: int = 0,
    ) -> MutationToken:
        """Writes a document that does not exist yet; the arguments are those of `upsert`.

        Raises:
            DocumentExistsError: The document exists.
        """
        options = {
            "expiry": expiry,
            "flags": flags,
            "collection": collection,
            "xattrs": _xattrs(xattrs),
        }
        return self._inner.insert(_key(key), _value(value), options)

    def remove(
        self, key: str | bytes, *, collection: str | None = None, cas: int = 0
    ) -> MutationToken:
        """Removes a document.

        Raises:
            DocumentNotFoundError: There is none.
            DocumentExistsError: It has another CAS.
        """
        options = {"cas": cas, "collection": collection}
        return self._inner.remove(_key(key), options)

    def expire(self, key: str | bytes, *, collection: str | None = None) -> MutationToken:
        """Expires a document now.

        Raises:
            DocumentNotFoundError: There is none.
        """
        return self._inner.expire(_key(key), {"collection": collection})

    def get(self, key: str | bytes, *, collection: str | None = None) -> Document | None:
        """Returns a document, or `None` if it does not exist."""
        _checks.text("collection", collection, optional=True)
        return self._inner.get(_key(key), collection)

    def high_seqnos(self) -> dict[int, int]:
        """Returns the highest seqno of each vBucket."""
        return self._inner.high_seqnos()

    def expire_due(self) -> int:
        """Expires every document of every bucket whose time has passed; returns their number."""
        return self._inner.expire_due()


def _key(key: str | bytes) -> bytes:
    if isinstance(key, str):
        return _checks.utf8("key", key)
    if isinstance(key, bytes):
        return key
    raise _checks.wrong_type("key", key, "text or bytes")


def _value(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _checks.utf8("value", value)
    if isinstance(value, Mapping | list):
        return _json("value", value).encode()
    raise _checks.wrong_type("value", value, "bytes, text, a mapping or a list")


def _xattrs(xattrs: Mapping[str, object] | None) -> list[tuple[str, str]] | None:
    if xattrs is None:
        return None
    _checks.instance("xattrs", xattrs, Mapping, "a mapping of names to JSON values")
    for name in xattrs:
        _checks.text("xattrs", name)
    return [(name, _json("xattrs", value)) for name, value in xattrs.items()]


def _json(option: str, value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_as_dict)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"is not JSON: {error}", option=option) from error


def _as_dict(value: object) -> dict[object, object]:
    """Returns a mapping as a type that `json` writes, at any depth."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
