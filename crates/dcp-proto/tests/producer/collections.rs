//! What passes a filter, and how a client learns of what does not.

use dcp_proto::producer::Item;
use dcp_wire::message::{OpenFlags, StreamRequest, StreamRequestFlags, SystemEventId};
use dcp_wire::{Seqno, Status};

use crate::client::{COLLECTIONS, Client, LEGACY, describe, frame, from_scratch, resume};
use crate::storage::{Bucket, VBucket, begin, doc, docs, end, event};

const MEAT: u32 = 8;
const FRUIT: u32 = 9;
const VEGETABLE: u32 = 0xa;
const DAIRY: u32 = 0xc;
const SHOP: u32 = 8;

fn filtered(value: &str, request: StreamRequest<'_>, vbucket: VBucket) -> (Client, Vec<String>) {
    let mut bucket = Bucket::with(vbucket);
    bucket.scopes.insert(SHOP, Vec::new());
    let mut client = Client::open(bucket, COLLECTIONS);
    let request = StreamRequest { value: value.as_bytes(), ..request };
    assert_eq!(client.request(&request), Status::SUCCESS);
    let messages = client.receive();
    (client, messages)
}

fn of(collection: u32) -> String {
    format!(r#"{{"collections":["{collection:x}"]}}"#)
}

fn in_memory(items: impl IntoIterator<Item = Item>) -> VBucket {
    VBucket::new().checkpoint(1, items)
}

fn on_disk(items: impl IntoIterator<Item = Item>) -> VBucket {
    VBucket::new().on_disk(items)
}

fn in_shop(mut event: Item) -> Item {
    if let dcp_proto::producer::ItemKind::SystemEvent { scope_id, .. } = &mut event.kind {
        *scope_id = dcp_wire::ScopeId(SHOP);
    }
    event
}

#[test]
fn co_01_a_filtered_snapshot_from_memory_ends_with_the_last_item_that_passes() {
    let items = [
        begin(1, MEAT),
        begin(2, DAIRY),
        doc(3, MEAT),
        doc(4, DAIRY),
        doc(5, MEAT),
        doc(6, DAIRY),
        doc(7, MEAT),
    ];
    let (_, messages) = filtered(&of(DAIRY), from_scratch(), in_memory(items));
    assert_eq!(messages, ["MARK [0-6] 0x5", "SYS 2", "MUT 4", "MUT 6"]);
}

#[test]
fn co_02_and_co_11_a_filtered_snapshot_from_disk_keeps_its_end() {
    let items = [begin(1, MEAT), begin(2, DAIRY), doc(3, DAIRY), doc(4, MEAT), doc(5, MEAT)];
    let (_, messages) = filtered(&of(DAIRY), from_scratch(), on_disk(items));
    assert_eq!(messages, ["MARK [0-5] 0x6", "SYS 2", "MUT 3", "ADV 5"]);
}

#[test]
fn co_08_and_co_10_only_the_disk_tells_of_items_of_others() {
    let items = || [begin(1, MEAT), begin(2, DAIRY), doc(3, MEAT), doc(4, MEAT)];
    let (_, messages) = filtered(&of(DAIRY), from_scratch(), in_memory(items()));
    assert_eq!(messages, ["MARK [0-2] 0x5", "SYS 2"]);
    let (_, messages) = filtered(&of(DAIRY), from_scratch(), on_disk(items()));
    assert_eq!(messages, ["MARK [0-4] 0x6", "SYS 2", "ADV 4"]);
}

#[test]
fn co_13_a_filtered_stream_goes_on_from_disk_to_memory() {
    let vbucket = on_disk([begin(1, MEAT), begin(2, DAIRY), doc(3, MEAT), doc(4, DAIRY)])
        .checkpoint(5, [doc(5, DAIRY), doc(6, MEAT), doc(7, DAIRY)]);
    let (_, messages) = filtered(&of(MEAT), from_scratch(), vbucket);
    assert_eq!(messages[..4], ["MARK [0-4] 0x6", "SYS 1", "MUT 3", "ADV 4"]);
    assert_eq!(messages[5..], ["MUT 6"]);
    // The checkpoint begins after the last marker's end, so its own start may be announced.
    assert_eq!(messages[4], "MARK [5-6] 0x5");
}

#[test]
fn co_03_a_scope_filter_carries_the_scopes_events_and_documents() {
    let items = [
        event(1, SystemEventId::CREATE_SCOPE, SHOP, 0),
        in_shop(begin(2, DAIRY)),
        begin(3, MEAT),
        doc(4, DAIRY),
        doc(5, MEAT),
        doc(6, DAIRY),
    ];
    let (_, messages) = filtered(r#"{"scope":"8"}"#, from_scratch(), in_memory(items));
    assert_eq!(messages, ["MARK [0-6] 0x5", "SYS 1", "SYS 2", "MUT 4", "MUT 6"]);
}

#[test]
fn co_04_to_co_06_a_scope_filter_grows_and_shrinks() {
    let vbucket = in_memory([event(1, SystemEventId::CREATE_SCOPE, SHOP, 0)]);
    let (mut client, messages) = filtered(r#"{"scope":"8"}"#, from_scratch(), vbucket);
    assert_eq!(messages, ["MARK [0-1] 0x5", "SYS 1"]);
    client.write([in_shop(begin(2, DAIRY)), doc(3, DAIRY)]);
    assert_eq!(client.receive(), ["MARK [2-3] 0x1", "SYS 2", "MUT 3"]);
    client.write([in_shop(begin(4, VEGETABLE)), doc(5, VEGETABLE), doc(6, MEAT)]);
    assert_eq!(client.receive(), ["MARK [4-5] 0x1", "SYS 4", "MUT 5"]);
    client.write([in_shop(end(7, DAIRY))]);
    assert_eq!(client.receive(), ["MARK [7-7] 0x1", "SYS 7"]);
    client.write([doc(8, DAIRY), doc(9, MEAT)]);
    assert!(client.receive().is_empty());
}

#[test]
fn se_22_the_drop_of_a_filters_last_collection_is_told_and_ends_the_stream() {
    let (mut client, messages) =
        filtered(&of(FRUIT), from_scratch(), in_memory([begin(1, FRUIT), begin(2, MEAT)]));
    assert_eq!(messages, ["MARK [0-1] 0x5", "SYS 1"]);
    client.write([end(3, FRUIT), doc(4, MEAT)]);
    assert_eq!(client.receive(), ["MARK [3-3] 0x1", "SYS 3", "END 7"]);
    assert_eq!(client.connection.stream_count(), 0);
}

#[test]
fn the_drop_of_one_of_two_collections_does_not_end_the_stream() {
    let vbucket = in_memory([begin(1, FRUIT), begin(2, MEAT)]);
    let (mut client, _) = filtered(r#"{"collections":["8","9"]}"#, from_scratch(), vbucket);
    client.write([end(3, FRUIT)]);
    assert_eq!(client.receive(), ["MARK [3-3] 0x1", "SYS 3"]);
    client.write([doc(4, MEAT)]);
    assert_eq!(client.receive(), ["MARK [4-4] 0x1", "MUT 4"]);
}

#[test]
fn se_23_the_drop_of_a_filters_scope_ends_the_stream_after_the_events() {
    let vbucket = in_memory([
        event(1, SystemEventId::CREATE_SCOPE, SHOP, 0),
        in_shop(begin(2, DAIRY)),
        in_shop(end(3, DAIRY)),
        event(4, SystemEventId::DROP_SCOPE, SHOP, 0),
        doc(5, 0),
    ]);
    let (_, messages) = filtered(r#"{"scope":"8"}"#, from_scratch(), vbucket);
    assert_eq!(messages, ["MARK [0-4] 0x5", "SYS 1", "SYS 2", "SYS 3", "SYS 4", "END 7"]);
}

#[test]
fn se_25_a_legacy_stream_ends_as_if_finished_when_the_default_collection_is_dropped() {
    let mut client = Client::open(Bucket::with(in_memory(docs(1..=2))), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-2] 0x5", "MUT 1", "MUT 2"]);
    client.write([end(3, 0)]);
    assert_eq!(client.receive(), ["END 0"]);
}

#[test]
fn co_33_nothing_comes_from_disk_once_the_default_collection_is_dropped() {
    let mut client = Client::open(Bucket::with(in_memory([doc(1, 0)])), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    *client.bucket.vb() = on_disk([end(2, 0)]);
    assert_eq!(client.receive(), ["END 0"]);
}

#[test]
fn co_15_and_co_16_a_client_inside_a_snapshot_is_told_its_end_if_the_rest_is_not_its_own() {
    let items = || {
        [
            begin(1, VEGETABLE),
            begin(2, MEAT),
            doc(3, VEGETABLE),
            doc(4, VEGETABLE),
            doc(5, MEAT),
            doc(6, MEAT),
        ]
    };
    for snapshot in [(1, 6), (1, 5)] {
        for (vbucket, flags) in [(in_memory(items()), "0x5"), (on_disk(items()), "0x6")] {
            let (_, messages) = filtered(&of(VEGETABLE), resume(4, snapshot), vbucket);
            assert_eq!(messages, [format!("MARK [1-6] {flags}"), "ADV 6".to_owned()]);
        }
    }
}

#[test]
fn the_end_of_the_clients_snapshot_is_waited_for() {
    let items =
        [begin(1, VEGETABLE), begin(2, MEAT), doc(3, VEGETABLE), doc(4, VEGETABLE), doc(5, MEAT)];
    let mut vbucket = in_memory(items);
    vbucket.high = 6;
    let (mut client, messages) = filtered(&of(VEGETABLE), resume(4, (1, 6)), vbucket);
    assert!(messages.is_empty(), "6 may still be the client's");
    client.write([doc(6, MEAT)]);
    assert_eq!(client.receive(), ["MARK [1-6] 0x5", "ADV 6"]);
}

#[test]
fn co_18_items_of_others_cost_a_client_that_is_up_to_date_nothing() {
    let vbucket = in_memory([begin(1, DAIRY), begin(2, MEAT)]);
    let (mut client, messages) = filtered(&of(DAIRY), from_scratch(), vbucket);
    assert_eq!(messages, ["MARK [0-1] 0x5", "SYS 1"]);
    client.write([doc(3, MEAT), doc(4, MEAT)]);
    assert!(client.receive().is_empty());
}

#[test]
fn co_26_a_filtered_resume_starts_its_first_marker_where_the_client_is() {
    let items = [begin(1, FRUIT), begin(2, MEAT), doc(6, FRUIT), doc(7, FRUIT)];
    let vbucket = on_disk(items).checkpoint(8, [doc(8, FRUIT)]);
    let (_, messages) = filtered(&of(FRUIT), resume(6, (6, 6)), vbucket);
    assert_eq!(messages, ["MARK [6-7] 0x6", "MUT 7", "MARK [8-8] 0x5", "MUT 8"]);
}

#[test]
fn co_27_a_disk_snapshot_without_anything_of_the_filter_is_not_announced() {
    let items = [begin(1, MEAT), begin(2, FRUIT), doc(6, MEAT), doc(7, 0), doc(9, 0)];
    let value = r#"{"collections":["8","9"]}"#;
    let (mut client, messages) = filtered(value, resume(6, (6, 6)), on_disk(items));
    assert!(messages.is_empty());
    client.write([doc(10, MEAT)]);
    assert_eq!(client.receive(), ["MARK [6-10] 0x5", "MUT 10"]);
}

#[test]
fn co_30_a_legacy_disk_snapshot_ends_with_the_last_document_of_the_default_collection() {
    let items = docs(1..=5).into_iter().chain([begin(6, FRUIT), doc(8, FRUIT), doc(9, FRUIT)]);
    let mut client = Client::open(Bucket::with(on_disk(items)), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-5] 0x6", "MUT 1", "MUT 2", "MUT 3", "MUT 4", "MUT 5"]);
}

#[test]
fn co_31_latest_for_a_legacy_stream_is_the_default_collections() {
    let bucket = Bucket::with(on_disk([begin(1, FRUIT), doc(2, 0), doc(3, FRUIT)]));
    let mut client = Client::open(bucket, LEGACY);
    let request = StreamRequest { flags: StreamRequestFlags::TO_LATEST, ..from_scratch() };
    assert_eq!(client.request(&request), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-2] 0x6", "MUT 2", "END 0"]);
}

#[test]
fn co_32_a_disk_without_default_documents_is_not_announced_to_a_legacy_stream() {
    let vbucket =
        on_disk([begin(1, FRUIT), doc(2, FRUIT), doc(3, FRUIT)]).checkpoint(4, docs(4..=4));
    let mut client = Client::open(Bucket::with(vbucket), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    assert_eq!(client.receive(), ["MARK [0-4] 0x5", "MUT 4"]);
}

#[test]
fn co_34_latest_for_a_filter_is_its_collections_but_the_disk_snapshot_is_whole() {
    let items = [begin(1, MEAT), begin(2, FRUIT), doc(3, FRUIT), doc(4, MEAT)];
    let request = StreamRequest { flags: StreamRequestFlags::TO_LATEST, ..from_scratch() };
    let (_, messages) = filtered(&of(FRUIT), request, on_disk(items));
    assert_eq!(messages, ["MARK [0-4] 0x6", "SYS 2", "MUT 3", "ADV 4", "END 0"]);
}

#[test]
fn co_37_a_legacy_stream_carries_the_default_collection_and_no_events() {
    let items =
        [begin(1, MEAT), doc(2, MEAT), doc(3, DAIRY), doc(4, 0), doc(5, DAIRY), doc(6, MEAT)];
    let mut client = Client::open(Bucket::with(in_memory(items)), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let packets = client.receive_packets();
    let texts: Vec<_> = packets.iter().map(|packet| describe(packet)).collect();
    assert_eq!(texts, ["MARK [0-4] 0x5", "MUT 4"]);
    assert_eq!(frame(&packets[1]).key, b"k4", "keys have no collection id");
}

#[test]
fn keys_carry_their_collection_id_where_collections_were_negotiated() {
    let items = [begin(1, 0x555), doc(2, 0), doc(3, 0x555)];
    let mut client = Client::open(Bucket::with(in_memory(items)), COLLECTIONS);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let packets = client.receive_packets();
    assert_eq!(frame(&packets[1]).key, b"event1", "events are about names");
    assert_eq!(frame(&packets[2]).key, b"\x00k2");
    assert_eq!(frame(&packets[3]).key, b"\xd5\x0ak3");
}

#[test]
fn co_36_two_streams_of_a_vbucket_each_carry_their_own() {
    let items = [begin(1, FRUIT), begin(2, DAIRY), doc(3, FRUIT), doc(4, DAIRY)];
    let controls = [("enable_noop", "true"), ("enable_stream_id", "true")];
    let mut client = Client::open_with(
        Bucket::with(in_memory(items)),
        COLLECTIONS,
        OpenFlags::PRODUCER,
        &controls,
    );
    for value in [r#"{"sid":101,"collections":["9"]}"#, r#"{"sid":2018,"collections":["c"]}"#] {
        let request = StreamRequest { value: value.as_bytes(), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    let messages = client.receive();
    let of_stream = |id: &str| -> Vec<&str> {
        messages.iter().filter_map(|text| text.strip_suffix(id)).collect()
    };
    assert_eq!(of_stream(" sid 101"), ["MARK [0-3] 0x5", "SYS 1", "MUT 3"]);
    assert_eq!(of_stream(" sid 2018"), ["MARK [0-4] 0x5", "SYS 2", "MUT 4"]);
}

#[test]
fn co_49_a_modified_collection_is_only_a_seqno() {
    let modify = |seqno| event(seqno, SystemEventId::MODIFY_COLLECTION, 0, FRUIT);
    let (mut client, messages) =
        filtered("", from_scratch(), in_memory([begin(1, FRUIT), modify(2)]));
    assert_eq!(messages, ["MARK [0-2] 0x5", "SYS 1", "ADV 2"]);
    client.write([modify(3)]);
    assert_eq!(client.receive(), ["MARK [3-3] 0x1", "ADV 3"], "nothing else is in the snapshot");
    client.write([doc(4, FRUIT), modify(5), doc(6, FRUIT)]);
    assert_eq!(client.receive(), ["MARK [4-6] 0x1", "MUT 4", "MUT 6"]);
}

#[test]
fn sr_38_a_filter_that_names_nothing_ends_at_once() {
    let value = r#"{"collections":[]}"#;
    let (_, messages) = filtered(value, from_scratch(), VBucket::new());
    assert_eq!(messages, ["END 7"]);
    let (_, messages) = filtered(value, from_scratch(), in_memory(docs(1..=3)));
    assert_eq!(messages, ["END 7"]);
    // As a real server answers it from disk.
    let (_, messages) = filtered(value, from_scratch(), on_disk(docs(1..=13)));
    assert_eq!(messages, ["MARK [0-13] 0x6", "ADV 13", "END 7"]);
}

#[test]
fn se_05_a_filtered_stream_ends_when_its_end_is_passed_without_an_item() {
    let mut vbucket = in_memory((1..=5).map(|seqno| doc(seqno, MEAT)));
    vbucket = vbucket.with_collection(FRUIT, 0);
    let request = StreamRequest { end_seqno: Seqno(5), ..from_scratch() };
    let (_, messages) = filtered(&of(FRUIT), request, vbucket);
    assert_eq!(messages, ["END 0"]);
}

#[test]
fn rb_33_a_snapshot_end_the_vbucket_never_reached_is_forgotten() {
    let (mut client, messages) =
        filtered(&of(0), resume(1, (1, 2)), in_memory([doc(1, 0)]).with_collection(MEAT, 0));
    assert!(messages.is_empty());
    client.write([doc(2, MEAT)]);
    assert!(client.receive().is_empty(), "the client waits for no end");
}

#[test]
fn a_stream_that_only_reads_lets_others_have_a_turn() {
    let foreign = (2..=10_001).map(|seqno| doc(seqno, MEAT));
    let items = [begin(1, FRUIT)].into_iter().chain(foreign).chain([doc(10_002, FRUIT)]);
    let mut client = Client::open(Bucket::with(on_disk(items)), COLLECTIONS);
    client.bucket.vbuckets.insert(1, in_memory(docs(1..=1)));
    let value = of(FRUIT);
    let filtered = StreamRequest { value: value.as_bytes(), ..from_scratch() };
    assert_eq!(client.request(&filtered), Status::SUCCESS);
    let other = StreamRequest { vbid: dcp_wire::Vbid(1), ..from_scratch() };
    assert_eq!(client.request(&other), Status::SUCCESS);
    assert_eq!(
        client.receive(),
        ["MARK [0-10002] 0x6", "SYS 1", "MARK [0-1] 0x5", "MUT 1", "MUT 10002"]
    );
}
