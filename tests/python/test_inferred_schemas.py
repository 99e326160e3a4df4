"""Schemas that are found out, and tables that grow with the documents."""

import json

import pyarrow as pa
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConfigError, DataError
from dcp_rs.replication.sampling import Sampler
from inferred import assert_holds, rows_of, types_of

INFER = {"document_schema": "infer"}
INTEGERS = {"duckdb": "BIGINT", "postgres": "bigint"}
TEXTS = {"duckdb": "VARCHAR", "postgres": "text"}
DECIMALS = {"duckdb": "DECIMAL(38,9)", "postgres": "DECIMAL(38,9)"}


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=8) as running:
        running.create_scope("shop")
        for name in ("orders", "users", "images"):
            running.create_collection(f"shop.{name}")
        yield running


@pytest.fixture
def written(cluster):
    found = replicas.Written(cluster)
    for number in range(40):
        order = {"id": number, "total": number / 4, "paid": number % 2 == 0, "to": {"zip": "1"}}
        found.upsert(f"order_{number}", order, "shop.orders")
        user = {"name": f"user {number}", "timestamp": number, "tags": [number]}
        found.upsert(f"user_{number}", user | ({"vip": True} if number > 30 else {}), "shop.users")
    return found


@pytest.fixture(params=replicas.ALL)
def replica(request, tmp_path):
    found = replicas.make_many(request.param, request, tmp_path)
    found.options |= INFER | {"extra": "column", "collections": ["shop.orders", "shop.users"]}
    return found


@pytest.fixture(params=["duckdb-table", "postgres-table"])
def database(request, tmp_path):
    found = replicas.make_many(request.param, request, tmp_path)
    found.options |= INFER | {"extra": "column", "collections": ["shop.orders", "shop.users"]}
    return found


def decision(replica, table):
    """Gives what the state of a table of a database says."""
    (found,) = replica.database.query(
        f"SELECT state FROM dcp_rs_replication WHERE table_name = '{table}'"
    )
    return json.loads(found["state"])


# ----- deciding -----


def test_each_collection_has_the_columns_of_its_documents(cluster, written, replica):
    replicas.replicate(cluster, replica)
    assert_holds(replica, written)
    row = rows_of(replica)["shop.orders", "order_5"]
    assert (row["id"], row["total"], row["paid"]) == (5, 1.25, False)
    assert json.loads(row["to"]) == {"zip": "1"}
    user = rows_of(replica)["shop.users", "user_5"]
    assert "id" not in user
    assert (user["name"], user["doc_timestamp"], user["vip"]) == ("user 5", 5, None)
    assert user["timestamp"].year > 2000, "the column of the change itself"


def test_a_field_that_differs_in_case_only_is_warned_of(cluster, tmp_path, caplog):
    cluster.upsert("k", {"Id": 1, "x": {"a": 1, "A": 2}, "ID": None}, collection="shop.orders")
    cluster.upsert("l", {"id": "a", "X": 1}, collection="shop.orders")

    def warned():
        found = [each for each in caplog.records if getattr(each, "event", "") == "field_left_out"]
        caplog.clear()
        return {tuple(each.fields.values()) for each in found}, len(found)

    with cluster.connect() as client:
        found = dcp_rs.replication.infer_schemas(client, collections="shop.orders")
        names = found["shop.orders"].document_schema.split(", ")
        kept = {name.split()[0].lower(): name.split()[0] for name in names}
        left = {"id", "Id", "X", "x"} - set(kept.values())
        expected = {("shop.orders", kept[name.lower()], name) for name in left}
        assert len(expected) == 2
        assert warned() == (expected, 2)
        options = {"collections": ["shop.orders"], "once": True, "document_schema": "infer"}
        target = f"duckdb://{tmp_path}/d.duckdb?table=t"
        dcp_rs.replicate(client, target, **options)
        assert warned()[1] == 2
        dcp_rs.replicate(client, target, **options)
        assert warned()[1] == 0


def test_a_restart_keeps_what_was_decided(cluster, written, replica):
    options = replica.options | {"new_fields": "ignore", "type_conflicts": "null"}
    replicas.replicate(cluster, replica, **options)
    before = set(rows_of(replica)["shop.orders", "order_1"])
    for number in range(40):
        other = {"id": str(number), "other": number}
        written.upsert(f"order_{number}", other, "shop.orders")
    done = replicas.replicate(cluster, replica, **options)
    rows = rows_of(replica)
    assert set(rows["shop.orders", "order_1"]) == before
    assert json.loads(rows["shop.orders", "order_1"]["_extra"]) == {"id": "1", "other": 1}
    assert done.generation == 1, "nothing is loaded anew"


def test_a_collection_of_binary_documents_is_kept_as_bytes(cluster, request, tmp_path):
    for kind in replicas.TABLES:
        replica = replicas.make_many(f"{kind}-table", request, tmp_path)
        for number in range(3):
            cluster.upsert(f"image_{number}", b"\x00\xff%d" % number, collection="shop.images")
        replicas.replicate(cluster, replica, collections="shop.images", **INFER)
        rows = rows_of(replica)
        assert {key: bytes(row["value"]) for (_, key), row in rows.items()} == {
            f"image_{number}": b"\x00\xff%d" % number for number in range(3)
        }


def test_documents_that_are_no_objects_are_kept_as_json(cluster, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    written = replicas.Written(cluster)
    written.upsert("list", [1, 2], "shop.images")
    written.upsert("number", b"7", "shop.images")
    replicas.replicate(cluster, replica, collections="shop.images", **INFER)
    assert replica.documents() == written.documents()


def test_one_table_of_all_collections_has_the_columns_of_all(cluster, written, tmp_path):
    replica = replicas.InDuckDB(tmp_path)
    replicas.replicate(cluster, replica, extra="column", **INFER)
    assert_holds(replica, written)
    assert {"id", "name", "vip"} <= types_of(replica).keys()


def test_columns_of_an_empty_collection_are_decided_by_its_first_documents(
    cluster, written, replica
):
    options = replica.options | {"collections": None}
    replicas.replicate(cluster, replica, **options)
    written.upsert("first", {"a": 1, "b": {"c": 2}}, "shop.images")
    cluster.create_collection("shop.later")
    written.upsert("second", {"a": "x"}, "shop.later")
    replicas.replicate(cluster, replica, **options)
    assert_holds(replica, written)
    assert rows_of(replica)["shop.images", "first"]["a"] == 1


def test_objects_become_columns_by_path_or_structs(cluster, tmp_path):
    written = replicas.Written(cluster)
    written.upsert("a", {"geo": {"lat": 1.5, "city": {"name": "Bern"}}, "n": 1}, "shop.orders")
    written.upsert("b", {"geo": None, "n": 2}, "shop.orders")
    for nested in ("struct", "columns"):
        (tmp_path / nested).mkdir()
        replica = replicas.OfMany(replicas.InDuckDB(tmp_path / nested), "duckdb", "table")
        options = INFER | {"nested": nested, "extra": "column", "collections": "shop.orders"}
        replicas.replicate(cluster, replica, **options)
        row = rows_of(replica)["shop.orders", "a"]
        if nested == "struct":
            assert row["geo"] == {"lat": 1.5, "city": {"name": "Bern"}}
            written.upsert("s", {"geo": {"lat": 1, "alt": 9}}, "shop.orders")
            replicas.replicate(cluster, replica, **options)
            row = rows_of(replica)["shop.orders", "s"]
            assert (row["geo"]["lat"], json.loads(row["_extra"])) == (1.0, {"geo": {"alt": 9}})
            continue
        assert (row["geo__lat"], row["geo__city__name"]) == (1.5, "Bern")
        assert rows_of(replica)["shop.orders", "b"]["geo__lat"] is None
        written.upsert("c", {"geo": {"lat": 2.5, "lon": 3}, "n": 3}, "shop.orders")
        replicas.replicate(cluster, replica, **options)
        assert rows_of(replica)["shop.orders", "c"]["geo__lon"] == 3


# ----- growing -----


def test_a_new_field_is_a_column_from_the_row_that_has_it_first(cluster, written, replica):
    replicas.replicate(cluster, replica)
    written.upsert("order_1", {"id": 1, "note": "first"}, "shop.orders")
    written.upsert("order_50", {"id": 50, "note": "second", "at": {"x": 1}}, "shop.orders")
    done = replicas.replicate(cluster, replica)
    assert_holds(replica, written)
    rows = rows_of(replica)
    assert rows["shop.orders", "order_50"]["note"] == "second"
    assert rows["shop.orders", "order_2"]["note"] is None
    assert done.generation == 1, "nothing is loaded anew"


def test_text_in_a_column_of_decimals_is_kept_as_it_was_written(cluster, written, database):
    written.upsert("a", {"release": 1}, "shop.orders")
    replicas.replicate(cluster, database)
    written.upsert("b", {"release": 1.5}, "shop.orders")
    replicas.replicate(cluster, database)
    assert types_of(database, "shop__orders")["release"] == DECIMALS[database.kind]
    written.upsert("c", {"release": "1.10"}, "shop.orders")
    replicas.replicate(cluster, database)
    assert rows_of(database)["shop.orders", "c"]["release"] == "1.10"
    assert_holds(database, written)


def test_a_field_that_is_new_while_changes_are_followed_is_a_column(cluster, written, replica):
    from test_many_tables import Following

    with Following(cluster, replica) as following:
        following.wait(lambda progress: progress.phase == "following")
        before = following.progress[-1].changes
        for number in range(10):
            written.upsert(f"new_{number}", {f"field_{number}": number}, "shop.users")
            following.wait_for(before + 1 + number)
    assert_holds(replica, written)
    assert rows_of(replica)["shop.users", "new_7"]["field_7"] == 7


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, DECIMALS), (2**63, dict.fromkeys(DECIMALS, "DECIMAL(38,0)")), ("x", TEXTS)],
)
def test_a_type_is_widened_so_that_no_value_is_lost(cluster, written, database, value, expected):
    high = 2**63 - 1
    written.upsert("order_1", {"id": high}, "shop.orders")
    replicas.replicate(cluster, database)
    assert types_of(database, "shop__orders")["id"] == INTEGERS[database.kind]
    written.upsert("order_50", {"id": value}, "shop.orders")
    done = replicas.replicate(cluster, database)
    assert types_of(database, "shop__orders")["id"] == expected[database.kind]
    assert_holds(database, written)
    assert done.generation == 1, "nothing is loaded anew"


def test_a_number_that_a_double_does_not_hold_is_not_rounded(cluster, written, database):
    replicas.replicate(cluster, database)
    before = types_of(database, "shop__orders")["total"].lower()
    assert before.startswith("double")
    written.upsert("order_1", b'{"total": 0.1234567890123456789}', "shop.orders")
    replicas.replicate(cluster, database)
    row = rows_of(database)["shop.orders", "order_1"]
    assert row["total"] == "0.1234567890123456789"
    assert_holds(database, written)


def test_what_a_target_cannot_widen_is_kept_beside_its_column(cluster, written, replica):
    replicas.replicate(cluster, replica)
    written.upsert("order_1", {"id": "text", "total": 1.5}, "shop.orders")
    replicas.replicate(cluster, replica)
    assert_holds(replica, written)
    row = rows_of(replica)["shop.orders", "order_1"]
    assert (row["total"], row["_malformed"]) == (1.5, None)
    if replica.kind in {"delta", "iceberg", "parquet"}:
        assert row["id"] is None
        assert json.loads(row["_extra"]) == {"id": "text"}


def test_a_rollback_after_columns_were_added_leaves_them(cluster, written, replica):
    replicas.replicate(cluster, replica)
    for number in range(20):
        written.upsert(f"order_{number}", {"id": number, "late": number}, "shop.orders")
    replicas.replicate(cluster, replica)
    for vbucket, high in cluster.high_seqnos().items():
        cluster.roll_back(vbucket, max(high - 4, 0))
    written.upsert("order_60", {"later": 1}, "shop.orders")
    replicas.replicate(cluster, replica)
    assert_holds(replica, written)
    assert "late" in rows_of(replica)["shop.orders", "order_60"]


def test_a_field_that_was_left_out_has_the_table_loaded_anew(cluster, written, database):
    ignoring = database.options | {"new_fields": "ignore", "extra": "drop"}
    replicas.replicate(cluster, database, **ignoring)
    written.upsert("order_1", {"id": 1, "note": "early"}, "shop.orders")
    replicas.replicate(cluster, database, **ignoring)
    assert "note" not in rows_of(database)["shop.orders", "order_1"]
    options = database.options | {"extra": "drop"}
    done = replicas.replicate(cluster, database, **options)
    assert rows_of(database)["shop.orders", "order_1"]["note"] == "early"
    assert done.tables["shop__orders"].generation == 2
    assert done.tables["shop__users"].generation == 1, "the other was complete"


# ----- contracts -----


def test_documents_with_new_fields_or_other_types_are_rejected(cluster, written, replica):
    options = replica.options | {"new_fields": "reject", "type_conflicts": "reject"}
    replicas.replicate(cluster, replica, **options)
    written.upsert("order_1", {"id": 1, "note": "new"}, "shop.orders")
    written.upsert("order_2", {"id": "two"}, "shop.orders")
    written.upsert("order_3", {"id": 33}, "shop.orders")
    done = replicas.replicate(cluster, replica, **options)
    rows, rejects = rows_of(replica), replica.reject_rows("shop__orders")
    if replica.mode == "table":
        assert not {("shop.orders", "order_1"), ("shop.orders", "order_2")} & rows.keys()
    assert rows["shop.orders", "order_3"]["id"] == 33
    reasons = {bytes(row["key"]): row["reason"] for row in rejects}
    assert reasons[b"order_1"] == "fields are not in the schema: note"
    assert reasons[b"order_2"].startswith("id does not fit: expected a whole number")
    assert done.rejected == 2
    written.upsert("order_4", {"more": 1}, "shop.orders")
    with pytest.raises(DataError, match="not in the schema: more"):
        replicas.replicate(cluster, replica, on_error="fail", **options)


def test_tables_have_options_of_their_own(cluster, written, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    written.upsert("image", b"\x00", "shop.images")
    tables = {
        "shop.orders": {"table": "orders", "document_schema": "id BIGINT, total DECIMAL(9, 2)"},
        "shop.users": {"table": "users", "document_schema": "infer", "deletes": "mark"},
        "shop.*": "{collection}",
    }
    cluster.remove("user_1", collection="shop.users")
    replicas.replicate(cluster, replica, tables=tables, collections="shop.*")
    assert replica.names() == {"orders", "users", "images"}
    orders = {row["key"]: row for row in replica.rows("orders")}
    assert (orders["order_5"]["id"], str(orders["order_5"]["total"])) == (5, "1.25")
    assert "paid" not in orders["order_5"]
    users = {row["key"]: row for row in replica.rows("users")}
    assert (users["user_40"] if "user_40" in users else users["user_39"])["vip"] is True
    cluster.remove("user_2", collection="shop.users")
    written.upsert("order_5", {"id": 6, "paid": True}, "shop.orders")
    replicas.replicate(cluster, replica, tables=tables, collections="shop.*")
    users = {row["key"]: row for row in replica.rows("users")}
    assert users["user_2"]["_deleted_at"] is not None
    assert {row["key"]: row["id"] for row in replica.rows("orders")}["order_5"] == 6
    assert bytes(replica.rows("images")[0]["_malformed"]) == b"\x00"


@pytest.mark.usefixtures("written")
def test_a_start_without_the_option_is_told_that_columns_were_inferred(cluster, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    replicas.replicate(cluster, replica, document_schema="infer")
    with pytest.raises(ConfigError, match="keep them, or infer if they were inferred"):
        replicas.replicate(cluster, replica)


def test_documents_that_are_no_objects_are_kept_beside_the_columns(cluster, written, replica):
    cluster.upsert("image", b"\x00\xff", collection="shop.orders")
    cluster.upsert("list", [1], collection="shop.orders")
    replicas.replicate(cluster, replica)
    rows = rows_of(replica)
    assert bytes(rows["shop.orders", "image"]["_malformed"]) == b"\x00\xff"
    assert bytes(rows["shop.orders", "list"]["_malformed"]) == b"[1]"
    assert rows["shop.orders", "order_1"]["_malformed"] is None
    assert len(rows) == len(written.keys) + 2


def test_a_schema_of_its_own_has_prefixes_and_ends_at_what_does_not_fit(cluster, written, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    orders = dcp_rs.DocumentSchema("id BIGINT, total INT", prefix="o_", on_malformed="column")
    users = dcp_rs.DocumentSchema("name STRING, timestamp INT", prefix="u_", on_malformed="fail")
    tables = {
        "shop.orders": {"table": "orders", "document_schema": orders},
        "shop.users": {"table": "users", "document_schema": users},
    }
    replicas.replicate(cluster, replica, tables=tables)
    by_key = {row["key"]: row for row in replica.rows("orders")}
    assert (by_key["order_2"]["o_id"], by_key["order_4"]["o_id"]) == (None, None), "0.5 is no INT"
    assert json.loads(bytes(by_key["order_2"]["_malformed"]))["total"] == 0.5
    assert {row["u_timestamp"] for row in replica.rows("users")} == set(range(40))
    written.upsert("user_1", {"timestamp": "now"}, "shop.users")
    with pytest.raises(DataError, match="timestamp"):
        replicas.replicate(cluster, replica, tables=tables)


def test_a_schema_that_is_given_can_evolve(cluster, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    written = replicas.Written(cluster)
    written.upsert("a", {"n": 1}, "shop.orders")
    options = {
        "document_schema": "n INT",
        "type_conflicts": "evolve",
        "new_fields": "evolve",
        "collections": "shop.orders",
    }
    replicas.replicate(cluster, replica, **options)
    assert types_of(replica, "shop__orders")["n"] == "INTEGER"
    written.upsert("b", {"n": 2**40, "m": True}, "shop.orders")
    replicas.replicate(cluster, replica, **options)
    assert types_of(replica, "shop__orders")["n"] == "BIGINT"
    assert_holds(replica, written)
    written.upsert("c", {"n": 3}, "shop.orders")
    done = replicas.replicate(cluster, replica, **options)
    assert done.generation == 1, "the schema is the one that the table began with"


@pytest.mark.parametrize(
    ("options", "option", "reason"),
    [
        ({"new_fields": "evolve"}, "new_fields", "set document_schema"),
        ({"extra": "column"}, "extra", "set document_schema"),
        ({"nested": "columns", "document_schema": "a INT"}, "nested", "that are inferred"),
        ({"new_fields": "add", **INFER}, "new_fields", "must be"),
        ({"sample": 0, **INFER}, "sample", "from 1"),
        ({"document_schema": "a INT, a INT", "extra": "column"}, "document_schema", "twice"),
        (
            {"document_schema": dcp_rs.DocumentSchema("infer", prefix="x_")},
            "document_schema",
            "has no prefix",
        ),
        ({"tables": {"a.*": {"tabel": "x"}}}, "tables", "did you mean table?"),
        ({"tables": {"a.*": {"new_feilds": "x"}}}, "tables", "did you mean new_fields?"),
        ({"tables": {"a.*": {"deletes": "x"}}}, "tables", "deletes of 'a.*': must be"),
    ],
)
def test_options_that_contradict_are_refused(cluster, tmp_path, options, option, reason):
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")) as raised:
        replicas.replicate(cluster, f"duckdb://{tmp_path}/x.duckdb", **options)
    assert raised.value.option == option
    assert not (tmp_path / "x.duckdb").exists()


@pytest.mark.parametrize("tables", [None, "collection", {"shop.*": {"nested": "struct"}}])
def test_structs_are_refused_where_a_target_has_none_before_one_is_seen(
    cluster, postgres_database, tables
):
    replica = replicas.OfMany(replicas.InPostgres(postgres_database), "postgres", "table")
    options = {"tables": tables, "nested": None if isinstance(tables, dict) else "struct"}
    with pytest.raises(ConfigError, match="choose json or columns") as raised:
        replicas.replicate(cluster, postgres_database, **INFER | options)
    assert raised.value.option == ("tables" if isinstance(tables, dict) else "nested")
    assert not replica.names()


@pytest.mark.usefixtures("written")
def test_another_form_of_objects_than_the_tables_is_refused(cluster, database):
    replicas.replicate(cluster, database)
    with pytest.raises(ConfigError, match="was made with json") as raised:
        replicas.replicate(cluster, database, nested="columns")
    assert raised.value.option == "nested"


def test_a_target_that_cannot_grow_is_refused(cluster):
    class Plain:
        modes = frozenset({"table"})

        def commit(self, _):
            raise AssertionError

        open = close = commit

    with pytest.raises(ConfigError, match="lacks stored, widens"):
        replicas.replicate(cluster, Plain(), **INFER)


@pytest.mark.usefixtures("written")
def test_a_state_of_version_1_has_no_decision(cluster, tmp_path):
    replica = replicas.OfMany(replicas.InDuckDB(tmp_path), "duckdb", "table")
    replicas.replicate(cluster, replica)
    assert decision(replica, "shop__orders")["version"] == 1
    replicas.replicate(cluster, replica, collections="shop.users")
    other = replicas.OfMany(replicas.InDuckDB(tmp_path / ".."), "duckdb", "table")
    replicas.replicate(cluster, other, **INFER)
    assert decision(other, "shop__orders")["version"] == 2


# ----- samples -----


def test_a_sample_is_spread_over_vbuckets_and_bounded(cluster):
    for number in range(2000):
        cluster.upsert(f"order_{number}", {"id": number}, collection="shop.orders")
    with cluster.connect() as client:
        found = dcp_rs.replication.infer_schemas(client, collections="shop.*", sample=16)
    orders = found["shop.orders"]
    assert orders.documents == 16
    assert orders.document_schema == "id BIGINT"
    assert orders.fields[0].share == 1.0
    assert found["shop.users"].document_schema is None


def test_a_sample_takes_a_few_documents_of_each_vbucket():
    def changes(vbuckets):
        count = len(vbuckets)
        return pa.table(
            {
                "op": ["mutation"] * count,
                "value": ["{}"] * count,
                "vbucket": pa.array(vbuckets, pa.int32()),
                "collection_id": [8] * count,
            }
        )

    sampler = Sampler(limit=16, shares=1, vbuckets=8)
    assert sampler.choose(changes([0] * 10 + [1] * 5)) == {8: [0, 1, 10, 11]}
    # If only few vBuckets have documents, they give more.
    assert len(sampler.choose(changes([0] * 1000))[8]) == 12
    assert sampler.is_full(8)
    assert not sampler.choose(changes([2]))


def test_a_sample_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("dcp_rs.replication.sampling._BYTES", 1000)
    documents = {"op": ["mutation"] * 9, "value": ["x" * 100] * 9, "collection_id": [8] * 9}
    sampler = Sampler(limit=100, shares=2, vbuckets=1)
    chosen = sampler.choose(pa.table(documents | {"vbucket": pa.array([0] * 9, pa.int32())}))
    assert len(chosen[8]) == 5, "half of the memory"
    assert sampler.is_full(8)


def test_a_sample_has_a_rare_collection_beside_a_large_one(cluster, monkeypatch):
    monkeypatch.setattr("dcp_rs.replication.sampling._WASTED", 500)
    for number in range(3000):
        cluster.upsert(f"order_{number}", {"id": number}, collection="shop.orders")
    cluster.upsert("user", {"name": "x", "value": 1}, collection="shop.users")
    with cluster.connect() as client:
        found = dcp_rs.replication.infer_schemas(client, sample=10, examples=True)
    assert found["shop.orders"].documents == 10
    users = found["shop.users"]
    assert (users.documents, users.document_schema, users.prefix) == (
        1,
        "name STRING, value BIGINT",
        "doc_",
    )
    assert users.fields[0].example == '"x"'
