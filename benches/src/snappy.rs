//! Decodes compressed values into record batches, compared with inflating alone.

use std::time::Duration;

use dcp_arrow::TableOptions;
use dcp_wire::{Datatype, snappy};

use crate::Error;
use crate::drive::{BATCH_BYTES, BATCH_ROWS};
use crate::frames::json_records;
use crate::measure::{Case, Options, ThreadClock, compare};
use crate::mutations::into_batches;
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
    let inflated: usize = plain.iter().map(Vec::len).sum();
    // Enough batches that the memory of the first ones, which the later ones reuse, counts little.
    let passes = options.pick(64 << 20, 1 << 30) / inflated.max(1);
    let sent: usize = compressed.iter().map(Vec::len).sum();
    let cases = vec![
        Case::reference("snap alone", || inflate(&compressed, passes)),
        Case::new("sink to RecordBatch", || {
            let datatype = Datatype::JSON.with(Datatype::SNAPPY);
            into_batches(&compressed, datatype, passes, &TableOptions::default())
        }),
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
