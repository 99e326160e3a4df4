//! Going on from a checkpoint.

use std::collections::BTreeMap;

use dcp_consumer::{End, ErrorKind, Start};
use dcp_e2e::{History, Reader, Row, options};
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::{Seqno, Vbid};

fn seqnos(checkpoint: &Checkpoint) -> BTreeMap<Vbid, Seqno> {
    checkpoint.positions().map(|(vbid, position)| (vbid, position.seqno)).collect()
}

/// As a new process would: from the stored document.
fn stored(checkpoint: &Checkpoint) -> Start {
    Start::Checkpoint(Checkpoint::from_json(checkpoint.to_json().as_bytes()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_checkpoint_goes_on_exactly_behind_its_batch() {
    for persisted in [false, true] {
        let mut history = History::start(2, 8).await;
        history.load("doc", 400, 60);
        if persisted {
            history.producer.persist();
        }
        let mut small = options(Start::Earliest, End::Now);
        small.batch.max_rows = 23;
        let mut reader = Reader::open(&history.producer, small).await;
        let mut batches: Vec<Vec<Row>> = Vec::new();
        while let Some(batch) = reader.next().await {
            batches.push(batch);
        }
        assert!(batches.len() >= 17, "{} batches", batches.len());
        let mut kinds = (0, 0);
        for (number, checkpoint) in reader.checkpoints.iter().enumerate() {
            for (_, position) in checkpoint.positions() {
                if position.is_snapshot_complete() {
                    kinds.0 += 1;
                } else {
                    kinds.1 += 1;
                }
            }
            let resume = options(stored(checkpoint), End::Now);
            let rest = Reader::open(&history.producer, resume).await.rest().await;
            history.ledger.assert_read(&rest, &seqnos(checkpoint));
            let before: usize = batches[..=number].iter().map(Vec::len).sum();
            assert_eq!(before + rest.len(), 400, "nothing twice after batch {number}");
        }
        assert!(kinds.0 > 0 && kinds.1 > 0, "complete and cut snapshots: {kinds:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_goes_on_over_what_was_written_meanwhile() {
    for persisted in [false, true] {
        let mut history = History::start(1, 4).await;
        history.load("doc", 300, 60);
        let mut small = options(Start::Earliest, End::Now);
        small.batch.max_rows = 31;
        let mut reader = Reader::open(&history.producer, small).await;
        let first = reader.take(150).await;
        let checkpoint = reader.stream.checkpoint();
        drop(reader);
        // Some of these keys were read already, some not; versions not read yet may vanish.
        history.load("doc", 100, 90);
        history.load("new", 100, 90);
        for number in 200..250 {
            history.remove(&format!("doc-{number}"));
        }
        if persisted {
            history.producer.persist();
        }
        let resume = options(stored(&checkpoint), End::Now);
        let rest = Reader::open(&history.producer, resume).await.rest().await;
        history.ledger.assert_read(&rest, &seqnos(&checkpoint));
        let union: Vec<Row> = first.into_iter().chain(rest).collect();
        history.ledger.assert_read(&union, &BTreeMap::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_checkpoint_has_nothing_left_until_something_is_written() {
    let mut history = History::start(2, 16).await;
    history.load("doc", 500, 60);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Now)).await;
    reader.rest().await;
    let done = reader.stream.checkpoint();
    let nothing =
        Reader::open(&history.producer, options(stored(&done), End::Now)).await.rest().await;
    assert_eq!(nothing, []);
    let (vbid, seqno) = history.upsert("one more", "1");
    let rows = Reader::open(&history.producer, options(stored(&done), End::Now)).await.rest().await;
    assert_eq!(rows.iter().map(|row| (row.vbid, row.seqno)).collect::<Vec<_>>(), [(vbid, seqno)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_from_latest_has_what_is_written_after_it_was_opened() {
    let mut history = History::start(2, 16).await;
    history.load("old", 300, 60);
    let from = history.producer.high_seqnos();
    let mut reader = Reader::open(&history.producer, options(Start::Latest, End::Never)).await;
    history.load("new", 300, 60);
    let rows = reader.take(300).await;
    assert_eq!(rows.len(), 300);
    history.ledger.assert_read(&rows, &from);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_of_another_bucket_or_ahead_of_the_server_is_refused() {
    let mut history = History::start(1, 4).await;
    history.load("doc", 100, 60);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Now)).await;
    reader.rest().await;
    let checkpoint = reader.stream.checkpoint();
    let other = History::start(1, 4).await;
    let refused =
        Reader::try_open(&other.producer, options(Start::Checkpoint(checkpoint.clone()), End::Now))
            .await
            .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Checkpoint);
    let mut ahead = checkpoint.clone();
    let mut position = ahead.position(Vbid(0)).unwrap().clone();
    position.seqno = Seqno(position.seqno.0 + 1000);
    (position.snapshot.start, position.snapshot.end) = (position.seqno, position.seqno);
    ahead.set(Vbid(0), position);
    let refused = Reader::try_open(&history.producer, options(Start::Checkpoint(ahead), End::Now))
        .await
        .unwrap_err();
    assert_eq!((refused.kind(), refused.vbid()), (ErrorKind::Checkpoint, Some(Vbid(0))));
}
