//! How keys carry their collections, and whose turn it is while a filter only reads.

use dcp_wire::Status;
use dcp_wire::message::StreamRequest;

use crate::client::{COLLECTIONS, Client, LEGACY, describe, frame, from_scratch};
use dcp_test::bucket::{Bucket, VBucket, begin, doc, docs};

const MEAT: u32 = 8;
const FRUIT: u32 = 9;
const DAIRY: u32 = 0xc;

#[test]
fn keys_have_no_collection_id_where_collections_were_not_negotiated() {
    let items =
        [begin(1, MEAT), doc(2, MEAT), doc(3, DAIRY), doc(4, 0), doc(5, DAIRY), doc(6, MEAT)];
    let mut client = Client::open(Bucket::with(VBucket::new().checkpoint(1, items)), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let packets = client.receive_packets();
    let texts: Vec<_> = packets.iter().map(|packet| describe(packet)).collect();
    assert_eq!(texts, ["MARK [0-4] 0x5", "MUT 4"]);
    assert_eq!(frame(&packets[1]).key, b"k4", "keys have no collection id");
}

#[test]
fn keys_carry_their_collection_id_where_collections_were_negotiated() {
    let items = [begin(1, 0x555), doc(2, 0), doc(3, 0x555)];
    let mut client = Client::open(Bucket::with(VBucket::new().checkpoint(1, items)), COLLECTIONS);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let packets = client.receive_packets();
    assert_eq!(frame(&packets[1]).key, b"event1", "events are about names");
    assert_eq!(frame(&packets[2]).key, b"\x00k2");
    assert_eq!(frame(&packets[3]).key, b"\xd5\x0ak3");
}

#[test]
fn stream_that_reads_a_few_items_of_others_keeps_its_turn() {
    let foreign = (2..=100).map(|seqno| doc(seqno, MEAT));
    let items = [begin(1, FRUIT)].into_iter().chain(foreign).chain([doc(101, FRUIT)]);
    let mut client = Client::open(Bucket::with(VBucket::new().on_disk(items)), COLLECTIONS);
    client.bucket.vbuckets.insert(1, VBucket::new().checkpoint(1, docs(1..=1)));
    let value = br#"{"collections":["9"]}"#;
    let filtered = StreamRequest { value, ..from_scratch() };
    assert_eq!(client.request(&filtered), Status::SUCCESS);
    let other = StreamRequest { vbid: dcp_wire::Vbid(1), ..from_scratch() };
    assert_eq!(client.request(&other), Status::SUCCESS);
    assert_eq!(
        client.receive(),
        ["MARK [0-101] 0x6", "SYS 1", "MUT 101", "MARK [0-1] 0x5", "MUT 1"]
    );
}

#[test]
fn stream_that_only_reads_lets_others_have_a_turn() {
    let foreign = (2..=10_001).map(|seqno| doc(seqno, MEAT));
    let items = [begin(1, FRUIT)].into_iter().chain(foreign).chain([doc(10_002, FRUIT)]);
    let mut client = Client::open(Bucket::with(VBucket::new().on_disk(items)), COLLECTIONS);
    client.bucket.vbuckets.insert(1, VBucket::new().checkpoint(1, docs(1..=1)));
    let value = br#"{"collections":["9"]}"#;
    let filtered = StreamRequest { value, ..from_scratch() };
    assert_eq!(client.request(&filtered), Status::SUCCESS);
    let other = StreamRequest { vbid: dcp_wire::Vbid(1), ..from_scratch() };
    assert_eq!(client.request(&other), Status::SUCCESS);
    assert_eq!(
        client.receive(),
        ["MARK [0-10002] 0x6", "SYS 1", "MARK [0-1] 0x5", "MUT 1", "MUT 10002"]
    );
}
