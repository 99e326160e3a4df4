//! Up to where a data folder has a copy of a vBucket.

use dcp_wire::Seqno;

/// State of a copy in a data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Generation of the disk image that was stored.
    pub(super) generation: u64,
    pub(super) seqno: Seqno,
}

/// Progress of storing a copy in a data folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Storing {
    /// `None` without a folder, or if its contents cannot be used.
    stored: Option<Stored>,
    /// Overwritten versions that the history no longer keeps, each behind the seqno of its
    /// replacement. The folder needs the version until it has the replacement.
    let_go: Vec<(Seqno, Seqno)>,
    /// Versions to delete from the folder.
    leaving: Vec<Seqno>,
}

impl Storing {
    /// Seqno up to which the folder has the copy.
    pub(super) fn seqno(&self) -> Seqno {
        self.stored.map_or(Seqno::ZERO, |stored| stored.seqno)
    }

    /// Discards what the folder has: everything is stored again.
    pub(super) fn begin_anew(&mut self) {
        self.stored = None;
    }

    /// Notes versions that the history no longer keeps, each behind the seqno of its replacement.
    pub(super) fn let_go(&mut self, versions: Vec<(Seqno, Seqno)>) {
        self.let_go.extend(versions);
    }

    /// Notes that the copy rolled back to `to`: seqnos above it are assigned again.
    pub(super) fn go_back(&mut self, to: Seqno) {
        self.stored = None;
        self.let_go.retain(|&(by, _)| by <= to);
    }

    /// Versions that the folder no longer needs once it has everything up to `seqno`.
    pub(super) fn leaving(&mut self, seqno: Seqno) -> &mut Vec<Seqno> {
        let leaving = self.let_go.extract_if(.., |&mut (by, _)| by <= seqno);
        self.leaving.extend(leaving.map(|(_, version)| version));
        &mut self.leaving
    }

    /// State in the folder, unless it is of another generation of the disk image.
    pub(super) fn known(&self, generation: u64) -> Option<Stored> {
        self.stored.filter(|known| known.generation == generation)
    }

    /// Notes that the folder has this state, and that the versions to delete are deleted.
    pub(super) fn note(&mut self, stored: Stored) {
        self.stored = Some(stored);
        self.leaving.clear();
    }
}
