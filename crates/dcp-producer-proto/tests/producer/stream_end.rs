//! How streams end, and what may be said about them afterwards.

use dcp_producer_proto::{Disconnect, VBucketState};
use dcp_wire::message::{OpenFlags, StreamEndReason, StreamRequest};
use dcp_wire::{Datatype, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use crate::client::{COLLECTIONS, Client, LEGACY, from_scratch, resume};
use dcp_test::bucket::{Bucket, VBucket, doc, docs};

fn streaming(controls: &[(&str, &str)]) -> Client {
    let bucket = Bucket::with(VBucket::new().checkpoint(1, docs(1..=2)));
    let mut client = Client::open_with(bucket, LEGACY, OpenFlags::PRODUCER, controls);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-2] 0x5", "MUT 1", "MUT 2"]);
    client
}

/// Three streams of vBucket 0 with stream ids.
fn with_stream_ids() -> Client {
    let controls = [
        ("enable_noop", "true"),
        ("enable_stream_id", "true"),
        ("send_stream_end_on_client_close_stream", "true"),
    ];
    let bucket = Bucket::with(VBucket::new());
    let mut client = Client::open_with(bucket, COLLECTIONS, OpenFlags::PRODUCER, &controls);
    for id in [99, 101, 555] {
        let value = format!(r#"{{"sid":{id}}}"#);
        let request = StreamRequest { value: value.as_bytes(), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    client
}

#[test]
fn se_02_and_rb_80_and_rb_82_stream_with_nothing_to_send_ends() {
    for request in [
        StreamRequest { end_seqno: Seqno(5), ..resume(5, (5, 5)) },
        StreamRequest { end_seqno: Seqno(0), ..from_scratch() },
    ] {
        let bucket = Bucket::with(VBucket::new().checkpoint(1, docs(1..=10)));
        let mut client = Client::open(bucket, LEGACY);
        assert_eq!(client.request(&request), Status::SUCCESS);
        assert_eq!(client.receive(), ["END 0"]);
    }
}

#[test]
fn se_06_and_sr_21_closed_stream_ends_silently_and_may_be_opened_again() {
    let mut client = streaming(&[]);
    assert_eq!(client.close(None), Status::SUCCESS);
    client.write(docs(3..=3));
    assert!(client.receive().is_empty());
    assert_eq!(client.close(None), Status::KEY_ENOENT);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS, "SR-21");
}

#[test]
fn stream_closed_before_its_turn_leaves_the_others_theirs() {
    let mut client = Client::open(Bucket::with(VBucket::new().checkpoint(1, docs(1..=1))), LEGACY);
    client.bucket.vbuckets.insert(1, VBucket::new().checkpoint(1, docs(1..=2)));
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.request(&StreamRequest { vbid: Vbid(1), ..from_scratch() }), Status::SUCCESS);
    assert_eq!(client.close(None), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-2] 0x5", "MUT 1", "MUT 2"]);
}

#[test]
fn se_07_a_closed_stream_ends_with_a_message_if_asked_to() {
    let mut client = streaming(&[("send_stream_end_on_client_close_stream", "true")]);
    assert_eq!(client.close(None), Status::SUCCESS);
    assert_eq!(client.close(None), Status::KEY_ENOENT, "it is dead before its end is sent");
    assert_eq!(client.receive(), ["END 1"]);
}

#[test]
fn se_08_a_stream_is_closed_by_its_id() {
    let mut client = with_stream_ids();
    assert_eq!(client.close(None), Status::DCP_STREAMID_INVALID);
    assert_eq!(client.close(Some(7)), Status::DCP_STREAMID_INVALID);
    assert_eq!(client.close(Some(99)), Status::SUCCESS);
    assert_eq!(client.receive(), ["END 1 sid 99"]);
    client.write([doc(1, 0)]);
    assert_eq!(client.receive().len(), 4, "the others go on");
}

#[test]
fn se_10_and_se_11_closing_what_is_not_there_is_refused() {
    let mut client = streaming(&[]);
    assert_eq!(client.close(Some(99)), Status::DCP_STREAMID_INVALID, "SE-10");
    assert_eq!(client.close(None), Status::SUCCESS);
    assert_eq!(client.close(None), Status::KEY_ENOENT, "SE-11");
    assert_eq!(client.close(Some(99)), Status::KEY_ENOENT);
}

#[test]
fn se_32_a_stream_end_of_the_wrong_length_is_refused() {
    let mut client = streaming(&[]);
    for len in [0, 3, 5] {
        let mut packet = Vec::new();
        let extras = vec![0; len];
        Frame::request(Opcode::DCP_STREAM_END).with_extras(&extras).encode(&mut packet).unwrap();
        assert_eq!(client.status(&packet), Status::EINVAL);
    }
}

#[test]
fn se_13_a_malformed_close_is_refused() {
    let mut client = streaming(&[]);
    for frame in [
        Frame::request(Opcode::DCP_CLOSE_STREAM).with_extras(&[0; 4]),
        Frame::request(Opcode::DCP_CLOSE_STREAM).with_value(b"x"),
    ] {
        let mut packet = Vec::new();
        frame.encode(&mut packet).unwrap();
        assert_eq!(client.status(&packet), Status::EINVAL);
    }
}

#[test]
fn se_14_and_fc_24_a_change_of_state_ends_every_stream_of_the_vbucket() {
    let mut client = with_stream_ids();
    assert!(client.receive().is_empty());
    assert_eq!(client.control("connection_buffer_size", "1000"), Status::SUCCESS);
    client.bucket.vb().state = VBucketState::Replica;
    client.connection.notify(Vbid(0));
    let newest_first = ["END 2 sid 555", "END 2 sid 101", "END 2 sid 99"];
    assert_eq!(client.receive(), newest_first);
    assert_eq!(client.connection.unacked_bytes(), 3 * 31);
}

#[test]
fn se_15_the_removal_of_the_vbucket_ends_its_stream() {
    let mut client = streaming(&[]);
    client.bucket.vbuckets.clear();
    client.connection.notify(Vbid(0));
    assert_eq!(client.receive(), ["END 2"]);
}

#[test]
fn vbucket_that_moved_away_and_back_unseen_ends_its_stream() {
    let mut client = streaming(&[]);
    // The same state and the same history as before: only the life of the copy is another one.
    client.bucket.vb().incarnation += 1;
    client.write(docs(3..=3));
    assert_eq!(client.receive(), ["END 2"]);
    assert_eq!(client.request(&resume(2, (2, 2))), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [2-3] 0x5", "MUT 3"]);
}

#[test]
fn stream_of_an_earlier_life_of_the_vbucket_stands_in_nobodys_way() {
    let mut client = streaming(&[]);
    client.bucket.vb().incarnation += 1;
    assert_eq!(client.request(&resume(2, (2, 2))), Status::SUCCESS, "before the end is sent");
    client.write(docs(3..=3));
    assert_eq!(client.receive(), ["END 2", "MARK [2-3] 0x5", "MUT 3"]);
    client.bucket.vb().incarnation += 1;
    assert_eq!(client.close(None), Status::KEY_ENOENT, "it is dead already");
    assert_eq!(client.receive(), ["END 2"]);
}

#[test]
fn se_17_a_rollback_of_the_vbucket_ends_its_stream_in_mid_snapshot() {
    let mut client = streaming(&[("connection_buffer_size", "200")]);
    client.ack(1000);
    client.write(docs(3..=9));
    let before = client.receive();
    assert!(before.len() < 8 && !before.is_empty(), "{before:?}");
    client.bucket.vb().table.create_entry(Vbuuid(0xdef), Seqno(1));
    client.connection.notify(Vbid(0));
    client.ack(1000);
    assert_eq!(client.receive(), ["END 2"], "nothing of the lost branch follows");
}

#[test]
fn se_16_a_purge_between_request_and_backfill_ends_the_stream() {
    let mut client = Client::open(Bucket::with(VBucket::new().on_disk(docs(1..=9))), LEGACY);
    assert_eq!(client.request(&resume(3, (3, 3))), Status::SUCCESS);
    client.bucket.vb().purge = 5;
    assert_eq!(client.receive(), ["END 2"]);
    // Going on from the beginning nothing can be missed.
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive().len(), 10);
}

#[test]
fn se_18_a_disk_that_cannot_be_read_ends_the_stream() {
    let mut vbucket = VBucket::new().on_disk(docs(1..=9));
    vbucket.fail_disk_after = Some(2);
    let mut client = Client::open(Bucket::with(vbucket), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-9] 0x6", "MUT 1", "MUT 2", "END 5"]);
}

#[test]
fn se_28_reasons_a_legacy_client_does_not_know_are_told_as_finished() {
    for (features, end) in [(LEGACY, "END 0"), (COLLECTIONS, "END 8")] {
        let mut client = Client::open(Bucket::with(VBucket::new()), features);
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        client.connection.end_streams(Vbid(0), StreamEndReason::LOST_PRIVILEGES);
        assert_eq!(client.receive(), [end]);
    }
}

#[test]
fn se_34_to_se_39_responses_are_tolerated_or_end_the_connection() {
    use Opcode as O;
    use Status as S;
    let crossed = [S::NOT_MY_VBUCKET, S::DCP_STREAM_NOT_FOUND, S::OPAQUE_NO_MATCH];
    let v7 = [("v7_dcp_status_codes", "true")];
    let items = [O::DCP_MUTATION, O::DCP_DELETION, O::DCP_EXPIRATION, O::DCP_SYSTEM_EVENT];
    let ends = [O::DCP_STREAM_END];
    let commits = [O::DCP_COMMIT, O::DCP_ABORT];
    let unanswered = [O::DCP_SEQNO_ADVANCED, O::DCP_OSO_SNAPSHOT, O::DCP_SEQNO_ACK, O::GET];
    let wrong = [
        S::E2BIG,
        S::EINVAL,
        S::ENOMEM,
        S::ERANGE,
        S::ETMPFAIL,
        S::LOCKED,
        S::SYNC_WRITE_AMBIGUOUS,
        S::UNKNOWN_COLLECTION,
    ];
    type Row<'a> = (&'a str, &'a [O], &'a [S], &'a [(&'a str, &'a str)], bool);
    let table: &[Row<'_>] = &[
        ("SE-35", &items, &crossed, &[], true),
        ("SE-35 with v7", &items, &crossed, &v7, true),
        ("SE-35 old", &items, &[S::SUCCESS, S::KEY_EEXISTS, S::KEY_ENOENT], &[], true),
        ("SE-36", &commits, &[S::KEY_ENOENT], &[], false),
        ("SE-36 others", &commits, &[S::SUCCESS, S::KEY_EEXISTS], &[], true),
        ("SE-37", &items, &[S::KEY_EEXISTS, S::KEY_ENOENT], &v7, false),
        ("SE-38", &items, &wrong, &[], false),
        ("SE-34", &ends, &wrong, &[], false),
        ("SE-34 tolerated", &ends, &[S::SUCCESS, S::KEY_ENOENT], &v7, true),
        ("SE-39", &unanswered, &[S::SUCCESS], &[], false),
        ("marker", &[O::DCP_SNAPSHOT_MARKER, O::DCP_SET_VBUCKET_STATE], &wrong, &[], true),
    ];
    for (row, opcodes, statuses, controls, tolerated) in table {
        for (&opcode, &status) in opcodes.iter().flat_map(|o| statuses.iter().map(move |s| (o, s)))
        {
            let outcome = streaming(controls).respond(opcode, status, Opaque(1));
            let wanted = if *tolerated {
                Ok(())
            } else {
                Err(Disconnect::UnexpectedResponse { opcode, status })
            };
            assert_eq!(outcome, wanted, "{row}: {opcode} {status}");
        }
    }
}

#[test]
fn sr_65_and_sm_34_what_belongs_to_the_other_role_ends_the_connection() {
    let request = |frame: Frame<'_>| {
        let mut packet = Vec::new();
        frame.encode(&mut packet).unwrap();
        packet
    };
    let bucket = || Bucket::with(VBucket::new());
    let mut consumer = Client::open_with(bucket(), LEGACY, OpenFlags::empty(), &[]);
    let stream_request = request(Frame::request(Opcode::DCP_STREAM_REQ).with_extras(&[0; 48]));
    assert_eq!(
        consumer.exchange(&stream_request),
        Err(Disconnect::UnexpectedRequest(Opcode::DCP_STREAM_REQ))
    );
    for (opcode, extras_len) in [(Opcode::DCP_SNAPSHOT_MARKER, 20), (Opcode::DCP_ADD_STREAM, 4)] {
        let mut producer = Client::open(bucket(), LEGACY);
        let extras = vec![0; extras_len];
        let packet = request(Frame::request(opcode).with_extras(&extras));
        assert_eq!(producer.exchange(&packet), Err(Disconnect::UnexpectedRequest(opcode)));
    }
}

#[test]
fn message_of_a_producer_that_is_malformed_is_refused() {
    for opcode in [
        Opcode::DCP_MUTATION,
        Opcode::DCP_DELETION,
        Opcode::DCP_EXPIRATION,
        Opcode::DCP_SNAPSHOT_MARKER,
        Opcode::DCP_STREAM_END,
        Opcode::DCP_SYSTEM_EVENT,
        Opcode::DCP_SEQNO_ADVANCED,
        Opcode::DCP_OSO_SNAPSHOT,
    ] {
        let mut packet = Vec::new();
        Frame::request(opcode).with_extras(&[0]).encode(&mut packet).unwrap();
        let mut client = Client::open(Bucket::with(VBucket::new()), LEGACY);
        assert_eq!(client.status(&packet), Status::EINVAL, "{opcode}");
    }
}

#[test]
fn se_40_a_closed_connection_has_no_name_and_no_streams() {
    let mut client = streaming(&[]);
    assert_eq!(client.connection.name(), Some(&b"test"[..]));
    client.connection.handle_closed();
    assert_eq!((client.connection.name(), client.connection.stream_count()), (None, 0));
    assert!(client.receive().is_empty());
}

#[test]
fn connection_takes_only_so_many_streams() {
    let config = dcp_producer_proto::ConnectionConfig { max_streams: 1, ..Default::default() };
    let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
    client.connection = dcp_producer_proto::Connection::new(config);
    client.bucket.vbuckets.insert(1, VBucket::new());
    assert_eq!(client.send_open(OpenFlags::PRODUCER), Status::SUCCESS);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let second = StreamRequest { vbid: Vbid(1), ..from_scratch() };
    assert_eq!(client.request(&second), Status::ENOMEM);
    assert_eq!(client.close(None), Status::SUCCESS);
    assert_eq!(client.request(&second), Status::SUCCESS);
}

#[test]
fn tombstone_with_a_json_body_is_refused_before_the_connection_ends() {
    let (json, xattr) = (Datatype::JSON, Datatype::XATTR);
    for (datatype, is_refused) in [
        (Datatype::RAW, false),
        (json, true),
        (json.with(Datatype::SNAPPY), true),
        (xattr, false),
        (xattr.with(json), false),
        (Datatype::SNAPPY, false),
    ] {
        for (opcode, extras) in [(Opcode::DCP_DELETION, 18), (Opcode::DCP_EXPIRATION, 20)] {
            let mut extras = vec![0; extras];
            extras[7] = 1;
            let tombstone = Frame::request(opcode).with_extras(&extras).with_key(b"key");
            let mut packet = Vec::new();
            tombstone.with_datatype(datatype).encode(&mut packet).unwrap();
            let answer = streaming(&[]).exchange(&packet);
            let answer = answer.map(|answer| answer.map(|answer| answer.status));
            let unexpected = Err(Disconnect::UnexpectedRequest(opcode));
            let wanted = if is_refused { Ok(Some(Status::EINVAL)) } else { unexpected };
            assert_eq!(answer, wanted, "{opcode} {datatype}");
        }
    }
}
