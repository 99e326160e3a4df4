//! The consumer against the embedded producer: what only a server that lives can show.

use dcp_test::with;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{
    BatchPolicy, ChangeStream, Client, ConnectOptions, Credentials, End, ErrorKind, Start,
    StreamOptions,
};
use dcp_producer::{Producer, ProducerOptions, User, WriteOptions};
use dcp_proto::Op;
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::{Seqno, Vbid};
use tokio::time::timeout;

use crate::rows::{Item, Row, Rows};

pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a cluster with a user who may read and nothing else.
pub(crate) fn cluster_options() -> ProducerOptions {
    let mut options = ProducerOptions::default();
    let (username, password) = ("reader".to_owned(), "reads".to_owned());
    options.users = vec![User { username, password, reads: None }];
    options
}

/// That user, with the rights of the role *Data DCP Reader*: what most tests connect as.
pub(crate) fn reader() -> Credentials {
    Credentials::new("reader", "reads")
}

pub(crate) async fn producer(nodes: usize, vbuckets: u16) -> Producer {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets) = (nodes, vbuckets);
    Producer::start(options).await.unwrap()
}

pub(crate) async fn connect(producer: &Producer) -> Client {
    connect_as(producer, reader()).await
}

pub(crate) async fn connect_as(producer: &Producer, user: Credentials) -> Client {
    let options = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(user);
    Client::connect(options).await.unwrap()
}

pub(crate) fn options(start: Start, end: End) -> StreamOptions {
    let batch = with(BatchPolicy::default(), |o| o.linger = Duration::from_millis(5));
    with(StreamOptions::default(), |o| {
        o.start = start;
        o.end = end;
        o.batch = batch;
    })
}

pub(crate) fn write(producer: &Producer, keys: impl Iterator<Item = u32>) {
    for key in keys {
        let value = Bytes::from(format!("{{\"n\":{key}}}"));
        producer.upsert(format!("key-{key}").as_bytes(), value, WriteOptions::default()).unwrap();
    }
}

pub(crate) fn row(item: Item) -> Row {
    match item {
        Item::Row(row) => row,
        Item::Rollback(rollback) => panic!("unexpected {rollback:?}"),
    }
}

/// Everything up to the end of a finite stream.
pub(crate) async fn read_all(stream: &mut ChangeStream<Vec<Item>>) -> Vec<Item> {
    let mut items = Vec::new();
    while let Some(delivered) =
        timeout(ANSWER_TIMEOUT, stream.next()).await.expect("the stream stalls")
    {
        let delivered = delivered.unwrap();
        assert_eq!(delivered.rows, delivered.batch.len());
        items.extend(delivered.batch);
    }
    items
}

/// Items until there are `count`.
pub(crate) async fn take(stream: &mut ChangeStream<Vec<Item>>, count: usize) -> Vec<Item> {
    let mut items = Vec::new();
    while items.len() < count {
        let next = timeout(ANSWER_TIMEOUT, stream.next()).await;
        let next =
            next.unwrap_or_else(|_| panic!("{} of {count}: {:?}", items.len(), stream.stats()));
        items.extend(next.unwrap().unwrap().batch);
    }
    assert_eq!(items.len(), count);
    items
}

/// Checks that seqnos ascend in every vBucket.
pub(crate) fn assert_ascending(rows: &[Row]) {
    let mut last = BTreeMap::new();
    for row in rows {
        let before = last.insert(row.vbid, row.seqno);
        assert!(before.is_none_or(|before| before < row.seqno), "{row:?} after {before:?}");
    }
}

pub(crate) fn keys(rows: &[Row]) -> BTreeSet<String> {
    rows.iter().map(|row| String::from_utf8(row.key.clone()).unwrap()).collect()
}

pub(crate) fn names(keys: impl Iterator<Item = u32>) -> BTreeSet<String> {
    keys.map(|key| format!("key-{key}")).collect()
}

#[tokio::test]
async fn stream_until_now_delivers_everything_once_and_its_checkpoint_resumes() {
    for in_memory in [true, false] {
        let producer = producer(3, 64).await;
        write(&producer, 0..5000);
        if !in_memory {
            producer.persist();
        }
        let client = connect(&producer).await;
        assert_eq!(client.high_seqnos().await.unwrap(), producer.high_seqnos());
        assert_eq!(client.vbuckets_by_node().len(), 3);
        let mut stream =
            client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
        let rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
        assert_eq!(rows.len(), 5000);
        assert_ascending(&rows);
        assert_eq!(keys(&rows), names(0..5000));
        let stats = stream.stats();
        assert_eq!((stats.complete, stats.rows, stats.failed), (64, 5000, 0));
        let checkpoint = stream.checkpoint();
        for (vbid, seqno) in producer.high_seqnos() {
            assert_eq!(checkpoint.position(vbid).unwrap().seqno, seqno, "{vbid}");
        }

        write(&producer, 5000..5500);
        producer.remove(b"key-3", WriteOptions::default()).unwrap();
        producer.expire(b"key-4", WriteOptions::default()).unwrap();
        let json = checkpoint.to_json();
        let start = Start::Checkpoint(Checkpoint::from_json(json.as_bytes()).unwrap());
        let mut stream = client.stream(options(start, End::Now), Rows::default).await.unwrap();
        let rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
        assert_eq!(rows.len(), 502);
        let op = |key: &[u8]| rows.iter().find(|row| row.key == key).map(|row| row.op);
        assert_eq!(op(b"key-3"), Some(Op::Deletion));
        assert_eq!(op(b"key-4"), Some(Op::Expiration));
        assert_eq!(op(b"key-5123"), Some(Op::Mutation));
        producer.shutdown().await;
    }
}

/// Not called: it is enough that it compiles.
#[expect(dead_code, reason = "checked by the compiler")]
fn every_future_can_be_sent_between_threads(
    client: &'static Client,
    stream: &'static mut ChangeStream<Vec<Item>>,
) {
    fn is_send<T: Send>(_: T) {}
    is_send(Client::connect(ConnectOptions::new("couchbase://host")));
    is_send(client.stream(StreamOptions::default(), Rows::default));
    is_send(client.high_seqnos());
    is_send(client.close());
    is_send(stream.next());
}

#[tokio::test]
async fn bucket_without_changes_is_read_at_once() {
    let producer = producer(2, 64).await;
    let client = connect(&producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await, []);
    assert!(stream.next().await.is_none(), "and stays over");
}

#[tokio::test]
async fn checkpoint_is_a_restart_point_after_every_batch() {
    let producer = producer(2, 16).await;
    write(&producer, 0..400);
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Now);
    options.batch.max_rows = 37;
    let mut stream = client.stream(options.clone(), Rows::default).await.unwrap();
    let (mut seen, mut cuts) = (Vec::new(), Vec::new());
    while let Some(delivered) = stream.next().await {
        let delivered = delivered.unwrap();
        assert!(delivered.rows <= 37);
        seen.extend(delivered.batch.into_iter().map(row));
        cuts.push((seen.clone(), delivered.checkpoint));
    }
    assert!(cuts.len() >= 400 / 37, "{}", cuts.len());
    for (before, checkpoint) in cuts {
        options.start = Start::Checkpoint(checkpoint);
        let mut stream = client.stream(options.clone(), Rows::default).await.unwrap();
        let after: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
        assert_eq!(before.len() + after.len(), 400);
        assert_eq!(&keys(&before) | &keys(&after), names(0..400));
    }
}

#[tokio::test]
async fn backpressure_of_a_slow_application_loses_nothing_and_bounds_memory() {
    const WINDOW: u32 = StreamOptions::MIN_BUFFER_SIZE;
    let producer = producer(1, 8).await;
    let value = Bytes::from(vec![b'x'; 3000]);
    for key in 0..1000 {
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Now);
    options.buffer_size = WINDOW;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let (mut kept, mut most) = (Vec::new(), 0);
    while let Some(delivered) = timeout(ANSWER_TIMEOUT, stream.next()).await.expect("a deadlock") {
        // Batches are kept, as by a reader that collects everything.
        kept.extend(delivered.unwrap().batch);
        if kept.len() % 5 == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        most = most.max(stream.stats().buffered_bytes);
    }
    assert_eq!(kept.len(), 1000);
    assert!(most <= u64::from(WINDOW) + 4000, "{most} bytes were buffered");
    assert!(stream.stats().connection.acks >= 3_000_000 / u64::from(WINDOW));
}

#[tokio::test]
async fn backpressure_bounds_memory_though_connections_come_and_go() {
    const WINDOW: u32 = StreamOptions::MIN_BUFFER_SIZE;
    let producer = producer(1, 1).await;
    let value = Bytes::from(vec![b'x'; 3000]);
    for key in 0..500 {
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    producer.persist();
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Now);
    // Shorter than the pause: an application that takes its time is no outage.
    (options.buffer_size, options.retry_timeout) = (WINDOW, Duration::from_secs(2));
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(600)).await;
        producer.restart(0, true).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(600)).await;
    let stats = stream.stats();
    assert!(stats.buffered_bytes > u64::from(WINDOW) / 2, "{stats:?}");
    assert!(stats.buffered_bytes <= u64::from(WINDOW) + 4000, "{stats:?}");
    let rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
    assert_ascending(&rows);
    assert_eq!(rows.len(), 500);
    assert_eq!(stream.stats().buffered_bytes, 0);
}

/// As when the server drops the cursor of a client that is too slow.
#[tokio::test]
async fn snapshot_from_disk_in_the_middle_of_a_stream_leaves_nothing_out() {
    let producer = producer(1, 1).await;
    let pass = |pass: u32| {
        for key in 0..1000 {
            let value = Bytes::from(format!("{pass:0300}"));
            let key = format!("key-{key}");
            producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
        }
    };
    pass(1);
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Never);
    options.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut rows: Vec<Row> = Vec::new();
    while rows.is_empty() {
        rows.extend(stream.next().await.unwrap().unwrap().batch.into_iter().map(row));
    }
    // The window is full; what comes next leaves memory before it can be sent.
    pass(2);
    pass(3);
    producer.persist();
    while rows.last().is_none_or(|row| row.seqno < Seqno(3000)) {
        let next = timeout(ANSWER_TIMEOUT, stream.next()).await.expect("the stream stalls");
        rows.extend(next.unwrap().unwrap().batch.into_iter().map(row));
    }
    assert_ascending(&rows);
    assert!(rows.len() < 3000, "nothing had left memory");
    let newest: BTreeMap<_, _> = rows.iter().map(|row| (&row.key, &row.value)).collect();
    assert_eq!(newest.len(), 1000);
    assert!(newest.values().all(|value| ***value == format!("{:0300}", 3).into_bytes()));
    let position = stream.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!((position.seqno, position.is_snapshot_complete()), (Seqno(3000), true));
}

#[tokio::test]
async fn document_larger_than_the_window_passes() {
    let producer = producer(1, 1).await;
    let value = Bytes::from(vec![b'x'; 5_000_000]);
    for key in ["a", "b", "c"] {
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Now);
    options.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let items = read_all(&mut stream).await;
    assert_eq!(items.len(), 3);
    assert!(items.into_iter().all(|item| row(item).value == value));
}

#[tokio::test]
async fn stream_next_can_be_cancelled_at_any_moment() {
    let producer = producer(2, 16).await;
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Never);
    options.batch.linger = Duration::ZERO;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut rows = Vec::new();
    let mut given_up = 0;
    for key in 0..300 {
        write(&producer, key..key + 1);
        // Given up after one look, or after one more turn of everything else.
        tokio::select! {
            biased;
            delivered = stream.next() => {
                rows.extend(delivered.unwrap().unwrap().batch.into_iter().map(row));
            }
            () = async { if key % 2 == 0 { tokio::task::yield_now().await } } => given_up += 1,
        }
        tokio::time::sleep(Duration::from_micros(u64::from(key))).await;
    }
    let left = 300 - rows.len();
    rows.extend(take(&mut stream, left).await.into_iter().map(row));
    assert!(given_up > 0);
    assert_ascending(&rows);
    assert_eq!(keys(&rows), names(0..300));
}

#[tokio::test]
async fn stream_from_the_latest_skips_what_was_written_before() {
    let producer = producer(2, 16).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let mut stream =
        client.stream(options(Start::Latest, End::Never), Rows::default).await.unwrap();
    for (vbid, seqno) in producer.high_seqnos() {
        let checkpoint = stream.checkpoint();
        let position = checkpoint.position(vbid).map_or(Seqno::ZERO, |position| position.seqno);
        assert_eq!(position, seqno, "{vbid}: the start is a checkpoint already");
    }
    write(&producer, 100..140);
    let rows: Vec<Row> = take(&mut stream, 40).await.into_iter().map(row).collect();
    assert_eq!(keys(&rows), names(100..140));
}

#[tokio::test]
async fn stream_of_some_vbuckets_ends_at_the_given_seqnos() {
    let producer = producer(2, 8).await;
    write(&producer, 0..200);
    producer.persist();
    let high = producer.high_seqnos();
    let client = connect(&producer).await;
    let end = End::At([(Vbid(1), high[&Vbid(1)]), (Vbid(6), high[&Vbid(6)])].into());
    let mut options = options(Start::Earliest, end);
    options.vbuckets = Some(vec![Vbid(1), Vbid(2), Vbid(6)]);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
    assert_eq!(rows.len() as u64, high[&Vbid(1)].0 + high[&Vbid(6)].0);
    assert!(rows.iter().all(|row| [Vbid(1), Vbid(6)].contains(&row.vbid)));
}

#[tokio::test]
async fn checkpoint_that_is_not_of_this_bucket_is_refused() {
    let (one, other) = (producer(1, 4).await, producer(1, 4).await);
    write(&one, 0..20);
    let client = connect(&one).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
    read_all(&mut stream).await;
    let checkpoint = stream.checkpoint();
    let start = Start::Checkpoint(checkpoint.clone());
    let client = connect(&other).await;
    let error = client.stream(options(start, End::Now), Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint, "{error}");

    let client = connect(&one).await;
    let mut position = checkpoint.position(Vbid(2)).unwrap().clone();
    let beyond = Start::Checkpoint(checkpoint.clone().with_position(Vbid(4), position.clone()));
    let error = client.stream(options(beyond, End::Now), Rows::default).await.unwrap_err();
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Checkpoint, Some(Vbid(4))), "{error}");

    // Right bucket, right branch, and more changes than there are: a restored copy.
    position.seqno.0 += 100;
    position.snapshot.end.0 += 100;
    let ahead = Start::Checkpoint(checkpoint.with_position(Vbid(2), position));
    let error = client.stream(options(ahead, End::Never), Rows::default).await.unwrap_err();
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Checkpoint, Some(Vbid(2))), "{error}");
}

#[tokio::test]
async fn vbuckets_that_move_are_followed_without_a_gap() {
    let producer = producer(3, 12).await;
    let client = connect(&producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
    let mut rows = Vec::new();
    let mut next = 0;
    for round in 0..6_u16 {
        write(&producer, next..next + 200);
        for vbid in 0..12 {
            producer.move_vbucket(Vbid(vbid), usize::from((vbid + round) % 3)).unwrap();
        }
        write(&producer, next + 200..next + 400);
        next += 400;
        rows.extend(take(&mut stream, 400).await.into_iter().map(row));
    }
    assert_ascending(&rows);
    assert_eq!(keys(&rows), names(0..next));
    let stats = stream.stats();
    assert_eq!((stats.failed, stats.complete), (0, 0), "{stats:?}");
}

#[tokio::test]
async fn server_that_is_gone_is_reported_in_the_end() {
    let producer = producer(1, 4).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Never);
    options.retry_timeout = Duration::from_millis(700);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    take(&mut stream, 10).await;
    producer.shutdown().await;
    let error = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(std::error::Error::source(&error).is_some(), "{error:?} says why");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn client_that_is_closed_ends_its_streams() {
    let producer = producer(1, 4).await;
    let client = connect(&producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
    client.close().await;
    let error = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    let error = client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn stream_that_is_dropped_or_closed_leaves_no_task() {
    let producer = producer(2, 16).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let metrics = tokio::runtime::Handle::current().metrics();
    let settled = async |expected: usize| {
        for _ in 0..500 {
            if metrics.num_alive_tasks() <= expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} tasks, {expected} before", metrics.num_alive_tasks());
    };
    // The connection that learned the bucket may still be on its way out.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = metrics.num_alive_tasks();
    for close in [false, true] {
        let mut stream =
            client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
        take(&mut stream, 100).await;
        assert!(metrics.num_alive_tasks() > before);
        if close {
            stream.close();
            assert!(stream.next().await.is_none());
        } else {
            drop(stream);
        }
        settled(before).await;
    }
}
