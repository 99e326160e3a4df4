"""Load a bucket with dlt into any destination that merges. Install the extra `dlt`.

The guide says what each kind of destination makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_rs import _checks, _keywords
from dcp_rs._dlt_reading import Reading
from dcp_rs._libraries import require
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import Masks, engine_options
from dcp_rs.replication.names import TableNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa
    from dlt.extract.resource import DltResource
    from dlt.extract.source import DltSource

_OPTIONS = {"document_schema", "key_type"}
_POSITIONS = {"vbucket": "bigint", "epoch": "bigint", "seqno": "bigint"}


@_keywords.checked
def source(
    client: Client,
    *,
    tables: str | Mapping[str, object] = "collection",
    collections: str | Iterable[str] | None = None,
    drop_fields: str | Iterable[str] | None = None,
    hash_fields: str | Iterable[str] | None = None,
    hash_key: str | bytes | None = None,
    persisted_only: bool = True,
    max_seqnos: int | None = None,
    table_format: str | None = None,
    name: str = "couchbase",
) -> DltSource:
    """Returns a source of dlt with a resource for each collection, without reading any.

        client = dcp_rs.connect("couchbases://cb.example.org/travel", username="reader",
                                password_file="/run/secrets/couchbase")
        pipeline = dlt.pipeline("load_travel", destination="duckdb", dataset_name="travel")
        pipeline.run(dcp_rs.dlt.source(client))

    The first run loads a collection, and each further one the changes since then. A package has
    one row for each document that changed, as Arrow tables, and a collection's position is in the
    state of its resource. A table has the columns `key`, which is its primary key, `value`,
    `vbucket`, `epoch`, `seqno`, `cas`, `timestamp` and `_deleted`, dlt's `hard_delete`.

    A run writes the changes of a collection to temporary files before dlt takes them, and holds the
    keys of a part of it, of about half a million changes or of one vBucket, in memory.

    Args:
        client: A client of the bucket, which must be open while dlt extracts.
        tables: Names of the tables, as in `dcp_rs.replicate`. Of the options of a pattern,
            `document_schema` and `key_type` are taken.
        collections: Collections to load, as in `dcp_rs.Client.stream`; by default, all.
        drop_fields: As there.
        hash_fields: As there.
        hash_key: As there.
        persisted_only: As in `dcp_rs.Client.plan`.
        max_seqnos: Most seqnos of a collection to load in a run; by default, unlimited.
        table_format: Format of the tables, as in `dlt.resource`.
        name: Name of the source, and of its schema.

    Raises:
        ConfigError: An option is wrong, or two collections would share a table. Within an error of
            dlt, also if the destination does not merge, or has packages that are not loaded yet.
        ImportError: dlt is not installed.
        TimeoutError: A node did not answer within the connect timeout. A run raises what
            `dcp_rs.Client.plan` and a stream raise, within an error of dlt.
    """
    dlt = require("dcp_rs.dlt.source", "dlt", "dlt")
    require("dcp_rs.dlt.source", "pyarrow", "dlt")
    _checks.instance("client", client, Client, "a Client")
    if max_seqnos is not None:
        _checks.integer("max_seqnos", max_seqnos, 1, 2**63 - 1)
    _checks.flag("persisted_only", persisted_only)
    names = TableNames.of(tables)
    for pattern, options in names.options.items():
        for option in set(options) - _OPTIONS:
            raise ConfigError(f"{pattern!r} has {option}, which dlt decides", option="tables")
    masks = Masks.of(drop_fields, hash_fields, hash_key)
    found: dict[str, Reading] = {}
    for collection in client.collections(collections):
        table = names.table(collection)
        if table is None:
            continue
        options = names.options.get(names.pattern(collection) or "", {})
        engine_options({"batch": None, "document_schema": options.get("document_schema")})
        reading = Reading(client, collection, options, masks, persisted_only, max_seqnos)
        other = found.setdefault(table, reading)
        if other is not reading:
            raise _shared(collection, other.collection, table)

    @dlt.source(name=name)  # type: ignore[untyped-decorator] # as dlt is not typed here
    def of_bucket() -> Iterable[DltResource]:
        normalize = dlt.current.source_schema().naming.normalize_tables_path
        known: dict[str, str] = {}
        for table, reading in found.items():
            stored = normalize(table)
            other = known.setdefault(stored, reading.collection)
            if other != reading.collection:
                raise _shared(reading.collection, other, stored)
            yield dlt.resource(
                _generator(reading),
                name=table,
                write_disposition="merge",
                primary_key="key",
                table_format=table_format,
                columns=_hints(reading),
            )()

    made: DltSource = of_bucket()
    return made


def _generator(reading: Reading) -> Callable[[], Iterator[pa.Table]]:
    # dlt takes functions, no methods.
    def rows() -> Iterator[pa.Table]:
        yield from reading.rows()

    return rows


def _hints(reading: Reading) -> dict[str, Any]:
    positions = {each: {"data_type": kind, "nullable": False} for each, kind in _POSITIONS.items()}
    key = {"data_type": "binary" if reading.has_binary_keys else "text", "nullable": False}
    return {
        "key": key,
        **positions,
        "_deleted": {"data_type": "bool", "nullable": False, "hard_delete": True},
    }


def _shared(collection: str, other: str, table: str) -> ConfigError:
    return ConfigError(
        f"{collection} and {other} would share the table {table}: use {{scope}} in the template, "
        "or give one of them a pattern of its own",
        option="tables",
    )
