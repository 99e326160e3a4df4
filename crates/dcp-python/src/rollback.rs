//! Explains how a server responds to a stream request.

use dcp_producer_proto::rollback::{RollbackQuery, Verdict};
use dcp_producer_proto::{Explanation, FailoverTable};
use dcp_proto::Snapshot;
use dcp_wire::message::FailoverEntry;
use dcp_wire::{Seqno, Vbuuid};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{ANY, Arguments, integer, integer_in, wrong_type};
use crate::classes::{Class, make};
use crate::error::Failure;

/// The failover table of a log. An invalid log is refused rather than repaired: the result would be
/// about a different log.
fn failover_table(log: &[(u64, u64)]) -> Result<FailoverTable, Failure> {
    let wrong = |message: String| Err(Failure::option(&["failover_log"], message));
    if log.is_empty() {
        return wrong("must have at least one entry".to_owned());
    }
    if log.len() > FailoverTable::CAPACITY {
        let most = FailoverTable::CAPACITY;
        return wrong(format!("has at most {most} entries, not {}", log.len()));
    }
    if let Some(at) = log.iter().position(|&(vbuuid, _)| vbuuid == 0) {
        return wrong(format!("entry {at} has vbuuid 0, which names no branch"));
    }
    let seqnos = log.iter().map(|&(_, seqno)| seqno);
    for ((at, newer), older) in seqnos.clone().enumerate().zip(seqnos.skip(1)) {
        if older > newer {
            return wrong(format!(
                "entry {} begins at seqno {older}, after the entry before it, at \
                 {newer}: give the newest first",
                at + 1
            ));
        }
    }
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    // At least one entry is kept, so neither the branch nor the seqno below is used.
    let (table, _dropped) = FailoverTable::load(log.iter().map(entry), Vbuuid(1), Seqno::ZERO);
    Ok(table)
}

/// Entries of a failover log, newest first.
fn failover_log(arguments: &Arguments<'_>) -> PyResult<Vec<(u64, u64)>> {
    let name = "failover_log";
    let Some(given) = arguments.optional(name)? else { return Ok(Vec::new()) };
    let wrong = || wrong_type(name, &given, "pairs of a vbuuid and a seqno");
    let entry = |pair: PyResult<Bound<'_, PyAny>>| {
        let (vbuuid, seqno): (Bound<'_, PyAny>, Bound<'_, PyAny>) =
            pair.and_then(|pair| pair.extract()).map_err(|_| wrong())?;
        Ok((
            integer_in(name, "vbuuid: ", &vbuuid, &ANY)?,
            integer_in(name, "seqno: ", &seqno, &ANY)?,
        ))
    };
    given.try_iter().map_err(|_| wrong())?.map(entry).collect()
}

static EXPLANATION: Class = Class::new("dcp_rs.debug", "RollbackExplanation");

/// The options are those of `dcp_rs.debug.explain_rollback`.
#[pyfunction]
pub(crate) fn explain_rollback(options: Bound<'_, PyDict>) -> PyResult<Bound<'_, PyAny>> {
    let py = options.py();
    let arguments = Arguments::new(options);
    let number = |name, default| arguments.integer(name, default, ANY);
    let seqno = |name| number(name, 0).map(Seqno);
    let table = failover_table(&failover_log(&arguments)?)?;
    let purge_seqno = seqno("purge_seqno")?;
    let ignores_purge = arguments.flag("ignore_purged_tombstones", false)?;
    let collections = arguments.optional("collections_high_seqno")?;
    let collections =
        collections.map(|seqno| integer("collections_high_seqno", &seqno, &ANY)).transpose()?;
    let query = RollbackQuery {
        table: &table,
        high_seqno: seqno("high_seqno")?,
        purge_seqno: if ignores_purge { Seqno::ZERO } else { purge_seqno },
        start_seqno: seqno("start_seqno")?,
        vbuuid: Vbuuid(number("vbuuid", 0)?),
        snapshot: Snapshot { start: seqno("snapshot_start")?, end: seqno("snapshot_end")? },
        strict_vbuuid: arguments.flag("strict_vbuuid", false)?,
        client_purge_seqno: seqno("client_purge_seqno")?,
        collection_high_seqno: collections.map(Seqno),
    };
    let explanation = Explanation::new(query, Seqno(number("end_seqno", u64::MAX)?));
    let (status, seqno) = match explanation.verdict() {
        Verdict::Continue(_) => ("ok", None),
        Verdict::Rollback { seqno, .. } => ("rollback", Some(seqno.0)),
        Verdict::OutOfRange(_) => ("erange", None),
    };
    let reason = explanation.to_string();
    make!(EXPLANATION, py, { status: status, seqno: seqno, reason: reason })
}
