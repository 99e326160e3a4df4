//! Whatever the bytes: no panic, no packet out of nothing, nothing lost on the way.

use dcp_wire::describe::{Keys, describe};
use dcp_wire::framing_extras::FrameInfos;
use dcp_wire::message::*;
use dcp_wire::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Opcodes with a layout, and some without.
fn opcode() -> impl Strategy<Value = u8> {
    prop_oneof![
        4 => proptest::sample::select(Opcode::KNOWN).prop_map(|opcode| opcode.0),
        1 => any::<u8>(),
    ]
}

/// A packet whose lengths add up and whose parts have lengths that layouts have.
fn packet() -> impl Strategy<Value = Vec<u8>> {
    let magic = proptest::sample::select(Magic::KNOWN);
    let extras = proptest::sample::select(vec![
        0usize, 1, 4, 5, 8, 12, 13, 16, 18, 20, 21, 24, 26, 28, 30, 31, 48, 9,
    ]);
    let extras =
        extras.prop_flat_map(|len| vec(prop_oneof![2 => Just(0u8), 1 => any::<u8>()], len));
    let framing = prop_oneof![Just(vec![]), Just(vec![0x22, 0, 7]), vec(any::<u8>(), 0..8)];
    let value = prop_oneof![
        vec(any::<u8>(), 0..64),
        proptest::sample::select(vec![8usize, 16, 27, 36, 43, 44, 52]).prop_map(|len| vec![0; len]),
    ];
    let status = prop_oneof![Just(0u16), Just(0x21), Just(0x23), Just(0xcc), any::<u16>()];
    let key = vec(any::<u8>(), 0..12);
    (magic, opcode(), framing, extras, key, value, 0u8..8, status, any::<[u8; 12]>()).prop_map(
        |(magic, opcode, framing, extras, key, value, datatype, status, tail)| {
            let framing = if magic.is_alt() { framing } else { vec![] };
            let body = framing.len() + extras.len() + key.len() + value.len();
            let mut out = vec![magic.0, opcode];
            let key_len = u8::try_from(key.len()).unwrap();
            out.push(u8::try_from(framing.len()).unwrap());
            out.push(key_len);
            out.push(u8::try_from(extras.len()).unwrap());
            out.push(datatype);
            out.extend_from_slice(&status.to_be_bytes());
            out.extend_from_slice(&u32::try_from(body).unwrap().to_be_bytes());
            out.extend_from_slice(&tail);
            out.extend([framing, extras, key, value].concat());
            out
        },
    )
}

/// A mutation, nearly always a well-formed one.
fn mutation_packet() -> impl Strategy<Value = Vec<u8>> {
    let key = prop_oneof![
        4 => vec(prop_oneof![2 => Just(0u8), 1 => Just(9), 1 => any::<u8>()], 0..12),
        1 => vec(1u8..9, 245..253),
    ];
    let numbers = (prop_oneof![1 => Just(0u64), 9 => any::<u64>()], any::<u64>(), any::<u32>());
    (numbers, key, vec(any::<u8>(), 0..40), any::<u8>(), any::<u32>()).prop_map(
        |((seqno, number, small), key, value, byte, opaque)| {
            let mutation = Mutation {
                seqno: Seqno(seqno),
                rev_seqno: RevSeqno(number.rotate_left(8)),
                cas: Cas(number),
                datatype: Datatype(byte),
                flags: small,
                expiry: small.rotate_left(8),
                lock_time: 0,
                nru: byte,
                key: &key,
                value: &value,
            };
            let vbid = Vbid(u16::from(byte));
            let mut packet = Vec::new();
            let to = StreamAddress { vbid, opaque: Opaque(opaque), stream_id: None };
            mutation.encode(to, &mut packet).unwrap();
            packet
        },
    )
}

/// As many cases as `PROPTEST_CASES` says, or what takes a few seconds.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 4096 };
    ProptestConfig { cases, failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn decoders_survive_any_bytes(bytes in vec(any::<u8>(), 0..200), magic in any::<u8>()) {
        for limit in [0, 100, MAX_BODY_LEN] {
            if let Ok(Some((frame, used))) = Frame::parse(&bytes, limit) {
                prop_assert!(used <= bytes.len());
                let _ = describe(&frame, Keys::WithCollection).to_string();
            }
        }
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = Magic::KNOWN[usize::from(magic) % Magic::KNOWN.len()].0;
        }
        let _ = Frame::parse(&bytes, MAX_BODY_LEN).map(|parsed| {
            parsed.map(|(frame, _)| describe(&frame, Keys::Plain).to_string())
        });
        let _ = leb128::decode(&bytes);
        let _ = DocKey::decode(&bytes);
        let _ = FrameInfos::new(&bytes).count();
        let _ = snappy::decompress(&bytes, 1 << 16);
        let _ = xattr::split(&bytes).map(|(xattrs, _)| xattrs.count());
        let _ = sasl::PlainMessage::decode(&bytes);
        let _ = sasl::ScramServer::read(&bytes);
    }

    #[test]
    fn packet_that_decodes_encodes_to_bytes_that_decode_to_the_same(bytes in packet()) {
        let (frame, used) = Frame::parse(&bytes, MAX_BODY_LEN).unwrap().unwrap();
        prop_assert_eq!(used, bytes.len());
        for len in 0..bytes.len() {
            prop_assert_eq!(Frame::parse(&bytes[..len], MAX_BODY_LEN), Ok(None));
        }
        let described = describe(&frame, Keys::WithCollection);
        let mut names: Vec<_> = described.fields.iter().map(|field| field.name).collect();
        names.sort_unstable();
        prop_assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{described}");
        let Ok(message) = Message::decode(&frame) else { return Ok(()) };
        let mut again = Vec::new();
        message.encode(frame.envelope(), &mut again).unwrap();
        let marker = matches!(message, Message::Request(Request::SnapshotMarker(_)));
        if marker {
            // Two of its fields mean nothing in a memory snapshot and are not kept.
            let (again, _) = Frame::parse(&again, MAX_BODY_LEN).unwrap().unwrap();
            prop_assert_eq!(SnapshotMarker::decode(&again), SnapshotMarker::decode(&frame));
        } else {
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn mutation_view_exists_if_it_decodes_and_says_the_same(
        (mut packet, collections) in (mutation_packet(), any::<bool>()),
        damage in vec((any::<Index>(), any::<u8>()), 0..3),
        (cut, rest, max_body) in (0usize..4, vec(any::<u8>(), 0..3), 20usize..120),
    ) {
        for (at, byte) in damage {
            // Mostly where the lengths are.
            let at = at.index(if byte & 1 == 0 { packet.len() } else { 12 });
            packet[at] = byte;
        }
        packet.truncate(packet.len() - cut);
        if cut == 0 {
            packet.extend(rest);
        }
        let view = MutationView::parse(&packet, max_body, collections);
        let decoded = Frame::parse(&packet, max_body).ok().flatten().and_then(|(frame, used)| {
            let mutation = Mutation::decode(&frame).ok()?;
            let (collection_id, key) = if collections {
                let DocKey { collection_id, key } = DocKey::decode(mutation.key).ok()?;
                (collection_id, key)
            } else {
                (CollectionId::DEFAULT, mutation.key)
            };
            let fits = (1..=DocKey::MAX_DEFAULT_LEN).contains(&key.len());
            let usual = frame.header.magic == Magic::CLIENT_REQUEST && fits;
            usual.then_some((frame.header, mutation, collection_id, key, used))
        });
        prop_assert_eq!(view.is_some(), decoded.is_some());
        if let (Some((view, rest)), Some((header, mutation, collection_id, key, used))) =
            (view, decoded)
        {
            prop_assert_eq!((view.packet_len(), rest), (used, &packet[used..]));
            prop_assert_eq!((view.vbid(), view.opaque()), (header.vbid(), header.opaque));
            prop_assert_eq!((view.collection_id(), view.key()), (collection_id, key));
            prop_assert_eq!(view.value(), mutation.value);
            prop_assert_eq!(view.key_and_value(), [key, mutation.value].concat());
            let Mutation { seqno, rev_seqno, cas, datatype, flags, expiry, .. } = mutation;
            prop_assert_eq!((view.seqno(), view.rev_seqno(), view.cas()), (seqno, rev_seqno, cas));
            prop_assert_eq!((view.flags(), view.expiry()), (flags, expiry));
            prop_assert_eq!((view.datatype(), view.key_len()), (datatype, key.len()));
        }
    }

    #[test]
    fn snappy_values_come_back(value in vec(0u8..4, 0..4096)) {
        let block = snappy::compress(&value).unwrap();
        prop_assert_eq!(snappy::decompress(&block, value.len()), Ok(value.clone()));
        if let Some(limit) = value.len().checked_sub(1) {
            prop_assert!(snappy::decompress(&block, limit).is_err());
        }
    }

    #[test]
    fn xattrs_come_back(
        pairs in vec(("[a-z_]{1,9}", "[^\0]{0,20}"), 0..6),
        body in vec(any::<u8>(), 0..20),
    ) {
        let xattrs = pairs.iter().map(|(name, value)| xattr::Xattr {
            name: name.as_bytes(),
            value: value.as_bytes(),
        });
        let mut out = Vec::new();
        xattr::encode(xattrs.clone(), &mut out).unwrap();
        out.extend_from_slice(&body);
        let (decoded, rest) = xattr::split(&out).unwrap();
        prop_assert_eq!(rest, body);
        let decoded: Result<Vec<_>, _> = decoded.collect();
        prop_assert_eq!(decoded, Ok(xattrs.collect::<Vec<_>>()));
    }

    #[test]
    fn collection_ids_come_back(id in any::<u32>(), rest in vec(any::<u8>(), 0..4)) {
        let mut bytes = leb128::encode(id).as_slice().to_vec();
        bytes.extend_from_slice(&rest);
        prop_assert_eq!(leb128::decode(&bytes), Ok((id, rest.as_slice())));
        for len in 0..bytes.len() - rest.len() {
            prop_assert!(leb128::decode(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn scram_authenticates_any_user_with_their_password_and_no_other(
        username in "[a-z=,@.]{1,12}",
        password in "[ -~]{0,20}",
        other in "[ -~]{0,20}",
    ) {
        use sasl::{Mechanism, ScramClient, ScramCredentials, ScramServer};
        let mechanism = Mechanism::ScramSha256;
        let mut client = ScramClient::new(mechanism, &username, &password, "clientnonce").unwrap();
        let mut server = ScramServer::read(&client.first_message()).unwrap();
        prop_assert_eq!(server.username(), username.as_str());
        let rounds = sasl::MIN_ITERATIONS;
        let known = ScramCredentials::derive(mechanism, &other, b"salty-salt", rounds).unwrap();
        let challenge = server.challenge(known, "servernonce").unwrap();
        let proof = client.respond(&challenge).unwrap();
        match server.verify(&proof) {
            Ok(last) => {
                prop_assert_eq!(&password, &other);
                prop_assert_eq!(client.verify(&last), Ok(()));
            }
            Err(_) => prop_assert_ne!(&password, &other),
        }
    }
}
