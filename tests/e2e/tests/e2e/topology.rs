//! vBuckets that move, connections that end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dcp_consumer::{End, ErrorKind, Start};
use dcp_e2e::{History, Reader, options};
use dcp_wire::Vbid;

#[tokio::test(flavor = "multi_thread")]
async fn a_vbucket_that_moves_to_another_node_goes_on_there() {
    let mut history = History::start(2, 8).await;
    history.load("doc", 400, 60);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Never)).await;
    let mut rows = reader.take(400).await;
    for round in 0..3 {
        for vbid in (0..8).map(Vbid) {
            let node = (usize::from(vbid.0) + round) % 2;
            history.producer.move_vbucket(vbid, node).unwrap();
        }
        history.load(&format!("round{round}"), 200, 60);
        rows.extend(reader.take(200).await);
    }
    assert_eq!(rows.len(), 1000, "nothing twice");
    history.ledger.assert_read(&rows, &BTreeMap::new());
    // The last move may have left a vBucket with no more rows, which is still being opened.
    let begun = Instant::now();
    loop {
        let stats = reader.stream.stats();
        if (stats.streaming, stats.failed) == (8, 0) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{stats:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vbuckets_that_move_during_a_read_are_read_whole() {
    let mut history = History::start(3, 16).await;
    history.load("doc", 3000, 500);
    let mut small = options(Start::Earliest, End::Now);
    small.batch.max_rows = 50;
    small.buffer_size = 64 * 1024;
    let mut reader = Reader::open(&history.producer, small).await;
    let mut rows = Vec::new();
    let mut moves = (0..16).map(Vbid).cycle().zip((0..3).cycle());
    while let Some(batch) = reader.next().await {
        rows.extend(batch);
        if rows.len() < 2500
            && let Some((vbid, node)) = moves.next()
        {
            history.producer.move_vbucket(vbid, node).unwrap();
        }
    }
    assert_eq!(rows.len(), 3000, "nothing twice");
    history.ledger.assert_read(&rows, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_is_closed_ends_its_streams() {
    let mut history = History::start(1, 4).await;
    history.load("doc", 10, 50);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Never)).await;
    reader.take(10).await;
    reader.client.close().await;
    let next = tokio::time::timeout(Duration::from_secs(10), reader.stream.next());
    match next.await.expect("the stream ends") {
        None => {}
        Some(Err(error)) => assert_eq!(error.kind(), ErrorKind::Closed),
        Some(Ok(delivered)) => panic!("{} more rows", delivered.rows),
    }
}
