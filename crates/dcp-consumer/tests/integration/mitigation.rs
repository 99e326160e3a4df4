//! Rollback mitigation, ends that cut and hidden documents, against a cluster that fails.

use dcp_test::with;
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{
    ChangeStream, Client, End, ErrorKind, Filter, Start, StreamEvent, StreamOptions,
};
use dcp_producer::{Producer, WriteOptions};
use dcp_proto::{BatchSink, Change, ChangeSink, Rollback, SinkError};
use dcp_wire::{Datatype, MAX_BODY_LEN, Seqno, Vbid, snappy};
use tokio::time::{sleep, timeout};

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, connect, options, read_all, row, take, write,
};
use crate::rows::{Item, Rows};

const VB: Vbid = Vbid(0);

async fn cluster(nodes: usize, vbuckets: u16, replicas: u8) -> Producer {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets, options.replicas) = (nodes, vbuckets, replicas);
    Producer::start(options).await.unwrap()
}

fn persisted_only(start: Start, end: End) -> StreamOptions {
    with(options(start, end), |o| o.persisted_only = true)
}

async fn stream(client: &Client, options: StreamOptions) -> ChangeStream<Vec<Item>> {
    client.stream(options, Rows::default).await.unwrap()
}

/// Waits until so many rows are held back, during which none may be delivered.
async fn held(stream: &mut ChangeStream<Vec<Item>>, rows: u64) {
    let wait = async {
        while stream.stats().unpersisted_rows != rows {
            if let Ok(next) = timeout(Duration::from_millis(20), stream.next()).await {
                panic!("{:?} was delivered", next.unwrap().unwrap().batch);
            }
        }
    };
    if timeout(ANSWER_TIMEOUT, wait).await.is_err() {
        panic!("not {rows} rows wait: {:?}", stream.stats());
    }
}

/// Waits until the stream tells something about itself.
async fn until(stream: &ChangeStream<Vec<Item>>, told: impl Fn(&ChangeStream<Vec<Item>>) -> bool) {
    let wait = async {
        while !told(stream) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let in_time = timeout(ANSWER_TIMEOUT, wait).await.is_ok();
    assert!(in_time, "{:?} {:?}", stream.stats(), stream.vbucket_stats());
}

fn seqnos(items: &[Item]) -> Vec<u64> {
    let seqno = |item: &Item| match item {
        Item::Row(row) => row.seqno.0,
        Item::Rollback(rollback) => panic!("{rollback:?}"),
    };
    items.iter().map(seqno).collect()
}

#[tokio::test]
async fn rule_11_no_change_is_delivered_that_a_failover_takes_back() {
    for persisted_only in [true, false] {
        let producer = cluster(2, 1, 1).await;
        write(&producer, 0..10);
        let client = connect(&producer).await;
        let options = options(Start::Earliest, End::Never);
        let mut stream =
            stream(&client, with(options, |o| o.persisted_only = persisted_only)).await;
        take(&mut stream, 10).await;
        producer.set_replica_lag(VB, 1, None).unwrap();
        write(&producer, 10..15);
        if persisted_only {
            held(&mut stream, 5).await;
        } else {
            assert_eq!(seqnos(&take(&mut stream, 5).await), [11, 12, 13, 14, 15]);
        }
        producer.failover(0, false).unwrap();
        write(&producer, 20..23);
        if persisted_only {
            let rows = take(&mut stream, 3).await;
            assert_eq!(seqnos(&rows), [11, 12, 13]);
            assert!(rows.into_iter().all(|item| row(item).key.starts_with(b"key-2")));
            assert_eq!(stream.stats().connection.rollbacks, 0);
        } else {
            let items = take(&mut stream, 4).await;
            let Item::Rollback(rollback) = &items[0] else { panic!("{items:?}") };
            assert_eq!((rollback.seqno, rollback.from_seqno), (Seqno(10), Seqno(15)));
            assert_eq!(seqnos(&items[1..]), [11, 12, 13], "other changes than before");
        }
        producer.shutdown().await;
    }
}

/// Seqno 3 replaces seqno 1, which is therefore in no snapshot of the active copy any more, and the
/// replica does not get it. Seqno 2 is on both disks: it is delivered from the middle of the snapshot.
/// The failover brings seqno 1 back, which the reader gets only because it is rolled back.
#[tokio::test]
async fn sv_14_inside_a_deduplicated_snapshot_changes_are_repeated_and_none_is_taken_back() {
    let producer = cluster(2, 1, 1).await;
    write(&producer, 0..2);
    producer.persist();
    producer.set_replica_lag(VB, 1, None).unwrap();
    write(&producer, 0..1);
    producer.persist();
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Never)).await;
    let before = take(&mut stream, 1).await;
    assert_eq!(seqnos(&before), [2], "both copies have it on disk");
    held(&mut stream, 1).await;
    producer.failover(0, false).unwrap();
    let after = take(&mut stream, 3).await;
    let Item::Rollback(rollback) = &after[0] else { panic!("{after:?}") };
    assert_eq!((rollback.seqno, rollback.from_seqno), (Seqno(0), Seqno(2)));
    assert_eq!(seqnos(&after[1..]), [1, 2]);
    assert_eq!(after[2], before[0], "the same change again");
    assert_eq!(row(after[1].clone()).key, b"key-0");
    producer.shutdown().await;
}

#[tokio::test]
async fn rule_11_the_copy_that_persists_least_decides_and_is_shown() {
    let producer = cluster(3, 2, 2).await;
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Never)).await;
    producer.hold_persistence(VB, 2, true).unwrap();
    write(&producer, 0..40);
    let high = producer.high_seqnos();
    let rows = take(&mut stream, high[&Vbid(1)].0 as usize).await;
    assert!(rows.into_iter().all(|item| row(item).vbid == Vbid(1)), "others go on");
    held(&mut stream, high[&VB].0).await;
    let stats = stream.stats();
    assert!(
        stats.unpersisted_bytes > 0 && stats.unpersisted_bytes <= stats.buffered_bytes,
        "{stats:?}"
    );
    assert!(!stats.unpersisted_for.is_zero() && stats.diverged == 0, "{stats:?}");
    assert!(stream.vbucket_stats()[0].unpersisted_for.is_some());
    let persisted = |stream: &ChangeStream<Vec<Item>>| stream.vbucket_stats()[0].persisted_seqno;
    until(&stream, |stream| persisted(stream) == Some(Seqno(0))).await;
    producer.hold_persistence(VB, 2, false).unwrap();
    write(&producer, 40..60);
    let high = producer.high_seqnos();
    while high.iter().any(|(&vbid, &high)| {
        stream.checkpoint().position(vbid).is_none_or(|position| position.seqno != high)
    }) {
        timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap();
    }
    until(&stream, |stream| persisted(stream) == Some(high[&VB])).await;
    until(&stream, |stream| {
        (stream.stats().unpersisted_rows, stream.stats().unpersisted_bytes) == (0, 0)
    })
    .await;
    until(&stream, |stream| stream.stats().unpersisted_for.is_zero()).await;
}

#[tokio::test]
async fn rule_11_changes_wait_for_a_node_that_is_down_until_the_map_drops_it() {
    let producer = cluster(3, 1, 1).await;
    write(&producer, 0..5);
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Never)).await;
    take(&mut stream, 5).await;
    let [_, replica] = producer.copies_of(VB).unwrap()[..] else { panic!("two copies") };
    producer.kill(replica).unwrap();
    write(&producer, 5..8);
    held(&mut stream, 3).await;
    producer.failover(replica, false).unwrap();
    assert_eq!(seqnos(&take(&mut stream, 3).await), [6, 7, 8]);
    // It comes back as a replica, which counts again.
    producer.restart(replica, false).await.unwrap();
    producer.rebalance().unwrap();
    let copies = producer.copies_of(VB).unwrap();
    assert_eq!(copies.len(), 2);
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, 8..10);
    held(&mut stream, 2).await;
    producer.hold_persistence(VB, 1, false).unwrap();
    write(&producer, 10..11);
    assert_eq!(seqnos(&take(&mut stream, 3).await), [9, 10, 11]);
    assert_eq!(stream.stats().connection.rollbacks, 0);
}

#[tokio::test]
async fn rule_11_it_is_shown_that_changes_wait_for_a_copy_on_another_branch() {
    let producer = cluster(3, 1, 2).await;
    write(&producer, 0..5);
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Never)).await;
    take(&mut stream, 5).await;
    // The second replica does not hear that the first one was promoted.
    producer.set_replica_lag(VB, 2, None).unwrap();
    producer.failover(0, false).unwrap();
    write(&producer, 5..8);
    held(&mut stream, 3).await;
    until(&stream, |stream| stream.stats().diverged == 1).await;
    assert!(stream.vbucket_stats()[0].is_diverged);
    producer.set_replica_lag(VB, 1, Some(0)).unwrap();
    assert_eq!(seqnos(&take(&mut stream, 3).await), [6, 7, 8]);
    until(&stream, |stream| stream.stats().diverged == 0).await;
}

#[tokio::test]
async fn rule_11_what_waits_is_bounded_by_the_window() {
    const VALUE: usize = 1024;
    let producer = cluster(2, 1, 1).await;
    producer.hold_persistence(VB, 1, true).unwrap();
    for key in 0..200 {
        let value = Bytes::from(vec![b'x'; VALUE]);
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    let mut options = persisted_only(Start::Earliest, End::Never);
    options.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    let mut stream = stream(&client, options).await;
    let window = u64::from(StreamOptions::MIN_BUFFER_SIZE);
    until(&stream, |stream| stream.stats().unpersisted_bytes >= window).await;
    let stats = stream.stats();
    assert!(stats.unpersisted_bytes < window + 2 * VALUE as u64, "{stats:?}");
    producer.hold_persistence(VB, 1, false).unwrap();
    producer.persist();
    take(&mut stream, 200).await;
}

#[tokio::test]
async fn rule_11_an_ephemeral_bucket_has_nothing_to_wait_for() {
    let mut options = cluster_options();
    (options.ephemeral, options.nodes, options.vbuckets) = (true, 1, 1);
    let producer = Producer::start(options).await.unwrap();
    write(&producer, 0..5);
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Now)).await;
    assert_eq!(read_all(&mut stream).await.len(), 5);
    assert!(stream.take_events().contains(&StreamEvent::NothingPersisted));
}

#[tokio::test]
async fn rule_10_a_clamped_stream_delivers_exactly_up_to_its_end() {
    for persist in [false, true] {
        let producer = cluster(1, 1, 0).await;
        write(&producer, 0..20);
        if persist {
            producer.persist();
        }
        let client = connect(&producer).await;
        let (mut start, mut all) = (Start::Earliest, Vec::new());
        for end in [7, 8, 15, 20] {
            let at = End::At([(VB, Seqno(end))].into());
            let options = with(options(start, at), |o| o.clamp = true);
            let mut stream = stream(&client, options).await;
            all.extend(seqnos(&read_all(&mut stream).await));
            assert_eq!(all, (1..=end).collect::<Vec<_>>(), "persist {persist}");
            let checkpoint = stream.checkpoint();
            let position = checkpoint.position(VB).unwrap();
            assert_eq!((position.seqno, position.snapshot.end), (Seqno(end), Seqno(20)));
            start = Start::Checkpoint(checkpoint);
        }
    }
}

#[tokio::test]
async fn rule_11_clamped_stream_ends_when_the_snapshot_at_its_end_is_persisted() {
    let producer = cluster(2, 1, 1).await;
    write(&producer, 0..10);
    producer.persist();
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, 10..20);
    // From the active copy's disk, in one snapshot.
    producer.persist();
    let client = connect(&producer).await;
    for end_persisted in [false, true] {
        let at = End::At([(VB, Seqno(10))].into());
        let options = persisted_only(Start::Earliest, at);
        let mut stream = stream(
            &client,
            with(options, |o| {
                o.clamp = true;
                o.end_persisted = end_persisted;
            }),
        )
        .await;
        take(&mut stream, 10).await;
        if end_persisted {
            let next = timeout(Duration::from_millis(300), stream.next()).await;
            assert!(next.is_err(), "its snapshot ends at 20, which is not persisted");
            assert_eq!(stream.stats().complete, 0);
            producer.hold_persistence(VB, 1, false).unwrap();
            producer.persist();
        }
        assert_eq!(read_all(&mut stream).await, []);
        assert_eq!(stream.stats().complete, 1);
    }
}

#[tokio::test]
async fn rule_11_changes_do_not_wait_for_ever_on_a_branch_that_was_abandoned() {
    let producer = cluster(2, 1, 1).await;
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, 0..10);
    producer.persist();
    let client = connect(&producer).await;
    // The server has sent the end of the stream, which waits behind the changes.
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Now)).await;
    held(&mut stream, 10).await;
    // So it has no stream to end when the history of the vBucket is another one.
    producer.roll_back(VB, Seqno(8)).unwrap();
    producer.hold_persistence(VB, 1, false).unwrap();
    producer.persist();
    assert_eq!(seqnos(&read_all(&mut stream).await), (1..=8).collect::<Vec<_>>());
}

/// A read up to seqno 4 whose last change was written again before it began: as seqno 8, which the
/// replica does not get. `first` is what was written again before that, and reached the replica.
async fn replaced_above_the_end(
    first: &[&str],
    filter: Filter,
) -> (Producer, ChangeStream<Vec<Item>>) {
    let producer = cluster(2, 1, 1).await;
    let put = |key: &str, value: &'static [u8]| {
        let value = Bytes::from_static(value);
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    };
    ["a", "b", "c", "K"].into_iter().for_each(|key| put(key, b"1"));
    producer.persist();
    first.iter().for_each(|key| put(key, b"2"));
    producer.persist();
    // What the replica is still to get of that has arrived.
    sleep(Duration::from_millis(50)).await;
    producer.set_replica_lag(VB, 1, None).unwrap();
    put("K", b"2");
    producer.persist();
    let client = connect(&producer).await;
    let at = End::At([(VB, Seqno(4))].into());
    let options = with(persisted_only(Start::Earliest, at), |o| {
        o.clamp = true;
        o.end_persisted = true;
        o.end_exists = true;
        o.filter = filter;
    });
    let stream = stream(&client, options).await;
    (producer, stream)
}

#[tokio::test]
async fn rule_11_read_ends_once_what_replaced_its_last_change_is_persisted() {
    let default = || Filter::Collections(vec!["_default._default".to_owned()]);
    for (first, filter) in [
        // The snapshot the end lies in holds changes below it, or none.
        (&["b", "c"][..], Filter::All),
        (&["a", "b", "c"], Filter::All),
        (&["b", "c"], default()),
        (&["a", "b", "c"], default()),
    ] {
        let rows = 3 - first.len();
        let (producer, mut stream) = replaced_above_the_end(first, filter.clone()).await;
        take(&mut stream, rows).await;
        let next = timeout(Duration::from_millis(300), stream.next()).await;
        assert!(next.is_err(), "{first:?} {filter:?}: the replica has K at seqno 4");
        // The replica takes over: K is back at seqno 4.
        producer.failover(0, false).unwrap();
        let rest = read_all(&mut stream).await;
        let last = row(rest.last().unwrap().clone());
        assert_eq!((last.key, last.seqno), (b"K".to_vec(), Seqno(4)), "{first:?} {filter:?}");

        let (producer, mut stream) = replaced_above_the_end(first, filter).await;
        take(&mut stream, rows).await;
        producer.set_replica_lag(VB, 1, Some(0)).unwrap();
        producer.persist();
        assert_eq!(read_all(&mut stream).await, [], "K is beyond the end on all copies");
    }
}

#[tokio::test]
async fn rule_11_a_read_of_nothing_below_its_end_waits_for_what_replaced_it() {
    let producer = cluster(2, 1, 1).await;
    let other = producer.create_collection("_default", "other", None).unwrap();
    let mut in_other = WriteOptions::default();
    in_other.collection_id = other;
    let put = |key: &[u8], options| {
        producer.upsert(key, Bytes::from_static(b"{}"), options).unwrap().seqno
    };
    let end = put(b"K", in_other);
    put(b"a", WriteOptions::default());
    producer.persist();
    sleep(Duration::from_millis(50)).await;
    producer.set_replica_lag(VB, 1, None).unwrap();
    // Moves K past what the server looks at for a stream that ends below.
    put(b"K", in_other);
    put(b"b", WriteOptions::default());
    producer.persist();
    let client = connect(&producer).await;
    let options = with(persisted_only(Start::Earliest, End::At([(VB, end)].into())), |o| {
        o.clamp = true;
        o.end_persisted = true;
        o.end_exists = true;
        o.filter = Filter::Collections(vec!["_default.other".to_owned()]);
    });
    let mut stream = stream(&client, options).await;
    let next = timeout(Duration::from_millis(300), stream.next()).await;
    assert!(next.is_err(), "the replica has K at seqno {end}");
    producer.failover(0, false).unwrap();
    let rows = read_all(&mut stream).await;
    assert_eq!(row(rows.last().unwrap().clone()).seqno, end);
}

/// Counts rows and what they take once their values are inflated, as columns do.
#[derive(Default)]
struct Inflated(usize, usize);

impl ChangeSink for Inflated {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.0 += 1;
        self.1 += match change.datatype.contains(Datatype::SNAPPY) {
            true => snappy::decompressed_len(change.value, MAX_BODY_LEN).unwrap(),
            false => change.value.len(),
        };
        Ok(())
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl BatchSink for Inflated {
    type Batch = usize;

    fn rows(&self) -> usize {
        self.0
    }

    fn size_bytes(&self) -> usize {
        self.1
    }

    fn take_batch(&mut self) -> Result<usize, SinkError> {
        Ok(std::mem::take(self).1)
    }
}

#[tokio::test]
async fn changes_compressed_and_delayed_do_not_overflow_a_batch() {
    const DOCUMENTS: usize = 80;
    const LEN: usize = 1 << 20;
    let producer = cluster(2, 1, 1).await;
    producer.set_replica_lag(VB, 1, None).unwrap();
    for key in 0..DOCUMENTS {
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), vec![b' '; LEN].into(), WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    let options = with(persisted_only(Start::Earliest, End::Now), |o| o.compressed = true);
    let most = options.batch.max_bytes;
    let mut stream = client.stream(options, Inflated::default).await.unwrap();
    let wait = async {
        while stream.stats().unpersisted_rows != DOCUMENTS as u64 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, wait).await.unwrap();
    producer.set_replica_lag(VB, 1, Some(0)).unwrap();
    producer.persist();
    let mut rows = 0;
    while let Some(delivered) = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap() {
        let delivered = delivered.unwrap();
        rows += delivered.rows;
        // As for changes that arrive: what a read gives at once, inflated.
        assert!(delivered.batch <= most + 16 * LEN, "{} bytes in a batch", delivered.batch);
    }
    assert_eq!(rows, DOCUMENTS);
}

#[tokio::test]
async fn stream_options_that_contradict_each_other_are_refused() {
    let producer = cluster(1, 1, 0).await;
    let client = connect(&producer).await;
    let wrong = [
        with(StreamOptions::default(), |o| o.clamp = true),
        with(StreamOptions::default(), |o| {
            o.end_persisted = true;
            o.end = End::Now;
        }),
    ];
    for options in wrong {
        let error = client.stream(options, Rows::default).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[tokio::test]
async fn transaction_records_are_hidden_unless_requested() {
    let producer = cluster(1, 1, 0).await;
    for key in ["a", "_txn:atr-1", "b", "_txn:client-record"] {
        let value = Bytes::from_static(b"{}");
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    for (system_documents, seen) in [(false, 2), (true, 4)] {
        let options = options(Start::Earliest, End::Now);
        let mut stream =
            stream(&client, with(options, |o| o.system_documents = system_documents)).await;
        assert_eq!(read_all(&mut stream).await.len(), seen);
        let checkpoint = stream.checkpoint();
        assert_eq!(checkpoint.position(VB).unwrap().seqno, Seqno(4), "past what is hidden");
    }
}

#[tokio::test]
async fn server_that_may_not_report_persistence_ends_the_stream_with_advice() {
    let refusals =
        [("EACCESS", ErrorKind::AccessDenied), ("UNKNOWN_COMMAND", ErrorKind::Unsupported)];
    for (status, kind) in refusals {
        let producer = cluster(1, 1, 0).await;
        write(&producer, 0..5);
        producer.set_faults(observe_answers(status, "")).unwrap();
        let client = connect(&producer).await;
        let mut stream = stream(&client, persisted_only(Start::Earliest, End::Now)).await;
        let error = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains("persisted"), "{error}");
    }
}

#[tokio::test]
async fn rule_11_a_copy_that_does_not_answer_is_asked_again() {
    for status in ["ETMPFAIL", "KEY_ENOENT", "NOT_MY_VBUCKET"] {
        let producer = cluster(2, 1, 1).await;
        write(&producer, 0..5);
        producer.set_faults(observe_answers(status, r#", "nth": 1"#)).unwrap();
        let client = connect(&producer).await;
        let mut stream = stream(&client, persisted_only(Start::Earliest, End::Now)).await;
        assert_eq!(read_all(&mut stream).await.len(), 5, "{status}");
        assert_eq!(producer.fault_counts(), [1]);
    }
}

fn observe_answers(status: &str, further: &str) -> Vec<dcp_producer::Rule> {
    let rules = format!(
        r#"[{{"condition": {{"opcode": "OBSERVE_SEQNO"{further}}},
             "reaction": {{"answer": {{"status": "{status}"}}}}}}]"#
    );
    dcp_producer::parse_rules(&rules).unwrap()
}

#[tokio::test]
async fn rule_11_vbuckets_move_while_their_changes_wait() {
    let producer = cluster(3, 6, 1).await;
    let client = connect(&producer).await;
    let mut stream = stream(&client, persisted_only(Start::Earliest, End::Never)).await;
    let mut next = 0;
    for round in 0..4_usize {
        write(&producer, next..next + 60);
        for vbid in (0..6).map(Vbid) {
            producer.move_vbucket(vbid, (usize::from(vbid.0) + round) % 3).unwrap();
        }
        write(&producer, next + 60..next + 120);
        let mut keys: Vec<Vec<u8>> =
            take(&mut stream, 120).await.into_iter().map(|item| row(item).key).collect();
        let mut all: Vec<Vec<u8>> =
            (next..next + 120).map(|key| format!("key-{key}").into_bytes()).collect();
        keys.sort();
        all.sort();
        assert_eq!(keys, all, "each once, round {round}");
        next += 120;
    }
    assert_eq!(stream.stats().connection.rollbacks, 0);
}
