"""How far behind a stream is."""

import time

import dcp_rs
from lag import until


def create(cluster, *names):
    for scope in {name.partition(".")[0] for name in names}:
        cluster.create_scope(scope)
    for name in names:
        cluster.create_collection(name)


def write(cluster, collection, count, prefix):
    for n in range(count):
        cluster.upsert(f"{prefix}_{n}", b"1", collection=collection)


def read_to_the_end(stream, rows):
    while rows > 0:
        rows -= next(stream).num_rows


def test_a_filtered_stream_that_has_everything_is_not_behind(cluster, client):
    create(cluster, "shop.orders", "shop.carts")
    write(cluster, "shop.orders", 20, "order")
    write(cluster, "shop.carts", 200, "cart")
    write(cluster, None, 200, "other")
    began = time.monotonic()
    with client.stream(collections=["shop.orders"], batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        read_to_the_end(stream, 20)
        until(lambda: stream.stats().lag == 0, patience=5)
        assert time.monotonic() - began < 5, "it takes no ten seconds"
        assert stream.stats().max_lag == 0
        # What other collections get is nothing that it waits for.
        write(cluster, "shop.carts", 200, "late")
        time.sleep(1.2)
        stream.stats()
        time.sleep(0.5)
        assert stream.stats().lag == 0
        assert {each.lag for each in stream.vbucket_stats()} == {0}
        assert stream.collection_lag() == {"shop.orders": 0}
        write(cluster, "shop.orders", 20, "more")
        until(lambda: stream.stats().lag > 0, patience=5)
        assert stream.collection_lag()["shop.orders"] > 0
        read_to_the_end(stream, 20)
        until(lambda: stream.stats().lag == 0, patience=5)


def test_the_lag_of_a_scope_is_that_of_its_collections(cluster, client):
    create(cluster, "shop.orders", "shop.carts", "other.things")
    write(cluster, "shop.orders", 20, "order")
    write(cluster, "shop.carts", 20, "cart")
    write(cluster, "other.things", 200, "thing")
    with client.stream(collections="shop.*", batch=dcp_rs.BatchPolicy(linger=0.0)) as stream:
        until(lambda: None not in (stream.stats().lag, *stream.collection_lag().values()))
        lags = stream.collection_lag()
        assert set(lags) == {"shop.orders", "shop.carts"}
        assert all(lag > 0 for lag in lags.values())
        assert stream.stats().lag >= max(lags.values())
        read_to_the_end(stream, 40)
        until(lambda: set(stream.collection_lag().values()) == {0})
        assert stream.stats().lag == 0


def test_the_lag_by_collection_of_a_whole_bucket_comes_a_moment_after_it_is_asked_for(
    cluster, client
):
    create(cluster, "shop.orders")
    write(cluster, None, 100, "key")
    with client.stream(batch=dcp_rs.BatchPolicy(linger=0.0, max_rows=1)) as stream:
        until(lambda: stream.stats().lag is not None)
        began = time.monotonic()
        until(
            lambda: "shop.orders" in (lags := stream.collection_lag()) and None not in lags.values()
        )
        assert time.monotonic() - began < 2
        assert stream.collection_lag()["_default._default"] >= 100
        read_to_the_end(stream, 100)
        until(lambda: set(stream.collection_lag().values()) == {0})


def test_figures_that_are_looked_at_are_not_ten_seconds_old(cluster, client):
    with client.stream(vbuckets=[0], batch=dcp_rs.BatchPolicy(max_rows=1, linger=0.0)) as stream:
        key = next(f"key_{n}" for n in range(1000) if cluster.vbucket_of(f"key_{n}") == 0)
        until(lambda: stream.stats().lag == 0)
        for _ in range(5):
            cluster.upsert(key, b"1")
        began = time.monotonic()
        until(lambda: stream.stats().lag == 5)
        assert time.monotonic() - began < 4
