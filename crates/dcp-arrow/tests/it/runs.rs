//! Runs of mutations, of which some are compressed.

use dcp_arrow::{ArrowSink, BatchLimits, TableOptions};
use dcp_proto::{BatchSink, ChangeSink, MutationRun, RunError};
use dcp_test::with;
use dcp_wire::message::{Mutation, MutationView, StreamAddress};
use dcp_wire::{Datatype, MAX_BODY_LEN, Seqno, snappy};

use crate::{CHANGE, bytes, numbers, sink, sink_with};

const JSON: Datatype = Datatype::JSON;
const PACKED: Datatype = JSON.with(Datatype::SNAPPY);

/// Gives the values to the sink as one run with seqnos from 1.
fn give(sink: &mut ArrowSink, values: &[(&[u8], Datatype)]) -> Result<(), RunError> {
    let mut packets = Vec::new();
    for ((value, datatype), seqno) in values.iter().zip(1..) {
        let (seqno, datatype) = (Seqno(seqno), *datatype);
        let mutation = Mutation { seqno, datatype, key: b"\0key", value, ..Mutation::default() };
        mutation.encode(StreamAddress::default(), &mut packets).unwrap();
    }
    let (mut mutations, mut rest) = (Vec::new(), packets.as_slice());
    while let Some((mutation, after)) = MutationView::parse(rest, MAX_BODY_LEN, true) {
        mutations.push(mutation);
        rest = after;
    }
    assert_eq!(mutations.len(), values.len());
    sink.mutations(&MutationRun {
        vbid: CHANGE.vbid,
        vbuuid: CHANGE.vbuuid,
        epoch: CHANGE.epoch,
        snapshot: CHANGE.snapshot,
        history: CHANGE.history,
        mutations: &mutations,
    })
}

/// The values and seqnos of the batch.
fn taken(sink: &mut ArrowSink) -> (Vec<Option<Vec<u8>>>, Vec<Option<i64>>) {
    let batch = sink.take_batch().unwrap().finish().unwrap();
    (bytes(&batch, "value"), numbers(&batch, "seqno"))
}

fn document(number: usize) -> Vec<u8> {
    format!("{{\"number\":{number},\"text\":\"{}\"}}", "abc".repeat(20 + number)).into_bytes()
}

#[test]
fn run_of_plain_and_compressed_documents_shows_each_in_its_row() {
    let documents: Vec<_> = (0..4).map(document).collect();
    let packed: Vec<_> = documents.iter().map(|value| snappy::compress(value).unwrap()).collect();
    let mut sink = sink(&TableOptions::default());
    // The second batch lies in the memory of the first.
    for _ in 0..2 {
        for _ in 0..2 {
            give(
                &mut sink,
                &[
                    (&packed[0], PACKED),
                    (&documents[1], JSON),
                    // The bit can outlive the value.
                    (b"", PACKED),
                    (&packed[2], PACKED),
                    (&packed[3], PACKED),
                ],
            )
            .unwrap();
        }
        let run = [&documents[0], &documents[1], &Vec::new(), &documents[2], &documents[3]];
        let run = run.map(|value| Some(value.clone()));
        let seqnos: Vec<_> = (1..=5).chain(1..=5).map(Some).collect();
        assert_eq!(taken(&mut sink), ([run.clone(), run].concat(), seqnos));
    }
}

#[test]
fn run_with_a_damaged_block_is_taken_up_to_it() {
    let (plain, other) = (document(1), document(2));
    let packed = snappy::compress(&other).unwrap();
    let mut sink = sink(&TableOptions::default());
    give(&mut sink, &[(&packed, PACKED)]).unwrap();
    let run: [(&[u8], _); 4] =
        [(&plain, JSON), (&packed, PACKED), (b"\xff\xff\xff\xff", PACKED), (&plain, JSON)];
    let RunError { taken: before, error } = give(&mut sink, &run).unwrap_err();
    assert_eq!(before, 2);
    assert!(error.to_string().contains("seqno 3: invalid snappy value"), "{error}");
    give(&mut sink, &[(&packed, PACKED), (&plain, JSON)]).unwrap();
    let values = [&other, &plain, &other, &other, &plain].map(|value| Some(value.clone()));
    assert_eq!(taken(&mut sink), (values.to_vec(), [1, 1, 2, 1, 2].map(Some).to_vec()));
}

#[test]
fn run_that_inflates_beyond_the_column_is_taken_up_to_its_end() {
    let value = document(0);
    let packed = snappy::compress(&value).unwrap();
    let limits = with(BatchLimits::default(), |o| o.max_column_bytes = 3 * value.len() + 1);
    let mut sink = sink_with(&TableOptions::default(), limits);
    let RunError { taken: before, error } =
        give(&mut sink, &[(packed.as_slice(), PACKED); 5]).unwrap_err();
    assert_eq!(before, 3);
    assert!(error.to_string().contains("the batch is full"), "{error}");
    assert_eq!(taken(&mut sink), (vec![Some(value); 3], [1, 2, 3].map(Some).to_vec()));
}

#[test]
fn run_refuses_an_inflated_length_over_the_limit_too() {
    let value = document(0);
    let packed = snappy::compress(&value).unwrap();
    let limits = with(BatchLimits::default(), |o| o.max_value_bytes = value.len() - 1);
    let mut sink = sink_with(&TableOptions::default(), limits);
    let RunError { taken, error } =
        give(&mut sink, &[(&value, JSON), (&packed, PACKED)]).unwrap_err();
    assert_eq!((taken, sink.rows()), (1, 1));
    assert!(error.to_string().contains("declared length exceeds the limit"), "{error}");
}
