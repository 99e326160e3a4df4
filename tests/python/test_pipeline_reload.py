"""`dcp-rs run` while it runs: a pipeline file that changes, and passwords that do."""

import json
import signal
import socket
import time
import urllib.error
import urllib.request

import deltalake
import duckdb
import pytest

import dcp_rs
import replicas
from pipelines import PASSWORD, Service


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, bucket="travel") as running:
        for scope in ("inventory", "shop"):
            running.create_scope(scope)
        for name in ("inventory.airline", "shop.order"):
            running.create_collection(name)
            running.upsert("key_1", {"n": 1}, collection=name)
        yield running


@pytest.fixture
def service(cluster, tmp_path):
    started = []

    def make(*, name="pipeline.toml", **connection):
        started.append(Service(tmp_path / name, cluster, **connection))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stderr.close()


def keys_of(folder):
    return sorted(deltalake.DeltaTable(folder).to_pyarrow_table()["key"].to_pylist())


@pytest.mark.shows_password("only in the environment of the process")
def test_hangup_changes_what_can_change_and_refuses_the_rest_by_name(cluster, service, tmp_path):
    def text(collections, interval=3600.0, more="", levels=("info",)):
        return (
            f'target = "delta://{tmp_path}/lake"\ntables = "collection"\n'
            f"log_levels = {json.dumps(levels)}\ncollections = {json.dumps(collections)}\n"
            f"commit_interval = {interval}\n{more}"
        )

    running, both = service(), ["inventory.*", "shop.order"]
    running.write(text(["inventory.*"]))
    running.start("--commit-rows", "1000")
    running.has(1)
    assert running.reload(text(["inventory.*"]))["reloaded"]["options"] == []

    # What is uncommitted is committed once the interval is shorter. A flag goes on to win.
    cluster.upsert("key_2", {"n": 2}, collection="inventory.airline")
    running.until(lambda each: each.get("uncommitted") == 1)
    found = running.reload(text(["inventory.*"], 0.5, "commit_rows = 7"))
    assert found["reloaded"]["options"] == ["commit_interval"]
    running.has(2)

    # A collection that is added has its documents loaded, and nothing else is read again.
    found = running.reload(text(both, 0.5))
    assert found["reloaded"]["options"] == ["collections"]
    running.has(3)
    cluster.upsert("key_2", {"n": 2}, collection="shop.order")
    cluster.upsert("key_3", {"n": 3}, collection="inventory.airline")
    running.has(5)
    assert keys_of(tmp_path / "lake" / "shop__order") == ["key_1", "key_2"]

    # The rest is refused by name.
    found = running.reload(text(both, 0.5, 'mode = "log"\nhung_after = 7.0\nlisten = "1"'))
    assert found["reloaded"]["options"] == ["hung_after"]
    assert found["reload_refused"]["options"] == [
        "listen of pipeline.toml",
        "mode of pipeline.toml",
    ]
    for wrong, told in (
        (text(both, 0.0001), "commit_interval of pipeline.toml: 0.0001 is not from"),
        (text(["shop.order"]), "collections of pipeline.toml: can only be added to"),
        (text([*both, "shop.none"]), "collections of pipeline.toml: "),
        (text(both, more="comit_rows = 1"), "did you mean commit_rows?"),
        ("target = ", "is not TOML"),
    ):
        found = running.reload(wrong)
        assert list(found) == ["reload_failed"]
        assert told in found["reload_failed"]["error"]
    cluster.upsert("key_3", {"n": 3}, collection="shop.order")
    running.has(6)
    only_errors = text(both, 0.5, 'mode = "log"', levels=["error"])
    running.reload(only_errors, until=["reload_refused"])
    # Nothing was printed after that, since the level had changed.
    running.write("target = ")
    running.process.send_signal(signal.SIGHUP)
    running.until(lambda each: each.get("event") == "reload_failed")
    assert not any(each.get("event") == "reloaded" for each in running)
    assert running.stop() == 0
    assert keys_of(tmp_path / "lake" / "shop__order") == ["key_1", "key_2", "key_3"]


@pytest.mark.shows_password("the file has it, which a user writes")
def test_a_password_that_changes_is_read_from_its_file_without_a_restart(
    cluster, service, tmp_path
):
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    running = service(password=None, password_file=secret)
    running.write(f'target = "duckdb://{tmp_path}/lake.duckdb?table=t"\nlog_levels = ["info"]\n')
    running.start()
    running.has(2)
    cluster.set_password(f"{PASSWORD}-2")
    cluster.persist()
    cluster.kill(0)
    cluster.restart(0)
    # The server refuses the old one, until the file has the new one.
    running.until(lambda each: each.get("phase") == "disconnected")
    secret.write_text(f"{PASSWORD}-2\n")
    cluster.upsert("key_2", {"n": 2}, collection="shop.order")
    running.has(3)
    assert running.stop() == 0
    with duckdb.connect(tmp_path / "lake.duckdb", read_only=True) as database:
        assert database.sql("SELECT count(*) FROM t").fetchall() == [(3,)]


@pytest.mark.shows_password("only in the environment of the process")
def test_two_files_keep_a_table_in_step_each_with_a_share(cluster, service, postgres_database):
    replica, written = replicas.InPostgres(postgres_database), replicas.Written(cluster)
    text = (
        f'target = "{postgres_database}&table=documents"\nlisten = "127.0.0.1:0"\n'
        'log_levels = ["info"]\nshare = '
    )

    def write(n):
        for key in range(20):
            for collection in ("inventory.airline", "shop.order"):
                written.upsert(f"key_{key}", {"n": n}, collection)

    def until_written():
        end = time.monotonic() + 30
        while replica.documents() != written.documents():
            assert time.monotonic() < end, [each.lines[-3:] for each in (one, two)]
            time.sleep(0.05)

    def seen(each, path):
        url = each.until(lambda line: line.get("event") == "listening")["url"]
        with urllib.request.urlopen(f"{url}{path}", timeout=20) as found:
            return found.read().decode()

    write(0)
    one, two = service(name="one.toml"), service(name="two.toml")
    for number, each in enumerate((one, two), 1):
        each.write(f"{text}'{number}/2'")
        each.start()
    for number, each in enumerate((one, two), 1):
        share = f"{number}/2"
        assert each.until(lambda line: line.get("phase") == "following")["share"] == share
        status = json.loads(seen(each, "/status"))
        assert (status["share"], status["vbuckets"]["streaming"]) == (share, 2)
        assert f'share="{share}",stream="run"}} 1.0' in seen(each, "/metrics")
    until_written()
    events = two.reload(f"{text}'1/2'", until=["reloaded"])
    assert events["reload_refused"]["options"] == ["share of two.toml"]
    assert events["reload_refused"]["share"] == "2/2", "lines of the log say whose they are"
    one.kill()
    write(1)
    two.until(lambda line: line.get("lag") == 0 and line["changes"] > 30)
    assert replica.documents() != written.documents(), "share 1 waits until it is back"
    one.start()
    until_written()
    assert (one.stop(), two.stop()) == (0, 0)


@pytest.mark.shows_password("only in the environment of the process")
def test_a_signal_ends_it_also_while_the_target_is_unavailable(cluster, service, stored):
    replica, running = replicas.InStoredDelta(stored), service()
    options = json.dumps(replica.to_write | {"max_retries": "0"}).replace('":', '" =')
    running.write(
        f'target = "{replica.url}"\ntarget_retry_timeout = 600.0\nstorage_options = {options}'
    )
    running.start()
    running.has(2)
    stored.faults.set(is_away=True)
    cluster.upsert("key_2", {}, collection="shop.order")
    running.until(lambda each: each.get("phase") == "target unavailable")
    assert running.stop() == 0


@pytest.mark.shows_password("only in the environment of the process")
def test_a_cluster_that_is_away_at_the_start_is_waited_for(cluster, service, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    running = service(bucket="travel", retry_timeout=60)
    text = f'target = "duckdb://{tmp_path}/d.duckdb?table=t"\nlisten = "127.0.0.1:{port}"\n'
    running.write(text)
    cluster.persist()
    cluster.kill(0)
    running.start()
    told = running.until(lambda each: each.get("event") == "stream_waits")
    assert (told["level"], told["seconds"]) == ("WARNING", 60)
    assert "refused" in told["error"]
    assert ask("/livez") == (200, "ok\n")
    status, why = ask("/readyz")
    assert status == 503
    assert why.startswith("it has not connected yet: ")
    found = json.loads(ask("/status")[1])
    assert (found["bucket"], found["phase"]) == ("travel", "starting")
    assert running.stop() == 0, "a signal ends it meanwhile"
    running.process.stderr.close()
    running.lines.clear()
    running.start()
    running.until(lambda each: each.get("event") == "stream_waits")
    cluster.restart(0)
    running.has(2)
    assert ask("/readyz") == (200, "ok\n")
    assert running.stop() == 0


@pytest.mark.shows_password("only in the environment of the process")
def test_a_start_that_never_succeeds_fails_at_once(cluster, service, tmp_path):
    text = f'target = "duckdb://{tmp_path}/d.duckdb?table=t"\n'
    for wrong, told in (
        ({"username": "nobody"}, "authentication"),
        ({"connection_string": f"{cluster.connection_string}/nothing"}, "bucket"),
    ):
        running = service(**wrong)
        running.write(text)
        running.start()
        assert running.process.wait(20) == 1
        running._reader.join()
        (line,) = running.lines
        assert told in line["message"]
    cluster.kill(0)
    running = service(retry_timeout=1)
    running.write(text)
    running.start()
    assert running.process.wait(20) == 1, "it was tried for long enough"
