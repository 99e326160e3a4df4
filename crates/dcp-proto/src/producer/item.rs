//! Items of a checkpoint, shared with the storage that holds it.

use std::sync::Arc;

use super::Item;

/// Places of consecutive seqnos, each with its item unless a later one replaced it.
pub type Slots = Vec<Option<Arc<Item>>>;

/// Items of a checkpoint in seqno order, as runs of slots that storage shares until it changes
/// them: reading them counts users of runs, not of items.
#[derive(Clone, Debug, Default)]
pub struct CheckpointItems {
    runs: Vec<Arc<Slots>>,
    /// Slots at the beginning of the first run that are not meant.
    skip: usize,
}

impl CheckpointItems {
    /// What is in `runs`, but for the first `skip` slots of the first one.
    #[must_use]
    pub const fn new(runs: Vec<Arc<Slots>>, skip: usize) -> Self {
        Self { runs, skip }
    }

    /// The items.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<Item>> {
        let first = self.runs.first().and_then(|run| run.get(self.skip..)).unwrap_or_default();
        let others = self.runs.get(1..).unwrap_or_default();
        first.iter().chain(others.iter().flat_map(|run| run.iter())).flatten()
    }

    /// The last item; `None` without any.
    #[must_use]
    pub fn last(&self) -> Option<&Arc<Item>> {
        self.iter().next_back()
    }

    /// The runs and how many slots of the first one are not meant.
    pub(super) fn into_parts(self) -> (Vec<Arc<Slots>>, usize) {
        (self.runs, self.skip)
    }
}

impl FromIterator<Arc<Item>> for CheckpointItems {
    fn from_iter<I: IntoIterator<Item = Arc<Item>>>(items: I) -> Self {
        Self::new(vec![Arc::new(items.into_iter().map(Some).collect())], 0)
    }
}

impl PartialEq for CheckpointItems {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for CheckpointItems {}
