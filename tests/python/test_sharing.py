"""Readers that share the work, and what each store promises them."""

import contextlib
import itertools
import json
import random
import sqlite3
import threading
import time

import pytest

import dcp_rs
import repeatable_read
import stores
from dcp_rs.cli import main
from dcp_rs.exceptions import CheckpointError, ClosedError, ConfigError, TakenOverError


@pytest.fixture(params=stores.KINDS)
def place(request, tmp_path):
    return stores.where(request.param, request, tmp_path)


def latest_of(client):
    with client.stream(start="latest") as stream:
        return stream.checkpoint()


def read(client, store, **options):
    keys = []
    for batch in client.stream(start=store, until="now", **options):
        keys += [row["key"] for row in batch.rows()]
        store.save(batch.checkpoint)
    return keys


def test_members_read_each_vbucket_once_and_go_on_as_another_number_of_them(client, fill, place):
    assert stores.opened(place).load() is None
    written, seen = fill(60), []
    for member in range(3):
        seen += read(client, stores.opened(place), vbuckets=dcp_rs.Share(member, of=3))
    assert sorted(seen) == sorted(written)
    # Nothing is left, however many they are now.
    for many in (1, 2, 4, 16):
        for member in range(many):
            assert read(client, stores.opened(place), vbuckets=dcp_rs.Share(member, of=many)) == []
        more = fill(20, prefix=f"of_{many}")
        found = [
            read(client, stores.opened(place), vbuckets=dcp_rs.Share(each, of=many))
            for each in range(many)
        ]
        assert sorted(itertools.chain.from_iterable(found)) == sorted(more)
    assert stores.opened(place).load().seqnos == {
        vb: at for vb, at in client.high_seqnos().items() if at
    }


def test_the_share_of_a_member_is_a_rule(client):
    for many in range(1, 17):
        shares = []
        for member in range(many):
            with client.stream(start="latest", vbuckets=dcp_rs.Share(member, of=many)) as stream:
                shares.append(sorted(stream.checkpoint().seqnos))
        assert sorted(itertools.chain.from_iterable(shares)) == list(range(16))
        assert {len(share) for share in shares} <= {16 // many, -(-16 // many)}
        assert all(
            share == list(range(i * 16 // many, (i + 1) * 16 // many))
            for i, share in enumerate(shares)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vbuckets": dcp_rs.Share(0, of=17)},
            "vbuckets: 17 members are too many: the bucket has only 16 vBuckets",
        ),
        ({"default": "latest"}, "default: applies only to an empty store"),
        ({"default": "newest"}, "default: must be 'earliest' or 'latest', not 'newest'"),
        ({"default": None}, "default: must be 'earliest' or 'latest', not NoneType"),
    ],
)
def test_a_wrong_option_is_named(client, options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        client.stream(**options)


@pytest.mark.parametrize(
    ("member", "of", "message"),
    [
        (3, 3, "member: 3 is not from 0 to 2"),
        (-1, 3, "member: -1 is not from 0 to 2"),
        (0, 0, "of: 0 is not from 1 to 65535"),
        (0, True, "of: must be a whole number, not bool"),
        ("0", 3, "member: must be a whole number, not str"),
    ],
)
def test_a_share_of_a_member_there_is_not_is_refused(member, of, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        dcp_rs.Share(member, of)


def test_a_share_of_a_checkpoint_has_only_its_vbuckets(client, fill):
    fill(60)
    whole = latest_of(client)
    assert len(whole) == 16
    with client.stream(start=whole, vbuckets=dcp_rs.Share(1, of=4)) as stream:
        # Otherwise, a save would take other members' vBuckets back.
        assert sorted(stream.checkpoint().seqnos) == [4, 5, 6, 7]


def test_members_need_a_store_that_can_be_shared(client):
    class Own:
        def load(self):
            return None

        def save(self, checkpoint):
            pass

    with pytest.raises(ConfigError, match=r"^vbuckets: .*dcp_rs.SharedStore"):
        client.stream(start=Own(), vbuckets=dcp_rs.Share(0, of=2))


def test_a_stream_that_cannot_be_opened_claims_nothing(cluster, client, place):
    cluster.upsert("a", b"1")
    store = stores.opened(place)
    batch = next(client.stream(start=store))
    with pytest.raises(ConfigError, match=r"^on_rollback"):
        client.stream(start=stores.opened(place), on_rollback="raise")
    with pytest.raises(ConfigError, match=r"^vbuckets: vBucket 16 does not exist"):
        client.stream(start=stores.opened(place), vbuckets=range(17))
    for collections in ["nope", ["_default", "nope.*"]]:
        with pytest.raises(ConfigError, match=r"there is no \w+ '(_default\.)?nope'"):
            client.stream(start=stores.opened(place), collections=collections)
    with cluster.connect() as other:
        pass
    with pytest.raises(ClosedError):
        other.stream(start=stores.opened(place))
    store.save(batch.checkpoint)
    assert store.load() == batch.checkpoint


def test_ends_as_pairs_claim_only_the_vbuckets_that_they_name(client, fill, place):
    fill(50)
    store = stores.opened(place)
    batch = next(client.stream(start=store, vbuckets=range(4)))
    client.stream(start=stores.opened(place), until=[(5, client.high_seqnos()[5])]).close()
    store.save(batch.checkpoint)
    assert store.load() == batch.checkpoint


# ----- where to begin -----


def test_latest_is_saved_before_the_first_change(client, fill, place):
    fill(30)
    store = stores.opened(place)
    # As if it died before the first batch.
    client.stream(start=store, default="latest").close()
    assert set(store.load().seqnos) == set(range(16)), "empty vBuckets have positions too"
    more = fill(30, prefix="more")
    assert sorted(read(client, stores.opened(place), default="latest")) == sorted(more)
    assert read(client, stores.opened(place), default="earliest") == []


def test_latest_of_an_empty_bucket_passes_over_nothing_after_a_restart(client, fill, place):
    client.stream(
        start=stores.opened(place), default="latest", vbuckets=dcp_rs.Share(1, of=2)
    ).close()
    written = fill(30)
    found = [read(client, stores.opened(place), default="latest", vbuckets=dcp_rs.Share(1, of=2))]
    client.stream(
        start=stores.opened(place), default="latest", vbuckets=dcp_rs.Share(0, of=2)
    ).close()
    found += [read(client, stores.opened(place), default="latest", vbuckets=dcp_rs.Share(0, of=2))]
    assert 0 < len(found[0]) < len(written)
    assert found[1] == [], "what another member has saved is not its own"


def test_earliest_saves_nothing_before_the_first_batch(client, fill, place):
    written = fill(5)
    client.stream(start=stores.opened(place)).close()
    assert sorted(read(client, stores.opened(place))) == sorted(written)


# ----- two readers -----


def test_who_was_taken_over_saves_nothing(client, fill, place):
    fill(40)
    old, new = stores.opened(place), stores.opened(place)
    stream = client.stream(
        start=old, vbuckets=dcp_rs.Share(0, of=1), batch=dcp_rs.BatchPolicy(linger=0)
    )
    batch = next(stream)
    old.save(batch.checkpoint)
    kept = old.load()
    # The new one begins from what the old one has saved, and has not read anything yet.
    with client.stream(start=new, vbuckets=dcp_rs.Share(1, of=2)) as other:
        assert other.checkpoint() == kept.restricted_to(range(8, 16))
        fill(40, prefix="more")
        ahead = next(stream).checkpoint
        with pytest.raises(TakenOverError, match="taken over vBuckets 8-15") as caught:
            old.save(ahead)
        assert caught.value.vbucket == 8
        assert new.load() == kept
        # For good, and for the vBuckets that nobody else has claimed too.
        with pytest.raises(TakenOverError):
            old.save(ahead)
    # Whoever starts from the store again is the owner again.
    again = stores.opened(place)
    assert read(client, again)
    with pytest.raises(TakenOverError):
        new.save(again.load().restricted_to(range(8, 16)))
    stream.close()


def test_a_store_that_claims_again_owns_again(client, fill, place):
    first, second = stores.opened(place), stores.opened(place)
    fill(40)
    for store in (first, second, first):
        store.claim(range(16))
    latest = latest_of(client)
    with pytest.raises(TakenOverError):
        second.save(latest)
    first.save(latest)
    assert second.load() == latest


def test_a_reader_that_is_behind_takes_nothing_over_with_its_first_save(cluster, client, place):
    cluster.upsert("a", b"1")
    behind = next(client.stream()).checkpoint
    store = stores.opened(place)
    cluster.upsert("a", b"2")
    read(client, store)
    kept = store.load()
    with pytest.raises(CheckpointError, match="behind"):
        stores.opened(place).save(behind)
    store.save(kept)
    assert store.load() == kept


def test_of_many_that_claim_at_once_one_owns(client, fill, place):
    fill(40)
    checkpoint = [*client.stream(until="now")][-1].checkpoint
    readers = [stores.opened(place) for _ in range(16)]
    gate, outcomes = threading.Barrier(16), []

    def take(store):
        gate.wait()
        store.claim(range(16))
        gate.wait()
        try:
            store.save(checkpoint)
            outcomes.append("saved")
        except TakenOverError:
            outcomes.append("taken over")

    threads = [threading.Thread(target=take, args=[store]) for store in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["saved"] + ["taken over"] * 15
    assert stores.opened(place).load() == checkpoint


def test_members_whose_vbuckets_share_an_object_do_not_stop_each_other(cluster, client, place):
    members = [stores.opened(place) for _ in range(8)]
    streams = [
        client.stream(
            start=store, vbuckets=dcp_rs.Share(i, of=8), batch=dcp_rs.BatchPolicy(linger=0)
        )
        for i, store in enumerate(members)
    ]
    failed = []

    def follow(store, stream):
        try:
            while (batch := stream.poll(1.0)) is not None:
                store.save(batch.checkpoint)
        except Exception as error:
            failed.append(error)
            raise

    pairs = zip(members, streams, strict=True)
    threads = [threading.Thread(target=follow, args=each) for each in pairs]
    for thread in threads:
        thread.start()
    for n in range(100):
        cluster.upsert(f"key_{n}", b"1")
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(stores.opened(place).load().seqnos.values()) == 100
    for stream in streams:
        stream.close()


# ----- a change of number under load, with crashes -----

_MEMBER = (
    stores.IMPORT
    + """
import dcp_rs
address, place, member, path = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
i, n = map(int, member.split("/"))
store = stores.opened(place)
done = open(path, "a", buffering=1)
policy = dcp_rs.BatchPolicy(max_rows=50, linger=0.02)
with dcp_rs.connect(
    address, bucket="default", username="Administrator", password="canary-8f1c2e"
) as client, client.stream(start=store, vbuckets=dcp_rs.Share(i, of=n), batch=policy) as stream:
    print("started", flush=True)
    for batch in stream:
        for row in batch.rows():
            print(row["key"], file=done)
        try:
            store.save(batch.checkpoint)
        except dcp_rs.exceptions.TakenOverError:
            sys.exit(42)
"""
)


def test_the_number_of_members_changes_under_load_with_crashes(
    cluster, place, start_python, tmp_path
):
    chance, written, stop = random.Random(1), [], threading.Event()
    path = tmp_path / "keys"

    def write():
        while not stop.is_set():
            key = f"key_{len(written)}"
            cluster.upsert(key, b"{}")
            written.append(key)
            time.sleep(0.002)

    def start(many):
        arguments = (json.dumps(place), path)
        processes = [
            start_python(
                _MEMBER, cluster.connection_string, arguments[0], f"{i}/{many}", arguments[1]
            )
            for i in range(many)
        ]
        for process in processes:
            assert process.stdout.readline() == "started\n", process.communicate()[1]
        return processes

    def positions():
        kept = store.load()
        return {} if kept is None else kept.seqnos

    store, seen = stores.opened(place), {}
    writer = threading.Thread(target=write)
    writer.start()
    try:
        old = start(3)
        for many in (4, 2):
            time.sleep(0.3)
            old[chance.randrange(len(old))].kill()
            # The others go on while their successors start.
            new = start(many)
            for process in old:
                assert process.wait(timeout=30) in {-9, 42}, process.communicate()[1]
            now = positions()
            assert all(now.get(vbucket, 0) >= at for vbucket, at in seen.items()), "it went back"
            old, seen = new, now
    finally:
        stop.set()
        writer.join()
    end = time.monotonic() + 30
    high = {vbucket: at for vbucket, at in cluster.high_seqnos().items() if at}
    while {vb: at for vb, at in positions().items() if at} != high:
        assert time.monotonic() < end, (positions(), high)
        assert all(process.poll() is None for process in old)
        time.sleep(0.05)
    assert len(written) > 100
    assert set(path.read_text().split()) == set(written), "a change was never delivered"


# ----- on the command line -----


def test_members_on_the_command_line(client, fill, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    written, path, seen = fill(40), str(tmp_path / "positions"), []
    command = ["cat", client.options.connection_string, "--username", "Administrator"]
    command += ["--bucket", "default", "--checkpoint", path, "-f", "%k\\n"]
    for member in ("0/2", "1/2", "0/1"):
        assert main([*command, "--vbuckets", member]) == 0
        seen += capfd.readouterr().out.split()
    assert sorted(seen) == sorted(written)
    for wrong, said in (("2/2", "member"), ("1/0", "of"), ("a/b", "vbuckets"), ("/2", "vbuckets")):
        assert main([*command, "--vbuckets", wrong]) != 0
        assert said in capfd.readouterr().err


# ----- of one kind -----


def test_rows_and_positions_are_saved_in_one_transaction(client, fill, tmp_path):
    written = fill(40)

    def connect():
        return sqlite3.connect(tmp_path / "orders.db", isolation_level="DEFERRED")

    store = dcp_rs.SqlStore(connect, table="positions")
    with contextlib.closing(connect()) as database:
        database.execute("CREATE TABLE orders (key TEXT PRIMARY KEY)")
        for crashes in (True, False):
            for batch in client.stream(
                start=store, until="now", batch=dcp_rs.BatchPolicy(max_rows=5)
            ):
                keys = [(row["key"],) for row in batch.rows()]
                with contextlib.suppress(ZeroDivisionError), database:
                    database.executemany("INSERT INTO orders VALUES (?)", keys)
                    store.save_with(database, batch.checkpoint)
                    if crashes:
                        1 / 0  # noqa: B018 - in place of a crash
                if crashes:
                    break
            rows = database.execute("SELECT key FROM orders").fetchall()
            assert len(rows) == (0 if crashes else len(written))
            assert (store.load() is None) == crashes
        other = dcp_rs.SqlStore(connect, table="positions")
        with pytest.raises(ConfigError, match="not claimed vBuckets"):
            other.save_with(database, batch.checkpoint)
        other.claim([0])
        database.execute("INSERT INTO orders VALUES ('late')")
        with pytest.raises(TakenOverError), database:
            store.save_with(database, batch.checkpoint)
        assert len(database.execute("SELECT key FROM orders").fetchall()) == len(written)


@pytest.mark.parametrize("counts", ["all", "last", "none"])
def test_a_takeover_that_a_transaction_does_not_see_is_noticed(client, fill, tmp_path, counts):
    fill(40)

    def connect():
        return repeatable_read.Connection(tmp_path / "orders.db", counts=counts)

    store, other = (dcp_rs.SqlStore(connect) for _ in range(2))
    stream = client.stream(start=store, until="now", batch=dcp_rs.BatchPolicy(max_rows=10))
    first, second = next(stream), next(stream)
    store.save(first.checkpoint)
    with contextlib.closing(connect()) as results:
        results.cursor().execute("SELECT 1")
        # One that has moved: nothing is written for the others.
        moved = second.checkpoint.seqnos.items() - first.checkpoint.seqnos.items()
        other.claim([vbucket := max(moved)[0]])
        with pytest.raises(TakenOverError, match=rf"vBuckets {vbucket},") as raised:
            store.save_with(results, second.checkpoint)
        assert raised.value.vbucket == vbucket
        results.rollback()
        # What it still owns can be saved.
        mine = second.checkpoint.restricted_to(set(range(16)) - {vbucket})
        assert store.load() == first.checkpoint
        other.save(first.checkpoint.restricted_to([vbucket]))
        with pytest.raises(TakenOverError):
            store.save_with(results, mine)
    again = dcp_rs.SqlStore(connect)
    again.claim(range(16))
    with contextlib.closing(connect()) as results:
        again.save_with(results, second.checkpoint)
        results.commit()
    assert again.load() == second.checkpoint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"connect": 5}, "connect: must be a function"),
        ({"table": "x; DROP TABLE y"}, "table: .* is not a table name"),
        ({"table": 5}, "table: must be text"),
    ],
)
def test_a_wrong_argument_of_an_sql_store_is_named(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        dcp_rs.SqlStore(**({"connect": lambda: sqlite3.connect(":memory:")} | arguments))


def test_what_is_no_connection_is_refused():
    with pytest.raises(ConfigError, match=r"^connect: must return .*DB-API"):
        dcp_rs.SqlStore(object).load()


def test_connections_without_shared_transactions_are_refused():
    import duckdb

    store = dcp_rs.SqlStore(duckdb.connect)
    with pytest.raises(ConfigError, match=r"^connect: .* DuckDB.* use SQLite, PostgreSQL"):
        store.load()


def test_a_connection_in_autocommit_mode_is_refused(postgres_database):
    import psycopg

    store = dcp_rs.SqlStore(lambda: psycopg.connect(postgres_database, autocommit=True))
    with pytest.raises(ConfigError, match=r"^connect: .* autocommit"):
        store.load()


def test_an_sqlite_connection_in_autocommit_mode_is_refused(tmp_path):
    def connect(begin):
        connection = sqlite3.connect(tmp_path / "positions.db", isolation_level=None)
        connection.execute(begin)
        return connection

    with pytest.raises(ConfigError, match=r"^connect: .* autocommit"):
        dcp_rs.SqlStore(lambda: connect("")).load()
    assert dcp_rs.SqlStore(lambda: connect("BEGIN")).load() is None


def test_a_wrong_argument_of_an_object_store_is_named(tmp_path):
    import obstore.store

    for arguments, message in [
        ((object(), "a"), "store: must be a store of obstore"),
        ((obstore.store.LocalStore(tmp_path), "a"), "store: files .* dcp_rs.FileStore"),
        ((obstore.store.MemoryStore(), 5), "prefix: must be text"),
        ((obstore.store.MemoryStore(), "/"), "prefix: must not be empty"),
    ]:
        with pytest.raises(ConfigError, match=f"^{message}"):
            dcp_rs.ObjectStore(*arguments)


def test_a_damaged_object_is_an_error_and_no_first_start(client):
    import obstore

    bucket = obstore.store.MemoryStore()
    for damage in (b"", b"[]", b'{"format": "dcp_rs positions", "version": 2}'):
        obstore.put(bucket, "a/0000.json", damage)
        with pytest.raises(CheckpointError, match=r"a/0000\.json"):
            client.stream(start=dcp_rs.ObjectStore(bucket, "a"))


def test_an_object_storage_that_is_away_is_a_checkpoints_error():
    from datetime import timedelta

    from obstore.store import S3Store

    gone = S3Store(
        "bucket",
        endpoint="http://127.0.0.1:1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )
    with pytest.raises(CheckpointError, match="could not be read"):
        dcp_rs.ObjectStore(gone, "a").claim([0])


def test_a_lock_file_that_is_damaged_stops_readers_until_they_claim_again(
    client, cluster, tmp_path
):
    cluster.upsert("a", b"1")
    store = dcp_rs.FileStore(tmp_path / "positions")
    read(client, store)
    kept = store.load()
    for damage in ("", '{"owners": {"a": "5-3"}}', "[1]", '{"owners": 5}', '{"owners": {"a": 1}}'):
        (tmp_path / "positions.lock").write_text(damage)
        with pytest.raises(TakenOverError):
            store.save(kept)
        store.claim(range(16))
        store.save(kept)
