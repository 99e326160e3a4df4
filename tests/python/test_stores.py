"""Where checkpoints are kept, and what the command does with them."""

import json
import os
import stat
import time

import pytest

import dcp_rs
from dcp_rs.cli import main
from dcp_rs.exceptions import ConfigError


class Shelf:
    """A store of somebody's own."""

    def __init__(self):
        self.saved = []

    def load(self):
        return dcp_rs.Checkpoint.from_json(self.saved[-1]) if self.saved else None

    def save(self, checkpoint):
        self.saved.append(checkpoint.to_json())


@pytest.fixture(params=["file", "memory", "own"])
def store(request, tmp_path):
    return {
        "file": lambda: dcp_rs.FileStore(tmp_path / "positions.json"),
        "memory": dcp_rs.MemoryStore,
        "own": Shelf,
    }[request.param]()


def read(client, store, **options):
    keys = []
    for batch in client.stream(start=store, until="now", **options):
        keys += [row["key"] for row in batch.rows()]
        store.save(batch.checkpoint)
    return keys


def test_a_stream_goes_on_from_what_a_store_has(client, fill, store):
    assert isinstance(store, dcp_rs.CheckpointStore)
    assert store.load() is None
    assert sorted(fill(20, prefix="a")) == sorted(read(client, store))
    first = store.load()
    fill(5, prefix="b")
    assert sorted(read(client, store)) == [f"b_{n}" for n in range(5)]
    assert store.load() != first
    fill(5, prefix="c")
    narrower = read(client, store, collections=["_default._default"])
    assert sorted(narrower) == [f"c_{n}" for n in range(5)]
    with pytest.raises(dcp_rs.exceptions.CheckpointError, match="also asks for the whole bucket"):
        read(client, store)


@pytest.mark.parametrize("store", ["file", "memory"], indirect=True)
def test_of_two_readers_with_one_store_the_slower_is_told(cluster, client, store):
    cluster.upsert("a", b"1")
    with client.stream(start=store, batch=dcp_rs.BatchPolicy(linger=0.01)) as slow:
        behind = next(slow)
        for _ in range(4):
            cluster.upsert("a", b"2")
        assert read(client, store)
        kept = store.load()
        with pytest.raises(dcp_rs.exceptions.CheckpointError, match="Another reader"):
            store.save(behind.checkpoint)
    assert store.load() == kept
    # Whoever is not behind may save.
    store.save(kept)


_HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_save_waits_for_a_lock_and_not_for_one_whose_holder_has_died(
    client, cluster, tmp_path, start_python
):
    store = dcp_rs.FileStore(tmp_path / "positions.json")
    cluster.upsert("a", b"1")
    assert read(client, store) == ["a"]
    checkpoint = store.load()
    # A process that was killed leaves the file there.
    holder = start_python(_HOLD, f"{store.path}.lock", 60)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    store.save(checkpoint)
    holder = start_python(_HOLD, f"{store.path}.lock", 0.5)
    assert holder.stdout.readline() == "held\n"
    began = time.monotonic()
    store.save(checkpoint)
    assert time.monotonic() - began > 0.3
    assert holder.wait() == 0


_SAVE = """
import os, sys
import dcp_rs
store, folder = dcp_rs.FileStore(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
saved = 0
for name in sorted(os.listdir(folder)):
    try:
        store.save(dcp_rs.Checkpoint.load(os.path.join(folder, name)))
        saved += 1
    except dcp_rs.exceptions.CheckpointError as error:
        assert "another reader" in str(error).lower(), error
print(name, saved)
"""


def test_processes_that_share_a_store_never_take_it_back(client, cluster, tmp_path, start_python):
    store, folder = dcp_rs.FileStore(tmp_path / "positions.json"), tmp_path / "checkpoints"
    folder.mkdir()
    stream = client.stream(batch=dcp_rs.BatchPolicy(linger=0.001))
    for n in range(40):
        cluster.upsert("a", f"{n}")
        next(stream).checkpoint.save(folder / f"{n:02}")
    stream.close()
    seen = []
    writers = [start_python(_SAVE, store.path, folder) for _ in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        kept = store.load()
        seen.append(max(kept.seqnos.values()) if kept else 0)
    for writer in writers:
        out, err = writer.communicate(timeout=10)
        assert out.startswith("39 "), err
    assert seen == sorted(seen), "it went back"
    assert store.load() == dcp_rs.Checkpoint.load(folder / "39")
    assert {each.name for each in tmp_path.iterdir()} == {
        "checkpoints",
        "positions.json",
        "positions.json.lock",
    }


@pytest.mark.parametrize("store", ["file", "memory"], indirect=True)
def test_readers_of_other_vbuckets_do_not_erase_each_others_positions(client, fill, store):
    fill(60)
    streams = [client.stream(start=store, until="now", vbuckets=each) for each in ([0, 1], [2, 3])]
    batches = [[*stream] for stream in streams]
    for each in batches:
        store.save(each[-1].checkpoint)
    assert set(store.load().seqnos) == {0, 1, 2, 3}
    # Nor does the one who goes on with some of them.
    fill(60, prefix="more")
    assert read(client, store, vbuckets=[2, 3])
    assert set(store.load().seqnos) == {0, 1, 2, 3}
    assert store.load().restricted_to([0, 1]) == batches[0][-1].checkpoint


def test_what_holds_positions_or_data_is_its_owners_whatever_the_umask(client, cluster, tmp_path):
    cluster.upsert("a", b"1")
    store, data = dcp_rs.FileStore(tmp_path / "positions.json"), tmp_path / "parent" / "data"
    umask = os.umask(0)
    try:
        read(client, store)
        (tmp_path / "positions.json").chmod(0o666)
        cluster.upsert("a", b"2")
        read(client, store)
        for _ in range(2):
            with dcp_rs.testing.EmbeddedCluster(vbuckets=1, data=data) as other:
                other.upsert("a", b"1")
            for file in data.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
                file.chmod(0o666)
    finally:
        os.umask(umask)
    for folder in (data, data.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in tmp_path.glob("positions*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_damaged_file_is_an_error_and_no_first_start(client, tmp_path):
    path = tmp_path / "positions.json"
    store = dcp_rs.FileStore(path)
    path.write_text("")
    with pytest.raises(dcp_rs.exceptions.CheckpointError):
        client.stream(start=store)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(dcp_rs.exceptions.CheckpointError):
        client.stream(start=store)


def test_a_path_with_a_nul_is_refused(tmp_path):
    for use in (dcp_rs.FileStore, dcp_rs.Checkpoint.load):
        with pytest.raises(ConfigError, match=r"^path: is not a valid path: it has a NUL$"):
            use(f"{tmp_path}/a\0b")


def test_what_is_no_store_is_refused(client):
    class Broken:
        def load(self):
            return "text"

        def save(self, checkpoint):
            pass

    for start in (Broken(), object(), 5):
        with pytest.raises(dcp_rs.exceptions.ConfigError, match="start"):
            client.stream(start=start)
    with pytest.raises(dcp_rs.exceptions.ConfigError, match="checkpoint"):
        dcp_rs.MemoryStore().save("text")
    for path in (5, ""):
        with pytest.raises(dcp_rs.exceptions.ConfigError, match="path: must"):
            dcp_rs.FileStore(path)


@pytest.fixture
def kept(client, fill, tmp_path):
    fill(60)
    store = dcp_rs.FileStore(tmp_path / "positions.json")
    read(client, store)
    return store


def test_positions_are_reset_all_or_some(client, kept, capsys):
    before = kept.load().seqnos
    table = ["--output", "table"]
    assert main(["checkpoint", "reset", kept.path, "--vbuckets", "0-3,7", *table]) == 0
    assert capsys.readouterr().out.startswith(f"{kept.path}: ")
    again = {0, 1, 2, 3, 7}
    assert kept.load().seqnos == {vb: at for vb, at in before.items() if vb not in again}
    rows = [row for batch in client.stream(start=kept, until="now") for row in batch.rows()]
    assert {row["vbucket"] for row in rows} == again & {vb for vb, at in before.items() if at}
    assert main(["checkpoint", "reset", kept.path, "--vbuckets", "7"]) == 1
    assert "see dcp-rs checkpoint show" in capsys.readouterr().err
    assert main(["checkpoint", "reset", kept.path, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"file": kept.path, "reset": sorted(set(before) - again)}
    assert len(read(client, kept)) == 60


def test_a_reader_that_still_runs_does_not_undo_a_reset(client, kept):
    with client.stream(start=kept) as stream:
        at = stream.checkpoint()
        assert main(["checkpoint", "reset", kept.path, "--vbuckets", "3"]) == 0
        with pytest.raises(dcp_rs.exceptions.TakenOverError):
            kept.save(at)
    assert 3 not in kept.load().seqnos
    assert len(kept.load().seqnos) == len(at.seqnos) - 1


def test_a_copy_is_whole_private_and_overwrites_nothing(kept, tmp_path, capsys):
    copy = tmp_path / "copy.json"
    assert main(["checkpoint", "copy", kept.path, str(copy)]) == 0
    assert dcp_rs.Checkpoint.load(copy) == kept.load()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    some = ["checkpoint", "copy", kept.path, str(copy), "--vbuckets", "1,2", "--json"]
    assert main(some) == 1
    assert "--force" in capsys.readouterr().err
    assert main([*some, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["vbuckets"] == [1, 2]
    assert set(dcp_rs.Checkpoint.load(copy).seqnos) == {1, 2}


@pytest.mark.parametrize("command", ["show", "reset", "copy"])
def test_positions_that_a_checkpoint_lacks_are_refused(kept, tmp_path, capsys, command):
    copy = tmp_path / "copy.json"
    kept.load().save(copy)
    to = [str(copy), "--force"] if command == "copy" else []
    assert main(["checkpoint", command, kept.path, *to, "--vbuckets", "100-200"]) == 1
    assert "see dcp-rs checkpoint show" in capsys.readouterr().err
    assert dcp_rs.Checkpoint.load(copy) == kept.load()


def test_damage_is_told_and_nothing_is_written(kept, tmp_path, capsys):
    os.truncate(kept.path, 100)
    copy = tmp_path / "copy.json"
    for words in (["show", kept.path], ["reset", kept.path], ["copy", kept.path, str(copy)]):
        assert main(["checkpoint", *words]) == 1
        assert "could not be read" in capsys.readouterr().err
    assert not copy.exists()
    for wrong in ("a", "3-1", "70000", ""):
        assert main(["checkpoint", "show", kept.path, "--vbuckets", wrong]) == 2
        assert "0-63,70" in capsys.readouterr().err
