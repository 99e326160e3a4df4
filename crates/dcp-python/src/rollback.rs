//! What a server answers to a client that wants to go on.

use dcp_proto::Snapshot;
use dcp_proto::producer::rollback::{RollbackQuery, Verdict};
use dcp_proto::producer::{Explanation, FailoverTable};
use dcp_wire::message::FailoverEntry;
use dcp_wire::{Seqno, Vbuuid};
use pyo3::prelude::*;

use crate::error::{Failure, Kind};

/// The arguments of `dcp_rs.debug.explain_rollback`, checked for their types.
#[derive(Debug, FromPyObject)]
pub(crate) struct RollbackArgs {
    failover_log: Vec<(u64, u64)>,
    high_seqno: u64,
    vbuuid: u64,
    start_seqno: u64,
    snapshot_start: u64,
    snapshot_end: u64,
    end_seqno: u64,
    purge_seqno: u64,
    client_purge_seqno: u64,
    collections_high_seqno: Option<u64>,
    strict_vbuuid: bool,
    ignore_purged_tombstones: bool,
}

/// The failover table a log stands for. What no server could have written is refused rather than
/// repaired: the answer would be about another log than the one that was asked about.
fn failover_table(log: &[(u64, u64)]) -> Result<FailoverTable, Failure> {
    let wrong = |message: String| Err(Failure::new(Kind::Config, message));
    if log.is_empty() {
        return wrong("failover_log: must have at least one entry".to_owned());
    }
    if log.len() > FailoverTable::CAPACITY {
        let most = FailoverTable::CAPACITY;
        return wrong(format!("failover_log: has at most {most} entries, not {}", log.len()));
    }
    if let Some(at) = log.iter().position(|&(vbuuid, _)| vbuuid == 0) {
        return wrong(format!("failover_log: entry {at} has vbuuid 0, which names no branch"));
    }
    let seqnos = log.iter().map(|&(_, seqno)| seqno);
    for ((at, newer), older) in seqnos.clone().enumerate().zip(seqnos.skip(1)) {
        if older > newer {
            return wrong(format!(
                "failover_log: entry {} begins at seqno {older}, after the entry before it, at \
                 {newer}: give the newest first",
                at + 1
            ));
        }
    }
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    // There is an entry that is kept, so neither the branch nor the seqno below is used.
    let (table, _dropped) = FailoverTable::load(log.iter().map(entry), Vbuuid(1), Seqno::ZERO);
    Ok(table)
}

/// Status, seqno to roll back to, and reason.
#[pyfunction]
pub(crate) fn explain_rollback(
    request: RollbackArgs,
) -> PyResult<(&'static str, Option<u64>, String)> {
    let table = failover_table(&request.failover_log)?;
    let purge = if request.ignore_purged_tombstones { 0 } else { request.purge_seqno };
    let query = RollbackQuery {
        table: &table,
        high_seqno: Seqno(request.high_seqno),
        purge_seqno: Seqno(purge),
        start_seqno: Seqno(request.start_seqno),
        vbuuid: Vbuuid(request.vbuuid),
        snapshot: Snapshot {
            start: Seqno(request.snapshot_start),
            end: Seqno(request.snapshot_end),
        },
        strict_vbuuid: request.strict_vbuuid,
        client_purge_seqno: Seqno(request.client_purge_seqno),
        collection_high_seqno: request.collections_high_seqno.map(Seqno),
    };
    let explanation = Explanation::new(query, Seqno(request.end_seqno));
    let (status, seqno) = match explanation.verdict() {
        Verdict::Continue(_) => ("ok", None),
        Verdict::Rollback { seqno, .. } => ("rollback", Some(seqno.0)),
        Verdict::OutOfRange(_) => ("erange", None),
    };
    Ok((status, seqno, explanation.to_string()))
}
