//! The fields of messages that neither the golden packets nor the recordings have, by their
//! descriptions.

use dcp_wire::describe::{Keys, describe};
use dcp_wire::message::{Message, SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::{
    Cas, CollectionId, Datatype, DecodeError, Frame, ManifestUid, Opaque, Opcode, ScopeId, Seqno,
    Status, Vbid, Vbuuid, snappy,
};

use crate::frame;

/// Bytes that count from 1, so that a field in the wrong place is noticed.
const COUNTING: [u8; 56] = {
    let mut bytes = [0; 56];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = at as u8 + 1;
        at += 1;
    }
    bytes
};

/// Describes a packet, whose keys begin with a collection id, after it was encoded again from its
/// message.
fn described(frame: Frame<'_>) -> String {
    let mut packet = Vec::new();
    frame.with_opaque(Opaque(7)).with_cas(Cas(5)).encode(&mut packet).unwrap();
    let frame = crate::frame(&packet);
    let mut again = Vec::new();
    let message = Message::decode(&frame).unwrap();
    message.encode(frame.envelope(), &mut again).unwrap();
    assert_eq!(again, packet, "{message:?}");
    let description = describe(&frame, Keys::WithCollection).to_string();
    // Behind the header, which all packets have.
    let (_, fields) = description.split_once(" length=").unwrap();
    fields.split_once(' ').map_or(String::new(), |(_, fields)| fields.to_owned())
}

fn request(opcode: Opcode, extras: usize, key: &[u8], value: &[u8]) -> String {
    let request = Frame::request(opcode).with_extras(&COUNTING[..extras]);
    described(request.with_key(key).with_value(value))
}

fn response(opcode: Opcode, extras: &[u8], key: &[u8], value: &[u8]) -> String {
    let response = Frame::response(opcode, Status::SUCCESS).with_extras(extras);
    described(response.with_key(key).with_value(value))
}

#[test]
fn document_requests_have_all_their_fields() {
    let key = b"\x09k";
    for opcode in [Opcode::GET, Opcode::DELETE] {
        assert_eq!(request(opcode, 0, key, b""), "collection_id=0x9 key=k");
    }
    for opcode in [Opcode::SET, Opcode::ADD, Opcode::REPLACE] {
        assert_eq!(
            request(opcode, 8, key, b"{}"),
            r#"flags=0x1020304 expiry=84281096 collection_id=0x9 key=k value="{}""#
        );
    }
    for opcode in [Opcode::INCREMENT, Opcode::DECREMENT] {
        assert_eq!(
            request(opcode, 20, key, b""),
            "delta=72623859790382856 initial=651345242494996240 expiry=286397204 collection_id=0x9 key=k"
        );
    }
    for opcode in [Opcode::TOUCH, Opcode::GET_AND_TOUCH] {
        assert_eq!(request(opcode, 4, key, b""), "expiry=16909060 collection_id=0x9 key=k");
    }
    assert_eq!(request(Opcode::GET_META, 0, key, b""), "collection_id=0x9 key=k");
    assert_eq!(request(Opcode::GET_META, 1, key, b""), "version=1 collection_id=0x9 key=k");
}

#[test]
fn writes_with_metadata_have_all_their_fields() {
    for opcode in [Opcode::SET_WITH_META, Opcode::ADD_WITH_META, Opcode::DELETE_WITH_META] {
        let with = |extras: &[u8], value: &[u8]| {
            let request = Frame::request(opcode).with_extras(extras);
            described(request.with_key(b"\x09k").with_value(value))
        };
        let fixed = &COUNTING[..24];
        assert_eq!(
            with(fixed, b"{}"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 collection_id=0x9 key=k value="{}""#
        );
        assert_eq!(
            with(&[fixed, &[0, 0]].concat(), b"{}"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 collection_id=0x9 key=k value="{}""#
        );
        assert_eq!(
            with(&[fixed, &[0, 3]].concat(), b"{}\x01\x02\x03"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 collection_id=0x9 key=k value="{}" extended_metadata=0x010203"#
        );
        // Nothing but metadata.
        assert_eq!(
            with(&[fixed, &[0, 3]].concat(), b"\x01\x02\x03"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 collection_id=0x9 key=k value="" extended_metadata=0x010203"#
        );
        assert_eq!(
            with(&[fixed, &[0, 0, 0, 0x1f]].concat(), b"{}"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 flags=0x1f flag_names=[force, force_accept, regenerate_cas, skip_conflict_resolution, is_expiration] collection_id=0x9 key=k value="{}""#
        );
        let both = [fixed, &[0, 0, 0, 0x11], &[0, 1]].concat();
        assert_eq!(
            with(&both, b"{}\xff"),
            r#"item_flags=0x1020304 expiry=84281096 rev_seqno=651345242494996240 new_cas=0x1112131415161718 flags=0x11 flag_names=[force, is_expiration] collection_id=0x9 key=k value="{}" extended_metadata=0xff"#
        );
        // More metadata than there is.
        let mut packet = Vec::new();
        let extras = [fixed, &[0, 4]].concat();
        let request = Frame::request(opcode).with_extras(&extras).with_key(b"\x09k");
        request.with_value(b"123").encode(&mut packet).unwrap();
        let refused = DecodeError::InvalidField("extended metadata length");
        assert_eq!(Message::decode(&frame(&packet)).unwrap_err(), refused);
    }
}

#[test]
fn subdoc_paths_have_all_their_fields() {
    let lookups = b"\xc5\x04\0\x03a.b\xc6\0\0\0";
    for extras in 0..2 {
        assert_eq!(
            request(Opcode::SUBDOC_MULTI_LOOKUP, extras, b"\x09k", lookups),
            r#"collection_id=0x9 key=k paths=[{opcode=SUBDOC_GET flags=0x4 path=a.b}, {opcode=SUBDOC_EXISTS flags=0x0 path=""}]"#
        );
    }
    let changes = b"\xc8\x04\0\x03\0\0\0\x02a.b{}\xc9\0\0\x01\0\0\0\0c";
    let mutation = |extras| request(Opcode::SUBDOC_MULTI_MUTATION, extras, b"\x09k", changes);
    assert_eq!(
        mutation(0),
        r#"collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
    assert_eq!(
        mutation(1),
        r#"collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
    assert_eq!(
        mutation(4),
        r#"expiry=16909060 collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
    assert_eq!(
        mutation(5),
        r#"expiry=16909060 collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
    assert_eq!(
        mutation(8),
        r#"expiry=16909060 flags=84281096 collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
    assert_eq!(
        mutation(9),
        r#"expiry=16909060 flags=84281096 collection_id=0x9 key=k paths=[{opcode=SUBDOC_DICT_UPSERT flags=0x4 path=a.b value="{}"}, {opcode=SUBDOC_DELETE flags=0x0 path=c}]"#
    );
}

#[test]
fn set_up_and_management_requests_have_all_their_fields() {
    assert_eq!(request(Opcode::STAT, 0, b"vbucket-details", b""), "group=vbucket-details");
    assert_eq!(
        request(Opcode::SASL_STEP, 0, b"SCRAM-SHA512", b"c=biws"),
        r#"mechanism=SCRAM-SHA512 message="c=biws""#
    );
    assert_eq!(request(Opcode::GET_ALL_VB_SEQNOS, 0, b"", b""), "");
    for (state, name) in [(0, "alive"), (1, "active"), (2, "replica"), (3, "pending"), (4, "dead")]
    {
        let extras = [0, 0, 0, state, 0, 0, 0, 9];
        let with = |len: usize| {
            described(Frame::request(Opcode::GET_ALL_VB_SEQNOS).with_extras(&extras[..len]))
        };
        assert_eq!(with(4), format!("state={name}"));
        assert_eq!(with(8), format!("state={name} collection_id=0x9"));
    }
    assert_eq!(
        request(Opcode::GET_CLUSTER_CONFIG, 16, b"", b""),
        "epoch=72623859790382856 rev=651345242494996240"
    );
    assert_eq!(request(Opcode::SET_CLUSTER_CONFIG, 0, b"b", b"{}"), r#"bucket=b config="{}""#);
    assert_eq!(
        request(Opcode::SET_CLUSTER_CONFIG, 16, b"b", b"{}"),
        r#"epoch=72623859790382856 rev=651345242494996240 bucket=b config="{}""#
    );
    assert_eq!(request(Opcode::GET_COLLECTION_ID, 0, b"", b"s.c"), "path=s.c");
    assert_eq!(request(Opcode::GET_SCOPE_ID, 0, b"", b"s"), "path=s");
    assert_eq!(request(Opcode::SEQNO_PERSISTENCE, 8, b"", b""), "seqno=72623859790382856");
    for opcode in [
        Opcode::QUIT,
        Opcode::NOOP,
        Opcode::VERSION,
        Opcode::GET_FAILOVER_LOG,
        Opcode::GET_COLLECTIONS_MANIFEST,
        Opcode::DCP_CACHE_TRANSFER_END,
    ] {
        assert_eq!(request(opcode, 0, b"", b""), "", "{opcode}");
    }
}

#[test]
fn dcp_requests_have_all_their_fields() {
    assert_eq!(
        request(Opcode::DCP_OPEN, 8, b"name", b"{}"),
        r#"flags=0x5060708 flag_names=[no_value, include_deleted_user_xattrs, skip_deletes_in_initial_backfill] name=name value="{}""#
    );
    assert_eq!(
        request(Opcode::DCP_STREAM_REQ, 48, b"", b"{}"),
        r#"flags=0x1020304 flag_names=[to_latest, cache_transfer] start_seqno=651345242494996240 end_seqno=1230066625199609624 vbuuid=0x191a1b1c1d1e1f20 snapshot_start=2387509390608836392 snapshot_end=2966230773313449776 value="{}""#
    );
    assert_eq!(
        request(Opcode::DCP_ADD_STREAM, 4, b"", b""),
        "flags=0x1020304 flag_names=[to_latest, cache_transfer]"
    );
    assert_eq!(request(Opcode::DCP_BUFFER_ACK, 4, b"", b""), "bytes=16909060");
    assert_eq!(request(Opcode::DCP_SEQNO_ACK, 8, b"", b""), "prepared_seqno=72623859790382856");
    // No extended metadata, and a byte that is not used.
    for (len, unused, fields) in [
        (18, 16..18, "seqno=72623859790382856 rev_seqno=651345242494996240"),
        (21, 20..21, "seqno=72623859790382856 rev_seqno=651345242494996240 delete_time=286397204"),
    ] {
        let mut extras = COUNTING;
        extras[unused].fill(0);
        let deletion = Frame::request(Opcode::DCP_DELETION).with_extras(&extras[..len]);
        let deletion = deletion.with_key(b"\x09k").with_value(b"{}");
        let fields = format!("{fields} collection_id=0x9 key=k value=\"{{}}\"");
        assert_eq!(described(deletion), fields);
    }
    assert_eq!(
        request(Opcode::DCP_EXPIRATION, 20, b"\x09k", b"{}"),
        r#"seqno=72623859790382856 rev_seqno=651345242494996240 delete_time=286397204 collection_id=0x9 key=k value="{}""#
    );
    assert_eq!(
        request(Opcode::DCP_COMMIT, 16, b"\x09k", b""),
        "prepared_seqno=72623859790382856 commit_seqno=651345242494996240 collection_id=0x9 key=k"
    );
    assert_eq!(
        request(Opcode::DCP_ABORT, 16, b"\x09k", b""),
        "prepared_seqno=72623859790382856 abort_seqno=651345242494996240 collection_id=0x9 key=k"
    );
    let mut extras = COUNTING;
    // No extended metadata.
    extras[28..30].fill(0);
    let mutation = Frame::request(Opcode::DCP_MUTATION).with_extras(&extras[..31]);
    assert_eq!(
        described(mutation.with_key(b"\x09k").with_value(b"{}")),
        r#"seqno=72623859790382856 rev_seqno=651345242494996240 flags=0x11121314 expiry=353769240 lock_time=421141276 nru=31 collection_id=0x9 key=k value="{}""#
    );
    let mut extras = COUNTING;
    extras[29..31].copy_from_slice(&[1, 2]);
    let prepare = Frame::request(Opcode::DCP_PREPARE).with_extras(&extras[..31]);
    assert_eq!(
        described(prepare.with_key(b"\x09k").with_value(b"{}")),
        r#"seqno=72623859790382856 rev_seqno=651345242494996240 flags=0x11121314 expiry=353769240 lock_time=421141276 nru=29 deleted=true level=majorityAndPersistOnActive collection_id=0x9 key=k value="{}""#
    );
    for (state, name) in [(1, "active"), (2, "replica"), (3, "pending"), (4, "dead")] {
        let extras = [state];
        let changed = Frame::request(Opcode::DCP_SET_VBUCKET_STATE).with_extras(&extras);
        assert_eq!(described(changed), format!("state={name}"));
    }
}

#[test]
fn cluster_maps_that_are_pushed_have_all_their_fields() {
    let pushed = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE);
    let pushed = pushed.with_key(b"b").with_value(b"{}");
    assert_eq!(
        described(pushed.with_extras(&COUNTING[..4])),
        r#"rev=16909060 bucket=b config="{}""#
    );
    assert_eq!(
        described(pushed.with_extras(&COUNTING[..16])),
        r#"epoch=72623859790382856 rev=651345242494996240 bucket=b config="{}""#
    );
}

#[test]
fn responses_have_all_their_fields() {
    let token = &COUNTING[..16];
    let key = b"\x09k";
    for opcode in [
        Opcode::SET,
        Opcode::ADD,
        Opcode::REPLACE,
        Opcode::DELETE,
        Opcode::SET_WITH_META,
        Opcode::ADD_WITH_META,
        Opcode::DELETE_WITH_META,
    ] {
        assert_eq!(response(opcode, b"", b"", b""), "");
        assert_eq!(
            response(opcode, token, b"", b""),
            "vbuuid=0x102030405060708 seqno=651345242494996240"
        );
    }
    for opcode in [Opcode::INCREMENT, Opcode::DECREMENT] {
        assert_eq!(response(opcode, b"", b"", &[0, 0, 0, 0, 0, 0, 1, 0]), "count=256");
        assert_eq!(
            response(opcode, token, b"", &[0, 0, 0, 0, 0, 0, 1, 0]),
            "vbuuid=0x102030405060708 seqno=651345242494996240 count=256"
        );
    }
    for opcode in [Opcode::GET, Opcode::GET_AND_TOUCH] {
        assert_eq!(response(opcode, &COUNTING[..4], b"", b"{}"), r#"flags=0x1020304 value="{}""#);
        assert_eq!(
            response(opcode, &COUNTING[..4], key, b"{}"),
            r#"flags=0x1020304 collection_id=0x9 key=k value="{}""#
        );
    }
    let metadata = |deleted, len: usize| {
        let mut extras = COUNTING;
        extras[..4].copy_from_slice(&[0, 0, 0, deleted]);
        response(Opcode::GET_META, &extras[..len], b"", b"")
    };
    assert_eq!(
        metadata(0, 20),
        "deleted=false flags=0x5060708 expiry=151653132 rev_seqno=940705933847302932"
    );
    assert_eq!(
        metadata(1, 21),
        "deleted=true flags=0x5060708 expiry=151653132 rev_seqno=940705933847302932 document_datatype=json,xattr,0x10"
    );
    assert_eq!(
        response(Opcode::GET_COLLECTION_ID, &COUNTING[..12], b"", b""),
        "manifest_uid=0x102030405060708 collection_id=0x90a0b0c"
    );
    assert_eq!(
        response(Opcode::GET_SCOPE_ID, &COUNTING[..12], b"", b""),
        "manifest_uid=0x102030405060708 scope_id=0x90a0b0c"
    );
    assert_eq!(response(Opcode::STAT, b"", b"name", b"text"), "key=name value=text");
    assert_eq!(
        response(Opcode::DCP_ADD_STREAM, &COUNTING[..4], b"", b""),
        "stream_opaque=0x1020304"
    );
    assert_eq!(response(Opcode::GET_COLLECTIONS_MANIFEST, b"", b"", b"{}"), r#"manifest="{}""#);
    assert_eq!(
        response(Opcode::GET_ALL_VB_SEQNOS, b"", b"", &COUNTING[..20]),
        "seqnos=[{vbucket=258 seqno=217304205466536202}, {vbucket=2828 seqno=940705933847302932}]"
    );
    assert_eq!(
        response(Opcode::GET_FAILOVER_LOG, b"", b"", &COUNTING[..32]),
        "failover_log=[{vbuuid=0x102030405060708 seqno=651345242494996240}, {vbuuid=0x1112131415161718 seqno=1808788007904223008}]"
    );
    let mut observed = COUNTING;
    observed[0] = 0;
    assert_eq!(
        response(Opcode::OBSERVE_SEQNO, b"", b"", &observed[..27]),
        "vbucket=515 vbuuid=0x405060708090a0b persisted_seqno=868365761009226259 current_seqno=1447087143713839643"
    );
    observed[0] = 1;
    assert_eq!(
        response(Opcode::OBSERVE_SEQNO, b"", b"", &observed[..43]),
        "vbucket=515 vbuuid=0x405060708090a0b persisted_seqno=868365761009226259 current_seqno=1447087143713839643 old_vbuuid=0x1c1d1e1f20212223 last_valid_seqno=2604529909123066411"
    );
    for opcode in [Opcode::DCP_OPEN, Opcode::DCP_CONTROL, Opcode::SEQNO_PERSISTENCE] {
        assert_eq!(response(opcode, b"", b"", b""), "");
    }
}

#[test]
fn subdoc_results_have_all_their_fields() {
    let lookup = b"\0\0\0\0\0\x01a\0\xc0\0\0\0\0\0\0\0\0\0\x02{}";
    let mutation = b"\x01\0\0\0\0\0\x01a\x03\0\xc0";
    let deleted = [
        Status::SUCCESS,
        Status::SUBDOC_SUCCESS_DELETED,
        Status::SUBDOC_MULTI_PATH_FAILURE,
        Status::SUBDOC_MULTI_PATH_FAILURE_DELETED,
    ];
    for status in deleted {
        let response = Frame::response(Opcode::SUBDOC_MULTI_LOOKUP, status).with_value(lookup);
        assert_eq!(
            described(response),
            r#"results=[{index=0 status=SUCCESS value=a}, {index=1 status=SUBDOC_PATH_ENOENT value=""}, {index=2 status=SUCCESS value="{}"}]"#
        );
        let response = Frame::response(Opcode::SUBDOC_MULTI_MUTATION, status).with_value(mutation);
        assert_eq!(
            described(response),
            r#"results=[{index=1 status=SUCCESS value=a}, {index=3 status=SUBDOC_PATH_ENOENT value=""}]"#
        );
        let response = response.with_extras(&COUNTING[..16]);
        assert_eq!(
            described(response),
            r#"vbuuid=0x102030405060708 seqno=651345242494996240 results=[{index=1 status=SUCCESS value=a}, {index=3 status=SUBDOC_PATH_ENOENT value=""}]"#
        );
    }
    // Any other status is an error, even if its value could be results.
    for opcode in [Opcode::SUBDOC_MULTI_LOOKUP, Opcode::SUBDOC_MULTI_MUTATION] {
        let response = Frame::response(opcode, Status::SUBDOC_PATH_ENOENT).with_value(b"{}");
        assert_eq!(described(response), "error=\"{}\"");
    }
}

#[test]
fn framing_extras_have_all_their_fields() {
    let with = |frame: Frame<'_>, framing: &[u8]| described(frame.with_framing_extras(framing));
    let request = Frame::request(Opcode::NOOP);
    assert_eq!(with(request, &[0x22, 1, 7]), "stream_id=263");
    // A level, then a level and a timeout.
    assert_eq!(with(request, &[0x11, 2]), "durability_level=2");
    assert_eq!(with(request, &[0x13, 2, 0, 9]), "durability_level=2");
    assert_eq!(with(request, &[0x02, 1, 2]), "frame_info={id=0 payload=0x0102}");
    let response = Frame::response(Opcode::NOOP, Status::SUCCESS);
    for (encoded, micros) in
        [([0, 0], 0), ([0, 10], 27), ([1, 0], 7_750), ([0xff, 0xff], 120_125_042)]
    {
        let framing = [&[0x02][..], &encoded].concat();
        assert_eq!(with(response, &framing), format!("server_duration_us={micros}"));
    }
    assert_eq!(with(response, &[0x22, 1, 7]), "frame_info={id=2 payload=0x0107}");
}

#[test]
fn value_without_its_body_may_be_marked_as_compressed() {
    let xattrs = b"\0\0\0\x0f\0\0\0\x0b_k\0{\"a\":1}\0";
    let mutation = |datatype: Datatype, value: &[u8]| {
        let mut extras = [0; 31];
        extras[7] = 1;
        let mutation = Frame::request(Opcode::DCP_MUTATION).with_extras(&extras);
        let fields = described(mutation.with_datatype(datatype).with_key(b"\0k").with_value(value));
        fields.split_once(" key=k ").unwrap().1.to_owned()
    };
    let (compressed, xattr) = (Datatype::SNAPPY, Datatype::XATTR);
    assert_eq!(
        mutation(compressed.with(xattr), xattrs),
        r#"xattrs=[{name=_k value='{"a":1}'}] value="""#
    );
    // Neither compressed nor xattrs: damaged.
    assert_eq!(
        mutation(compressed.with(xattr), b"\xff\xff\xff"),
        r#"problem=["invalid snappy value: damaged length", "input ends inside xattr section"] value=0xffffff"#
    );
    // Xattrs that are not announced are no reason to take it for uncompressed.
    assert_eq!(
        mutation(compressed, xattrs),
        r#"problem="invalid snappy value: damaged block" value="\0\0\0\u{f}\0\0\0\u{b}_k\0{\"a\":1}\0""#
    );
    assert_eq!(mutation(compressed.with(xattr), b""), r#"value="""#);
    assert_eq!(
        mutation(xattr, b"\0\0\0\x09"),
        r#"problem="input ends inside xattr section" value="\0\0\0\t""#
    );
    let value = snappy::compress(b"{}").unwrap();
    assert_eq!(mutation(compressed, &value), r#"compressed_length=4 value="{}""#);
}

#[test]
fn system_events_have_the_fields_of_their_version() {
    let event = |id: u8, version: u8, key: &[u8], value: &[u8]| {
        let extras = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, id, version];
        let event = Frame::request(Opcode::DCP_SYSTEM_EVENT).with_extras(&extras);
        described(event.with_key(key).with_value(value))
    };
    let plain = &COUNTING;
    assert_eq!(
        event(0, 0, b"c", &plain[..16]),
        "seqno=1 event=BeginCollection version=0 manifest_uid=0x102030405060708 scope_id=0x90a0b0c collection_id=0xd0e0f10 name=c"
    );
    assert_eq!(
        event(0, 1, b"c", &plain[..20]),
        "seqno=1 event=BeginCollection version=1 manifest_uid=0x102030405060708 scope_id=0x90a0b0c collection_id=0xd0e0f10 name=c max_ttl=286397204"
    );
    assert_eq!(
        event(1, 0, b"", &plain[..16]),
        "seqno=1 event=EndCollection version=0 manifest_uid=0x102030405060708 scope_id=0x90a0b0c collection_id=0xd0e0f10"
    );
    assert_eq!(
        event(3, 0, b"s", &plain[..12]),
        "seqno=1 event=CreateScope version=0 manifest_uid=0x102030405060708 scope_id=0x90a0b0c name=s"
    );
    assert_eq!(
        event(4, 0, b"", &plain[..12]),
        "seqno=1 event=DropScope version=0 manifest_uid=0x102030405060708 scope_id=0x90a0b0c"
    );
    // Unknown versions and events, and damaged payloads, are shown as they are.
    assert_eq!(
        event(0, 3, b"c", b"\x01"),
        "seqno=1 event=BeginCollection version=3 key=c value=0x01"
    );
    assert_eq!(event(2, 0, b"c", b"\x01"), "seqno=1 event=0x2 version=0 key=c value=0x01");
    assert_eq!(
        event(0, 0, b"c", b"\x01"),
        r#"seqno=1 event=BeginCollection version=0 problem="input ends inside payload of a system event" key=c value=0x01"#
    );
    assert_eq!(
        event(0, 2, b"c", b"\x01"),
        r#"seqno=1 event=BeginCollection version=2 problem="invalid FlatBuffers payload of a system event" key=c value=0x01"#
    );
}

#[test]
fn system_event_in_flatbuffers_has_the_fields_of_its_event() {
    let full = SystemEventPayload {
        manifest_uid: ManifestUid(0x0102_0304_0506_0708),
        scope_id: ScopeId(9),
        collection_id: Some(CollectionId(8)),
        name: b"name",
        max_ttl: Some(0),
        history: true,
        flush_uid: ManifestUid(7),
    };
    let dropped = SystemEventPayload {
        name: b"",
        max_ttl: None,
        history: false,
        flush_uid: ManifestUid(0),
        ..full
    };
    for (id, expected) in [
        (SystemEventId::BEGIN_COLLECTION, full),
        (SystemEventId::MODIFY_COLLECTION, SystemEventPayload { max_ttl: None, ..full }),
        (SystemEventId::MODIFY_COLLECTION, SystemEventPayload { history: false, ..full }),
        (SystemEventId::END_COLLECTION, dropped),
        (
            SystemEventId::CREATE_SCOPE,
            SystemEventPayload { collection_id: None, name: b"name", ..dropped },
        ),
        (SystemEventId::DROP_SCOPE, SystemEventPayload { collection_id: None, ..dropped }),
    ] {
        let value = expected.to_flatbuffers(id);
        let event = SystemEvent { seqno: Seqno(1), id, version: 2, key: b"", value: &value };
        assert_eq!(event.payload(), Ok(Some(expected)), "{id}");
        // Cut anywhere, it is damaged or still whole.
        for len in 0..value.len() {
            let cut = SystemEvent { value: &value[..len], ..event };
            if let Ok(Some(payload)) = cut.payload() {
                assert_eq!(payload, expected, "{id}, {len} bytes");
            }
        }
        let empty = SystemEvent { value: b"", ..event };
        assert!(empty.payload().is_err(), "{id}");
    }
}

#[test]
fn vbucket_ids_and_vbuuids_are_shown_as_the_field_does() {
    assert_eq!(Vbid(1023).to_string(), "vb:1023");
    assert_eq!(Vbuuid(0xfeed_deca).to_string(), "0xfeeddeca");
    assert_eq!(format!("{:?}", Vbuuid(0xfeed_deca)), "Vbuuid(0xfeeddeca)");
    assert_eq!(Datatype(0x0d).to_string(), "json,xattr,0x8");
    assert_eq!(Datatype(0x10).to_string(), "0x10");
}

#[test]
fn packet_of_unknown_layout_is_described_by_its_parts() {
    let unknown = Frame::request(Opcode(0x3b)).with_extras(&[1]).with_key(b"k");
    assert_eq!(described(unknown.with_value(b"v")), "extras=0x01 key=0x6b value=0x76");
    let pushed = Frame::server_request(Opcode::ADD).with_extras(&[1]);
    assert_eq!(described(pushed), "extras=0x01");
    let unknown = Frame::response(Opcode::GET, Status::KEY_ENOENT).with_extras(&[1]);
    assert_eq!(described(unknown), "extras=0x01");
}
