"""What tables of a DuckLake hold, as `dcp_rs.verify` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_rs.replication.contents import DuckDBContents
from dcp_rs.replication.ducklake_catalogs import Lake

if TYPE_CHECKING:
    from dcp_rs.replication.duckdb_file import DatabaseFile
    from dcp_rs.replication.target import Address


class DuckLakeContents(DuckDBContents):
    """The tables of a DuckLake.

    Args:
        address: As for `Lake`, with `table` for one of the tables.

    Raises:
        ConfigError: There is no such lake, or it cannot be opened.
    """

    @staticmethod
    def _file_of(address: Address) -> DatabaseFile:
        return Lake(address)
