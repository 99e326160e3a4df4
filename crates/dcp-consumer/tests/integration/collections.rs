//! Filters by name against a server whose collections come and go.

use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{
    ChangeStream, Client, End, ErrorKind, Filter, Start, StreamEvent, StreamOptions,
};
use dcp_producer::{Condition, Producer, Reaction, Rule, WriteOptions};
use dcp_wire::{CollectionId, Opcode, Status};
use tokio::time::timeout;

use crate::embedded::{PATIENCE, connect, options, producer, read_all, row, take};
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
    StreamOptions { filter: Filter::Collections(names), ..options(start, end) }
}

async fn stream(client: &Client, options: StreamOptions) -> ChangeStream<Vec<Item>> {
    client.stream(options, Rows::default).await.unwrap()
}

/// The collections of rows.
fn ids(items: Vec<Item>) -> Vec<CollectionId> {
    items.into_iter().map(|item| row(item).collection_id).collect()
}

/// Waits for the stream to end by itself.
async fn end(stream: &mut ChangeStream<Vec<Item>>) {
    let next = timeout(PATIENCE, stream.next()).await.expect("the stream goes on");
    assert!(next.is_none(), "{:?}", next.map(|next| next.map(|delivered| delivered.rows)));
}

#[tokio::test]
async fn a_collection_made_after_connecting_is_streamed_until_it_is_dropped() {
    let producer = producer(2, 8).await;
    let client = connect(&producer).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 0..20);
    write(&producer, CollectionId::DEFAULT, 0..20);
    let mut stream =
        stream(&client, filtered(&["_default.carts"], Start::Earliest, End::Never)).await;
    assert_eq!(ids(take(&mut stream, 20).await), [carts; 20]);
    producer.drop_collection("_default", "carts").unwrap();
    end(&mut stream).await;
    let events = stream.take_events();
    let ended = |event: &&StreamEvent| matches!(event, StreamEvent::Ended { .. });
    assert_eq!(events.iter().filter(ended).count(), 8, "each vBucket was told: {events:?}");
}

#[tokio::test]
async fn a_filter_goes_on_without_what_was_dropped_when_its_streams_are_opened_again() {
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
    end(&mut stream).await;
}

#[tokio::test]
async fn a_stream_ends_if_all_it_names_is_dropped_while_its_node_is_away() {
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
    end(&mut stream).await;
}

#[tokio::test]
async fn a_checkpoint_is_refused_if_its_collection_was_made_anew_while_away() {
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

#[tokio::test]
async fn an_unfiltered_resume_tells_the_old_collection_from_the_new_one_of_its_name() {
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
async fn a_node_that_is_behind_is_asked_again() {
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
async fn a_scope_brings_what_is_made_in_it_later() {
    let producer = producer(1, 4).await;
    producer.create_scope("shop").unwrap();
    let client = connect(&producer).await;
    let shop = StreamOptions {
        filter: Filter::Scope("shop".to_owned()),
        retry_timeout: Duration::from_secs(30),
        ..options(Start::Earliest, End::Never)
    };
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
    end(&mut stream).await;
}

fn with_system_scope(producer: &Producer) -> CollectionId {
    producer.create_scope("_system").unwrap();
    producer.create_collection("_system", "_query", None).unwrap()
}

#[tokio::test]
async fn the_system_scope_is_hidden_unless_asked_for() {
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
    let mut shown = stream(&client, StreamOptions { system_documents: true, ..everything() }).await;
    assert_eq!(read_all(&mut shown).await.len(), 15);
    let named = Filter::Scope("_system".to_owned());
    let mut named = stream(&client, StreamOptions { filter: named, ..everything() }).await;
    assert_eq!(ids(read_all(&mut named).await), [query; 10]);
}

#[tokio::test]
async fn a_system_scope_that_is_made_while_a_stream_runs_is_hidden_too() {
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
