//! How far a data folder has a copy of a vBucket.

use dcp_wire::Seqno;

/// What a data folder has of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Generation of the disk image that was stored.
    pub(super) generation: u64,
    pub(super) seqno: Seqno,
}

/// How far a data folder has a copy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Storing {
    /// `None` if there is no folder, or it has nothing of use.
    stored: Option<Stored>,
    /// Overwritten versions there was no more room for, each after what replaced it. Until the
    /// folder has that, it needs the version.
    let_go: Vec<(Seqno, Seqno)>,
    /// Versions that are to leave the folder.
    leaving: Vec<Seqno>,
}

impl Storing {
    /// Up to where the folder has the copy.
    pub(super) fn seqno(&self) -> Seqno {
        self.stored.map_or(Seqno::ZERO, |stored| stored.seqno)
    }

    /// What the folder has is of no use.
    pub(super) fn begin_anew(&mut self) {
        self.stored = None;
    }

    /// There is no more room for these versions, each after what replaced it.
    pub(super) fn let_go(&mut self, versions: Vec<(Seqno, Seqno)>) {
        self.let_go.extend(versions);
    }

    /// The copy went back to `to`: seqnos above it are given again.
    pub(super) fn go_back(&mut self, to: Seqno) {
        self.stored = None;
        self.let_go.retain(|&(by, _)| by <= to);
    }

    /// The versions the folder no longer needs when it has everything up to `seqno`.
    pub(super) fn leaving(&mut self, seqno: Seqno) -> &mut Vec<Seqno> {
        let leaving = self.let_go.extract_if(.., |&mut (by, _)| by <= seqno);
        self.leaving.extend(leaving.map(|(_, version)| version));
        &mut self.leaving
    }

    /// What the folder has, unless that is another generation of the disk image.
    pub(super) fn known(&self, generation: u64) -> Option<Stored> {
        self.stored.filter(|known| known.generation == generation)
    }

    /// The folder has this, and nothing that was to leave.
    pub(super) fn note(&mut self, stored: Stored) {
        self.stored = Some(stored);
        self.leaving.clear();
    }
}
