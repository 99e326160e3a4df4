//! Snapshot markers in every version, by the rows of the conformance table.

use dcp_test::vectors;
use dcp_wire::describe::{FieldValue, Keys, describe};
use dcp_wire::message::{SnapshotFlags, SnapshotMarker, StreamAddress};
use dcp_wire::{DecodeError, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, StreamId, Vbid};

use crate::frame;

const STREAM: StreamAddress =
    StreamAddress { vbid: Vbid(0), opaque: Opaque(0xdead_beef), stream_id: None };

fn packet(row: &str) -> Vec<u8> {
    vectors::row("snapshot-markers", row).unwrap().remove(0)
}

fn marker(start: u64, end: u64, flags: u32) -> SnapshotMarker {
    SnapshotMarker::new(Seqno(start), Seqno(end), SnapshotFlags::from_bits_retain(flags))
}

fn encode(marker: &SnapshotMarker) -> Vec<u8> {
    let mut out = Vec::new();
    marker.encode(STREAM, &mut out).unwrap();
    out
}

/// `marker` encodes to the row's packet, which decodes to `marker`.
fn golden(row: &str, marker: SnapshotMarker, to: StreamAddress) {
    let packet = packet(row);
    let mut out = Vec::new();
    marker.encode(to, &mut out).unwrap();
    assert_eq!(format!("{out:02x?}"), format!("{packet:02x?}"));
    assert_eq!(SnapshotMarker::decode(&frame(&packet)), Ok(marker));
}

/// What decoding a marker with these parts comes to.
fn decode(extras: &[u8], value: &[u8]) -> Result<SnapshotMarker, DecodeError> {
    decode_frame(Frame::request(Opcode::DCP_SNAPSHOT_MARKER).with_extras(extras).with_value(value))
}

fn decode_frame(request: Frame<'_>) -> Result<SnapshotMarker, DecodeError> {
    let mut out = Vec::new();
    request.encode(&mut out).unwrap();
    SnapshotMarker::decode(&frame(&out))
}

#[test]
fn sm_01_and_sm_13_version_1_in_memory() {
    golden("SM-01", marker(0, 8, 0x01), STREAM);
}

#[test]
fn sm_02_version_1_from_disk() {
    golden("SM-02", marker(1, 8, 0x06), STREAM);
}

#[test]
fn sm_03_and_sm_14_version_2_0() {
    let marker = SnapshotMarker {
        max_visible_seqno: Some(Seqno(8)),
        high_completed_seqno: Some(Seqno(7)),
        ..marker(1, 8, 0x02)
    };
    golden("SM-03", marker, STREAM);
}

#[test]
fn sm_05_and_sm_16_version_2_2() {
    let marker = SnapshotMarker {
        max_visible_seqno: Some(Seqno(8)),
        high_completed_seqno: Some(Seqno(7)),
        purge_seqno: Some(Seqno(3)),
        high_prepared_seqno: Some(Seqno(8)),
        ..marker(1, 8, 0x06)
    };
    golden("SM-05", marker, STREAM);
}

#[test]
fn sm_06_a_purge_seqno_alone_needs_version_2_2() {
    let sent = SnapshotMarker { purge_seqno: Some(Seqno(3)), ..marker(1, 8, 0x06) };
    assert_eq!(encode(&sent), packet("SM-06"));
    let zero = Some(Seqno(0));
    let received = SnapshotMarker {
        max_visible_seqno: zero,
        high_completed_seqno: zero,
        high_prepared_seqno: zero,
        ..sent
    };
    assert_eq!(SnapshotMarker::decode(&frame(&packet("SM-06"))), Ok(received));
}

#[test]
fn sm_07_version_1_with_a_stream_id() {
    let to = StreamAddress { stream_id: Some(StreamId(42)), ..STREAM };
    golden("SM-07", marker(0, 8, 0x05), to);
    assert_eq!(frame(&packet("SM-07")).stream_id(), Ok(Some(StreamId(42))));
}

#[test]
fn sm_08_and_sm_09_seqnos_of_disk_snapshots_are_refused_for_others() {
    for flags in [0x00, 0x01, 0x05] {
        let marker = marker(1, 8, flags);
        let completed = SnapshotMarker { high_completed_seqno: Some(Seqno(7)), ..marker };
        let prepared = SnapshotMarker { high_prepared_seqno: Some(Seqno(7)), ..marker };
        for marker in [completed, prepared] {
            let mut out = Vec::new();
            assert!(marker.encode(STREAM, &mut out).is_err());
            assert!(out.is_empty());
        }
    }
}

#[test]
fn sm_10_a_purge_seqno_of_zero_is_present_all_the_same() {
    let sent = SnapshotMarker { purge_seqno: Some(Seqno(0)), ..marker(1, 8, 0x06) };
    let packet = encode(&sent);
    assert_eq!((packet.len(), packet[24]), (77, 2));
}

#[test]
fn sm_12_a_high_completed_seqno_alone_needs_version_2_0() {
    let sent = SnapshotMarker { high_completed_seqno: Some(Seqno(3)), ..marker(1, 8, 0x02) };
    let packet = encode(&sent);
    assert_eq!((packet.len(), packet[24]), (61, 0));
    let received = SnapshotMarker { max_visible_seqno: Some(Seqno(0)), ..sent };
    assert_eq!(SnapshotMarker::decode(&frame(&packet)), Ok(received));
}

#[test]
fn sm_15_and_sm_17_seqnos_of_disk_snapshots_mean_nothing_in_memory() {
    let mut version_2_0 = packet("SM-03");
    version_2_0[44] = 0x05;
    let marker = SnapshotMarker::decode(&frame(&version_2_0)).unwrap();
    assert_eq!((marker.max_visible_seqno, marker.high_completed_seqno), (Some(Seqno(8)), None));

    let mut version_2_2 = packet("SM-05");
    version_2_2[44] = 0x05;
    let marker = SnapshotMarker::decode(&frame(&version_2_2)).unwrap();
    assert_eq!((marker.max_visible_seqno, marker.purge_seqno), (Some(Seqno(8)), Some(Seqno(3))));
    assert_eq!((marker.high_completed_seqno, marker.high_prepared_seqno), (None, None));
}

#[test]
fn sm_18_layout_with_wrong_lengths_leaves_bytes_that_are_no_packet() {
    let mut picture = packet("SM-03");
    (picture[4], picture[11]) = (0x14, 0x14);
    let (_, used) = Frame::parse(&picture, MAX_BODY_LEN).unwrap().unwrap();
    assert!(used < picture.len());
    let rest = Frame::parse(&picture[used..], MAX_BODY_LEN);
    assert!(matches!(rest, Err(DecodeError::InvalidMagic(_))), "{rest:?}");
}

#[test]
fn sm_19_version_2_1_is_refused_by_name_and_still_described() {
    let refused = decode(&[1], &[0; 44]).unwrap_err();
    assert!(refused.to_string().contains("2.1"), "{refused}");

    let mut value = packet("SM-03")[25..].to_vec();
    value.extend_from_slice(&1_700_000_000_000u64.to_be_bytes());
    let mut out = Vec::new();
    let request = Frame::request(Opcode::DCP_SNAPSHOT_MARKER);
    request.with_extras(&[1]).with_value(&value).encode(&mut out).unwrap();
    let description = describe(&frame(&out), Keys::Plain);
    assert_eq!(description.get("version"), Some(&FieldValue::Text("2.1".into())));
    assert_eq!(description.get("start_seqno"), Some(&FieldValue::U64(1)));
    assert_eq!(description.get("high_completed_seqno"), Some(&FieldValue::U64(7)));
    assert_eq!(description.get("timestamp"), Some(&FieldValue::U64(1_700_000_000_000)));
    assert!(description.get("problem").is_some());
}

#[test]
fn sm_20_unknown_versions_are_refused() {
    for version in [3, 101, 0xff] {
        let refused = decode(&[version], &[0; 36]);
        assert_eq!(refused, Err(DecodeError::InvalidField("snapshot marker version")));
    }
}

#[test]
fn sm_21_to_sm_26_values_of_the_wrong_length_are_refused() {
    for (version, lens) in [(0, [35, 39, 0, 37, 52]), (2, [51, 53, 36, 44, 0])] {
        for len in lens {
            let refused = decode(&[version], &vec![0; len]);
            assert!(matches!(refused, Err(DecodeError::InvalidLength { .. })), "{version} {len}");
        }
    }
    assert!(decode(&[0], &[0; 36]).is_ok());
    assert!(decode(&[2], &[0; 52]).is_ok());
}

#[test]
fn sm_25_version_2_2_as_it_was_before_its_release_is_still_described() {
    let value = &packet("SM-05")[25..25 + 44];
    let mut out = Vec::new();
    let request = Frame::request(Opcode::DCP_SNAPSHOT_MARKER);
    request.with_extras(&[2]).with_value(value).encode(&mut out).unwrap();
    let description = describe(&frame(&out), Keys::Plain);
    assert_eq!(description.get("purge_seqno"), Some(&FieldValue::U64(3)));
    assert_eq!(description.get("high_prepared_seqno"), None);
}

#[test]
fn sm_27_to_sm_29_extras_of_the_wrong_length_are_refused() {
    for len in [0, 2, 19, 21, 22, 28, 36] {
        assert!(decode(&vec![0; len], &[]).is_err(), "{len} bytes of extras");
    }
    assert!(decode(&[0; 20], &[]).is_ok());
    assert!(decode(&[0; 20], &[0; 80]).is_err(), "version 1 with a value");
}

#[test]
fn sm_30_and_sm_31_a_key_or_a_datatype_is_refused() {
    let request = Frame::request(Opcode::DCP_SNAPSHOT_MARKER).with_extras(&[0; 20]);
    assert!(decode_frame(request.with_key(&[b'k'; 32])).is_err());
    assert!(decode_frame(request.with_datatype(dcp_wire::Datatype::JSON)).is_err());
}

#[test]
fn sm_32_unknown_flags_are_kept() {
    let sent = marker(1, 8, 0x8000_002f);
    assert_eq!(SnapshotMarker::decode(&frame(&encode(&sent))), Ok(sent));
}

#[test]
fn sm_33_a_start_beyond_the_end_is_not_the_codec_s_to_judge() {
    let sent = marker(11, 8, 0x01);
    assert_eq!(SnapshotMarker::decode(&frame(&encode(&sent))), Ok(sent));
}

#[test]
fn sm_35_to_sm_40_round_trips() {
    let seqno = |seqno| Some(Seqno(seqno));
    let zero = seqno(0);
    // Maximum visible, high completed, high prepared, purge seqno: sent, then received.
    let cases = [
        (0x0, [seqno(5), None, None, None], [seqno(5), None, None, None]),
        (0x2, [None, seqno(3), None, None], [zero, seqno(3), None, None]),
        (0x2, [seqno(5), seqno(3), None, None], [seqno(5), seqno(3), None, None]),
        (0x2, [seqno(5), seqno(3), seqno(4), None], [seqno(5), seqno(3), seqno(4), zero]),
        (0x2, [seqno(5), seqno(3), seqno(4), seqno(6)], [seqno(5), seqno(3), seqno(4), seqno(6)]),
    ];
    for (flags, sent, received) in cases {
        let with =
            |[max_visible_seqno, high_completed_seqno, high_prepared_seqno, purge_seqno]: [Option<Seqno>;
                 4]| SnapshotMarker {
                max_visible_seqno,
                high_completed_seqno,
                high_prepared_seqno,
                purge_seqno,
                ..marker(1, 2, flags)
            };
        let packet = encode(&with(sent));
        assert_eq!(SnapshotMarker::decode(&frame(&packet)), Ok(with(received)));
    }
}
