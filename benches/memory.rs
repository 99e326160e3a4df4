//! Decodes bytes in memory to columns on one thread: how far the decoder is from the memory's
//! limit.
//!
//! The source is one pass of 1 MiB, which is in the caches, like bytes just copied by the kernel.
//! Times are processor times of the thread.

use std::process::ExitCode;
use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};

use dcp_benches::Error;
use dcp_benches::columns::Columns;
use dcp_benches::drive::{
    BATCH_BYTES, BATCH_ROWS, Counter, expect_rows, feed, machine, machine_of_persisted,
};
use dcp_benches::frames::{Frames, KEY_LEN, Shape};
use dcp_benches::measure::{Case, Options, compare};
use dcp_benches::report::{Group, run};
use dcp_benches::{documents, snappy};

const VBUCKETS: u16 = 16;
const PASS_BYTES: usize = 1024 * 1024;

fn main() -> ExitCode {
    run("memory", |options, report| {
        for value_len in [64, 256, 1024, 4096] {
            report.add(measure(options, value_len)?);
        }
        for &value_len in options.pick([1024].as_slice(), &[256, 1024, 4096]) {
            report.add(snappy::measure(options, value_len)?);
        }
        for &fields in options.pick([10].as_slice(), &[10, 50]) {
            report.add(documents::measure(options, fields)?);
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
            machine(shape, passes, usize::MAX, Counter::default(), |_| Ok(()))
        }),
        Case::new("connection machine, persisted_only", || {
            machine_of_persisted(shape, passes, Counter::default(), |_| Ok(()))
        }),
        Case::new("connection machine to RecordBatch", || {
            let schema = TableSchema::new(&TableOptions::default())?;
            let sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
            machine(shape, passes, usize::MAX, sink, |batch| {
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
