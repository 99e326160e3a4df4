//! Changes that a reader leaves out: excluded documents, what patterns do not choose, and rows.

use dcp_wire::message::{Mutation, SystemEvent, SystemEventId};
use dcp_wire::{CollectionId, ScopeId, Seqno};

use dcp_proto::consumer::{ConnectionConfig, Delivery, Event, Exclusions, StreamPosition};
use dcp_proto::topology::Manifest;
use dcp_proto::{CollectionPatterns, Op, Position, RowFilter};
use dcp_test::harness::{Harness, config, is_complete, position};

fn excluding() -> ConnectionConfig {
    let exclusions = Exclusions::default()
        .with_transactions()
        .with_system_scope(Some(ScopeId(8)), [CollectionId(9)]);
    let delivery = Delivery { exclusions, ..Delivery::default() };
    ConnectionConfig { collections: true, delivery, ..config() }
}

fn document(server: &mut Harness, seqno: u64, collection: u32, key: &[u8]) {
    let mut doc_key = dcp_wire::leb128::encode(collection).as_slice().to_vec();
    doc_key.extend_from_slice(key);
    let mutation = Mutation { seqno: Seqno(seqno), key: &doc_key, ..Default::default() };
    let to = server.to();
    mutation.encode(to, &mut server.wire).unwrap();
}

fn begin_collection(server: &mut Harness, seqno: u64, scope: u32, collection: u32) {
    let mut value = 3_u64.to_be_bytes().to_vec();
    value.extend_from_slice(&scope.to_be_bytes());
    value.extend_from_slice(&collection.to_be_bytes());
    let (seqno, id) = (Seqno(seqno), SystemEventId::BEGIN_COLLECTION);
    let event = SystemEvent { seqno, id, version: 0, key: b"made", value: &value };
    let to = server.to();
    event.encode(to, &mut server.wire).unwrap();
}

#[test]
fn hidden_documents_move_the_position_and_are_no_rows() {
    let mut server = Harness::streaming(excluding());
    server.marker(0, 9);
    document(&mut server, 1, 0, b"_txn:atr-1");
    document(&mut server, 2, 0, b"_txn");
    document(&mut server, 3, 9, b"k");
    document(&mut server, 4, 10, b"k");
    begin_collection(&mut server, 5, 8, 11);
    begin_collection(&mut server, 6, 0, 12);
    document(&mut server, 7, 11, b"k");
    document(&mut server, 8, 12, b"k");
    document(&mut server, 9, 12, b"_txn:client-record");
    let walk = server.play();
    assert_eq!(server.seqnos(), [2, 4, 5, 6, 8]);
    assert_eq!(walk.rows, 3, "rows are what the sink was given");
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.is_snapshot_complete()), (Seqno(9), true));
}

#[test]
fn collections_created_past_a_clamped_end_are_learned_too() {
    let mut config = excluding();
    config.delivery.clamp = true;
    let mut server = Harness::new(config);
    server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(5));
    server.accept(&[(1, 0)]);
    server.marker(0, 9);
    document(&mut server, 3, 0, b"k");
    begin_collection(&mut server, 6, 8, 11);
    server.play();
    assert_eq!(server.seqnos(), [3]);
    let learned = server.events().into_iter().find_map(|event| match event {
        Event::Exclusions(learned) => Some(learned),
        _ => None,
    });
    let mut server = Harness::streaming(excluding());
    server.machine.exclude(&learned.expect("it was learned"));
    server.marker(0, 9);
    document(&mut server, 1, 11, b"k");
    document(&mut server, 2, 12, b"k");
    server.play();
    assert_eq!(server.seqnos(), [2]);
}

#[test]
fn server_that_makes_ever_new_system_collections_takes_little_memory() {
    let mut server = Harness::streaming(excluding());
    let made = 100..100 + 1024;
    server.marker(0, 9999);
    for (seqno, id) in (1..).zip(made.clone()) {
        begin_collection(&mut server, seqno, 8, id);
    }
    server.play();
    let mut exclusions = excluding().delivery.exclusions;
    for event in server.events() {
        let Event::Exclusions(learned) = event else { panic!("{event:?}") };
        exclusions.merge(&learned);
    }
    let mut config = excluding();
    config.delivery.exclusions = exclusions;
    let mut server = Harness::streaming(config);
    server.marker(0, 9999);
    for (seqno, id) in (1..).zip(made.chain([9])) {
        document(&mut server, seqno, id, b"k");
    }
    server.play();
    assert_eq!(server.seqnos(), [1025], "the one learnt first made room");
}

#[test]
fn hidden_document_that_is_newest_completes_a_finite_stream() {
    let mut server = Harness::new(excluding());
    server.open_until(StreamPosition::new(position(1, (1, 1), &[(1, 0)])), Seqno(3));
    server.accept(&[(1, 0)]);
    server.marker(1, 3);
    document(&mut server, 3, 0, b"_txn:atr-1");
    server.play();
    assert!(server.seqnos().is_empty());
    assert!(server.events().iter().any(is_complete));
}

#[test]
fn system_scope_and_transactions_are_visible_by_default() {
    let mut server = Harness::streaming(ConnectionConfig { collections: true, ..config() });
    server.marker(0, 9);
    document(&mut server, 1, 0, b"_txn:atr-1");
    document(&mut server, 2, 9, b"k");
    server.play();
    assert_eq!(server.seqnos(), [1, 2]);
}

#[test]
fn row_filter_delivers_what_passes_and_the_rest_moves_the_position() {
    let rows = RowFilter::new(Some(vec!["a*".to_owned()]), Some(vec![Op::Mutation]), None).unwrap();
    let delivery = Delivery { rows, ..Delivery::default() };
    let mut server = Harness::streaming(ConnectionConfig { delivery, ..config() });
    server.marker(0, 9).say("MUT 1 a").say("MUT 2 b").say("DEL 3 a").say("EXP 4 a");
    let walk = server.say("MUT 5 ab").say("MUT 6 b").play();
    assert_eq!((server.seqnos(), walk.rows), (vec![1, 5], 2));
    assert_eq!(server.moved().unwrap().seqno, Seqno(6));
}

#[test]
fn collection_that_no_pattern_matches_is_no_row_and_no_event() {
    let manifest = Manifest::parse(
        br#"{"uid":"7","scopes":[{"name":"shop","uid":"8","collections":
            [{"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]}]}"#,
    );
    let patterns = CollectionPatterns::new(["shop.o*", "shop.m*"]).unwrap();
    let exclusions = Exclusions::default().with_patterns(&patterns, &manifest.unwrap());
    let delivery = Delivery { exclusions, ..Delivery::default() };
    let mut server =
        Harness::streaming(ConnectionConfig { collections: true, delivery, ..config() });
    server.marker(0, 9);
    document(&mut server, 1, 9, b"k");
    document(&mut server, 2, 10, b"k");
    // Its name is "made".
    begin_collection(&mut server, 3, 8, 11);
    begin_collection(&mut server, 4, 99, 12);
    document(&mut server, 5, 11, b"k");
    document(&mut server, 6, 12, b"k");
    server.play();
    assert_eq!(server.seqnos(), [1, 3, 5]);
    assert_eq!(server.moved().unwrap().seqno, Seqno(6));
    let learned = server.events();
    let [Event::Exclusions(learned)] = &learned[..] else { panic!("{learned:?}") };
    // Another connection is told, and takes the new collection too.
    let mut server = Harness::streaming(ConnectionConfig {
        collections: true,
        delivery: Delivery {
            exclusions: Exclusions::default().with_patterns(&patterns, &Manifest::default()),
            ..Delivery::default()
        },
        ..config()
    });
    server.machine.exclude(learned);
    server.marker(0, 9);
    document(&mut server, 1, 11, b"k");
    document(&mut server, 2, 12, b"k");
    server.play();
    assert_eq!(server.seqnos(), [1]);
}
