"""What the tests of inferred schemas compare: documents, and the rows that must hold them."""

import json
from decimal import Decimal

import pyarrow as pa

import replicas


def rows_of(replica):
    """Gives the rows of a table or of what a log comes to, by collection and key."""
    if isinstance(replica, replicas.OfMany):
        tables = map(replica.rows, replica.names())
        rows = [row for own in tables for row in replicas.of_now(replica.mode, own)]
    else:
        rows = replicas.of_now(replica.mode, replica.rows())
    found = {}
    for row in rows:
        name = f"{row['scope']}.{row['collection']}", row["key"]
        assert name not in found, f"{name} is doubled"
        found[name] = row
    return found


def lost(document, row):
    """Gives the fields of a document that its row does not hold, in a column or in `_extra`."""
    extra = json.loads(row.get("_extra") or "{}", parse_float=Decimal)
    return [
        name
        for name, value in json.loads(document, parse_float=Decimal).items()
        if value is not None
        and not _holds(row.get(f"doc_{name}", row.get(name)), value)
        and not (name in extra and extra[name] == value)
    ]


def _holds(cell, value):
    """Whether a cell is a JSON value, or its text."""
    if cell is None:
        return False
    if isinstance(value, bool) or isinstance(cell, bool):
        return cell is value or (isinstance(value, bool) and cell == json.dumps(value))
    if isinstance(cell, str):
        return cell == value or _parsed(cell) == value
    if isinstance(cell, float):
        return Decimal(repr(cell)) == value
    return type(cell) is not dict and cell == value


def _parsed(text):
    try:
        return json.loads(text, parse_float=Decimal)
    except ValueError:
        return None


def assert_holds(replica, written):
    """Asserts that every document has a row that holds it, and no other row is there."""
    documents, rows = written.documents(), rows_of(replica)
    assert rows.keys() == documents.keys(), rows.keys() ^ documents.keys()
    assert not any(column.startswith("_dcp_rs") for row in rows.values() for column in row)
    wrong = {
        name: (fields, value, rows[name])
        for name, value in documents.items()
        if (fields := lost(value, rows[name]))
    }
    assert not wrong, wrong


def types_of(replica, table="documents"):
    """Gives the types of a table's columns, as the target calls them."""
    kind = replica.kind if isinstance(replica, replicas.OfMany) else ""
    database = replica.database if kind else replica
    if isinstance(database, replicas.InDuckDB | replicas.InDuckLake | replicas.InPostgres):
        # PostgreSQL keeps the digits of a numeric apart.
        rows = database.query(
            "SELECT column_name::text AS name, data_type::text AS type,"
            " numeric_precision::int AS p, numeric_scale::int AS s"
            f" FROM information_schema.columns WHERE table_name = '{table}'"
            " AND table_schema = current_schema()"
        )
        return {
            row["name"]: f"DECIMAL({row['p']},{row['s']})"
            if row["type"] == "numeric"
            else row["type"]
            for row in rows
        }
    found = pa.Table.from_pylist(replica.rows(table) if kind else replica.rows())
    return {each.name: str(each.type) for each in found.schema}
