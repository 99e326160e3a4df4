//! Filtered streams on servers that say less than they should.

use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{End, ErrorKind, Filter, Start, StreamEvent, StreamOptions};
use dcp_e2e::{History, Reader, options};
use dcp_producer::{ConnectionConfig, ServerVersion, WriteOptions, parse_rules};
use dcp_test::with;
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{CollectionId, Seqno, Vbid};

const VB: Vbid = Vbid(0);

/// A vBucket with a collection `few`, of whose documents the stream is, among many others.
async fn cluster() -> (History, CollectionId) {
    let history = History::start(1, 1).await;
    let few = history.producer.create_collection("_default", "few", None).unwrap();
    (history, few)
}

fn write(history: &History, collection_id: CollectionId, key: &str) -> Seqno {
    let options = with(WriteOptions::default(), |o| o.collection_id = collection_id);
    history.producer.upsert(key.as_bytes(), Bytes::from_static(b"{}"), options).unwrap().seqno
}

/// A durable write that nothing decides.
fn prepare(history: &History, collection_id: CollectionId, key: &str) -> Seqno {
    let options = with(WriteOptions::default(), |o| o.collection_id = collection_id);
    let (value, level) = (Some(Bytes::from_static(b"{}")), DurabilityLevel::MAJORITY);
    history.producer.prepare(key.as_bytes(), value, options, level).unwrap().seqno
}

fn of_few(start: Start, end: End) -> StreamOptions {
    let mut options = options(start, end);
    options.filter = Filter::Collections(vec!["_default.few".to_owned()]);
    options
}

fn set_faults(history: &History, rules: &str) {
    history.producer.set_faults(parse_rules(rules).unwrap()).unwrap();
}

/// A snapshot that is announced up to a prepare that this client is never told of.
async fn with_open_snapshot() -> (History, CollectionId, Seqno) {
    let (history, few) = cluster().await;
    set_faults(&history, r#"[{"reaction": "no_snapshot_end"}]"#);
    let last = write(&history, few, "one");
    prepare(&history, few, "two");
    write(&history, CollectionId::DEFAULT, "other");
    (history, few, last)
}

#[tokio::test(flavor = "multi_thread")]
async fn co_63_stream_until_now_ends_inside_a_snapshot_that_the_server_leaves_open() {
    let (history, few, last) = with_open_snapshot().await;
    let mut reader = Reader::open(&history.producer, of_few(Start::Earliest, End::Now)).await;
    let rows = reader.rest().await;
    assert_eq!(rows.iter().map(|row| row.seqno).collect::<Vec<_>>(), [last]);
    assert_eq!(history.producer.fault_counts(), [1], "the snapshot was left open");
    let checkpoint = reader.stream.checkpoint();
    let position = checkpoint.position(VB).unwrap();
    assert_eq!((position.seqno, position.is_snapshot_complete()), (last, false));
    // It resumes from there as if the snapshot were complete.
    let next = write(&history, few, "three");
    let mut reader =
        Reader::open(&history.producer, of_few(Start::Checkpoint(checkpoint), End::Now)).await;
    let rows = reader.rest().await;
    assert_eq!(rows.iter().map(|row| row.seqno).collect::<Vec<_>>(), [next]);
}

#[tokio::test(flavor = "multi_thread")]
async fn co_63_vbucket_is_caught_up_inside_a_snapshot_that_the_server_leaves_open() {
    let (history, _, last) = with_open_snapshot().await;
    let mut reader = Reader::open(&history.producer, of_few(Start::Earliest, End::Never)).await;
    assert_eq!(reader.take(1).await[0].seqno, last);
    let caught_up = async {
        loop {
            for event in reader.stream.take_events() {
                if let StreamEvent::CaughtUp(caught_up) = event {
                    return caught_up;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let caught_up = tokio::time::timeout(Duration::from_secs(30), caught_up).await;
    let caught_up = caught_up.expect("it is never told");
    assert_eq!(caught_up.seqno, history.producer.high_seqnos()[&VB], "asked again, it says so");
    assert!(history.producer.fault_counts()[0] >= 1, "the snapshot was left open");
}

/// A server that does not tell the client its purge seqno, 30 documents of the collection behind
/// each other, and deletions among the others that are purged.
async fn purged() -> History {
    let (history, few) = cluster().await;
    let server_version = ServerVersion { major: 7, minor: 6, patch: 11 };
    let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
    history.producer.set_dcp_config(config);
    for number in 0..30 {
        write(&history, few, &format!("few-{number}"));
    }
    let last = write(&history, CollectionId::DEFAULT, "other");
    history.producer.remove(b"other", WriteOptions::default()).unwrap();
    write(&history, few, "last");
    history.producer.persist();
    history.producer.purge(VB, Seqno(last.0 + 1)).unwrap();
    history
}

#[tokio::test(flavor = "multi_thread")]
async fn co_64_load_that_is_interrupted_below_the_purge_seqno_again_and_again_says_why_it_ends() {
    let history = purged().await;
    let disconnects = r#"[{"condition": {"opcode": "DCP_MUTATION", "every": 10},
                           "reaction": "disconnect"}]"#;
    set_faults(&history, disconnects);
    let mut reader = Reader::open(&history.producer, of_few(Start::Earliest, End::Now)).await;
    let read = async {
        loop {
            match reader.stream.next().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => return error,
                None => panic!("the load is complete"),
            }
        }
    };
    let error = tokio::time::timeout(Duration::from_secs(30), read).await;
    let error = error.expect("it begins again and again");
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Rollback, Some(VB)));
    let text = error.to_string();
    assert!(text.contains("began again 3 times") && text.contains("purge interval"), "{text}");
    assert_eq!(reader.stream.stats().connection.rollbacks, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn co_64_load_that_is_interrupted_now_and_then_comes_to_its_end() {
    let history = purged().await;
    let disconnects = r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 10},
                           "reaction": "disconnect"},
                          {"condition": {"opcode": "DCP_MUTATION", "nth": 20},
                           "reaction": "disconnect"}]"#;
    set_faults(&history, disconnects);
    let mut reader = Reader::open(&history.producer, of_few(Start::Earliest, End::Now)).await;
    let rows = reader.rest().await;
    let again = rows.iter().rposition(|row| row.op == "rollback").expect("a rollback to 0");
    let (rollback, rest) = rows[again..].split_first().unwrap();
    assert_eq!((rollback.seqno, rollback.epoch), (Seqno::ZERO, 2));
    assert_eq!(rest.len(), 31, "every document");
}
