//! The history branch of a row.

use dcp_wire::{Seqno, Vbuuid};

use crate::FailoverLog;

/// The branch that holds the seqnos in `(above, up_to]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Branch {
    pub(super) vbuuid: Vbuuid,
    pub(super) above: Seqno,
    pub(super) up_to: Seqno,
}

impl Branch {
    /// Holds nothing, so that the first item looks its branch up.
    pub(super) const NONE: Self = Self { vbuuid: Vbuuid(0), above: Seqno::MAX, up_to: Seqno::ZERO };

    pub(super) fn of(log: &FailoverLog, seqno: Seqno) -> Self {
        let entry = log.branch_of(seqno);
        let newer = log.entries().iter().take_while(|newer| newer.vbuuid != entry.vbuuid);
        Self {
            vbuuid: entry.vbuuid,
            above: if entry.seqno < seqno { entry.seqno } else { Seqno::ZERO },
            up_to: newer.map(|newer| newer.seqno).min().unwrap_or(Seqno::MAX),
        }
    }
}
