//! Filters by name against a server whose collections come and go.

use dcp_test::with;
use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{
    ChangeStream, Client, End, ErrorKind, Filter, Start, StreamEvent, StreamOptions,
};
use dcp_producer::{Condition, Producer, Reaction, Rule, WriteOptions};
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::StreamFilter;
use dcp_proto::{Op, RowFilter};
use dcp_wire::{CollectionId, Opcode, Status, Vbid};
use tokio::time::timeout;

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, connect, options, producer, read_all, row, take,
};
use crate::rows::{Item, Rows};

fn write(producer: &Producer, collection_id: CollectionId, keys: std::ops::Range<u32>) {
    let mut options = WriteOptions::default();
    options.collection_id = collection_id;
    for key in keys {
        producer.upsert(format!("key-{key}").as_bytes(), Bytes::from("1"), options).unwrap();
    }
}

fn filtered(names: &[&str], start: Start, end: End) -> StreamOptions {
    let names = names.iter().map(ToString::to_string).collect();
    with(options(start, end), |o| o.filter = Filter::Collections(names))
}

async fn stream(client: &Client, options: StreamOptions) -> ChangeStream<Vec<Item>> {
    client.stream(options, Rows::default).await.unwrap()
}

/// The collections of rows.
fn ids(items: Vec<Item>) -> Vec<CollectionId> {
    items.into_iter().map(|item| row(item).collection_id).collect()
}

/// Waits for an endless stream to fail because nothing is left for it.
async fn nothing_is_left(stream: &mut ChangeStream<Vec<Item>>) {
    let next = timeout(ANSWER_TIMEOUT, stream.next()).await.expect("the stream goes on");
    let error = next.expect("it ends as if it had been closed").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StreamEnded, "{error}");
    assert!(error.to_string().contains("dropped"), "{error}");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn collection_created_while_no_node_had_the_vbucket_is_known() {
    let producer = producer(2, 1).await;
    let client = connect(&producer).await;
    producer.failover(0, false).unwrap();
    // Learns that the only vBucket is nowhere.
    let brief =
        with(options(Start::Earliest, End::Now), |o| o.retry_timeout = Duration::from_millis(300));
    let error = client.stream(brief, Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    producer.create_collection("_default", "carts", None).unwrap();
    producer.rebalance().unwrap();
    let again = with(filtered(&["_default.carts"], Start::Earliest, End::Now), |o| {
        o.retry_timeout = Duration::from_secs(5);
    });
    let mut stream = stream(&client, again).await;
    assert_eq!(read_all(&mut stream).await, []);
}

#[tokio::test]
async fn collection_created_after_connecting_is_streamed_until_it_is_dropped() {
    let producer = producer(2, 8).await;
    let client = connect(&producer).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 0..20);
    write(&producer, CollectionId::DEFAULT, 0..20);
    let mut stream =
        stream(&client, filtered(&["_default.carts"], Start::Earliest, End::Never)).await;
    assert_eq!(ids(take(&mut stream, 20).await), [carts; 20]);
    producer.drop_collection("_default", "carts").unwrap();
    nothing_is_left(&mut stream).await;
    let events = stream.take_events();
    let ended = |event: &&StreamEvent| matches!(event, StreamEvent::Ended { .. });
    assert_eq!(events.iter().filter(ended).count(), 8, "each vBucket was told: {events:?}");
}

#[tokio::test]
async fn filter_goes_on_without_dropped_collections_when_streams_are_reopened() {
    let producer = producer(1, 8).await;
    let old = producer.create_collection("_default", "old", None).unwrap();
    let kept = producer.create_collection("_default", "kept", None).unwrap();
    write(&producer, old, 0..10);
    write(&producer, kept, 0..10);
    let client = connect(&producer).await;
    let names = ["_default.old", "_default.kept"];
    let mut stream = stream(&client, filtered(&names, Start::Earliest, End::Never)).await;
    take(&mut stream, 20).await;
    producer.drop_collection("_default", "old").unwrap();
    // The name is used again, by another collection that nobody asked for.
    let other = producer.create_collection("_default", "old", None).unwrap();
    producer.restart(0, true).await.unwrap();
    write(&producer, other, 0..10);
    write(&producer, kept, 10..30);
    assert_eq!(ids(take(&mut stream, 20).await), [kept; 20]);
    producer.drop_collection("_default", "kept").unwrap();
    nothing_is_left(&mut stream).await;
}

#[tokio::test]
async fn stream_ends_if_all_it_names_is_dropped_while_its_node_is_away() {
    let producer = producer(1, 8).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 0..10);
    let client = connect(&producer).await;
    let mut stream =
        stream(&client, filtered(&["_default.carts"], Start::Earliest, End::Never)).await;
    take(&mut stream, 10).await;
    producer.kill(0).unwrap();
    producer.drop_collection("_default", "carts").unwrap();
    producer.restart(0, true).await.unwrap();
    nothing_is_left(&mut stream).await;
}

#[tokio::test]
async fn checkpoint_is_refused_if_its_collection_was_recreated_meanwhile() {
    let producer = producer(1, 8).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 0..10);
    let client = connect(&producer).await;
    let now = || filtered(&["_default.carts"], Start::Earliest, End::Now);
    let mut first = stream(&client, now()).await;
    assert_eq!(ids(read_all(&mut first).await), [carts; 10]);
    let checkpoint = first.checkpoint();
    producer.drop_collection("_default", "carts").unwrap();
    let error = client.stream(now(), Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let anew = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, anew, 0..5);
    let resumed = filtered(&["_default.carts"], Start::Checkpoint(checkpoint), End::Now);
    let error = client.stream(resumed, Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    let why = std::error::Error::source(&error).expect("it says why").to_string();
    let named = format!("0x{carts} (dropped)");
    assert!(why.contains(&named) && why.contains(&format!("_default.carts (0x{anew})")), "{why}");
    assert!(why.contains("created again has a new id"), "{why}");
    let mut again = stream(&client, now()).await;
    assert_eq!(ids(read_all(&mut again).await), [anew; 5], "nothing of the old one");
}

async fn refusal(client: &Client, options: StreamOptions) -> String {
    let error = client.stream(options, Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint, "{error}");
    std::error::Error::source(&error).expect("it says why").to_string()
}

#[tokio::test]
async fn checkpoint_serves_its_filter_and_parts_of_it() {
    let producer = producer(1, 8).await;
    producer.create_scope("shop").unwrap();
    let orders = producer.create_collection("shop", "orders", None).unwrap();
    let carts = producer.create_collection("shop", "carts", None).unwrap();
    let all = [CollectionId::DEFAULT, orders, carts];
    let write_all = |keys: std::ops::Range<u32>| {
        for id in all {
            write(&producer, id, keys.clone());
        }
    };
    write_all(0..10);
    let client = connect(&producer).await;
    let scope = || Filter::Scope("shop".to_owned());
    let names = |names: &[&str]| filtered(names, Start::Earliest, End::Now).filter;
    let from = |checkpoint: &Checkpoint, filter| {
        let start = Start::Checkpoint(checkpoint.clone());
        with(options(start, End::Now), |o| o.filter = filter)
    };
    let mut first = stream(&client, options(Start::Earliest, End::Now)).await;
    assert_eq!(read_all(&mut first).await.len(), 30);
    let mut checkpoint = first.checkpoint();
    // Each is a part of the one before, and reads only what was written since.
    for (round, (filter, ids_of)) in [
        (scope(), &[orders, carts][..]),
        (names(&["shop.carts", "shop.orders"]), &[orders, carts]),
        (names(&["shop.carts"]), &[carts]),
    ]
    .into_iter()
    .enumerate()
    {
        let manifest_uids = checkpoint.positions().map(|(_, position)| position.manifest_uid.0);
        assert!(manifest_uids.max().unwrap() > 0, "it is in the stream requests");
        let first_key = 100 * u32::try_from(round + 1).unwrap();
        write_all(first_key..first_key + 10);
        let mut part = stream(&client, from(&checkpoint, filter)).await;
        let mut read = ids(read_all(&mut part).await);
        read.sort_unstable();
        assert_eq!(read, ids_of.iter().flat_map(|&id| [id; 10]).collect::<Vec<_>>());
        checkpoint = Checkpoint::from_json(part.checkpoint().to_json().as_bytes()).unwrap();
    }
    for (wider, beyond) in [
        (Filter::All, "the whole bucket"),
        (scope(), "scope shop (0x8)"),
        (names(&["shop.carts", "shop.orders"]), "collection shop.orders (0x8)"),
    ] {
        let why = refusal(&client, from(&checkpoint, wider)).await;
        let expected = format!(
            "made with collection shop.carts (0x{carts}) without system documents; the stream also \
             asks for {beyond}, whose earlier changes it would miss"
        );
        assert!(why.contains(&expected), "{why}");
    }
}

#[tokio::test]
async fn checkpoint_outlives_one_of_its_collections() {
    let producer = producer(1, 8).await;
    let old = producer.create_collection("_default", "old", None).unwrap();
    let kept = producer.create_collection("_default", "kept", None).unwrap();
    write(&producer, old, 0..10);
    write(&producer, kept, 0..10);
    let client = connect(&producer).await;
    let both = ["_default.old", "_default.kept"];
    let mut first = stream(&client, filtered(&both, Start::Earliest, End::Never)).await;
    take(&mut first, 20).await;
    let before = first.checkpoint();
    // Dropped between two runs, as far as `before` is concerned, and under a running stream.
    producer.drop_collection("_default", "old").unwrap();
    producer.restart(0, true).await.unwrap();
    write(&producer, kept, 10..20);
    assert_eq!(ids(take(&mut first, 10).await), [kept; 10]);
    let after = first.checkpoint();
    drop(first);
    write(&producer, kept, 20..30);
    for (checkpoint, rows) in [(before, 20), (after, 10)] {
        let left = |start| filtered(&["_default.kept"], Start::Checkpoint(start), End::Now);
        let mut rest = stream(&client, left(checkpoint.clone())).await;
        assert_eq!(ids(read_all(&mut rest).await), vec![kept; rows]);
        let mut again = stream(&client, left(rest.checkpoint())).await;
        assert_eq!(ids(read_all(&mut again).await), []);

        let anew = producer.create_collection("_default", "old", None).unwrap();
        let start = Start::Checkpoint(checkpoint);
        let why = refusal(&client, filtered(&both, start, End::Now)).await;
        assert!(why.contains(&format!("0x{old} (dropped)")), "{why}");
        assert!(
            why.contains(&format!("also asks for collection _default.old (0x{anew})")),
            "{why}"
        );
        producer.drop_collection("_default", "old").unwrap();
    }
}

#[tokio::test]
async fn system_documents_that_were_hidden_are_not_requested_later() {
    let producer = producer(1, 4).await;
    let query = with_system_scope(&producer);
    write(&producer, query, 0..10);
    write(&producer, CollectionId::DEFAULT, 0..5);
    let client = connect(&producer).await;
    let shown = |start, system_documents| {
        with(options(start, End::Now), |o| o.system_documents = system_documents)
    };
    let mut hidden = stream(&client, shown(Start::Earliest, false)).await;
    assert_eq!(read_all(&mut hidden).await.len(), 5);
    let start = || Start::Checkpoint(hidden.checkpoint());
    let why = refusal(&client, shown(start(), true)).await;
    assert!(why.contains("also asks for system documents"), "{why}");
    let named = Filter::Scope("_system".to_owned());
    let why = refusal(&client, with(shown(start(), false), |o| o.filter = named)).await;
    assert!(why.contains("also asks for scope _system"), "{why}");

    let mut all = stream(&client, shown(Start::Earliest, true)).await;
    assert_eq!(read_all(&mut all).await.len(), 15);
    write(&producer, query, 10..20);
    write(&producer, CollectionId::DEFAULT, 5..10);
    let start = Start::Checkpoint(all.checkpoint());
    let mut without = stream(&client, shown(start, false)).await;
    assert_eq!(ids(read_all(&mut without).await), [CollectionId::DEFAULT; 5]);
}

#[tokio::test]
async fn positions_pass_over_rows_that_are_left_out() {
    let producer = producer(1, 4).await;
    let client = connect(&producer).await;
    write(&producer, CollectionId::DEFAULT, 0..50);
    producer.remove(b"key-11", WriteOptions::default()).unwrap();
    let keys = |pattern: &str, ops: Option<Vec<Op>>| {
        let rows = RowFilter::new(Some(vec![pattern.to_owned()]), ops, None).unwrap();
        move |start, persisted_only| {
            with(options(start, End::Now), |o| {
                o.rows = rows;
                o.persisted_only = persisted_only;
            })
        }
    };
    for persisted_only in [false, true] {
        let asked = keys("key-1?", Some(vec![Op::Mutation]));
        let mut some = stream(&client, asked(Start::Earliest, persisted_only)).await;
        let mut found: Vec<_> =
            read_all(&mut some).await.into_iter().map(|item| row(item).key).collect();
        found.sort();
        // The deletion came in place of the mutation.
        let wanted: Vec<_> =
            (10..20).filter(|n| *n != 11).map(|n| format!("key-{n}").into_bytes()).collect();
        assert_eq!(found, wanted);
        let checkpoint = some.checkpoint();
        for (vbid, high) in client.high_seqnos().await.unwrap() {
            assert_eq!(checkpoint.position(vbid).map_or(0, |at| at.seqno.0), high.0, "{vbid}");
        }
        let why = refusal(&client, options(Start::Checkpoint(checkpoint.clone()), End::Now)).await;
        assert!(why.contains("also asks for all keys and operations deletion"), "{why}");
        let why = refusal(&client, keys("*", None)(Start::Checkpoint(checkpoint), false)).await;
        assert!(why.contains("keys [\"*\"]"), "{why}");
    }
}

#[tokio::test]
async fn filter_to_store_is_looked_up_in_the_newest_manifest() {
    let producer = producer(2, 8).await;
    let client = connect(&producer).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    let names = Filter::Collections(vec!["_default.carts".to_owned()]);
    let found = client.stored_filter(&names, true).await.unwrap();
    assert_eq!(found, StoredFilter::new(StreamFilter::Collections(vec![carts]), true));
    producer.drop_collection("_default", "carts").unwrap();
    let error = client.stored_filter(&names, true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().starts_with("collections: there is no collection '_default.carts'"));
    let patterns = Filter::Collections(vec!["nope.*".to_owned()]);
    let error = client.stored_filter(&patterns, true).await.unwrap_err();
    assert!(error.to_string().starts_with("collections: there is no scope 'nope'"), "{error}");
}

#[tokio::test]
async fn checkpoint_without_a_filter_tells_a_recreated_collection_apart() {
    let producer = producer(1, 8).await;
    let old = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, old, 0..10);
    let client = connect(&producer).await;
    let mut first = stream(&client, options(Start::Earliest, End::Now)).await;
    assert_eq!(ids(read_all(&mut first).await), [old; 10]);
    producer.drop_collection("_default", "carts").unwrap();
    let new = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, new, 0..10);
    let start = Start::Checkpoint(first.checkpoint());
    let mut second = stream(&client, options(start, End::Now)).await;
    assert_eq!(ids(read_all(&mut second).await), [new; 10]);
    assert_ne!(old, new);
    assert_eq!(client.manifest().names(new), Some(("_default", "carts")));
}

#[tokio::test]
async fn node_whose_manifest_is_behind_is_asked_again() {
    let producer = producer(1, 4).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 0..10);
    let client = connect(&producer).await;
    for status in
        [Status::UNKNOWN_COLLECTION, Status::UNKNOWN_SCOPE, Status::COLLECTIONS_MANIFEST_IS_AHEAD]
    {
        // A rule does not see what one before it reacts to: the first twelve are refused.
        let condition = Condition::opcode(Opcode::DCP_STREAM_REQ).nth(NonZeroU64::MIN);
        let rules = vec![Rule::new(condition, Reaction::Answer(status)); 12];
        producer.set_faults(rules).unwrap();
        let mut stream =
            stream(&client, filtered(&["_default.carts"], Start::Earliest, End::Now)).await;
        assert_eq!(ids(read_all(&mut stream).await), [carts; 10], "{status}");
        assert_eq!(producer.fault_counts(), [1; 12]);
    }
}

#[tokio::test]
async fn scope_filter_includes_what_is_created_in_it_later() {
    let producer = producer(1, 4).await;
    producer.create_scope("shop").unwrap();
    let client = connect(&producer).await;
    let shop = with(options(Start::Earliest, End::Never), |o| {
        o.filter = Filter::Scope("shop".to_owned());
        o.retry_timeout = Duration::from_secs(30);
    });
    let mut stream = stream(&client, shop).await;
    let carts = producer.create_collection("shop", "carts", None).unwrap();
    write(&producer, CollectionId::DEFAULT, 0..10);
    write(&producer, carts, 0..10);
    assert_eq!(ids(take(&mut stream, 10).await), [carts; 10]);
    producer.drop_collection("shop", "carts").unwrap();
    let items = producer.create_collection("shop", "items", None).unwrap();
    write(&producer, items, 0..10);
    assert_eq!(ids(take(&mut stream, 10).await), [items; 10]);
    producer.drop_scope("shop").unwrap();
    nothing_is_left(&mut stream).await;
}

#[tokio::test]
async fn scope_stream_that_is_finite_outlives_the_drop_of_a_collection() {
    let producer = producer(1, 1).await;
    producer.create_scope("shop").unwrap();
    let carts = producer.create_collection("shop", "carts", None).unwrap();
    write(&producer, carts, 0..5);
    let client = connect(&producer).await;
    let shop =
        |start| with(options(start, End::Now), |o| o.filter = Filter::Scope("shop".to_owned()));
    let mut first = stream(&client, shop(Start::Earliest)).await;
    assert_eq!(ids(read_all(&mut first).await), [carts; 5]);
    producer.drop_collection("shop", "carts").unwrap();
    let high = producer.high_seqnos()[&Vbid(0)];
    let mut second = stream(&client, shop(Start::Checkpoint(first.checkpoint()))).await;
    assert_eq!(read_all(&mut second).await, []);
    let position = second.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!(position.seqno, high, "that of the event that drops it");
}

fn with_system_scope(producer: &Producer) -> CollectionId {
    producer.create_scope("_system").unwrap();
    producer.create_collection("_system", "_query", None).unwrap()
}

#[tokio::test]
async fn system_scope_is_hidden_unless_requested() {
    let producer = producer(1, 4).await;
    let query = with_system_scope(&producer);
    write(&producer, query, 0..10);
    write(&producer, CollectionId::DEFAULT, 0..5);
    let client = connect(&producer).await;
    let everything = || options(Start::Earliest, End::Now);
    let mut hidden = stream(&client, everything()).await;
    assert_eq!(ids(read_all(&mut hidden).await), [CollectionId::DEFAULT; 5]);
    for (vbid, high) in producer.high_seqnos() {
        let checkpoint = hidden.checkpoint();
        let position = checkpoint.position(vbid).unwrap();
        assert_eq!(position.seqno, high, "{vbid}: past what is hidden");
    }
    let mut shown = stream(&client, with(everything(), |o| o.system_documents = true)).await;
    assert_eq!(read_all(&mut shown).await.len(), 15);
    let named = Filter::Scope("_system".to_owned());
    let mut named = stream(&client, with(everything(), |o| o.filter = named)).await;
    assert_eq!(ids(read_all(&mut named).await), [query; 10]);
}

#[tokio::test]
async fn system_scope_stays_hidden_on_a_connection_that_is_made_again() {
    let producer = producer(1, 4).await;
    let client = connect(&producer).await;
    let mut stream = stream(&client, options(Start::Earliest, End::Never)).await;
    write(&producer, CollectionId::DEFAULT, 0..5);
    assert_eq!(ids(take(&mut stream, 5).await), [CollectionId::DEFAULT; 5]);
    let query = with_system_scope(&producer);
    write(&producer, query, 0..10);
    write(&producer, CollectionId::DEFAULT, 5..10);
    assert_eq!(ids(take(&mut stream, 5).await), [CollectionId::DEFAULT; 5]);
    producer.persist();
    producer.restart(0, true).await.unwrap();
    write(&producer, query, 10..20);
    write(&producer, CollectionId::DEFAULT, 10..15);
    assert_eq!(ids(take(&mut stream, 5).await), [CollectionId::DEFAULT; 5]);
}

#[tokio::test]
async fn system_scope_stays_hidden_where_a_vbucket_moves_to() {
    let mut two = cluster_options();
    (two.nodes, two.vbuckets, two.replicas) = (2, 2, 1);
    let producer = Producer::start(two).await.unwrap();
    let active = |vbid| producer.copies_of(Vbid(vbid)).unwrap()[0];
    let (from, to) = (active(0), active(1));
    assert_ne!(from, to);
    let client = connect(&producer).await;
    let mut stream = stream(&client, options(Start::Earliest, End::Never)).await;
    write(&producer, CollectionId::DEFAULT, 0..20);
    take(&mut stream, 20).await;
    // The connection it moves to does not hear of the collection by itself.
    let rules = r#"[{"condition": {"opcode": "DCP_SYSTEM_EVENT", "vbucket": 1},
                     "reaction": "drop"}]"#;
    producer.set_faults(dcp_producer::parse_rules(rules).unwrap()).unwrap();
    let query = with_system_scope(&producer);
    let high = producer.high_seqnos()[&Vbid(0)];
    let passed = async {
        while stream.checkpoint().position(Vbid(0)).unwrap().seqno < high {
            let _ = timeout(Duration::from_millis(10), stream.next()).await;
        }
    };
    timeout(ANSWER_TIMEOUT, passed).await.expect("the collection's event");
    producer.move_vbucket(Vbid(0), to).unwrap();
    write(&producer, query, 0..20);
    write(&producer, CollectionId::DEFAULT, 20..40);
    assert_eq!(ids(take(&mut stream, 20).await), [CollectionId::DEFAULT; 20]);
}

#[tokio::test]
async fn system_scope_created_while_a_stream_runs_is_hidden_too() {
    let producer = producer(1, 4).await;
    let client = connect(&producer).await;
    let mut stream = stream(&client, options(Start::Earliest, End::Never)).await;
    write(&producer, CollectionId::DEFAULT, 0..5);
    assert_eq!(ids(take(&mut stream, 5).await), [CollectionId::DEFAULT; 5]);
    let query = with_system_scope(&producer);
    write(&producer, query, 0..10);
    write(&producer, CollectionId::DEFAULT, 5..10);
    assert_eq!(ids(take(&mut stream, 5).await), [CollectionId::DEFAULT; 5]);
}
