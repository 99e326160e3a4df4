"""Iceberg: a log, with the state in a property of the table that is set in the same commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._libraries import require, require_pyarrow
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.state import State
from dcp_rs.replication.target import (
    make_folder,
    missing_columns,
    overtaken,
    refuse_variants,
    type_name,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dcp_rs.replication.state import Mode
    from dcp_rs.replication.target import Address, Commit

_STATE = "dcp_rs.state"
_RETRIES = "commit.retry.num-retries"


class IcebergTarget:
    """An Iceberg table, to which a log is appended.

    The state is the table's property `dcp_rs.state`.

    Args:
        catalog: Catalog of pyiceberg, as `pyiceberg.catalog.load_catalog` gives it.
        table: Name of the table with its namespace, as `namespace.table`; created if it does not
            exist.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"log"})

    def __init__(self, catalog: Any, table: str) -> None:
        require("an Iceberg target", "pyiceberg", "iceberg")
        self._catalog = catalog
        self._name = table
        self._table: Any = None
        self._schema: Any = None

    @classmethod
    def at(cls, address: Address) -> IcebergTarget:
        """Creates the target for `iceberg:///folder?table=namespace.name`.

        The folder holds the tables, and `catalog.db`, an SQLite database, the catalog. With
        `iceberg://name?table=namespace.name`, pyiceberg's configuration says where the catalog of
        this name is. The table is `default.changes` if not given.

        Raises:
            ConfigError: There is no folder, no namespace, or another option; the folder has a name
                that pyiceberg would cut; or it knows no such catalog.
            ImportError: pyiceberg is not installed.
        """
        address.allow("table")
        table = address.options.get("table", "default.changes")
        if not all(part.strip() for part in table.split(".")) or "." not in table:
            raise ConfigError(f"target: table {table!r} needs a namespace, as in default.{table}")
        sql = require("an Iceberg target", "pyiceberg.catalog.sql", "iceberg")
        if address.host:
            from pyiceberg.catalog import load_catalog

            try:
                return cls(load_catalog(address.host), table)
            except ValueError as error:
                raise ConfigError(
                    f"target: pyiceberg cannot load the catalog {address.host}: {error}"
                ) from error
        from pathlib import Path

        example = "iceberg:///folder?table=namespace.name"
        folder = Path(address.local_path("the folder", example))
        if {"#", "?", "%"}.intersection(str(folder)):
            raise ConfigError(
                f"target: {str(folder)!r} has a #, ? or %, at which pyiceberg would take a part of"
                " it for the folder: use another"
            )
        make_folder(folder)
        catalog = sql.SqlCatalog(
            "dcp_rs", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}"
        )
        return cls(catalog, table)

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - a log only
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "pyiceberg")
        for field in schema:
            if _loses_nulls(field.type):
                raise ConfigError(
                    f"document_schema: {field.name} is or has an ARRAY or a MAP of STRUCT, which"
                    " pyiceberg writes as empty if it is null: declare it as STRING"
                )
        namespace, _, _ = self._name.rpartition(".")
        self._catalog.create_namespace_if_not_exists(namespace)
        self._schema = _known(schema)
        self._table = self._catalog.create_table_if_not_exists(self._name, self._schema)
        state = self._load()
        if state is None and self._table.current_snapshot() is not None:
            raise ConfigError(
                f"target: table {self._name} has rows that dcp_rs did not write: use another"
            )
        have = {field.name: type_name(field.type) for field in self._table.schema().as_arrow()}
        want = {field.name: type_name(field.type) for field in self._schema}
        if missing_columns(have, want, self._name):
            with self._table.update_schema() as update:
                update.union_by_name(self._schema)
        return state

    def _load(self) -> State | None:
        found = self._table.properties.get(_STATE)
        return None if found is None else State.from_json(found)

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        from pyiceberg.exceptions import CommitFailedException

        before = self._load()
        if commit.state.commits != (0 if before is None else before.commits) + 1:
            raise overtaken(self._name)
        # In this copy of the metadata alone. From 0.12 on, pyiceberg repeats a commit that lost
        # against another on top of that, which would double rows and replace the newer state.
        self._table.metadata.properties[_RETRIES] = "0"
        try:
            # Without rows too: the snapshot asserts that the table is the one that was loaded.
            with self._table.transaction() as transaction:
                transaction.append(commit.rows.cast(self._schema))
                transaction.set_properties({_STATE: commit.state.to_json()})
        except CommitFailedException as error:
            raise overtaken(self._name) from error

    def close(self) -> None:
        """Forgets the table."""
        self._table = None

    def __repr__(self) -> str:
        return f"IcebergTarget({self._name!r})"


def _known(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with types that Iceberg supports."""
    pa = require_pyarrow("an Iceberg target")
    return pa.schema([_known_field(field).with_nullable(True) for field in schema])


def _known_field(field: pa.Field) -> pa.Field:
    pa = require_pyarrow("an Iceberg target")
    kind = field.type
    if kind in {pa.int8(), pa.int16()}:
        kind = pa.int32()
    elif pa.types.is_map(kind):
        kind = pa.map_(_known_field(kind.key_field), _known_field(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_known_field(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_known_field(each) for each in kind])
    return field.with_type(kind)


def _loses_nulls(kind: pa.DataType) -> bool:
    """Whether a type is or contains a list or map of structs.

    pyiceberg makes these anew from their offsets, on which no null is marked.
    """
    pa = require_pyarrow("an Iceberg target")
    if pa.types.is_map(kind):
        parts = [kind.item_type]
    else:
        parts = [kind.field(index).type for index in range(kind.num_fields)]
    is_struct = any(pa.types.is_struct(part) for part in parts)
    return (is_struct and not pa.types.is_struct(kind)) or any(map(_loses_nulls, parts))
