"""Tables in object storage: two writers, readers of others, and what is wrong with a location."""

import itertools
import json
import time
from types import SimpleNamespace

import deltalake
import pytest

import dcp_rs
import replicas
from dcp_rs.exceptions import ConcurrentWriterError, ConfigError
from dcp_rs.replication.delta_table import DeltaTable
from dcp_rs.replication.outage import Unreachable
from dcp_rs.replication.storage import Storage
from replicas import Written
from storages import CHOSEN
from test_target_outage import Running


@pytest.fixture(params=replicas.STORED)
def anywhere(request, tmp_path):
    """A replica in object storage, also one behind a catalog."""
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture(params=[each for each in replicas.STORED if "iceberg" not in each])
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture
def written(cluster):
    made = Written(cluster)
    for n in range(20):
        made.upsert(f"key_{n}", {"n": n})
    return made


def test_a_table_in_storage_follows_its_bucket_and_others_read_it(cluster, anywhere, written):
    replica = anywhere
    for n in (0, 100):
        written.upsert("key_1", {"n": n})
        written.upsert(b"session_\xff", b"%d" % n)
        replicas.replicate(cluster, replica)
        assert replica.documents() == written.documents()
        assert replica.rejects() == written.rejects()
        for name, read in replica.readers().items():
            rows = read()
            settle = replicas.as_documents if replica.mode == "table" else replicas.settle
            assert settle(rows) == written.documents(), name


def test_others_read_whole_commits_while_it_is_written(anywhere):
    replica, numbers = anywhere, itertools.count()
    settle = replicas.as_documents if replica.mode == "table" else replicas.settle

    def read(by):
        found = {key: json.loads(text)["n"] for (_, key), text in settle(by()).items()}
        own = {key: n for key, n in found.items() if key.startswith("own")}
        # Of each document that is written once, up to some change.
        newest = max(found.values())
        assert own == {f"own_{n}": n for n in range(0, newest + 1, 2)}
        return newest, {key: found[key] for key in found.keys() - own}

    # In one vBucket, changes come in the order in which they were made.
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster:

        def write():
            for n in itertools.islice(numbers, 10):
                key = f"key_{n % 6}" if n % 2 else f"own_{n}"
                cluster.upsert(key, {"n": n})

        write()
        running = Running(cluster, replica, commit_interval=0.05, commit_rows=3)
        running.has(8)
        seen = {name: [] for name in replica.readers()}
        end = time.monotonic() + 60
        while any(len({newest for newest, _ in found}) <= 3 for found in seen.values()):
            assert time.monotonic() < end, "nobody reads between commits"
            write()
            for name, by in replica.readers().items():
                newest, others = read(by)
                # A version may be left out of which there is a newer one, but none comes back.
                _, before = seen[name][-1] if seen[name] else (0, {})
                assert all(n >= before.get(key, 0) for key, n in others.items()), name
                seen[name].append((newest, others))
        running.end()
        replicas.replicate(cluster, replica)
    last = next(numbers) - 1
    for name, by in replica.readers().items():
        found = read(by)
        assert found == (last, {f"key_{n % 6}": n for n in range(last - 5, last + 1) if n % 2}), (
            name
        )


def test_of_two_writers_the_one_that_started_last_goes_on(cluster, anywhere, written):
    replica = anywhere
    overtaken = []

    def start_another(progress):
        if progress.commits and not overtaken:
            overtaken.append(True)
            written.upsert("key_2", {"n": 2})
            replicas.replicate(cluster, replica)
            written.upsert("key_3", {"n": 3})

    with pytest.raises(ConcurrentWriterError, match="another process writes to"):
        replicas.replicate(cluster, replica, once=False, on_progress=start_another)
    replicas.replicate(cluster, replica)
    assert replica.documents() == written.documents()
    assert replica.unnamed() == set()


def test_files_of_a_commit_that_was_not_finished_are_removed(cluster, replica, written):
    replicas.replicate(cluster, replica)
    replica.leave_unfinished()
    assert replica.unnamed()
    replicas.replicate(cluster, replica)
    assert replica.unnamed() == set()
    assert replica.documents() == written.documents()


@pytest.mark.parametrize("what", CHOSEN.wrong)
def test_a_location_that_is_wrong_is_told_of_within_seconds(cluster, replica, what):
    options, said = CHOSEN.wrong[what]
    url = replica.url
    if what == "bucket":
        url = url.replace(replica.stored.place["bucket"], "nowhere")
    begun = time.monotonic()
    with cluster.connect() as client, pytest.raises(ConfigError) as told:
        dcp_rs.replicate(
            client, url, mode=replica.mode, once=True,
            storage_options=replica.to_write | options,
        )  # fmt: skip
    assert time.monotonic() - begun < 10
    assert said in str(told.value)
    assert CHOSEN.secret not in str(told.value) + repr(told.value)
    assert not replica.stored.objects("")


@pytest.mark.parametrize("code", CHOSEN.answers)
def test_what_the_storage_refuses_is_told_of_by_its_cause(cluster, replica, code):
    status, said = CHOSEN.answers[code]
    replica.stored.faults.set(refuse=[status, code])
    with pytest.raises(ConfigError, match=said) as told:
        replicas.replicate(cluster, replica)
    assert code in str(told.value)
    assert CHOSEN.secret not in str(told.value)
    assert not replica.stored.objects("")


def test_an_old_version_is_not_taken_for_gone_while_the_storage_is_away(monkeypatch):
    def fail(*_, **__):
        raise OSError(text)

    monkeypatch.setattr(deltalake, "DeltaTable", fail)
    objects = SimpleNamespace(storage=Storage("s3://bucket/table", {}))
    table = DeltaTable("s3://bucket/table", "application", {}, objects=objects)
    text = "Generic S3 error: error sending request for url"
    with pytest.raises(Unreachable, match="s3://bucket/table"):
        table.at(3)
    text = "no file of version 3"
    assert table.at(3) is None


@pytest.mark.parametrize(
    ("url", "options", "text", "said"),
    [
        ("gs://b/p", {}, "error sending request", "check google_base_url"),
        ("abfss://b/p", {}, "error sending request", "check azure_storage_endpoint"),
        (
            "iceberg+https://host",
            {"warehouse": "abfss://b/p"},
            "Fail to get a new connection for: http://host",
            "cannot be reached: .*adls.blob-storage-authority",
        ),
        ("az://b/p", {}, "403 Forbidden: Server failed to authenticate", "credentials are refused"),
        (
            "az://b/p",
            {},
            "GET http://169.254.169.254/x: 403 Forbidden",
            "no credentials were found",
        ),
        ("gs://b/p", {}, "The specified bucket does not exist.", "the bucket does not exist: c"),
        (
            "iceberg+https://host",
            {"warehouse": "gs://b/p"},
            "google::cloud::Status(NOT_FOUND: x, {gcloud-cpp.retry.function=CreateResumableUpload}",
            "the bucket does not exist",
        ),
        ("az://b/p", {"azure_storage_endpoint": "http://h/a"}, "x", "_storage_endpoint=http://h/a"),
    ],
)
def test_an_error_of_a_storage_names_what_to_look_at(url, options, text, said):
    with pytest.raises(ConfigError, match=said):
        raise Storage(url, options).refused(OSError(text))


def test_a_role_that_only_reads_leaves_nothing(cluster, replica):
    replica.stored.faults.set(refuse_writes=True)
    with pytest.raises(ConfigError, match="the role may not do this"):
        replicas.replicate(cluster, replica)
    assert not replica.stored.objects("")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("delta+s3://bucket", "name a bucket and a path"),
        ("delta+ftp://bucket/path", "no object storage"),
        ("duckdb+s3://bucket/path", "no tables in s3"),
        ("delta+s3://key:secret@bucket/path", "no place for credentials"),
        ("delta+s3://bucket/a%25b", "encode differently"),
        ("delta+s3://bucket/a/../b", "encode differently"),
        ("delta:///folder", "for object storage"),
    ],
)
def test_urls_and_options_that_are_none(url, said):
    with pytest.raises(ConfigError, match=said):
        dcp_rs.replication.open_target(url, {"aws_region": "x"})


def test_options_are_text():
    with pytest.raises(ConfigError, match="write it as text"):
        dcp_rs.replication.open_target("delta+s3://bucket/path", {"aws_allow_http": True})


def test_what_a_catalog_or_its_storage_refuses(cluster, stored, tmp_path):
    replica = replicas.InStoredIceberg(stored, f"sqlite:///{tmp_path}/catalog.db")
    for options, said in CHOSEN.wrong_iceberg.values():
        with pytest.raises(ConfigError, match=said) as told:
            replicas.replicate(
                cluster, replica, mode="log", storage_options=replica.to_write | options
            )
        assert CHOSEN.secret not in str(told.value)
    assert replica.catalog().list_namespaces() == []
    assert not stored.objects("")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("iceberg+http://127.0.0.1:1/api", "cannot be reached"),
        ("iceberg+s3://bucket/path", "have a catalog: name it"),
        ("iceberg+ftp://host", "knows no catalog ftp"),
        ("iceberg+postgresql://me:canary-8f1c2e@127.0.0.1:1/lake", "cannot load the catalog"),
    ],
)
def test_catalogs_that_are_none(url, said):
    with pytest.raises(ConfigError, match=said) as told:
        dcp_rs.replication.open_target(url)
    assert "canary" not in str(told.value)


def test_an_address_of_googles_storage_that_is_wrong_is_told_of_within_seconds(tmp_path):
    options = {"warehouse": "gs://b/p", "gcs.service.host": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"cannot be reached: .*: check gcs\.service\.host"):
        dcp_rs.replication.open_target(f"iceberg+sqlite:///{tmp_path}/catalog.db", options)


def test_iceberg_has_no_table_of_documents(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"docs/guides/spark-tables\.md"):
        replicas.replicate(cluster, f"iceberg://{tmp_path}/lake", mode="table")


def test_tables_in_storage_are_not_compared(cluster):
    with cluster.connect() as client, pytest.raises(ConfigError, match="are not compared"):
        dcp_rs.verify(client, "delta+s3://bucket/path")


@pytest.mark.parametrize("scheme", ["delta", "parquet"])
def test_each_collection_has_a_table_below_a_path(cluster, stored, scheme):
    url = f"{scheme}+{stored.url}/lake"
    options = {"mode": "log", "tables": "{scope}/{collection}", "storage_options": stored.to_read}
    cluster.create_scope("inventory")
    cluster.create_collection("inventory.hotel")
    cluster.upsert("hotel_1", {}, collection="inventory.hotel")
    done = replicas.replicate(cluster, url, **options)
    assert done.tables["inventory/hotel"].changes
    there = stored.objects("lake/inventory/hotel")
    assert any(each.endswith(".parquet") for each in there)
    cluster.upsert("hotel_2", {}, collection="inventory.hotel")
    done = replicas.replicate(cluster, url, **options)
    assert done.tables["inventory/hotel"].changes == 1, "it goes on from its state"
    cluster.drop_collection("inventory.hotel")
    replicas.replicate(cluster, url, on_drop="drop", **options)
    assert not stored.objects("lake/inventory/hotel")
    assert stored.objects("lake/_default/_default")
