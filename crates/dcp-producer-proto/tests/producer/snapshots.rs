//! Snapshots: where markers begin and end, and which flags they carry.

use dcp_wire::message::{OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::{Seqno, Status};

use crate::client::{COLLECTIONS, Client, LEGACY, from_scratch, resume};
use dcp_test::bucket::{Bucket, VBucket, docs};

/// The messages of one stream of `vbucket`, and the client for more.
fn stream(vbucket: VBucket, request: &StreamRequest<'_>) -> (Client, Vec<String>) {
    let mut client = Client::open(Bucket::with(vbucket), LEGACY);
    assert_eq!(client.request(request), Status::SUCCESS);
    let messages = client.receive();
    (client, messages)
}

#[test]
fn ss_01_and_ss_02_checkpoint_is_a_snapshot_and_later_items_continue_it() {
    let vbucket = VBucket::new().checkpoint(1, docs(1..=3)).checkpoint(4, docs(4..=6));
    let (mut client, messages) = stream(vbucket, &from_scratch());
    assert_eq!(
        messages,
        [
            "MARK [0-3] 0x5",
            "MUT 1",
            "MUT 2",
            "MUT 3", //
            "MARK [4-6] 0x5",
            "MUT 4",
            "MUT 5",
            "MUT 6",
        ]
    );
    client.write(docs(7..=8));
    assert_eq!(client.receive(), ["MARK [7-8] 0x1", "MUT 7", "MUT 8"]);
    assert!(client.receive().is_empty());
}

#[test]
fn ss_03_and_ss_04_disk_snapshot_and_first_from_memory_begin_checkpoints() {
    let (mut client, messages) = stream(VBucket::new().on_disk(docs(1..=5)), &from_scratch());
    assert_eq!(messages, ["MARK [0-5] 0x6", "MUT 1", "MUT 2", "MUT 3", "MUT 4", "MUT 5"]);
    client.write(docs(6..=6));
    assert_eq!(client.receive(), ["MARK [6-6] 0x5", "MUT 6"]);
    client.write(docs(7..=7));
    assert_eq!(client.receive(), ["MARK [7-7] 0x1", "MUT 7"]);
}

#[test]
fn ss_05_a_resume_inside_a_snapshot_repeats_the_snapshots_start() {
    let vbucket = VBucket::new().checkpoint(1, docs(1..=6));
    let (_, messages) = stream(vbucket, &resume(4, (1, 6)));
    assert_eq!(messages, ["MARK [1-6] 0x5", "MUT 5", "MUT 6"]);
    let from_disk = VBucket::new().on_disk(docs(1..=6));
    let (_, messages) = stream(from_disk, &resume(4, (1, 6)));
    assert_eq!(messages, ["MARK [1-6] 0x6", "MUT 5", "MUT 6"]);
}

#[test]
fn ss_06_first_marker_starts_at_the_client_whatever_was_deduplicated() {
    let mut vbucket = VBucket::new().checkpoint(1, docs([1, 2, 3, 4, 7]));
    vbucket.memory_from = 1;
    let (_, messages) = stream(vbucket, &resume(4, (4, 4)));
    assert_eq!(messages, ["MARK [4-7] 0x5", "MUT 7"]);
}

#[test]
fn ss_07_and_ss_08_first_disk_snapshot_alone_starts_at_the_client() {
    let vbucket = VBucket::new().on_disk(docs(1..=9));
    let (mut client, messages) = stream(vbucket, &resume(4, (4, 4)));
    assert_eq!(messages[0], "MARK [4-9] 0x6");
    assert_eq!(messages.len(), 6);
    // Memory let go of what came since: back to the disk.
    let vb = client.bucket.vb();
    *vb = core::mem::replace(vb, VBucket::new()).on_disk(docs(10..=20));
    vb.memory_from = 21;
    client.connection.notify(dcp_wire::Vbid(0));
    let messages = client.receive();
    assert_eq!((messages[0].as_str(), messages.len()), ("MARK [10-20] 0x6", 12));
}

#[test]
fn snapshot_from_memory_after_a_second_from_disk_begins_a_checkpoint() {
    let (mut client, _) = stream(VBucket::new().checkpoint(1, docs(1..=2)), &from_scratch());
    let vb = client.bucket.vb();
    *vb = core::mem::replace(vb, VBucket::new()).on_disk(docs(3..=4));
    vb.memory_from = 5;
    client.connection.notify(dcp_wire::Vbid(0));
    assert_eq!(client.receive(), ["MARK [3-4] 0x6", "MUT 3", "MUT 4"]);
    client.write(docs(5..=5));
    assert_eq!(client.receive(), ["MARK [5-5] 0x5", "MUT 5"]);
}

#[test]
fn ss_09_checkpoint_begun_before_the_clients_snapshot_keeps_its_start() {
    let mut vbucket = VBucket::new().checkpoint(1001, docs(1013..=1014));
    vbucket.memory_from = 1001;
    let (_, messages) = stream(vbucket, &resume(1010, (1008, 1012)));
    assert_eq!(messages, ["MARK [1008-1014] 0x5", "MUT 1013", "MUT 1014"]);
}

#[test]
fn ss_10_a_checkpoint_whose_beginning_left_memory_starts_at_the_request() {
    let vbucket = VBucket::new().checkpoint(1, docs(4..=5));
    let (_, messages) = stream(vbucket, &resume(3, (3, 3)));
    assert_eq!(messages, ["MARK [3-5] 0x5", "MUT 4", "MUT 5"]);
}

#[test]
fn ss_11_a_marker_never_starts_before_the_end_of_the_last_one() {
    let vbucket = VBucket::new().on_disk(docs(1..=5)).checkpoint(3, docs(6..=7));
    let (_, messages) = stream(vbucket, &from_scratch());
    assert_eq!(messages[6..], ["MARK [6-7] 0x5", "MUT 6", "MUT 7"]);
}

#[test]
fn checkpoint_starts_at_its_own_start_even_if_its_first_items_are_gone() {
    let mut vbucket = VBucket::new().checkpoint(1, docs(1..=3)).checkpoint(4, docs(6..=7));
    vbucket.memory_from = 1;
    let (_, messages) = stream(vbucket, &from_scratch());
    assert_eq!(messages[4..], ["MARK [4-7] 0x5", "MUT 6", "MUT 7"]);
}

#[test]
fn ss_12_and_se_04_an_end_inside_a_checkpoint_waits_for_the_whole_of_it() {
    let vbucket = VBucket::new()
        .checkpoint(1, docs(1..=94))
        .checkpoint(95, docs(95..=110))
        .checkpoint(111, docs(111..=120));
    let request = StreamRequest { end_seqno: Seqno(100), ..from_scratch() };
    let (mut client, messages) = stream(vbucket, &request);
    assert_eq!(messages.len(), 2 + 110 + 1);
    assert_eq!(messages[messages.len() - 2..], ["MUT 110", "END 0"]);
    assert_eq!(client.connection.stream_count(), 0);
    assert!(client.receive().is_empty());
}

#[test]
fn ss_13_an_end_at_the_high_seqno_is_reached() {
    let vbucket = VBucket::new().checkpoint(1, docs(1..=300));
    let request = StreamRequest { end_seqno: Seqno(300), ..resume(200, (200, 200)) };
    let (_, messages) = stream(vbucket, &request);
    assert_eq!(messages.len(), 1 + 100 + 1);
    assert_eq!(messages[0], "MARK [200-300] 0x5");
    assert_eq!(messages[101], "END 0");
}

#[test]
fn ss_14_a_disk_only_stream_ends_with_the_disk() {
    let vbucket = VBucket::new().on_disk(docs(1..=300)).checkpoint(1, docs(1..=310));
    let request = StreamRequest { flags: StreamRequestFlags::DISK_ONLY, ..from_scratch() };
    let (_, messages) = stream(vbucket, &request);
    assert_eq!(messages.len(), 1 + 300 + 1);
    assert_eq!((messages[0].as_str(), messages[301].as_str()), ("MARK [0-300] 0x6", "END 0"));
}

#[test]
fn sr_60_a_stream_to_the_latest_ends_there_whatever_end_was_asked_for() {
    let vbucket = VBucket::new().checkpoint(1, docs(1..=300));
    let request = StreamRequest {
        flags: StreamRequestFlags::TO_LATEST,
        end_seqno: Seqno(205),
        ..resume(200, (200, 200))
    };
    let (_, messages) = stream(vbucket, &request);
    assert_eq!(messages.len(), 1 + 100 + 1);
    assert_eq!(messages[101], "END 0");
}

#[test]
fn stream_from_the_latest_begins_with_the_next_change() {
    let vbucket = VBucket::new().checkpoint(1, docs(1..=3));
    let request = StreamRequest {
        flags: StreamRequestFlags::FROM_LATEST,
        vbuuid: dcp_wire::Vbuuid(0),
        ..from_scratch()
    };
    let (mut client, messages) = stream(vbucket, &request);
    assert!(messages.is_empty());
    client.write(docs(4..=4));
    assert_eq!(client.receive(), ["MARK [3-4] 0x5", "MUT 4"]);
}

#[test]
fn ss_15_to_ss_18_purge_seqno_is_in_disk_markers_on_demand() {
    for (controls, disk_marker) in [
        (&[("enable_noop", "true")][..], "MARK [0-5] 0x6"),
        (
            &[("enable_noop", "true"), ("max_marker_version", "2.2")][..],
            "MARK [0-5] 0x6 visible 0 completed 0 purge 3 prepared 0",
        ),
    ] {
        let mut vbucket = VBucket::new().on_disk(docs(4..=5));
        vbucket.purge = 3;
        let mut client =
            Client::open_with(Bucket::with(vbucket), COLLECTIONS, OpenFlags::PRODUCER, controls);
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        assert_eq!(client.receive()[0], disk_marker);
        client.write(docs(6..=6));
        assert_eq!(client.receive()[0], "MARK [6-6] 0x5", "memory markers stay version 1");
    }
}

#[test]
fn ss_19_to_ss_22_replicas_get_the_fields_of_durable_writes() {
    let controls =
        [("enable_noop", "true"), ("consumer_name", "n"), ("enable_sync_writes", "true")];
    for (extra, disk_marker) in [
        (None, "MARK [0-5] 0x6 visible 5 completed 0"),
        (
            Some(("max_marker_version", "2.2")),
            "MARK [0-5] 0x6 visible 5 completed 0 purge 0 prepared 0",
        ),
    ] {
        let controls: Vec<_> = controls.into_iter().chain(extra).collect();
        let bucket = Bucket::with(VBucket::new().on_disk(docs(1..=5)));
        let mut client = Client::open_with(bucket, COLLECTIONS, OpenFlags::PRODUCER, &controls);
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        assert_eq!(client.receive()[0], disk_marker);
        client.write(docs(6..=6));
        assert_eq!(client.receive()[0], "MARK [6-6] 0x5 visible 6");
    }
}

#[test]
fn ct_29_a_client_that_only_sees_sync_writes_gets_plain_markers() {
    let controls = [("enable_noop", "true"), ("enable_sync_writes", "true")];
    let bucket = Bucket::with(VBucket::new().on_disk(docs(1..=5)));
    let mut client = Client::open_with(bucket, COLLECTIONS, OpenFlags::PRODUCER, &controls);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive()[0], "MARK [0-5] 0x6");
}

#[test]
fn stream_of_a_slow_client_may_go_back_to_the_disk_unless_it_says_no() {
    for (name, control, may_be_dropped) in [
        ("eq_dcpq:reader:n_1", None, true),
        ("eq_dcpq:reader:n_1", Some(("supports_cursor_dropping", "false")), false),
        ("eq_dcpq:replication:n_1->n_2", None, false),
        ("eq_dcpq:replication:n_1->n_2", Some(("supports_cursor_dropping_vulcan", "true")), true),
    ] {
        let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
        assert_eq!(client.send_open_as(name.as_bytes(), OpenFlags::PRODUCER), Status::SUCCESS);
        if let Some((key, value)) = control {
            assert_eq!(client.control(key, value), Status::SUCCESS);
        }
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        client.receive();
        let cursors = client.bucket.vb().cursors.take();
        let droppable: Vec<_> = cursors.iter().map(|cursor| cursor.is_droppable()).collect();
        assert_eq!(droppable, [may_be_dropped], "{name} {control:?}");
    }
}

#[test]
fn stream_that_is_idle_sends_nothing_until_its_vbucket_changes() {
    let (mut client, messages) = stream(VBucket::new(), &from_scratch());
    assert!(messages.is_empty());
    client.bucket.vb().write(dcp_test::bucket::doc(1, 0));
    assert!(client.receive().is_empty(), "nobody said that the vBucket changed");
    client.connection.notify(dcp_wire::Vbid(0));
    assert_eq!(client.receive(), ["MARK [0-1] 0x5", "MUT 1"]);
}

#[test]
fn snapshot_gap_between_memory_and_disk_is_waited_for() {
    // The item left memory but is not on disk yet.
    let mut vbucket = VBucket::at(4);
    vbucket.high = 5;
    vbucket.memory_from = 6;
    let (mut client, messages) = stream(vbucket, &resume(4, (4, 4)));
    assert!(messages.is_empty());
    let vb = client.bucket.vb();
    *vb = core::mem::replace(vb, VBucket::new()).on_disk(docs(5..=5));
    client.connection.notify(dcp_wire::Vbid(0));
    assert_eq!(client.receive(), ["MARK [4-5] 0x6", "MUT 5"]);
}
