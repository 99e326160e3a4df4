"""PostgreSQL: a table, its state and its rejects in one database, written in one transaction."""

from __future__ import annotations

from dcp_rs.replication.postgres.database import PostgresDatabase
from dcp_rs.replication.postgres.target import PostgresTarget

__all__ = ["PostgresDatabase", "PostgresTarget"]
