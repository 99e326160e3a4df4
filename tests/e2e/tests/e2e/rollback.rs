//! Histories that were cut back.

use std::collections::BTreeMap;

use dcp_consumer::{End, ErrorKind, OnRollback, Start};
use dcp_e2e::{History, Reader, Row, options};
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::{Seqno, Vbid};

/// Splits the rows of a vBucket at its rollback.
fn split(rows: &[Row], vbid: Vbid) -> (Vec<Row>, Row, Vec<Row>) {
    let of: Vec<Row> = rows.iter().filter(|row| row.vbid == vbid).cloned().collect();
    let at = of.iter().position(|row| row.op == "rollback").expect("a rollback row");
    let after = of[at + 1..].to_vec();
    assert!(after.iter().all(|row| row.op != "rollback"), "one rollback");
    (of[..at].to_vec(), of[at].clone(), after)
}

/// What holds after a rollback: everything up to its seqno is still true, everything above it
/// comes again as it is now.
fn assert_true_history(history: &History, rows: &[Row], vbid: Vbid, to: Seqno) {
    let (before, rollback, after) = split(rows, vbid);
    assert!(rollback.seqno <= to, "{rollback:?} keeps what was lost above {to}");
    assert_eq!((rollback.epoch, rollback.key, rollback.value), (1, None, None));
    assert!(before.iter().all(|row| row.epoch == 0));
    assert!(after.iter().all(|row| row.epoch == 1));
    let kept = before.into_iter().filter(|row| row.seqno <= rollback.seqno);
    let now: Vec<Row> = kept.chain(after).collect();
    history.ledger.only(vbid).assert_read(&now, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_under_a_running_stream_is_a_row_and_then_the_true_history() {
    for persisted in [false, true] {
        let mut history = History::start(2, 8).await;
        history.load("doc", 400, 60);
        if persisted {
            history.producer.persist();
        }
        let mut reader =
            Reader::open(&history.producer, options(Start::Earliest, End::Never)).await;
        let mut rows = reader.take(400).await;
        let vbid = Vbid(5);
        let to = Seqno(history.ledger.high(vbid).0 / 2);
        history.roll_back(vbid, to);
        history.load("new", 400, 80);
        let high = history.ledger.high(vbid);
        let is_last = |row: &Row| (row.vbid, row.seqno, row.epoch) == (vbid, high, 1);
        rows.extend(reader.until(is_last).await);
        while rows.iter().filter(|row| row.vbid != vbid).count() < 800 - expected(&history, vbid) {
            rows.extend(reader.next().await.unwrap());
        }
        assert_true_history(&history, &rows, vbid, to);
        for other in (0..8).map(Vbid).filter(|other| *other != vbid) {
            let of: Vec<Row> = rows.iter().filter(|row| row.vbid == other).cloned().collect();
            assert!(of.iter().all(|row| row.epoch == 0), "{other} was not rolled back");
            history.ledger.only(other).assert_read(&of, &BTreeMap::new());
        }
    }
}

/// Writes that went to `vbid` out of the 800, lost ones included.
fn expected(history: &History, vbid: Vbid) -> usize {
    let key = |prefix: &'static str| (0..400).map(move |number| format!("{prefix}-{number}"));
    key("doc").chain(key("new")).filter(|k| history.producer.vbid_of(k.as_bytes()) == vbid).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_above_a_rollback_is_taken_back_when_it_goes_on() {
    for to_zero in [false, true] {
        let mut history = History::start(1, 4).await;
        history.load("doc", 200, 60);
        let mut small = options(Start::Earliest, End::Now);
        small.batch.max_rows = 13;
        let mut reader = Reader::open(&history.producer, small).await;
        let mut rows = reader.rest().await;
        let checkpoint = reader.stream.checkpoint();
        let vbid = Vbid(2);
        let to = if to_zero { Seqno::ZERO } else { Seqno(history.ledger.high(vbid).0 - 7) };
        history.roll_back(vbid, to);
        history.load("new", 200, 60);
        let json = checkpoint.to_json();
        let start = Start::Checkpoint(Checkpoint::from_json(json.as_bytes()).unwrap());
        let mut reader = Reader::open(&history.producer, options(start, End::Now)).await;
        rows.extend(reader.rest().await);
        assert_true_history(&history, &rows, vbid, to);
        let after = reader.stream.checkpoint();
        assert_eq!(after.position(vbid).unwrap().epoch, 1);
        let nothing =
            Reader::open(&history.producer, options(Start::Checkpoint(after), End::Now)).await;
        assert_eq!({ nothing }.rest().await, [], "the new checkpoint is on the new history");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_below_a_rollback_goes_on_as_if_nothing_had_happened() {
    let mut history = History::start(1, 1).await;
    history.load("doc", 100, 60);
    history.producer.persist();
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Now)).await;
    let mut rows = reader.rest().await;
    let checkpoint = reader.stream.checkpoint();
    history.load("lost", 50, 60);
    history.roll_back(Vbid(0), Seqno(100));
    history.load("new", 50, 60);
    let start = Start::Checkpoint(checkpoint);
    let rest = Reader::open(&history.producer, options(start, End::Now)).await.rest().await;
    assert!(rest.iter().all(|row| row.op == "mutation"), "nothing read was lost");
    rows.extend(rest);
    history.ledger.assert_read(&rows, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_rollbacks_in_a_row_are_two_rows() {
    let mut history = History::start(1, 1).await;
    history.load("doc", 100, 60);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Never)).await;
    reader.take(100).await;
    for epoch in 1..=2 {
        let to = Seqno(history.ledger.high(Vbid(0)).0 - 20);
        history.roll_back(Vbid(0), to);
        history.load(&format!("branch{epoch}"), 30, 60);
        let high = history.ledger.high(Vbid(0));
        let rows = reader.until(|row| (row.seqno, row.epoch) == (high, epoch)).await;
        let rollbacks: Vec<_> = rows.iter().filter(|row| row.op == "rollback").collect();
        assert_eq!(rollbacks.len(), 1, "{rollbacks:?}");
        assert_eq!(rollbacks[0].epoch, epoch);
        assert!(rollbacks[0].seqno <= to, "{:?} after {to}", rollbacks[0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_to_fail_on_a_rollback_fails() {
    let mut history = History::start(1, 1).await;
    history.load("doc", 100, 60);
    let mut strict = options(Start::Earliest, End::Never);
    strict.on_rollback = OnRollback::Fail;
    let mut reader = Reader::open(&history.producer, strict).await;
    reader.take(100).await;
    history.roll_back(Vbid(0), Seqno(40));
    let next = tokio::time::timeout(std::time::Duration::from_secs(30), reader.stream.next());
    let error = next.await.unwrap().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::Rollback, Some(Vbid(0))));
    assert!(error.seqno().is_some_and(|seqno| seqno <= Seqno(40)), "{error:?}");
    assert!(reader.next().await.is_none(), "and is over");
}
