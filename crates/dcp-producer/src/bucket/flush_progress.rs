//! Up to where a data folder has a copy of a vBucket.

use dcp_wire::Seqno;

/// State of a copy in a data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flushed {
    /// Generation of the disk image that was stored.
    pub(super) generation: u64,
    pub(super) seqno: Seqno,
}

/// Progress of storing a copy in a data folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlushProgress {
    /// `None` without a folder, or if its contents cannot be used.
    stored: Option<Flushed>,
    /// Overwritten versions that the history no longer keeps, each behind the seqno of its
    /// replacement. The folder needs the version until it has the replacement.
    superseded: Vec<(Seqno, Seqno)>,
    /// Versions to delete from the folder.
    deletable: Vec<Seqno>,
}

impl FlushProgress {
    /// Seqno up to which the folder has the copy.
    pub(super) fn seqno(&self) -> Seqno {
        self.stored.map_or(Seqno::ZERO, |stored| stored.seqno)
    }

    /// Discards what the folder has: everything is stored again.
    pub(super) fn reset(&mut self) {
        self.stored = None;
    }

    /// Notes versions that the history no longer keeps, each behind the seqno of its replacement.
    pub(super) fn superseded(&mut self, versions: Vec<(Seqno, Seqno)>) {
        self.superseded.extend(versions);
    }

    /// Notes that the copy rolled back to `to`: seqnos above it are assigned again.
    pub(super) fn roll_back(&mut self, to: Seqno) {
        self.stored = None;
        self.superseded.retain(|&(by, _)| by <= to);
    }

    /// Versions that the folder no longer needs once it has everything up to `seqno`.
    pub(super) fn deletable(&mut self, seqno: Seqno) -> &mut Vec<Seqno> {
        let deletable = self.superseded.extract_if(.., |&mut (by, _)| by <= seqno);
        self.deletable.extend(deletable.map(|(_, version)| version));
        &mut self.deletable
    }

    /// State in the folder, unless it is of another generation of the disk image.
    pub(super) fn known(&self, generation: u64) -> Option<Flushed> {
        self.stored.filter(|known| known.generation == generation)
    }

    /// Notes that the folder has this state, and that the versions to delete are deleted.
    pub(super) fn note(&mut self, stored: Flushed) {
        self.stored = Some(stored);
        self.deletable.clear();
    }
}
