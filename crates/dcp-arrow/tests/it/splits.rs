//! Record batches do not depend on how the bytes of a stream arrive.

use arrow_array::RecordBatch;
use dcp_arrow::COLUMNS;
use dcp_proto::consumer::{ConnectionConfig, Limit};
use dcp_proto::{BatchSink, Op};
use dcp_test::harness::{Harness, config};
use dcp_test::with;
use dcp_wire::message::{Deletion, Expiration, Mutation};
use dcp_wire::{Cas, RevSeqno, Seqno};
use proptest::prelude::*;

use crate::model::{Row, row};
use crate::{columns, sink};

/// Rows of a batch.
const ROWS: usize = 16;

/// Queues the row as the change with this seqno.
fn send(harness: &mut Harness, row: &Row, seqno: u64) {
    let [_, cas, rev, ..] = row.numbers;
    let [flags, expiry, delete_time, _] = row.small;
    let (to, value, datatype) = (harness.to(), row.wire_value(), row.datatype());
    let (seqno, rev_seqno, cas) = (Seqno(seqno), RevSeqno(rev), Cas(cas));
    let mut key = vec![if flags % 3 == 0 { 0 } else { 9 }];
    key.extend(row.key.as_bytes());
    let (key, value, out) = (&key[..], &value[..], &mut harness.wire);
    let encoded = match row.op {
        Op::Mutation => {
            let head = Mutation { seqno, rev_seqno, cas, datatype, ..Mutation::default() };
            Mutation { flags, expiry, key, value, ..head }.encode(to, out)
        }
        Op::Deletion => {
            let delete_time = (flags % 2 == 0).then_some(delete_time);
            Deletion { seqno, rev_seqno, cas, datatype, delete_time, key, value }.encode(to, out)
        }
        Op::Expiration => {
            Expiration { seqno, rev_seqno, cas, datatype, delete_time, key, value }.encode(to, out)
        }
    };
    encoded.unwrap();
}

/// Queues snapshots of the rows, the first of which creates a collection.
fn send_all(harness: &mut Harness, rows: &[Row]) {
    harness.marker(0, 1).system_event(1, 1);
    let (mut rest, mut seqno) = (rows, 1);
    while let [first, ..] = rest {
        let (now, later) = rest.split_at(rest.len().min(1 + first.numbers[1] as usize % 40));
        let flags = [0x1, 0x2, 0x5, 0x11][first.numbers[2] as usize % 4];
        harness.say(&format!("MARK [{}-{}] {flags}", seqno + 1, seqno + now.len() as u64));
        for row in now {
            seqno += 1;
            send(harness, row, seqno);
        }
        rest = later;
    }
}

/// The batches of the rows, whose bytes arrive in pieces of these sizes.
fn batches(rows: &[Row], sizes: impl IntoIterator<Item = usize>) -> (Vec<RecordBatch>, usize) {
    let mut harness = Harness::streaming(ConnectionConfig { collections: true, ..config() });
    send_all(&mut harness, rows);
    let every: Vec<&str> = COLUMNS.iter().map(|spec| spec.name).collect();
    let options = with(columns(&every), |o| o.include_xattrs = true);
    let mut sink = sink(&options);
    let (mut taken, mut pieces) = (Vec::new(), 0);
    let mut take = |sink: &mut dcp_arrow::ArrowSink| {
        taken.push(sink.take_batch().unwrap().finish().unwrap());
    };
    let (wire, mut read) = (std::mem::take(&mut harness.wire), Vec::new());
    let (mut rest, mut sizes) = (&wire[..], sizes.into_iter());
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.len().min(sizes.next().unwrap()));
        read.extend(piece);
        (rest, pieces) = (later, pieces + 1);
        loop {
            let limit = Limit { rows: ROWS - sink.rows(), ..Limit::NONE };
            let walk = harness.machine.handle_input(harness.now, &read, limit, &mut sink).unwrap();
            read.drain(..walk.consumed);
            if sink.rows() == ROWS {
                take(&mut sink);
            }
            if !walk.limited {
                break;
            }
        }
    }
    assert!(read.is_empty(), "whole packets are read");
    take(&mut sink);
    (taken, pieces)
}

proptest! {
    #[test]
    fn batches_are_the_same_however_their_bytes_are_split(
        rows in prop::collection::vec(row(), 0..120),
        sizes in prop_oneof![Just(1_usize..2), Just(1..8), Just(1..64), Just(1..4096)]
            .prop_flat_map(|sizes| prop::collection::vec(sizes, 1..100)),
    ) {
        let (whole, _) = batches(&rows, [usize::MAX]);
        prop_assert_eq!(whole.iter().map(RecordBatch::num_rows).sum::<usize>(), rows.len());
        let (split, pieces) = batches(&rows, sizes.into_iter().cycle());
        prop_assert_eq!(split, whole, "{} pieces", pieces);
    }
}
