"""Iceberg tables for tests: what is in them, and what others do to them."""

import dataclasses
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles

import dcp_rs
import replicas
from dcp_rs.replication import rejects

BAD_KEY = b"session\xff"


def replicate(cluster, target, **options):
    with cluster.connect() as client:
        return dcp_rs.replicate(
            client, target, **({"mode": "log", "once": True, "commit_rows": 10} | options)
        )


def fill(written, count=40, name="key"):
    for n in range(count):
        written.upsert(f"{name}_{n}", {"n": n})


def catalog_of(folder):
    return SqlCatalog("dcp_rs", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")


def rows_of(table):
    return table.scan().to_arrow().to_pylist()


def rejected(folder, name="default.changes_rejected"):
    rows = rows_of(catalog_of(folder).load_table(name))
    places = [(row["vbucket"], row["generation"], row["epoch"], row["seqno"]) for row in rows]
    assert len(set(places)) == len(places), "a reject is doubled"
    return rows


def path_of(location):
    return Path(location.removeprefix("file://"))


def documents_of(table):
    folder = path_of(table.location()) / "_dcp_rs"
    return sorted(each.name for each in folder.iterdir())


def named_documents(table):
    found = [each.summary["dcp_rs.document"] for each in table.metadata.snapshots]
    return sorted(each.rpartition("/")[2] for each in found if each)


class Compaction(_OverwriteFiles):
    """Replaces the files of a table by one with the same rows, as engines compact it."""

    def _summary(self, _=None):
        before = self._transaction.table_metadata.current_snapshot().summary
        totals = {
            key: value
            for key, value in before.additional_properties.items()
            if key.startswith("total")
        }
        return Summary(Operation.REPLACE, **totals)


def compact(table):
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    with table.transaction() as transaction:
        producer = Compaction(Operation.OVERWRITE, transaction, table.io)
        with producer as changed:
            for task in table.scan().plan_files():
                changed.delete_data_file(task.file)
            rows = table.scan().to_arrow()
            files = _dataframe_to_data_files(table.metadata, rows, table.io) if len(rows) else ()
            for file in files:
                changed.append_data_file(file)
    assert table.current_snapshot().summary.operation is Operation.REPLACE
    return table


def expire(table):
    """Expires every snapshot but the current one."""
    current = table.current_snapshot().snapshot_id
    gone = [each.snapshot_id for each in table.metadata.snapshots if each.snapshot_id != current]
    table.maintenance.expire_snapshots().by_ids(gone).commit()
    assert len(table.refresh().metadata.snapshots) == 1


def collect():
    """Gives the commits of a replication, all of which have a reject."""
    found = replicas.Collected(takes_rejects=True)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster:
        fill(replicas.Written(cluster))
        replicate(cluster, found, commit_rows=16)
    found.commits = [commit for commit in found.commits if len(commit.rows)]
    key = pa.array([BAD_KEY], pa.binary())
    for number, commit in enumerate(found.commits):
        # The last row: a state has it behind it.
        row = commit.rows.slice(len(commit.rows) - 1, 1)
        row = row.set_column(row.schema.get_field_index("key"), "key", key)
        value = pa.chunked_array([[b"x"]], pa.binary())
        bad = rejects.as_rejects(row, value, ["why"])
        found.commits[number] = dataclasses.replace(commit, rejects=bad)
    assert len(found.commits) > 2
    return found
