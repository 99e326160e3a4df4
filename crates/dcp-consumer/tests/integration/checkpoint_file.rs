use std::fs;

use dcp_consumer::{
    CheckpointStore, ErrorKind, FileStore, MemoryStore, load_checkpoint, save_checkpoint,
};
use dcp_proto::Position;
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_wire::Vbid;

fn checkpoint(vbid: u16) -> Checkpoint {
    Checkpoint::new("uuid", StoredFilter::default()).with_position(Vbid(vbid), Position::EARLIEST)
}

#[test]
fn a_checkpoint_file_is_replaced_as_a_whole() {
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
fn only_the_owner_may_read_it() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    save_checkpoint(&checkpoint(1), &path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_that_cannot_be_used_is_an_error_and_never_an_empty_checkpoint() {
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
fn the_old_checkpoint_outlives_a_failed_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    fs::create_dir(&path).unwrap();
    let error = save_checkpoint(&checkpoint(1), &path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    assert!(path.is_dir());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    assert!(save_checkpoint(&checkpoint(1), folder.path().join("missing/x").as_path()).is_err());
}

#[test]
fn every_store_gives_back_what_was_saved_last_and_nothing_before() {
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
