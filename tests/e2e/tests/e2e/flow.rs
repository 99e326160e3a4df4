//! Flow control, memory and keep-alive.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_consumer::{Client, End, Start, StreamOptions};
use dcp_e2e::{History, Reader, connect_options, options};
use dcp_producer::parse_rules;
use dcp_wire::{Seqno, Vbid};

#[tokio::test(flavor = "multi_thread")]
async fn data_far_larger_than_the_window_arrives_whole() {
    let mut history = History::start(2, 16).await;
    history.load("doc", 4000, 1000);
    for persisted in [false, true] {
        if persisted {
            history.producer.persist();
        }
        let mut tight = options(Start::Earliest, End::Now);
        tight.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
        let rows = Reader::open(&history.producer, tight).await.rest().await;
        assert_eq!(rows.len(), 4000);
        history.ledger.assert_read(&rows, &BTreeMap::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_larger_than_the_window_arrives() {
    let mut history = History::start(1, 4).await;
    history.load("before", 50, 100);
    history.load("large", 6, 3_000_000);
    history.load("after", 50, 100);
    let mut tight = options(Start::Earliest, End::Now);
    tight.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    tight.batch.max_bytes = 1000;
    let rows = Reader::open(&history.producer, tight).await.rest().await;
    assert_eq!(rows.len(), 106);
    history.ledger.assert_read(&rows, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_are_kept_do_not_stall_the_stream() {
    let mut history = History::start(1, 8).await;
    history.load("doc", 3000, 1000);
    let mut tight = options(Start::Earliest, End::Now);
    tight.buffer_size = 256 * 1024;
    let mut reader = Reader::open(&history.producer, tight).await;
    let mut kept = Vec::new();
    while let Some(delivered) =
        tokio::time::timeout(Duration::from_secs(30), reader.stream.next()).await.unwrap()
    {
        kept.push(delivered.unwrap().batch);
    }
    assert_eq!(kept.iter().map(dcp_arrow::PendingBatch::num_rows).sum::<usize>(), 3000);
    assert!(kept.len() >= 10, "ten windows and more: {} batches", kept.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_taker_holds_no_more_than_the_window_and_a_document() {
    const WINDOW: u32 = 512 * 1024;
    const DOCUMENT: usize = 10_000;
    let mut history = History::start(1, 16).await;
    history.load("doc", 2000, DOCUMENT);
    let mut tight = options(Start::Earliest, End::Now);
    tight.buffer_size = WINDOW;
    tight.batch.max_rows = 5;
    let mut reader = Reader::open(&history.producer, tight).await;
    let mut rows = Vec::new();
    let mut most = 0;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        most = most.max(reader.stream.stats().buffered_bytes);
        rows.extend(reader.next().await.unwrap());
    }
    let bound = u64::from(WINDOW) + DOCUMENT as u64 + 100;
    assert!(most <= bound, "{most} bytes were held");
    assert!(most >= u64::from(WINDOW) / 2, "the window is used: {most} bytes were held");
    rows.extend(reader.rest().await);
    assert_eq!(rows.len(), 2000);
    history.ledger.assert_read(&rows, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_stream_is_kept_alive_by_noops() {
    let mut history = History::start(1, 4).await;
    history.load("doc", 10, 50);
    let mut quiet = options(Start::Earliest, End::Never);
    quiet.noop_interval = Duration::from_secs(1);
    let mut reader = Reader::open(&history.producer, quiet).await;
    let mut rows = reader.take(10).await;
    tokio::time::sleep(Duration::from_millis(3500)).await;
    let stats = reader.stream.stats();
    assert_eq!((stats.reconnects, stats.streaming), (0, 4), "{stats:?}");
    history.upsert("late", "1");
    rows.extend(reader.take(1).await);
    history.ledger.assert_read(&rows, &BTreeMap::new());
    let stats = reader.stream.stats();
    assert!((2..=4).contains(&stats.connection.noops), "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_change_arrives_at_once_without_lingering() {
    let mut history = History::start(1, 4).await;
    let mut prompt = options(Start::Earliest, End::Never);
    prompt.batch.linger = Duration::ZERO;
    let mut reader = Reader::open(&history.producer, prompt).await;
    for number in 0..50 {
        let (vbid, seqno) = history.upsert(&format!("doc-{number}"), "1");
        let began = std::time::Instant::now();
        let rows = reader.take(1).await;
        assert_eq!((rows[0].vbid, rows[0].seqno), (vbid, seqno));
        assert!(began.elapsed() < Duration::from_secs(1), "after {:?}", began.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_a_large_snapshot_in_parts_sends_each_part_about_once() {
    const DOCUMENTS: u64 = 10_000;
    const PART: u64 = 250;
    const PARTS: u64 = 8;
    const LEN: usize = 1000;
    let mut history = History::start(1, 1).await;
    history.load("doc", DOCUMENTS as usize, LEN);
    history.producer.persist();
    // Without a delay, the rules only count what they match.
    let rule = |opcode, direction| {
        format!(
            r#"{{"condition": {{"opcode": "{opcode}", "direction": "{direction}"}},
                "reaction": {{"delay": {{"seconds": 0}}}}}}"#
        )
    };
    let rules = [rule("DCP_MUTATION", "to_client"), rule("DCP_OPEN", "to_server")].join(",");
    history.producer.set_faults(parse_rules(&format!("[{rules}]")).unwrap()).unwrap();
    let keep = Duration::from_secs(60);
    let connect = connect_options(&history.producer).with_keep_connections(keep);
    let mut client = Client::connect(connect).await.unwrap();
    let (mut start, mut seqnos) = (Start::Earliest, Vec::new());
    for part in 1..=PARTS {
        let end = End::At(BTreeMap::from([(Vbid(0), Seqno(part * PART))]));
        let mut small = options(start, end);
        (small.clamp, small.end_exists) = (true, true);
        small.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
        let mut reader = Reader::on(client, small).await.unwrap();
        seqnos.extend(reader.rest().await.iter().map(|row| row.seqno.0));
        (start, client) = (Start::Checkpoint(reader.stream.checkpoint()), reader.client);
    }
    assert!(seqnos.into_iter().eq(1..=PART * PARTS), "every change once, in order");
    let counts = history.producer.fault_counts();
    let [sent, opened] = counts[..] else { panic!("{counts:?}") };
    // What crosses a close is a window of changes, and another one that its last acknowledgement
    // lets through.
    let crossing = 2 * u64::from(StreamOptions::MIN_BUFFER_SIZE) / LEN as u64;
    let most = PARTS * (PART + crossing);
    assert!(sent <= most, "{sent} changes were sent for {} read; {most} would do", PART * PARTS);
    assert_eq!(opened, 1, "every part is read over the same connection");
}
