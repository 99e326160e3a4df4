"""What Delta tables hold, as `dcp_rs.verify` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dcp_rs._libraries import require
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.replication.contents import VERSIONS, Part, among, as_versions, columns
from dcp_rs.replication.delta import APPLICATION, DeltaDatabase
from dcp_rs.replication.delta_schema import LIBRARY
from dcp_rs.replication.delta_states import STATES, DeltaStates
from dcp_rs.replication.rejects import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_rs.replication.state import State
    from dcp_rs.replication.target import Address

_COUNTS = pa.schema([pa.field("vbucket", pa.int32()), pa.field("rows", pa.int64())])


class DeltaContents:
    """A Delta table, or those of the folders in a folder.

    Args:
        address: `delta:///folder`.

    Raises:
        ConfigError: There is no such folder.
    """

    def __init__(self, address: Address) -> None:
        address.allow()
        self._deltalake = require("a Delta table", LIBRARY, "delta")
        path = address.local_path("the table's folder", "delta:///folder")
        self._folder = Path(path).resolve()
        if not self._folder.is_dir():
            raise ConfigError(f"there is no folder {self._folder}", option="target")
        # Relative to the folder, which is the one above that of a single table.
        is_one = (self._folder / STATES).is_dir()
        self._names = [self._folder.name] if is_one else list(DeltaDatabase(self._folder).open())
        self._folder = self._folder.parent if is_one else self._folder

    def states(self) -> dict[str, State]:
        """See `Contents`."""
        return {name: self._state(self._table(name), name) for name in self._names}

    def _table(self, name: str) -> Any:
        return self._deltalake.DeltaTable(str(self._folder / name))

    def _state(self, table: Any, name: str) -> State:
        number = table.transaction_version(APPLICATION)
        state = None if number is None else DeltaStates(self._folder / name).read(number)
        if state is None:
            raise CheckpointError(
                f"table {self._folder / name} has no state of its last commit: start replicate,"
                " which loads it anew if it must"
            )
        return state

    def counts(self, table: str) -> dict[int, int]:
        """See `Contents`."""
        found = self._query(
            self._table(table), "SELECT vbucket, count(*) AS rows FROM t GROUP BY vbucket", _COUNTS
        )
        return dict(zip(found["vbucket"].to_pylist(), found["rows"].to_pylist(), strict=True))

    def read(self, table: str, vbuckets: Sequence[int]) -> Part:
        """See `Contents`."""
        # A version of the table has its transaction, which names the state.
        found = self._table(table)
        rejects = (self._folder / table).resolve()
        rejects = rejects.with_name(rejects.name + SUFFIX)
        return Part(
            self._state(found, table),
            self._rows(found, vbuckets),
            self._rows(self._deltalake.DeltaTable(str(rejects)), vbuckets)
            if rejects.is_dir()
            else VERSIONS.empty_table(),
        )

    def _rows(self, table: Any, vbuckets: Sequence[int]) -> pa.Table:
        names = [field.name for field in table.schema().fields]
        query = f"SELECT {columns(names)} FROM t WHERE {among(vbuckets)}"  # noqa: S608 - integers
        return as_versions(self._query(table, query, VERSIONS))

    def _query(self, table: Any, query: str, schema: pa.Schema) -> pa.Table:
        if not table.file_uris():
            # deltalake does not read a table without files.
            return schema.empty_table()
        return pa.table(self._deltalake.QueryBuilder().register("t", table).execute(query))

    def close(self) -> None:
        """Does nothing: no connection is kept."""
