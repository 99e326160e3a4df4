use std::fs;

use dcp_consumer::{ErrorKind, load_checkpoint, save_checkpoint};
use dcp_proto::Position;
use dcp_proto::checkpoint::{Checkpoint, FilterHash};
use dcp_wire::Vbid;

fn checkpoint(vbid: u16) -> Checkpoint {
    Checkpoint::new("uuid", FilterHash(1)).with_position(Vbid(vbid), Position::EARLIEST)
}

#[test]
fn a_checkpoint_file_is_replaced_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("positions.json");
    for vbid in [3, 4] {
        save_checkpoint(&checkpoint(vbid), &path).unwrap();
        assert_eq!(load_checkpoint(&path).unwrap(), checkpoint(vbid));
    }
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
