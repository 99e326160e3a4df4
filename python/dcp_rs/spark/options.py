"""Options of a read: strings from Spark, validated once in the driver."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote

from dcp_rs import _checks, _dcp_rs, _deprecated
from dcp_rs._deprecated import Renamed
from dcp_rs.connection import ConnectionOptions, shown
from dcp_rs.documents import DocumentSchema, as_ddl
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import BackfillOrder, BatchPolicy, Priority, engine_options
from dcp_rs.planner import PlanOptions
from dcp_rs.schema import Schema

_Parser = Callable[[str, object], object]

_TRUE = frozenset({"true", "1", "yes"})
_FALSE = frozenset({"false", "0", "no"})
_STREAM = _dcp_rs.defaults()["stream"]

# Options that have another name than in Python, apart from camelCase.
NAMES = {
    "buffer_size": "flowControlBufferBytes",
    "max_bytes": "batchBytes",
    "max_rows": "batchRows",
    "max_seqnos": "maxOffsetsPerTrigger",
    "prefix": "documentPrefix",
    "start": "startingOffsets",
    "until": "endingOffsets",
}

_OLD = (
    Renamed("fail_on_data_loss", "on_purge", ("resync", "fail")),
    Renamed("max_rows_per_trigger", "max_offsets_per_trigger"),
)


@_deprecated.accepts(*_OLD)
@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read and how.

    Create them from a mapping with `dcp_rs.spark.ReadOptions.parse`. The name of an option is that
    of the field in camelCase, case-insensitive; a value is text or of the field's type. A pickle
    contains the `password` and the `token`: prefer `passwordFile`, `passwordEnv` or `tokenFile`,
    which every process resolves for itself.
    """

    connection_string: str
    """`couchbase://host1,host2`, or `couchbases://` for TLS."""
    bucket: str
    """Name of the bucket; can also be the path of the connection string."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    """The password itself. Not shown in the repr."""
    password_file: str | None = None
    """File with the password, on the driver and on every executor; a final newline is ignored."""
    password_env: str | None = None
    """Environment variable with the password, on the driver and on every executor."""
    token: str | None = field(default=None, repr=False)
    """JSON web token instead of a user, with `couchbases://`; valid until it expires. Not shown in
    the repr."""
    token_file: str | None = None
    """File with the token, on the driver and on every executor; read again before it expires."""
    connect_timeout: float = ConnectionOptions.connect_timeout
    """Seconds in which a connection, and the first contact of a read, must succeed."""
    retry_timeout: float = ConnectionOptions.retry_timeout
    """Seconds for which to retry while the cluster, or a vBucket, is unavailable, once it has
    answered: a failover may take two minutes, a restart more. 0 disables retries."""
    tls_ca: str | None = None
    """PEM file with the certificate authorities to trust; by default, the system's and
    Capella's."""
    tls_certificate: str | None = None
    """PEM file with a client certificate chain, instead of a user."""
    tls_key: str | None = None
    """PEM file with its private key."""
    tls_key_password: str | None = field(default=None, repr=False)
    """Passphrase of the private key, if it is encrypted. Not shown in the repr."""
    srv_targets: Literal["same_domain", "any"] = ConnectionOptions.srv_targets
    """SRV targets to accept: `same_domain`, or `any`."""
    network: Literal["auto", "default", "external"] = ConnectionOptions.network
    """Which addresses of the nodes to use."""
    sasl_mechanisms: tuple[str, ...] | None = None
    """Authentication mechanisms in order of preference; by default, `PLAIN` and then SCRAM with
    `couchbases://`, otherwise SCRAM."""
    collections: tuple[str, ...] | None = None
    """Collections to read, such as `inventory.airline`, or `inventory.*` for a whole scope; by
    default, all."""
    keys: tuple[str, ...] | None = None
    """Patterns of keys to read, such as `order::*`; by default, all."""
    ops: tuple[Literal["mutation", "deletion", "expiration"], ...] | None = None
    """Operations to read: `mutation`, `deletion`, `expiration`; by default, all."""
    since: float | None = None
    """Earliest change to read: a time with its zone or seconds since 1970."""
    vbuckets: tuple[int, ...] | None = None
    """vBuckets to read, such as `0-15,64`; by default, all."""
    starting_offsets: str = "earliest"
    """`earliest`, `latest`, or JSON: the end offsets of an earlier read, or a checkpoint. A stream
    uses it when it starts for the first time; later, it resumes from its own checkpoint."""
    ending_offsets: str = "latest"
    """End of a batch read: `latest`, or offsets as JSON."""
    columns: tuple[str, ...] | None = None
    """Columns to read, in order; by default, those of `metadata`."""
    metadata: Literal["basic", "full"] = _STREAM["columns"]
    """`basic`, or `full`, which adds revision, expiry, flags, datatype and history branch."""
    include_value: bool = True
    """Whether to read documents. If not, the server does not send them."""
    include: tuple[Literal["xattrs", "history", "system_events"], ...] = ()
    """`xattrs` adds the column `xattrs`, unless `columns` is set. `history` reads every version of
    a document that the server still has, in collections that keep their change history, and adds
    the column `history`, unless `columns` is set. `system_events` adds rows for events of
    collections, and the column `collection_id`, unless `columns` is set. With `documentSchema`,
    it also adds `value`, which only these rows have."""
    key_type: Literal["string", "binary"] = _STREAM["key_type"]
    """`binary` for keys that are not UTF-8."""
    value_format: Literal["binary", "string", "variant"] = _STREAM["value_format"]
    """Type of the column `value`; `variant` is Spark's, encoded as by `parse_json`."""
    document_schema: str | None = None
    """Columns to decode documents to, instead of `value`, such as
    `name STRING, geo STRUCT<lat: DOUBLE, lon: DOUBLE>`; or a `StructType`, in Python."""
    document_prefix: str = DocumentSchema.prefix
    """Prefix of the names of these columns."""
    on_malformed: Literal["null", "fail", "column"] = DocumentSchema.on_malformed
    """What to do with documents that are not JSON objects or have values that do not fit
    `documentSchema`: `null` makes only these values null, and notes them in the column
    `_malformed_fields`; `column` makes all columns of the document null and puts its bytes in the
    column `_malformed`; `fail` fails the read."""
    drop_fields: tuple[str, ...] | None = None
    """Fields that no column gets, such as `email, cards[].number`; they are taken out of documents
    before these are decoded. A document that is not JSON becomes a null."""
    hash_fields: tuple[str, ...] | None = None
    """Fields of which only a hash is left: SHA-256 of the value's canonical JSON."""
    hash_key: str | None = field(default=None, repr=False)
    """Secret of these hashes, which are HMAC-SHA-256 then. Not shown in the repr."""
    hash_key_file: str | None = None
    """File with the secret of hashes, on the driver and on every executor; a final newline is
    ignored."""
    on_rollback: Literal["emit", "fail", "resync"] = PlanOptions.on_rollback
    """`emit` a row with op `rollback` and continue, `fail` the read, or `resync`: emit the row and
    read the vBucket from its beginning."""
    on_purge: Literal["fail", "resync"] = PlanOptions.on_purge
    """What to do if deletions may have been purged before they were read: `fail`, or `resync`: emit
    a rollback row and read the vBucket from its beginning."""
    initial_deletions: Literal["deliver", "skip", "skip_if_supported"] = _STREAM[
        "initial_deletions"
    ]
    """Whether the server leaves out the deletions of a vBucket's first load: `skip` needs a server
    newer than Couchbase Server 8.0, `skip_if_supported` delivers the deletions of others. Later
    deletions are delivered."""
    priority: Priority | None = None
    """How much a node sends in one turn of a connection: `low`, `medium`, as nodes do by default,
    or `high`, which makes a load quicker and the slowest requests of other clients slower."""
    backfill_order: BackfillOrder | None = None
    """How a node reads the vBuckets of a connection from disk: `round-robin`, in turns, as nodes do
    by default, or `sequential`, one after the other."""
    persisted_only: bool = PlanOptions.persisted_only
    """On by default, unlike in `Client.stream`, because a read ends at offsets that a failover
    could take back. Whether streams and reads that resume take only changes that every copy of a
    vBucket has on disk, so that no failover to one of them takes a row back. Off for buckets
    without a disk."""
    max_offsets_per_trigger: int | None = None
    """Most seqnos in a micro-batch, an upper bound of its rows; by default, unlimited."""
    num_partitions: int | None = None
    """Number of partitions; by default, four per node, or one for streams and reads that resume."""
    batch_rows: int | None = None
    """Most rows in a batch; by default, the engine's default."""
    batch_bytes: int | None = None
    """Most bytes in a batch, such as `4194304` or `4m`; by default, the engine's default."""
    flow_control_buffer_bytes: int = ConnectionOptions.buffer_size
    """Flow-control buffer per connection, such as `8388608` or `8m`."""
    compressed: bool = ConnectionOptions.compressed
    """Whether to request documents compressed if that makes them smaller. It costs CPU time on both
    ends and pays off on a slow network. The rows are the same."""
    worker_gc_freeze: bool = True
    """Exempts loaded modules from Python's cycle collector, once per worker: Spark runs a full
    collection after every task, which would otherwise scan every module again."""

    def __repr__(self) -> str:
        return shown(self)

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> Self:
        """Validates options by name and value.

        Args:
            options: Values by option name, case-insensitive.

        Raises:
            ConfigError: An option is unknown (the text suggests a similar name), duplicated or
                missing, or has a wrong value.
        """
        _checks.instance("options", options, Mapping, "a mapping of names to values")
        names = {_camel(each.name).lower(): each.name for each in fields(cls)}
        values: dict[str, object] = {}
        for given, value in _new_names(options).items():
            name = names.get(given.lower())
            if name is None:
                known = sorted({_camel(each) for each in names.values()})
                raise ConfigError(_unknown(given, known), option=given)
            if name in values:
                raise ConfigError("is given twice", option=_camel(name))
            if value is not None:
                values[name] = _PARSERS.get(name, _text)(_camel(name), value)
        if "connection_string" not in values:
            raise ConfigError("is missing", option="connectionString")
        values.setdefault("bucket", _bucket_in(str(values["connection_string"])))
        parsed = cls(**values)  # type: ignore[arg-type]  # each parser returns its field's type
        parsed._check()
        return parsed

    def _check(self) -> None:
        if not self.bucket:
            raise ConfigError("is missing", option="bucket")
        _checks.word("onPurge", self.on_purge, ("fail", "resync"))
        sources = [self.password, self.password_file, self.password_env]
        if sum(source is not None for source in sources) > 1:
            raise ConfigError(
                "give one of them", option=("password", "passwordFile", "passwordEnv")
            )
        if self.token is not None or self.token_file is not None:
            token = "token" if self.token is not None else "tokenFile"
            others = {
                "tokenFile": self.token_file if self.token is not None else None,
                "username": self.username,
                "password": self.password,
                "passwordFile": self.password_file,
                "passwordEnv": self.password_env,
            }
            for other, value in others.items():
                if value is not None:
                    raise ConfigError("give one of them", option=(token, other))
        with options_as_written():
            _dcp_rs.check_stream(self.stream())

    def connection(self) -> ConnectionOptions:
        """Returns the connection options.

        This process resolves the password: from its variable now, and from its file for every
        connection.

        Raises:
            ConfigError: The password's file cannot be read, or its variable is not set.
        """
        password = self._resolve_password()
        return ConnectionOptions(
            connection_string=self.connection_string,
            username=self.username,
            password=password if self.password_file is None else None,
            password_file=self.password_file,
            token=self.token,
            token_file=self.token_file,
            bucket=self.bucket,
            connect_timeout=self.connect_timeout,
            retry_timeout=self.retry_timeout,
            tls_ca=self.tls_ca,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            tls_key_password=self.tls_key_password,
            srv_targets=self.srv_targets,
            network=self.network,
            sasl_mechanisms=self.sasl_mechanisms,
            buffer_size=self.flow_control_buffer_bytes,
            compressed=self.compressed,
            name="spark",
        )

    @property
    def value_is_of_events(self) -> bool:
        """Whether only rows of events have a `value`, since documents have columns."""
        return (
            "system_events" in self.include
            and self.document_schema is not None
            and self.columns is None
            and self.include_value
            and self.value_format == _STREAM["value_format"]
        )

    def table(self) -> dict[str, Any]:
        """Returns the columns that are read, by the names of `Schema`'s options.

        Raises:
            ConfigError: Documents are not read, and an option is about them.
        """
        columns: Any = self.metadata if self.columns is None else self.columns
        if self.columns is None and "system_events" in self.include:
            columns = list(Schema(columns=self.metadata, include=self.include).names)
            columns.insert(columns.index("collection") + 1, "collection_id")
        if not self.include_value:
            named = Schema(columns=columns, include=self.include).names
            needs_documents = {
                "documentSchema": self.document_schema is not None,
                "valueFormat": self.value_format != _STREAM["value_format"],
                "columns": self.columns is not None and "value" in self.columns,
            }
            for option, needs in needs_documents.items():
                if needs:
                    raise ConfigError(
                        "needs documents: leave includeValue=false out", option=option
                    )
            columns = [name for name in named if name != "value"]
        return {
            "columns": columns,
            "key_type": self.key_type,
            "value_format": self.value_format,
            "include": self.include,
            "document_schema": DocumentSchema(
                self.document_schema, self.document_prefix, self.on_malformed
            ),
        }

    def stream(self) -> dict[str, Any]:
        """Returns the engine's options of the streams; where they begin and end is planned."""
        batch = {"max_rows": self.batch_rows, "max_bytes": self.batch_bytes}
        given = {name: value for name, value in batch.items() if value is not None}
        return engine_options(
            {
                **self.table(),
                "vbuckets": self.vbuckets,
                "collections": self.collections,
                "keys": self.keys,
                "ops": self.ops,
                "since": self.since,
                "batch": BatchPolicy(**given),
                "on_rollback": self.on_rollback,
                "initial_deletions": self.initial_deletions,
                "priority": self.priority,
                "backfill_order": self.backfill_order,
                "persisted_only": self.persisted_only,
                "drop_fields": self.drop_fields,
                "hash_fields": self.hash_fields,
                "hash_key": self._resolve_hash_key(),
            }
        )

    def _resolve_hash_key(self) -> str | None:
        if self.hash_key_file is None:
            return self.hash_key
        if self.hash_key is not None:
            raise ConfigError("give one of them", option=("hashKey", "hashKeyFile"))
        return _secret_in(self.hash_key_file, "hashKeyFile")

    def _resolve_password(self) -> str | None:
        if self.password_file is not None:
            return _secret_in(self.password_file, "passwordFile")
        if self.password_env is not None:
            found = os.environ.get(self.password_env)
            if found is None:
                raise ConfigError(f"{self.password_env} is not set", option="passwordEnv")
            return found
        return self.password


def _new_names(options: Mapping[str, object]) -> dict[str, object]:
    """Returns the options without old names; names without an old one are as they were given."""
    renamed = [Renamed(_camel(each.old), _camel(each.new), each.words) for each in _OLD]
    names = {name.lower(): name for each in renamed for name in (each.old, each.new)}
    flags = {each.old for each in renamed if each.words is not None}
    found: dict[str, object] = {}
    for given, value in options.items():
        _checks.text("options", given)
        name = names.get(given.lower(), given)
        if name in found:
            raise ConfigError("is given twice", option=name)
        # As everywhere, `None` is an option that was left out.
        if value is not None or given.lower() not in names:
            found[name] = _boolean(name, value) if name in flags else value
    _deprecated.take(found, *renamed)
    return found


def _secret_in(file: str, option: str) -> str:
    """Returns the text of a file with a secret, without its last line break."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), option=option) from error
    return text.removesuffix("\n").removesuffix("\r")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


@contextmanager
def options_as_written() -> Iterator[None]:
    """Makes errors about options use their Spark names."""
    try:
        yield
    except ConfigError as error:
        as_written(error)
        raise


def as_written(error: ConfigError) -> None:
    """Makes an error use the Spark names of options."""
    names = {each.name: _camel(each.name) for each in fields(ReadOptions)}
    error._rename(names | NAMES)  # noqa: SLF001


def _unknown(given: str, known: list[str]) -> str:
    if given.lower() == "scope":
        # Couchbase's own connector has this option.
        return "there is no such option: choose all collections of one with collections=name.*"
    lower = {name.lower(): name for name in known}
    # As in the engine: what is not similar would mislead.
    nearest = difflib.get_close_matches(given.lower(), lower, n=1, cutoff=0.7)
    hint = f"; did you mean {lower[nearest[0]]}?" if nearest else ""
    return f"there is no such option{hint}"


def _bucket_in(connection_string: str) -> str:
    _, _, address = connection_string.rpartition("://")
    _, _, bucket = address.partition("?")[0].partition("/")
    return unquote(bucket)


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{str(value)!r} is not {expected}", option=name, value=value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _checks.wrong_type(name, value, "text")
    return value


def _document_schema(name: str, value: object) -> str:
    """Takes text, or a Spark or Arrow schema."""
    simple = getattr(value, "simpleString", None)
    if callable(simple):
        return _text(name, simple())
    with options_as_written():
        return as_ddl(value) or ""


def _boolean(name: str, value: object) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise _wrong(name, value, "true or false")
    return text in _TRUE


# The largest number that Spark takes as a limit.
_MOST = (1 << 63) - 1


def _number_to(most: int) -> _Parser:
    def parse(name: str, value: object) -> int:
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if not 1 <= number <= most:
            raise _wrong(name, value, f"a whole number from 1 to {most}")
        return number

    return parse


def _size(name: str, value: object) -> int:
    text = str(value).strip().lower().removesuffix("b")
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:], 1)
    try:
        size = int(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        size = 0
    if size < 1:
        raise _wrong(name, value, "a size in bytes, such as 4194304 or 4m")
    return size


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(str(value).strip().lower().removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise _wrong(name, value, "a number of seconds")
    return seconds


def _names(name: str, value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise _wrong(name, value, "a list of names, separated by commas")
    found = tuple(str(part).strip() for part in parts)
    if not all(found):
        raise _wrong(name, value, "a list of names, separated by commas")
    return found


def _paths(name: str, value: object) -> tuple[str, ...]:
    """Parses paths of fields, in which quoted names may have commas."""
    if isinstance(value, str):
        value = re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^,"])+', value)
    return _names(name, value)


def _include(name: str, value: object) -> tuple[str, ...]:
    words = tuple(word.lower() for word in _names(name, value))
    if not set(words) <= {"xattrs", "history", "system_events"}:
        raise _wrong(name, value, "xattrs, history or system_events, or several with commas")
    return words


def _moment(name: str, value: object) -> float:
    """Parses `2026-01-31T00:00:00Z`, or takes seconds since 1970."""
    expected = "a time with its zone, such as 2026-01-31T00:00:00Z, or seconds since 1970"
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _wrong(name, value, expected) from None
    if found.utcoffset() is None:
        raise _wrong(name, value, expected)
    return found.timestamp()


def _vbuckets(name: str, value: object) -> tuple[int, ...]:
    """Parses `0-15,64`, or takes any iterable of numbers."""
    expected = "a list of vBuckets such as 0-15,64"
    found: set[int] = set()
    try:
        parts = value.split(",") if isinstance(value, str) else list(value)  # type: ignore[call-overload]
        for part in parts:
            first, dash, last = str(part).partition("-")
            low, high = int(first), int(last if dash else first)
            if not 0 <= low <= high <= 0xFFFF:
                raise _wrong(name, value, expected)
            found.update(range(low, high + 1))
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, expected) from error
    return tuple(sorted(found))


def _mechanisms(name: str, value: object) -> tuple[str, ...]:
    return tuple(mechanism.upper() for mechanism in _names(name, value))


def _word(_name: str, value: object) -> str:
    return str(value).strip().lower()


def _metadata(name: str, value: object) -> str:
    word = _word(name, value)
    if word not in {"basic", "full"}:
        raise _wrong(name, value, "basic or full")
    return word


def _check_offsets(name: str, text: str) -> None:
    """Checks that text is an end of `dcp_rs.spark.partitions` or a checkpoint, damaged or not."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(given, dict) or not given.keys() & {"s", "format"}:
        raise ConfigError(
            "is neither the end of an earlier read, as dcp_rs.spark.partitions returns it, nor a"
            " checkpoint: seqnos alone do not say which history they are of",
            option=name,
        )


def _offsets(*words: str) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        text = _text(name, value).strip()
        if text.lower() in words:
            return text.lower()
        if not text.startswith("{"):
            raise _wrong(name, value, f"{', '.join(words)} or offsets as JSON")
        _check_offsets(name, text)
        return text

    return parse


def start_of_partitions(start: str) -> str:
    """Returns the `start` of `dcp_rs.spark.partitions`: `earliest`, or offsets as JSON.

    Raises:
        ConfigError: It is something else, such as a path or Kafka's offsets.
    """
    return _offsets("earliest")("start", start)


_PARSERS: dict[str, _Parser] = {
    "backfill_order": _word,
    "batch_bytes": _size,
    "batch_rows": _number_to(_MOST),
    "collections": _names,
    "columns": _names,
    "compressed": _boolean,
    "connect_timeout": _seconds,
    "document_schema": _document_schema,
    "drop_fields": _paths,
    "ending_offsets": _offsets("latest"),
    "flow_control_buffer_bytes": _size,
    "hash_fields": _paths,
    "include": _include,
    "include_value": _boolean,
    "initial_deletions": _word,
    "key_type": _word,
    "keys": _names,
    "max_offsets_per_trigger": _number_to(_MOST),
    "metadata": _metadata,
    "network": _word,
    # There are no more vBuckets.
    "num_partitions": _number_to(0xFFFF),
    "on_malformed": _word,
    "on_purge": _word,
    "on_rollback": _word,
    "ops": _names,
    "persisted_only": _boolean,
    "priority": _word,
    "retry_timeout": _seconds,
    "sasl_mechanisms": _mechanisms,
    "since": _moment,
    "starting_offsets": _offsets("earliest", "latest"),
    "value_format": _word,
    "vbuckets": _vbuckets,
    "worker_gc_freeze": _boolean,
}
