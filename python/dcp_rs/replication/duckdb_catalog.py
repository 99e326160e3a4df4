"""What a DuckDB database has, read in one pass for all of its tables."""

from __future__ import annotations

from typing import Any, NamedTuple

from dcp_rs.exceptions import ConfigError

STATES = "dcp_rs_replication"
"""The table of states."""


class Place(NamedTuple):
    """Where DuckDB keeps a table, in lower case."""

    schema: str
    table: str


class Catalog(NamedTuple):
    """What is in a database, with names in lower case.

    Attributes:
        schema: The current schema.
        database: The database.
        schemas: All schemas.
        tables: All tables.
        views: All views.
        states: Names that states are stored under, by the last part in lower case. Their texts may
            have many megabytes.
    """

    schema: str
    database: str
    schemas: set[str]
    tables: set[Place]
    views: set[Place]
    states: dict[str, list[str]]

    @classmethod
    def of(cls, connection: Any) -> Catalog:
        """Reads it. A look at the catalog takes as long as it has tables."""

        def run(statement: str) -> list[Any]:
            rows: list[Any] = connection.execute(statement).fetchall()
            return rows

        ((schema, database),) = run("SELECT current_schema(), current_database()")
        here = "database_name = current_database()"
        schemas = run(f"SELECT schema_name FROM duckdb_schemas() WHERE {here}")  # noqa: S608
        tables = run(f"SELECT schema_name, table_name FROM duckdb_tables() WHERE {here}")  # noqa: S608
        views = run("SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal")
        places = {Place(schema.lower(), table.lower()) for schema, table in tables}
        has_states = Place("main", STATES) in places
        states = run(f"SELECT table_name FROM {STATES} WHERE commits > 0") if has_states else []  # noqa: S608
        by_table: dict[str, list[str]] = {}
        for (name,) in states:
            by_table.setdefault(name.lower().rpartition(".")[2], []).append(name)
        return cls(
            schema.lower(),
            database.lower(),
            {name.lower() for (name,) in schemas},
            places,
            {Place(schema.lower(), view.lower()) for schema, view in views},
            by_table,
        )

    def place(self, name: str) -> Place:
        """Returns where DuckDB keeps a table, whose name may leave out the schema.

        Raises:
            ConfigError: The schema does not exist.
        """
        *qualifiers, table = name.lower().split(".")
        if len(qualifiers) > 1 and qualifiers[0] == self.database:
            del qualifiers[0]
        if len(qualifiers) == 1 and qualifiers[0] not in self.schemas:
            qualifiers = [] if qualifiers[0] == self.database else qualifiers
        chosen = ".".join(qualifiers) if qualifiers else self.schema
        if chosen not in self.schemas:
            raise ConfigError(
                f"the database has no schema {chosen}: create it with CREATE SCHEMA",
                option="target",
            )
        return Place(chosen, table)

    def states_of(self, place: Place) -> list[str]:
        """Returns the names of states that lead to a table."""
        return [name for name in self.states.get(place.table, ()) if self._is_at(name, place)]

    def _is_at(self, name: str, place: Place) -> bool:
        try:
            return self.place(name) == place
        except ConfigError:
            return False
