"""Files of a DuckLake: small ones are merged, and those of old versions removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_rs.replication.duckdb_catalog import STATES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.replication.duckdb_catalog import Place

    Run = Callable[[str, list[object]], list[Any]]

# A file of which this share of rows is deleted is written anew; a small one with any, if there are
# many: files with deleted rows are not merged.
_SHARE = 0.1
_MANY = 10
_SMALL_BYTES = 16 << 20
# Seconds after which a file that no version names is removed: a query may still read it. With a
# catalog in SQLite, DuckLake takes all of the day of `older_than` to be older.
_UNNAMED = 25 * 3600.0
# What changes no rows.
_QUIET = ("merge_adjacent", "rewrite_delete")


def compact(run: Run, place: Place) -> tuple[int, int]:
    """Merges the small files of a table; returns how many files went, and how many came.

    Args:
        run: Runs a statement with values, and returns its rows.
        place: The table.
    """
    at: list[object] = [place.table, place.schema]
    before = _files(run, at)
    worn = sum(size < _SMALL_BYTES for size, is_worn in before.values() if is_worn)
    run(
        "FROM ducklake_rewrite_data_files('lake', ?, schema => ?, delete_threshold => ?)",
        [*at, 0.0 if worn > _MANY else _SHARE],
    )
    # By itself, since a transaction does not merge what it has written.
    run("FROM ducklake_merge_adjacent_files('lake', ?, schema => ?)", at)
    after = _files(run, at)
    return len(before.keys() - after.keys()), len(after.keys() - before.keys())


def _files(run: Run, at: list[object]) -> dict[str, tuple[int, bool]]:
    """Returns the files of a table with their bytes, and whether rows of them are deleted."""
    found = run(
        "SELECT data_file, data_file_size_bytes, delete_file IS NOT NULL"
        " FROM ducklake_list_files('lake', ?, schema => ?)",
        at,
    )
    return {name: (size, is_worn) for name, size, is_worn in found}


def forget(run: Run, keep: float) -> int:
    """Forgets old versions, and returns how many files were removed that none names.

    A version is of the whole lake. Those are forgotten that changed a state, as each transaction of
    ours does, or no rows. Others are somebody's.

    Args:
        run: Runs a statement with values, and returns its rows.
        keep: Seconds for which versions stay after they were replaced.
    """
    found = run(
        "WITH own AS (SELECT table_id::VARCHAR AS id FROM ducklake_table_info('lake')"  # noqa: S608
        f" WHERE schema_id = 0 AND table_name = '{STATES}'),"
        " versions AS (SELECT snapshot_id, changes,"
        " lead(snapshot_time) OVER (ORDER BY snapshot_id) AS replaced"
        " FROM ducklake_snapshots('lake'))"
        " SELECT snapshot_id FROM versions, own WHERE replaced < now() - to_seconds(?)"
        " AND (list_contains(flatten(map_values(changes)), id)"
        " OR list_has_all(?, map_keys(changes)))",
        [keep, list(_QUIET)],
    )
    if found:
        versions = [version for (version,) in found]
        run("FROM ducklake_expire_snapshots('lake', versions => ?)", [versions])
    removed = run(
        "FROM ducklake_cleanup_old_files('lake', older_than => now() - to_seconds(?))", [_UNNAMED]
    )
    return len(removed)
