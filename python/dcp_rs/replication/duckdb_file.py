"""The file of a DuckDB database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_rs._libraries import require
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError


class DatabaseFile:
    """Where a database is.

    Args:
        path: The database's file; created if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def exists(self) -> bool:
        """Whether there is a database."""
        return self._path.exists()

    def connect(self) -> Any:
        """Opens the database, and creates it if it does not exist.

        Raises:
            ConcurrentWriterError: Another process has it open.
            ConfigError: The file is no database, or there is no folder for it.
        """
        self.check_folder()
        duckdb = require("a DuckDB target", "duckdb", "duckdb")
        try:
            connection = duckdb.connect(os.fspath(self._path))
        except duckdb.IOException as error:
            if "lock" not in str(error):
                raise
            raise ConcurrentWriterError(
                f"another process has {self} open, and DuckDB lets only one write to a file:"
                " close it there, and replicate other tables to this file from one process"
            ) from error
        if not is_stored(connection):
            connection.close()
            raise no_database(self)
        return quiet(connection)

    def check_folder(self) -> None:
        """Checks that there is a folder for the file.

        Raises:
            ConfigError: There is none.
        """
        if not self._path.parent.is_dir():
            raise ConfigError(
                f"the folder {self._path.parent} does not exist: create it first", option="target"
            )

    def remove(self) -> None:
        """Removes a database that was made and has nothing."""
        self._path.unlink(missing_ok=True)

    def __str__(self) -> str:
        return str(self._path)


def is_stored(connection: Any) -> bool:
    """Whether what is written to a connection stays.

    For a file of data, such as CSV, Parquet and JSON, DuckDB makes a database in memory instead.
    """
    ((path,),) = connection.execute(
        "SELECT path FROM duckdb_databases() WHERE database_name = current_database()"
    ).fetchall()
    return path is not None


def no_database(path: object) -> ConfigError:
    """Returns the error for a file that DuckDB does not write to."""
    return ConfigError(
        f"{path} is no DuckDB database: DuckDB takes it for a file of data, and would keep the rows"
        " in memory only: name a new file, or a database",
        option="target",
    )


def quiet(connection: Any) -> Any:
    """Returns a connection that shows no progress.

    In a notebook or `python -c`, a slow statement would write to the caller's standard output.
    """
    connection.execute("SET enable_progress_bar = false")
    return connection
