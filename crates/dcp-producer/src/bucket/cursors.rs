//! Where the streams of a vBucket stand in its memory.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use dcp_proto::producer::Cursor;
use dcp_wire::Seqno;

/// The cursors of the streams of one copy of a vBucket; a stream that ends takes its cursor along.
#[derive(Debug, Default)]
pub(crate) struct Cursors(Mutex<Vec<Weak<Cursor>>>);

impl Cursors {
    pub(super) fn register(&self, cursor: &Arc<Cursor>) {
        let mut cursors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.retain(|cursor| cursor.strong_count() > 0);
        cursors.push(Arc::downgrade(cursor));
    }

    /// Position of the cursor that has read least; [`Seqno::MAX`] without any. With
    /// `only_undroppable` those count that must not be left behind.
    pub(super) fn slowest(&self, only_undroppable: bool) -> Seqno {
        let cursors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let live = cursors.iter().filter_map(Weak::upgrade);
        let counted = live.filter(|cursor| !only_undroppable || !cursor.is_droppable());
        counted.map(|cursor| cursor.position()).min().unwrap_or(Seqno::MAX)
    }
}
