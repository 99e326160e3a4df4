//! Batches that the application acknowledges itself, in any order.

use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{AckToken, Acknowledge, ChangeStream, End, ErrorKind, Start, StreamOptions};
use dcp_producer::WriteOptions;
use dcp_wire::{Seqno, Vbid};
use tokio::time::timeout;

use crate::embedded::{ANSWER_TIMEOUT, connect, options, producer, read_all, row, write};
use crate::rows::{Item, Rows};

fn manual(start: Start, max_rows: usize) -> StreamOptions {
    let mut options = options(start, End::Never);
    options.acknowledge = Acknowledge::Manual;
    options.batch.max_rows = max_rows;
    options
}

async fn next(stream: &mut ChangeStream<Vec<Item>>) -> (AckToken, usize) {
    let delivered = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap();
    (delivered.token, delivered.rows)
}

fn seqno(stream: &ChangeStream<Vec<Item>>) -> Option<Seqno> {
    stream.checkpoint().position(Vbid(0)).map(|position| position.seqno)
}

#[tokio::test]
async fn restart_repeats_every_change_that_was_not_acknowledged() {
    let producer = producer(1, 1).await;
    write(&producer, 0..50);
    let client = connect(&producer).await;
    let options = manual(Start::Earliest, 10);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut tokens = Vec::new();
    for _ in 0..5 {
        let (token, rows) = next(&mut stream).await;
        assert_eq!(rows, 10);
        tokens.push(token);
    }
    for i in [4, 1, 3] {
        stream.ack(tokens[i]).unwrap();
    }
    assert_eq!(seqno(&stream), None, "the first batch is not acknowledged");
    let acks = stream.acknowledger();
    acks.ack(tokens[0]).unwrap();
    assert_eq!(seqno(&stream), Some(Seqno(20)));
    assert_eq!(acks.unacknowledged(), 1);
    let start = Start::Checkpoint(stream.checkpoint());
    drop(stream);
    let now = self::options(start, End::Now);
    let mut stream = client.stream(now, Rows::default).await.unwrap();
    let seqnos: Vec<u64> =
        read_all(&mut stream).await.into_iter().map(|item| row(item).seqno.0).collect();
    assert_eq!(seqnos, (21..=50).collect::<Vec<_>>());
    assert_eq!(stream.ack(tokens[2]).unwrap_err().kind(), ErrorKind::Config);
    acks.ack(tokens[2]).unwrap();
    let position = acks.checkpoint().unwrap().position(Vbid(0)).unwrap().seqno;
    assert_eq!(position, Seqno(50), "after the stream is gone as well");
}

#[tokio::test]
async fn server_waits_for_acknowledgements_and_goes_on_with_them() {
    const VALUE: usize = 1024;
    const DOCUMENTS: usize = 400;
    let producer = producer(1, 1).await;
    for key in 0..DOCUMENTS {
        let key = format!("key-{key}");
        let value = Bytes::from(vec![b'x'; VALUE]);
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    let mut options = manual(Start::Earliest, 16);
    options.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let (mut tokens, mut rows) = (Vec::new(), 0);
    while let Ok(delivered) = timeout(Duration::from_millis(500), stream.next()).await {
        let delivered = delivered.unwrap().unwrap();
        rows += delivered.rows;
        tokens.push(delivered.token);
    }
    let window = StreamOptions::MIN_BUFFER_SIZE as usize;
    assert!(rows * VALUE <= window + 2 * VALUE, "{rows} rows, but a window holds {window} bytes");
    assert!(rows * VALUE >= window / 2, "{rows} rows");
    // The newest first: bytes come back whatever the order.
    for token in tokens.into_iter().rev() {
        stream.ack(token).unwrap();
    }
    while rows < DOCUMENTS {
        let (token, more) = next(&mut stream).await;
        stream.ack(token).unwrap();
        rows += more;
    }
    assert_eq!(seqno(&stream), Some(Seqno(DOCUMENTS as u64)));
}

#[tokio::test]
async fn rollback_is_not_passed_before_it_is_acknowledged() {
    let producer = producer(1, 1).await;
    let client = connect(&producer).await;
    let mut stream = client.stream(manual(Start::Earliest, 10), Rows::default).await.unwrap();
    let mut tokens = Vec::new();
    for round in 0..2 {
        write(&producer, round * 10..round * 10 + 10);
        tokens.push(next(&mut stream).await.0);
    }
    producer.roll_back(Vbid(0), Seqno(15)).unwrap();
    // The record, and 11 to 15 again.
    let (mut after, mut rows) = (Vec::new(), 0);
    while rows < 6 {
        let (token, more) = next(&mut stream).await;
        after.push(token);
        rows += more;
    }
    for token in after {
        stream.ack(token).unwrap();
    }
    stream.ack(tokens[0]).unwrap();
    let position = stream.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!((position.seqno, position.epoch), (Seqno(10), 0));
    stream.ack(tokens[1]).unwrap();
    let position = stream.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!((position.seqno, position.epoch), (Seqno(15), 1));
}
