//! First loads without deletions.

use std::collections::BTreeMap;

use bytes::Bytes;
use dcp_consumer::{End, ErrorKind, InitialDeletions, Start, StreamOptions};
use dcp_e2e::{History, Reader, Row, options};
use dcp_producer::{ConnectionConfig, ServerVersion};

/// A table of documents that starts empty, and what was changed in it.
#[derive(Debug, Default)]
struct Table {
    documents: BTreeMap<String, Bytes>,
    deletions: usize,
}

impl Table {
    fn apply(&mut self, rows: Vec<Row>) {
        for row in rows {
            let key = row.key.clone().expect("no rollback");
            if let Some(value) = row.value {
                self.documents.insert(key, value);
            } else {
                self.documents.remove(&key);
                self.deletions += 1;
            }
        }
    }
}

fn loading(start: Start, initial_deletions: InitialDeletions) -> StreamOptions {
    let mut options = options(start, End::Now);
    options.initial_deletions = initial_deletions;
    options
}

/// A cluster that has documents and tombstones on disk only.
async fn persisted(nodes: usize, vbuckets: u16) -> History {
    let mut history = History::start(nodes, vbuckets).await;
    history.load("doc", 300, 0);
    for number in (0..300).step_by(3) {
        history.remove(&format!("doc-{number}"));
    }
    history.producer.persist();
    history
}

#[tokio::test(flavor = "multi_thread")]
async fn op_10_first_load_is_the_live_documents_and_later_deletions_are_delivered() {
    for (skips, expected) in [
        (InitialDeletions::Deliver, 100),
        (InitialDeletions::Skip, 0),
        (InitialDeletions::SkipIfSupported, 0),
    ] {
        let mut history = persisted(2, 8).await;
        let mut table = Table::default();
        let mut reader = Reader::open(&history.producer, loading(Start::Earliest, skips)).await;
        table.apply(reader.rest().await);
        assert_eq!(table.deletions, expected, "{skips:?}");
        assert_eq!(table.documents, history.ledger.live(), "{skips:?}");
        let checkpoint = reader.stream.checkpoint();
        for (vbid, seqno) in history.producer.high_seqnos() {
            assert_eq!(checkpoint.position(vbid).unwrap().seqno, seqno, "{vbid}");
        }
        for number in (1..300).step_by(3) {
            history.remove(&format!("doc-{number}"));
        }
        history.producer.persist();
        let mut reader =
            Reader::open(&history.producer, loading(Start::Checkpoint(checkpoint), skips)).await;
        table.apply(reader.rest().await);
        assert_eq!(table.deletions, expected + 100, "{skips:?}");
        assert_eq!(table.documents, history.ledger.live(), "{skips:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn op_10_interrupted_first_load_learns_of_documents_that_were_removed_meanwhile() {
    let mut history = persisted(1, 1).await;
    let mut table = Table::default();
    let mut small = loading(Start::Earliest, InitialDeletions::Skip);
    small.batch.max_rows = 20;
    let mut reader = Reader::open(&history.producer, small).await;
    table.apply(reader.take(60).await);
    let checkpoint = reader.checkpoints.last().unwrap().clone();
    drop(reader);
    let delivered: Vec<String> = table.documents.keys().cloned().collect();
    assert!((60..200).contains(&delivered.len()), "{}", delivered.len());
    for key in &delivered[..30] {
        history.remove(key);
    }
    history.producer.persist();
    let start = Start::Checkpoint(checkpoint);
    let mut reader = Reader::open(&history.producer, loading(start, InitialDeletions::Skip)).await;
    table.apply(reader.rest().await);
    assert_eq!(table.documents, history.ledger.live());
}

#[tokio::test(flavor = "multi_thread")]
async fn op_10_server_that_cannot_skip_is_refused_unless_that_is_allowed() {
    let history = persisted(1, 4).await;
    let server_version = ServerVersion { major: 7, minor: 6, patch: 11 };
    let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
    history.producer.set_dcp_config(config);
    let skip = loading(Start::Earliest, InitialDeletions::Skip);
    let error = Reader::try_open(&history.producer, skip).await.unwrap_err();
    assert_eq!((error.kind(), error.options()), (ErrorKind::Config, &["initial_deletions"][..]));
    assert!(error.to_string().contains("newer than 8.0"), "{error}");
    let skip = loading(Start::Earliest, InitialDeletions::SkipIfSupported);
    let mut table = Table::default();
    table.apply(Reader::open(&history.producer, skip).await.rest().await);
    assert_eq!((table.deletions, &table.documents), (100, &history.ledger.live()));
}

#[tokio::test(flavor = "multi_thread")]
async fn op_10_deletions_are_not_skipped_where_that_would_be_wrong_or_do_nothing() {
    let history = persisted(1, 1).await;
    for initial_deletions in [InitialDeletions::Skip, InitialDeletions::SkipIfSupported] {
        for other in ["start", "history", "out_of_order"] {
            let mut options = loading(Start::Earliest, initial_deletions);
            match other {
                "start" => options.start = Start::Latest,
                "history" => options.history = true,
                _ => options.out_of_order = true,
            }
            let error = Reader::try_open(&history.producer, options).await.unwrap_err();
            assert_eq!(error.options(), ["initial_deletions", other], "{error}");
        }
    }
}
