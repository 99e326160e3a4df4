//! Rollbacks by an embedded cluster that has lost its newest changes.

use dcp_consumer::{ChangeStream, End, ErrorKind, OnRollback, Start};
use dcp_producer::Producer;
use dcp_proto::Rollback;
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::{Seqno, Vbid};
use tokio::time::timeout;

use crate::embedded::{
    PATIENCE, assert_ascending, connect, keys, names, options, producer, read_all, row, take, write,
};
use crate::rows::{Item, Row, Rows};

/// A stream of vBucket 0 that has delivered three closed snapshots of 10 changes each.
async fn three_snapshots(producer: &Producer, on_rollback: OnRollback) -> ChangeStream<Vec<Item>> {
    let client = connect(producer).await;
    let mut options = options(Start::Earliest, End::Never);
    options.on_rollback = on_rollback;
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    for round in 0..3 {
        write(producer, round * 10..round * 10 + 10);
        take(&mut stream, 10).await;
    }
    stream
}

fn rollback(item: &Item) -> &Rollback {
    match item {
        Item::Rollback(rollback) => rollback,
        Item::Row(row) => panic!("a rollback was expected, not {row:?}"),
    }
}

#[tokio::test]
async fn a_rollback_is_a_record_and_everything_above_it_comes_again() {
    let producer = producer(1, 1).await;
    let mut stream = three_snapshots(&producer, OnRollback::Emit).await;
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    // Snapshots were complete at 10, 20 and 30; seqno 25 lies inside the last one.
    let items = take(&mut stream, 6).await;
    let record = *rollback(&items[0]);
    assert_eq!((record.seqno, record.from_seqno, record.epoch), (Seqno(20), Seqno(30), 1));
    write(&producer, 100..110);
    let mut rows: Vec<Row> = items[1..].iter().cloned().map(row).collect();
    rows.extend(take(&mut stream, 10).await.into_iter().map(row));
    assert_eq!(rows[0].seqno, Seqno(21), "nothing is passed over");
    assert_eq!(rows[14].seqno, Seqno(35));
    assert_ascending(&rows);
    assert!(names(100..110).is_subset(&keys(&rows)));
    assert_eq!(stream.checkpoint().position(Vbid(0)).unwrap().epoch, 1);
    assert_eq!(stream.stats().connection.rollbacks, 1);
}

#[tokio::test]
async fn a_rollback_right_after_a_restart_goes_to_the_newest_complete_snapshot() {
    let producer = producer(1, 1).await;
    let stream = three_snapshots(&producer, OnRollback::Emit).await;
    let json = stream.checkpoint().to_json();
    drop(stream);
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    write(&producer, 100..110);
    let start = Start::Checkpoint(Checkpoint::from_json(json.as_bytes()).unwrap());
    let client = connect(&producer).await;
    let mut stream = client.stream(options(start, End::Now), Rows::default).await.unwrap();
    let items = read_all(&mut stream).await;
    // Seqno 25 lies inside the snapshot from 21 to 30.
    let record = rollback(&items[0]);
    assert_eq!((record.seqno, record.from_seqno, record.epoch), (Seqno(20), Seqno(30), 1));
    let rows: Vec<Row> = items[1..].iter().cloned().map(row).collect();
    assert_eq!((rows[0].seqno, rows.len()), (Seqno(21), 15), "nothing at or below 20 comes again");
}

#[tokio::test]
async fn a_rollback_can_begin_the_vbucket_again() {
    let producer = producer(1, 1).await;
    let mut stream = three_snapshots(&producer, OnRollback::Resync).await;
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let items = take(&mut stream, 26).await;
    assert_eq!(rollback(&items[0]).seqno, Seqno(0));
    let rows: Vec<Row> = items[1..].iter().cloned().map(row).collect();
    assert_eq!(keys(&rows), names(0..25));
}

#[tokio::test]
async fn a_rollback_can_end_the_stream() {
    let producer = producer(1, 1).await;
    let mut stream = three_snapshots(&producer, OnRollback::Raise).await;
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let error = timeout(PATIENCE, stream.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Rollback, Some(Vbid(0))));
    assert!(error.rollback_seqno().unwrap() <= Seqno(25));
    assert!(stream.next().await.is_none(), "an error is told once");
    assert_eq!(stream.checkpoint().position(Vbid(0)).unwrap().seqno, Seqno(30));
}

#[tokio::test]
async fn a_finite_stream_does_not_wait_for_what_a_failover_lost() {
    let producer = producer(1, 1).await;
    let client = connect(&producer).await;
    let end = End::At([(Vbid(0), Seqno(40))].into());
    let mut stream = client.stream(options(Start::Earliest, end), Rows::default).await.unwrap();
    for round in 0..3 {
        write(&producer, round * 10..round * 10 + 10);
        take(&mut stream, 10).await;
    }
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let items = read_all(&mut stream).await;
    assert_eq!(rollback(&items[0]).seqno, Seqno(20));
    assert_eq!(items.len(), 6, "seqnos 21 to 25 are all there is");
    assert_eq!(stream.stats().complete, 1);
}
