//! Rollbacks by an embedded cluster that has lost its newest changes.

use std::time::Duration;

use dcp_consumer::{ChangeStream, End, ErrorKind, OnRollback, Start};
use dcp_producer::{Producer, parse_rules};
use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::{Rollback, Snapshot};
use dcp_test::with;
use dcp_wire::{Seqno, Vbid};
use tokio::time::{sleep, timeout};

use crate::embedded::{
    ANSWER_TIMEOUT, assert_ascending, connect, keys, names, options, producer, read_all, row, take,
    write,
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
async fn rollback_is_a_record_and_changes_above_it_come_again() {
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
async fn rollback_right_after_a_restart_goes_to_the_newest_complete_snapshot() {
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
async fn rollback_after_the_first_change_of_a_snapshot_goes_below_it() {
    let producer = producer(1, 1).await;
    let client = connect(&producer).await;
    let options_from = |start| with(options(start, End::Never), |o| o.batch.max_rows = 1);
    let mut stream = client.stream(options_from(Start::Earliest), Rows::default).await.unwrap();
    write(&producer, 0..3);
    take(&mut stream, 3).await;
    write(&producer, 3..10);
    take(&mut stream, 1).await;
    let checkpoint = stream.checkpoint();
    drop(stream);
    let position = checkpoint.position(Vbid(0)).unwrap();
    let snapshot = Snapshot { start: Seqno(4), end: Seqno(10) };
    assert_eq!((position.seqno, position.snapshot), (Seqno(4), snapshot));
    // A key at or below 4 may have its newest version above 7: the older one is the key's again.
    producer.roll_back(Vbid(0), Seqno(7)).unwrap();
    let mut stream =
        client.stream(options_from(Start::Checkpoint(checkpoint)), Rows::default).await.unwrap();
    let record = *rollback(&take(&mut stream, 1).await[0]);
    assert_eq!((record.seqno, record.from_seqno, record.epoch), (Seqno(3), Seqno(4), 1));
    let seqnos: Vec<_> =
        take(&mut stream, 4).await.into_iter().map(|item| row(item).seqno.0).collect();
    assert_eq!(seqnos, [4, 5, 6, 7]);
}

#[tokio::test]
async fn rollback_can_begin_the_vbucket_again() {
    let producer = producer(1, 1).await;
    let mut stream = three_snapshots(&producer, OnRollback::Resync).await;
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let items = take(&mut stream, 26).await;
    assert_eq!(rollback(&items[0]).seqno, Seqno(0));
    let rows: Vec<Row> = items[1..].iter().cloned().map(row).collect();
    assert_eq!(keys(&rows), names(0..25));
}

#[tokio::test]
async fn rollback_can_end_the_stream() {
    let producer = producer(1, 1).await;
    let mut stream = three_snapshots(&producer, OnRollback::Fail).await;
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let error = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Rollback, Some(Vbid(0))));
    assert!(error.seqno().unwrap() <= Seqno(25));
    assert!(stream.next().await.is_none(), "an error is told once");
    assert_eq!(stream.checkpoint().position(Vbid(0)).unwrap().seqno, Seqno(30));
}

/// Refuses to open streams by closing the connection.
fn refuse_streams(producer: &Producer) {
    let rules = r#"[{"condition": {"opcode": "DCP_STREAM_REQ"}, "reaction": "disconnect"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
}

#[tokio::test]
async fn stream_that_is_finite_does_not_wait_for_what_a_failover_lost() {
    for end in [End::Now, End::At([(Vbid(0), Seqno(40))].into())] {
        let producer = producer(1, 1).await;
        let stream = three_snapshots(&producer, OnRollback::Emit).await;
        let start = Start::Checkpoint(stream.checkpoint());
        drop(stream);
        write(&producer, 30..40);
        // It knows its end, and its first request has not been answered.
        refuse_streams(&producer);
        let client = connect(&producer).await;
        let mut stream = client.stream(options(start, end), Rows::default).await.unwrap();
        producer.roll_back(Vbid(0), Seqno(25)).unwrap();
        producer.set_faults(Vec::new()).unwrap();
        let items = read_all(&mut stream).await;
        assert_eq!(rollback(&items[0]).seqno, Seqno(20));
        assert_eq!(items.len(), 6, "seqnos 21 to 25 are all there is");
        assert_eq!(stream.stats().complete, 1);
    }
}

#[tokio::test]
async fn end_seqno_that_must_exist_is_never_lowered() {
    let producer = producer(1, 1).await;
    let stream = three_snapshots(&producer, OnRollback::Emit).await;
    let start = Start::Checkpoint(stream.checkpoint());
    drop(stream);
    write(&producer, 30..40);
    refuse_streams(&producer);
    let client = connect(&producer).await;
    let end = End::At([(Vbid(0), Seqno(40))].into());
    let options = with(options(start, end), |options| options.end_exists = true);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    producer.set_faults(Vec::new()).unwrap();
    let mut items = Vec::new();
    let error = loop {
        match timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap() {
            Some(Ok(delivered)) => items.extend(delivered.batch),
            Some(Err(error)) => break error,
            None => panic!("complete with {items:?}"),
        }
    };
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Rollback, Some(Vbid(0))));
    assert!(error.to_string().contains("seqno 40, no longer exists"), "{error}");
    assert_eq!((rollback(&items[0]).seqno, items.len()), (Seqno(20), 6), "all there is");
}

#[tokio::test]
async fn end_seqno_lost_before_the_stream_was_opened_is_not_waited_for() {
    for end in [End::Now, End::At([(Vbid(0), Seqno(30))].into())] {
        let producer = producer(1, 1).await;
        write(&producer, 0..30);
        refuse_streams(&producer);
        let client = connect(&producer).await;
        let options = options(Start::Earliest, end);
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        producer.roll_back(Vbid(0), Seqno(25)).unwrap();
        producer.set_faults(Vec::new()).unwrap();
        assert_eq!(read_all(&mut stream).await.len(), 25);
    }
}

#[tokio::test]
async fn end_seqno_seen_and_lost_before_the_stream_request_is_not_waited_for() {
    let producer = producer(1, 1).await;
    write(&producer, 0..30);
    let client = connect(&producer).await;
    let end = End::At(client.high_seqnos().await.unwrap());
    producer.roll_back(Vbid(0), Seqno(25)).unwrap();
    let mut stream = client.stream(options(Start::Earliest, end), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 25);
}

#[tokio::test]
async fn end_seqno_is_not_waited_for_once_history_was_lost() {
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
}

#[tokio::test]
async fn end_seqno_yet_to_be_written_is_waited_for_through_a_restart() {
    let producer = producer(1, 1).await;
    let client = connect(&producer).await;
    let end = End::At([(Vbid(0), Seqno(40))].into());
    let mut stream = client.stream(options(Start::Earliest, end), Rows::default).await.unwrap();
    write(&producer, 0..10);
    take(&mut stream, 10).await;
    producer.persist();
    producer.restart(0, true).await.unwrap();
    write(&producer, 10..20);
    take(&mut stream, 10).await;
    assert_eq!(stream.stats().complete, 0);
    write(&producer, 20..40);
    assert_eq!(read_all(&mut stream).await.len(), 20);
}

/// A checkpoint at seqno 30, and a vBucket whose seqno 30 is another change by now.
async fn same_seqno_on_another_branch() -> (Producer, Checkpoint) {
    let producer = producer(1, 1).await;
    let stream = three_snapshots(&producer, OnRollback::Emit).await;
    let checkpoint = stream.checkpoint();
    producer.roll_back(Vbid(0), Seqno(29)).unwrap();
    write(&producer, 100..101);
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(30));
    (producer, checkpoint)
}

#[tokio::test]
async fn position_at_the_high_seqno_of_another_branch_is_rolled_back() {
    for (end, clamp) in [
        (End::Now, false),
        (End::At([(Vbid(0), Seqno(30))].into()), false),
        (End::At([(Vbid(0), Seqno(30))].into()), true),
    ] {
        let (producer, checkpoint) = same_seqno_on_another_branch().await;
        let client = connect(&producer).await;
        let start = Start::Checkpoint(checkpoint);
        let options = with(options(start, end), |o| o.clamp = clamp);
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        let items = read_all(&mut stream).await;
        assert_eq!(rollback(&items[0]).seqno, Seqno(20), "{clamp}");
        let rows: Vec<Row> = items[1..].iter().cloned().map(row).collect();
        assert_eq!(rows.last().unwrap().key, b"key-100");
        assert_eq!(rows.len(), 10, "{clamp}");
    }
}

#[tokio::test]
async fn position_above_the_end_is_rolled_back_too() {
    let (producer, checkpoint) = same_seqno_on_another_branch().await;
    let client = connect(&producer).await;
    let end = End::At([(Vbid(0), Seqno(25))].into());
    let options = with(options(Start::Checkpoint(checkpoint), end), |o| o.clamp = true);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let items = read_all(&mut stream).await;
    assert_eq!(rollback(&items[0]).seqno, Seqno(20));
    assert_eq!(items.len(), 6, "up to seqno 25");
}

#[tokio::test]
async fn clamped_stream_resumed_inside_a_snapshot_takes_nothing_past_its_end() {
    let producer = producer(1, 1).await;
    write(&producer, 0..10);
    producer.persist();
    let client = connect(&producer).await;
    let clamped = |start, end| {
        let end = End::At([(Vbid(0), Seqno(end))].into());
        with(options(start, end), |o| o.clamp = true)
    };
    let mut stream = client.stream(clamped(Start::Earliest, 5), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 5);
    for (end, rows) in [(5, 0), (4, 0), (7, 2)] {
        let start = Start::Checkpoint(stream.checkpoint());
        let mut again = client.stream(clamped(start, end), Rows::default).await.unwrap();
        assert_eq!(read_all(&mut again).await.len(), rows, "until {end}");
    }
}

#[tokio::test]
async fn end_seqno_lost_before_its_stream_is_accepted_is_not_waited_for() {
    let producer = producer(1, 1).await;
    write(&producer, 0..2);
    let rules = r#"[{
        "condition": {"opcode": "DCP_STREAM_REQ", "direction": "to_server", "nth": 1},
        "reaction": {"delay": {"seconds": 0.5}}
    }]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let client = connect(&producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
    while producer.fault_counts() != [1] {
        sleep(Duration::from_millis(5)).await;
    }
    // The client knows of two changes, and has requested them.
    producer.roll_back(Vbid(0), Seqno(1)).unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 1);
}
