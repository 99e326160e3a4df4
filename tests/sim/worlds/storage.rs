//! What survives a reader: rows and checkpoint, stored together.

use std::collections::BTreeSet;

use dcp_consumer::{CheckpointStore as _, Error, MemoryStore};
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::Vbid;
use rand::Rng;
use rand::rngs::StdRng;

use crate::readers::Log;
use crate::rows::Table;

/// How many pairs are kept behind the newest, for a reader that is taken back.
const KEPT: usize = 6;

/// Rows, and the checkpoint they go up to.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) table: Table,
    /// Collections of the filter, where it names any.
    pub(crate) ids: Option<BTreeSet<u32>>,
    /// Writes before it are not the reader's, who began later.
    pub(crate) since: u64,
}

impl Pair {
    /// What it has of some vBuckets.
    pub(crate) fn of(self, vbids: &[Vbid]) -> Self {
        let checkpoint = self.checkpoint.restricted_to(vbids.iter().copied());
        Self { checkpoint, table: self.table.of(vbids), ..self }
    }
}

/// What one reader has stored, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Storage {
    pairs: Vec<Pair>,
    /// The newest checkpoint, where it is decided who may save.
    kept: MemoryStore,
    /// What a crash has made of the newest checkpoint while it was written.
    torn: Option<Vec<u8>>,
    /// Of a reader in micro-batches.
    pub(crate) batches: Log,
    /// What the reader did that it must not.
    pub(crate) violation: Option<String>,
}

impl Storage {
    /// Stores what a reader has that goes on and on, unless another one is further.
    pub(crate) fn save(&mut self, pair: Pair) -> Result<(), Error> {
        self.kept.save(&pair.checkpoint)?;
        self.store(pair);
        Ok(())
    }

    /// Lets the newest checkpoint be what the next one is held against.
    fn settle(&mut self) {
        self.kept = MemoryStore::default();
        if let Some(newest) = self.pairs.last() {
            self.kept.save(&newest.checkpoint).expect("a first one");
        }
    }

    pub(crate) fn store(&mut self, pair: Pair) {
        if let Err(wrong) = pair.table.check(&pair.checkpoint) {
            self.violation.get_or_insert(format!("stored a checkpoint that is off: {wrong}"));
        }
        if self.pairs.len() > KEPT {
            self.pairs.remove(0);
        }
        self.pairs.push(pair);
    }

    /// Stores what a member has of its vBuckets, beside what others have of theirs.
    pub(crate) fn save_part(&mut self, part: Pair, vbids: &[Vbid]) -> Result<(), Error> {
        let uuid = part.checkpoint.bucket_uuid();
        let Some(whole) = self.newest().filter(|pair| pair.checkpoint.bucket_uuid() == uuid) else {
            return self.save(part);
        };
        let others = whole.checkpoint.positions().map(|(vbid, _)| vbid);
        let mut checkpoint =
            whole.checkpoint.restricted_to(others.filter(|vbid| !vbids.contains(vbid)));
        let mut table = whole.table.clone();
        table.replace(vbids, part.table);
        if let Err(wrong) = checkpoint.merge(&part.checkpoint) {
            self.violation.get_or_insert(format!("the parts of members do not fit: {wrong}"));
        }
        self.save(Pair { checkpoint, table, ..part })
    }

    pub(crate) fn newest(&self) -> Option<&Pair> {
        self.pairs.last()
    }

    pub(crate) fn any(&self, rng: &mut StdRng) -> Option<&Pair> {
        if self.pairs.is_empty() {
            return None;
        }
        self.pairs.get(rng.random_range(0..self.pairs.len()))
    }

    /// The newest pair whose checkpoint can be read, as a new process reads it. A damaged one that
    /// is taken for whole is gone on from.
    pub(crate) fn load(&mut self) -> Option<Pair> {
        if let Some(json) = self.torn.take() {
            match Checkpoint::from_json(&json) {
                Err(_) => drop(self.pairs.pop()),
                Ok(checkpoint) => {
                    if let Some(pair) = self.pairs.last_mut() {
                        pair.checkpoint = checkpoint;
                    }
                }
            }
            self.settle();
        }
        let mut pair = self.newest()?.clone();
        let json = pair.checkpoint.to_json();
        pair.checkpoint = Checkpoint::from_json(json.as_bytes()).expect("what was written");
        Some(pair)
    }

    /// Takes the reader back to what it had before.
    pub(crate) fn go_back(&mut self, rng: &mut StdRng) {
        let left = if self.pairs.is_empty() { 0 } else { rng.random_range(1..=self.pairs.len()) };
        self.pairs.truncate(left);
        self.settle();
    }

    /// Loses everything.
    pub(crate) fn lose(&mut self) {
        self.pairs.clear();
        self.kept = MemoryStore::default();
        self.batches = Log::default();
        self.torn = None;
    }

    /// Damages the newest checkpoint, as a crash while it is written does where a store is not
    /// atomic.
    pub(crate) fn tear(&mut self, rng: &mut StdRng) {
        let Some(newest) = self.newest() else { return };
        let mut json = newest.checkpoint.to_json().into_bytes();
        if rng.random_bool(0.3) {
            json.truncate(rng.random_range(0..json.len()));
        } else {
            // Another digit in some number is still well-formed JSON.
            let is_digit = |&at: &usize| json[at].is_ascii_digit() && json[at] != b'0';
            let digits: Vec<usize> = (0..json.len()).filter(is_digit).collect();
            let at = digits[rng.random_range(0..digits.len())];
            json[at] = if json[at] == b'9' { b'8' } else { json[at] + 1 };
        }
        self.torn = Some(json);
    }
}
