use std::fs;

use dcp_consumer::{
    CheckpointStore, ErrorKind, FileStore, MemoryStore, load_checkpoint, save_checkpoint,
};
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::{Position, Snapshot};
use dcp_wire::{Seqno, Vbid};

fn checkpoint(vbid: u16) -> Checkpoint {
    Checkpoint::new("uuid", StoredFilter::default()).with_position(Vbid(vbid), Position::EARLIEST)
}

#[test]
fn checkpoint_file_is_replaced_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    save_checkpoint(&checkpoint(3), &path).unwrap();
    // What has the old document open still has it, whole.
    let elsewhere = tempfile::tempdir().unwrap();
    let old = elsewhere.path().join("old.json");
    fs::hard_link(&path, &old).unwrap();
    save_checkpoint(&checkpoint(4), &path).unwrap();
    assert_eq!(load_checkpoint(&path).unwrap(), checkpoint(4));
    assert_eq!(load_checkpoint(&old).unwrap(), checkpoint(3));
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["positions.json"], "nothing else is left behind");
}

#[cfg(unix)]
#[test]
fn checkpoint_file_is_readable_by_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    save_checkpoint(&checkpoint(1), &path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn checkpoint_file_that_cannot_be_read_is_an_error_and_never_empty() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    assert_eq!(load_checkpoint(&path).unwrap_err().kind(), ErrorKind::Checkpoint, "missing");
    let json = checkpoint(1).to_json();
    for content in ["", &json[..json.len() / 2], "{}"] {
        fs::write(&path, content).unwrap();
        let error = load_checkpoint(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Checkpoint);
        assert!(error.to_string().contains("positions.json"), "{error}");
    }
    assert!(load_checkpoint(folder.path()).is_err(), "a folder");
}

#[test]
fn checkpoint_outlives_a_failed_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    fs::create_dir(&path).unwrap();
    let error = save_checkpoint(&checkpoint(1), &path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    assert!(path.is_dir());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    assert!(save_checkpoint(&checkpoint(1), folder.path().join("missing/x").as_path()).is_err());
}

#[cfg(unix)]
#[test]
fn checkpoint_file_does_not_replace_what_is_no_regular_file() {
    use std::os::unix::fs::{FileTypeExt, symlink};

    let folder = tempfile::tempdir().unwrap();
    let (socket, link) = (folder.path().join("socket"), folder.path().join("link"));
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    symlink(&socket, &link).unwrap();
    for path in [&socket, &link] {
        let error = save_checkpoint(&checkpoint(1), path).unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("not a regular file"), "{why}");
        assert!(fs::metadata(path).unwrap().file_type().is_socket());
    }
    assert_eq!(names(folder.path()), ["link", "socket"]);
}

fn names(folder: &std::path::Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| name(e).unwrap()).collect();
    names.sort();
    names
}

#[test]
fn checkpoint_save_is_not_hindered_by_what_a_crash_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    // In a container every process has the same id, so a number after it would not tell them apart.
    let left: Vec<_> =
        (0..50).map(|n| format!("positions.json.{}-{n}.tmp", std::process::id())).collect();
    left.iter().for_each(|name| fs::write(folder.path().join(name), "another's").unwrap());
    (0..50).for_each(|vbid| save_checkpoint(&checkpoint(vbid), &path).unwrap());
    assert_eq!(load_checkpoint(&path).unwrap(), checkpoint(49));
    assert_eq!(names(folder.path()).len(), 51, "and what is not known to be its own is kept");
}

#[test]
fn checkpoint_save_removes_what_a_crash_left_once_it_is_old() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    let abandoned = "positions.json.0123456789abcdef.tmp";
    let kept = [
        "other.json.0123456789abcdef.tmp",
        "positions.json.0123456789ABCDEF.tmp",
        "positions.json.0123456789abcde.tmp",
        "positions.json.0123456789abcdef.tmp.bak",
        "positions.json.bak.0123456789abcdef.tmp",
        "positions.jsonx0123456789abcdef.tmp",
    ];
    let in_use = "positions.json.fedcba9876543210.tmp";
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3700);
    for name in kept.iter().chain([&abandoned, &in_use]) {
        let file = fs::File::create(folder.path().join(name)).unwrap();
        if *name != in_use {
            file.set_modified(long_ago).unwrap();
        }
    }
    save_checkpoint(&checkpoint(1), &path).unwrap();
    let mut expected: Vec<_> = kept.iter().chain([&in_use, &"positions.json"]).copied().collect();
    expected.sort_unstable();
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn store_gives_back_what_was_saved_last_and_nothing_before() {
    let folder = tempfile::tempdir().unwrap();
    let file = FileStore::new(folder.path().join("positions.json"));
    let stores: [&dyn CheckpointStore; 2] = [&file, &MemoryStore::default()];
    for store in stores {
        assert_eq!(store.load().unwrap(), None);
        for vbid in [1, 2] {
            store.save(&checkpoint(vbid)).unwrap();
            assert_eq!(store.load().unwrap(), Some(checkpoint(vbid)), "{store:?}");
        }
    }
    fs::write(file.path(), "").unwrap();
    assert_eq!(file.load().unwrap_err().kind(), ErrorKind::Checkpoint, "damaged is not absent");
    #[cfg(unix)]
    {
        fs::remove_file(file.path()).unwrap();
        std::os::unix::fs::symlink("nowhere", file.path()).unwrap();
        assert_eq!(file.load().unwrap_err().kind(), ErrorKind::Checkpoint, "a broken link");
    }
}

fn at(seqno: u64, epoch: u32) -> Checkpoint {
    let seqno = Seqno(seqno);
    let snapshot = Snapshot { start: seqno, end: seqno };
    let position = Position { seqno, snapshot, epoch, ..Position::EARLIEST };
    Checkpoint::new("uuid", StoredFilter::default()).with_position(Vbid(1), position)
}

#[test]
fn store_that_two_readers_share_never_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    let (file, memory) = (FileStore::new(&path), MemoryStore::default());
    // As another process would have it.
    let other = FileStore::new(&path);
    let stores: [(&dyn CheckpointStore, &dyn CheckpointStore); 2] =
        [(&file, &other), (&memory, &memory)];
    for (fast, slow) in stores {
        fast.save(&at(5, 0)).unwrap();
        slow.save(&at(5, 0)).unwrap();
        fast.save(&at(9, 0)).unwrap();
        let error = slow.save(&at(8, 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Checkpoint);
        assert!(error.to_string().contains("at seqno 8, stored is 9"), "{error}");
        assert_eq!(fast.load().unwrap(), Some(at(9, 0)));
        fast.save(&at(3, 1)).unwrap();
        slow.save(&at(10, 0)).unwrap_err();
        assert_eq!(fast.load().unwrap(), Some(at(3, 1)), "after a rollback");
    }
}

#[test]
fn store_serialises_the_saves_of_many_writers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    let write = |path: std::path::PathBuf| {
        move || {
            let store = FileStore::new(&path);
            let saved = |seqno: &u64| {
                let is_saved = store.save(&at(*seqno, 0)).is_ok();
                let kept = store.load().unwrap().unwrap().position(Vbid(1)).unwrap().seqno;
                assert!(!is_saved || kept.0 >= *seqno, "{seqno} was saved, {kept} is there");
                is_saved
            };
            (1..60).filter(saved).max().unwrap_or_default()
        }
    };
    let writers: Vec<_> = (0..4).map(|_| std::thread::spawn(write(path.clone()))).collect();
    let highest = writers.into_iter().map(|writer| writer.join().unwrap()).max().unwrap();
    assert_eq!(FileStore::new(&path).load().unwrap(), Some(at(highest, 0)));
    assert_eq!(names(folder.path()), ["positions.json", "positions.json.lock"]);
}

#[test]
fn store_keeps_readers_of_other_vbuckets_and_other_buckets_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (file, memory) =
        (FileStore::new(folder.path().join("positions.json")), MemoryStore::default());
    let stores: [&dyn CheckpointStore; 2] = [&file, &memory];
    let elsewhere = Checkpoint::new("uuid", StoredFilter::default())
        .with_position(Vbid(2), at(7, 0).position(Vbid(1)).unwrap().clone());
    let anew = Checkpoint::new("other", StoredFilter::default());
    for store in stores {
        store.save(&at(5, 0)).unwrap();
        for (refused, why) in [(&elsewhere, "lacks vb:1"), (&anew, "belongs to bucket other")] {
            let error = store.save(refused).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Checkpoint);
            assert!(error.to_string().contains(why), "{error}");
        }
        assert_eq!(store.load().unwrap(), Some(at(5, 0)));
        // One that has both goes on.
        let mut both = elsewhere.clone();
        both.merge(&at(5, 0)).unwrap();
        store.save(&both).unwrap();
    }
}
