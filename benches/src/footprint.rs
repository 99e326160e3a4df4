//! Memory footprint of the embedded producer's documents.

use std::io::Write;

use bytes::Bytes;
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use serde_json::json;

use crate::Error;
use crate::frames::json_value;
use crate::machine::Machine;
use crate::measure::{Options, WallClock};

/// Limit of 10 million documents, including the process around them.
const MAX_BYTES: u64 = 6 << 30;
const FULL: u64 = 10_000_000;
const SHORT: u64 = 500_000;
const VALUE_LEN: usize = 256;

/// Loads documents of 256 B, each with its own memory, waits until all are persisted and prints the
/// process' peak memory. Must be called first: peaks do not fall.
///
/// # Errors
/// If memory exceeds the limit of 10 million documents, or a proportional limit in a short run.
pub fn footprint(options: &Options) -> Result<(), Error> {
    if options.only.as_ref().is_some_and(|only| !"footprint".contains(only.as_str())) {
        return Ok(());
    }
    let before = peak_bytes()?;
    let documents = options.pick(SHORT, FULL);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let producer = runtime.block_on(Producer::start(ProducerOptions::default()))?;
    let value = json_value(VALUE_LEN);
    let clock = WallClock::start();
    for number in 0..documents {
        let key = format!("key-{number:015}");
        producer.upsert(key.as_bytes(), Bytes::from(value.clone()), WriteOptions::default())?;
    }
    producer.persist();
    let elapsed = clock.elapsed();
    let high: u64 = producer.high_seqnos().values().map(|seqno| seqno.0).sum();
    let peak = peak_bytes()?;
    runtime.block_on(producer.shutdown());
    if high != documents {
        return Err(format!("{high} documents are there instead of {documents}").into());
    }
    let by_document = (peak - before) as f64 / documents as f64;
    let mut out = std::io::stdout().lock();
    if options.json {
        let line = json!({
            "bench": "producer", "group": "footprint", "documents": documents,
            "value_len": VALUE_LEN, "peak_bytes": peak, "bytes_per_document": by_document,
            "seconds": elapsed.as_secs_f64(), "machine": Machine::look().json(),
        });
        writeln!(out, "{line}")?;
    } else {
        writeln!(out, "\nproducer: {}", Machine::look().line())?;
        writeln!(
            out,
            "\nfootprint: {documents} documents of {VALUE_LEN} B with keys of 19 B in 64 vBuckets, \
             persisted: peak {:.2} GiB, {by_document:.0} B a document, loaded in {:.1} s",
            peak as f64 / f64::from(1 << 30),
            elapsed.as_secs_f64()
        )?;
    }
    let too_much = if documents == FULL {
        peak > MAX_BYTES
    } else {
        by_document > MAX_BYTES as f64 / FULL as f64
    };
    if too_much {
        return Err(format!("more than {MAX_BYTES} bytes for {FULL} documents").into());
    }
    Ok(())
}

/// Peak resident memory of the process.
fn peak_bytes() -> Result<u64, Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no VmHWM")?;
    Ok(kib.trim().parse::<u64>()? * 1024)
}
