//! Bytes in memory to columns, one thread: how far the decoder is from what the memory allows.
//!
//! The source is one pass of 1 MiB, which lies in the caches as bytes just copied by the kernel
//! do. Times are processor times of the thread.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};

use dcp_benches::Error;
use dcp_benches::columns::Columns;
use dcp_benches::frames::{Frames, KEY_LEN, Shape};
use dcp_benches::measure::{Case, Options, ThreadClock, compare};
use dcp_benches::report::{Group, run};
use dcp_benches::sender::answer_stream_requests;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, Delivery, Limit, Resume, RollbackPolicy, StreamFilter,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Position, Rollback, SinkError};
use dcp_wire::{MAX_BODY_LEN, Opaque, Seqno, Vbid};

const VBUCKETS: u16 = 16;
const PASS_BYTES: usize = 1024 * 1024;
const BATCH_ROWS: usize = 8192;
const BATCH_BYTES: usize = 4 * 1024 * 1024;

fn main() -> ExitCode {
    run("memory", |options, report| {
        for value_len in [64, 256, 1024, 4096] {
            report.add(measure(options, value_len)?);
        }
        Ok(())
    })
}

fn measure(options: &Options, value_len: usize) -> Result<Group, Error> {
    let shape = Shape { value_len, vbuckets: VBUCKETS, pass_bytes: PASS_BYTES };
    let frames = Frames::new(shape)?;
    let passes = options.pick(200, 1000);
    let (rows, bytes) = (frames.rows() * passes, frames.bytes().len() as u64 * passes);
    drop(frames);
    let cases = vec![
        Case::reference("memcpy", || copy(shape, passes)),
        Case::reference("hand-written loop", || columns(shape, passes)),
        Case::new("connection machine, rows counted", || {
            machine(shape, passes, Counter::default(), |_| Ok(()))
        }),
        Case::new("connection machine to RecordBatch", || {
            let schema = TableSchema::new(&TableOptions::default())?;
            let sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
            machine(shape, passes, sink, |batch| {
                std::hint::black_box(batch.finish()?);
                Ok(())
            })
        }),
    ];
    let name = format!("memory to columns, {value_len} B values");
    Ok(Group {
        series: compare(options, &name, cases)?,
        name,
        shape: format!(
            "{VBUCKETS} vBuckets, {KEY_LEN} B keys, 1 MiB source in cache, \
             batches of {BATCH_ROWS} rows or 4 MiB"
        ),
        rows,
        bytes,
    })
}

/// Feeds `passes` passes to `take` and returns the time it took, without the time it takes to
/// make each pass out of the one before it.
fn feed(
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

fn copy(shape: Shape, passes: u64) -> Result<Duration, Error> {
    let mut target = vec![0; Frames::new(shape)?.bytes().len()];
    feed(shape, passes, &[], |bytes| {
        target.copy_from_slice(bytes);
        std::hint::black_box(&target);
        Ok(())
    })
}

fn columns(shape: Shape, passes: u64) -> Result<Duration, Error> {
    let mut columns = Columns::default();
    let mut rows = 0;
    let elapsed = feed(shape, passes, &[], |bytes| {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = &rest[columns.append(rest, BATCH_ROWS, BATCH_BYTES)?..];
            if columns.rows() >= BATCH_ROWS || columns.bytes() >= BATCH_BYTES {
                rows += columns.rows() as u64;
                std::hint::black_box(&columns);
                columns.clear();
            }
        }
        Ok(())
    })?;
    expect_rows(shape, passes, rows + columns.rows() as u64)?;
    Ok(elapsed)
}

/// The consumer's own connection machine, driven as its task drives it: batches are cut by rows
/// and bytes, positions taken with each batch, and its bytes returned once it is done with.
fn machine<S: BatchSink>(
    shape: Shape,
    passes: u64,
    mut sink: S,
    mut finish: impl FnMut(S::Batch) -> Result<(), Error>,
) -> Result<Duration, Error> {
    let mut connection = connection(shape);
    let opaques = open_streams(&mut connection, shape, &mut sink)?;
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
        let mut rest = bytes;
        while !rest.is_empty() {
            let limit = Limit {
                rows: BATCH_ROWS - sink.rows(),
                bytes: BATCH_BYTES.saturating_sub(sink.size_bytes()),
            };
            let walk = connection.handle_input(Instant::now(), rest, limit, &mut sink)?;
            rest = &rest[walk.consumed..];
            if walk.limited {
                take(&mut connection, &mut sink)?;
            }
        }
        Ok(())
    })?;
    take(&mut connection, &mut sink)?;
    expect_rows(shape, passes, rows)?;
    Ok(elapsed)
}

fn connection(shape: Shape) -> Connection {
    let config = ConnectionConfig {
        num_vbuckets: shape.vbuckets,
        collections: true,
        window: 8 * 1024 * 1024,
        noop_interval: Some(Duration::from_secs(20)),
        filter: StreamFilter::All,
        purge_seqno: false,
        on_rollback: RollbackPolicy::Resume,
        delivery: Delivery::default(),
        max_body_len: MAX_BODY_LEN,
    };
    Connection::new(config, Instant::now())
}

/// Opens a stream of every vBucket; returns what each one's frames must carry.
fn open_streams<S: BatchSink>(
    connection: &mut Connection,
    shape: Shape,
    sink: &mut S,
) -> Result<Vec<(Vbid, Opaque)>, Error> {
    for vbid in (0..shape.vbuckets).map(Vbid) {
        connection.open_stream(vbid, Seqno::MAX, Resume::new(Position::EARLIEST))?;
    }
    let mut requests = BytesMut::new();
    connection.poll_transmit(&mut requests);
    let mut answers = Vec::new();
    let opaques = answer_stream_requests(&requests, &mut answers)?;
    connection.handle_input(Instant::now(), &answers, Limit::NONE, sink)?;
    while connection.poll_event().is_some() {}
    Ok(opaques)
}

/// Counts the rows and looks at nothing else.
#[derive(Default)]
struct Counter {
    rows: usize,
    bytes: usize,
}

impl ChangeSink for Counter {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.rows += 1;
        self.bytes += change.key.len() + change.value.len();
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

fn expect_rows(shape: Shape, passes: u64, rows: u64) -> Result<(), Error> {
    let expected = Frames::new(shape)?.rows() * passes;
    if rows != expected {
        return Err(format!("{rows} rows came out instead of {expected}").into());
    }
    Ok(())
}
