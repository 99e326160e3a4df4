//! Golden packets, each against the message it stands for, in both directions.

use dcp_test::vectors;
use dcp_wire::message::*;
use dcp_wire::sasl::{BearerMessage, PlainMessage, encode_bearer, encode_plain};
use dcp_wire::*;

use crate::frame;

const OPAQUE: Opaque = Opaque(0x1000);
const STREAM: StreamAddress = StreamAddress { vbid: Vbid(3), opaque: OPAQUE, stream_id: None };

pub(crate) fn packets<const N: usize>(row: &str) -> [Vec<u8>; N] {
    vectors::row("golden-packets", row).unwrap().try_into().unwrap()
}

/// `value` encodes to the packet and the packet decodes to `value`.
macro_rules! golden {
    ($packet:expr, $type:ident $(<$lt:lifetime>)?, $value:expr, ($($arg:expr),*)) => {
        let (packet, value) = (&$packet, $value);
        let mut out = Vec::new();
        value.encode($($arg,)* &mut out).unwrap();
        assert_eq!(format!("{out:02x?}"), format!("{packet:02x?}"));
        assert_eq!($type::decode(&frame(packet)).unwrap(), value);
    };
}

fn response(packet: &[u8]) -> (Status, Response<'_>) {
    let frame = frame(packet);
    assert_eq!(frame.header.opaque, OPAQUE);
    match Message::decode(&frame).unwrap() {
        Message::Response(response) => (frame.header.status(), response),
        other => panic!("{other:?}"),
    }
}

#[test]
fn golden_packets_decode_typed_and_encode_to_the_same_bytes() {
    let vectors = vectors::load("golden-packets").unwrap();
    assert_eq!(vectors.len(), 36);
    for vectors::Vector { row, bytes } in vectors {
        let frame = frame(&bytes);
        let message = Message::decode(&frame).unwrap();
        assert!(!matches!(message, Message::Raw(_)), "{row}");
        let mut out = Vec::new();
        message.encode(frame.envelope(), &mut out).unwrap();
        assert_eq!(out, bytes, "{row}");
    }
}

#[test]
fn gp_02_sasl_list_mechs() {
    let [packet] = packets("GP-02");
    let mut out = Vec::new();
    Frame::request(Opcode::SASL_LIST_MECHS).with_opaque(OPAQUE).encode(&mut out).unwrap();
    assert_eq!(out, packet);
    let message = Message::decode(&frame(&packet)).unwrap();
    assert!(matches!(message, Message::Request(Request::Plain)));
}

#[test]
fn gp_03_sasl_auth_plain() {
    let [packet] = packets("GP-03");
    let message = encode_plain("u", "p").unwrap();
    let mut out = Vec::new();
    let sasl = Sasl { mechanism: b"PLAIN", message: &message };
    sasl.encode_auth(OPAQUE, &mut out).unwrap();
    assert_eq!(out, packet);
    let decoded = Sasl::decode(&frame(&packet)).unwrap();
    assert_eq!(decoded, sasl);
    assert!(PlainMessage::decode(decoded.message).unwrap().matches("u", "p"));
    assert!(!format!("{decoded:?}").contains('p'), "the message is shown");
}

#[test]
fn tk_01_sasl_auth_with_a_token() {
    let [packet] = packets("TK-01");
    let message = encode_bearer("e30.e30.c2ln").unwrap();
    let sasl = Sasl { mechanism: b"OAUTHBEARER", message: &message };
    let mut out = Vec::new();
    sasl.encode_auth(OPAQUE, &mut out).unwrap();
    assert_eq!(out, packet);
    let frame = frame(&packet);
    let read = BearerMessage::decode(Sasl::decode(&frame).unwrap().message).unwrap();
    assert_eq!((read.authzid.as_ref(), read.token), ("", "e30.e30.c2ln"));
}

#[test]
fn gp_04_select_bucket() {
    let [packet] = packets("GP-04");
    golden!(packet, SelectBucket, SelectBucket { bucket: b"b" }, (OPAQUE));
}

#[test]
fn gp_05_get_error_map() {
    let [packet] = packets("GP-05");
    golden!(packet, GetErrorMap, GetErrorMap { version: 2 }, (OPAQUE));
}

#[test]
fn gp_06_get_cluster_config() {
    let [packet] = packets("GP-06");
    golden!(packet, GetClusterConfig, GetClusterConfig { known: None }, (OPAQUE));
}

#[test]
fn gp_09_control() {
    let [packet] = packets("GP-09");
    let key = Control::CONNECTION_BUFFER_SIZE.as_bytes();
    golden!(packet, Control, Control { key, value: b"1024" }, (OPAQUE));
}

fn from_scratch(vbid: u16) -> StreamRequest<'static> {
    StreamRequest {
        vbid: Vbid(vbid),
        opaque: OPAQUE,
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno::ZERO,
        end_seqno: Seqno::MAX,
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno::ZERO,
        snapshot_end: Seqno::ZERO,
        value: &[],
    }
}

#[test]
fn gp_10_stream_request_from_scratch() {
    let [packet] = packets("GP-10");
    golden!(packet, StreamRequest, from_scratch(3), ());
}

#[test]
fn gp_11_stream_request_with_filter_and_stream_id() {
    let [packet] = packets("GP-11");
    let request = StreamRequest {
        start_seqno: Seqno(25),
        vbuuid: Vbuuid(0xfeed_deca),
        snapshot_start: Seqno(20),
        snapshot_end: Seqno(30),
        value: br#"{"collections":["9"],"sid":7}"#,
        ..from_scratch(3)
    };
    golden!(packet, StreamRequest, request, ());
}

#[test]
fn gp_12_success_with_a_failover_log() {
    let [packet] = packets("GP-12");
    let (status, response) = response(&packet);
    assert_eq!(status, Status::SUCCESS);
    let Response::FailoverLog(log) = response else { panic!("{response:?}") };
    let entry = FailoverEntry { vbuuid: Vbuuid(0xfeed_deca), seqno: Seqno(0) };
    assert_eq!(log.collect::<Vec<_>>(), [entry]);
}

#[test]
fn gp_13_rollback() {
    let [packet] = packets("GP-13");
    let (status, response) = response(&packet);
    assert_eq!(status, Status::ROLLBACK);
    assert!(matches!(response, Response::Rollback(Seqno(5))), "{response:?}");
}

#[test]
fn gp_14_not_my_vbucket() {
    let [packet] = packets("GP-14");
    let (status, response) = response(&packet);
    assert_eq!(status, Status::NOT_MY_VBUCKET);
    assert!(matches!(response, Response::Error(&[])), "{response:?}");
}

#[test]
fn gp_15_get_failover_log() {
    let [packet] = packets("GP-15");
    let mut out = Vec::new();
    let request = Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_vbid(Vbid(3));
    request.with_opaque(OPAQUE).encode(&mut out).unwrap();
    assert_eq!(out, packet);
}

#[test]
fn gp_16_close_stream_with_stream_id() {
    let [packet] = packets("GP-16");
    let to = StreamAddress { stream_id: Some(StreamId(7)), ..STREAM };
    golden!(packet, CloseStream, CloseStream, (to));
    assert_eq!(StreamAddress::decode(&frame(&packet)), Ok(to));
}

#[test]
fn gp_17_stream_end() {
    let [packet] = packets("GP-17");
    golden!(packet, StreamEnd, StreamEnd { reason: StreamEndReason::STATE_CHANGED }, (STREAM));
}

#[test]
fn gp_18_mutation_in_a_collection() {
    let [packet] = packets("GP-18");
    let mutation = Mutation {
        seqno: Seqno(4),
        rev_seqno: RevSeqno(1),
        cas: Cas(5),
        datatype: Datatype::JSON,
        key: b"\x09k",
        value: b"{}",
        ..Mutation::default()
    };
    golden!(packet, Mutation, mutation, (STREAM));
    let key = DocKey { collection_id: CollectionId(9), key: b"k" };
    assert_eq!(DocKey::decode(mutation.key), Ok(key));
}

const DELETION: Deletion<'_> = Deletion {
    seqno: Seqno(5),
    rev_seqno: RevSeqno(2),
    cas: Cas(6),
    datatype: Datatype::RAW,
    delete_time: None,
    key: b"k",
    value: &[],
};

#[test]
fn gp_20_deletion_without_a_time() {
    let [packet] = packets("GP-20");
    golden!(packet, Deletion, DELETION, (STREAM));
}

#[test]
fn gp_21_deletion_with_a_time() {
    let [packet] = packets("GP-21");
    let deletion = Deletion { delete_time: Some(1_700_000_000), ..DELETION };
    golden!(packet, Deletion, deletion, (STREAM));
}

#[test]
fn gp_22_expiration() {
    let [packet] = packets("GP-22");
    let expiration = Expiration {
        seqno: Seqno(5),
        rev_seqno: RevSeqno(2),
        cas: Cas(6),
        delete_time: 1_700_000_000,
        key: b"k",
        ..Expiration::default()
    };
    golden!(packet, Expiration, expiration, (STREAM));
}

#[test]
fn gp_23_noop_and_its_answer() {
    let [request, answer] = packets("GP-23");
    for (packet, frame) in [
        (request, Frame::request(Opcode::DCP_NOOP)),
        (answer, Frame::response(Opcode::DCP_NOOP, Status::SUCCESS)),
    ] {
        let mut out = Vec::new();
        frame.with_opaque(Opaque(10_000_001)).encode(&mut out).unwrap();
        assert_eq!(out, packet);
    }
}

fn system_event(event: SystemEvent<'_>, row: &str, expected: SystemEventPayload<'_>) {
    let [packet] = packets(row);
    golden!(packet, SystemEvent, event, (STREAM));
    assert_eq!(event.payload(), Ok(Some(expected)));
    assert_eq!(expected.to_plain(), (event.value.to_vec(), event.version));
    let value = expected.to_flatbuffers(event.id);
    let event = SystemEvent { version: 2, value: &value, ..event };
    assert_eq!(event.payload(), Ok(Some(expected)), "in the other form it says the same");
}

const PAYLOAD: SystemEventPayload<'_> = SystemEventPayload {
    manifest_uid: ManifestUid(2),
    scope_id: ScopeId(0),
    collection_id: Some(CollectionId(8)),
    name: b"c",
    max_ttl: None,
    history: false,
    flush_uid: ManifestUid(0),
};

#[test]
fn gp_25_begin_collection() {
    let event = SystemEvent {
        seqno: Seqno(4),
        id: SystemEventId::BEGIN_COLLECTION,
        version: 0,
        key: b"c",
        value: &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 8],
    };
    system_event(event, "GP-25", PAYLOAD);
}

#[test]
fn gp_26_begin_collection_with_an_expiry() {
    let event = SystemEvent {
        seqno: Seqno(4),
        id: SystemEventId::BEGIN_COLLECTION,
        version: 1,
        key: b"c",
        value: &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0x19, 0x40],
    };
    system_event(event, "GP-26", SystemEventPayload { max_ttl: Some(72_000), ..PAYLOAD });
}

#[test]
fn gp_27_end_collection() {
    let event = SystemEvent {
        seqno: Seqno(9),
        id: SystemEventId::END_COLLECTION,
        version: 0,
        key: b"",
        value: &[0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 8],
    };
    let payload = SystemEventPayload { manifest_uid: ManifestUid(3), name: b"", ..PAYLOAD };
    system_event(event, "GP-27", payload);
}

#[test]
fn gp_28_create_scope() {
    let event = SystemEvent {
        seqno: Seqno(5),
        id: SystemEventId::CREATE_SCOPE,
        version: 0,
        key: b"s",
        value: &[0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 9],
    };
    let payload = SystemEventPayload {
        manifest_uid: ManifestUid(4),
        scope_id: ScopeId(9),
        collection_id: None,
        name: b"s",
        ..PAYLOAD
    };
    system_event(event, "GP-28", payload);
}

#[test]
fn gp_30_prepare() {
    let [packet] = packets("GP-30");
    let prepare = Prepare {
        seqno: Seqno(4),
        rev_seqno: RevSeqno(1),
        cas: Cas(5),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        lock_time: 0,
        nru: 0,
        deleted: false,
        level: DurabilityLevel::MAJORITY,
        key: b"k",
        value: b"v",
    };
    golden!(packet, Prepare, prepare, (STREAM));
}

#[test]
fn gp_31_commit() {
    let [packet] = packets("GP-31");
    let commit = Commit { prepared_seqno: Seqno(4), commit_seqno: Seqno(5), key: b"k" };
    golden!(packet, Commit, commit, (STREAM));
}

#[test]
fn gp_32_abort() {
    let [packet] = packets("GP-32");
    let abort = Abort { prepared_seqno: Seqno(4), abort_seqno: Seqno(5), key: b"k" };
    golden!(packet, Abort, abort, (STREAM));
}

#[test]
fn gp_34_seqno_advanced() {
    let [packet] = packets("GP-34");
    golden!(packet, SeqnoAdvanced, SeqnoAdvanced { seqno: Seqno(9) }, (STREAM));
}

#[test]
fn gp_35_oso_snapshot() {
    let [start, end] = packets("GP-35");
    golden!(start, OsoSnapshot, OsoSnapshot::Start, (STREAM));
    golden!(end, OsoSnapshot, OsoSnapshot::End, (STREAM));
}

#[test]
fn gp_37_observe_seqno() {
    let [packet] = packets("GP-37");
    let observe = ObserveSeqno { vbuuid: Vbuuid(0xfeed_deca) };
    golden!(packet, ObserveSeqno, observe, (Vbid(3), OPAQUE));
}

#[test]
fn gp_40_stream_request_of_the_public_page() {
    let [packet] = packets("GP-40");
    let request = StreamRequest {
        start_seqno: Seqno(0x00ff_eedd),
        vbuuid: Vbuuid(0xfeed_deca),
        snapshot_end: Seqno(0x00ff_eeff),
        ..from_scratch(0)
    };
    golden!(packet, StreamRequest, request, ());
}

#[test]
fn gp_41_rollback_of_the_public_page() {
    let [packet] = packets("GP-41");
    assert!(matches!(response(&packet), (Status::ROLLBACK, Response::Rollback(Seqno(0)))));
}

#[test]
fn gp_42_stream_request_from_zero_with_a_uuid() {
    let [packet] = packets("GP-42");
    let request = StreamRequest { vbuuid: Vbuuid(0xfeed_deca), ..from_scratch(0) };
    golden!(packet, StreamRequest, request, ());
    // The page's picture lacks the last eight bytes: it is not yet a packet.
    let picture = &packet[..packet.len() - 8];
    assert_eq!(Frame::parse(picture, MAX_BODY_LEN), Ok(None));
    assert_eq!(Frame::wanted(picture, MAX_BODY_LEN), Ok(72));
}

#[test]
fn gp_43_failover_log_that_does_not_descend() {
    let [packet] = packets("GP-43");
    let (_, Response::FailoverLog(log)) = response(&packet) else { panic!("not a log") };
    let entries: Vec<_> = log.map(|entry| (entry.vbuuid.0, entry.seqno.0)).collect();
    assert_eq!(
        entries,
        [
            (0xfeed_deca, 0x5432),
            (0x00de_cafe, 0x0134_3214),
            (0xfeed_face, 4),
            (0xdead_beef, 0x6524)
        ]
    );
    let mut out = Vec::new();
    encode_failover_log(log, &mut out);
    assert_eq!(out, packet[24..]);
}
