//! Decodes compressed values into record batches, compared with inflating alone.

use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};
use dcp_proto::{BatchSink, ChangeSink, MutationRun, Snapshot};
use dcp_wire::message::{Mutation, MutationView, StreamAddress};
use dcp_wire::{Cas, Datatype, MAX_BODY_LEN, RevSeqno, Seqno, Vbid, Vbuuid, snappy};

use crate::Error;
use crate::drive::{BATCH_BYTES, BATCH_ROWS};
use crate::frames::json_records;
use crate::measure::{Case, Options, ThreadClock, compare};
use crate::report::Group;

/// Number of distinct values, each sent many times.
const DISTINCT: usize = 1024;

/// Most mutations given to the sink at once, as by the connection machine.
const RUN: usize = 64;

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
    let packets = packets(values)?;
    let mutations = parse(&packets)?;
    let mut rows = 0;
    let mut take = |sink: &mut ArrowSink| -> Result<(), Error> {
        rows += std::hint::black_box(sink.take_batch()?.finish()?).num_rows();
        Ok(())
    };
    let clock = ThreadClock::start();
    for run in std::iter::repeat_n(&mutations, passes).flat_map(|all| all.chunks(RUN)) {
        sink.mutations(&MutationRun {
            vbid: Vbid(0),
            vbuuid: Vbuuid(1),
            epoch: 0,
            snapshot: Snapshot { start: Seqno(0), end: Seqno(u64::MAX) },
            history: false,
            mutations: run,
        })
        .map_err(|error| error.error)?;
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

/// A mutation for each value, one after the other.
fn packets(values: &[Vec<u8>]) -> Result<Vec<u8>, Error> {
    let mut packets = Vec::new();
    for (value, seqno) in values.iter().zip(1..) {
        let mutation = Mutation {
            seqno: Seqno(seqno),
            rev_seqno: RevSeqno(1),
            cas: Cas(1_767_225_600_000_000_000 + (seqno << 16)),
            datatype: Datatype::JSON.with(Datatype::SNAPPY),
            key: b"\0key-000000000000000",
            value,
            ..Mutation::default()
        };
        mutation.encode(StreamAddress::default(), &mut packets)?;
    }
    Ok(packets)
}

fn parse(mut packets: &[u8]) -> Result<Vec<MutationView<'_>>, Error> {
    let mut mutations = Vec::new();
    while !packets.is_empty() {
        let (mutation, rest) =
            MutationView::parse(packets, MAX_BODY_LEN, true).ok_or("no mutation")?;
        mutations.push(mutation);
        packets = rest;
    }
    Ok(mutations)
}
