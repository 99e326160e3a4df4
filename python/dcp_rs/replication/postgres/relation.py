"""Which relation a name means, and what its owner has added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.postgres.session import qualified
from dcp_rs.replication.rejects import SUFFIX
from dcp_rs.replication.sharing import SUFFIX as SHARE
from dcp_rs.replication.target import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dcp_rs.replication.postgres.session import Session

STATES = "dcp_rs_replication"
# What temporary tables are called.
PREFIX = "_dcp_rs_"

# Names of the query's table `given` as schema and name: those of the relation that the search path
# leads to, or else of the one that would be made.
_RESOLVED = """
SELECT given.key, c.oid::bigint AS oid, c.relkind::text AS kind,
    coalesce(n.nspname::text, CASE WHEN cardinality(parts) > 1 THEN parts[1]
        ELSE current_schema()::text END) AS nspname,
    coalesce(c.relname::text, parts[cardinality(parts)]) AS relname
FROM (SELECT key, string_to_array(name, '.') AS parts FROM given) given
LEFT JOIN pg_class c ON c.oid = CASE WHEN cardinality(parts) < 3 THEN
    to_regclass(array_to_string(ARRAY(SELECT quote_ident(part) FROM unnest(parts) part), '.')) END
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
"""
_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "i": "an index",
    "I": "an index",
    "S": "a sequence",
    "c": "a type",
}
_SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})


class Relation(NamedTuple):
    """A table, as the catalog has it or will have it.

    Attributes:
        schema: Name of its schema.
        name: Its name.
        oid: Its number; `None` if it does not exist.
        kind: Its `relkind`: `r` for a table, `p` for a partitioned one.
    """

    schema: str
    name: str
    oid: int | None
    kind: str | None

    @property
    def quoted(self) -> str:
        """The qualified name, quoted for SQL."""
        return qualified(self.schema, self.name)

    @property
    def rejects(self) -> str:
        """Name of its table of rejects, in the same schema."""
        return self.name + SUFFIX


def resolve(session: Session, name: str) -> Relation:
    """Returns the relation that a name means.

    Raises:
        ConfigError: There can be no table of that name.
    """
    parts = name.split(".")
    if len(parts) > 2 or not all(parts) or "\0" in name:
        raise ConfigError(
            f"{name!r} names no table: write table or schema.table, without other dots",
            option="target",
        )
    found = session.run(
        f"WITH given AS (SELECT $1::text AS key, $1::text AS name) {_RESOLVED}", name
    )
    _, oid, kind, schema, relname = found[0]
    if schema is None:
        raise ConfigError(
            f"no schema of search_path exists, so none for table {name}: create one, or "
            "write schema.table",
            option="target",
        )
    if oid is None and not session.run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema):
        raise ConfigError(
            f"the schema {schema} of table {name} does not exist: create it with CREATE "
            "SCHEMA, or use another",
            option="target",
        )
    if kind not in {None, "r", "p"}:
        raise ConfigError(
            f"{name} is {_KINDS.get(kind, 'no table')}, which cannot be kept in step: "
            "choose another name",
            option="target",
        )
    if relname == STATES or relname.startswith(PREFIX):
        raise ConfigError(f"dcp_rs needs the name {relname} itself: use another", option="target")
    return Relation(schema, relname, oid, kind)


def relation_of(session: Session, schema: str, name: str) -> tuple[int, str] | None:
    """Returns number and `relkind` of what has a name in a schema; `None` if nothing has."""
    found = session.run(
        "SELECT c.oid::bigint, relkind::text FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = $1 AND relname = $2",
        schema,
        name,
    )
    return (found[0][0], found[0][1]) if found else None


def names_of(session: Session, states: str, relation: Relation) -> list[str]:
    """Returns the names in the table of states that mean a relation, or shares of it."""
    found = session.run(
        "WITH given AS (SELECT table_name AS key, regexp_replace(table_name, $3, '') AS name"  # noqa: S608
        f" FROM {states})"
        f" SELECT key FROM ({_RESOLVED}) each WHERE nspname = $1 AND relname = $2",
        relation.schema,
        relation.name,
        SHARE,
    )
    return [name for (name,) in found]


def check_new_name(session: Session, states: str, relation: Relation, name: str) -> None:
    """Checks the name of a table that has no state yet.

    Raises:
        ConfigError: It is too long, or is the table of rejects of another.
    """
    limit = identifier_limit(session) - len(SUFFIX)
    if any(_bytes(part) > limit for part in name.split(".")):
        raise ConfigError(
            f"PostgreSQL would cut the name {name} or that of its table of rejects: "
            f"choose one of at most {limit} bytes",
            option="target",
        )
    if relation.name.endswith(SUFFIX):
        owner = relation._replace(name=relation.name.removesuffix(SUFFIX))
        if names_of(session, states, owner):
            raise ConfigError(
                f"{name} is the table of rejects of {owner.name}: choose another name",
                option="target",
            )


def check_columns(session: Session, columns: Iterable[str]) -> None:
    """Checks that the names of columns can be those of a table.

    Raises:
        ConfigError: One cannot.
    """
    limit = identifier_limit(session)
    for name in columns:
        if not name or "\0" in name or name in _SYSTEM_COLUMNS or _bytes(name) > limit:
            raise ConfigError(
                f"PostgreSQL takes no column {name!r}: it must have 1 to {limit} "
                "bytes, no NUL, and not be one of the system's own: rename it, or give a prefix",
                option="document_schema",
            )


def identifier_limit(session: Session) -> int:
    """Returns how many bytes of a name PostgreSQL keeps."""
    return int(session.run("SELECT current_setting('max_identifier_length')")[0][0])


def _bytes(name: str) -> int:
    return len(name.encode(errors="surrogatepass"))


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        kind: Its type, as `format_type` writes it.
        is_computed: Whether only the server gives it values.
        is_required: Whether a row without a value for it is refused.
    """

    kind: str
    is_computed: bool
    is_required: bool


def columns_of(session: Session, oid: int) -> dict[str, Column]:
    """Returns the columns of a table by name."""
    found = session.run(
        "SELECT attname::text, format_type(atttypid, atttypmod),"
        " attgenerated <> '' OR attidentity = 'a',"
        " (attnotnull OR typnotnull) AND NOT atthasdef AND attidentity = '' AND typdefault IS NULL"
        " FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"
        " WHERE attrelid = $1::bigint::oid AND attnum > 0 AND NOT attisdropped",
        oid,
    )
    return {name: Column(*rest) for name, *rest in found}


def check_additions(columns: dict[str, Column], ours: Collection[str], table: str) -> None:
    """Checks that rows with our columns can be inserted.

    Raises:
        ConfigError: A column of ours is computed, or one of the user's has no default.
    """
    for name, column in columns.items():
        if name in ours and column.is_computed:
            raise ConfigError(
                f"column {name} of table {table} is generated, so that nothing can be "
                "written to it: drop it, or use another table",
                option="target",
            )
        if name not in ours and column.is_required:
            raise ConfigError(
                f"column {name} of table {table} takes no null and has no default, so no "
                "row could be added: give it a default",
                option="target",
            )


def check_rules(session: Session, oid: int, table: str, *, removes: bool) -> None:
    """Checks that statements do to a table what they say.

    Args:
        session: Session.
        oid: Number of the table.
        table: Name of the table, for the error.
        removes: Whether rows are removed.

    Raises:
        ConfigError: A rule, a policy or a foreign key is in the way.
    """
    for (rule,) in session.run(
        "SELECT rulename::text FROM pg_rewrite WHERE ev_class = $1::bigint::oid", oid
    ):
        raise ConfigError(
            f"table {table} has the rule {rule}, which rewrites what is written: drop it, "
            "or make it a trigger",
            option="target",
        )
    if session.run("SELECT row_security_active($1::bigint::oid)", oid)[0][0]:
        raise ConfigError(
            f"row-level security of table {table} applies to this role, which hides rows: "
            "give the role BYPASSRLS, or let the owner of the table replicate",
            option="target",
        )
    if not removes:
        return
    for key, other in session.run(
        "SELECT conname::text, conrelid::regclass::text FROM pg_constraint"
        " WHERE confrelid = $1::bigint::oid AND contype = 'f' AND confdeltype IN ('a', 'r')",
        oid,
    ):
        raise ConfigError(
            f"the foreign key {key} of {other} keeps rows of table {table} from being "
            "removed: make it ON DELETE CASCADE or SET NULL, or drop it",
            option="target",
        )


def has_triggers(session: Session, oid: int) -> bool:
    """Whether a table or a partition of it has triggers that its owner made."""
    found: Any = session.run(
        "SELECT EXISTS (SELECT 1 FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D'"
        " AND (tgrelid = $1::bigint::oid OR tgrelid IN"
        " (SELECT relid FROM pg_partition_tree($1::bigint::oid))))",
        oid,
    )
    return bool(found[0][0])


def unique_keys(session: Session, oid: int) -> list[list[str]]:
    """Returns the columns of each unique index that `ON CONFLICT` can use to tell documents apart.

    That excludes one with a collation for which different keys are equal.
    """
    found = session.run(
        "SELECT array_agg(attname::text) FROM pg_index CROSS JOIN LATERAL"
        " unnest(indkey, indcollation) WITH ORDINALITY AS part(number, collation_oid, place)"
        " LEFT JOIN pg_attribute ON attrelid = indrelid AND attnum = number"
        " LEFT JOIN pg_collation c ON c.oid = collation_oid"
        " WHERE indrelid = $1::bigint::oid AND indisunique AND indisvalid AND indimmediate"
        " AND indpred IS NULL AND place <= indnkeyatts"
        " GROUP BY indexrelid HAVING bool_and(coalesce(collisdeterministic, true))",
        oid,
    )
    return [columns for (columns,) in found if set(columns) == set(IDENTITY)]
