"""A replication that dies at each step of its commits, beside people who edit its table."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import deltalake
import obstore
import pyarrow.parquet as pq
import pytest
from pyiceberg.table.snapshots import ancestors_of

import dcp_rs
import replicas
import versions
from bucket_trouble import EVOLVING, STEADY, OfABucket
from inferred import assert_holds
from trouble import COLLECTIONS, Trouble

_HERE = Path(__file__).parent / "steps"
# A step of those of a run, as a share: spread evenly however many are tried.
_GOLDEN = 0.6180339887498949

# At the end of a run that may die.
_MAINTAINED = {"compact_every": 3600, "keep_versions_for": 3600}

_IS_LONG = "DCP_STEPS" in os.environ
# Of all kinds, deaths take longest there: fewer are tried at a time.
_STORED = replicas.STORED + replicas.STORED_LAKES if _IS_LONG else replicas.STORED[::2]
_HISTORIES = replicas.HISTORIES if _IS_LONG else []


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A process that replicates; it may be killed at a step."""
    library = tmp_path_factory.mktemp("steps") / "steps.so"
    compile_it = ["cc", "-O1", "-shared", "-fPIC", "-o", library, _HERE / "steps.c", "-ldl"]
    subprocess.run(compile_it, check=True)
    with subprocess.Popen(
        [sys.executable, _HERE / "writer.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(library)},
    ) as process:

        def run(cluster, replica, kill_at=0, **options):
            request = {
                "connection": cluster.connection_string,
                "url": replica.url,
                "kill_at": kill_at,
                "port": getattr(getattr(replica, "database", replica), "port", 0),
                "options": {
                    "mode": replica.mode,
                    # A commit to storage takes many requests.
                    "commit_rows": 60 if replica.storage_options is None else 400,
                    "commit_interval": 60.0,
                }
                | (replica.options if isinstance(replica, replicas.OfMany) else {})
                | options,
            }
            if replica.storage_options is not None:
                request["storage_options"] = replica.to_write
                request["port"] = replica.stored.faults.port
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run


@pytest.fixture
def bare_cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, replicas=1, vbuckets=4) as running:
        yield running


@pytest.fixture
def cluster(bare_cluster):
    bare_cluster.create_scope("inventory")
    for name in COLLECTIONS[1:]:
        bare_cluster.create_collection(name)
    return bare_cluster


# ----- what people do to a table; whether rows are lost or gained by it -----


def _delete_rows(replica):
    replica.query("DELETE FROM documents WHERE vbucket = 1")
    return True


def _empty(replica):
    replica.query("TRUNCATE documents")
    return True


def _index(replica):
    replica.query("CREATE INDEX IF NOT EXISTS by_seqno ON documents (seqno)")
    return False


def _maintain(replica):
    replica.clean_up()
    return False


def _restore(replica):
    table = deltalake.DeltaTable(str(replica.folder))
    table.restore(max(table.version() - 2, 0))
    return True


def _delete_delta_rows(replica):
    deltalake.DeltaTable(str(replica.folder)).delete("vbucket = 1")
    return True


def _compact(replica):
    deltalake.DeltaTable(str(replica.folder)).optimize.compact()
    return False


def _delete_stored_rows(replica):
    replica.delta().delete("vbucket = 1")
    return True


def _compact_stored(replica):
    replica.delta().optimize.compact()
    return False


def _vacuum(replica):
    table = deltalake.DeltaTable(str(replica.folder))
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    return False


def _roll_back(replica):
    table = replica.table()
    # Its history also has those that it was rolled back from.
    snapshots = list(ancestors_of(table.current_snapshot(), table.metadata))
    if len(snapshots) > 2:
        table.manage_snapshots().rollback_to_snapshot(snapshots[2].snapshot_id).commit()
    return True


def _delete_iceberg_rows(replica):
    replica.table().delete("vbucket == 1")
    return True


def _remove_newest_files(replica):
    for file in sorted(replica.folder.glob("[!.]*.parquet"))[-2:]:
        file.unlink()
    return True


def _remove_a_file(replica):
    files = sorted(replica.folder.glob("[!.]*.parquet"))
    first = json.loads(pq.read_metadata(files[-1]).metadata[b"dcp_rs.files"])["first"]
    # The oldest may be removed, which loads nothing anew: their rows are gone.
    between = [each for each in files[:-1] if int(each.stem) > first]
    if not between:
        return False
    between[len(between) // 2].unlink()
    return True


def _remove_topic(replica):
    replica.broker.remove(replica.name)
    return True


def _remove_newest_objects(replica):
    names = replica.stored.objects("lake/parquet")
    obstore.delete(replica.stored.store, sorted(names)[-2:])
    return True


EDITS = {
    "duckdb": [_delete_rows, _empty, _index],
    "ducklake": [_delete_rows, _empty, _maintain],
    "ducklake_postgres": [_delete_rows, _empty, _maintain],
    "postgres": [_delete_rows, _empty, _index],
    "delta": [_restore, _delete_delta_rows, _compact, _vacuum],
    "iceberg": [_roll_back, _delete_iceberg_rows],
    "kafka": [_remove_topic],
    "parquet": [_remove_newest_files, _remove_a_file],
    "stored_iceberg": [_roll_back, _delete_iceberg_rows],
    "stored_parquet": [_remove_newest_objects],
    "stored_delta": [_delete_stored_rows, _compact_stored],
    "stored_ducklake": [_delete_rows, _empty, _maintain],
}


@contextlib.contextmanager
def telling(story):
    """Says what happened if something does not hold."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(story) from error


def check(replica, written, story):
    assert replica.documents() == written.documents(), story
    assert replica.rejects() == written.rejects(), story


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", replicas.ALL + _HISTORIES + replicas.KAFKA)
def test_the_tables_of_a_bucket_equal_it_whichever_step_their_writer_dies_at(
    bare_cluster, writer, request, tmp_path, kind
):
    kills = int(os.environ.get("DCP_STEPS", "1"))
    seed = int(os.environ.get("DCP_STEPS_SEED", random.randrange(10**6)))
    replica = replicas.make_many(kind, request, tmp_path)
    if not kind.startswith("kafka"):
        replica.options |= {"document_schema": "infer", "extra": "column"}
    replica.options |= {
        "on_drop": "drop" if seed % 2 else "empty",
    }
    trouble = OfABucket(bare_cluster, seed)
    story = [f"seed {seed}"]
    for _ in range(20):
        trouble.write()
        trouble.write_legacy()
    killed, tried, steps = 0, 0, 0
    first = trouble.chance.random()
    while True:
        run = writer(bare_cluster, replica)
        assert not run.get("error"), (story, run)
        names = [replica.prefix + replicas.called(name) for name in STEADY + EVOLVING]
        generations = [run["generations"][name] for name in names]
        assert generations == [1, 1, 1, 1], (story, "loaded anew for nothing")
        with telling(story):
            assert_holds(replica, trouble.written)
            assert replica.rejects() == trouble.written.rejects()
        steps = max(run["steps"], steps)
        if killed == kills:
            break
        before = trouble.written.documents()
        if tried:
            trouble.end_round()
        tried += 1
        assert tried < 4 * kills + 20, (story, "dies too seldom")
        trouble.before_death()
        kill_at = 1 + int((first + tried * _GOLDEN) % 1 * steps)
        died = writer(bare_cluster, replica, kill_at)
        assert not died.get("error"), (story, died)
        killed += died["signal"] == 9
        story.append(f"killed at {kill_at} of {steps}" if died["signal"] else "ended")
        # To look at a database may mend what its next writer is to find.
        if tried % 2:
            with telling(story):
                trouble.assert_was_committed(replica, before)
        trouble.after_death()
        steps = died.get("steps", kill_at)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", replicas.ALL + replicas.LAKES + replicas.KAFKA + _STORED)
def test_a_target_equals_the_bucket_whichever_step_its_writer_dies_at(
    cluster, writer, request, tmp_path, kind
):
    is_slow = kind in _STORED + replicas.LAKES
    kills = int(os.environ.get("DCP_STEPS", "1" if is_slow else "3"))
    seed = int(os.environ.get("DCP_STEPS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    replica = replicas.make(kind, request, tmp_path)
    if kind in _STORED:
        # With few requests, more of them have to fail for one to.
        is_lean = kills == 1 and kind != "stored_delta-table"
        replica.stored.faults.set(one_in=5 if is_lean else 20)
    compacts = any(each in kind for each in ("delta", "lake"))
    trouble = Trouble(cluster, seed)
    for _ in range(100):
        trouble.write()
        trouble.write_legacy()
    story = [f"seed {seed}"]
    run = writer(cluster, replica)
    assert not run.get("error"), (story, run)
    check(replica, trouble.written, story)
    killed, tried, steps = 0, 0, run["steps"]
    while killed < kills:
        tried += 1
        assert tried < 4 * kills + 20, (story, "dies too seldom")
        documents = trouble.written.documents()
        for _ in range(30):
            trouble.cause()
        trouble.write_legacy()
        edited = chance.random() < 0.3
        if edited:
            edit = chance.choice(EDITS[kind.split("-")[0]])
            edited = edit(replica)
            story.append(edit.__name__)
        before = run["generation"]
        kill_at = 1 + int(tried * _GOLDEN % 1 * steps)
        died = writer(cluster, replica, kill_at, **(_MAINTAINED if compacts else {}))
        assert not died.get("error"), (story, died)
        killed += died["signal"] == 9
        story.append(f"killed at {kill_at} of {steps}" if died["signal"] else "ended")
        # To look at it may mend what its next writer is to find.
        if tried % 2 and not edited:
            with telling(story):
                trouble.assert_was_committed(replica, documents)
        run = writer(cluster, replica)
        assert not run.get("error"), (story, run)
        check(replica, trouble.written, story)
        assert edited or run["generation"] == before, (story, "loaded anew for nothing")
        # Of both, since a run that died had some of the work.
        steps = max(run["steps"], died.get("steps", kill_at) + run["steps"], 1)
    assert replica.unnamed() == set(), story
    check(replica, trouble.written, story)
    if kind in _STORED:
        assert sum(replica.stored.faults.set().values()) > 0
    assert trouble.written.documents(), "something is left to compare"
    assert trouble.written.rejects(), "and rejects"


# ----- histories -----

# What people do to one without a loss.
HARMLESS = {
    "duckdb": [_index],
    "ducklake": [_maintain],
    "ducklake_postgres": [_maintain],
    "delta": [_compact, _vacuum],
    "postgres": [_index],
    "stored_delta": [_compact_stored],
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "keeps_history"),
    [
        pytest.param(kind, keeps, id=f"{kind}-{'every_version' if keeps else 'newest_versions'}")
        for kind in [*replicas.HISTORIES, "stored_delta-history"]
        for keeps in (True, False)
        if _IS_LONG or (kind, keeps) in {("duckdb-history", True), ("delta-history", False)}
    ],
)
def test_a_history_has_each_version_once_whichever_step_its_writer_dies_at(
    writer, request, tmp_path, kind, keeps_history
):
    kills = int(os.environ.get("DCP_STEPS", "1"))
    seed = int(os.environ.get("DCP_STEPS_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    replica = replicas.make(kind, request, tmp_path)
    is_stored = replica.storage_options is not None
    if is_stored:
        replica.stored.faults.set(one_in=20)
    nodes = {"nodes": 2, "replicas": 1, "vbuckets": 4}
    with dcp_rs.testing.EmbeddedCluster(**nodes, keeps_history=keeps_history) as cluster:
        cluster.create_scope("inventory")
        for name in COLLECTIONS[1:]:
            cluster.create_collection(name)
        trouble = versions.TroubleOfVersions(cluster, seed, keeps_history=keeps_history)
        story = [f"seed {seed}"]
        for _ in range(40):
            trouble.write()
            trouble.write_legacy()

        def read():
            run = writer(cluster, replica)
            assert not run.get("error"), (story, run)
            assert run["generation"] == 1, (story, "loaded anew for nothing")
            check(replica, trouble.written, story)
            with telling(story):
                trouble.written.check(replica.rows())
            return run

        steps = read()["steps"]
        killed, tried = 0, 0
        while killed < kills:
            tried += 1
            assert tried < 4 * kills + 20, (story, "dies too seldom")
            for _ in range(30):
                trouble.cause()
            trouble.write_legacy()
            if chance.random() < 0.3:
                edit = chance.choice(HARMLESS[kind.partition("-")[0]])
                edit(replica)
                story.append(edit.__name__)
            kill_at = 1 + int(tried * _GOLDEN % 1 * steps)
            died = writer(cluster, replica, kill_at)
            assert not died.get("error"), (story, died)
            killed += died["signal"] == 9
            story.append(f"killed at {kill_at} of {steps}" if died["signal"] else "ended")
            if tried % 2:
                with telling(story):
                    versions.assert_none_doubled(replica.rows())
            run = read()
            steps = max(run["steps"], died.get("steps", kill_at) + run["steps"], 1)
    assert any(row["valid_to_seqno"] is not None for row in replica.rows()), "versions ended"
    assert replica.unnamed() == set(), story
