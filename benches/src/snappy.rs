//! Decodes compressed values into record batches, compared with inflating alone.

use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};
use dcp_proto::{BatchSink, Change, ChangeSink, Op, Snapshot};
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid, snappy};

use crate::Error;
use crate::drive::{BATCH_BYTES, BATCH_ROWS};
use crate::frames::json_records;
use crate::measure::{Case, Options, ThreadClock, compare};
use crate::report::Group;

/// Number of distinct values, each sent many times.
const DISTINCT: usize = 1024;

/// Measures values with an inflated length of `value_len` bytes. One thread does all the work.
///
/// # Errors
/// If a value cannot be compressed, or a measurement fails.
pub fn measure(options: &Options, value_len: usize) -> Result<Group, Error> {
    let plain = json_records(DISTINCT, value_len);
    let compressed =
        plain.iter().map(|value| snappy::compress(value)).collect::<Result<Vec<_>, _>>()?;
    let passes = options.pick(64, 256);
    let inflated: usize = plain.iter().map(Vec::len).sum();
    let sent: usize = compressed.iter().map(Vec::len).sum();
    let cases = vec![
        Case::reference("snap alone", || inflate(&compressed, passes)),
        Case::new("sink to RecordBatch", || into_batches(&compressed, passes)),
    ];
    let name = format!("snappy, {value_len} B values");
    Ok(Group {
        series: compare(options, &name, cases)?,
        name,
        shape: format!(
            "{DISTINCT} JSON documents, compressed to {} %, batches of {BATCH_ROWS} rows or 4 MiB",
            sent * 100 / inflated
        ),
        rows: (compressed.len() * passes) as u64,
        bytes: (inflated * passes) as u64,
    })
}

fn inflate(values: &[Vec<u8>], passes: usize) -> Result<Duration, Error> {
    let mut out = Vec::new();
    let clock = ThreadClock::start();
    for _ in 0..passes {
        for value in values {
            snappy::decompress_into(value, BATCH_BYTES, &mut out)?;
            std::hint::black_box(&out);
        }
    }
    Ok(clock.elapsed())
}

fn into_batches(values: &[Vec<u8>], passes: usize) -> Result<Duration, Error> {
    let schema = TableSchema::new(&TableOptions::default())?;
    let mut sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
    let key = b"key-000000000000000";
    let (mut seqno, mut rows) = (0, 0);
    let mut take = |sink: &mut ArrowSink| -> Result<(), Error> {
        rows += std::hint::black_box(sink.take_batch()?.finish()?).num_rows();
        Ok(())
    };
    let clock = ThreadClock::start();
    for value in values.iter().cycle().take(values.len() * passes) {
        seqno += 1;
        sink.change(&Change {
            op: Op::Mutation,
            vbid: Vbid(0),
            seqno: Seqno(seqno),
            vbuuid: Vbuuid(1),
            epoch: 0,
            snapshot: Snapshot { start: Seqno(0), end: Seqno(u64::MAX) },
            history: false,
            collection_id: CollectionId::DEFAULT,
            key,
            value,
            datatype: Datatype::JSON.with(Datatype::SNAPPY),
            cas: Cas(1_767_225_600_000_000_000 + (seqno << 16)),
            rev_seqno: RevSeqno(1),
            flags: 0,
            expiry: 0,
            delete_time: 0,
        })?;
        if sink.rows() >= BATCH_ROWS || sink.size_bytes() >= BATCH_BYTES {
            take(&mut sink)?;
        }
    }
    take(&mut sink)?;
    let elapsed = clock.elapsed();
    if rows != values.len() * passes {
        return Err(format!("{rows} rows came out instead of {}", values.len() * passes).into());
    }
    Ok(elapsed)
}
