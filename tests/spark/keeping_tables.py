"""What can happen to a table that `merge_into(table=...)` keeps, except for kills.

`on_version.py` runs it, and `killing_tables.py` after it.
"""

import json
import re
import tempfile
from functools import partial
from pathlib import Path

from pyspark.errors import PySparkException

import dcp_rs.spark
import kept_tables
import merged
import without_rights
from kept_tables import KeptTable

# With the documents.
COLUMNS = "op,scope,collection,key,vbucket,epoch,seqno,value"


def routes(spark, kind):
    """Each collection has its table, with columns of its own."""
    prefix = kept_tables.TABLES[kind].rpartition(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.sink = dcp_rs.spark.merge_into(
            tables={
                "s.a": {"table": f"{prefix}.of_{{collection}}", "document_schema": "n INT"},
                "s.*": {"table": f"{prefix}.of_{{collection}}", "document_schema": "name STRING"},
            }
        )
        cluster = kept.cluster
        cluster.create_scope("s")
        for name in ("s.a", "s.b"):
            cluster.create_collection(name)
            cluster.upsert("k", {"n": 1, "name": name}, collection=name)
        given = kept.options(include="system_events")
        del given["documentSchema"]
        kept.options = lambda **_: given
        kept.run()
        a, b = _tables(spark, f"{prefix}.of_a", f"{prefix}.of_b")
        assert [(row.key, row.n) for row in a.collect()] == [("k", 1)]
        assert [(row.key, row.name) for row in b.collect()] == [("k", "s.b")]
        assert "name" not in a.columns
        cluster.upsert("k", {"n": 2}, collection="s.a")
        cluster.drop_collection("s.b")
        kept.run()
        a, b = _tables(spark, f"{prefix}.of_a", f"{prefix}.of_b")
        assert [(row.key, row.n) for row in a.collect()] == [("k", 2)]
        assert b.count() == 0
        cluster.create_collection("s.c")
        for name in ("s.a", "s.c"):
            cluster.upsert("k", {"n": 3}, collection=name)
        same = {"s.a": f"{prefix}.of_a", "s.c": f"{prefix}.of_a"}
        kept.sink = dcp_rs.spark.merge_into(tables=same)
        _refused(kept, "s.a and s.c have one table")
        kept.sink = dcp_rs.spark.merge_into(tables={"s.a": f"{prefix}.of_a"})
        _refused(kept, "names no table for s.c")
        assert [(row.key, row.n) for row in a.collect()] == [("k", 2)], "half a batch"
        kept.close()


def template(spark, kind):
    """A table for each collection, through restarts and a rollback."""
    prefix = kept_tables.TABLES[kind].rpartition(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.sink = dcp_rs.spark.merge_into(table=f"{prefix}.each_{{collection}}")
        cluster = kept.cluster
        cluster.create_scope("s")
        for name in "ab":
            cluster.create_collection(f"s.{name}")
        for n in range(3):
            for place in range(20):
                for name in "ab":
                    key = f"k{(place * (n + 1)) % 30}"
                    cluster.upsert(key, {"n": n}, collection=f"s.{name}")
            if n == 2:
                kept.lose()
            kept.run()
            for name in "ab":
                (table,) = _tables(spark, f"{prefix}.each_{name}")
                found = {row.key: row.n for row in table.collect()}
                documents = {
                    f"k{k}": cluster.get(f"k{k}", collection=f"s.{name}") for k in range(30)
                }
                assert found == {
                    key: json.loads(each.value)["n"] for key, each in documents.items() if each
                }
        kept.close()


def _tables(spark, *names):
    for name in names:
        # Batches run in another session.
        spark.catalog.refreshTable(name)
    return [spark.table(name) for name in names]


def once(spark, kind):
    """A batch is read once from the cluster, and one that is in the table not at all."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.write(0, 60, 1)
        reads = spark.sparkContext.accumulator(0)

        def counting(batches):
            for batch in batches:
                reads.add(batch.num_rows)
                yield batch

        def count(batch, batch_id):
            kept.sink(batch.mapInArrow(counting, batch.schema), batch_id)

        kept.run(count)
        assert kept.table() == kept.truth()
        changes = spark.read.format("couchbase.dcp").options(**kept.options()).load().count()
        assert reads.value == changes, "read more than once"
        kept.forget_commit()
        kept.run(count)
        assert reads.value == changes, "a batch of the table was read"
        assert kept.batches() == [0]
        kept.close()


def again(spark, kind):
    """Batches that run again on the rows alone change nothing."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.write(0, 60, 1)
        kept.run()
        kept.write(20, 40, 2)
        before = kept.rows

        def twice(batch, batch_id):
            kept.sink(batch, batch_id)
            rows = sorted(before(), key=lambda row: row["key"])
            from dcp_rs.spark import merge_sql, merge_table

            with merge_table.materialised(batch) as changes:
                changes.createOrReplaceTempView("again")
                names = [name for name in batch.columns if name != "op"]
                source = merge_sql.newest("again", names, merge_sql.Removals())
                table = merge_sql.quoted(*merge_sql.parts_of(kept.name))
                statement = merge_sql.merge(table, source, names, merge_sql.Removals())
                batch.sparkSession.sql(statement).collect()
            assert sorted(before(), key=lambda row: row["key"]) == rows

        kept.run(twice)
        assert kept.table() == kept.truth()
        kept.close()


def drops(spark, kind):
    """Documents of a dropped collection go, and those of a new one of its name stay."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        cluster = kept.cluster
        cluster.create_scope("s")
        for name in ("s.a", "s.b"):
            cluster.create_collection(name)
            for n in range(10):
                cluster.upsert(f"k{n}", {"n": n}, collection=name)
        kept.run(include="system_events")
        rows = kept.rows()
        assert {(row["collection"], row["key"]) for row in rows} == {
            (name, f"k{n}") for name in "ab" for n in range(10)
        }
        assert "value" not in rows[0]
        cluster.drop_collection("s.a")
        cluster.upsert("k3", {"n": 33}, collection="s.b")
        kept.run(include="system_events")
        assert {row["collection"] for row in kept.rows()} == {"b"}
        cluster.create_collection("s.a")
        cluster.upsert("k1", {"n": 7}, collection="s.a")
        cluster.drop_collection("s.b")
        cluster.create_collection("s.b")
        cluster.upsert("k2", {"n": 8}, collection="s.b")
        kept.run(include="system_events")
        found = {(row["collection"], row["key"]): row["n"] for row in kept.rows()}
        assert found == {("a", "k1"): 7, ("b", "k2"): 8}
        kept.close()


def feed(spark, kind):
    """A reader of Delta's change data feed sees what happened, in a table the user made."""
    if kind != "delta":
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        spark.sql(
            f"CREATE TABLE {kept.name} (key STRING, n INT) USING delta CLUSTER BY (key) "
            "TBLPROPERTIES (delta.enableChangeDataFeed = true, 'mine' = 'kept')"
        )
        for key, n in {"a": 1, "b": 1, "c": 1}.items():
            kept.cluster.upsert(key, {"n": n})
        kept.run()
        kept.cluster.upsert("a", {"n": 2})
        kept.cluster.remove("b")
        kept.cluster.upsert("d", {"n": 1})
        kept.run()
        changes = spark.sql(f"SELECT * FROM table_changes('{kept.name}', 1)").collect()
        seen = {(row["_change_type"], row["key"], row["n"]) for row in changes}
        assert seen == {
            ("insert", "a", 1), ("insert", "b", 1), ("insert", "c", 1), ("insert", "d", 1),
            ("update_preimage", "a", 1), ("update_postimage", "a", 2), ("delete", "b", 1),
        }  # fmt: skip
        detail = spark.sql(f"DESCRIBE DETAIL {kept.name}").first()
        assert detail["clusteringColumns"] == ["key"]
        assert detail["properties"]["mine"] == "kept"
        kept.close()


def variants(spark, kind):
    """A document that is a VARIANT is one in the table, also when it is replaced."""
    if kind != "delta":
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        given = {"documentSchema": "n INT", "valueFormat": "variant", "columns": COLUMNS}
        for n in range(3):
            kept.write(0, 60, n)
            kept.run(**given)
            number, name = (f"variant_get(value, '$.{each}', 'string')" for each in ("n", "name"))
            rows = spark.table(kept.name).selectExpr("key", f"{number} AS n", f"{name} AS name")
            found = {row["key"]: (int(row["n"]), row["name"]) for row in rows.collect()}
            assert found == {key: (n, f"{key} {n}") for key, n in kept.truth().items()}
        kept.close()


def takes_over(spark, kind):
    """A table of merge_into(path) goes over, with its checkpoint."""
    if kind != "delta":
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.write(0, 60, 1)
        kept.run(dcp_rs.spark.merge_into(kept.location))
        spark.sql(f"CREATE TABLE {kept.name} USING delta LOCATION '{kept.location}'")
        assert kept.table() == kept.truth()
        kept.write(20, 80, 2)
        kept.run()
        assert kept.table() == kept.truth()
        kept.forget_commit()
        kept.write(70, 90, 3)
        kept.lose(1)
        kept.run()
        assert kept.table() == kept.truth()
        kept.close()


def refusals(spark, kind):
    """What cannot be merged is refused by name, before anything is written."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.write(0, 60, 1)
        _refused(kept, "op must be one of", partial(_changed, kept, "'upsert' AS op"))
        _refused(kept, "key is null in a row", partial(_changed, kept, "NULL::string AS key"))
        assert not kept.has_table(), "half a table"
        kept.run()
        rows = kept.rows()
        kept.write(0, 9, 2)
        _refused(kept, "documentSchema: .* n is int but", documentSchema="n STRING, at TIMESTAMP")
        _refused(kept, "documentSchema: lacks at, which", documentSchema="n INT")
        assert kept.rows() == rows
        kept.run()
        rows = kept.rows()
        kept.lose()
        kept.write(0, 9, 2)
        _refused(kept, "onRollback: vBucket . was rolled back", onRollback="emit")
        assert kept.rows() == rows
        kept.run(documentSchema="n INT, at TIMESTAMP, name STRING")
        assert kept.table() == kept.truth()
        assert "name" in kept.rows()[0]
        checkpoint, kept.checkpoint = kept.checkpoint, Path(folder, "another")
        _refused(kept, r"belongs to dcp_rs\.spark\.")
        kept.checkpoint = checkpoint
        spark.sql(f"DELETE FROM {kept.name} WHERE n = 1")
        kept.write(0, 9, 3)
        _refused(kept, "is not as this query left it")
        spark.sql(f"DROP TABLE {kept.name}")
        _refused(kept, "lacks the batches of this query before")
        spark.sql(f"CREATE TABLE {kept.name} (key STRING) USING {kind}")
        spark.sql(f"INSERT INTO {kept.name} VALUES ('a')")
        _refused(kept, "has rows that dcp_rs did not write")
        kept.close()


def rights(spark, kind):
    """Who may not write is told so, and the table stays as it was."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTable(spark, folder, kind)
        kept.write(0, 60, 1)
        kept.run()
        before = kept.rows(), kept.batches()
        kept.write(20, 40, 2)
        kept.cluster.persist()
        told = (_by_files if kind == "delta" else _by_catalog)(kept)
        for each in told:
            assert "cannot be read and changed by this user" in each, each[:2000]
        kept.spark.catalog.refreshTable(kept.name)
        assert (kept.rows(), kept.batches()) == before
        kept.run()
        assert kept.table() == kept.truth()
        kept.close()


def _by_files(kept):
    detail = kept.spark.sql(f"DESCRIBE DETAIL {kept.name}").first()
    location = Path(detail["location"].removeprefix("file:"))
    told = without_rights.refused_of_files(
        location.parent.parent, kept.options(), location, kept.checkpoint
    )
    assert not (location.parent / "another").exists()
    return told


def _by_catalog(kept):
    warehouse = kept.spark.conf.get("spark.sql.catalog.lake.warehouse")
    catalog = without_rights.Catalog(f"{warehouse}/travel/kept")
    for name, value in catalog.settings("refusing").items():
        kept.spark.conf.set(name, value)
    told = []
    for name, checkpoint in {"kept": kept.checkpoint, "another": kept.folder / "another"}.items():
        kept.checkpoint, known = checkpoint, kept.checkpoint
        sink = dcp_rs.spark.merge_into(table=f"refusing.travel.{name}")
        told.append(_refused(kept, "", sink))
        kept.checkpoint = known
    assert len(catalog.refused) >= len(told), catalog.refused
    catalog.shutdown()
    catalog.server_close()
    return told


def _changed(kept, column, batch, batch_id):
    name = column.split()[-1]
    others = [f"`{each}`" for each in batch.columns if each != name]
    kept.sink(batch.selectExpr(*others, column), batch_id)


def _refused(kept, told, sink=None, **more):
    reason = None
    try:
        kept.run(sink, **more)
    except PySparkException as error:
        reason = str(error)
    assert reason is not None, f"not refused: {told}"
    assert re.search(told, reason), reason[:2000]
    return reason


# What needs no JVM in this process.
OVER_CONNECT = (drops, feed, variants, takes_over, routes, template)


def everything(kind):
    """Tries all of it."""
    with tempfile.TemporaryDirectory() as folder:
        spark = kept_tables.session(kind, folder)
        merged.keep(spark, new=partial(KeptTable, kind=kind))
        for each in (once, again, refusals, rights, *OVER_CONNECT):
            each(spark, kind)
        spark.stop()


def over_connect(spark, kind):
    """Tries what can be tried in a session of Spark Connect."""
    merged.keep(spark, new=partial(KeptTable, kind=kind))
    for each in OVER_CONNECT:
        each(spark, kind)


def part(kind):
    """Tries what CI has time for."""
    with tempfile.TemporaryDirectory() as folder:
        spark = kept_tables.session(kind, folder)
        for each in (once, template):
            each(spark, kind)
        spark.stop()
