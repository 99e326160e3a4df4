//! What the copies of a vBucket report about persisted seqnos.

use std::collections::BTreeMap;

use dcp_proto::consumer::Event;
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{Seqno, Vbid, Vbuuid};

/// One copy of a vBucket: its newest branch, and its persisted seqno. `None`: it did not answer, or
/// does not know the requested branch.
pub(crate) type Answer = Option<(Vbuuid, Seqno)>;

/// A node's answer about its copy.
pub(crate) const fn to_answer(observed: &ObservedSeqno) -> (Vbuuid, Seqno) {
    (observed.vbuuid, observed.persisted_seqno)
}

/// Seqno that all copies have persisted on this branch: 0 while one of them has another branch, or
/// does not answer.
pub(crate) fn on_all_disks(vbuuid: Vbuuid, answers: impl IntoIterator<Item = Answer>) -> Seqno {
    let of_one = |answer: Answer| match answer {
        Some((on, seqno)) if on == vbuuid => seqno,
        _ => Seqno::ZERO,
    };
    answers.into_iter().map(of_one).min().unwrap_or(Seqno::ZERO)
}

/// The observed seqnos among answers.
pub(crate) fn observed_seqnos(answers: Vec<Event>) -> BTreeMap<Vbid, ObservedSeqno> {
    let observed = answers.into_iter().filter_map(|answer| match answer {
        Event::ObservedSeqno(observed) => Some((observed.vbid, observed)),
        _ => None,
    });
    observed.collect()
}
