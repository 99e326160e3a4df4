//! The consumer's connection machine fed from memory, driven like in its task.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, Delivery, Event, Limit, StreamFilter, StreamPosition,
};
use dcp_proto::{
    BatchSink, Change, ChangeSink, FailoverLog, MutationRun, OnRollback, Position, Rollback,
    RunError, SinkError, Snapshot,
};
use dcp_wire::message::FailoverEntry;
use dcp_wire::{MAX_BODY_LEN, Opaque, Seqno, Vbid, Vbuuid};

use crate::Error;
use crate::frames::{Frames, Shape};
use crate::measure::ThreadClock;
use crate::sender::{answer_stream_requests, branch_of, refuse_stream_requests};

/// Maximum rows of a batch.
pub const BATCH_ROWS: usize = 8192;

/// Maximum bytes of a batch.
pub const BATCH_BYTES: usize = 4 * 1024 * 1024;

/// Feeds `passes` passes to `take` and returns the time taken, excluding the time to make each pass
/// from the previous one.
///
/// # Errors
/// Those of `take`.
pub fn feed(
    shape: Shape,
    passes: u64,
    opaques: &[(Vbid, Opaque)],
    mut take: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<Duration, Error> {
    let mut frames = Frames::new(shape)?;
    for &(vbid, opaque) in opaques {
        frames.set_opaque(vbid, opaque);
    }
    let mut elapsed = Duration::ZERO;
    for _ in 0..passes {
        let clock = ThreadClock::start();
        take(frames.bytes())?;
        elapsed += clock.elapsed();
        frames.advance();
    }
    Ok(elapsed)
}

/// The consumer's connection machine, driven like in its task: batches are cut by rows and bytes,
/// positions are taken with each batch, and its bytes are acknowledged after processing. Each read
/// returns `read_len` bytes.
///
/// # Errors
/// Those of the machine and of `finish`, or if rows are missing.
pub fn machine<S: BatchSink>(
    shape: Shape,
    passes: u64,
    read_len: usize,
    sink: S,
    finish: impl FnMut(S::Batch) -> Result<(), Error>,
) -> Result<Duration, Error> {
    drive(shape, passes, read_len, Delivery::default(), sink, finish)
}

/// The same with `persisted_only`, where every change is already persisted on all copies.
///
/// # Errors
/// Those of [`machine`].
pub fn machine_of_persisted<S: BatchSink>(
    shape: Shape,
    passes: u64,
    sink: S,
    finish: impl FnMut(S::Batch) -> Result<(), Error>,
) -> Result<Duration, Error> {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    drive(shape, passes, usize::MAX, delivery, sink, finish)
}

/// Rolls back every vBucket of a connection, `passes` times, and returns how often in all: each is
/// asked for from a seqno, refused with a rollback to the beginning, and opened on another branch.
///
/// # Errors
/// Those of the machine, or if a rollback is missing.
pub fn roll_back<S: BatchSink>(shape: Shape, passes: u64, mut sink: S) -> Result<u64, Error> {
    let lost = FailoverLog::new(vec![FailoverEntry { vbuuid: LOST, seqno: Seqno::ZERO }])?;
    let read = Position {
        seqno: READ,
        snapshot: Snapshot::at(READ),
        failover_log: Some(lost),
        ..Position::EARLIEST
    };
    let mut rolled_back = 0;
    for _ in 0..passes {
        let mut connection = connection(shape, Delivery::default());
        for vbid in (0..shape.vbuckets).map(Vbid) {
            connection.open_stream(vbid, Seqno::MAX, StreamPosition::new(read.clone()))?;
        }
        let (mut requests, mut answers) = (BytesMut::new(), Vec::new());
        connection.poll_transmit(&mut requests);
        refuse_stream_requests(&requests, &mut answers)?;
        connection.handle_input(Instant::now(), &answers, Limit::NONE, &mut sink)?;
        requests.clear();
        answers.clear();
        connection.poll_transmit(&mut requests);
        answer_stream_requests(&requests, &mut answers)?;
        connection.handle_input(Instant::now(), &answers, Limit::NONE, &mut sink)?;
        while let Some(event) = connection.poll_event() {
            rolled_back += u64::from(matches!(event, Event::RolledBack(_)));
        }
        std::hint::black_box(sink.take_batch()?);
    }
    if rolled_back != u64::from(shape.vbuckets) * passes {
        return Err(format!("{rolled_back} vBuckets were rolled back").into());
    }
    Ok(rolled_back)
}

/// Where the vBuckets of [`roll_back`] were read to, on a branch that the node does not have.
const READ: Seqno = Seqno(1000);
const LOST: Vbuuid = Vbuuid(0xdead);

fn drive<S: BatchSink>(
    shape: Shape,
    passes: u64,
    read_len: usize,
    delivery: Delivery,
    mut sink: S,
    mut finish: impl FnMut(S::Batch) -> Result<(), Error>,
) -> Result<Duration, Error> {
    let mut connection = connection(shape, delivery);
    let opaques = open_streams(&mut connection, shape, &mut sink)?;
    for &(vbid, _) in &opaques {
        connection.persisted(vbid, branch_of(vbid), Seqno::MAX);
    }
    let mut rows = 0;
    let mut take = |connection: &mut Connection, sink: &mut S| -> Result<(), Error> {
        rows += sink.rows() as u64;
        let batch = sink.take_batch()?;
        std::hint::black_box(connection.take_positions());
        let bytes = connection.take_held();
        finish(batch)?;
        connection.release(Instant::now(), bytes);
        connection.poll_transmit(&mut BytesMut::new());
        Ok(())
    };
    let elapsed = feed(shape, passes, &opaques, |bytes| {
        let (mut start, mut end) = (0, 0_usize);
        while start < bytes.len() {
            end = bytes.len().min(end.saturating_add(read_len));
            loop {
                let limit = Limit {
                    rows: BATCH_ROWS - sink.rows(),
                    bytes: BATCH_BYTES.saturating_sub(sink.size_bytes()),
                };
                let there = &bytes[start..end];
                let walk = connection.handle_input(Instant::now(), there, limit, &mut sink)?;
                start += walk.consumed;
                if !walk.limited {
                    break;
                }
                take(&mut connection, &mut sink)?;
            }
        }
        Ok(())
    })?;
    take(&mut connection, &mut sink)?;
    expect_rows(shape, passes, rows)?;
    Ok(elapsed)
}

fn connection(shape: Shape, delivery: Delivery) -> Connection {
    let config = ConnectionConfig {
        num_vbuckets: shape.vbuckets,
        collections: true,
        window: 8 * 1024 * 1024,
        noop_interval: Some(Duration::from_secs(20)),
        filter: StreamFilter::All,
        purge_seqno: false,
        stream_end_on_close: true,
        ignore_purged_tombstones: false,
        on_rollback: OnRollback::Emit,
        delivery,
        max_body_len: MAX_BODY_LEN,
    };
    Connection::new(config, Instant::now())
}

/// Opens a stream of every vBucket; returns the opaques for their frames.
fn open_streams<S: BatchSink>(
    connection: &mut Connection,
    shape: Shape,
    sink: &mut S,
) -> Result<Vec<(Vbid, Opaque)>, Error> {
    for vbid in (0..shape.vbuckets).map(Vbid) {
        connection.open_stream(vbid, Seqno::MAX, StreamPosition::new(Position::EARLIEST))?;
    }
    let mut requests = BytesMut::new();
    connection.poll_transmit(&mut requests);
    let mut answers = Vec::new();
    let opaques = answer_stream_requests(&requests, &mut answers)?;
    connection.handle_input(Instant::now(), &answers, Limit::NONE, sink)?;
    while connection.poll_event().is_some() {}
    Ok(opaques)
}

/// Only counts the rows.
#[derive(Debug, Default)]
pub struct Counter {
    rows: usize,
    bytes: usize,
}

impl ChangeSink for Counter {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.rows += 1;
        self.bytes += change.key.len() + change.value.len();
        Ok(())
    }

    fn mutations(&mut self, run: &MutationRun<'_, '_>) -> Result<(), RunError> {
        self.rows += run.mutations.len();
        let lens = run.mutations.iter().map(|mutation| mutation.key_and_value().len());
        self.bytes += lens.sum::<usize>();
        Ok(())
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl BatchSink for Counter {
    type Batch = ();

    fn rows(&self) -> usize {
        self.rows
    }

    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn take_batch(&mut self) -> Result<(), SinkError> {
        std::hint::black_box(std::mem::take(self));
        Ok(())
    }
}

/// Checks that all rows of `passes` passes were produced.
///
/// # Errors
/// If rows are missing.
pub fn expect_rows(shape: Shape, passes: u64, rows: u64) -> Result<(), Error> {
    let expected = Frames::new(shape)?.rows() * passes;
    if rows != expected {
        return Err(format!("{rows} rows came out instead of {expected}").into());
    }
    Ok(())
}
