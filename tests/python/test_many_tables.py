"""A table for each collection of a bucket."""

import threading
import time

import duckdb
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError
from dcp_rs.metrics import PrometheusCollector
from dcp_rs.replication import open_database
from dcp_rs.replication.names import TableNames
from dcp_rs.replication.tables import TablePerCollection

LATER = 30.0


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=8) as running:
        running.create_scope("inventory")
        for name in ("airline", "hotel"):
            running.create_collection(f"inventory.{name}")
        yield running


@pytest.fixture
def written(cluster):
    found = replicas.Written(cluster)
    for number in range(40):
        for collection in ("_default._default", "inventory.airline", "inventory.hotel"):
            found.upsert(f"key_{number}", {"n": number}, collection)
    return found


@pytest.fixture(params=replicas.ALL)
def replica(request, tmp_path):
    return replicas.make_many(request.param, request, tmp_path)


class Following:
    """A replication that follows in a thread. A context manager, which stops it."""

    def __init__(self, cluster, replica, **options):
        self.progress, self._stop = [], threading.Event()
        self._error = None
        options = {"once": False, "stop": self._stop, "commit_interval": 0.05} | options
        options["on_progress"] = self.progress.append
        self._thread = threading.Thread(target=self._run, args=(cluster, replica, options))

    def _run(self, cluster, replica, options):
        try:
            replicas.replicate(cluster, replica, **options)
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self._error = error

    def wait(self, holds):
        deadline = time.monotonic() + LATER
        while not (self.progress and holds(self.progress[-1])):
            assert time.monotonic() < deadline, self.progress[-1:]
            assert self._thread.is_alive(), self._error
            time.sleep(0.02)

    def wait_for(self, changes):
        self.wait(lambda progress: progress.changes >= changes)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


# ----- names -----


def test_the_table_of_a_collection_is_called_as_the_template_says():
    assert TableNames.of("collection").table("shop.orders") == "shop__orders"
    assert TableNames.of("{collection}").table("shop.orders") == "orders"
    assert TableNames.of("raw_{{{scope}}}.{collection}").table("a.b") == "raw_{a}.b"
    names = TableNames.of({"shop.ord*": "orders_{collection}", "shop.*": "{collection}"})
    assert names.table("shop.orders") == "orders_orders"
    assert names.table("shop.carts") == "carts"
    assert names.table("other.carts") is None
    assert TableNames.of({"shop.orders": "all"}).table("shop.orders") == "all"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ("documents", "same for every collection"),
        ("", "same for every collection"),
        ("{bucket}", "field other than"),
        ("{}", "field other than"),
        ("{collection:>9}", "field other than"),
        ("{collection", "is no template"),
        ({}, "names no tables"),
        ({"orders": "{collection}"}, "must be scope.collection"),
        ({"shop.*": "orders"}, "same for every collection"),
        (7, "must be a template"),
    ],
)
def test_wrong_templates_are_refused(cluster, tmp_path, tables, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        replicas.replicate(cluster, f"duckdb://{tmp_path}/x.duckdb", tables=tables)
    assert raised.value.option == "tables"
    assert not (tmp_path / "x.duckdb").exists()


def test_two_collections_that_would_share_a_table_are_refused(cluster, tmp_path):
    cluster.create_scope("other")
    cluster.create_collection("other.AIRLINE")
    url = f"duckdb://{tmp_path}/x.duckdb"
    with pytest.raises(ConfigError, match="would share the table") as raised:
        replicas.replicate(cluster, url, tables="{collection}")
    assert raised.value.option == "tables"
    assert not (tmp_path / "x.duckdb").exists(), "nothing was written"
    done = replicas.replicate(cluster, url, tables="{collection}", collections="inventory.*")
    assert set(done.tables) == {"airline", "hotel"}


def test_a_mapping_that_matches_nothing_is_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match="matches none of the collections"):
        replicas.replicate(
            cluster, f"duckdb://{tmp_path}/x.duckdb", tables={"nope.*": "{collection}"}
        )


@pytest.mark.parametrize("scheme", ["duckdb", "iceberg"])
def test_a_template_in_the_url_is_refused(cluster, tmp_path, scheme):
    url = f"{scheme}://{tmp_path}/x?table=default.{{collection}}"
    with pytest.raises(ConfigError, match="by a template"):
        replicas.replicate(cluster, url, mode="log")
    with pytest.raises(ConfigError, match="leave out table"):
        replicas.replicate(cluster, url, mode="log", tables="collection")


def test_the_table_of_another_replication_is_refused(cluster, tmp_path):
    url = f"duckdb://{tmp_path}/x.duckdb"
    replicas.replicate(cluster, url, tables="collection")
    with pytest.raises(ConfigError, match="of another replication") as raised:
        replicas.replicate(cluster, f"{url}?table=inventory__airline")
    assert raised.value.option == "target"
    replicas.replicate(cluster, f"{url}?table=other", collections="inventory.hotel")
    with pytest.raises(ConfigError, match="of another replication") as raised:
        replicas.replicate(cluster, url, tables={"inventory.hotel": "other"})
    assert raised.value.option == "tables"


# ----- contents -----


def test_each_collection_has_a_table_of_its_documents(cluster, written, replica):
    done = replicas.replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert replica.names() == {"_default___default", "inventory__airline", "inventory__hotel"}
    assert set(done.tables) == replica.names()
    assert sum(table.changes for table in done.tables.values()) == done.changes
    written.upsert("key_1", {"n": -1}, "inventory.hotel")
    cluster.remove("key_2", collection="inventory.airline")
    done = replicas.replicate(cluster, replica)
    assert done.changes == 2
    assert done.generation == 1
    assert replica.documents() == written.documents()


def test_collections_that_come_and_go_are_followed(cluster, written, replica):
    with Following(cluster, replica) as following:
        following.wait(lambda progress: progress.phase == "following")
        cluster.create_collection("inventory.route")
        for number in range(20):
            written.upsert(f"route_{number}", {"n": number}, "inventory.route")
        following.wait(
            lambda progress: (
                "inventory__route" in progress.tables
                and progress.tables["inventory__route"].changes >= 20
            )
        )
        assert replica.mode == "log" or following.progress[-1].generation == 1
        cluster.drop_collection("inventory.hotel")
        cluster.create_collection("inventory.hotel")
        written.upsert("after", {"n": 1}, "inventory.hotel")
        # A log has the events of each vBucket as well.
        events = 0 if replica.mode == "table" else 3 * cluster.num_vbuckets
        following.wait(lambda progress: progress.tables["inventory__hotel"].changes == 41 + events)
    done = replicas.replicate(cluster, replica)
    assert done.changes == 0
    assert replica.documents() == written.documents()
    assert all(table.generation == 1 for table in done.tables.values()), "nothing was loaded anew"


def test_a_collection_dropped_while_nothing_runs_is_emptied(cluster, written, replica):
    replicas.replicate(cluster, replica)
    cluster.drop_collection("inventory.hotel")
    replicas.replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert "inventory__hotel" in replica.names()
    cluster.create_collection("inventory.hotel")
    written.upsert("again", {"n": 1}, "inventory.hotel")
    replicas.replicate(cluster, replica)
    assert replica.documents() == written.documents()


@pytest.mark.parametrize("names", [None, ["inventory.hotel", "inventory.airline"]])
def test_rows_of_a_dropped_collection_are_kept_until_its_name_is_used_again(
    cluster, written, tmp_path, names
):
    path = tmp_path / "x.duckdb"
    options = {"tables": "collection", "on_drop": "keep", "collections": names}
    replicas.replicate(cluster, f"duckdb://{path}", **options)

    def keys():
        with duckdb.connect(path) as database:
            return sorted(
                key for (key,) in database.sql("SELECT key FROM inventory__hotel").fetchall()
            )

    old = keys()
    cluster.drop_collection("inventory.hotel")
    if names is None:
        replicas.replicate(cluster, f"duckdb://{path}", **options)
        assert keys() == old
        assert len(old) == 40
    cluster.create_collection("inventory.hotel")
    written.upsert("new", {"n": 1}, "inventory.hotel")
    replicas.replicate(cluster, f"duckdb://{path}", **options)
    assert keys() == ["new"]


def test_the_table_of_a_dropped_collection_is_dropped_on_demand(cluster, written, replica):
    written.upsert(b"\xff", {"n": 1}, "inventory.hotel")
    replicas.replicate(cluster, replica, on_drop="drop")
    assert replica.rejects()
    cluster.drop_collection("inventory.hotel")
    replicas.replicate(cluster, replica, on_drop="drop")
    assert replica.names() == {"_default___default", "inventory__airline"}
    assert not replica.reject_rows("inventory__hotel")
    assert replica.documents() == written.documents()
    with Following(cluster, replica, on_drop="drop") as following:
        following.wait(lambda progress: progress.phase == "following")
        cluster.drop_collection("inventory.airline")
        following.wait(lambda progress: set(progress.tables) == {"_default___default"})
        cluster.create_collection("inventory.hotel")
        written.upsert("again", {"n": 1}, "inventory.hotel")
        following.wait(
            lambda progress: (
                "inventory__hotel" in progress.tables
                and progress.tables["inventory__hotel"].changes >= 1
            )
        )
    replicas.replicate(cluster, replica, on_drop="drop")
    assert replica.names() == {"_default___default", "inventory__hotel"}
    assert replica.documents() == written.documents()


def test_a_collection_that_is_added_is_loaded_alone(cluster, written, replica):
    done = replicas.replicate(cluster, replica, collections="inventory.airline")
    assert set(done.tables) == {"inventory__airline"}
    both = ["inventory.airline", "inventory.hotel"]
    written.upsert("later", {"n": 1}, "inventory.airline")
    done = replicas.replicate(cluster, replica, collections=both)
    own = 41 if replica.mode == "table" else 40 + 2 * cluster.num_vbuckets
    assert done.tables["inventory__airline"].changes == 1, "it was not read again"
    assert done.tables["inventory__hotel"].changes >= 40
    assert done.changes <= own + 1
    written.keys = {each for each in written.keys if each[0] != "_default._default"}
    assert replica.documents() == written.documents()


def test_a_named_collection_that_is_created_again_is_loaded_again(cluster, written, replica):
    names = ["inventory.airline", "inventory.hotel"]
    replicas.replicate(cluster, replica, collections=names)
    cluster.drop_collection("inventory.hotel")
    cluster.create_collection("inventory.hotel")
    for number in range(10):
        written.upsert(f"again_{number}", {"n": number}, "inventory.hotel")
        written.upsert(f"again_{number}", {"n": number}, "inventory.airline")
    done = replicas.replicate(cluster, replica, collections=names)
    written.keys = {each for each in written.keys if each[0] != "_default._default"}
    assert replica.documents() == written.documents()
    assert done.tables["inventory__airline"].generation == 1


def test_a_named_collection_that_is_dropped_and_created_while_running_comes_back(
    cluster, written, tmp_path, monkeypatch
):
    monkeypatch.setattr("dcp_rs.replication.core._LOOK", 0.1)
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    names = ["inventory.airline", "inventory.hotel"]
    with Following(cluster, replica, collections=names) as following:
        following.wait(lambda progress: progress.phase == "following")
        cluster.drop_collection("inventory.hotel")
        written.upsert("meanwhile", {"n": 1}, "inventory.airline")
        following.wait(lambda progress: progress.phase == "following" and progress.changes == 81)
        time.sleep(0.5)
        following.wait(lambda progress: progress.phase == "following")
        cluster.create_collection("inventory.hotel")
        written.upsert("back", {"n": 1}, "inventory.hotel")
        following.wait_for(82)
        assert following.progress[-1].changes == 82, "the other table was not read again"
    written.keys = {each for each in written.keys if each[0] != "_default._default"}
    assert replica.documents() == written.documents()


def test_a_misspelt_collection_is_refused_at_the_start(cluster, tmp_path):
    with pytest.raises(ConfigError, match="no collection"):
        replicas.replicate(
            cluster,
            f"duckdb://{tmp_path}/x.duckdb",
            tables="collection",
            collections=["inventory.airline", "inventory.hotl"],
        )
    assert not (tmp_path / "x.duckdb").exists()


@pytest.mark.usefixtures("written")
def test_metrics_have_the_changes_of_each_table(cluster, client, tmp_path):
    registry, collector = CollectorRegistry(), PrometheusCollector()
    registry.register(collector)
    update = collector.add_replication(client, name="t")
    replicas.replicate(
        cluster, f"duckdb://{tmp_path}/x.duckdb", tables="collection", on_progress=update
    )
    for table in ("_default___default", "inventory__airline", "inventory__hotel"):
        labels = {"bucket": "default", "stream": "t", "table": table}
        found = registry.get_sample_value("dcp_rs_table_committed_records_total", labels)
        assert found == 40, table


# ----- crashes between the tables of a commit -----


class Interrupted(Exception):  # noqa: N818 - what a crash is here
    pass


def torn(database, after):
    """Has a database's next commit end after some of its tables."""

    class Torn(type(database)):
        def commit(self, commits):
            super().commit(commits[:after])
            raise Interrupted

    database.__class__ = Torn
    return database


@pytest.fixture(params=["delta-table", "delta-log", "parquet-log", "iceberg-log"])
def lake(request, tmp_path):
    return replicas.make_many(request.param, request, tmp_path)


def interrupt(cluster, lake, **options):
    with pytest.raises(Interrupted):
        replicas.replicate(
            cluster,
            torn(open_database(lake.url), 1),
            tables="collection",
            mode=lake.mode,
            **options,
        )


def test_tables_that_have_a_commit_leave_out_what_they_have(cluster, written, lake):
    replicas.replicate(cluster, lake)
    for number in range(30):
        for collection in ("_default._default", "inventory.airline", "inventory.hotel"):
            written.upsert(f"key_{number}", {"n": -number}, collection)
    interrupt(cluster, lake)
    written.upsert("after", {"n": 1})
    done = replicas.replicate(cluster, lake)
    assert_is_as(lake, written)
    assert done.tables["_default___default"].changes == 1, "the first table had the others"
    assert done.tables["inventory__hotel"].changes == 30
    assert done.generation == 1


def assert_is_as(lake, written):
    assert lake.documents() == written.documents()
    assert lake.rejects() == written.rejects()


def test_what_is_removed_in_an_interrupted_first_load_is_removed_from_the_tables_that_had_it(
    cluster, written, lake
):
    interrupt(cluster, lake)
    for number in range(20):
        cluster.remove(f"key_{number}")
    replicas.replicate(cluster, lake)
    assert_is_as(lake, written)


def test_a_table_that_has_what_a_failover_lost_is_read_by_its_own_stream(
    cluster, written, lake, caplog
):
    replicas.replicate(cluster, lake)
    for vbucket in range(cluster.num_vbuckets):
        cluster.set_replica_lag(vbucket, 1, None)
    for number in range(30):
        for collection in ("_default._default", "inventory.airline", "inventory.hotel"):
            written.upsert(f"lost_{number}", {"n": number}, collection)
    interrupt(cluster, lake)
    node = cluster.copies_of(0)[0]
    cluster.failover(node)
    cluster.restart(node)
    cluster.rebalance()
    for number in range(60):
        written.upsert(f"new_{number}", {"n": number}, "inventory.airline")
        written.upsert(f"new_{number}", {"n": number})
    with caplog.at_level("INFO", "dcp_rs.replication"):
        replicas.replicate(cluster, lake)
    assert_is_as(lake, written)
    assert "_default._default read by a stream of their own" in caplog.text


def test_a_rollback_of_a_vbucket_in_which_a_table_is_ahead_is_applied_to_it(cluster, written, lake):
    replicas.replicate(cluster, lake)
    for number in range(40):
        written.upsert(f"key_{number}", {"n": -number})
        written.upsert(f"key_{number}", {"n": -number}, "inventory.airline")
    interrupt(cluster, lake)
    # Below the position of every table.
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, max(high - 12, 0))
    for number in range(40):
        written.upsert(f"new_{number}", {"n": number})
    replicas.replicate(cluster, lake)
    assert_is_as(lake, written)


def test_a_table_far_behind_the_others_is_read_apart_from_them(cluster, written, lake, monkeypatch):
    monkeypatch.setattr("dcp_rs.replication.tables._FAR", 50)
    airline, both = ["inventory.airline"], ["inventory.airline", "inventory.hotel"]
    replicas.replicate(cluster, lake, collections=both)
    for number in range(100):
        written.upsert(f"key_{number}", {"n": -number}, "inventory.airline")
    replicas.replicate(cluster, lake, collections=airline)
    written.upsert("hotel", {"n": 1}, "inventory.hotel")
    done = replicas.replicate(cluster, lake, collections=both)
    written.keys = {each for each in written.keys if each[0] != "_default._default"}
    assert_is_as(lake, written)
    assert done.tables["inventory__airline"].changes == 0
    assert done.tables["inventory__hotel"].changes == 1


def test_a_collection_whose_name_the_stream_lacks_is_looked_for(cluster, written, tmp_path):
    """As for changes that come before the manifest that names their collection."""
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    routed = TablePerCollection._named

    def nameless(self, number, changes):
        for name in ("scope", "collection"):
            place = changes.schema.get_field_index(name)
            changes = changes.set_column(place, name, pa.nulls(len(changes), pa.string()))
        return routed(self, number, changes)

    with pytest.MonkeyPatch.context() as patched, Following(cluster, replica) as following:
        patched.setattr(TablePerCollection, "_named", nameless)
        following.wait(lambda progress: progress.phase == "following")
        cluster.create_collection("inventory.route")
        written.upsert("route", {"n": 1}, "inventory.route")
        following.wait_for(121)
    assert replica.documents() == written.documents()


def test_a_rollback_to_before_the_end_of_a_collection_ends_it_again(cluster, written, replica):
    replicas.replicate(cluster, replica)
    cluster.drop_collection("inventory.hotel")
    cluster.create_collection("inventory.hotel")
    replicas.replicate(cluster, replica)
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, high - 2)
    written.upsert("key_1", {"n": "new"}, "inventory.hotel")
    replicas.replicate(cluster, replica)
    assert replica.documents() == written.documents()
