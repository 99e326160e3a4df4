"""A bucket in dlt's destinations: what they have after rollbacks, kills and lost packages."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dlt.pipeline.exceptions import PipelineStepFailed

import dcp_rs
import dcp_rs.dlt
from dcp_rs.exceptions import ConfigError
from dlt_runs import pipeline_of, source_of, table_of
from plan_worlds import VBUCKETS, Bucket

# dlt's own, when a package is pending.
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")

KINDS = ["duckdb", "delta"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNTIME__DLTHUB_TELEMETRY", "false")
    monkeypatch.setenv("DLT_DATA_DIR", str(tmp_path / "dlt"))
    monkeypatch.chdir(tmp_path)


def documents(pipeline, kind, name="_default___default"):
    rows = table_of(pipeline, kind, name)
    assert len(rows) == len({key for key, _ in rows}), "a key has one row"
    return {key: json.loads(value) for key, value in rows}


def expected(bucket):
    return {key: json.loads(value) for key, value in bucket.documents().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(int(os.environ.get("DCP_DLT_SEEDS", "1"))))
def test_the_table_is_the_bucket_after_changes_and_rollbacks(tmp_path, kind, seed):
    rng = random.Random(seed)
    pipeline = pipeline_of(tmp_path, kind)
    with (
        dcp_rs.testing.EmbeddedCluster(nodes=3, replicas=1, vbuckets=VBUCKETS) as cluster,
        cluster.connect() as client,
    ):
        bucket = Bucket(cluster, rng)
        for number in range(6):
            bucket.write()
            cluster.persist()
            if number == 3:  # in every world
                cluster.roll_back(rng.randrange(VBUCKETS), 0)
            elif number:
                bucket.trouble()
            if number == 4:  # the working directory is lost, and restored from the destination
                shutil.rmtree(tmp_path / "pipelines")
                pipeline = pipeline_of(tmp_path, kind)
            pipeline.run(source_of(client, kind, max_seqnos=rng.choice([None, 20])))
        cluster.persist()
        for _ in range(5):
            pipeline.run(source_of(client, kind, max_seqnos=None))
            cluster.persist()
        assert documents(pipeline, kind) == expected(bucket)


def run_until(step, folder, kind, cluster):
    """Runs the pipeline in a process that is killed at a step."""
    arguments = json.dumps([str(folder), kind, cluster.connection_string, step])
    program = [sys.executable, Path(__file__).with_name("dlt_runs.py"), arguments]
    options = cluster.connection_options
    given = {
        "DCP_RS_BUCKET": cluster.bucket_name,
        "DCP_RS_USERNAME": options.username,
        "DCP_RS_PASSWORD": options.password,
    }
    died = subprocess.run(
        program, check=False, capture_output=True, timeout=120, env=os.environ | given
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()


def _steps(kind):
    """Gives the steps to die at, of which `make long` tries all."""
    if "DCP_DLT_SEEDS" not in os.environ:
        return ["in load"]
    return STEPS if kind == "duckdb" else STEPS[2:5]


STEPS = ["in extract", "after extract", "after normalize", "in load", "before commit", "after load"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_each_step_is_finished_by_later_ones(tmp_path, kind):
    rng = random.Random(7)
    with (
        dcp_rs.testing.EmbeddedCluster(vbuckets=VBUCKETS) as cluster,
        cluster.connect() as client,
    ):
        bucket = Bucket(cluster, rng)
        for step in _steps(kind):
            bucket.write()
            cluster.persist()
            run_until(step, tmp_path, kind, cluster)
            # The package that is pending is loaded again after the bucket has moved on.
            bucket.write()
            cluster.persist()
            cluster.roll_back(rng.randrange(VBUCKETS), 0)
            pipeline = pipeline_of(tmp_path, kind)
            if pipeline.has_pending_data:
                pipeline.run(source_of(client, kind))  # loads it, and nothing else
            pipeline.run(source_of(client, kind))
            assert documents(pipeline, kind) == expected(bucket), step


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_lost_package_left_behind_is_found(tmp_path, kind):
    """Rows of a branch that is gone, which the restored state knows nothing of."""
    pipeline = pipeline_of(tmp_path, kind)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as cluster, cluster.connect() as client:
        for n in range(20):
            cluster.upsert(f"key_{n}", {"n": n})
        cluster.persist()
        pipeline.run(source_of(client, kind))
        kept = cluster.high_seqnos()
        for n in range(10, 30):
            cluster.upsert(f"key_{n}", {"n": -n})
        cluster.persist()
        run_until("before commit", tmp_path, kind, cluster)
        assert len(documents(pipeline, kind)) == 30
        # The package is lost with its state, and the bucket loses what it had loaded.
        shutil.rmtree(tmp_path / "pipelines")
        for vbucket, seqno in kept.items():
            cluster.roll_back(vbucket, seqno)
        if kind == "duckdb":  # in files, the state comes last
            forget_last_state(pipeline)
        pipeline = pipeline_of(tmp_path, kind)
        pipeline.run(source_of(client, kind))
        assert documents(pipeline, kind) == {f"key_{n}": {"n": n} for n in range(20)}


def forget_last_state(pipeline):
    with pipeline.sql_client() as client:
        client.execute_sql(
            "DELETE FROM _dlt_pipeline_state WHERE version = "
            "(SELECT MAX(version) FROM _dlt_pipeline_state)"
        )


def test_collections_have_tables_positions_and_columns_of_their_own(tmp_path):
    pipeline = pipeline_of(tmp_path, "duckdb")
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.create_scope("shop")
        for name in ("orders", "users"):
            cluster.create_collection(f"shop.{name}")
            cluster.upsert("a", {"n": 1, "password": "x"}, collection=f"shop.{name}")
            cluster.upsert("b", {"n": 2}, collection=f"shop.{name}")
        cluster.persist()
        tables = {
            "shop.orders": {"table": "orders", "document_schema": "n BIGINT"},
            "shop.*": "{collection}",
        }

        def run(**options):
            source = dcp_rs.dlt.source(client, tables=tables, drop_fields="password", **options)
            assert set(source.resources) == {"orders", "users"}
            return pipeline.run(source.with_resources(*options.pop("only", ["orders", "users"])))

        run()
        columns = ("key", "n")
        assert sorted(table_of(pipeline, "duckdb", "orders", columns)) == [("a", 1), ("b", 2)]
        assert documents(pipeline, "duckdb", "users") == {"a": {"n": 1}, "b": {"n": 2}}
        # A collection that is created again has only its new documents.
        cluster.drop_collection("shop.users")
        cluster.create_collection("shop.users")
        cluster.upsert("c", {"n": 3}, collection="shop.users")
        cluster.persist()
        run()
        assert documents(pipeline, "duckdb", "users") == {"c": {"n": 3}}
        state = pipeline.state["sources"]["couchbase"]["resources"]
        assert set(state) == {"orders", "users"}


def test_a_new_column_is_decided_by_the_schema_contract(tmp_path):
    pipeline = pipeline_of(tmp_path, "duckdb")
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:

        def run(schema, contract):
            cluster.upsert("a", {"n": 1, "m": "x"})
            cluster.persist()
            tables = {"*.*": {"document_schema": schema}}
            source = dcp_rs.dlt.source(client, tables=tables)
            pipeline.run(source, schema_contract=contract)

        run("n BIGINT", "evolve")
        with pytest.raises(PipelineStepFailed, match=r"(?i)contract"):
            run("n BIGINT, m STRING", {"columns": "freeze"})
        run("n BIGINT, m STRING", "evolve")
        rows = table_of(pipeline, "duckdb", columns=("key", "n", "m"))
        assert rows == [("a", 1, "x")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_another_type_is_not_cast_in_silence(tmp_path, kind):
    pipeline = pipeline_of(tmp_path, kind)
    changes = {
        "BIGINT": "DOUBLE",
        "INT": "BIGINT",
        "DECIMAL(10,2)": "DECIMAL(18,4)",
        "DOUBLE": "STRING",
        "ARRAY<BIGINT>": "ARRAY<DOUBLE>" if kind == "delta" else "STRING",
    }
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.upsert("a", {"n": 1})
        cluster.persist()

        def run(schema, **options):
            tables = {"*.*": {"document_schema": f"n {schema}"}}
            pipeline.run(source_of(client, kind, tables=tables), **options)

        for before, after in changes.items():
            run(before, refresh="drop_resources")
            run(before)
            with pytest.raises(PipelineStepFailed, match="has n of another type than the table"):
                run(after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_dlt_is_told_to_name_otherwise_follows_the_bucket(tmp_path, kind):
    pipeline = pipeline_of(tmp_path, kind)
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        for key in ("a", "b"):
            cluster.upsert(key, {"n": 1})
        cluster.persist()
        pipeline.run(source_of(client, kind), table_name="Other")
        cluster.remove("a")
        cluster.persist()
        pipeline.run(source_of(client, kind), table_name="Other")
        assert documents(pipeline, kind, "other") == {"b": {"n": 1}}


def test_wrong_options_and_destinations_are_refused(tmp_path):
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.upsert("a", {"n": 1})
        cluster.persist()
        with pytest.raises(PipelineStepFailed, match='pass table_format="delta"') as raised:
            pipeline_of(tmp_path, "files").run(dcp_rs.dlt.source(client))
        assert isinstance(raised.value.exception.__cause__, ConfigError)
        for disposition in ("append", "replace"):
            with pytest.raises(PipelineStepFailed, match=f"write_disposition: is {disposition}"):
                pipeline_of(tmp_path / disposition, "duckdb").run(
                    dcp_rs.dlt.source(client), write_disposition=disposition
                )
        with pytest.raises(ConfigError, match="on_error, which dlt decides"):
            dcp_rs.dlt.source(client, tables={"*.*": {"on_error": "fail"}})
        with pytest.raises(ConfigError, match="max_seqnos"):
            dcp_rs.dlt.source(client, max_seqnos=0)
        cluster.create_collection("_default.Hotel")
        cluster.create_collection("_default.hotel")
        with pytest.raises(ConfigError, match="would share the table"):
            dcp_rs.dlt.source(client)
        pipeline = pipeline_of(tmp_path / "other", "duckdb")
        pipeline.extract(dcp_rs.dlt.source(client, collections="_default"))
        with pytest.raises(PipelineStepFailed, match="not loaded yet"):
            pipeline.extract(dcp_rs.dlt.source(client, collections="_default"))
