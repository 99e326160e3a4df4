//! Every message, requests and responses.

use dcp_wire::describe::{Keys, describe};
use dcp_wire::message::{Message, Mutation, MutationView, Request, SnapshotMarker};
use dcp_wire::{CollectionId, Datatype, DocKey, Frame, MAX_BODY_LEN, Magic, Opcode, leb128};

use crate::bytes_in::BytesIn;

/// Whatever a packet: what decodes encodes to the same packet, what is described has a name of its
/// own, and the fast way of reading a mutation reads what the other one does.
pub fn messages(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    let how = bytes.u8();
    let packet = if how & 1 == 0 { bytes.rest().to_vec() } else { packet(&mut bytes) };
    for collections in [false, true] {
        check_view(&packet, collections);
    }
    let Ok(Some((frame, used))) = Frame::parse(&packet, MAX_BODY_LEN) else { return };
    let packet = &packet[..used];
    check_key(frame.key);
    let infos = frame.frame_infos().take_while(Result::is_ok).count();
    assert!(infos <= frame.framing_extras.len());
    if how & 2 != 0 {
        let described =
            describe(&frame, if how & 4 == 0 { Keys::Plain } else { Keys::WithCollection });
        let mut names: Vec<_> = described.fields.iter().map(|field| field.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{described}");
        assert!(!described.to_string().is_empty());
    }
    let Ok(message) = Message::decode(&frame) else { return };
    let mut again = Vec::with_capacity(packet.len());
    message.encode(frame.envelope(), &mut again).expect("it was a packet");
    if matches!(message, Message::Request(Request::SnapshotMarker(_))) {
        // Two of its fields mean nothing in a memory snapshot and are not kept.
        let (again, _) = Frame::parse(&again, MAX_BODY_LEN).expect("a packet").expect("whole");
        assert_eq!(SnapshotMarker::decode(&again), SnapshotMarker::decode(&frame));
    } else {
        assert_eq!(again, packet, "{message:?}");
    }
}

/// A packet whose lengths add up, made of what `bytes` say of its fields.
fn packet(bytes: &mut BytesIn<'_>) -> Vec<u8> {
    let magic = bytes.one_of(Magic::KNOWN);
    let opcode = match bytes.u8() {
        0xff => Opcode(bytes.u8()),
        known => Opcode::KNOWN[usize::from(known) % Opcode::KNOWN.len()],
    };
    let mut frame = Frame::request(opcode);
    frame.header.magic = magic;
    frame.header.datatype = Datatype(bytes.u8());
    frame.header.vbid_or_status = bytes.u16();
    let framing = if magic.is_alt() { bytes.part() } else { &[] };
    let (extras, key) = (bytes.part(), bytes.part());
    frame.framing_extras = framing;
    frame = frame.with_extras(extras).with_key(key).with_value(bytes.rest());
    let mut packet = Vec::new();
    frame.encode(&mut packet).expect("short parts");
    packet
}

fn check_key(key: &[u8]) {
    if let Ok((id, rest)) = leb128::decode(key) {
        let encoded = leb128::encode(id);
        let (front, back) = key.split_at(key.len() - rest.len());
        // Overlong numbers are read, and written as short as they can be.
        assert!(encoded.as_slice().len() <= front.len());
        assert_eq!(leb128::decode(encoded.as_slice()), Ok((id, &[][..])));
        assert_eq!(back, rest);
    }
    if let Ok(key) = DocKey::decode(key) {
        assert!(key.key.len() <= DocKey::MAX_DEFAULT_LEN);
    }
}

/// The view of a mutation is there if it decodes, and says the same.
fn check_view(packet: &[u8], collections: bool) {
    let view = MutationView::parse(packet, MAX_BODY_LEN, collections);
    let decoded = Frame::parse(packet, MAX_BODY_LEN).ok().flatten().and_then(|(frame, used)| {
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
    assert_eq!(view.is_some(), decoded.is_some());
    let (Some((view, rest)), Some((header, mutation, collection_id, key, used))) = (view, decoded)
    else {
        return;
    };
    assert_eq!((view.packet_len(), rest), (used, &packet[used..]));
    assert_eq!((view.vbid(), view.opaque()), (header.vbid(), header.opaque));
    assert_eq!((view.collection_id(), view.key()), (collection_id, key));
    assert_eq!(view.value(), mutation.value);
    let Mutation { seqno, rev_seqno, cas, datatype, flags, expiry, .. } = mutation;
    assert_eq!((view.seqno(), view.rev_seqno(), view.cas()), (seqno, rev_seqno, cas));
    assert_eq!((view.flags(), view.expiry(), view.datatype()), (flags, expiry, datatype));
}
