"""A target that is unavailable for a while: it is told, and nothing is lost or doubled."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

import replicas
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import core, iceberg, open_target, parquet_objects
from dcp_rs.replication.controls import Controls
from dcp_rs.replication.heap import release_memory
from dcp_rs.replication.outage import Unreachable, is_passing
from lag import until
from small_disk import mounted

# The others take longer; DuckDB tries a file that it cannot write for half a minute.
ALL = ["parquet-log"]
if "DCP_OUTAGES" in os.environ:
    ALL += ["delta-table", "delta-log", "iceberg-log", "duckdb-table", "duckdb-log"]


class Running:
    """A replication on a thread of its own."""

    def __init__(self, cluster, target, **options):
        self.seen, self.error = [], None
        self.stop = options.pop("stop", None) or threading.Event()
        self._run = lambda: replicas.replicate(
            cluster, target, once=False, stop=self.stop, on_progress=self.seen.append,
            **({"commit_interval": 0.1, "target_retry_timeout": 600} | options),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._keep_error)
        self._thread.start()

    def _keep_error(self):
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def until(self, holds, patience=60):
        until(lambda: self.error is not None or (self.seen and holds(self.seen[-1])), patience)
        assert self.error is None, self.error

    def has(self, changes):
        self.until(lambda now: (now.phase, now.changes, now.lag) == ("following", changes, 0))

    def end(self):
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Failing:
    """A target whose commits fail while it is told so, before or after they are applied."""

    modes = frozenset({"table", "log"})

    def __init__(self, url):
        self.inner, self.before, self.after, self.failed = open_target(url), None, None, 0
        self.open, self.close = self.inner.open, self.inner.close

    def commit(self, commit):
        self._fail(self.before)
        self.inner.commit(commit)
        self._fail(self.after)

    def _fail(self, error):
        if error is not None:
            self.failed += 1
            raise error


@pytest.mark.mounts
@pytest.mark.parametrize("name", ALL)
def test_a_full_disk_is_told_and_passes(cluster, tmp_path, request, name, caplog):
    kind, mode = name.split("-")
    written = replicas.Written(cluster)
    for n in range(50):
        written.upsert(f"key_{n}", {"n": n})
    with mounted(tmp_path / "disk", 16 << 20) as disk:
        replica = replicas.OfMany(replicas.KINDS[kind](request, disk.folder), kind, mode)
        running = Running(cluster, replica)
        running.has(50)
        disk.fill()
        for n in range(25, 100):
            written.upsert(f"key_{n}", {"n": n, "pad": os.urandom(300).hex()})
        running.until(lambda now: now.phase == "target unavailable" and now.lag_seconds > 0.3)
        assert running.seen[-1].uncommitted == 75
        told = [
            each.fields
            for each in caplog.records
            if vars(each).get("event") == "target_unavailable"
        ]
        assert "No space left" in told[0]["error"]
        disk.make_room()
        running.has(125)
        running.end()
        assert running.seen[-1].tables["_default___default"].changes == 125
        assert replica.documents() == written.documents()


@pytest.mark.parametrize("mode", ["table", "log"])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(cluster, tmp_path, mode):
    written, target = replicas.Written(cluster), Failing(replicas.InDuckDB(tmp_path).url)
    written.upsert("first", {})
    running = Running(cluster, target, mode=mode)
    running.has(1)
    target.after = ConnectionResetError(errno.ECONNRESET, "connection reset")
    written.upsert("second", {})
    until(lambda: target.failed)
    target.after = None
    written.upsert("third", {})
    # The second was committed, and nobody counted it.
    running.has(2)
    running.end()
    replica = replicas.InDuckDB(tmp_path)
    replica.mode = mode
    # A log that had a row twice would not settle.
    assert replica.documents() == written.documents()


def test_memory_that_a_load_or_an_outage_took_is_given_back(cluster, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(core, "release_memory", lambda: given.append(None))
    target = Failing(f"duckdb://{tmp_path}/replica.duckdb")
    running = Running(cluster, target)
    running.has(0)
    assert len(given) == 1
    target.before = OSError(errno.ENOSPC, "full")
    cluster.upsert("key", {})
    running.until(lambda now: now.phase == "target unavailable")
    assert len(given) == 1
    target.before = None
    running.has(1)
    running.end()
    assert len(given) > 1


def test_memory_is_given_back_now_and_then(cluster, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(core, "release_memory", lambda: given.append(None))
    monkeypatch.setattr(core, "_RELEASE", 0.1)
    running = Running(cluster, f"duckdb://{tmp_path}/replica.duckdb")
    for number in range(3):
        running.has(number)
        time.sleep(0.2)
        cluster.upsert(f"key_{number}", {})
    running.has(3)
    running.end()
    assert len(given) >= 4, "after the load, and after each of three commits"


def test_what_was_read_again_is_not_after_an_outage(cluster, tmp_path):
    for n in range(20):
        cluster.upsert(f"key_{n}", {})
    url = replicas.InDuckDB(tmp_path).url
    replicas.replicate(cluster, url)
    target = Failing(url)
    running = Running(cluster, target, reload=range(16))
    running.has(20)
    target.before = ConnectionResetError(errno.ECONNRESET, "connection reset")
    cluster.upsert("another", {})
    until(lambda: target.failed)
    target.before = None
    running.has(21)
    running.end()


# How storage is away, by what is then written to it.
AWAY = {
    "stored_delta-log": {"is_away": True},
    "stored_delta-history": {"refuse": [503, "SlowDown"]},
    "stored_parquet-log": {"refuse": [500, "InternalError"]},
    "stored_iceberg-log": {"refuse": [503, "SlowDown"]},
}


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("Azure Error: [] 503 Service Unavailable", True),
        ("Azure Error: [] Error while sending request. Failure when receiving data", True),
        ("Azure Error: [] Fail to get a new connection for: http://127.0.0.1:1", True),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted", True),
        ("Azure Error: [BlobNotFound] 404 The specified blob does not exist.", False),
        ("google::cloud::Status(NOT_FOUND: Permanent error", False),
    ],
)
def test_what_arrow_says_of_a_storage_that_is_away_passes(text, passes):
    assert is_passing(OSError(text)) == passes


def to_write(replica):
    """Gives options by which a request is not repeated for a minute."""
    return replica.to_write | ({} if "iceberg" in replica.url else {"max_retries": "0"})


@pytest.mark.parametrize("name", AWAY)
def test_storage_that_is_away_for_a_while_is_tried_again(
    cluster, tmp_path, request, name, monkeypatch
):
    monkeypatch.setattr(iceberg, "_PAUSES", (0.0,))
    monkeypatch.setattr(parquet_objects, "_WAIT_SECONDS", 0.0)
    replica, written = replicas.make(name, request, tmp_path), replicas.Written(cluster)
    written.upsert("first", {})
    written.upsert(b"session_\xff", {})
    running = Running(cluster, replica, storage_options=to_write(replica))
    running.has(2)
    replica.stored.faults.set(**AWAY[name])
    written.upsert("first", {"n": 2})
    written.upsert(b"session_\xff", {"n": 2})
    running.until(lambda now: now.phase == "target unavailable")
    replica.stored.faults.set(is_away=False, refuse=None)
    running.has(4)
    running.end()
    assert replica.documents() == written.documents()
    assert replica.rejects() == written.rejects()
    assert replica.unnamed() == set()


def test_rejects_of_a_commit_whose_answer_is_lost_stay(cluster, stored, monkeypatch):
    create, lost = parquet_objects.NumberedObjects.create, []

    def lose(*arguments):
        size = create(*arguments)
        if size and not lost:
            lost.append(size)
            raise Unreachable("the storage does not answer")
        return size

    monkeypatch.setattr(parquet_objects.NumberedObjects, "create", lose)
    replica, written = replicas.InStoredParquet(stored), replicas.Written(cluster)
    replica.mode = "log"
    for key in ("first", b"session_\xff"):
        written.upsert(key, {})
    replicas.replicate(cluster, replica, target_retry_timeout=60)
    assert lost
    assert replica.rejects() == written.rejects()


def test_storage_that_refuses_while_it_runs_or_is_away_at_the_start_is_an_error(cluster, stored):
    replica = replicas.InStoredDelta(stored)
    cluster.upsert("first", {})
    stored.faults.set(is_away=True)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"storage_options: .* the endpoint cannot be reached"):
        replicas.replicate(cluster, replica, target_retry_timeout=60)
    assert time.monotonic() - begun < 10
    stored.faults.set(is_away=False)
    running = Running(cluster, replica, storage_options=to_write(replica))
    running.has(1)
    stored.faults.set(refuse=[403, "InvalidAccessKeyId"])
    cluster.upsert("second", {})
    until(lambda: running.error is not None)
    assert "the credentials are refused" in str(running.error)
    running.end()


def test_a_target_that_stays_away_ends_it_after_the_time(cluster, tmp_path):
    cluster.upsert("first", {})
    target = Failing(replicas.InDuckDB(tmp_path).url)
    target.before = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    begun = time.monotonic()
    with pytest.raises(OSError, match="No space left"):
        replicas.replicate(cluster, target, target_retry_timeout=1.2)
    assert (time.monotonic() - begun > 0.5, target.failed) == (True, 2)
    # What does not pass is raised at once, as is everything by default.
    # What this process lacks is no fault of the target.
    own = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    permanent = [(PermissionError(errno.EACCES, "no"), 60.0), (own, 60.0)]
    for error, timeout in (*permanent, (target.before, 0.0)):
        target.before, target.failed = error, 0
        with pytest.raises(OSError, match=str(error.strerror)):
            replicas.replicate(cluster, target, target_retry_timeout=timeout)
        assert target.failed == 1


class _Changing(Controls):
    """Changes an option once it is told to, and takes errors for those of the option."""

    is_asked = False

    def turn(self, change):
        if self.is_asked:
            self.is_asked = False
            with pytest.raises(ConfigError):
                change({"commit_rows": 7})


def test_a_commit_that_fails_while_options_change_loses_nothing(cluster, tmp_path):
    written, stop = replicas.Written(cluster), _Changing()
    target = Failing(replicas.InDuckDB(tmp_path).url)
    written.upsert("first", {})
    running = Running(cluster, target, stop=stop, commit_interval=3600)
    running.has(1)
    full = ConfigError("the disk is full")
    full.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written.upsert("second", {})
    running.until(lambda now: now.uncommitted == 1)
    target.before, stop.is_asked = full, True
    running.until(lambda now: now.phase == "target unavailable")
    target.before = None
    running.has(2)
    running.end()
    assert replicas.InDuckDB(tmp_path).documents() == written.documents()


def test_what_glibc_keeps_is_given_back():
    def held():
        status = Path("/proc/self/smaps_rollup").read_text()
        return int(status.partition("Private_Dirty:")[2].split()[0])

    # Above the largest block that Python's own allocator takes, with some in use everywhere.
    blocks = [b"%d" % number * 600 for number in range(30_000)]
    kept = blocks[::60]
    del blocks
    before = held()
    release_memory()
    assert before - held() > 40 * 1024
    assert len(kept) == 500
