//! What of a document is sent, by what the connection asked for.

use bytes::Bytes;
use dcp_producer_proto::{Connection, ConnectionConfig, Features, Item, ItemKind, ServerVersion};
use dcp_wire::message::OpenFlags;
use dcp_wire::{Cas, Datatype, Opcode, Seqno, Status, snappy, xattr};

use crate::client::{Client, LEGACY, frame, from_scratch};
use dcp_test::bucket::{Bucket, VBucket, doc};

const PLAIN: OpenFlags = OpenFlags::PRODUCER;
const XATTRS: OpenFlags = OpenFlags::PRODUCER.union(OpenFlags::INCLUDE_XATTRS);
const SNAPPY: Features = Features { snappy: true, ..LEGACY };
const JSON_XATTR: Datatype = Datatype(5);

fn section(xattrs: &[(&'static str, &'static str)]) -> Vec<u8> {
    let mut section = Vec::new();
    let xattrs = xattrs
        .iter()
        .map(|(name, value)| xattr::Xattr { name: name.as_bytes(), value: value.as_bytes() });
    xattr::encode(xattrs, &mut section).unwrap();
    section
}

fn both() -> Vec<u8> {
    section(&[("_sync", r#"{"rev":1}"#), ("meta", r#"{"u":1}"#)])
}

fn system_only() -> Vec<u8> {
    section(&[("_sync", r#"{"rev":1}"#)])
}

/// A document with a system and a user xattr and the body `{"a":1}`.
fn document() -> Item {
    let mut value = both();
    value.extend_from_slice(br#"{"a":1}"#);
    Item { value: Bytes::from(value), datatype: JSON_XATTR, ..doc(1, 0) }
}

fn tombstone(kind: ItemKind) -> Item {
    Item {
        kind,
        value: Bytes::from(both()),
        datatype: Datatype::XATTR,
        delete_time: 1_700_000_000,
        ..doc(1, 0)
    }
}

fn compressed(item: Item) -> Item {
    let value = snappy::compress(&item.value).unwrap();
    Item { value: value.into(), datatype: item.datatype.with(Datatype::SNAPPY), ..item }
}

fn raw(value: &'static str) -> Item {
    Item { value: Bytes::from_static(value.as_bytes()), datatype: Datatype::RAW, ..doc(1, 0) }
}

/// The packet of `item` on a connection opened like this.
fn sent_with(
    item: Item,
    features: Features,
    flags: OpenFlags,
    controls: &[(&str, &str)],
) -> Vec<u8> {
    let bucket = Bucket::with(VBucket::new().checkpoint(1, [item]));
    let mut client = Client::open_with(bucket, features, flags, &[("enable_noop", "true")]);
    for (key, value) in controls {
        assert_eq!(client.control(key, value), Status::SUCCESS);
    }
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let mut packets = client.receive_packets();
    assert_eq!(packets.len(), 2, "a marker and the item");
    packets.remove(1)
}

fn sent(item: Item, flags: OpenFlags) -> (Datatype, Vec<u8>) {
    value_of(&sent_with(item, LEGACY, flags, &[]))
}

fn value_of(packet: &[u8]) -> (Datatype, Vec<u8>) {
    let frame = frame(packet);
    (frame.header.datatype, frame.value.to_vec())
}

#[test]
fn va_01_a_key_only_document_has_no_value() {
    let packet = sent_with(document(), LEGACY, PLAIN | OpenFlags::NO_VALUE, &[]);
    assert_eq!(packet.len(), 55 + "k1".len());
    assert_eq!(value_of(&packet), (Datatype::RAW, vec![]));
}

#[test]
fn keys_alone_are_read_from_disk_without_values() {
    let written = Item { flags: 7, expiry: 8, ..doc(1, 0) };
    let removed = Item { seqno: Seqno(2), ..tombstone(ItemKind::Deletion) };
    let older = ServerVersion { major: 6, minor: 0, patch: 5 };
    for (server_version, opcodes, cas, datatype) in [
        // Nobody reads there that a document was removed.
        (ServerVersion::NEWEST, [Opcode::DCP_MUTATION; 2], Cas(0), Datatype::RAW),
        (older, [Opcode::DCP_MUTATION, Opcode::DCP_DELETION], written.cas, Datatype::JSON),
    ] {
        let disk = [written.clone(), removed.clone()];
        let mut client = Client::new(Bucket::with(VBucket::new().on_disk(disk)), LEGACY);
        let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
        client.connection = Connection::new(config);
        assert_eq!(client.send_open(PLAIN | OpenFlags::NO_VALUE), Status::SUCCESS);
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        let packets = client.receive_packets();
        let sent: Vec<_> = packets[1..].iter().map(|packet| frame(packet)).collect();
        assert_eq!([sent[0].header.opcode, sent[1].header.opcode], opcodes, "{server_version:?}");
        assert_eq!((sent[0].header.cas, sent[0].header.datatype), (cas, datatype));
        assert!(sent.iter().all(|packet| packet.value.is_empty()));
    }
}

#[test]
fn va_04_xattrs_nobody_asked_for_are_left_out() {
    assert_eq!(sent(document(), PLAIN), (Datatype::JSON, br#"{"a":1}"#.to_vec()));
    let whole = document().value.to_vec();
    assert_eq!(sent(document(), XATTRS), (JSON_XATTR, whole));
}

#[test]
fn va_06_and_va_07_the_datatype_of_a_value_that_is_left_out_can_be_kept() {
    let named = OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE;
    assert_eq!(sent(document(), XATTRS | named), (JSON_XATTR, both()));
    assert_eq!(sent(document(), PLAIN | named), (JSON_XATTR, vec![]));
    assert_eq!(sent(doc(1, 0), XATTRS | named), (Datatype::JSON, vec![]));
    // The bit says snappy, the bytes are not: a trap the server sets as well.
    let value = sent(compressed(document()), XATTRS | named);
    assert_eq!(value, (JSON_XATTR.with(Datatype::SNAPPY), both()));
}

#[test]
fn key_only_with_xattrs_keeps_the_xattrs() {
    assert_eq!(sent(document(), XATTRS | OpenFlags::NO_VALUE), (Datatype::XATTR, both()));
    assert_eq!(sent(doc(1, 0), XATTRS | OpenFlags::NO_VALUE), (Datatype::RAW, vec![]));
}

#[test]
fn va_08_and_va_09_compressed_values_go_to_those_who_read_them() {
    let item = || compressed(raw("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
    let inflated = (Datatype::RAW, b"a".repeat(40));
    assert_eq!(sent(item(), PLAIN), inflated);
    let stored = (Datatype::SNAPPY, item().value.to_vec());
    assert_eq!(value_of(&sent_with(item(), SNAPPY, PLAIN, &[])), stored);
    // Xattrs can only be taken out of the plain value.
    let stripped = value_of(&sent_with(compressed(document()), SNAPPY, PLAIN, &[]));
    assert_eq!(stripped, (Datatype::JSON, br#"{"a":1}"#.to_vec()));
}

#[test]
fn va_10_forced_compression_compresses_what_gets_smaller() {
    let force = [("force_value_compression", "true")];
    let long = raw("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
    let (datatype, value) = value_of(&sent_with(long.clone(), SNAPPY, PLAIN, &force));
    assert_eq!(datatype, Datatype::SNAPPY);
    assert_eq!(snappy::decompress(&value, 1000).unwrap(), long.value);
    let short = value_of(&sent_with(raw("ab"), SNAPPY, PLAIN, &force));
    assert_eq!(short, (Datatype::RAW, b"ab".to_vec()));
    let unforced = value_of(&sent_with(long.clone(), SNAPPY, PLAIN, &[]));
    assert_eq!(unforced, (Datatype::RAW, long.value.to_vec()));
}

#[test]
fn va_12_a_deletion_keeps_system_xattrs_and_on_demand_the_users() {
    let deletion = || tombstone(ItemKind::Deletion);
    assert_eq!(sent(deletion(), XATTRS), (Datatype::XATTR, system_only()));
    assert_eq!(sent(compressed(deletion()), XATTRS), (Datatype::XATTR, system_only()));
    let with_user = XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS;
    assert_eq!(sent(deletion(), with_user), (Datatype::XATTR, both()));
    assert_eq!(sent(deletion(), PLAIN), (Datatype::RAW, vec![]));
    assert_eq!(sent(deletion(), PLAIN | OpenFlags::NO_VALUE), (Datatype::RAW, vec![]));
}

#[test]
fn va_14_and_va_15_an_expiration_keeps_system_xattrs_only() {
    let flags = XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS | OpenFlags::INCLUDE_DELETE_TIMES;
    let controls = [("enable_expiry_opcode", "true")];
    let expired = tombstone(ItemKind::Expiration);
    let packet = sent_with(expired, LEGACY, flags, &controls);
    assert_eq!(frame(&packet).header.opcode, Opcode::DCP_EXPIRATION);
    assert_eq!(value_of(&packet), (Datatype::XATTR, system_only()));
    let user_only =
        Item { value: Bytes::from(section(&[("meta", "1")])), ..tombstone(ItemKind::Expiration) };
    let packet = sent_with(user_only, LEGACY, flags, &controls);
    assert_eq!(value_of(&packet), (Datatype::RAW, vec![]));
}

#[test]
fn tombstone_layout_follows_the_open_flags() {
    let times = PLAIN | OpenFlags::INCLUDE_DELETE_TIMES;
    let expiry = [("enable_expiry_opcode", "true")];
    for (kind, flags, controls, opcode, len) in [
        (ItemKind::Deletion, PLAIN, &[][..], Opcode::DCP_DELETION, 42),
        (ItemKind::Deletion, times, &[], Opcode::DCP_DELETION, 45),
        (ItemKind::Expiration, PLAIN, &[], Opcode::DCP_DELETION, 42),
        (ItemKind::Expiration, times, &[], Opcode::DCP_DELETION, 45),
        (ItemKind::Expiration, times, &expiry, Opcode::DCP_EXPIRATION, 44),
        // CT-14: without delete times the control is accepted and does nothing.
        (ItemKind::Expiration, PLAIN, &expiry, Opcode::DCP_DELETION, 42),
    ] {
        let packet = sent_with(tombstone(kind.clone()), LEGACY, flags, controls);
        let wanted = (opcode, len + "k1".len());
        assert_eq!((frame(&packet).header.opcode, packet.len()), wanted, "{kind:?} {flags:?}");
    }
}

#[test]
fn mutation_ends_with_a_frequency_for_those_who_requested_it() {
    for (controls, frequency) in [
        (&[][..], 2),
        (&[("supports_hifi_MFU", "true")], 4),
        (&[("supports_hifi_MFU", "false")], 2),
        (&[("supports_hifi_MFU", "true"), ("supports_hifi_MFU", "false")], 2),
    ] {
        let packet = sent_with(doc(1, 0), LEGACY, PLAIN, controls);
        assert_eq!(frame(&packet).extras.last(), Some(&frequency), "{controls:?}");
    }
}

#[test]
fn document_that_is_compressed_is_inflated_for_clients_without_snappy() {
    let item = || Item { value: Bytes::from(vec![0; 2 << 20]), ..raw("") };
    assert_eq!(sent(compressed(item()), PLAIN), (Datatype::RAW, item().value.to_vec()));
}

#[test]
fn value_that_is_stored_damaged_ends_the_stream() {
    let damaged =
        Item { value: Bytes::from_static(b"\xff\xff\xff\xff"), datatype: JSON_XATTR, ..doc(1, 0) };
    let bucket = Bucket::with(VBucket::new().checkpoint(1, [damaged]));
    let mut client = Client::open(bucket, LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-1] 0x5", "END 5"]);
}
