"""A bucket as a lazy frame: what it reads, and that it equals the eager read."""

import random
import subprocess
import sys

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import dcp_rs
import dcp_rs.polars
from dcp_rs.exceptions import ConfigError, DataError, RollbackError

SCHEMA = "n BIGINT, name STRING"
ORDER = ["vbucket", "epoch", "seqno"]


@pytest.fixture(scope="module")
def filled():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16) as cluster:
        rng = random.Random(7)
        for number in range(300):
            key = f"key_{rng.randrange(200)}"
            if number % 9 == 8 and cluster.get(key) is not None:
                cluster.remove(key)
            else:
                cluster.upsert(key, {"n": rng.randrange(50), "name": f"name {number}"})
        with cluster.connect() as client:
            yield cluster, client


def test_bounds_are_those_of_the_scan():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.upsert("first", b"{}")
        lazy = dcp_rs.polars.scan(client, columns=["key"])
        cluster.upsert("second", b"{}")
        assert lazy.collect()["key"].to_list() == ["first"]
        assert lazy.collect()["key"].to_list() == ["first"]
        cluster.persist()
        plan = client.plan()
        cluster.upsert("third", b"{}")
        cluster.persist()
        following = dcp_rs.polars.scan(client, client.plan(start=plan.end), columns=["key"])
        assert following.collect()["key"].to_list() == ["third"]


@pytest.mark.parametrize("seed", range(12))
def test_a_query_equals_that_of_the_eager_read(filled, seed):
    _, client = filled
    rng = random.Random(seed)
    with client.stream(until="now", document_schema=SCHEMA) as stream:
        eager = pl.DataFrame(stream)
    lazy = dcp_rs.polars.scan(
        client, document_schema=SCHEMA, batch=dcp_rs.BatchPolicy(max_rows=rng.choice([1, 7, 5000]))
    )
    assert lazy.collect_schema() == eager.schema
    chosen = sorted(rng.sample(eager.columns, rng.randint(1, len(eager.columns))))
    predicates = [
        pl.col("n") > rng.randrange(50),
        pl.col("op") == "deletion",
        pl.col("key").str.ends_with(str(rng.randrange(10))),
        pl.col("name").is_null() | (pl.col("vbucket") < 5),
    ]
    predicate = rng.choice([*predicates, predicates[0] & predicates[2]])
    columns = [*{*ORDER, *chosen}]
    engine = rng.choice(["in-memory", "streaming"])

    def collected(frame):
        return frame.lazy().collect(engine=engine)

    for query in (
        lambda frame: frame.filter(predicate).select(columns).sort(ORDER),
        lambda frame: frame.select(columns).sort(ORDER).filter(pl.col("seqno") > 3),
        lambda frame: frame.filter(predicate).group_by("vbucket").len().sort("vbucket"),
        lambda frame: frame.filter(predicate).select(pl.len()),
        lambda frame: frame.select(pl.len()),
    ):
        assert_frame_equal(collected(query(lazy)), collected(query(eager)))
    rows = rng.randint(0, eager.height + 20)
    assert lazy.head(rows).collect(engine=engine).height == min(rows, eager.height)
    part = lazy.filter(predicate).head(rows).collect(engine=engine)
    assert part.height == min(rows, eager.filter(predicate).height)
    assert part.join(eager.filter(predicate), on=ORDER, how="anti").is_empty()


def test_documents_are_read_only_where_a_column_needs_them():
    schema = dcp_rs.DocumentSchema(SCHEMA, on_malformed="fail")
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4) as cluster, cluster.connect() as client:
        cluster.upsert("key", b"no document")
        lazy = dcp_rs.polars.scan(client, document_schema=schema)
        assert lazy.select("key").collect().rows() == [("key",)]
        assert lazy.select(pl.len()).collect().item() == 1
        for engine in ("in-memory", "streaming"):
            with pytest.raises(DataError, match="the document is not JSON"):
                lazy.select("n").collect(engine=engine)


def test_a_slice_ends_the_read():
    schema = dcp_rs.DocumentSchema(SCHEMA, on_malformed="fail")
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        for n in range(20):
            cluster.upsert(f"key_{n}", {"n": n})
        cluster.upsert("last", b"no document")
        lazy = dcp_rs.polars.scan(
            client, document_schema=schema, batch=dcp_rs.BatchPolicy(max_rows=1)
        )
        assert lazy.head(3).collect()["n"].to_list() == [0, 1, 2]
        with pytest.raises(DataError):
            lazy.collect()


def test_filters_of_the_engine_are_arguments(filled):
    _, client = filled
    lazy = dcp_rs.polars.scan(client, keys="key_1*", ops="mutation", columns=["key", "op"])
    found = lazy.collect()
    assert found.height > 20
    assert found["key"].str.starts_with("key_1").all()
    assert set(found["op"]) == {"mutation"}


def test_a_history_that_changed_is_told():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        for n in range(5):
            cluster.upsert(f"key_{n}", {"n": n})
        cluster.persist()
        plan = client.plan()
        cluster.upsert("key_9", b"{}")
        cluster.persist()
        following = dcp_rs.polars.scan(client, client.plan(start=plan.end))
        cluster.roll_back(0, 0)
        for n in range(9):
            cluster.upsert(f"key_{n}", {"n": n})
        with pytest.raises(RollbackError):
            following.collect()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"value_format": "variant"}, "value_format: must be 'binary' or 'string'"),
        ({"columns": ["sequence"]}, 'no column "sequence"'),
        ({"batch": 3}, "batch: must be a BatchPolicy"),
        ({"plan": "earliest"}, "plan: must be a ReadPlan"),
        ({"collections": "no.such"}, "no"),
    ],
)
def test_wrong_options_are_refused_before_a_query(filled, options, says):
    _, client = filled
    with pytest.raises(ConfigError, match=says):
        dcp_rs.polars.scan(client, **options)


def test_a_plan_has_its_own_filter(filled):
    _, client = filled
    with pytest.raises(ConfigError, match="keys: is the plan's"):
        dcp_rs.polars.scan(client, client.plan(is_last=True), keys="a*")


def test_importing_it_does_not_import_polars():
    program = "import sys, dcp_rs.polars; print('polars' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True
    )
    assert done.stdout.strip() == b"False"
