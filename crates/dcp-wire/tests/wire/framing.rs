//! Headers, framing extras, keys, and the questions about seqnos and cluster maps.

use dcp_wire::framing_extras::{FrameInfo, FrameInfos};
use dcp_wire::message::{
    ClusterMapChange, ConfigVersion, Features, GetAllVbSeqnos, GetClusterConfig, Message, Mutation,
    MutationView, ObservedSeqno, PushedVersion, Response, StreamAddress, VbSeqnos, VbucketState,
    encode_features, encode_vb_seqnos,
};
use dcp_wire::{
    CollectionId, Datatype, DecodeError, DocKey, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode,
    Seqno, Status, StreamId, Vbid, Vbuuid, leb128,
};

use crate::frame;

fn packet(frame: Frame<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out).unwrap();
    out
}

#[test]
fn body_over_the_limit_is_refused_before_it_arrives() {
    let mut header = packet(Frame::request(Opcode::DCP_MUTATION));
    header[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    let refused = Err(DecodeError::FrameTooLarge { len: u32::MAX, max: 31_457_280 });
    assert_eq!(Frame::parse(&header, MAX_BODY_LEN), refused);
    assert_eq!(Frame::wanted(&header, MAX_BODY_LEN).map(|_| None), refused);
    // The limit itself is accepted, one byte more is not.
    header[8..12].copy_from_slice(&100u32.to_be_bytes());
    assert_eq!(Frame::wanted(&header, 100), Ok(124));
    assert_eq!(Frame::parse(&header, 100), Ok(None));
    assert!(Frame::wanted(&header, 99).is_err());
}

#[test]
fn packet_whose_parts_exceed_its_body_is_refused() {
    let whole = packet(
        Frame::request(Opcode::DCP_MUTATION).with_extras(&[0; 31]).with_key(b"k").with_value(b"v"),
    );
    assert_eq!(whole[11], 33);
    for (index, value) in [(3, 3), (4, 33), (2, 1), (11, 31)] {
        let mut header = whole.clone();
        header[index] = value;
        let refused = Frame::parse(&header, MAX_BODY_LEN);
        assert!(matches!(refused, Err(DecodeError::InvalidLength { .. })), "{index} {refused:?}");
    }
}

#[test]
fn first_byte_outside_the_protocol_is_refused_at_once() {
    for first in 0..=u8::MAX {
        let known = matches!(first, 0x08 | 0x18 | 0x80..=0x83);
        let byte = [first];
        let parsed = Frame::parse(&byte, MAX_BODY_LEN);
        assert_eq!(parsed == Err(DecodeError::InvalidMagic(first)), !known);
    }
}

#[test]
fn ax_01_a_feature_list_of_odd_length_is_refused() {
    assert!(Features::decode(&[0, 6, 0]).is_err());
    let bytes = encode_features([Feature::XERROR, Feature(0x7fff)]);
    let features = Features::decode(&bytes).unwrap();
    assert!(features.contains(Feature::XERROR) && !features.contains(Feature::SNAPPY));
    assert_eq!(features.iter().collect::<Vec<_>>(), [Feature::XERROR, Feature(0x7fff)]);
}

#[test]
fn ax_05_a_stream_id_lies_in_the_framing_extras() {
    let bytes =
        packet(Frame::request(Opcode::DCP_STREAM_REQ).with_framing_extras(&[0x22, 0x00, 0x2a]));
    assert_eq!(bytes[..4], [0x08, 0x53, 0x03, 0x00]);
    assert_eq!(frame(&bytes).stream_id(), Ok(Some(StreamId(42))));
}

#[test]
fn ax_06_unknown_and_escaped_framing_objects_are_walked_over() {
    // Object 9 of one byte, object 2 (stream id), object 20 of 16 bytes by both escapes.
    let mut extras = vec![0x91, 0xff, 0x22, 0x00, 0x07, 0xff, 5, 1];
    extras.extend_from_slice(&[0xaa; 16]);
    let infos: Vec<_> = FrameInfos::new(&extras).collect::<Result<_, _>>().unwrap();
    let ids: Vec<_> = infos.iter().map(|info| (info.id, info.payload.len())).collect();
    assert_eq!(ids, [(9, 1), (FrameInfo::STREAM_ID, 2), (20, 16)]);
    for len in 1..extras.len() {
        let whole = [2, 5].contains(&len);
        let walked = FrameInfos::new(&extras[..len]).all(|info| info.is_ok());
        assert_eq!(walked, whole, "{len} bytes");
    }
    let bytes = packet(Frame::request(Opcode::DCP_STREAM_REQ).with_framing_extras(&[0x21, 0x07]));
    assert!(frame(&bytes).stream_id().is_err(), "a stream id of one byte");
}

#[test]
fn ax_11_to_ax_14_the_forms_of_get_all_vb_seqnos() {
    let decode = |extras: &[u8]| {
        let bytes = packet(Frame::request(Opcode::GET_ALL_VB_SEQNOS).with_extras(extras));
        let request = GetAllVbSeqnos::decode(&frame(&bytes))?;
        let mut out = Vec::new();
        request.encode(Opaque(0), &mut out).unwrap();
        assert_eq!(out, bytes);
        Ok::<_, DecodeError>(request)
    };
    assert_eq!(decode(&[]), Ok(GetAllVbSeqnos::default()));
    let active = GetAllVbSeqnos { state: Some(Some(VbucketState::ACTIVE)), collection_id: None };
    assert_eq!(decode(&[0, 0, 0, 1]), Ok(active));
    assert_eq!(decode(&[0; 4]), Ok(GetAllVbSeqnos { state: Some(None), collection_id: None }));
    let collection = GetAllVbSeqnos { collection_id: Some(CollectionId(9)), ..active };
    assert_eq!(decode(&[0, 0, 0, 1, 0, 0, 0, 9]), Ok(collection));
    assert!(decode(&[0, 0, 0, 9]).is_err());
    assert!(decode(&[0, 0, 1, 1]).is_err());
    for len in [1, 3, 5, 7, 9] {
        assert!(decode(&vec![0; len]).is_err(), "{len} bytes of extras");
    }
    let entries = [(Vbid(0), Seqno(7)), (Vbid(1023), Seqno::MAX)];
    let mut value = Vec::new();
    encode_vb_seqnos(entries, &mut value);
    assert_eq!(VbSeqnos::decode(&value).unwrap().collect::<Vec<_>>(), entries);
    assert!(VbSeqnos::decode(&value[1..]).is_err());
}

#[test]
fn ax_17_and_ax_18_the_forms_of_an_observed_seqno() {
    let current = ObservedSeqno {
        vbid: Vbid(3),
        vbuuid: Vbuuid(0xfeed),
        persisted_seqno: Seqno(4),
        current_seqno: Seqno(5),
        failover: None,
    };
    let failed_over = ObservedSeqno { failover: Some((Vbuuid(0xdeca), Seqno(2))), ..current };
    for (observed, len) in [(current, 27), (failed_over, 43)] {
        let mut value = Vec::new();
        observed.encode(&mut value);
        assert_eq!(value.len(), len);
        assert_eq!(ObservedSeqno::decode(&value), Ok(observed));
        for cut in 0..len {
            assert!(ObservedSeqno::decode(&value[..cut]).is_err());
        }
        value.push(0);
        assert!(ObservedSeqno::decode(&value).is_err());
        value.pop();
        value[0] = 2;
        assert!(ObservedSeqno::decode(&value).is_err());
    }
}

#[test]
fn ax_20_an_up_to_date_client_gets_an_empty_map() {
    let bytes = packet(Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS));
    let message = Message::decode(&frame(&bytes)).unwrap();
    assert!(matches!(message, Message::Response(Response::ClusterConfig(&[]))));
}

#[test]
fn ax_21_a_known_map_has_a_revision() {
    let decode = |rev: i64| {
        let mut out = Vec::new();
        let known = Some(ConfigVersion { epoch: 1, rev });
        GetClusterConfig { known }.encode(Opaque(0), &mut out).unwrap();
        GetClusterConfig::decode(&frame(&out)).map(|request| request.known == known)
    };
    assert_eq!(decode(1), Ok(true));
    assert!(decode(0).is_err() && decode(-1).is_err());
    assert!(ConfigVersion { epoch: 2, rev: 1 } > ConfigVersion { epoch: 1, rev: 9 });
}

#[test]
fn ax_25_pushed_cluster_maps_have_two_forms() {
    let version = ConfigVersion { epoch: 1, rev: 7 };
    for version in [PushedVersion::Rev(7), PushedVersion::EpochAndRev(version)] {
        let change = ClusterMapChange { version, bucket: b"b", config: b"{}" };
        let mut out = Vec::new();
        change.encode(Opaque(9), &mut out).unwrap();
        assert_eq!(out[..2], [0x82, 0x01]);
        let Message::ClusterMapChange(decoded) = Message::decode(&frame(&out)).unwrap() else {
            panic!("not a pushed map");
        };
        assert_eq!(decoded, change);
        // The same opcode from a client writes a document.
        out[0] = 0x80;
        assert!(ClusterMapChange::decode(&frame(&out)).is_err());
    }
}

#[test]
fn opcode_that_is_unknown_stays_raw_and_an_unknown_status_is_an_error() {
    let request = packet(Frame::request(Opcode(0x6f)).with_key(b"k").with_value(b"v"));
    let response = packet(Frame::response(Opcode(0x6f), Status::SUCCESS).with_value(b"v"));
    for bytes in [&request, &response] {
        let message = Message::decode(&frame(bytes)).unwrap();
        assert!(matches!(message, Message::Raw(_)), "{message:?}");
    }
    let failed = packet(Frame::response(Opcode(0x6f), Status(0xff07)).with_value(b"{}"));
    let message = Message::decode(&frame(&failed)).unwrap();
    assert!(matches!(message, Message::Response(Response::Error(b"{}"))), "{message:?}");
}

#[test]
fn co_54_and_co_55_keys_carry_their_collection() {
    let decode = DocKey::decode;
    assert_eq!(decode(b"\0key"), Ok(DocKey { collection_id: CollectionId(0), key: b"key" }));
    let key = DocKey { collection_id: CollectionId(0x80), key: b"a" };
    assert_eq!(decode(b"\x80\x01a"), Ok(key));
}

#[test]
fn co_58_and_co_59_empty_keys_and_reserved_collections_are_refused() {
    assert!(DocKey::decode(b"\x08").is_err());
    assert!(DocKey::decode(b"").is_err());
    for reserved in 1..=7 {
        assert!(DocKey::decode(&[reserved, b'a']).is_err(), "{reserved}");
    }
    assert!(DocKey::decode(b"\x08a").is_ok());
}

#[test]
fn co_60_collection_ids_in_leb128() {
    let cases: [(u32, &[u8]); 9] = [
        (0, &[0x00]),
        (0x7f, &[0x7f]),
        (0x80, &[0x80, 0x01]),
        (0x555, &[0xd5, 0x0a]),
        (0x7fff, &[0xff, 0xff, 0x01]),
        (0x8000, &[0x80, 0x80, 0x02]),
        (0x0caf_ef00, &[0x80, 0xde, 0xbf, 0x65]),
        (0xcafe_f00d, &[0x8d, 0xe0, 0xfb, 0xd7, 0x0c]),
        (0xffff_ffff, &[0xff, 0xff, 0xff, 0xff, 0x0f]),
    ];
    for (value, bytes) in cases {
        assert_eq!(leb128::encode(value).as_slice(), bytes);
        assert_eq!(leb128::decode(bytes), Ok((value, &[][..])));
    }
    // Not canonical, longer than 32 bits, without an end.
    for malformed in [
        &[0x80, 0x00][..],
        &[0xff, 0x80, 0x00],
        &[0xff, 0xff, 0xff, 0xff, 0x1f],
        &[0x80, 0x80, 0x80, 0x80, 0x80, 0x01],
        &[0xff, 0xff],
        &[],
    ] {
        assert!(leb128::decode(malformed).is_err(), "{malformed:02x?}");
    }
}

#[test]
fn co_61_and_co_62_keys_have_a_longest_length() {
    for (collection, longest) in [(0u8, 250), (8, 246)] {
        let mut key = vec![collection];
        key.resize(1 + longest, b'k');
        assert!(DocKey::decode(&key).is_ok());
        key.push(b'k');
        assert!(DocKey::decode(&key).is_err());
    }
}

#[test]
fn key_without_its_collection_has_1_to_250_bytes() {
    for (len, is_taken) in [(0, false), (1, true), (250, true), (251, false), (255, false)] {
        let key = vec![b'k'; len];
        let mutation = Mutation { seqno: Seqno(1), key: &key, ..Mutation::default() };
        let to = StreamAddress { vbid: Vbid(0), opaque: Opaque(1), stream_id: None };
        let mut out = Vec::new();
        mutation.encode(to, &mut out).unwrap();
        let view = MutationView::parse(&out, MAX_BODY_LEN, false);
        assert_eq!(view.map(|(view, _)| view.key_len()), is_taken.then_some(len), "{len} bytes");
    }
}

#[test]
fn datatypes_are_sets_of_bits() {
    let both = Datatype::JSON.with(Datatype::SNAPPY);
    assert!(both.contains(Datatype::JSON) && !Datatype::JSON.contains(both));
    assert!(both.intersects(Datatype::SNAPPY) && !both.intersects(Datatype::XATTR));
    assert_eq!(both.without(Datatype::SNAPPY), Datatype::JSON);
    assert_eq!(both.without(Datatype::XATTR), both);
    assert_eq!([7, 8].map(|bits| Datatype(bits).is_valid()), [true, false]);
}

#[test]
fn collection_id_response_has_nothing_but_extras() {
    let response = Frame::response(Opcode::GET_COLLECTION_ID, Status::SUCCESS);
    let response = response.with_extras(&[0; 12]);
    assert!(Message::decode(&frame(&packet(response))).is_ok());
    assert!(Message::decode(&frame(&packet(response.with_value(b"v")))).is_err());
    assert!(Message::decode(&frame(&packet(response.with_key(b"k")))).is_err());
}
