"""Objects below a location of S3, Google Cloud Storage or Azure, and what their errors mean."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dcp_rs import _obstore
from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.replication.outage import Unreachable, is_passing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dcp_rs.replication.target import Address

SCHEMES = ("s3", "gs", "az", "abfss")
"""Schemes of object storage, as obstore and deltalake name them."""

_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z0-9_=+@:~ ./-]*")
# Settings of the HTTP client rather than of the storage, as obstore tells them apart.
_OF_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "proxy_url",
        "timeout",
        "user_agent",
    }
)
_FLAGS = frozenset({"allow_http", "allow_invalid_certificates", "http1_only", "http2_only"})
_PREFIX = re.compile(r"(aws|google|azure)_")
# How long the first request of a target may take: a wrong endpoint is to be told of in seconds.
_PROBE_RETRIES = 2
_PROBE_CLIENT = {"connect_timeout": "2s", "timeout": "5s"}

# Seconds to wait before each further attempt at a start that a catalog or its storage fails.
_PAUSES = (0.2, 1.0)

# Names of options that are secrets, or may be.
_SECRET = re.compile(r"secret|token|password|credential|access_key|account_key|sas|service_account")
_QUERY = re.compile(r"\?[^\s\"')]*")
_USER = re.compile(r"//[^/@\s]*@")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d{3} [A-Za-z ]+)|\u21b3 (\d{3} [A-Za-z ]+)")

# Options with the address of a storage, by its scheme, for obstore and deltalake and for pyiceberg.
_ENDPOINTS = {
    "gs": "google_base_url (gcs.service.host)",
    "az": "azure_storage_endpoint (adls.blob-storage-authority)",
    "abfss": "azure_storage_endpoint (adls.blob-storage-authority)",
}
_ENDPOINT = "aws_endpoint_url (s3.endpoint)"
# Options that are no secret, and are shown.
_SHOWN = frozenset({"base_url", "endpoint", "endpoint_url", "region", "storage_endpoint"})
_UNREACHABLE = "the endpoint cannot be reached: check {endpoint}"
_THROTTLES = "the storage throttles: try again later"
# What the storage answers, and what to look at.
_CAUSES = (
    (
        (
            r"169\.254\.169\.254|metadata\.google|CredentialsNotLoaded|MissingCredentials"
            r"|No credentials|credential provider"
        ),
        "no credentials were found: set them in the environment or as options",
    ),
    (
        (
            r"NoSuchBucket|NO_SUCH_BUCKET|ContainerNotFound|BucketNotFound"
            r"|specified (bucket|container) does not exist"
            r"|Status\(NOT_FOUND.*CreateResumableUpload"
        ),
        "the bucket does not exist: create it",
    ),
    (
        (
            r"InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|Unauthenticated|\b401\b"
            r"|ExpiredToken|InvalidToken|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH"
            r"|failed to authenticate"
        ),
        "the credentials are refused: set access key and secret, or a profile",
    ),
    (
        r"RequestTimeTooSkewed|REQUEST_TIME_TOO_SKEWED|RequestTimeSkewed",
        "the clock of this machine is wrong: set it",
    ),
    (
        r"AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint|\b301\b",
        "the region or the endpoint is not that of the bucket: set aws_region (s3.region)",
    ),
    (
        r"AccessDenied|ACCESS_DENIED|Forbidden|\b403\b",
        "the role may not do this: let it list, get, put, delete",
    ),
    (
        r"builder error|URL scheme is not allowed",
        "the endpoint is refused: check {endpoint}, and allow_http",
    ),
    (
        (
            r"error sending request|NETWORK_CONNECTION|tcp connect|dns error|timed out"
            r"|operation timeout|Fail to get a new connection"
        ),
        _UNREACHABLE,
    ),
    (r"\b503\b|SlowDown|SLOW_DOWN|TooManyRequests|\b429\b", _THROTTLES),
)


class Found(NamedTuple):
    """An object below a location.

    Attributes:
        name: Name without the location.
        size: Bytes.
        changed: When it was written, in seconds since 1970, as the storage says.
    """

    name: str
    size: int
    changed: float


@dataclass(frozen=True)
class Storage:
    """A location in object storage, with the options to open it.

    Attributes:
        url: The location, such as `s3://bucket/path`, without a slash at the end.
        options: Options as obstore and deltalake name them; never shown.
    """

    url: str
    options: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, address: Address) -> Storage:
        """Returns the location of a URL such as `delta+s3://bucket/path`.

        Raises:
            ConfigError: It is none.
        """
        address.allow()
        example = f"{address.scheme}+s3://bucket/path"
        path = address.path.strip("/")
        if address.storage not in SCHEMES:
            raise ConfigError(
                f"{address.storage} is no object storage: write one of"
                f" {', '.join(f'{address.scheme}+{each}://' for each in SCHEMES)}",
                option="target",
            )
        if not address.host or not path:
            raise ConfigError(f"name a bucket and a path, as in {example}", option="target")
        if ":" in address.host.rpartition("@")[0]:
            raise ConfigError(
                "has no place for credentials: give them as storage_options", option="target"
            )
        parts = path.split("/")
        if not _NAME.fullmatch(path) or any(each in {"", ".", ".."} for each in parts):
            raise ConfigError(
                f"the path {ascii(path)[1:-1]} has what deltalake and others encode differently:"
                " use letters, digits, and _ - = + @ : ~ . between single slashes",
                option="target",
            )
        return cls(f"{address.storage}://{address.host}/{path}", dict(address.storage_options))

    def below(self, name: str) -> Storage:
        """Returns a location below this one."""
        return Storage(f"{self.url}/{name}", self.options)

    def beside(self, suffix: str) -> Storage:
        """Returns the location whose name has a suffix in addition."""
        return Storage(self.url + suffix, self.options)

    @property
    def parents(self) -> list[Storage]:
        """The locations above it, without the bucket."""
        root, _, path = self.url.partition("://")
        bucket, *parts = path.split("/")
        return [
            Storage(f"{root}://{'/'.join([bucket, *parts[:count]])}", self.options)
            for count in range(len(parts) - 1, 0, -1)
        ]

    def probe(self) -> None:
        """Lists the location once, with few retries.

        Raises:
            ConfigError: The storage refuses it, or does not answer.
        """
        objects = Objects(self, is_probe=True)
        objects.folders_and_files()

    def refused(self, error: BaseException) -> ConfigError:
        """Returns the error for a location that cannot be read or written, if only for now."""
        text = str(error)
        why = next((why for cause, why in _CAUSES if re.search(cause, text)), "")
        is_away = why in {_UNREACHABLE, _THROTTLES} or (not why and is_passing(error))
        told = why.format(endpoint=self._endpoint) or self.shown(error)
        return (Unreachable if is_away else ConfigError)(
            f"{self.url} cannot be used: {told} ({self._tried(text)})",
            option="storage_options" if why else "target",
        )

    def shown(self, error: BaseException) -> str:
        """Returns the text of an error in a line, without secrets."""
        text = _QUERY.sub("", _COLORS.sub("", str(error)).partition("Debug source")[0])
        for name, value in self.options.items():
            if value and _SECRET.search(name.lower()):
                text = text.replace(value, "***")
        text = _USER.sub("//***@", text)
        found = " ".join(text.split()).rstrip(". ")
        return found[:300] or type(error).__name__

    @property
    def _endpoint(self) -> str:
        """The option with the address of the storage; of a catalog, of that of its tables."""
        scheme = self.options.get("warehouse", self.url).partition(":")[0]
        return _ENDPOINTS.get(scheme, _ENDPOINT)

    def _tried(self, text: str) -> str:
        said = _CODE.search(text)
        status = _STATUS.search(_COLORS.sub("", text))
        given = ", ".join(sorted(self.options)) or "none"
        return "; ".join(
            [
                *([f"the storage says {said[1]}"] if said else []),
                *([f"status {(status[1] or status[2]).strip()}"] if status and not said else []),
                f"options given: {given}",
                *(
                    f"{name}={value}"
                    for name, value in self.options.items()
                    if _PREFIX.sub("", name.lower()) in _SHOWN
                ),
            ]
        )


class Objects:
    """The objects below a location, by obstore.

    Args:
        storage: The location.
        is_probe: Whether to give up after a few seconds.

    Raises:
        ConfigError: An option is unknown, or obstore is too old.
        ImportError: obstore is not installed.
    """

    def __init__(self, storage: Storage, *, is_probe: bool = False) -> None:
        self._obstore = require("object storage", "obstore", "object-store")
        self.storage = storage
        config: dict[str, Any] = {}
        client: dict[str, Any] = dict(_PROBE_CLIENT) if is_probe else {}
        retries: Any = _retries() if is_probe else None
        for name, value in storage.options.items():
            plain = _PREFIX.sub("", name.lower())
            if plain in _OF_CLIENT:
                client[plain] = value.lower() in {"true", "1"} if plain in _FLAGS else value
            elif plain == "max_retries" and not is_probe and value.isdecimal():
                retries = {"max_retries": int(value)}
            elif plain not in {"max_retries", "retry_timeout", "profile"}:
                config[name.lower()] = value
        provider = self._profile()
        try:
            self._store = self._obstore.store.from_url(
                storage.url,
                config=config or None,
                client_options=client or None,
                retry_config=retries,
                **({"credential_provider": provider} if provider is not None else {}),
            )
        except (self._errors, ValueError, TypeError) as error:
            raise storage.refused(error) from None

    def _profile(self) -> Any:
        """Returns what gives the credentials of a profile of AWS, if one is chosen."""
        options = {name.lower(): value for name, value in self.storage.options.items()}
        profile = options.get("aws_profile") or os.environ.get("AWS_PROFILE")
        is_given = any(name.endswith("access_key_id") for name in options)
        if not profile or is_given or not self.storage.url.startswith("s3:"):
            return None
        boto3 = require("a profile of AWS", "boto3")
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(boto3.Session(profile_name=profile))

    @property
    def _errors(self) -> type[Exception]:
        found: type[Exception] = self._obstore.exceptions.BaseError
        return found

    def get(self, name: str) -> bytes | None:
        """Returns an object; `None` if there is none.

        Raises:
            ConfigError: It cannot be read.
        """
        with _Failing(self.storage, self._errors):
            try:
                return bytes(self._obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def open(self, name: str) -> io.RawIOBase:
        """Opens an object to read parts of it."""
        with _Failing(self.storage, self._errors):
            size = int(self._obstore.head(self._store, name)["size"])
        return _Reader(self, name, size)

    def part(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of an object from one place to another."""
        with _Failing(self.storage, self._errors):
            return bytes(self._obstore.get_range(self._store, name, start=start, end=end))

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, in place of one that is there."""
        with _Failing(self.storage, self._errors):
            self._obstore.put(self._store, name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> bool | None:
        """Writes an object if there is none of the name.

        Returns:
            Whether it did; `None` if the answer was lost, and it may have.
        """
        known = self._obstore.exceptions
        try:
            with _Failing(self.storage, ()):
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except (known.AlreadyExistsError, known.PreconditionError):
            return False
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise self.storage.refused(error) from None
        except self._errors:
            return None
        return True

    def check_conditional(self) -> None:
        """Checks that the storage writes an object only if there is none, when it is told so.

        Raises:
            ConfigError: It does not, and would let two writers overwrite each other.
        """
        name = f"_dcp_rs/{secrets.token_hex(8)}.check"
        self.put(name, b"")
        try:
            if self.create(name, b"") is True:
                raise ConfigError(
                    f"{self.storage.url} has no conditional puts, without which two writers"
                    " overwrite each other: use a storage that has them",
                    option="target",
                )
        finally:
            self.remove([name])

    def files(self, prefix: str = "") -> list[Found]:
        """Lists the objects below a prefix, which ends at a slash."""
        with _Failing(self.storage, self._errors):
            pages = [*self._obstore.list(self._store, prefix or None)]
        return [
            Found(each["path"], int(each["size"]), each["last_modified"].timestamp())
            for each in itertools.chain.from_iterable(pages)
        ]

    def folders_and_files(self, prefix: str = "") -> tuple[list[str], list[Found]]:
        """Lists what is directly below a prefix: names of folders, and objects."""
        with _Failing(self.storage, self._errors):
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
        folders = [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]
        return folders, [
            Found(each["path"], int(each["size"]), each["last_modified"].timestamp())
            for each in found["objects"]
        ]

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, of which some may be gone."""
        for name in names:
            failing = _Failing(self.storage, self._errors)
            with failing, contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)


class _Reader(io.RawIOBase):
    """An object as a file to read, which requests only what is read."""

    def __init__(self, objects: Objects, name: str, size: int) -> None:
        self._objects, self._name, self._size = objects, name, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        found = self._objects.part(self._name, self._at, end)
        buffer[: len(found)] = found
        self._at = end
        return len(found)


def _retries() -> Any:
    from datetime import timedelta

    return {
        "max_retries": _PROBE_RETRIES,
        "retry_timeout": timedelta(seconds=6),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=500),
            "base": 2.0,
        },
    }


class _Failing:
    """Converts errors of the storage."""

    def __init__(self, storage: Storage, errors: Any) -> None:
        self._storage, self._errors = storage, errors

    def __enter__(self) -> None:
        _obstore.use()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._errors and isinstance(error, self._errors):
            raise self._storage.refused(error) from None


def trying(place: Storage | None, work: Callable[[], _T]) -> _T:
    """Does work, again if a catalog or its storage fails a request that may succeed later.

    pyiceberg does not repeat the requests to a catalog, nor DuckDB one that lists objects.

    Args:
        place: See `refusing`.
        work: What can be done again.

    Raises:
        ConfigError: They refuse something, or fail again and again.
    """
    for pause in _PAUSES:
        with contextlib.suppress(Unreachable), refusing(place):
            return work()
        time.sleep(pause)
    with refusing(place):
        return work()


@contextlib.contextmanager
def refusing(place: Storage | None) -> Iterator[None]:
    """Converts what a catalog and its storage refuse.

    Args:
        place: The catalog; `None` for one in a folder, whose errors stay as they are.

    Raises:
        ConfigError: They refuse something.
    """
    try:
        yield
    except DcpError:
        raise
    except Exception as error:
        if place is None:
            raise
        raise place.refused(error) from None
