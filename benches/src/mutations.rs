//! Mutations that are in memory, decoded into record batches on one thread.

use std::time::Duration;

use dcp_arrow::{
    ArrowSink, BatchLimits, CollectionNames, DocumentTally, MalformedTally, TableOptions,
    TableSchema,
};
use dcp_proto::{BatchSink, ChangeSink, MutationRun, Snapshot};
use dcp_wire::message::{Mutation, MutationView, StreamAddress};
use dcp_wire::{Cas, Datatype, MAX_BODY_LEN, RevSeqno, Seqno, Vbid, Vbuuid};

use crate::Error;
use crate::drive::{BATCH_BYTES, BATCH_ROWS};
use crate::measure::ThreadClock;

/// Most mutations given to the sink at once, as by the connection machine.
const RUN: usize = 64;

/// Decodes a mutation for each value, `passes` times; the processor time that it takes.
///
/// # Errors
/// If a value is malformed, or a row is missing.
pub fn into_batches(
    values: &[Vec<u8>],
    datatype: Datatype,
    passes: usize,
    options: &TableOptions,
) -> Result<Duration, Error> {
    let schema = TableSchema::new(options)?;
    let mut sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
    let packets = packets(values, datatype)?;
    let mutations = parse(&packets)?;
    let mut rows = 0;
    let mut take = |sink: &mut ArrowSink| -> Result<(), Error> {
        let mut tally = DocumentTally::default();
        rows += std::hint::black_box(sink.take_batch()?.finish_counting(&mut tally)?).num_rows();
        if tally.malformed != MalformedTally::default() {
            return Err(format!("a document does not fit its columns: {tally:?}").into());
        }
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
fn packets(values: &[Vec<u8>], datatype: Datatype) -> Result<Vec<u8>, Error> {
    let mut packets = Vec::new();
    for (value, seqno) in values.iter().zip(1..) {
        let mutation = Mutation {
            seqno: Seqno(seqno),
            rev_seqno: RevSeqno(1),
            cas: Cas(1_767_225_600_000_000_000 + (seqno << 16)),
            datatype,
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
