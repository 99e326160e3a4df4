//! Metrics of the hot path that do not depend on the machine's load: heap allocations per change,
//! with a failure above a limit, and under callgrind the instructions of one part at a time
//! (`scripts/bench_gate.py`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_arrow::{
    ArrowSink, BatchLimits, CollectionNames, DocumentSchema, DocumentTally, MalformedTally,
    PendingBatch, TableOptions, TableSchema,
};
use dcp_benches::Error;
use dcp_benches::drive::{BATCH_ROWS, Counter, feed, machine, machine_of_persisted, roll_back};
use dcp_benches::frames::{Frames, Shape, frame_len};
use dcp_benches::machine::Machine;
use dcp_benches::measure::Options;
use dcp_proto::{BatchSink, Change, ChangeSink, Op, Snapshot};
use dcp_wire::message::Mutation;
use dcp_wire::{
    Cas, CollectionId, Datatype, Frame, MAX_BODY_LEN, Opcode, RevSeqno, Seqno, Vbid, Vbuuid,
};

/// Maximum allocations per change in steady state, for values of up to 1 KiB.
const MAX_ALLOCATIONS: f64 = 0.01;

/// Counts allocations of the system allocator.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const fn shape(value_len: usize) -> Shape {
    Shape { value_len, vbuckets: 16, pass_bytes: 1024 * 1024 }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.as_slice() {
        [flag, part, passes, ..] if flag == "--instructions" => instructions(part, passes),
        _ => allocations(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "hotpath: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one part for a number of passes with values of 256 B, for callgrind to count; prints the
/// rows, or the vBuckets that were rolled back.
fn instructions(part: &str, passes: &str) -> Result<(), Error> {
    let (shape, passes) = (shape(256), passes.parse()?);
    let mut count = Frames::new(shape)?.rows() * passes;
    match part {
        "decode" => decode(shape, passes)?,
        "stream machine" => {
            machine(shape, passes, usize::MAX, Counter::default(), |()| Ok(()))?;
        }
        "batch building" => batches(shape, passes, usize::MAX)?,
        // Five mutations, as a node writes them.
        "batch building, reads of 1,655 B" => batches(shape, passes, 5 * frame_len(256))?,
        "batch building, persisted_only" => {
            machine_of_persisted(shape, passes, sink(&TableOptions::default())?, finish)?;
        }
        "documents of ten fields" => documents(passes, &mut count)?,
        "rollback of a vBucket" => {
            count = roll_back(shape, passes, sink(&TableOptions::default())?)?;
        }
        other => return Err(format!("no part is called {other:?}").into()),
    }
    writeln!(std::io::stdout(), "{count}")?;
    Ok(())
}

fn decode(shape: Shape, passes: u64) -> Result<(), Error> {
    feed(shape, passes, &[], |mut rest| {
        while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN)? {
            if frame.header.opcode == Opcode::DCP_MUTATION {
                std::hint::black_box(Mutation::decode(&frame)?);
            }
            rest = &rest[used..];
        }
        Ok(())
    })?;
    Ok(())
}

fn sink(options: &TableOptions) -> Result<ArrowSink, Error> {
    let schema = TableSchema::new(options)?;
    Ok(ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default()))
}

fn finish(batch: PendingBatch) -> Result<(), Error> {
    std::hint::black_box(batch.finish()?);
    Ok(())
}

fn batches(shape: Shape, passes: u64, read_len: usize) -> Result<(), Error> {
    machine(shape, passes, read_len, sink(&TableOptions::default())?, finish)?;
    Ok(())
}

/// A document of ten fields.
const DOCUMENT: &[u8] =
    br#"{"id": 1234567, "name": "Ada Lovelace", "active": true, "score": 0.8125,
"tags": ["a", "bc"], "address": {"city": "London", "zip": "W1"}, "price": 12.50,
"born": "1815-12-10", "seen": "2026-01-02T03:04:05Z", "note": "a \"quoted\" word"}"#;

/// Decodes documents to columns: a batch a pass.
fn documents(passes: u64, count: &mut u64) -> Result<(), Error> {
    let mut options = TableOptions::default();
    options.document_schema = Some(DocumentSchema::parse(
        "id BIGINT, name STRING, active BOOLEAN, score DOUBLE, tags ARRAY<STRING>, \
         address STRUCT<city: STRING, zip: STRING>, price DECIMAL(9,2), born DATE, \
         seen TIMESTAMP, note STRING",
    )?);
    let mut sink = sink(&options)?;
    *count = passes * BATCH_ROWS as u64;
    for _ in 0..passes {
        for seqno in 1..=BATCH_ROWS as u64 {
            sink.change(&Change {
                op: Op::Mutation,
                vbid: Vbid(0),
                seqno: Seqno(seqno),
                vbuuid: Vbuuid(1),
                epoch: 0,
                snapshot: Snapshot::at(Seqno(seqno)),
                history: false,
                collection_id: CollectionId::DEFAULT,
                key: b"key_000000000000001",
                value: DOCUMENT,
                datatype: Datatype::JSON,
                cas: Cas(1),
                rev_seqno: RevSeqno(1),
                flags: 0,
                expiry: 0,
                delete_time: 0,
            })?;
        }
        let mut tally = DocumentTally::default();
        std::hint::black_box(sink.take_batch()?.finish_counting(&mut tally)?);
        if tally.malformed != MalformedTally::default() {
            return Err(format!("a document does not fit its columns: {tally:?}").into());
        }
    }
    Ok(())
}

fn allocations() -> Result<(), Error> {
    let options = Options::from_command_line()?;
    if options.only.as_ref().is_some_and(|only| !"allocations".contains(only.as_str())) {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    if !options.json {
        writeln!(out, "\nhotpath: {}\n", Machine::look().line())?;
        writeln!(out, "heap allocations per change, connection machine to RecordBatch")?;
    }
    for value_len in [64, 256, 1024, 4096] {
        let shape = shape(value_len);
        let count = |passes| -> Result<u64, Error> {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            batches(shape, passes, usize::MAX)?;
            Ok(ALLOCATIONS.load(Ordering::Relaxed) - before)
        };
        // Ignore one-time allocations: streams and the first batches.
        let (few, many) = (50, 250);
        let allocations = count(many)?.saturating_sub(count(few)?);
        let rows = Frames::new(shape)?.rows() * (many - few);
        let per_change = allocations as f64 / rows as f64;
        if options.json {
            let line = serde_json::json!({
                "bench": "hotpath", "group": "allocations", "value_len": value_len,
                "rows": rows, "allocations_per_change": per_change,
            });
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "  {value_len:>5} B values {per_change:>9.4}  ({rows} changes)")?;
        }
        if value_len <= 1024 && per_change >= MAX_ALLOCATIONS {
            return Err(format!("{per_change:.4} allocations per change at {value_len} B").into());
        }
    }
    Ok(())
}
